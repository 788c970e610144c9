"""A run directory in memory, with what is durable and what a power cut may undo. Stands in for fleetd/host/rundir.py and for
the disk below fleetd/journal.py.

Writers that sync (orders, attempts, exits, the journal) fail on a full disk and outlive a power cut; looks (heartbeat, observation,
acknowledgement) and the tail of the log do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from fleetd.host.follow import news_of
from fleetd.host.notices import number_after_loss
from fleetd.host.rundir import AttemptRecord, Heartbeat, ProgramRecord, effective_cutoff, is_left_behind
from fleetd.journal import Journal
from fleetd.model import CutoffOrder, ExitRecord, Notice, Observation, RunSpec, WantOrder
from fleetd.wire import decode, encode
from policies.facts import Reason, RunState, StopMode, Want
from tests.sim.machine import Machine, Process

CHECKPOINT_BYTES = 1 << 20


@dataclass
class Checkpoint:
    """`is_whole`: every byte is what the manifest says. The claim reads the same either way."""

    step: int
    digest: str
    at: datetime
    is_whole: bool = True


@dataclass
class Attempt:
    number: int
    record: AttemptRecord | None = None
    is_started: bool = False
    exit: ExitRecord | None = None
    leader: Process | None = None
    oom_kills: int = 0


@dataclass
class Spool:
    """What a supervisor's journal holds on disk."""

    entries: dict[int, dict[str, Any]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    last: int = 0
    is_damaged: bool = False
    """Nobody can read it until somebody has salvaged it; what is kept here is what that will find."""

    def entries_after(self, after: int, limit: int) -> list[dict[str, Any]]:
        return list(islice((entry for number, entry in self.entries.items() if number > after), limit))


class VirtualJournal(Journal):
    """The real Journal over a virtual disk: what could not be written waits in its memory, and dies with it."""

    def __init__(self, machine: Machine, disk: Spool, written: Callable[[list[dict[str, Any]]], None] | None = None) -> None:
        super().__init__(Path("/virtual/journal.db"), read_only=False)
        self._machine, self._disk, self._written = machine, disk, written
        self._connect()

    def _connect(self) -> bool:
        self._connection = self  # type: ignore[assignment]
        self._durable_last, self._state = self._disk.last, {**self._disk.state, **self._state_waiting}
        return True

    def _write(self) -> None:
        try:
            self._machine.check_disk()
        except OSError as fault:
            self._fault = str(fault)
            return
        disk, fresh = self._disk, []
        disk.last = max(self._durable_last, self._floor_waiting)
        for entry in self._queue:
            disk.last += 1
            disk.entries[disk.last] = {**entry, "sequence": disk.last}
            fresh.append(disk.entries[disk.last])
        for number in [number for number in disk.entries if number <= self._trim_waiting]:
            del disk.entries[number]
        disk.state.update(self._state_waiting)
        self._durable_last, self._fault = disk.last, ""
        self._queue, self._state_waiting, self._trim_waiting, self._floor_waiting = [], {}, 0, 0
        if self._written is not None:
            self._written(fresh)

    def entries(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return self._disk.entries_after(after, limit)


class VirtualRun:
    """One run directory, and beside it what is true of the run."""

    def __init__(self, machine: Machine, spec: RunSpec, task: dict[str, Any] | None, want: WantOrder) -> None:
        self.machine, self.spec, self.task, self.want = machine, spec, task, want
        self.run_id, self.came_in_boot = spec.run_id, machine.boot_id
        self.cutoff: CutoffOrder | None = None
        self.cutoff_told_at = 0.0
        self.acknowledged = 0
        self.spool = Spool()
        self.heartbeat: Heartbeat | None = None
        self.shown_state: RunState | None = None
        self._shown: Callable[[], Observation] | None = None
        self._observation: Observation | None = None
        self._shown_at = 0.0
        self.supervisor_record: ProgramRecord | None = None
        self.shim_record: ProgramRecord | None = None
        self.lock: Process | None = None
        self.trainer_lock: list[Process] = []
        self.attempts: dict[int, Attempt] = {}
        self.log: list[dict[str, Any]] = []
        self.log_synced = 0
        self.checkpoints: dict[int, Checkpoint] = {}
        self.checkpoint_changes = 0
        self.predictions: dict[int, tuple[str, float, str]] = {}
        """By step: SHA-256 of the rows, value, digest of the checkpoint."""
        self.has_passed_pilot = False
        """What evidence/pilot.json says."""
        self.scored: dict[str, str] = {}
        """Of an evaluation: SHA-256 by split."""
        self.listeners: list[Any] = []
        self.supervisor: Any = None
        """The newest virtual supervisor, alive or not."""
        self.shim_dies_at = ""
        self.trainer: Any = None
        self.is_damaged = False
        """Whether its journal was ever damaged: then history may have lost what it had not been told."""
        self.losses = 0
        """Damaged journals that were put aside."""
        self._read: dict[int, tuple[dict[str, Any], Notice]] = {}
        self.told: dict[int, dict[str, Any]] = {}
        """Every notice that was ever durable, by number: the truth that the coordinator's history is compared with."""
        self.acknowledged_ever = 0
        """As far as any life of the coordinator has ever said that it has these notices."""

    @property
    def observation(self) -> Observation | None:
        """observation.json. It is put into words only when somebody reads it."""
        if self._observation is None and self._shown is not None:
            self._observation = self._shown()
            self.machine.laws.observed(self, self._observation, self._shown_at)
        return self._observation

    def show(self, words: Callable[[], Observation]) -> None:
        self._shown, self._observation, self._shown_at = words, None, self.machine.world.seconds

    def lose_power(self) -> None:
        world = self.machine.world
        if world.chance(0.5):
            self.heartbeat = self._shown = self._observation = self.shown_state = None
        if world.chance(0.5):
            self.acknowledged = 0
        self.lock = None
        self.trainer_lock = []
        kept = world.random.randint(min(self.log_synced, len(self.log)), len(self.log))
        del self.log[kept:]

    def damage_spool(self, *, keeps_some: bool = True) -> None:
        """What reads from the first entry on can be kept, the memory beside it may be lost, and the highest number that was given."""
        world, spool = self.machine.world, self.spool
        kept = sorted(spool.entries)[:world.random.randint(0, len(spool.entries)) if keeps_some else 0]
        last = spool.last if world.chance(0.5) else 0
        spool.entries = {number: spool.entries[number] for number in kept}
        spool.last = max(kept[-1] if kept else 0, last)
        if world.chance(0.5):
            spool.state = {}
        self.is_damaged = spool.is_damaged = True

    def salvage_spool(self) -> bool:
        """Mirrors journal.salvage as a supervisor does it. Whether there was anything to salvage; on a full disk what was kept is gone."""
        spool = self.spool
        if not spool.is_damaged:
            return False
        spool.is_damaged = False
        self.losses += 1
        if self.machine.is_disk_full:
            spool.entries, spool.state, spool.last = {}, {}, 0
        else:
            spool.last = max(spool.last, number_after_loss(self.acknowledged, self.losses))
        return True

    def journal(self) -> VirtualJournal:
        return VirtualJournal(self.machine, self.spool, self._written)

    def _written(self, fresh: list[dict[str, Any]]) -> None:
        for entry in fresh:
            if entry["sequence"] in self.told:
                self.machine.laws.broken("12", f"notice {entry['sequence']} of {self.run_id} is given out for a second time")
            self.told[entry["sequence"]] = entry
        self.changed()

    def wake_supervisor(self) -> None:
        """The trainer or the shim has ended, and whoever watches them by pidfd wakes up."""
        if self.supervisor is not None:
            self.supervisor.wake()

    def changed(self) -> None:
        """Something that an agent would find at its next look."""
        for listener in list(self.listeners):
            listener()

    def notices(self, after: int, limit: int) -> tuple[Notice, ...]:
        if self.spool.is_damaged:
            return ()
        return tuple(self._decoded(entry) for entry in self.spool.entries_after(after, limit))

    def _decoded(self, entry: dict[str, Any]) -> Notice:
        """A notice is asked for again and again until it is acknowledged; an agent keeps what it has read, too."""
        known = self._read.get(entry["sequence"])
        if known is None or known[0] is not entry:
            known = self._read[entry["sequence"]] = entry, decode(Notice, entry)
        return known[1]

    # What an agent says to a coordinator that lost a part of its history: reports.RunWatch and retell.py.

    def lost_to(self, after: int) -> int:
        """The last of the notices asked for that the spool does not hold any more; 0 when it holds them all."""
        if self.spool.is_damaged:
            return 0
        held = [number for number in self.spool.entries if number > after]
        lost_to = min(held) - 1 if held else self.spool.last
        return lost_to if lost_to > after else 0

    def retold(self) -> tuple[Notice, ...]:
        found: list[tuple[str, dict[str, Any]]] = []
        for number, attempt in sorted(self.attempts.items()):
            found.append(("attempt_started", {"attempt": number}))
            if attempt.exit is not None:
                found.append(("attempt_ended", {"attempt": number, "exit": encode(attempt.exit), "reason": None}))
        found += [news for each in self.log if (news := news_of(each)) is not None]
        kept = sorted(self.checkpoints.values(), key=lambda each: each.step)
        found += [("checkpoint", {"step": each.step, "digest": each.digest, "bytes": CHECKPOINT_BYTES}) for each in kept]
        return tuple(Notice(sequence=0, at=self.machine.moment().now, kind=kind, body=body) for kind, body in found)

    # Orders, as rundir.apply_want and rundir.apply_cutoff.

    def apply_want(self, order: WantOrder) -> tuple[bool, WantOrder]:
        if order.sequence <= self.want.sequence or is_left_behind(self.want):
            return False, self.want
        self.machine.check_disk()
        self.want = order
        return True, order

    def leave_behind(self, actor: str) -> bool:
        if is_left_behind(self.want):
            return False
        self.machine.check_disk()
        at = self.machine.moment().now
        self.want = WantOrder(
            sequence=self.want.sequence + 1, want=Want.STOP, mode=StopMode.NOW, reason=Reason.SUPERSEDED, actor=actor, at=at, is_final=True,
        )
        return True

    def apply_cutoff(self, order: CutoffOrder) -> bool:
        in_force_at = self.effective_cutoff()
        if in_force_at is None or order.cutoff_at >= in_force_at:
            return False
        self.machine.check_disk()
        self.cutoff, self.cutoff_told_at = order, self.machine.world.seconds
        return True

    def effective_cutoff(self) -> datetime | None:
        return effective_cutoff(self.spec, self.cutoff)

    # Attempts.

    @property
    def newest_attempt(self) -> int:
        return max(self.attempts, default=0)

    def create_attempt(self) -> int:
        self.machine.check_disk()
        number = self.newest_attempt + 1
        self.attempts[number] = Attempt(number=number)
        return number

    def write_attempt(self, record: AttemptRecord) -> None:
        self.machine.check_disk()
        self.attempts[record.attempt].record = record

    def write_exit(self, record: ExitRecord) -> bool:
        self.machine.check_disk()
        attempt = self.attempts[record.attempt]
        if attempt.exit is not None:
            return False
        attempt.exit = record
        self.log_synced = len(self.log)
        return True

    def is_locked(self) -> bool:
        return self.lock is not None and self.lock.is_alive

    def is_trainer_locked(self) -> bool:
        self.trainer_lock = [process for process in self.trainer_lock if process.is_alive]
        return bool(self.trainer_lock)

    # Checkpoints, as fleetd/host/checkpoints.py.

    def put_checkpoint(self, step: int, at: datetime, keep: int, protected: set[int]) -> Checkpoint:
        """Atomic and durable, then retention. A name that is taken by a damaged directory is freed first."""
        self.machine.check_disk(CHECKPOINT_BYTES)
        self.checkpoints[step] = Checkpoint(step=step, digest=digest_of(self.run_id, step), at=at)
        self.log_synced = len(self.log)
        for old in sorted(self.checkpoints)[:-keep]:
            if old not in protected and old != 0:
                del self.checkpoints[old]
        self.checkpoint_changes += 1
        return self.checkpoints[step]

    def choose_resume(self) -> tuple[Checkpoint | None, tuple[str, ...]]:
        refused: list[str] = []
        for step in sorted(self.checkpoints, reverse=True):
            if self.checkpoints[step].is_whole:
                return self.checkpoints[step], tuple(refused)
            refused.append(f"step {step}: its bytes are not what the manifest says")
        return self.seed(), tuple(refused)

    def seed(self) -> Checkpoint | None:
        """What a run begins with that goes on with another one: a verified copy that was staged here."""
        begins = self.spec.continues
        if begins is None or begins.step is None or begins.digest is None or begins.digest not in self.machine.models:
            return None
        return Checkpoint(step=begins.step, digest=begins.digest, at=self.spec.created_at)

    def living_tree(self, token: str | None = None) -> list[Process]:
        """The living processes of this run's trainers, by the truth; of one attempt by its token."""
        return [
            process for process in self.machine.processes.values()
            if process.run_id == self.run_id and process.role in ("trainer", "worker") and process.is_alive
            and (token is None or process.token == token)
        ]


def digest_of(run_id: str, step: int) -> str:
    """Equal runs give equal checkpoints: the digest of a step is always the same."""
    return hashlib.sha256(f"{run_id}@{step}".encode()).hexdigest()


def rows_of(run_id: str, step: int) -> str:
    return hashlib.sha256(f"rows {run_id}@{step}".encode()).hexdigest()

