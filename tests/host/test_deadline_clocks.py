"""A wall clock that was stepped before a run starts, or between two of its attempts, makes it neither late nor early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import HostRun, spec_for

from fleetd import clock
from fleetd.kept_clock import KeptClock, pair_of
from fleetd.paths import HostPaths
from policies.facts import ENV_TRAIN_CUTOFF_BOOTTIME, Reason, RunState, Want


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HostRun]:
    """A run of a host whose clock an agent has kept."""
    made = HostRun(tmp_path / "root", spec_for("5000", "0.05", "every=5", "crash_at=12", cutoff_seconds=600.0)).create()
    KeptClock(HostPaths(made.root).clock).judge(pair_of(clock.read()))
    yield made
    made.clean()


@pytest.mark.parametrize(("step", "word"), [("3600", "forward"), ("-3600", "back")])
def test_a_step_before_the_start_costs_no_attempt_and_moves_no_deadline(
    run: HostRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, word: str
) -> None:
    offset = tmp_path / "offset"
    offset.write_text(step)
    monkeypatch.setenv(clock.ENV_OFFSET_FILE, str(offset))
    run.supervise()
    seen = run.wait(lambda seen: seen if seen.attempt == 2 and seen.state is RunState.RUNNING else None)
    assert seen.pid is not None and run.spec.deadline is not None
    environment = Path(f"/proc/{seen.pid}/environ").read_bytes().split(b"\0")
    counted = next(float(entry.split(b"=")[1]) for entry in environment if entry.startswith(ENV_TRAIN_CUTOFF_BOOTTIME.encode()))

    run.order(2, Want.STOP)
    ended = run.settle()

    assert (ended.state, ended.reason, ended.attempt) == (RunState.STOPPED, Reason.USER, 2), "no deadline ended it, before its crash or after"
    assert any(word in notice["body"]["text"] for notice in run.notices("alarm"))
    offset.write_text("0")
    moment = clock.read()
    left_seconds = (run.spec.deadline.cutoff_at - moment.now).total_seconds()
    assert counted - moment.boottime_seconds == pytest.approx(left_seconds, abs=5.0), "the trainer counts to the true cutoff"
