"""When a training is over, and which of its checkpoints is the best so far: both by the rule of the later selection."""

from __future__ import annotations

from typing import Any

from policies.selection import better_than_incumbent
from trainer.config import TrainTask

PILOT = "pilot"


def ending(step: int, scores: list[dict[str, Any]], task: TrainTask, *, is_pilot: bool = False) -> str | None:
    """Why the training is over at this step, None while it is not. `is_pilot`: this process goes as far as the pilot only."""
    if step >= task.steps:
        return "steps"
    if is_pilot and task.pilot_steps is not None and step >= task.pilot_steps:
        return PILOT
    patience, best = task.validation.patience, incumbent(scores, task.validation.minimum_improvement)
    if patience is None or best is None:
        return None
    since = sum(score["step"] > best["step"] for score in scores)
    return "patience" if since >= patience else None


def incumbent(scores: list[dict[str, Any]], minimum_improvement: float) -> dict[str, Any] | None:
    """The best score by the rule of the selection: in order of step, replaced only by the minimum improvement."""
    best: dict[str, Any] | None = None
    for score in scores:
        if best is None or better_than_incumbent(score["value"], best["value"], minimum_improvement):
            best = score
    return best
