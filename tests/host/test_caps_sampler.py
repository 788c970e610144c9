"""The sampler: what counts, what it costs, how soon a growing tree is seen, with a cgroup of its own and without any."""

from __future__ import annotations

import functools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from host_edges import python
from host_runs import WAIT_SECONDS, HostRun, needs_root, spec_for, wait_for

from fleetd.host import cgroups, meters, rundir, sampler, tree
from fleetd.host.cgroups import Group
from fleetd.host.observe import AttemptWatch
from fleetd.host.processes import identity_of
from fleetd.host.sampler import Sampler
from fleetd.host.tree import Member
from fleetd.model import CapPart, Caps
from policies.facts import MIB, CapGrade, Reason, RunState

CAPS = Caps(host_bytes=200 * MIB, accelerator_bytes=MIB, floor_bytes=0)
SHARING = """
import mmap, os, sys
shared = mmap.mmap(-1, 64 * 2**20)
shared[:] = b"x" * len(shared)
if os.fork() == 0:
    for offset in range(0, len(shared), 4096):
        shared[offset]
os.write(1, f"{os.getpid()}\\n".encode())
os.read(0, 1)
"""
GROWING = """
import os
held = []
os.write(1, b"0\\n")
while os.read(0, 1) == b"m":
    held.append(bytearray(b"x" * (80 * 2**20)))
    os.write(1, b"more\\n")
"""
CACHING = """
import os, sys
with open(sys.argv[1], "wb") as file:
    for _ in range(100):
        file.write(b"x" * 2**20)
    os.fsync(file.fileno())
os.write(1, b"done\\n")
os.read(0, 1)
"""
FORKING = """
import os, signal, time
while not os.path.exists(os.environ["FLEETD_RUN_DIR"] + "/go"):
    time.sleep(0.02)
if os.fork() == 0:
    os.setsid()
    held = b"x" * (150 * 2**20)
    time.sleep(600)
time.sleep(600)
"""


@pytest.fixture
def group() -> Iterator[Group]:
    made, part = cgroups.create(f"captest-{os.getpid()}-{secrets.token_hex(4)}", 400 * MIB)
    if part.grade is not CapGrade.ENFORCED:
        cgroups.remove(made)
        pytest.skip(f"no cgroup with a limit is to be had here: {part.means}")
    yield made
    assert cgroups.remove(made)


@contextmanager
def running(code: str, *arguments: str, group: Group | None = None) -> Iterator[tuple[subprocess.Popen[bytes], tuple[Member, ...]]]:
    child = subprocess.Popen(
        python(code, *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, preexec_fn=None if group is None else lambda: cgroups.join(group),
    )
    assert child.stdout is not None
    try:
        pids = {child.pid, *(pid for pid in (int(child.stdout.readline()),) if pid)} if code is not CACHING else {child.pid}
        if code is SHARING:
            pids.add(int(child.stdout.readline()))
        yield child, tuple(Member(identity=identity_of(pid), proofs=()) for pid in sorted(pids))
    finally:
        child.communicate(b"\n\n")


def grow(child: subprocess.Popen[bytes], said: bytes = b"more\n") -> None:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"m")
    child.stdin.flush()
    assert child.stdout.readline() == said


def test_a_cgroup_counts_shared_memory_once_and_needs_no_proportional_shares(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meters, "_proportional_bytes", lambda member: pytest.fail("a proportional share was read"))
    with running(SHARING, group=group) as (_, members):
        seen = Sampler(Caps(host_bytes=64 * MIB, accelerator_bytes=MIB, floor_bytes=0)).look(members, group.encode(), 1.0)

    assert len(members) == 2 and seen.host_bytes is not None
    assert 64 * MIB <= seen.host_bytes < 90 * MIB and "cgroup" in seen.means


def test_page_cache_in_a_cgroup_does_not_count(group: Group, tmp_path: Path) -> None:
    with running(CACHING, str(tmp_path / "big.bin"), group=group) as (child, members):
        assert child.stdout is not None and child.stdout.readline() == b"done\n"
        seen = Sampler(CAPS).look(members, group.encode(), 1.0)
        peak_bytes = cgroups.peak_bytes(group)

    assert peak_bytes is not None and peak_bytes > 90 * MIB, "the kernel charged the cache to the group"
    assert seen.host_bytes is not None and seen.host_bytes < 30 * MIB


def test_a_file_in_shared_memory_counts_although_nobody_has_mapped_it(group: Group) -> None:
    file = Path("/dev/shm") / f"captest-{os.getpid()}"
    try:
        with running(CACHING, str(file), group=group) as (child, members):
            assert child.stdout is not None and child.stdout.readline() == b"done\n"
            seen = Sampler(CAPS).look(members, group.encode(), 1.0)
    finally:
        file.unlink()

    assert seen.host_bytes is not None and seen.host_bytes > 90 * MIB


