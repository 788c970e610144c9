"""What a trainer's log says so far: one record in, the next Progress out. Pure; the supervisor reads the file.

Only numbers that are finite and of the right kind are taken over: the log is the trainer's, and a user's own trainer may write
anything into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fleetd.model import ValidationSight
from policies.facts import parse_moment
from policies.stalls import Phase

STEPS_REMEMBERED_MAX = 20
PHASES_REMEMBERED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """`phase` is what the trainer said it does now. The recent durations outlive an attempt: they measure the run, not the process."""

    phase: Phase = Phase.LAUNCH
    step: int | None = None
    steps_planned: int | None = None
    step_at: datetime | None = None
    loss: float | None = None
    best: ValidationSight | None = None
    last_event: str | None = None
    last_because: str = ""
    step_seconds: tuple[float, ...] = ()
    save_seconds: tuple[float, ...] = ()
    save_bytes: int | None = None
    """What the last save wrote."""
    validation_seconds: tuple[float, ...] = ()
    spoken_at: datetime | None = None
    """When the validation under way last spoke, None outside of one."""
    batch_seconds: tuple[float, ...] = ()
    """Silences between the records of recent validations."""
    accelerator_limit_bytes: int | None = None
    """What the trainer's own allocator refuses to go beyond, if it said so."""

    @property
    def steps_per_second(self) -> float | None:
        total = sum(self.step_seconds)
        return len(self.step_seconds) / total if total > 0 else None

    @property
    def phase_seconds(self) -> tuple[float, ...]:
        return {Phase.SAVE: self.save_seconds, Phase.VALIDATION: self.validation_seconds}.get(self.phase, ())


def next_attempt(progress: Progress) -> Progress:
    """The same run at the start of another trainer process: nothing was said yet, what was measured still holds."""
    return replace(progress, phase=Phase.LAUNCH, last_event=None, last_because="", spoken_at=None, accelerator_limit_bytes=None)


def after_record(progress: Progress, record: dict[str, Any], *, read_at: datetime) -> Progress:
    """The progress after one log record, read at `read_at` (used where the record carries no time of its own)."""
    event = record.get("event")
    at = moment_of(record) or read_at
    if event is None:
        return _after_step(progress, record, at)
    said = replace(progress, last_event=str(event), last_because=str(record.get("because", "")), step=_step(progress, record))
    if event == "start":
        return replace(
            said, phase=Phase.LAUNCH, steps_planned=whole(record.get("steps")) or progress.steps_planned, step_at=at,
            accelerator_limit_bytes=whole(record.get("accelerator_limit_bytes")),
        )
    if event == "save":
        return _after_save(said, record)
    if event == "validation":
        return _after_validation(said, record, at)
    return said


def _after_step(progress: Progress, record: dict[str, Any], at: datetime) -> Progress:
    if whole(record.get("step")) is None:
        return progress
    seconds = finite(record.get("seconds"))
    if seconds is None and progress.step_at is not None and progress.last_event is None:
        seconds = (at - progress.step_at).total_seconds()
    steps = progress.step_seconds
    if seconds is not None and seconds >= 0:
        steps = (*steps, seconds)[-STEPS_REMEMBERED_MAX:]
    return replace(
        progress, phase=Phase.TRAINING, step=whole(record["step"]), step_at=at, loss=finite(record.get("loss")), step_seconds=steps, last_event=None,
        last_because="",
    )


def _after_save(progress: Progress, record: dict[str, Any]) -> Progress:
    if record.get("phase") != "end":
        return replace(progress, phase=Phase.SAVE)
    seconds = finite(record.get("seconds"))
    saves = progress.save_seconds if seconds is None else (*progress.save_seconds, seconds)[-PHASES_REMEMBERED_MAX:]
    return replace(progress, phase=Phase.TRAINING, save_seconds=saves, save_bytes=whole(record.get("bytes")) or progress.save_bytes)


def _after_validation(progress: Progress, record: dict[str, Any], at: datetime) -> Progress:
    silence = () if progress.spoken_at is None else (max(0.0, (at - progress.spoken_at).total_seconds()),)
    progress = replace(progress, batch_seconds=(*progress.batch_seconds, *silence)[-STEPS_REMEMBERED_MAX:], spoken_at=at)
    if record.get("phase") != "end":
        return replace(progress, phase=Phase.VALIDATION)
    progress = replace(progress, spoken_at=None)
    seconds, value, step = finite(record.get("seconds")), finite(record.get("value")), whole(record.get("step"))
    durations = progress.validation_seconds if seconds is None else (*progress.validation_seconds, seconds)[-PHASES_REMEMBERED_MAX:]
    best = progress.best
    if value is not None and step is not None and (best is None or record.get("best") is True or value < best.value):
        best = ValidationSight(step=step, value=value, at=at)
    return replace(progress, phase=Phase.TRAINING, validation_seconds=durations, best=best)


def _step(progress: Progress, record: dict[str, Any]) -> int | None:
    """A start may go back to the step it resumes from; a save that is written beside later steps names its own, older one."""
    step = whole(record.get("step"))
    if step is None or (record.get("event") != "start" and progress.step is not None):
        return progress.step if step is None else max(step, progress.step or 0)
    return step


def moment_of(record: dict[str, Any]) -> datetime | None:
    """The record's own `at`, None when it has none that can be read."""
    try:
        return parse_moment(record["at"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None
