"""Bytes of a tree: anonymous and shared memory count, page cache does not, shared pages count once near the line."""

from __future__ import annotations

import os
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from host_edges import python

from fleetd.host import meters
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


class FakeNvml:
    """The calls of pynvml that meters makes, with one process per device as given."""

    class NVMLError(Exception):
        pass

    def __init__(self, *devices: dict[int, int | None], broken: bool = False) -> None:
        self.devices, self.broken = devices, broken

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.devices[handle].items()]

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA GB10"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        raise self.NVMLError("Not Supported")


@pytest.fixture
def nvml(monkeypatch):
    def use(fake):
        monkeypatch.setattr(meters, "_loaded", [fake])
        monkeypatch.setattr(meters, "sees_machine_pids", lambda: True)

    return use


def device_bytes_of_this_process() -> int | None:
    return meters.accelerator_bytes((member(os.getpid()),), meters.device_bytes_by_pid())


def test_device_bytes_of_our_processes_add_up_over_devices(nvml):
    nvml(FakeNvml({os.getpid(): 100, 1: 7}, {os.getpid(): 20}))

    assert device_bytes_of_this_process() == 120


def test_a_tree_without_a_device_process_uses_zero_bytes_of_it(nvml):
    nvml(FakeNvml({1: 7}))

    assert device_bytes_of_this_process() == 0


def test_what_a_device_does_not_say_is_unknown(nvml):
    nvml(FakeNvml({os.getpid(): None}))
    assert device_bytes_of_this_process() is None

    nvml(FakeNvml({1: 7}, broken=True))
    assert device_bytes_of_this_process() is None

    nvml(None)
    assert device_bytes_of_this_process() is None


def test_in_a_container_that_does_not_share_the_machines_pids_nothing_found_proves_nothing(nvml, monkeypatch):
    nvml(FakeNvml({1: 7}))
    monkeypatch.setattr(meters, "sees_machine_pids", lambda: False)

    assert device_bytes_of_this_process() is None


def test_a_device_without_a_total_of_its_own_is_named_all_the_same(nvml):
    nvml(FakeNvml({}))

    assert meters.accelerator_names() == ("NVIDIA GB10",)
