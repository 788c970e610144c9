"""What time it is, by a pair of clocks that is kept on disk: a step of the wall clock is seen by whoever starts after it, too.

    within the tolerance   the pair follows the wall clock: drift, slewing
    beyond it              the wall clock was stepped: what boottime has counted since the pair rules, and an alarm says so
    after another boot     nothing was counted: the wall clock is believed, but never an earlier time than what was kept

The coordinator keeps one pair in its state directory, and the agents one in the root of their host, from which supervisors and shims
begin to count. A person who knows that the wall clock is right removes the file while nobody renews it: the next process believes what it
reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from fleetd import clock, logs
from fleetd.clock import Moment
from fleetd.files import read_record, write_record
from fleetd.wire import WireError, decode
from policies.deadlines import CLOCK_TOLERANCE_SECONDS, ClockPair, EffectiveTime, after_reboot, effective_time

KEEP_SECONDS = 60.0
"""A pair that is a minute old serves as well: what it says of a step doesn't age."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPair:
    """clock.json: both clocks, read together in this boot and believed."""

    boot_id: str
    now: datetime
    boottime_seconds: float
    is_confirmed: bool = False
    """Whether a coordinator has agreed, or has said better, since this boot."""


def confirmed_pair(path: Path) -> ClockPair | None:
    """The kept pair of this boot that a coordinator has confirmed; None when none has."""
    kept = _read(path)
    if kept is None or not kept.is_confirmed or kept.boot_id != clock.boot_id():
        return None
    return ClockPair(now=kept.now, boottime_seconds=kept.boottime_seconds)


def anchor_for(path: Path, reading: ClockPair) -> ClockPair:
    """The pair to judge `reading` by: the kept one of this boot, else the reading itself, no earlier than what an earlier boot kept."""
    kept = _read(path)
    if kept is None:
        return reading
    if kept.boot_id == clock.boot_id() and kept.boottime_seconds <= reading.boottime_seconds:
        return ClockPair(now=kept.now, boottime_seconds=kept.boottime_seconds)
    return after_reboot(reading=reading, recorded_now=kept.now)


def counted(path: Path, moment: Moment) -> Moment:
    """The moment that a process which starts now may count from."""
    reading = pair_of(moment)
    time = effective_time(anchor=anchor_for(path, reading), reading=reading)
    return Moment(now=time.now, boottime_seconds=moment.boottime_seconds)


class KeptClock:
    """The wall clock as one long-running process believes it. Without a path it lasts as long as the process."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.trusted: ClockPair | None = None
        self.is_confirmed = path is not None and confirmed_pair(path) is not None
        self._kept_seconds: float | None = None

    def judge(self, reading: ClockPair) -> EffectiveTime:
        """What time it is now. What it was is the anchor of the next question."""
        if self.trusted is None:
            self.trusted = reading if self.path is None else anchor_for(self.path, reading)
        time = effective_time(anchor=self.trusted, reading=reading)
        self.trusted = ClockPair(now=time.now, boottime_seconds=reading.boottime_seconds)
        self._keep()
        return time

    def confirm(self, told: ClockPair, reading: ClockPair) -> None:
        """The coordinator's word for what time it was at a moment of this boot. Within the tolerance it confirms ours; beyond it the
        coordinator is believed, whose clock the deadlines are made of. Once a boot: from then on this machine counts by itself."""
        if self.is_confirmed or told.boottime_seconds > reading.boottime_seconds:
            return
        counted_now = told.now + timedelta(seconds=reading.boottime_seconds - told.boottime_seconds)
        time = self.judge(reading)
        if abs((time.now - counted_now).total_seconds()) > CLOCK_TOLERANCE_SECONDS:
            logs.failed("clock_corrected", own=time.now.isoformat(), coordinator=counted_now.isoformat())
            self.trusted = ClockPair(now=counted_now, boottime_seconds=reading.boottime_seconds)
        self.is_confirmed, self._kept_seconds = True, None
        self._keep()

    def _keep(self) -> None:
        """Once a minute, unsynced: a pair that a crash takes back is an older one of the same boot, or one of a boot that is over."""
        assert self.trusted is not None
        seconds = self.trusted.boottime_seconds
        if self.path is None or (self._kept_seconds is not None and seconds - self._kept_seconds < KEEP_SECONDS):
            return
        self._kept_seconds = seconds
        try:
            record = KeptPair(boot_id=clock.boot_id(), now=self.trusted.now, boottime_seconds=seconds, is_confirmed=self.is_confirmed)
            write_record(self.path, record, durable=False)
        except OSError as fault:
            logs.failed("clock_not_kept", because=fault)  # the next minute may find room


def pair_of(moment: Moment) -> ClockPair:
    return ClockPair(now=moment.now, boottime_seconds=moment.boottime_seconds)


def _read(path: Path) -> KeptPair | None:
    """None when nothing is kept, or nothing that can be read: then the wall clock is all there is."""
    try:
        return decode(KeptPair, read_record(path), str(path))
    except FileNotFoundError:
        return None
    except (OSError, WireError) as fault:
        logs.failed("kept_clock_unreadable", because=str(fault).replace("\n", " "))
        return None