def test_a_member_that_left_the_cgroup_is_counted_beside_it(group: Group) -> None:
    with running(GROWING) as (child, members):
        grow(child)
        seen = Sampler(CAPS).look(members, group.encode(), 1.0)

    assert seen.host_bytes is not None and seen.host_bytes > 80 * MIB


def test_growth_between_two_looks_is_seen_by_a_peek(group: Group) -> None:
    for cgroup in (None, group):
        with running(GROWING, group=cgroup) as (child, members):
            watched = Sampler(CAPS)
            watched.look(members, None if cgroup is None else cgroup.encode(), 1.0)
            assert not watched.peek(1.1)
            grow(child)
            assert not watched.peek(1.2), "80 MiB are below the line of 190 MiB"
            grow(child)
            grow(child)
            assert watched.peek(1.3)


def test_the_faster_a_tree_grows_towards_its_line_the_sooner_it_is_peeked_at() -> None:
    with running(GROWING) as (child, members):
        watched = Sampler(CAPS)
        watched.look(members, None, 1.0)
        calm_seconds = watched.peek_seconds()
        grow(child)
        watched.peek(1.2)
        grow(child)
        watched.peek(1.4)
        hasty_seconds = watched.peek_seconds()

    assert calm_seconds == sampler.PEEK_SECONDS
    assert hasty_seconds is not None and sampler.PEEK_SECONDS_MIN <= hasty_seconds < sampler.PEEK_SECONDS


def test_proportional_shares_are_read_from_the_soft_line_on_and_not_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    proportional_bytes = meters._proportional_bytes
    monkeypatch.setattr(meters, "_proportional_bytes", lambda member: read.append(member.identity.pid) or proportional_bytes(member))
    with running(SHARING) as (_, members):
        far, near = Sampler(CAPS), Sampler(Caps(host_bytes=100 * MIB, accelerator_bytes=MIB, floor_bytes=0))

        assert far.look(members, None, 1.0).host_bytes >= 128 * MIB and not read, "128 MiB summed are below the line of 190 MiB"
        first, second = near.look(members, None, 1.0), near.look(members, None, 1.000001)

    assert 64 * MIB <= first.host_bytes < 95 * MIB and first.host_bytes == second.host_bytes, "the shared half counts once, and no line is reached"
    assert len(read) == 2, "once for each process"


def test_without_a_cgroup_a_child_born_since_the_last_scan_is_found_at_the_next_look() -> None:
    child = subprocess.Popen(python("import os; os.read(0, 1)"), stdin=subprocess.PIPE, env={**os.environ, "FLEETD_TREE_TOKEN": "captest-token"})
    try:
        while b"captest-token" not in Path(f"/proc/{child.pid}/environ").read_bytes():
            time.sleep(0.01)  # between fork and exec the child still has our environment
        found = tree.members("captest-token", None, None, None, among=frozenset({child.pid, os.getpid()}))
        assert [member.identity.pid for member in found] == [child.pid]
        assert tree.members("captest-token", None, None, None, among=frozenset({os.getppid()})) == ()
    finally:
        child.communicate(b"\n")


def test_a_file_in_memory_is_watched_between_two_looks_from_the_first_on() -> None:
    code = (
        "import os; file = os.memfd_create('x'); os.write(file, b'x' * 2**20); os.write(1, b'0\\n')\n"
        "while os.read(0, 1) == b'm':\n os.write(file, b'x' * (200 * 2**20)); os.write(1, b'more\\n')"
    )
    with running(code) as (child, members):
        watched = Sampler(CAPS)
        before_bytes = watched.look(members, None, 1.0).host_bytes
        grow(child)
        assert not watched.peek(1.0000001), "it has cost its share of the time"
        assert watched.peek(1e6) and before_bytes is not None and before_bytes < 100 * MIB


FORKS_WHEN_TOLD = """
import os
os.write(1, b"0\\n")
os.read(0, 1)
if os.fork() == 0:
    os.setsid()
    os.write(1, b"born\\n")
    os.read(0, 1)
    os._exit(0)
os.read(0, 1)
"""


def test_without_a_cgroup_whoever_was_born_between_two_looks_is_counted_at_the_next_peek(tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("1", "1")).create()
    assert rundir.create_attempt(run.paths) == 1
    with running(FORKS_WHEN_TOLD) as (child, (leader,)):
        record = rundir.AttemptRecord(
            attempt=1, identity=leader.identity, argv=leader.identity.argv,
            token="captest", cgroup=None, cap=CapPart(grade=CapGrade.ABSENT, means=""), session=child.pid, at=run.spec.created_at,
        )
        rundir.write_attempt(run.paths, record)
        watch = AttemptWatch(run.paths, 1, 0.0, None, MIB)
        watch.shim.look(identity_of(os.getpid()))  # whoever descends from the shim is of the tree
        watch.look(1.0, thorough=True)
        before = {member.identity.pid for member in watch.members}
        assert child.pid in before, "with it whatever else these tests have running: here they stand in for the shim"
        grow(child, b"born\n")

        assert watch.welcome(2.0)
        born = {member.identity.pid for member in watch.members} - before
        assert [psutil.Process(pid).ppid() for pid in born] == [child.pid]
        assert not watch.welcome(2.1), "not at every peek of a tree that grows fast"
        watch.close()
        assert child.stdin is not None
        child.stdin.write(b"mm")


