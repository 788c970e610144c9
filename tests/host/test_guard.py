"""The shim keeps a supervisor alive and the deadline kept, by counted seconds: real processes, stepped clocks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from host_edges import make_run, make_spec, python, supervised, wait_until, without_a_supervisor

from fleetd.clock import Moment
from fleetd.host import launch, rundir, tree
from fleetd.host.guard import DeadlineGuard, Due, SupervisorGuard
from fleetd.host.processes import identity_of, look, sight_of
from fleetd.host.rundir import Heartbeat
from fleetd.model import CutoffOrder
from policies.facts import RunKind

STUB = """
import fcntl, json, os, sys, time
run = sys.argv[1]
lock = open(run + "/lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
with open(run + "/heartbeat.json.new", "w") as file:
    json.dump({"boottime_seconds": time.clock_gettime(time.CLOCK_BOOTTIME), "pid": os.getpid()}, file)
os.rename(run + "/heartbeat.json.new", run + "/heartbeat.json")
with open(run + "/stub.json.new", "w") as file:
    json.dump({"pid": os.getpid(), "session": os.getsid(0), "folder": os.getcwd(), "environment": dict(os.environ)}, file)
os.rename(run + "/stub.json.new", run + "/stub.json")
time.sleep(120)
"""
USELESS = "raise SystemExit(1)"


@pytest.fixture
def release(tmp_path):
    """A release whose supervisor is a stub: takes the lock, beats once, sleeps."""

    def make(digest: str, code: str) -> None:
        folder = tmp_path / "releases" / digest / "fleetd" / "host"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "__init__.py").touch()
        (folder / "supervisor.py").write_text(code)

    make("stub", STUB)
    make("useless", USELESS)
    return tmp_path


@pytest.fixture
def run_of(release):
    """Run directories below the stub's root; every supervisor that was started is ended afterwards."""
    started: list[SupervisorGuard] = []

    def make(digest: str = "stub", attempt: int = 1):
        paths = make_run(release, replace(make_spec(python("pass"), run_id="r1"), release_digest=digest))
        watcher = SupervisorGuard(paths, attempt)
        started.append(watcher)
        return paths, watcher

    yield make
    for watcher in started:
        for pid in watcher.pids:
            end(pid)


def end(pid: int) -> None:
    """End a supervisor that this test started; it may have ended by itself, and was never waited for."""
    try:
        tree.signal_one(identity_of(pid), signal.SIGKILL)
    except OSError:
        pass
    wait_until(lambda: sight_of(pid).state in ("Z", ""))


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def tick(self, watcher: SupervisorGuard, times: int, step_seconds: float = 0.5) -> None:
        for _ in range(times):
            self.seconds += step_seconds
            watcher.tick(self.seconds)


def test_a_run_without_a_supervisor_gets_one_after_five_counted_seconds(run_of):
    paths, watcher = run_of()
    clock = Clock()

    clock.tick(watcher, 10)
    assert watcher.starts == 0
    clock.tick(watcher, 1)
    wait_until((paths.root / "stub.json").exists)

    stub = json.loads((paths.root / "stub.json").read_text())
    assert {stub["pid"]} == watcher.pids
    assert stub["session"] != os.getsid(0), "detached: a session of its own"
    assert stub["session"] != stub["pid"], "and not its leader, so no terminal can become its own"
    assert stub["environment"]["PYTHONPATH"] == str(paths.root.parent.parent / "releases" / "stub")
    assert "FLEETD_TREE_TOKEN" not in stub["environment"]
    clock.tick(watcher, 40)
    assert (watcher.starts, watcher.is_alive, watcher.is_needless) == (1, True, True)


def test_a_suspended_machine_does_not_count_as_silence(run_of):
    _, watcher = run_of()
    clock = Clock()

    clock.tick(watcher, 4)
    clock.tick(watcher, 1, step_seconds=7200.0)

    assert watcher.starts == 0


def test_a_living_supervisor_is_left_alone(run_of):
    paths, watcher = run_of()
    clock = Clock()

    with supervised(paths):
        for beat in range(100):
            rundir.write_heartbeat(paths, Heartbeat(boottime_seconds=float(beat), pid=os.getpid()))
            clock.tick(watcher, 1)

    assert watcher.starts == 0


def test_a_silent_supervisor_is_verified_ended_and_replaced(run_of):
    paths, watcher = run_of()
    first = launch.start_supervisor(paths.root)
    watcher.pids.add(first)
    wait_until((paths.root / "stub.json").exists)
    rundir.write_record(paths.supervisor, rundir.ProgramRecord(identity=identity_of(first), at=datetime.now(timezone.utc)))
    clock = Clock()

    clock.tick(watcher, 60)
    assert look(identity_of(first)).is_verified, "not before 30 s"
    clock.tick(watcher, 5)
    wait_until(lambda: sight_of(first).state in ("Z", ""))
    (paths.root / "stub.json").unlink()
    clock.tick(watcher, 2)

    assert watcher.starts == 1
    wait_until((paths.root / "stub.json").exists)


def test_a_silent_supervisor_that_cannot_be_verified_is_never_signalled(run_of):
    paths, watcher = run_of()
    first = launch.start_supervisor(paths.root)
    watcher.pids.add(first)
    wait_until((paths.root / "stub.json").exists)
    stranger = replace(identity_of(first), start_ticks=1)
    rundir.write_record(paths.supervisor, rundir.ProgramRecord(identity=stranger, at=datetime.now(timezone.utc)))

    Clock().tick(watcher, 200)

    assert look(identity_of(first)).is_verified
    assert watcher.starts == 0


def test_supervisors_that_end_before_their_first_heartbeat_are_started_ever_more_rarely(run_of):
    _, watcher = run_of("useless")
    clock = Clock()

    clock.tick(watcher, 2 * 300)

    assert watcher.starts == 1 + 1 + 1 + 1 + 3, "after 5, 10, 20, 40, then every 60 of 300 seconds"
    assert watcher.is_needless, "a shim with an empty tree may leave"


def test_a_supervisor_that_left_on_purpose_is_not_missed(run_of):
    paths, watcher = run_of()
    without_a_supervisor(paths)

    Clock().tick(watcher, 100)

    assert (watcher.starts, watcher.is_needless) == (0, True)


def test_what_an_observation_says_of_another_attempt_is_no_leave(run_of):
    paths, watcher = run_of(attempt=2)
    without_a_supervisor(paths)

    Clock().tick(watcher, 11)

    assert watcher.starts == 1


def test_a_program_that_cannot_be_executed_is_reported_to_who_started_it(tmp_path):
    with pytest.raises(FileNotFoundError):
        launch.start_detached(("/no/such/python",), {}, tmp_path / "log")


def test_a_release_that_is_not_there_falls_back_on_the_running_code(tmp_path):
    folder = launch.release_folder(tmp_path, "no-such-digest")

    assert (folder / "fleetd" / "host" / "shim.py").is_file()


# The deadline.

ANCHOR = Moment(now=datetime(2026, 9, 16, 12, 0, tzinfo=timezone.utc), boottime_seconds=1000.0)


@pytest.fixture
def timed(tmp_path):
    spec = make_spec(python("pass"), run_id="r1", grace_seconds=120.0)
    cutoff_at = ANCHOR.now + timedelta(seconds=600)
    spec = replace(spec, deadline=replace(spec.deadline, cutoff_at=cutoff_at, final_at=cutoff_at + timedelta(seconds=600)))
    paths = make_run(tmp_path, spec)
    return DeadlineGuard(paths, spec, ANCHOR)


def test_the_cutoff_is_kept_whoever_watches_and_asking_is_left_to_a_supervisor(timed):
    assert timed.due(1599.9, None, is_supervised=True) is Due.NOTHING
    assert timed.due(1600.0, None, is_supervised=True) is Due.KILL
    assert timed.due(1479.9, None, is_supervised=False) is Due.NOTHING
    assert timed.due(1480.0, None, is_supervised=False) is Due.ASK, "the cutoff minus the ceiling of the grace"
    assert timed.due(1600.0, None, is_supervised=False) is Due.KILL


def test_an_earlier_cutoff_stays_known_when_somebody_removes_its_order(timed):
    rundir.apply_cutoff(timed.paths, CutoffOrder(sequence=1, cutoff_at=ANCHOR.now + timedelta(seconds=300), because="test"))
    assert timed.due(1300.0, None, is_supervised=True) is Due.KILL
    timed.paths.cutoff.unlink()
    assert timed.due(1300.0, None, is_supervised=True) is Due.KILL


def test_the_last_stop_moment_of_a_supervisor_rules_after_its_death(timed):
    by_wall = Heartbeat(boottime_seconds=1100.0, pid=1, stop_at=ANCHOR.now + timedelta(seconds=570))
    by_boottime = replace(by_wall, stop_boottime_seconds=1550.0)

    assert timed.due(1569.0, by_wall, is_supervised=False) is Due.NOTHING
    assert timed.due(1570.0, by_wall, is_supervised=False) is Due.ASK
    assert timed.due(1550.0, by_boottime, is_supervised=False) is Due.ASK


def test_the_supervisors_pair_of_clocks_rules_over_ours(timed):
    """The wall clock was stepped before this shim started: the supervisor, which is older, knows that 900 s are left, not 600."""
    cutoff_at = timed.spec.deadline.cutoff_at
    beat = Heartbeat(boottime_seconds=1000.0, pid=1, cutoff_at=cutoff_at, cutoff_boottime_seconds=1900.0)

    assert timed.due(1899.0, beat, is_supervised=True) is Due.NOTHING
    assert timed.due(1900.0, beat, is_supervised=True) is Due.KILL

    moved = CutoffOrder(sequence=1, cutoff_at=cutoff_at - timedelta(seconds=100), because="slow validation")
    assert rundir.apply_cutoff(timed.paths, moved)[0]
    assert timed.due(1800.0, beat, is_supervised=True) is Due.KILL, "an order that came after the last heartbeat"


def test_damage_to_the_cutoff_does_not_move_it_back(timed):
    moved = CutoffOrder(sequence=1, cutoff_at=ANCHOR.now + timedelta(seconds=300), because="slow validation")
    rundir.apply_cutoff(timed.paths, moved)
    assert timed.cutoff_seconds(None) == 1300.0

    timed.paths.cutoff.write_text("{")

    assert timed.cutoff_seconds(None) == 1300.0


def test_an_evaluation_is_ended_at_the_final_deadline_and_a_serving_run_at_none(timed):
    evaluation = DeadlineGuard(timed.paths, replace(timed.spec, kind=RunKind.EVALUATE), ANCHOR)
    serving = DeadlineGuard(timed.paths, replace(timed.spec, kind=RunKind.SERVE, deadline=None), ANCHOR)

    assert (evaluation.due(2199.0, None, is_supervised=True), evaluation.due(2200.0, None, is_supervised=True)) == (Due.NOTHING, Due.KILL)
    assert serving.due(1e9, None, is_supervised=False) is Due.NOTHING


def test_a_heartbeat_of_another_boot_is_not_believed(tmp_path):
    paths = make_run(tmp_path, make_spec(python("pass"), run_id="r1"))
    beat = Heartbeat(boottime_seconds=7.0, pid=os.getpid(), cutoff_boottime_seconds=8.0, cutoff_at=ANCHOR.now)
    rundir.write_heartbeat(paths, beat)
    old = replace(identity_of(os.getpid()), boot_id="the boot before")
    rundir.write_record(paths.supervisor, rundir.ProgramRecord(identity=old, at=ANCHOR.now))
    assert SupervisorGuard(paths, 1).fresh_beat is None

    rundir.write_program(paths.supervisor, ANCHOR.now)

    assert SupervisorGuard(paths, 1).fresh_beat == beat
