"""Stalls: a trainer that lives but makes no progress, judged by its own pace.

The limit comes from the run's own step times, so a slow model is not taken for a hung one. A validation or a save announces
itself in the log and has a limit of its own, refreshed by each `progress` record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.facts import Reason, Word

PHASE_SHARE = 6.0
"""A validation or save may be silent this many times longer than a step: it has no pace until it has ended once."""


class Phase(Word):
    LAUNCH = "launch"
    TRAINING = "training"
    VALIDATION = "validation"
    SAVE = "save"


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """`launch_seconds` before the first step; after it at least `floor_seconds`, and `factor` times the slowest recent step."""

    launch_seconds: float
    floor_seconds: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    reason: Reason
    because: str


def limit_seconds(*, phase: Phase, limits: StallLimits, recent_step_seconds: Sequence[float], recent_phase_seconds: Sequence[float]) -> float:
    """How long this phase may be silent. `recent_phase_seconds`: how long validations or saves like this one took."""
    step_limit = max(limits.floor_seconds, limits.factor * max(recent_step_seconds, default=0.0))
    if phase is Phase.LAUNCH:
        return limits.launch_seconds
    if phase is Phase.TRAINING:
        return step_limit
    return max(PHASE_SHARE * step_limit, limits.factor * max(recent_phase_seconds, default=0.0))


def judge(
    *, phase: Phase, silent_seconds: float, limits: StallLimits, recent_step_seconds: Sequence[float] = (), recent_phase_seconds: Sequence[float] = ()
) -> Stall | None:
    """A stall when nothing was logged for longer than the phase allows, else None."""
    assert silent_seconds >= 0
    limit = limit_seconds(phase=phase, limits=limits, recent_step_seconds=recent_step_seconds, recent_phase_seconds=recent_phase_seconds)
    if silent_seconds <= limit:
        return None
    if phase is Phase.LAUNCH:
        return Stall(reason=Reason.LAUNCH_TIMEOUT, because=f"no step within {limit:.0f} s of its start")
    because = f"nothing logged for {silent_seconds:.0f} s in {phase}; at this run's pace {limit:.0f} s are the limit"
    return Stall(reason=Reason.STALLED, because=because)
