"""What a replay is compared in, and the verdicts: for each part of a training exact, inexact from a step on, or unknown, and why.

    sampler    windows taken, and the generator where the order has one     schedule   the rate of every logged step
    rng        every random stream                                          moments    AdamW's two moments and counters
    weights    every trained tensor                                         losses     of every step, in full precision

Losses and rates are known for every step, the other parts only where a checkpoint stands. The order above is the one in which
a loss of exactness spreads, so the first part that may have differed is the one to look at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file as load_arrays

from trainer import randomness
from trainer.models.build import WEIGHTS_NAME, load_tensors, trained_weights
from trainer.state import OPTIMIZER_NAME, RANDOM_NAME, TrainingState, read_state
from trainer.tensors import AnyTensor

STATE_PARTS = ("sampler", "rng", "moments", "weights")
PARTS = ("sampler", "schedule", "rng", "moments", "weights", "losses")


class Verdict(str, Enum):
    EXACT = "exact"
    INEXACT = "inexact"
    UNKNOWN = "unknown"


@dataclass(kw_only=True)
class Part:
    """Comparisons of one part, in order of steps. `from_step` is the earliest step that may differ, `seen_step` where it was seen."""

    name: str
    equal_steps: list[int] = field(default_factory=list)
    from_step: int | None = None
    seen_step: int | None = None
    because: str = ""

    def note(self, step: int, difference: str | None) -> None:
        if self.seen_step is not None:
            return
        if difference is None:
            self.equal_steps.append(step)
        else:
            self.from_step = self.equal_steps[-1] + 1 if self.equal_steps else step
            self.seen_step, self.because = step, difference

    def verdict(self, other_environment: str) -> tuple[Verdict, str]:
        """`other_environment` says how this machine differs from the recorded one, "" where it does not."""
        if self.seen_step is not None and other_environment:
            return Verdict.UNKNOWN, f"differs at step {self.seen_step}, but so does the environment: {other_environment}"
        if self.seen_step is not None:
            return Verdict.INEXACT, self.because
        if len(self.equal_steps) > 1 or (self.equal_steps and self.name in ("schedule", "losses")):
            return Verdict.EXACT, ""
        return Verdict.UNKNOWN, self.because or "there is no later record to compare with"


def first_cause(parts: dict[str, Part], start: int) -> Part | None:
    """The part where the difference may have begun: of those that could have differed when the first one was seen, the one from
    which it spreads. A loss of the very first step depends on no moment."""
    differing = [part for part in parts.values() if part.seen_step is not None]
    if not differing:
        return None
    seen = min(part.seen_step for part in differing if part.seen_step is not None)
    possible = [name for name in PARTS if (part := parts[name]).from_step is not None and part.from_step <= seen]
    losses = parts["losses"]
    if losses.seen_step == start + 1 and "weights" in possible and possible[0] == "moments" and parts["moments"].seen_step != start:
        possible.remove("moments")
    return parts[possible[0]]


def compare_state(state: TrainingState, sampler: Any, folder: Path) -> dict[str, str | None]:
    """For each part of a living state what differs from the checkpoint in `folder`, None where not a bit does."""
    living = {name: weight.detach() for name, weight in trained_weights(state.model).items()}
    streams = load_arrays(folder / RANDOM_NAME)
    return {
        "sampler": _sampler_difference(state, sampler, read_state(folder)),
        "rng": _first_difference(randomness.capture(), streams),
        "moments": _first_difference(state.moments(), load_tensors(folder / OPTIMIZER_NAME)),
        "weights": _first_difference(living, load_tensors(folder / WEIGHTS_NAME)),
    }


def _sampler_difference(state: TrainingState, sampler: Any, described: dict[str, Any]) -> str | None:
    if (state.step, state.cursor) != (described["step"], described["cursor"]):
        return f"{described['cursor']} windows taken by step {described['step']} in the record, {state.cursor} by step {state.step} in the replay"
    if state.sampler is not None and sampler.state_at(state.cursor) != described.get("sampler"):
        return f"its generator stands elsewhere after {state.cursor} windows"
    return None


def _first_difference(replayed: dict[str, Any], recorded: dict[str, Any]) -> str | None:
    """Names the tensors whose bits differ. Bits, not values: 0.0 and -0.0 are two states."""
    if replayed.keys() != recorded.keys():
        return f"only one of both has {', '.join(sorted(replayed.keys() ^ recorded.keys())[:3])}"
    differing = [name for name in replayed if not _same_bits(replayed[name], recorded[name])]
    if not differing:
        return None
    name = differing[0]
    here, there = _values(replayed[name]), _values(recorded[name])
    most = f", by up to {np.max(np.abs(here - there)):.3g}" if here.shape == there.shape and here.size else ""
    return f"{name}{most}" + (f", and {len(differing) - 1} more of {len(replayed)}" if len(differing) > 1 else "")


def _same_bits(one: AnyTensor, other: AnyTensor) -> bool:
    first, second = _array(one), _array(other)
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()


def _values(tensor: AnyTensor) -> npt.NDArray[np.float64]:
    return _array(tensor).astype(np.float64)


def _array(tensor: AnyTensor) -> npt.NDArray[Any]:
    return tensor.detach().cpu().numpy() if isinstance(tensor, torch.Tensor) else tensor


def as_text(parts: Iterable[tuple[str, Verdict, Part, str]]) -> str:
    """One line a part."""
    lines = []
    for name, verdict, part, because in parts:
        where = ""
        if verdict is Verdict.INEXACT:
            span = f"{part.from_step}" if part.from_step == part.seen_step else f"{part.from_step} to {part.seen_step}"
            where = f" from step {span}"
        lines.append(f"  {name:<12}{verdict.value}{where}" + (f": {because}" if because else ""))
    return "\n".join(lines)
