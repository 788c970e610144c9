"""Who knows what time it is after a reboot: the kernel, when something disciplines its clock, or a coordinator that has spoken since."""

from __future__ import annotations

import ctypes
import os
from datetime import timedelta
from pathlib import Path

from fleetd import clock
from fleetd.host import rundir
from fleetd.host.processes import boot_id
from fleetd.kept_clock import confirmed_pair
from fleetd.paths import RunPaths
from fleetd.wire import WireError
from policies.deadlines import ClockPair

TIMEX_BYTES = 256
TIME_ERROR = 5
"""What adjtimex(2) returns while nothing disciplines the clock."""


def is_synchronised() -> bool | None:
    """Whether the kernel's clock is disciplined, by NTP for example; None where it does not say."""
    if os.environ.get(clock.ENV_OFFSET_FILE):
        return False  # the kernel disciplines its own clock, not one that a test steps
    buffer = ctypes.create_string_buffer(TIMEX_BYTES)  # struct timex with `modes` 0: a question, not an order
    state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
    return None if state < 0 else state != TIME_ERROR


def began_in_this_boot(paths: RunPaths, newest_attempt: int) -> bool:
    """Whether a run without a memory began in this boot: its order came in it, or its newest trainer was born in it."""
    if newest_attempt == 0:
        return rundir.came_in_this_boot(paths)
    try:
        record = rundir.read_attempt(paths, newest_attempt)
    except (OSError, WireError):
        return False
    return record is not None and record.identity.boot_id == boot_id()


def known_time(path: Path, reading: ClockPair) -> ClockPair | None:
    """What time it is at `reading`, by somebody who knows; None when nobody does. A coordinator is asked first: its clock made the deadlines."""
    told = confirmed_pair(path)
    if told is not None and told.boottime_seconds <= reading.boottime_seconds:
        now = told.now + timedelta(seconds=reading.boottime_seconds - told.boottime_seconds)
        return ClockPair(now=now, boottime_seconds=reading.boottime_seconds)
    return reading if is_synchronised() else None
