"""The one place where fleetd reads time. A loop reads it once per tick and passes the moment on.

`now` is for records and deadlines; `boottime_seconds` (CLOCK_BOOTTIME, counts suspend, never stepped) is for durations on one
machine. Tests step the wall clock through the file named by FLEETD_CLOCK_OFFSET_FILE (seconds, as text).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import lru_cache

ENV_OFFSET_FILE = "FLEETD_CLOCK_OFFSET_FILE"
TOGETHER_SECONDS_MAX = 0.01
READINGS_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One reading of both clocks, taken together."""

    now: datetime
    boottime_seconds: float


def read() -> Moment:
    """Both clocks at one moment. Who is held up between the two looks would take that for a step of the wall clock, so it looks again."""
    offset = timedelta(seconds=_offset_seconds())
    readings = []
    for _ in range(READINGS_MAX):
        before_seconds, now, after_seconds = boottime_seconds(), datetime.now(timezone.utc), boottime_seconds()
        readings.append((after_seconds - before_seconds, now, after_seconds))
        if after_seconds - before_seconds <= TOGETHER_SECONDS_MAX:
            break
    _, now, seconds = min(readings)
    return Moment(now=now + offset, boottime_seconds=seconds)


def boottime_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@lru_cache(maxsize=1)
def boot_id() -> str:
    """The kernel's id of this boot, read once per process: boottime seconds of two boots have nothing to do with each other."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _offset_seconds() -> float:
    path = os.environ.get(ENV_OFFSET_FILE)
    if not path:
        return 0.0
    try:
        with open(path, encoding="ascii") as file:
            return float(file.read().strip() or 0)
    except (OSError, ValueError):
        return 0.0
