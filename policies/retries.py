"""What an exit means, and whether the run is tried again: the outcome table, the restart budget, the backoff.

BACKOFF as an outcome means "worth another try"; `next_try` then grants it a moment within the budget, or holds the run for a person.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from policies.facts import Reason, RunState, TrainerExit
from policies.lifecycle import NEVER_RETRIED

JITTER_SHARE = 0.25
"""A wait is shortened by up to this share, so that runs which fell together do not rise together."""
DOUBLINGS_MAX = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Where an ended attempt leaves its run: FINISHED, STOPPED, FAILED, or BACKOFF for one more try."""

    state: RunState
    reason: Reason | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitFacts:
    """How an attempt ended. `exit_code` and `signal` are both None when nobody saw it. `oom_kill_count`: the cgroup's own counter."""

    exit_code: int | None
    signal: int | None
    oom_kill_count: int = 0
    host_rebooted: bool = False
    forced: bool = False
    """Whether we had to send SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartLimits:
    restarts_max: int
    window_seconds: float
    first_seconds: float
    ceiling_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TryAgain:
    at: datetime
    wait_seconds: float
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoMoreTries:
    """`state` is FAILED for what a second try would only repeat, HELD when the budget is used up."""

    state: RunState
    because: str


_CONTRACT_FAILURES = {
    TrainerExit.CONFIG: (Reason.CONFIG, "exit 30: never try again"),
    TrainerExit.NOT_FINITE: (Reason.NOT_FINITE, "exit 31: the numbers broke"),
    TrainerExit.GATE_FAILED: (Reason.GATE_FAILED, "exit 32: a gate failed"),
    TrainerExit.MEMORY: (Reason.MEMORY, "exit 40: memory cap reached, state saved"),
}

_WHEN_ASKED: dict[Reason, tuple[RunState, Reason]] = {
    Reason.USER: (RunState.STOPPED, Reason.USER),
    Reason.SUPERSEDED: (RunState.STOPPED, Reason.SUPERSEDED),
    Reason.DEADLINE: (RunState.FINISHED, Reason.DEADLINE),
    Reason.MEMORY: (RunState.FAILED, Reason.MEMORY),
    Reason.HOST_MEMORY: (RunState.BACKOFF, Reason.HOST_MEMORY),
    Reason.STALLED: (RunState.BACKOFF, Reason.STALLED),
    Reason.LAUNCH_TIMEOUT: (RunState.BACKOFF, Reason.LAUNCH_TIMEOUT),
}
"""Where a run goes whose attempt ended because we asked or killed it, by why we did."""

_FINISHED_BY_ITSELF = frozenset({Reason.MEMORY, Reason.HOST_MEMORY, Reason.STALLED, Reason.LAUNCH_TIMEOUT, Reason.DEADLINE})
"""Asked for these, an exit 0 still means that the work was done. After a user's order it means stopped."""


def outcome_of_exit(facts: ExitFacts, *, contract: bool, asked: Reason | None) -> Outcome:
    """What an exit makes of the run. `asked`: why we had asked or killed the trainer, None when we had not."""
    assert facts.exit_code is None or facts.signal is None, "an exit has a code or a signal"
    how = describe_exit(facts)
    if contract and facts.exit_code in (TrainerExit.CONFIG, TrainerExit.NOT_FINITE, TrainerExit.GATE_FAILED):
        reason, text = _CONTRACT_FAILURES[TrainerExit(facts.exit_code)]
        return Outcome(state=RunState.FAILED, reason=reason, detail=text)
    if asked is not None:
        return _outcome_when_asked(facts, asked, how)
    if facts.host_rebooted and facts.exit_code is None and facts.signal is None:
        return Outcome(state=RunState.BACKOFF, reason=Reason.HOST_REBOOTED, detail="the host was rebooted")
    if facts.exit_code == TrainerExit.FINISHED:
        return Outcome(state=RunState.FINISHED, reason=None, detail="exit 0")
    if contract and facts.exit_code == TrainerExit.MEMORY:
        reason, text = _CONTRACT_FAILURES[TrainerExit.MEMORY]
        return Outcome(state=RunState.FAILED, reason=reason, detail=text)
    return Outcome(state=RunState.BACKOFF, reason=_reason_unasked(facts), detail=how)


