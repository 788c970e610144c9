"""What the shim does beside waiting: it keeps a supervisor alive, and keeps the deadline when there is none.

Durations are counted tick by tick and never more than two ticks at once, so that a suspended machine or a starved shim does not
take its own sleep for a supervisor's silence. Deadlines go by boottime from an anchor taken when the shim started: a step of the
wall clock can't move them.
"""

from __future__ import annotations

import signal
from datetime import datetime, timedelta

from fleetd import clock, logs
from fleetd.clock import Moment
from fleetd.host.audit import Audit
from fleetd.host.launch import start_supervisor
from fleetd.host.processes import Grip, boot_id, grip
from fleetd.host.rundir import (
    Heartbeat,
    effective_cutoff,
    is_locked,
    read_cutoff,
    read_heartbeat,
    read_observation,
    read_program,
)
from fleetd.model import CutoffOrder, RunSpec
from fleetd.paths import RunPaths
from fleetd.wire import WireError
from policies.facts import RunState, Word
from policies.lifecycle import SETTLED

TICK_SECONDS = 0.5
LOCK_FREE_SECONDS = 5.0
HEARTBEAT_STALE_SECONDS = 30.0
SUPERVISOR_STARTS_MAX = 1000
START_WAIT_SECONDS_MAX = 60.0
"""The wait doubles up to this while supervisors end before their first heartbeat."""
FRUITLESS_STARTS_MAX = 3
"""So many starts without a heartbeat, and a shim whose tree is empty leaves the rest to the sweep."""
UNWATCHED = SETTLED | {RunState.HELD}
"""States in which a supervisor has left on purpose."""


class SupervisorGuard:
    """Starts a supervisor when the run has none, and ends one that has stopped beating. One `tick` per turn of the shim's loop."""

    def __init__(self, paths: RunPaths, attempt: int, audit: Audit | None = None) -> None:
        self.paths, self.attempt, self.audit = paths, attempt, audit or Audit(paths.audit, "shim")
        self.is_alive = True
        self.pids: set[int] = set()
        self.starts = 0
        self.fruitless_starts = 0
        self.last_beat = read_heartbeat(paths)
        self._old_beat = None if self._is_of_this_boot(self.last_beat) else self.last_beat
        self._wait_seconds = LOCK_FREE_SECONDS
        self._free_seconds = self._stale_seconds = 0.0
        self._before_seconds: float | None = None
        self._was_ended = False
        """Set when this guard killed a silent supervisor: the next one starts as soon as the lock is free."""

    @property
    def fresh_beat(self) -> Heartbeat | None:
        """The newest heartbeat that provably belongs to this boot: its boottime figures mean nothing in another."""
        return self.last_beat if self.last_beat != self._old_beat else None

    @property
    def is_needless(self) -> bool:
        """Whether the shim may leave as far as supervisors go: one lives, none is missed, or starting them bears no fruit."""
        return self.is_alive or self.fruitless_starts >= FRUITLESS_STARTS_MAX or not self._may_start()

    def tick(self, boottime_seconds: float) -> None:
        gone_by = 0.0 if self._before_seconds is None else boottime_seconds - self._before_seconds
        self._before_seconds = boottime_seconds
        elapsed_seconds = min(max(gone_by, 0.0), 2 * TICK_SECONDS)
        self.is_alive = is_locked(self.paths.lock)
        if self.is_alive:
            self._free_seconds = 0.0
            self._listen(elapsed_seconds)
        else:
            self._stale_seconds = 0.0
            self._free_seconds += elapsed_seconds
            if (self._free_seconds >= self._wait_seconds or self._was_ended) and self._may_start():
                self._start()

    def _listen(self, elapsed_seconds: float) -> None:
        beat = read_heartbeat(self.paths)
        if beat != self.last_beat:
            self.last_beat, self._stale_seconds = beat, 0.0
            if beat is not None and beat.pid in self.pids:
                self._wait_seconds, self.fruitless_starts = LOCK_FREE_SECONDS, 0
            return
        self._stale_seconds += elapsed_seconds
        if self._stale_seconds >= HEARTBEAT_STALE_SECONDS:
            self._stale_seconds = 0.0
            self._end_silent()

    def _end_silent(self) -> None:
        """The lock is held but nothing beats: verify who it is, SIGKILL it, and let another start as soon as its lock is free."""
        recorded = read_program(self.paths.supervisor)
        if recorded is None:
            logs.failed("supervisor_silent", because="it never recorded itself, so nobody can be verified")
            return
        held = grip(recorded.identity)
        if not isinstance(held, Grip):
            logs.failed("supervisor_silent", pid=recorded.identity.pid, because=held)
            return
        with held:
            purpose = f"kill: the supervisor was silent for {HEARTBEAT_STALE_SECONDS:.0f} s"
            self.audit.intend(clock.read(), purpose, recorded.identity, held.verdict.explanation)
            held.send(signal.SIGKILL)
        logs.changed("supervisor_ended", pid=recorded.identity.pid, because=f"no heartbeat for {HEARTBEAT_STALE_SECONDS:.0f} s")
        self._was_ended = True

    def _start(self) -> None:
        self.starts += 1
        self.fruitless_starts += 1
        self._free_seconds, self._was_ended = 0.0, False
        self._wait_seconds = min(2 * self._wait_seconds, START_WAIT_SECONDS_MAX)
        pid = start_supervisor(self.paths.root)
        self.pids.add(pid)
        logs.changed("supervisor_started", pid=pid, start=self.starts, because="its lock was free")

    def _may_start(self) -> bool:
        """Not when the supervisor left on purpose (it said so of this attempt), and never more often than the bound."""
        seen = read_observation(self.paths)
        has_left = seen is not None and seen.attempt == self.attempt and seen.state in UNWATCHED
        return not has_left and self.starts < SUPERVISOR_STARTS_MAX

    def _is_of_this_boot(self, beat: Heartbeat | None) -> bool:
        recorded = read_program(self.paths.supervisor)
        return beat is not None and recorded is not None and (recorded.identity.boot_id, recorded.identity.pid) == (boot_id(), beat.pid)


