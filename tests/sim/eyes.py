"""What a virtual supervisor or shim sees of processes, and how it signals them.

Mirrors fleetd/host/processes.py (grip, look), tree.py (members, signal_one, kill_tree) and observe.py (Held, AttemptWatch, Observer).
The classifier is the real one; a grip is the process object itself, as a pidfd would be.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fleetd.clock import Moment
from fleetd.host.history import History
from fleetd.host.observe import SHIM_PATIENCE_SECONDS
from fleetd.host.rundir import AttemptRecord
from fleetd.host.sampler import PEEK_SECONDS_MIN, Sampler
from fleetd.host.sight import AttemptSight, HostSight, MemoryLook
from fleetd.host.tree import SignalReport
from fleetd.model import WantOrder
from policies.deadlines import EffectiveTime
from policies.facts import ProcessIdentity
from policies.identity import IdentityVerdict, Standing, classify
from tests.sim.machine import Machine, Process
from tests.sim.rundir import VirtualRun


def grip(machine: Machine, recorded: ProcessIdentity) -> Process | IdentityVerdict:
    """The process itself when every field matches, else the verdict that says why not."""
    verdict = classify(recorded, machine.sight(recorded.pid))
    return machine.processes[recorded.pid] if verdict.is_verified else verdict


def signal_one(run: VirtualRun, recorded: ProcessIdentity, *numbers: int, sender: str) -> tuple[SignalReport, ...]:
    held = grip(run.machine, recorded)
    if not isinstance(held, Process):
        return tuple(SignalReport(pid=recorded.pid, signal=number, delivered=False, verdict=str(held)) for number in numbers)
    return tuple(
        SignalReport(
            pid=held.pid, signal=number, delivered=run.machine.deliver(held, number, sender=sender, run_id=run.run_id),
            verdict="boot, start time, uid and argv match",
        )
        for number in numbers
    )


def members(run: VirtualRun, record: AttemptRecord) -> tuple[Process, ...]:
    """The living processes of one attempt's tree, leader first: those that carry its token."""
    if record.identity.boot_id != run.machine.boot_id:
        return ()
    found = run.living_tree(record.token)
    return tuple(sorted(found, key=lambda process: process.role != "trainer"))


def signal_group(run: VirtualRun, targets: Iterable[Process], *numbers: int, sender: str) -> tuple[SignalReport, ...]:
    return tuple(report for target in targets for report in signal_one(run, target.identity(), *numbers, sender=sender))


def kill_tree(run: VirtualRun, record: AttemptRecord, *, sender: str) -> tuple[SignalReport, ...]:
    return signal_group(run, members(run, record), signal.SIGKILL, sender=sender)


