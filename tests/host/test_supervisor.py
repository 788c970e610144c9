"""A real supervisor, shim and trainer on a real run directory: finish, restarts, stops, adoption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_runs import HostRun, spec_for

from policies.facts import RunState


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(*arguments: str, **changes: Any) -> HostRun:
        run = HostRun(tmp_path / f"root-{len(runs)}", spec_for(*arguments, **changes)).create()
        runs.append(run)
        run.supervise()
        return run

    yield begin
    for run in runs:
        run.clean()


def test_a_run_goes_from_start_to_finished_and_tells_it_in_numbered_notices(start: Callable[..., HostRun]) -> None:
    run = start("12", "0.05", "every=5")

    seen = run.settle()

    assert (seen.state, seen.reason, seen.step, seen.steps_planned) == (RunState.FINISHED, None, 12, 12)
    assert run.moves() == ["starting", "running", "finished"]
    kinds = [notice["kind"] for notice in run.notices()]
    assert kinds.index("attempt_started") < kinds.index("attempt_ended")
    assert [notice["body"]["step"] for notice in run.notices("checkpoint")] == [0, 5, 10, 12]
    ended = run.notices("attempt_ended")[0]["body"]
    assert ended["exit"]["exit_code"] == 0 and ended["exit"]["observed_by"] == "shim"
