"""How long a supervisor looks away: a second at most while a trainer lives, less where something is due, long only where nothing will happen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_host_decide import CUTOFF_SECONDS, RUNNING, START, alive, sight

from fleetd.host.history import History, Stop
from fleetd.host.pace import pause_seconds
from policies.facts import Reason, RunState, StopMode

STOPPING = Stop(reason=Reason.USER, mode=StopMode.GRACEFUL, asked_seconds=1009.0, grace_seconds=5.0)


@pytest.mark.parametrize(("changes", "seconds"), [
    ({}, 1.0),
    ({"state": RunState.STUCK}, 5.0),
    ({"stop": STOPPING}, 0.2),
    ({"leader_gone_seconds": 1008.0}, 0.05),
    ({"leader_gone_seconds": 1001.0}, 0.2),
    ({"state": RunState.STARTING}, 0.2),
])
def test_a_living_trainer_is_looked_at_as_often_as_its_state_asks_for(changes: dict[str, Any], seconds: float) -> None:
    seen = sight(10.0, attempt=alive(age_seconds=3.0))
    assert pause_seconds(seen, replace(RUNNING, **changes), look_seconds=60.0, start_is_refused=False) == seconds


def test_memory_that_grows_and_a_cutoff_that_comes_are_waited_for_no_longer_than_until_then() -> None:
    seen = sight(10.0, attempt=alive(age_seconds=60.0))
    assert pause_seconds(seen, RUNNING, look_seconds=0.3, start_is_refused=False) == 0.3
    near = sight(CUTOFF_SECONDS - 0.5, attempt=alive(age_seconds=60.0))
    assert pause_seconds(near, RUNNING, look_seconds=60.0, start_is_refused=False) == pytest.approx(0.5)


def test_between_attempts_the_next_one_is_waited_for_and_a_refused_start_is_tried_each_second() -> None:
    waits = replace(History(), state=RunState.BACKOFF, next_attempt_at=START.replace(second=10, microsecond=400_000))
    assert pause_seconds(sight(10.0), waits, look_seconds=60.0, start_is_refused=False) == pytest.approx(0.4)
    assert pause_seconds(sight(10.0), waits, look_seconds=60.0, start_is_refused=True) == 1.0
    over = replace(History(), state=RunState.FINISHED)
    assert pause_seconds(sight(10.0), over, look_seconds=60.0, start_is_refused=False) == 0.2
