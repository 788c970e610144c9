"""A run directory that somebody removes under a living run: the trainer stays watched, and nobody stays behind when it has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from host_edges import executed, make_run, make_spec, python, supervised, wait_until
from host_runs import HostRun, spec_for

from fleetd.host import rundir
from fleetd.host.presence import REMOVED_SECONDS, Presence
from fleetd.host.processes import look
from fleetd.host.sight import AttemptSight
from fleetd.host.supervisor import Supervisor
from policies.identity import Standing

SOON_SECONDS = 0.5


def watched_by(program: str, *arguments: str) -> tuple[str, ...]:
    """The program of a host, with little patience for a directory that is away."""
    patience = f"from fleetd.host import presence; presence.REMOVED_SECONDS = {SOON_SECONDS}"
    return (sys.executable, "-c", f"{patience}; from fleetd.host.{program} import main; main({list(arguments)!r})")


def stays(watcher: subprocess.Popen[bytes]) -> None:
    """While its trainer lives, whatever became of the directory."""
    with pytest.raises(subprocess.TimeoutExpired):
        watcher.wait(3 * SOON_SECONDS)


def test_what_is_away_for_a_minute_was_removed_and_what_comes_back_was_not(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    seen = Presence(root, 0.0)
    root.rename(tmp_path / "elsewhere")
    told = []
    for seconds in range(1, int(REMOVED_SECONDS) + 2):
        seen.look(float(seconds))
        told.append(seen.was_removed)
    (tmp_path / "elsewhere").rename(root)
    seen.look(REMOVED_SECONDS + 2)

    assert told.index(True) == REMOVED_SECONDS - 1
    assert not seen.was_removed


def test_a_machine_that_slept_comes_back_before_its_disks_do(tmp_path: Path) -> None:
    seen = Presence(tmp_path / "run", 0.0)

    seen.look(10 * REMOVED_SECONDS)

    assert not seen.was_removed


def test_a_disk_that_fails_says_nothing_of_what_lies_on_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    seen = Presence(tmp_path / "file" / "run", 0.0)

    for seconds in range(2 * int(REMOVED_SECONDS)):
        seen.look(float(seconds))

    assert not seen.was_removed


@pytest.mark.parametrize(("left", "attempt"), [
    (True, AttemptSight(number=1, standing=Standing.VERIFIED, tree_count=0)),
    (True, AttemptSight(number=1, standing=Standing.GONE, is_dead=True, tree_count=1)),
    (True, AttemptSight(number=1, standing=Standing.GONE, is_dead=True, tree_count=None)),
    (False, AttemptSight(number=1, standing=Standing.GONE, is_dead=True, tree_count=0)),
    (True, AttemptSight(number=1, standing=None, shim_is_alive=True)),
    (True, AttemptSight(number=1, standing=None, shim_is_alive=None)),
    (False, AttemptSight(number=1, standing=None, shim_is_alive=False)),
])
def test_a_supervisor_stays_for_what_outlived_the_trainer_and_not_for_one_that_was_never_born(
    tmp_path: Path, left: bool, attempt: AttemptSight,
) -> None:
    paths = make_run(tmp_path, make_spec(python("pass"), run_id="r1"))
    supervisor = Supervisor(paths, rundir.read_spec(paths))
    gone_seconds = 1.0 if attempt.is_dead else None
    supervisor.history = replace(supervisor.history, attempt=1, is_attempt_over=False, leader_gone_seconds=gone_seconds)
    supervisor.attempt_seen, supervisor.presence = attempt, Presence(tmp_path / "removed", -1.0)
    for seconds in range(int(REMOVED_SECONDS)):
        supervisor.presence.look(float(seconds))

    assert supervisor._is_needless() is not left
    supervisor.spool.journal.close()


def test_a_shim_leaves_after_its_trainer_when_the_run_was_removed(tmp_path: Path) -> None:
    paths = make_run(tmp_path, make_spec(python("import time; time.sleep(120)"), run_id="r1"))
    command = watched_by("shim", str(paths.root), "1")
    with supervised(paths):
        shim = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        wait_until(executed(paths))
        trainer = rundir.read_attempt(paths, 1).identity
        paths.root.rename(tmp_path / "removed")
        stays(shim)
        os.kill(trainer.pid, signal.SIGKILL)
        assert shim.wait(60) == 0

    assert look(trainer).is_dead


def test_a_supervisor_leaves_after_its_trainer_when_the_run_was_removed(tmp_path: Path) -> None:
    run, elsewhere = HostRun(tmp_path / "root", spec_for("5000", "0.05", "every=1000")).create(), tmp_path / "elsewhere"
    supervisor = subprocess.Popen(watched_by("supervisor", str(run.paths.root)), stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        run.wait_step(3)
        run.kill_program(run.paths.shim)
        trainer = rundir.read_attempt(run.paths, 1).identity
        run.paths.root.rename(elsewhere)
        stays(supervisor)
        os.kill(trainer.pid, signal.SIGKILL)
        assert supervisor.wait(60) == 0
    finally:
        if elsewhere.exists():
            elsewhere.rename(run.paths.root)
        run.clean()
        supervisor.wait(60)

    assert look(trainer).is_dead
