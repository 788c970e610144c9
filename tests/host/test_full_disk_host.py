"""A disk that is full at a write of supervisor or shim: the trainer does not notice, no try is used up, and all goes on when there is room.

These are the stories with a plot of their own; tests/chaos/test_full_sweep.py refuses one write after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_runs import WAIT_SECONDS, HostRun, fill, needs_root, small_disk, spec_for, wait_for

from fleetd.files import overwrite
from fleetd.host import rundir
from fleetd.host.processes import look
from policies.facts import RunState, Want


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(fault: str, *arguments: str, **changes: Any) -> HostRun:
        run = HostRun(tmp_path / f"root-{len(runs)}", spec_for(*arguments, **changes)).create()
        runs.append(run)
        with monkeypatch.context() as patch:
            patch.setenv("FLEETD_FAULT", fault)
            run.supervise()
        return run

    yield begin
    for run in runs:
        if run.paths.root.exists():
            run.clean()


def test_a_disk_that_is_full_at_the_start_uses_up_no_try(start: Callable[..., HostRun], tmp_path: Path) -> None:
    ballast = tmp_path / "ballast"
    ballast.touch()
    stories = [start(f"shim:{point}:full:{ballast}", "10", "0.05") for point in ("started", "shim.json write", "stdout.log", "attempt.json write")]
    for run in stories:
        run.wait_state(RunState.STARTING)
    wait_for(lambda: all((run.paths.attempt(1).root).exists() for run in stories), WAIT_SECONDS, stories[0].log_text)
    time.sleep(2.0)  # so long that three tries with their waits would be over

    assert [rundir.newest_attempt(run.paths) for run in stories] == [1] * 4
    ballast.unlink()

    assert [(run.settle().state, run.settle().attempt) for run in stories] == [(RunState.FINISHED, 1)] * 4


def test_a_start_that_waits_for_room_is_given_up_when_it_is_no_longer_wanted(start: Callable[..., HostRun], tmp_path: Path) -> None:
    ballast = tmp_path / "ballast"
    ballast.touch()
    run = start(f"shim:started:full:{ballast}", "1000", "0.05")
    run.wait_state(RunState.STARTING)
    wait_for(lambda: run.paths.attempt(1).root.exists(), WAIT_SECONDS, run.log_text)

    run.order(2, Want.STOP)

    assert run.settle().state is RunState.STOPPED
    assert rundir.read_attempt(run.paths, 1) is None, "no trainer ever ran"


def test_a_trainer_that_was_started_before_the_disk_filled_up_can_still_be_verified_and_stopped(
    start: Callable[..., HostRun], tmp_path: Path
) -> None:
    """Its record has to be written again after the exec, when its argv is another; a full disk has no room for a second file."""
    ballast = tmp_path / "ballast"
    ballast.touch()
    run = start(f"shim:attempt.json write#2:full:{ballast}", "2000", "0.05", "every=1000")
    seen = run.wait_step(3)
    assert seen.identity == "verified"
    run.order(2, Want.STOP)

    assert run.settle().state is RunState.STOPPED and run.settle().attempt == 1


@needs_root
def test_a_run_whose_disk_has_no_room_for_a_checkpoint_waits_instead_of_using_up_its_tries(
    start: Callable[..., HostRun], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "root-0", "4m") as disk:
        run = start("", "2000", "0.05", "every=1000")
        try:
            run.wait_step(3)
            ballast = fill(disk)
            with open(ballast, "r+b") as file:
                file.truncate(ballast.stat().st_size - 128 * 1024)  # room for records, and for nothing else
            run.kill_trainer()
            told = run.wait(lambda seen: [alarm for alarm in seen.alarms if "nothing is started" in alarm])
            time.sleep(2.0)

            assert "bytes are free" in told[0]
            assert rundir.newest_attempt(run.paths) == 1
            ballast.unlink()

            assert run.wait(lambda seen: seen if seen.state is RunState.RUNNING and seen.attempt == 2 else None)
            run.order(2, Want.STOP)
            assert run.settle().state is RunState.STOPPED
        finally:
            run.clean()


def test_a_supervisor_that_found_no_room_for_its_own_record_writes_it_later(start: Callable[..., HostRun]) -> None:
    run = start("supervisor:supervisor.json write:refuse:", "2000", "0.05")
    run.wait_step(2)

    record = wait_for(lambda: rundir.read_program(run.paths.supervisor), WAIT_SECONDS, run.log_text)

    assert record is not None and look(record.identity).is_verified


def test_a_record_is_overwritten_within_the_space_it_has(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text('{"a": 1, "some": "more words"}', encoding="utf-8")

    assert overwrite(path, '{"a": 2}')
    assert path.read_text(encoding="utf-8").rstrip() == '{"a": 2}' and path.stat().st_size == 30
    assert not overwrite(path, "x" * 1_000_000) and path.read_text(encoding="utf-8").rstrip() == '{"a": 2}'
    assert not overwrite(tmp_path / "absent.json", "{}")