class Due(Word):
    NOTHING = "nothing"
    ASK = "ask"
    KILL = "kill"


class DeadlineGuard:
    """The second, independent keeper of the hard deadline."""

    def __init__(self, paths: RunPaths, spec: RunSpec, anchor: Moment) -> None:
        self.paths, self.spec, self.anchor = paths, spec, anchor
        self._order: CutoffOrder | None = None

    def due(self, boottime_seconds: float, beat: Heartbeat | None, *, is_supervised: bool) -> Due:
        """KILL from the cutoff on, whoever watches; ASK from the last safe moment on when nobody does."""
        cutoff_seconds = self.cutoff_seconds(beat)
        if cutoff_seconds is None:
            return Due.NOTHING
        if boottime_seconds >= cutoff_seconds:
            return Due.KILL
        if not is_supervised and boottime_seconds >= self._stop_seconds(cutoff_seconds, beat):
            return Due.ASK
        return Due.NOTHING

    def moment(self, boottime_seconds: float, beat: Heartbeat | None) -> Moment:
        """What time it is, counted as the deadline is: whatever the shim writes down is compared with it."""
        if beat is not None and beat.cutoff_at is not None and beat.cutoff_boottime_seconds is not None:
            now = beat.cutoff_at + timedelta(seconds=boottime_seconds - beat.cutoff_boottime_seconds)
        else:
            now = self.anchor.now + timedelta(seconds=boottime_seconds - self.anchor.boottime_seconds)
        return Moment(now=now, boottime_seconds=boottime_seconds)

    def cutoff_seconds(self, beat: Heartbeat | None) -> float | None:
        """The cutoff as boottime: the earlier of run.json and cutoff.json. None: no deadline."""
        cutoff_at = effective_cutoff(self.spec, self._newest_order())
        return None if cutoff_at is None else self._as_boottime(cutoff_at, beat)

    def _stop_seconds(self, cutoff_seconds: float, beat: Heartbeat | None) -> float:
        if beat is not None and beat.stop_boottime_seconds is not None:
            return min(beat.stop_boottime_seconds, cutoff_seconds)
        if beat is not None and beat.stop_at is not None:
            return min(self._as_boottime(beat.stop_at, beat), cutoff_seconds)
        return cutoff_seconds - self.spec.stop.grace_ceiling_seconds

    def _as_boottime(self, at: datetime, beat: Heartbeat | None) -> float:
        """Where a moment lies on boottime. The supervisor's own pair of clocks is older than ours and may know of a step before us."""
        if beat is not None and beat.cutoff_at is not None and beat.cutoff_boottime_seconds is not None:
            return beat.cutoff_boottime_seconds + (at - beat.cutoff_at) / timedelta(seconds=1)
        return self.anchor.boottime_seconds + (at - self.anchor.now) / timedelta(seconds=1)

    def _newest_order(self) -> CutoffOrder | None:
        """The last order that could be read: neither damage to the file nor its removal moves a deadline back to where it was."""
        try:
            self._order = read_cutoff(self.paths) or self._order
        except (OSError, WireError) as fault:
            logs.failed("cutoff_unreadable", because=fault)
        return self._order