def _outcome_when_asked(facts: ExitFacts, asked: Reason, how: str) -> Outcome:
    assert asked in _WHEN_ASKED, f"nobody stops a run for {asked}"
    if facts.exit_code == TrainerExit.FINISHED and asked in _FINISHED_BY_ITSELF:
        reason = Reason.DEADLINE if asked is Reason.DEADLINE else None
        return Outcome(state=RunState.FINISHED, reason=reason, detail=f"exit 0 after it was asked to stop for {asked}")
    state, reason = _WHEN_ASKED[asked]
    force = "force was needed" if facts.forced else "asking was enough"
    if facts.exit_code is None and facts.signal is None:
        force = "force was used" if facts.forced else "nobody saw whether asking was enough"
    elif facts.signal == signal.SIGKILL and not facts.forced:
        force = f"{'the kernel' if facts.oom_kill_count else 'somebody else'} killed it before it had answered"
    return Outcome(state=state, reason=reason, detail=f"stopped for {asked}: {how}; {force}")


def _reason_unasked(facts: ExitFacts) -> Reason:
    if facts.exit_code is None and facts.signal is None:
        return Reason.UNOBSERVED
    # 137 or SIGKILL alone proves nothing: anybody may send it. The kernel's own counter does prove it.
    if facts.oom_kill_count > 0 and (facts.signal == signal.SIGKILL or facts.exit_code == 128 + signal.SIGKILL):
        return Reason.OOM
    return Reason.SIGNAL if facts.signal is not None else Reason.EXIT_NONZERO


def describe_exit(facts: ExitFacts) -> str:
    """The exit in words: `exit 10`, `signal 9 (SIGKILL)`, `nobody saw how it ended`."""
    if facts.signal is None and facts.exit_code is None:
        return "nobody saw how it ended"
    if facts.signal is None:
        # A trainer whose data-loader worker was killed at the cap fails with a code of its own, and with words that name no memory.
        oom = ", the kernel counted an out-of-memory kill in its tree" if facts.oom_kill_count and facts.exit_code != TrainerExit.FINISHED else ""
        return f"exit {facts.exit_code}{oom}"
    try:
        name = signal.Signals(facts.signal).name
    except ValueError:
        name = "unnamed"
    return f"signal {facts.signal} ({name}){', the kernel counted an out-of-memory kill' if facts.oom_kill_count else ''}"


def next_try(
    *, reason: Reason, run_id: str, attempt: int, now: datetime, restarts: Sequence[datetime], fruitless_count: int, limits: RestartLimits
) -> TryAgain | NoMoreTries:
    """When the run is started again, or why it is not.

    `restarts`: moments of earlier restarts. `fruitless_count`: restarts in a row since the last one that brought a newer checkpoint; the wait
    doubles with each, and falls back to the first when there was progress.
    """
    if reason in NEVER_RETRIED:
        return NoMoreTries(state=RunState.FAILED, because=f"{reason} is never tried again by itself")
    recent = used_restarts(restarts, now=now, window_seconds=limits.window_seconds)
    if len(recent) >= limits.restarts_max:
        budget = f"{len(recent)} restarts within {limits.window_seconds:.0f} s, {limits.restarts_max} allowed"
        return NoMoreTries(state=RunState.HELD, because=f"restart budget used up: {budget}")
    wait_seconds = backoff_seconds(run_id=run_id, attempt=attempt, fruitless_count=fruitless_count, limits=limits)
    because = f"restart {len(recent) + 1} of {limits.restarts_max} in {wait_seconds:.1f} s"
    return TryAgain(at=now + timedelta(seconds=wait_seconds), wait_seconds=wait_seconds, because=because)


def used_restarts(restarts: Sequence[datetime], *, now: datetime, window_seconds: float) -> tuple[datetime, ...]:
    """The restarts that still count: those within the window before now."""
    return tuple(moment for moment in restarts if (now - moment).total_seconds() < window_seconds)


def backoff_seconds(*, run_id: str, attempt: int, fruitless_count: int, limits: RestartLimits) -> float:
    """first x 2^fruitless under the ceiling, less a jitter that comes from the ids, so that replay gives the same wait."""
    assert fruitless_count >= 0
    full = min(limits.ceiling_seconds, limits.first_seconds * 2.0 ** min(fruitless_count, DOUBLINGS_MAX))
    digest = hashlib.sha256(f"{run_id}/{attempt}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    return full * (1.0 - JITTER_SHARE * share)
