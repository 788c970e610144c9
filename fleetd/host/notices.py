"""The supervisor's pen: notices into the spool, the memory beside them, the observation, the heartbeat and the trace.

Notices and memory go into the journal in one transaction. The rest are looks, not history: a disk that refuses them changes
nothing but their age.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from fleetd import logs
from fleetd.clock import Moment
from fleetd.files import overwrite, read_record
from fleetd.host import rundir
from fleetd.host.causes import grace_of, stop_moment
from fleetd.host.history import History
from fleetd.host.observe import AttemptWatch
from fleetd.host.progress import Progress
from fleetd.host.sight import HostSight
from fleetd.host.tree import SignalReport
from fleetd.journal import Journal, salvage
from fleetd.model import CapPart, CheckpointSight, MemorySight, Observation
from fleetd.paths import RunPaths
from fleetd.wire import WireError, decode, encode
from policies.errors import JournalDamaged
from policies.facts import CapGrade, RunState, format_moment
from policies.identity import Standing
from policies.lifecycle import SETTLED
from policies.memory import gib
from policies.retries import used_restarts

TRACE_SECONDS = 5.0
SIGNALS_PER_NOTICE_MAX = 50
NUMBERS_PER_LIFE = 1_000_000
"""More notices than a run ever tells. Behind each loss of its journal counting goes on at the next multiple, so that no number means two
notices, and the reader sees that some are gone, instead of taking another one for the next."""
_HISTORY = "history"


class Spool:
    """Notices and the supervisor's memory, in the run's journal."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self.salvaged = ""
        self.journal = self._open()
        self.waiting: list[dict[str, Any]] = []
        self._written: History | None = None
        self._acknowledged = 0
        self._acknowledged_mark: tuple[int, int] | None = None

    def load(self) -> History:
        """What the last supervisor remembered; from the directory alone when the journal knows nothing."""
        stored = self.journal.state_get(_HISTORY)
        if stored is not None:
            self._written = decode(History, stored, _HISTORY)
            return self._written
        attempt, seen = rundir.newest_attempt(self.paths), rundir.read_observation(self.paths)
        self.journal.start_after(first_number(self.journal, self._read_acknowledged(), self._losses, is_first=attempt == 0))
        if attempt == 0:
            return History()
        state = RunState.STAGING if seen is None else seen.state
        reason, detail = (None, "") if seen is None else (seen.reason, seen.detail)
        is_over = state in (*SETTLED, RunState.BACKOFF, RunState.HELD)
        return History(state=state, reason=reason, detail=detail, attempt=attempt, is_attempt_over=is_over, is_attempt_announced=seen is not None)

    def tell(self, moment: Moment, kind: str, **body: Any) -> None:
        """Queue one notice for the next write, and say the same in the log."""
        self.waiting.append({"at": format_moment(moment.now), "kind": kind, "body": encode(body)})
        logs.changed(kind, **{name: value for name, value in body.items() if name != "evidence"})

    def write(self, history: History) -> None:
        """Notices and memory in one transaction; nothing when neither changed."""
        memory = {_HISTORY: encode(history)} if self.waiting or self._written is None or _essence(history) != _essence(self._written) else None
        if memory is None:
            return
        self.journal.append(self.waiting, state=memory)
        self.waiting, self._written = [], history

    def tend(self) -> None:
        """Once per tick: try again what a full disk refused, and forget what the coordinator has acknowledged."""
        self.journal.retry()
        try:
            status = os.stat(self.paths.acknowledged)
        except OSError:
            return
        if (mark := (status.st_mtime_ns, status.st_ino)) != self._acknowledged_mark:
            self._acknowledged_mark = mark
            self.journal.trim(self._read_acknowledged())

    def _open(self) -> Journal:
        try:
            return Journal.open(self.paths.journal, patient=True)
        except JournalDamaged as damage:
            # A trainer has to be watched: the damaged bytes are kept aside for a person, what reads of them goes on.
            aside = self._aside(self._losses + 1)
            kept = salvage(self.paths.journal, aside, start_after=number_after_loss(self._read_acknowledged(), self._losses + 1))
            self.salvaged = f"the journal was damaged ({damage.what}); {kept} notices were kept, the damaged file is {aside.name}"
            return Journal.open(self.paths.journal, patient=True)

    @property
    def _losses(self) -> int:
        """How often this journal was damaged so far."""
        return next(number for number in count() if not self._aside(number + 1).exists())

    def _aside(self, number: int) -> Path:
        return Path(f"{self.paths.journal}.damaged-{number}")

    def _read_acknowledged(self) -> int:
        try:
            value = read_record(self.paths.acknowledged)["notice"]
        except (OSError, WireError, KeyError, TypeError):
            return 0
        return value if isinstance(value, int) and value > 0 else 0