ORDINARY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


def ordinary_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@functools.lru_cache(maxsize=1)
def ordinary_python() -> str | None:
    """A Python that an ordinary user may execute, and that finds this code: the one that runs the tests may lie in root's home."""
    for candidate in (sys.executable, "/usr/bin/python3"):
        tried = subprocess.run((*ORDINARY, candidate, "-c", "import os, sys, fleetd.host.supervisor; os.execv(sys.executable, ['python', '-c', ''])"),
                               env=ordinary_environment(), capture_output=True, check=False)
        if tried.returncode == 0:
            return candidate
    return None


@contextmanager
def unprivileged(*arguments: str, **changes: object) -> Iterator[HostRun]:
    """A run whose supervisor, and so its whole tree, belongs to an ordinary user."""
    python = ordinary_python()
    if python is None:
        pytest.skip("no Python here that an ordinary user may execute")
    root = Path(tempfile.mkdtemp(prefix="fleetd-captest-"))
    spec = spec_for(*arguments, **changes)
    run = HostRun(root / "host", replace(spec, argv=(python, *spec.argv[1:]))).create()
    for path in (root, *root.rglob("*")):
        os.chown(path, 65534, 65534)
    supervisor = subprocess.Popen(
        (*ORDINARY, python, "-m", "fleetd.host.supervisor", str(run.paths.root)), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True, env=ordinary_environment(),
    )
    try:
        yield run
    finally:
        run.clean()
        supervisor.wait(WAIT_SECONDS)
        shutil.rmtree(root)


@needs_root
def test_an_ordinary_users_training_is_sampled_saved_and_stopped_at_the_soft_line() -> None:
    caps = Caps(host_bytes=120 * MIB, accelerator_bytes=MIB, floor_bytes=MIB, soft_fraction=0.5)
    with unprivileged("5000", "0.05", "eat_at=5:70", "every=1000", caps=caps) as run:
        seen = run.settle()

    assert (seen.state, seen.reason) == (RunState.FAILED, Reason.MEMORY) and "asking was enough" in seen.detail
    assert seen.memory is not None, "and the cap is told as it was while the tree lived"
    assert seen.memory.parts["cgroup"].grade is CapGrade.ABSENT and "ermission" in seen.memory.parts["cgroup"].means
    assert seen.memory.parts["sampler"].grade is CapGrade.SAMPLED and seen.memory.parts["sampler"].means.startswith("RssAnon")
    assert seen.memory.host_bytes is None, "grades outlive the tree, figures do not"


@needs_root
def test_an_ordinary_users_child_that_leaves_the_session_and_eats_is_found_and_ended() -> None:
    caps = Caps(host_bytes=100 * MIB, accelerator_bytes=MIB, floor_bytes=MIB)
    argv = (sys.executable, "-S", "-c", FORKING)
    with unprivileged(argv=argv, contract=False, caps=caps) as run:
        run.wait(lambda seen: seen.memory and (seen.memory.host_bytes or 0) > 0)
        run.go()
        seen = run.settle()

    assert (seen.state, seen.reason) == (RunState.FAILED, Reason.MEMORY) and "force was needed" in seen.detail


def test_the_grades_of_the_cap_are_told_to_a_supervisor_that_never_saw_the_tree(tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("30", "0.05", "every=1000", "pause_at=25")).create()
    run.supervise()
    try:
        at_work = run.wait(lambda seen: seen if seen.memory and seen.memory.host_bytes else None)
        run.kill_program(run.paths.supervisor)
        run.go()
        wait_for(run.paths.attempt(1).exit.exists, WAIT_SECONDS, run.log_text)
        seen = run.settle()
    finally:
        run.clean()

    assert at_work.memory is not None and seen.memory is not None and seen.supervisor_pid != at_work.supervisor_pid
    assert seen.memory.parts["sampler"] == at_work.memory.parts["sampler"] and seen.memory.host_bytes is None


def test_a_start_that_the_host_refuses_uses_up_no_attempt_and_is_told(tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("10", "0.05")).create()
    broken = tmp_path / "python"
    code = f"import sys; sys.executable = {str(broken)!r}; from fleetd.host.supervisor import main; main([{str(run.paths.root)!r}])"
    supervisor = subprocess.Popen((sys.executable, "-c", code), stdin=subprocess.DEVNULL)
    try:
        run.wait(lambda seen: seen if any("nothing can be started here" in alarm for alarm in seen.alarms) else None)
        time.sleep(2.5)
        seen = run.seen()
        assert seen is not None and os.listdir(run.paths.attempts) == ["0001"], "the same folder waits for all tries"
        broken.symlink_to(sys.executable)
        assert run.settle().attempt == 1
    finally:
        run.clean()
        supervisor.wait(WAIT_SECONDS)
