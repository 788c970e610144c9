"""What a supervisor sees of one attempt, over real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from host_runs import WAIT_SECONDS, wait_for

from fleetd import clock
from fleetd.host import cgroups, rundir
from fleetd.host.observe import AttemptWatch
from fleetd.host.processes import identity_of
from fleetd.host.rundir import AttemptRecord
from fleetd.model import CapPart
from fleetd.paths import RunPaths
from policies.facts import GIB, CapGrade, ProcessIdentity
from policies.identity import Standing

ORDERED = (sys.executable, "-c", "import time; time.sleep(60)")


def record_of(pid: int, identity: ProcessIdentity, *, is_executed: bool = False) -> AttemptRecord:
    return AttemptRecord(
        attempt=1, identity=identity, argv=ORDERED, resume="", resume_step=None, resume_digest=None, refused=(), token=f"token of {pid}",
        cgroup=cgroups.Group(memory=None).encode(), cap=CapPart(grade=CapGrade.ABSENT, means="none"), session=pid, is_executed=is_executed,
        at=clock.read().now,
    )


@pytest.mark.parametrize("runs_what_was_ordered", [True, False])
def test_an_exec_that_its_shim_never_recorded_is_recorded_by_the_watcher_if_it_runs_what_was_ordered(
    tmp_path: Path, *, runs_what_was_ordered: bool
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.attempt(1).root.mkdir(parents=True)
    argv = ORDERED if runs_what_was_ordered else (*ORDERED, "and something else")
    with subprocess.Popen(argv) as process:
        try:
            rundir.write_attempt(paths, record_of(process.pid, replace(identity_of(process.pid), argv=("a", "shim", "before", "its", "exec"))))
            watch = AttemptWatch(paths, 1, 0.0, None, GIB)
            first = watch.look(clock.boottime_seconds(), thorough=False)
            assert first.standing is Standing.STRANGER and first.shim_is_alive is False
            second = watch.look(clock.boottime_seconds(), thorough=False)
            assert second.standing is (Standing.VERIFIED if runs_what_was_ordered else Standing.STRANGER)
            recorded = rundir.read_attempt(paths, 1)
            assert recorded is not None and recorded.is_executed is runs_what_was_ordered
            watch.close()
        finally:
            process.kill()


@pytest.mark.parametrize("is_seen_alive", [True, False])
def test_a_newborn_that_was_sent_away_is_no_ended_trainer_and_the_next_one_of_its_attempt_is_the_leader(
    tmp_path: Path, *, is_seen_alive: bool
) -> None:
    """Its record stood although the sync of it found no room. The next newborn was then taken for what the first had left, and killed."""
    paths = RunPaths(tmp_path / "run")
    paths.attempt(1).root.mkdir(parents=True)
    watch = AttemptWatch(paths, 1, clock.boottime_seconds(), os.getpid(), GIB)  # whose shim lives
    first = subprocess.Popen(ORDERED)
    rundir.write_attempt(paths, record_of(first.pid, identity_of(first.pid)))
    if is_seen_alive:
        assert watch.look(clock.boottime_seconds(), thorough=False).standing is Standing.VERIFIED
    first.kill()
    first.wait()

    between = watch.look(clock.boottime_seconds(), thorough=False)
    assert (between.standing, between.is_dead, between.shim_is_alive) == (None, False, True)

    with subprocess.Popen(ORDERED) as second:
        try:
            wait_for(lambda: identity_of(second.pid).argv == ORDERED, WAIT_SECONDS, lambda: "no exec")
            rundir.write_attempt(paths, record_of(second.pid, identity_of(second.pid), is_executed=True))
            after = watch.look(clock.boottime_seconds(), thorough=True)
            assert (after.standing, after.is_executed, after.is_dead) == (Standing.VERIFIED, True, False)
        finally:
            watch.close()
            second.kill()
