"""The learning rate as a closed form of the step: no scheduler object, so nothing to save and nothing to drift."""

from __future__ import annotations

import math

from trainer.config import OptimizerSettings


def learning_rate(step: int, settings: OptimizerSettings, steps: int) -> float:
    """The rate of the optimizer step number `step`, counted from 0: linear warm-up to `lr`, then a cosine that would reach
    `min_lr_ratio` x `lr` at step number `steps`."""
    assert 0 <= step < steps
    if step < settings.warmup:
        return settings.lr * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / (steps - settings.warmup)
    least = settings.lr * settings.min_lr_ratio
    return least + (settings.lr - least) * 0.5 * (1.0 + math.cos(math.pi * progress))