def number_after_loss(acknowledged: int, losses: int) -> int:
    """Behind which number notices go on once a journal was lost for the `losses`-th time, at least."""
    return max(losses, acknowledged // NUMBERS_PER_LIFE + 1) * NUMBERS_PER_LIFE


def first_number(journal: Journal, acknowledged: int, losses: int, *, is_first: bool) -> int:
    """Behind which number a supervisor goes on that finds no memory in its journal."""
    is_young = is_first and acknowledged == 0 and not losses
    is_counted_on = journal.last >= max(1, losses) * NUMBERS_PER_LIFE
    return acknowledged if is_young or is_counted_on or not journal.is_known else number_after_loss(acknowledged, losses)


def _essence(history: History) -> History:
    """What is worth a write of its own: not where the log was read up to, which a new supervisor finds again; and of a stop and of an end that
    they are, not since when: every look on a slow disk shifts that (`after_gap`), and each write would make the next look later."""
    stop = None if history.stop is None else replace(history.stop, asked_seconds=0.0)
    gone_seconds = None if history.leader_gone_seconds is None else 0.0
    return replace(history, log_offset=0, progress=Progress(), stop=stop, leader_gone_seconds=gone_seconds)


def numbers_of(sight: HostSight, history: History) -> dict[str, object]:
    """What is told beside each change of state, as far as it is known."""
    numbers = {
        "host_bytes": sight.memory.host_bytes, "accelerator_bytes": sight.memory.accelerator_bytes, "step": history.progress.step,
        "available_bytes": sight.memory.available_bytes,
    }
    return {name: value for name, value in numbers.items() if value is not None}


def signal_notices(reports: tuple[SignalReport, ...], purpose: str) -> list[dict[str, Any]]:
    """One audit body for each signal sent or refused."""
    bodies = [
        {"pid": report.pid, "signal": report.signal, "delivered": report.delivered, "purpose": purpose, "verdict": report.verdict}
        for report in reports[:SIGNALS_PER_NOTICE_MAX]
    ]
    if len(reports) > SIGNALS_PER_NOTICE_MAX:
        bodies.append({"purpose": purpose, "verdict": f"{len(reports) - SIGNALS_PER_NOTICE_MAX} more processes were signalled the same way"})
    return bodies


def observation_of(sight: HostSight, history: History, watch: AttemptWatch | None, *, health: str, faults: tuple[str, ...] = ()) -> Observation:
    """What the coordinator shows of this run. Alarms: those of the run, then what this host can't read or write."""
    progress, attempt = history.progress, sight.attempt
    newest = max(history.checkpoints, key=lambda seen: seen.step, default=None)
    alarms = (*history.alarms.values(), *faults)
    if health != "ok":
        alarms = (*alarms, f"the supervisor's journal is {health}")
    record = watch.record.value if watch is not None and attempt is not None else None
    terms = sight.spec.restarts
    return Observation(
        run_id=sight.spec.run_id, at=sight.time.now, state=history.state, reason=history.reason, detail=history.detail, attempt=history.attempt,
        pid=record.identity.pid if record is not None else None, identity=_identity_words(sight),
        step=progress.step, steps_planned=progress.steps_planned, step_at=progress.step_at, steps_per_second=progress.steps_per_second,
        loss=progress.loss, memory=_memory_sight(sight, history, watch), best=progress.best,
        checkpoint=None if newest is None else CheckpointSight(step=newest.step, digest=newest.digest, at=newest.at),
        grace_seconds=grace_of(sight, history), stop_at=stop_moment(sight, history), cutoff_at=sight.cutoff_at,
        final_at=None if sight.spec.deadline is None else sight.spec.deadline.final_at,
        restarts_used=len(used_restarts(history.restarts, now=sight.time.now, window_seconds=terms.window_seconds)),
        restarts_max=terms.restarts_max, next_attempt_at=history.next_attempt_at, alarms=alarms, supervisor_pid=os.getpid(),
        shim_pid=watch.ancestor() if watch is not None and attempt is not None else None,
        boot_id="" if history.anchor is None else history.anchor.boot_id, boottime_seconds=sight.boottime_seconds,
    )


def _identity_words(sight: HostSight) -> str:
    attempt = sight.attempt
    if attempt is None or attempt.standing is Standing.GONE:
        return "gone"
    if attempt.standing is None:
        return "cannot verify: no trainer is recorded yet"
    return "verified" if attempt.standing is Standing.VERIFIED else f"cannot verify: {attempt.standing_text}"


def _memory_sight(sight: HostSight, history: History, watch: AttemptWatch | None) -> MemorySight:
    record = watch.record.value if watch is not None else None
    sampled = CapPart(grade=CapGrade.SAMPLED, means=sight.memory.means)
    parts = {
        "cgroup": _cgroup_part(sight, record.cap) if record is not None else CapPart(grade=CapGrade.ABSENT, means="no attempt yet"),
        "sampler": sampled if sight.memory.host_bytes is not None else CapPart(grade=CapGrade.ABSENT, means="no process to look at"),
        "allocator": _allocator_part(sight, history),
        "floor": CapPart(grade=CapGrade.SAMPLED, means=f"MemAvailable each second, floor {gib(sight.spec.caps.floor_bytes)}"),
    }
    return MemorySight(
        host_bytes=sight.memory.host_bytes, accelerator_bytes=sight.memory.accelerator_bytes,
        host_peak_bytes=watch.host_peak_bytes if watch is not None else None, available_bytes=sight.memory.available_bytes, parts=parts,
    )


def _cgroup_part(sight: HostSight, born: CapPart) -> CapPart:
    fault = sight.attempt.cap_fault if sight.attempt is not None else ""
    return CapPart(grade=CapGrade.ABSENT, means=f"{born.means}; but {fault}") if fault else born


def _allocator_part(sight: HostSight, history: History) -> CapPart:
    limit_bytes, seen = history.progress.accelerator_limit_bytes, sight.memory.accelerator_bytes is not None
    why = sight.memory.accelerator_why or "nobody looked"
    looked = "device bytes of the tree each second" if seen else f"no device bytes can be read here ({why})"
    if limit_bytes is not None:
        return CapPart(grade=CapGrade.ENFORCED, means=f"the trainer's allocator refuses more than {gib(limit_bytes)}; {looked}")
    return CapPart(grade=CapGrade.SAMPLED if seen else CapGrade.ABSENT, means=f"{looked}; the trainer has named no limit of its allocator")


class Looks:
    """heartbeat.json, observation.json and trace.jsonl: replaced or appended, never synced, never in the way."""

    def __init__(self, paths: RunPaths) -> None:
        self.paths = paths
        self._traced_seconds: float | None = None
        self._traced_state: RunState | None = None
        self._refused = ""
        self._live_parts = self._last_parts()
        self._is_introduced = False

    def introduce(self, now: datetime) -> None:
        """supervisor.json: this process, which the shim may end if it falls silent. A disk that refuses it is asked again at each beat."""
        try:
            if not self._is_introduced:
                rundir.write_program(self.paths.supervisor, now)
                self._is_introduced = True
        except OSError as fault:
            logs.failed("supervisor_not_recorded", because=fault)

    @property
    def is_refused(self) -> bool:
        """Whether the disk did not take the last look."""
        return bool(self._refused)

    def beat(self, sight: HostSight, history: History) -> None:
        self.introduce(sight.time.now)
        now, seconds = sight.time.now, sight.boottime_seconds
        stop_at, cutoff_at = stop_moment(sight, history), sight.cutoff_at
        beat = rundir.Heartbeat(
            boottime_seconds=seconds, pid=os.getpid(), stop_at=stop_at, cutoff_at=cutoff_at,
            stop_boottime_seconds=None if stop_at is None else seconds + (stop_at - now).total_seconds(),
            cutoff_boottime_seconds=None if cutoff_at is None else seconds + (cutoff_at - now).total_seconds(),
        )
        try:
            rundir.write_heartbeat(self.paths, beat)
        except OSError:
            # The shim takes a silent supervisor for a hung one. On a full disk the old file can still be written over.
            overwrite(self.paths.heartbeat, json.dumps(encode(beat)))

    def observe(self, observation: Observation) -> None:
        observation = self._with_last_parts(observation)
        try:
            rundir.write_observation(self.paths, observation)
            self._refused = ""
        except OSError as fault:
            if not self._refused:
                logs.failed("observation_refused", because=fault)
            self._refused = str(fault)
            overwrite(self.paths.observation, json.dumps(encode(observation)))

    def _with_last_parts(self, observation: Observation) -> Observation:
        """How strongly the cap held is told by the last look at a living tree; a look at none knows nothing better."""
        memory = observation.memory
        if memory is None:
            return observation
        if memory.host_bytes is not None:
            self._live_parts = memory.parts
        return replace(observation, memory=replace(memory, parts={**memory.parts, **self._live_parts}))

    def _last_parts(self) -> dict[str, CapPart]:
        """What the supervisor before this one had seen of a living tree."""
        seen = rundir.read_observation(self.paths)
        parts = seen.memory.parts if seen is not None and seen.memory is not None else {}
        return parts if "sampler" in parts and parts["sampler"].grade is not CapGrade.ABSENT else {}

    def trace(self, sight: HostSight, history: History) -> None:
        """Every few seconds and at each change of state, one line for the report."""
        is_due = self._traced_seconds is None or sight.boottime_seconds - self._traced_seconds >= TRACE_SECONDS
        if not is_due and self._traced_state is history.state:
            return
        self._traced_seconds, self._traced_state = sight.boottime_seconds, history.state
        line = {
            "at": format_moment(sight.time.now), "state": history.state.value, "step": history.progress.step, "loss": history.progress.loss,
            "host_bytes": sight.memory.host_bytes, "accelerator_bytes": sight.memory.accelerator_bytes, "host_cap_bytes": sight.spec.caps.host_bytes,
        }
        try:
            with open(self.paths.trace, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            pass  # a gap in a curve
