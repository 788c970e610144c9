"""What a supervisor remembers of its run, and the words in which `decide` says what to do.

The memory lies in the journal beside the notices, so that a new supervisor goes on where the old one was killed. Folding an
action into it is pure; carrying the action out is the loop's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from fleetd.host.progress import Progress, next_attempt
from policies.deadlines import ClockPair, after_reboot
from policies.facts import Reason, RunState, StopMode
from policies.lifecycle import check_run_step

RESTARTS_REMEMBERED_MAX = 1000
LOOK_COUNTS_SECONDS_MAX = 1.5
"""Longer than any pause between two looks at a trainer that has to end. What is beyond it was no patience: nobody was there to be patient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A stop of the current attempt that is under way. Seconds are boottime."""

    reason: Reason
    mode: StopMode
    asked_seconds: float
    grace_seconds: float
    asked_again: bool = False
    forced: bool = False
    """Whether a SIGKILL was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """The clock pair that this boot's deadlines are counted from."""

    boot_id: str
    now: datetime
    boottime_seconds: float
    is_trusted: bool = True
    """False after a reboot, until the kernel says that the clock is synchronised or a coordinator has confirmed it."""
    least_now: datetime | None = None
    """While it is not trusted: what time it was at least at this moment, by records and orders alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenCheckpoint:
    step: int
    digest: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    state: RunState = RunState.STAGING
    """STAGING is where a run stands whose directory exists and whose supervisor has not started anything yet."""
    reason: Reason | None = None
    detail: str = ""
    attempt: int = 0
    is_attempt_over: bool = True
    is_attempt_announced: bool = False
    """Whether the notice that it started was given."""
    restarts: tuple[datetime, ...] = ()
    fruitless_count: int = 0
    step_at_start: int = -1
    """The newest checkpoint when the current attempt was started; -1 for none."""
    stop: Stop | None = None
    leader_gone_seconds: float | None = None
    """Boottime at which the leader was first seen to have ended."""
    next_attempt_at: datetime | None = None
    rest_sequence: int = 0
    """The want order in force when the run came to rest: only a later one wakes it."""
    was_rebooted: bool = False
    """Whether the host was started again since the run last changed its state."""
    anchor: Anchor | None = None
    clock_seen_at: datetime | None = None
    log_offset: int = 0
    audit_offset: int = 0
    """Up to where audit.jsonl has become notices."""
    checkpoints: tuple[SeenCheckpoint, ...] = ()
    progress: Progress = field(default_factory=Progress)
    alarms: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    to: RunState
    reason: Reason | None
    detail: str
    next_attempt_at: datetime | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAttempt:
    """Needs the durable record; the shim chooses the checkpoint."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """SIGTERM and SIGCONT to the leader, or to every member where the order says `signal: group`."""

    reason: Reason
    grace_seconds: float
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskAgain:
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillTree:
    reason: Reason
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordExit:
    """Nobody has recorded how the attempt ended: find out what can still be known, and write it down."""

    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    reason: Reason | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    key: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearAlarm:
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    because: str


Action = Move | StartAttempt | Ask | AskAgain | KillTree | RecordExit | EndAttempt | Alarm | ClearAlarm | Finish


def after_action(history: History, action: Action, *, now: datetime, boottime_seconds: float, want_sequence: int) -> History:
    """The memory once an action was carried out. IllegalTransition when a Move is not in the table."""
    if isinstance(action, Move):
        return _moved(history, action, now=now, want_sequence=want_sequence)
    if isinstance(action, Ask):
        stop = Stop(reason=action.reason, mode=StopMode.GRACEFUL, asked_seconds=boottime_seconds, grace_seconds=action.grace_seconds)
        return replace(history, stop=stop)
    if isinstance(action, AskAgain):
        assert history.stop is not None, "a second ask follows a first"
        return replace(history, stop=replace(history.stop, asked_again=True))
    if isinstance(action, KillTree):
        return replace(history, stop=_killing(history.stop, action, boottime_seconds))
    if isinstance(action, EndAttempt):
        return replace(history, is_attempt_over=True, stop=None, leader_gone_seconds=None, progress=next_attempt(history.progress))
    if isinstance(action, Alarm):
        return replace(history, alarms={**history.alarms, action.key: action.text})
    if isinstance(action, ClearAlarm):
        return replace(history, alarms={key: text for key, text in history.alarms.items() if key != action.key})
    return history


def attempt_started(history: History, number: int) -> History:
    """The memory once the folder of attempt `number` exists."""
    newest = max((seen.step for seen in history.checkpoints), default=-1)
    return replace(
        history, attempt=number, is_attempt_over=False, is_attempt_announced=False, stop=None, leader_gone_seconds=None, step_at_start=newest,
        progress=next_attempt(history.progress),
    )


def after_gap(history: History, gap_seconds: float) -> History:
    """The memory when the last look is so long ago. A machine that stood still, or a process that waited for its disk, kept the trainer from
    ending as it kept us from looking: each look counts as one pause at most. Cutoff and cap are no patience, they go by the clock."""
    beyond_seconds = gap_seconds - LOOK_COUNTS_SECONDS_MAX
    if beyond_seconds <= 0 or history.state is RunState.STUCK:  # nothing is waited for any more, and its looks are further apart
        return history
    stop, gone_seconds = history.stop, history.leader_gone_seconds
    return replace(
        history, stop=None if stop is None else replace(stop, asked_seconds=stop.asked_seconds + beyond_seconds),
        leader_gone_seconds=None if gone_seconds is None else gone_seconds + beyond_seconds,
    )


def time_is_known(history: History, known: ClockPair, told_at: datetime | None = None) -> History:
    """The memory once somebody knows what time it is. Time is counted from there, but never from earlier than what was recorded before this
    boot and has gone by in it, nor than the moment of an order that came meanwhile (`told_at`); what was appointed meanwhile by a clock that
    nobody knew is put right."""
    anchor = history.anchor
    assert anchor is not None and not anchor.is_trusted
    gone_by = timedelta(seconds=known.boottime_seconds - anchor.boottime_seconds)
    least_now = anchor.now if anchor.least_now is None else anchor.least_now
    pair = after_reboot(reading=known, recorded_now=max(least_now + gone_by, told_at or least_now))
    back = min(timedelta(0), pair.now - (anchor.now + gone_by))
    return replace(
        history, anchor=Anchor(boot_id=anchor.boot_id, now=pair.now, boottime_seconds=pair.boottime_seconds),
        next_attempt_at=None if history.next_attempt_at is None else history.next_attempt_at + back,
        restarts=tuple(min(each, pair.now) for each in history.restarts),
    )


def _moved(history: History, move: Move, *, now: datetime, want_sequence: int) -> History:
    check_run_step(history.state, move.to)
    moved = replace(
        history, state=move.to, reason=move.reason, detail=move.detail, next_attempt_at=move.next_attempt_at, was_rebooted=False,
    )
    if move.to is RunState.BACKOFF:
        newest = max((seen.step for seen in history.checkpoints), default=-1)
        fruitless_count = 1 if newest > history.step_at_start else history.fruitless_count + 1
        restarts = (*history.restarts, now)[-RESTARTS_REMEMBERED_MAX:]
        return replace(moved, restarts=restarts, fruitless_count=fruitless_count)
    if move.to in (RunState.STOPPED, RunState.HELD):
        return replace(moved, rest_sequence=want_sequence)
    if move.to is RunState.STARTING and history.state in (RunState.STOPPED, RunState.HELD):
        # A person asked for it: the budget begins anew.
        return replace(moved, restarts=(), fruitless_count=0)
    return moved


def _killing(stop: Stop | None, action: KillTree, boottime_seconds: float) -> Stop:
    """From the first SIGKILL on the ladder is that of a stop now, whatever came before; why it was stopped stays."""
    if stop is not None and stop.forced:
        return stop
    reason = action.reason if stop is None else stop.reason
    asked_again = stop is not None and stop.asked_again
    return Stop(reason=reason, mode=StopMode.NOW, asked_seconds=boottime_seconds, grace_seconds=0.0, asked_again=asked_again, forced=True)
