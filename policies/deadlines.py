"""Deadlines: when training must stop so that evaluation still fits, and what time it really is after a clock step.

    launch ───────────── stop_at ──── cutoff_at ─────────────── final_at
             training     │  ladder of    │   reserve: evaluation,
                          │  the stop     │   calibration, report
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

RESERVE_SECONDS_MAX = 10 * 365 * 86400.0
"""A speed that asks for more was mismeasured. A deadline minus this is still a date."""
CLOCK_TOLERANCE_SECONDS = 5.0
"""Slewing moves a clock by far less than this between anchor and now; a step is more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPair:
    """Both clocks read together: the wall clock, which may be stepped, and boottime, which only counts."""

    now: datetime
    boottime_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveTime:
    """The moment that deadlines are judged by, and the alarm if the wall clock disagrees with it."""

    now: datetime
    alarm: str | None
    step_seconds: float = 0.0
    """How far the wall clock was stepped, 0 within the tolerance."""


def effective_time(*, anchor: ClockPair, reading: ClockPair, tolerance_seconds: float = CLOCK_TOLERANCE_SECONDS) -> EffectiveTime:
    """What time it is, given one trusted reading from earlier in the same boot.

    Within the tolerance the later of wall clock and anchor plus elapsed rules, so that drift never makes a stop late. Beyond it the
    wall clock was stepped: the elapsed boottime rules, in both directions.
    """
    elapsed_seconds = reading.boottime_seconds - anchor.boottime_seconds
    assert elapsed_seconds >= 0, "an anchor lies in the past of the same boot"
    counted = anchor.now + timedelta(seconds=elapsed_seconds)
    step_seconds = (reading.now - counted).total_seconds()
    if abs(step_seconds) <= tolerance_seconds:
        return EffectiveTime(now=max(counted, reading.now), alarm=None)
    direction = "forward" if step_seconds > 0 else "back"
    text = f"the wall clock was stepped {direction} by {abs(step_seconds):.0f} s since this run recorded it; deadlines go by the boottime budget"
    return EffectiveTime(now=counted, alarm=text, step_seconds=step_seconds)


def seconds_left(deadline_at: datetime, time: EffectiveTime) -> float:
    """Seconds until the deadline, negative once it has passed."""
    return (deadline_at - time.now).total_seconds()


def after_reboot(*, reading: ClockPair, recorded_now: datetime | None) -> ClockPair:
    """The anchor for a new boot. Time never runs back: what the last boot recorded as the time is the least it can be now."""
    if recorded_now is None or reading.now >= recorded_now:
        return reading
    return ClockPair(now=recorded_now, boottime_seconds=reading.boottime_seconds)


def reserve_seconds(
    *, rows: int | None, seconds_per_row: float | None, minimum_seconds: float, factor: float, margin_seconds: float
) -> float:
    """Seconds to keep for what follows training: max(minimum, factor x rows x seconds per row + margin); the minimum until it was measured."""
    assert minimum_seconds >= 0 and factor >= 0 and margin_seconds >= 0
    if rows is None or seconds_per_row is None:
        return minimum_seconds
    assert rows >= 0 and seconds_per_row >= 0
    return max(minimum_seconds, min(factor * rows * seconds_per_row + margin_seconds, RESERVE_SECONDS_MAX))


def cutoff_at(final_at: datetime, reserve_seconds: float) -> datetime:
    """When no trainer may live any more."""
    assert reserve_seconds >= 0
    return final_at - timedelta(seconds=reserve_seconds)


def stop_at(cutoff_at: datetime, grace_seconds: float) -> datetime:
    """The last safe moment to ask: what is asked now has `grace_seconds` until the cutoff."""
    assert grace_seconds >= 0
    return cutoff_at - timedelta(seconds=grace_seconds)


def grace_seconds(recent_step_seconds: Sequence[float], recent_save_seconds: Sequence[float], floor: float, ceiling: float) -> float:
    """How long a stop may take: the slowest recent step, twice the slowest recent save and the floor, under the plan's ceiling.

    Before the first step there is nothing to save, so the floor alone is enough.
    """
    assert floor >= 0 and ceiling >= 0
    measured = max(recent_step_seconds, default=0.0) + 2 * max(recent_save_seconds, default=0.0) + floor
    return min(measured, ceiling)
