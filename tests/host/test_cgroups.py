"""The kernel's part of the cap: it bites, it is counted, it spares the page cache, and nothing of it is left behind."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys

import pytest
from host_edges import python

from fleetd.host import cgroups
from fleetd.host.cgroups import Group, decode_group
from policies.facts import MIB, CapGrade

HOLD = "import sys\nheld = [bytearray(b'x' * 2**20) for _ in range(int(sys.argv[1]))]\nprint(len(held))"

WRITE = """
import os, sys
with open(sys.argv[1], "wb") as file:
    for _ in range(150):
        file.write(b"x" * 2**20)
print(os.path.getsize(sys.argv[1]))
"""
AS_NOBODY = """
import os, signal, subprocess
from fleetd.host import cgroups
os.setgroups([])
os.setuid(65534)
print(cgroups.create("nobodys", 2**26))
"""


@pytest.fixture
def capped():
    name = f"captest-{os.getpid()}-{secrets.token_hex(4)}"
    if os.getuid() != 0 or cgroups.hierarchies()[0] is None:
        pytest.skip("only root with cgroup v1 memory can surely make one")
    group, part = cgroups.create(name, 64 * MIB)
    yield group, part
    assert cgroups.remove(group)
    assert not any(os.path.exists(folder) for folder in group.folders), "no cgroup is left behind"


def run_in(group: Group, argv: tuple[str, ...]) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(argv, preexec_fn=lambda: cgroups.join(group), capture_output=True, timeout=250)


def test_the_limit_is_read_back_and_said(capped):
    group, part = capped

    assert part.grade is CapGrade.ENFORCED
    assert "limit read back 64.0 MiB" in part.means
    assert decode_group(group.encode()) == group


def test_a_hog_dies_at_the_limit_and_the_kernels_counter_shows_it(capped):
    group, _ = capped

    done = run_in(group, python(HOLD, "200"))

    assert done.returncode == -signal.SIGKILL
    assert (cgroups.oom_kills(group) or 0) >= 1
    assert cgroups.peak_bytes(group) >= 60 * MIB


def test_what_stays_below_the_limit_lives(capped):
    group, _ = capped

    done = run_in(group, python(HOLD, "30"))

    assert (done.returncode, done.stdout) == (0, b"30\n")
    assert cgroups.oom_kills(group) == 0


def test_a_kill_by_somebody_else_is_not_counted_as_the_kernels(capped):
    group, _ = capped

    done = run_in(group, python("import os; os.kill(os.getpid(), 9)"))

    assert done.returncode == -signal.SIGKILL
    assert cgroups.oom_kills(group) == 0


def test_page_cache_does_not_count(capped, tmp_path):
    group, _ = capped

    done = run_in(group, python(WRITE, str(tmp_path / "big.bin")))

    assert (done.returncode, done.stdout) == (0, f"{150 * MIB}\n".encode())
    assert cgroups.oom_kills(group) == 0


def test_every_process_of_the_group_is_listed_and_can_be_ended_at_once(capped):
    group, _ = capped
    children = [subprocess.Popen(python("import time; time.sleep(60)"), preexec_fn=lambda: cgroups.join(group)) for _ in range(2)]
    try:
        assert set(cgroups.processes_in(group)) == {child.pid for child in children}
        if not cgroups.kill_all(group):
            pytest.skip("this kernel has no cgroup.kill")
        assert [child.wait(100) for child in children] == [-signal.SIGKILL] * 2
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_group_that_exists_already_is_never_taken_over(capped):
    group, _ = capped
    name = os.path.basename(group.memory).removeprefix(cgroups.PREFIX)

    second, part = cgroups.create(name, 64 * MIB)

    assert part.grade is CapGrade.ABSENT
    assert second.memory is None
    assert os.path.isdir(group.memory)


def test_a_group_with_a_living_process_is_not_removed(capped, monkeypatch):
    group, _ = capped
    monkeypatch.setattr(cgroups, "REMOVE_TRIES_MAX", 2)
    child = subprocess.Popen(python("import time; time.sleep(60)"), preexec_fn=lambda: cgroups.join(group))
    try:
        assert not cgroups.remove(group)
    finally:
        child.kill()
        child.wait()
        monkeypatch.undo()


def test_without_any_group_nothing_is_known_and_nothing_is_zero():
    assert cgroups.oom_kills(Group()) is None
    assert cgroups.peak_bytes(Group()) is None
    assert Group().encode() is None
    assert decode_group(None) == Group()


def test_where_no_hierarchy_is_visible_the_cap_is_absent_with_the_reason(monkeypatch):
    monkeypatch.setattr(cgroups, "hierarchies", lambda: (None, None))

    group, part = cgroups.create("nowhere", 64 * MIB)

    assert group == Group()
    assert part.grade is CapGrade.ABSENT
    assert part.means == "no cgroup is mounted"


def test_an_ordinary_user_gets_an_absent_cap_that_says_why():
    if os.getuid() != 0:
        pytest.skip("changes its user in a child")
    done = subprocess.run([sys.executable, "-c", AS_NOBODY], capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "ABSENT" in done.stdout
    assert "ermission" in done.stdout
