"""What a supervisor sees of one attempt, over real processes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fleetd import clock
from fleetd.host import cgroups, rundir
from fleetd.host.observe import AttemptWatch
from fleetd.host.processes import identity_of
from fleetd.host.rundir import AttemptRecord
from fleetd.model import CapPart
from fleetd.paths import RunPaths
from policies.facts import GIB, CapGrade
from policies.identity import Standing

ORDERED = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.mark.parametrize("runs_what_was_ordered", [True, False])
def test_an_exec_that_its_shim_never_recorded_is_recorded_by_the_watcher_if_it_runs_what_was_ordered(
    tmp_path: Path, *, runs_what_was_ordered: bool
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.attempt(1).root.mkdir(parents=True)
    argv = ORDERED if runs_what_was_ordered else (*ORDERED, "and something else")
    with subprocess.Popen(argv) as process:
        try:
            before = AttemptRecord(
                attempt=1, identity=replace(identity_of(process.pid), argv=("a", "shim", "before", "its", "exec")), argv=ORDERED, resume="",
                resume_step=None, resume_digest=None, refused=(), token="t", cgroup=cgroups.Group(memory=None).encode(),
                cap=CapPart(grade=CapGrade.ABSENT, means="none"), session=process.pid, at=clock.read().now,
            )
            rundir.write_attempt(paths, before)
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
