"""Cutoffs, the measured grace, and which clock rules after a step."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from policies.deadlines import (
    CLOCK_TOLERANCE_SECONDS,
    ClockPair,
    after_reboot,
    cutoff_at,
    effective_time,
    grace_seconds,
    reserve_seconds,
    seconds_left,
    stop_at,
)
from policies.escalation import seconds_until_empty

START = datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc)
ANCHOR = ClockPair(now=START, boottime_seconds=100.0)
seconds = st.floats(min_value=0, max_value=1e6)


def reading(*, elapsed: float, step: float) -> ClockPair:
    return ClockPair(now=START + timedelta(seconds=elapsed + step), boottime_seconds=100.0 + elapsed)


@given(elapsed=seconds, step=st.floats(min_value=-7200, max_value=7200))
def test_no_clock_step_moves_a_deadline_by_more_than_the_tolerance(elapsed: float, step: float) -> None:
    time = effective_time(anchor=ANCHOR, reading=reading(elapsed=elapsed, step=step))
    left = seconds_left(START + timedelta(hours=1), time)
    true_left = 3600 - elapsed
    assert true_left - CLOCK_TOLERANCE_SECONDS - 1e-3 <= left <= true_left + 1e-3, "never late, early by the tolerance at most"


def test_an_hour_forward_or_back_raises_an_alarm_and_the_budget_rules() -> None:
    for step, word in ((3600.0, "forward by 3600 s"), (-3600.0, "back by 3600 s")):
        time = effective_time(anchor=ANCHOR, reading=reading(elapsed=60.0, step=step))
        assert time.alarm is not None and word in time.alarm
        assert time.now == START + timedelta(seconds=60)


def test_drift_within_the_tolerance_raises_no_alarm_and_never_makes_a_stop_late() -> None:
    fast = effective_time(anchor=ANCHOR, reading=reading(elapsed=60.0, step=2.0))
    slow = effective_time(anchor=ANCHOR, reading=reading(elapsed=60.0, step=-2.0))
    assert fast.alarm is None and fast.now == START + timedelta(seconds=62)
    assert slow.alarm is None and slow.now == START + timedelta(seconds=60)


def test_after_a_reboot_time_never_runs_back_behind_what_was_recorded() -> None:
    recorded = START + timedelta(hours=2)
    fresh = ClockPair(now=START, boottime_seconds=5.0)
    assert after_reboot(reading=fresh, recorded_now=recorded) == ClockPair(now=recorded, boottime_seconds=5.0)
    assert after_reboot(reading=fresh, recorded_now=START - timedelta(hours=1)) == fresh
    assert after_reboot(reading=fresh, recorded_now=None) == fresh


def test_the_reserve_is_the_minimum_until_the_speed_was_measured() -> None:
    terms = {"minimum_seconds": 7200.0, "factor": 1.3, "margin_seconds": 600.0}
    assert reserve_seconds(rows=None, seconds_per_row=None, **terms) == 7200
    assert reserve_seconds(rows=100, seconds_per_row=1.0, **terms) == 7200
    assert reserve_seconds(rows=10_000, seconds_per_row=1.0, **terms) == 13_600


@given(rows=st.integers(0, 10**6), speed=st.floats(0, 10), more=st.integers(0, 1000))
def test_more_rows_never_need_a_smaller_reserve(rows: int, speed: float, more: int) -> None:
    terms = {"minimum_seconds": 60.0, "factor": 1.3, "margin_seconds": 10.0}
    assert reserve_seconds(rows=rows + more, seconds_per_row=speed, **terms) >= reserve_seconds(rows=rows, seconds_per_row=speed, **terms)


def test_the_whole_ladder_fits_between_the_ask_and_the_cutoff() -> None:
    cutoff = cutoff_at(START + timedelta(hours=3), 7200.0)
    assert cutoff == START + timedelta(hours=1)
    assert stop_at(cutoff, seconds_until_empty(40.0)) == cutoff - timedelta(seconds=52)


@given(st.lists(st.floats(0, 100), max_size=5), st.lists(st.floats(0, 100), max_size=5))
def test_the_grace_is_slowest_step_plus_twice_the_slowest_save_plus_floor_under_the_ceiling(steps: list[float], saves: list[float]) -> None:
    grace = grace_seconds(steps, saves, 5.0, 120.0)
    assert grace == min(120.0, max([0.0, *steps]) + 2 * max([0.0, *saves]) + 5.0)
