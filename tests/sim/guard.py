"""The two watchers in a virtual shim. Mirrors fleetd/host/guard.py: the DeadlineGuard is the real one, over orders in memory."""

from __future__ import annotations

import signal

from fleetd.host.guard import (
    FRUITLESS_STARTS_MAX,
    HEARTBEAT_STALE_SECONDS,
    LOCK_FREE_SECONDS,
    START_WAIT_SECONDS_MAX,
    SUPERVISOR_STARTS_MAX,
    TICK_SECONDS,
    UNWATCHED,
    DeadlineGuard,
)
from fleetd.host.rundir import Heartbeat
from fleetd.model import CutoffOrder
from tests.sim import eyes
from tests.sim.machine import Process
from tests.sim.rundir import VirtualRun


class VirtualDeadlineGuard(DeadlineGuard):
    def __init__(self, run: VirtualRun) -> None:
        super().__init__(None, run.spec, run.machine.moment())  # type: ignore[arg-type]
        self._run = run

    def _newest_order(self) -> CutoffOrder | None:
        return self._run.cutoff


class VirtualSupervisorGuard:
    """Mirrors guard.SupervisorGuard."""

    def __init__(self, run: VirtualRun, attempt: int) -> None:
        self.run, self.attempt = run, attempt
        self.is_alive = True
        self.starts = self.fruitless_starts = 0
        self.last_beat = run.heartbeat
        self._old_beat = None if self._is_of_this_boot(run.heartbeat) else run.heartbeat
        self._wait_seconds = LOCK_FREE_SECONDS
        self._free_seconds = self._stale_seconds = 0.0
        self._before_seconds: float | None = None
        self._was_ended = False

    @property
    def fresh_beat(self) -> Heartbeat | None:
        return self.last_beat if self.last_beat != self._old_beat else None

    @property
    def is_needless(self) -> bool:
        return self.is_alive or self.fruitless_starts >= FRUITLESS_STARTS_MAX or not self._may_start()

    @property
    def is_quiet(self) -> bool:
        return self.is_alive and self._stale_seconds == 0.0

    def tick(self, boottime_seconds: float) -> None:
        gone_by = 0.0 if self._before_seconds is None else boottime_seconds - self._before_seconds
        self._before_seconds = boottime_seconds
        elapsed_seconds = min(max(gone_by, 0.0), 2 * TICK_SECONDS)
        self.is_alive = self.run.is_locked()
        if self.is_alive:
            self._free_seconds = 0.0
            self._listen(elapsed_seconds)
            return
        self._stale_seconds = 0.0
        self._free_seconds += elapsed_seconds
        if (self._free_seconds >= self._wait_seconds or self._was_ended) and self._may_start():
            self._start()

    def _listen(self, elapsed_seconds: float) -> None:
        beat = self.run.heartbeat
        if beat != self.last_beat:
            self.last_beat, self._stale_seconds = beat, 0.0
            if beat is not None and self.starts:
                self._wait_seconds, self.fruitless_starts = LOCK_FREE_SECONDS, 0
            return
        self._stale_seconds += elapsed_seconds
        if self._stale_seconds >= HEARTBEAT_STALE_SECONDS:
            self._stale_seconds = 0.0
            self._end_silent()

    def _end_silent(self) -> None:
        recorded = self.run.supervisor_record
        held = eyes.grip(self.run.machine, recorded.identity) if recorded is not None else None
        if isinstance(held, Process):
            self.run.machine.world.say(self.run.machine.name, f"the shim ends a silent supervisor, {held!r}")
            self.run.machine.deliver(held, signal.SIGKILL, sender="guard", run_id=self.run.run_id)
            self._was_ended = True

    def _start(self) -> None:
        from tests.sim.supervisor import start_supervisor

        self.starts += 1
        self.fruitless_starts += 1
        self._free_seconds, self._was_ended = 0.0, False
        self._wait_seconds = min(2 * self._wait_seconds, START_WAIT_SECONDS_MAX)
        start_supervisor(self.run)

    def _may_start(self) -> bool:
        seen = self.run.observation
        has_left = seen is not None and seen.attempt == self.attempt and seen.state in UNWATCHED
        return not has_left and self.starts < SUPERVISOR_STARTS_MAX

    def _is_of_this_boot(self, beat: Heartbeat | None) -> bool:
        recorded = self.run.supervisor_record
        if beat is None or recorded is None:
            return False
        return (recorded.identity.boot_id, recorded.identity.pid) == (self.run.machine.boot_id, beat.pid)
