"""The stop ladder as a function of how long ago it was asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.escalation import LADDERS, Rung, rung_at, seconds_until_empty
from policies.facts import StopMode

seconds = st.floats(min_value=0, max_value=1e5)


@given(first=seconds, more=seconds, grace=st.floats(0, 1000), mode=st.sampled_from(list(StopMode)))
def test_a_longer_wait_never_lowers_a_rung(first: float, more: float, grace: float, mode: StopMode) -> None:
    earlier = rung_at(asked_seconds_ago=first, grace_seconds=grace, mode=mode)
    assert rung_at(asked_seconds_ago=first + more, grace_seconds=grace, mode=mode) >= earlier
    assert rung_at(asked_seconds_ago=None, grace_seconds=grace, mode=mode) <= earlier


@given(waited=seconds, grace=st.floats(0, 1000))
def test_nothing_is_killed_before_its_grace_has_passed(waited: float, grace: float) -> None:
    if rung_at(asked_seconds_ago=waited, grace_seconds=grace, mode=StopMode.GRACEFUL) >= Rung.KILL:
        assert waited > grace


@given(waited=seconds, grace=st.floats(0, 1000))
def test_stop_now_is_never_on_a_lower_rung_than_a_graceful_stop(waited: float, grace: float) -> None:
    now = rung_at(asked_seconds_ago=waited, grace_seconds=grace, mode=StopMode.NOW)
    assert now >= rung_at(asked_seconds_ago=waited, grace_seconds=grace, mode=StopMode.GRACEFUL)


@pytest.mark.parametrize(("waited", "rung"), [
    (None, Rung.ASK), (0.0, Rung.WAIT), (9.9, Rung.WAIT), (10.0, Rung.ASK_AGAIN), (13.4, Rung.ASK_AGAIN),
    (13.5, Rung.KILL), (14.5, Rung.VERIFY_EMPTY), (43.5, Rung.STUCK), (1e6, Rung.STUCK),
])
def test_the_rungs_of_a_graceful_stop_with_ten_seconds_of_grace(waited: float | None, rung: Rung) -> None:
    assert rung_at(asked_seconds_ago=waited, grace_seconds=10.0, mode=StopMode.GRACEFUL) is rung


def test_stop_now_begins_with_the_kill() -> None:
    assert rung_at(asked_seconds_ago=None, grace_seconds=10.0, mode=StopMode.NOW) is Rung.KILL


def test_every_ladder_names_its_rungs_in_order_and_starts_at_once() -> None:
    for ladder in LADDERS.values():
        rungs = [step.rung for step in ladder]
        assert rungs == sorted(set(rungs)) and ladder[0].plus_seconds == 0 and ladder[0].grace_share == 0
    assert seconds_until_empty(0.0) == 2.0
