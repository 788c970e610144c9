"""Bytes of a tree: anonymous and shared memory count, page cache does not, shared pages count once near the line."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager

from host_edges import python

from fleetd.host import meters, tmpfs
from fleetd.host.processes import identity_of
from fleetd.host.tree import Member
from policies.facts import MIB

HOLD = "import os\nheld = bytearray(b'x' * (64 * 2**20))\nos.write(1, b'held\\n')\nos.read(0, 1)"
CACHE = """
import mmap, os, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
for offset in range(0, len(mapped), 4096):
    mapped[offset]
os.write(1, b"held\\n")
os.read(0, 1)
"""
SHARE = """
import mmap, os
shared = mmap.mmap(-1, 64 * 2**20)
shared[:] = b"x" * len(shared)
if os.fork() == 0:
    for offset in range(0, len(shared), 4096):
        shared[offset]
    os.write(1, f"{os.getpid()}\\n".encode())
os.read(0, 1)
"""


@contextmanager
def holding(code: str, *arguments: str):
    child = subprocess.Popen(python(code, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield child, child.stdout.readline()
    finally:
        child.communicate(b"\n\n")


def member(pid: int) -> Member:
    return Member(identity=identity_of(pid), proofs=("leader",))


def test_anonymous_memory_counts():
    with holding(HOLD) as (child, _):
        memory = meters.tree_memory((member(child.pid),))

    assert 64 * MIB <= memory.host_bytes < 90 * MIB
    assert memory.process_count == 1


def test_page_cache_does_not_count(tmp_path):
    big = tmp_path / "big.bin"
    big.write_bytes(b"x" * (64 * MIB))

    with holding(CACHE, str(big)) as (child, _):
        memory = meters.tree_memory((member(child.pid),))

    assert memory.host_bytes < 40 * MIB


def test_memory_that_two_processes_share_counts_once_near_the_line():
    with holding(SHARE) as (child, line):
        both = (member(child.pid), member(int(line)))

        quick, exact = meters.tree_memory(both, near_bytes=1 << 40), meters.tree_memory(both, near_bytes=MIB)

    assert quick.host_bytes >= 128 * MIB, "far from the line the sum is good enough, and can only be too high"
    assert not quick.is_exact
    assert exact.is_exact
    assert 64 * MIB <= exact.host_bytes < 100 * MIB


def test_a_tree_of_which_nothing_can_be_read_is_unknown_not_zero():
    child = subprocess.Popen(python("pass"))
    gone = Member(identity=identity_of(os.getpid()), proofs=())
    child.wait()
    other = Member(identity=type(gone.identity)(boot_id="b", pid=os.getpid(), start_ticks=1, uid=0, argv=()), proofs=())

    assert meters.tree_memory((other,)).host_bytes is None
    assert meters.tree_memory(()).host_bytes is None
    assert meters.tree_memory((other, gone)).unreadable_count == 1


def test_the_host_says_how_much_it_has():
    assert 0 < meters.available_bytes() <= meters.total_bytes()


WRITE = """
import os, sys
kind = sys.argv[1]
file = os.memfd_create("hoard") if kind == "memfd" else os.open(kind, os.O_RDWR | os.O_CREAT)
for _ in range(64):
    os.write(file, b"x" * 2**20)
if len(sys.argv) > 2:
    reader = os.open(kind, os.O_RDONLY)
    os.close(file)
os.write(1, b"held\\n")
os.read(0, 1)
"""


def test_memory_that_no_resident_size_shows_is_found_by_its_open_descriptor():
    file = f"/dev/shm/fleetd-meters-{os.getpid()}"
    for kind, unmapped in (("memfd", True), (file, True)):
        with holding(WRITE, kind) as (child, _):
            members = (member(child.pid), member(child.pid))
            assert meters.tree_memory(members[:1]).host_bytes < 40 * MIB, "written, never mapped"
            assert (64 * MIB <= tmpfs.unmapped_bytes(members) < 70 * MIB) is unmapped, "once, however often it is open"
    os.unlink(file)


def test_a_file_in_memory_that_is_only_read_is_not_the_readers():
    file = f"/dev/shm/fleetd-meters-{os.getpid()}"
    try:
        with holding(WRITE, file, "read") as (child, _):
            assert tmpfs.unmapped_bytes((member(child.pid),)) == 0
    finally:
        os.unlink(file)


def test_a_mapped_file_in_memory_stands_in_the_resident_size_and_is_not_counted_again():
    code = (
        "import mmap, os; file = os.memfd_create('x'); os.ftruncate(file, 64 * 2**20); mapped = mmap.mmap(file, 64 * 2**20)\n"
        "mapped[:] = b'x' * len(mapped); os.write(1, b'held\\n'); os.read(0, 1)"
    )
    with holding(code) as (child, _):
        members = (member(child.pid),)
        assert meters.tree_memory(members).host_bytes >= 64 * MIB
        assert tmpfs.unmapped_bytes(members) == 0