class Held:
    """A process by its recorded identity: looked up until it is gripped, then held."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.process: Process | None = None
        self.standing: Standing | None = None
        self.text = ""
        self.is_dead = False

    def look(self, recorded: ProcessIdentity) -> None:
        if self.process is None and not self.is_dead:
            found = grip(self._machine, recorded)
            if isinstance(found, Process):
                self.process = found
            else:
                self.standing, self.text, self.is_dead = found.standing, found.explanation, found.is_dead
        if self.process is not None:
            self.is_dead = not self.process.is_alive
            self.standing = Standing.GONE if self.is_dead else Standing.VERIFIED
            self.text = f"pid {recorded.pid} has ended" if self.is_dead else f"pid {recorded.pid}: boot, start time, uid and argv match"


class Record:
    """attempt.json as last read."""

    def __init__(self, run: VirtualRun, number: int) -> None:
        self._run, self._number = run, number

    @property
    def value(self) -> AttemptRecord | None:
        attempt = self._run.attempts.get(self._number)
        return attempt.record if attempt is not None else None


class Want:
    """orders/want.json as last read."""

    def __init__(self, run: VirtualRun) -> None:
        self._run = run

    def get(self) -> WantOrder:
        return self._run.want


class VirtualWatch:
    """One attempt from its folder to its exit."""

    def __init__(self, run: VirtualRun, number: int, began_seconds: float, shim: Process | None) -> None:
        self.run, self.number, self.began_seconds, self.shim_process = run, number, began_seconds, shim
        self.shim_pid = shim.pid if shim is not None else None
        self.is_shim_reaped = False
        self.is_adopted = shim is None
        self.record = Record(run, number)
        self.leader, self.shim = Held(run.machine), Held(run.machine)
        self.unverified_since_seconds: float | None = None
        self.oom_kill_count = 0
        self.host_peak_bytes: int | None = None

    def shim_was_reaped(self) -> None:
        self.shim_pid, self.is_shim_reaped = None, True

    def ancestor(self) -> int | None:
        process = self.shim.process
        return process.pid if process is not None and process.is_alive else None

    def look(self, seconds: float) -> AttemptSight:
        attempt, record = self.run.attempts[self.number], self.record.value
        if record is not None:
            self.leader.look(record.identity)
        if record is not None and not record.is_executed and self._shim_is_alive(seconds) is False:
            self._complete(record)
        strange = record is not None and self.leader.standing in (Standing.STRANGER, Standing.UNKNOWN)
        self.unverified_since_seconds = (self.unverified_since_seconds or seconds) if strange else None
        count: int | None = None
        if record is not None:
            count = sum(1 for process in members(self.run, record) if process.pid != record.identity.pid or not self.leader.is_dead)
            said = attempt.exit.evidence.get("oom_kills", 0) if attempt.exit is not None else 0
            self.oom_kill_count = max(self.oom_kill_count, attempt.oom_kills, said)
        return AttemptSight(
            number=self.number, standing=self.leader.standing, standing_text=self.leader.text, is_dead=self.leader.is_dead,
            is_executed=record is not None and record.is_executed, exit=attempt.exit, tree_count=count,
            shim_is_alive=self._shim_is_alive(seconds), is_started=attempt.is_started, age_seconds=seconds - self.began_seconds,
            host_rebooted=record is not None and record.identity.boot_id != self.run.machine.boot_id,
            unverified_seconds=0.0 if self.unverified_since_seconds is None else seconds - self.unverified_since_seconds,
            oom_kill_count=self.oom_kill_count,
        )

    def _complete(self, record: AttemptRecord) -> None:
        identity = replace(record.identity, argv=record.argv)
        is_ours = isinstance(grip(self.run.machine, identity), Process)
        if self.leader.standing is Standing.STRANGER and not self.leader.is_dead and is_ours:
            self.run.attempts[self.number].record = replace(record, identity=identity, is_executed=True)  # in place, where a disk is full

    def _shim_is_alive(self, seconds: float) -> bool | None:
        if self.is_shim_reaped:
            return False
        record = self.run.shim_record
        if record is None or record.identity.argv[-1:] != (str(self.number),):
            if self.shim_pid is not None:
                return True
            return None if seconds - self.began_seconds < SHIM_PATIENCE_SECONDS else False
        self.shim.look(record.identity)
        if self.shim.is_dead:
            return False
        return True if self.shim.standing is Standing.VERIFIED else None


class VirtualSampler(Sampler):
    """The real pace of looking at memory, over what virtual processes hold."""

    def see(self, memory: MemoryLook, seconds: float) -> MemoryLook:
        self.memory = memory
        self._host.see(seconds, memory.host_bytes)
        self._free.see(seconds, None if memory.available_bytes is None else -memory.available_bytes)
        return memory

    def seconds_to_line(self, processes: tuple[Process, ...]) -> float:
        """When the tree will have crossed its next line, and a peek in between sees it."""
        used, growth = sum(process.bytes() for process in processes), sum(process.growth for process in processes)
        ahead = [line - used for line in (self.lines.host_soft_bytes, self.lines.host_hard_bytes) if line > used]
        return min(ahead) / growth + PEEK_SECONDS_MIN if ahead and growth > 0 else math.inf


class VirtualObserver:
    def __init__(self, run: VirtualRun) -> None:
        self.run = run
        self.want = Want(run)
        self.watch: VirtualWatch | None = None
        self.sampler = VirtualSampler(run.spec.caps)
        self.lock_held_since_seconds: float | None = None
        self.faults: tuple[str, ...] = ()

    def begin(self, number: int, seconds: float, shim: Any) -> None:
        self.watch = VirtualWatch(self.run, number, seconds, shim)
        self.sampler = VirtualSampler(self.run.spec.caps)

    def rest(self) -> None:
        """The attempt is over: nothing of it wakes the supervisor any more."""

    def rescan(self) -> None:
        """Every virtual look is a scan."""

    def look(self, moment: Moment, time: EffectiveTime, history: History, *, silent_since_seconds: float, is_durable: bool) -> HostSight:
        seconds = moment.boottime_seconds
        attempt = None if self.watch is None or history.is_attempt_over else self.watch.look(seconds)
        memory = self._measure(attempt, seconds)
        is_resting = attempt is None or attempt.standing is not Standing.VERIFIED
        is_held = is_resting and self.run.is_trainer_locked()
        self.lock_held_since_seconds = None if not is_held else seconds if self.lock_held_since_seconds is None else self.lock_held_since_seconds
        return HostSight(
            time=time, boottime_seconds=seconds, spec=self.run.spec, want=self.run.want, attempt=attempt, memory=memory,
            cutoff_at=self.run.effective_cutoff(), silent_seconds=max(0.0, seconds - silent_since_seconds), is_trainer_lock_held=is_held,
            is_durable=is_durable, disk_free_bytes=self.run.machine.disk_free_bytes() if is_resting else None,
            lock_held_seconds=0.0 if self.lock_held_since_seconds is None else seconds - self.lock_held_since_seconds,
        )

    def _measure(self, attempt: AttemptSight | None, seconds: float) -> MemoryLook:
        available = self.run.machine.available_bytes()
        if self.watch is None or attempt is None or attempt.standing is not Standing.VERIFIED or self.watch.record.value is None:
            return self.sampler.see(MemoryLook(available_bytes=available), seconds)
        host = sum(process.bytes() for process in members(self.run, self.watch.record.value))
        self.watch.host_peak_bytes = max(host, self.watch.host_peak_bytes or 0)
        return self.sampler.see(MemoryLook(host_bytes=host, accelerator_bytes=None, available_bytes=available), seconds)

    def seconds_to_line(self) -> float:
        """Of a living tree, when a peek between two looks will wake the supervisor."""
        record = self.watch.record.value if self.watch is not None else None
        return math.inf if record is None else self.sampler.seconds_to_line(members(self.run, record))
