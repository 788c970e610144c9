"""Everything that an exact resume needs, in one place: out to the files of a checkpoint, and back in.

    model.safetensors       every trained weight by name, tied ones once        config.json, tokenizer: as given
    optimizer.safetensors   exp_avg/NAME, exp_avg_sq/NAME, step/NAME
    rng.safetensors         every random stream (trainer.randomness)
    trainer.json            settings, data digests, environment; step, cursor, losses, scores, whether a validation is due

Saved at the boundary between two optimizer steps only. The learning rate and the order of the data are functions of what
stands here, so there is nothing else. Nothing here knows the time, the run's parents or a path: equal trainings give equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_arrays
from torch import nn

from policies.errors import CheckpointDamaged, ResumeMismatch
from trainer import randomness
from trainer.checkpoint import Content, Held
from trainer.config import OptimizerSettings
from trainer.data.zxell_sampler import ZxellSampler
from trainer.files import JsonFault, dumps, read_json
from trainer.fingerprint import differences
from trainer.models.build import WEIGHTS_NAME, check_complete, fill_weights, load_tensors, tied_names, trained_weights
from trainer.tensors import file_pieces

OPTIMIZER_NAME, RANDOM_NAME, STATE_NAME = "optimizer.safetensors", "rng.safetensors", "trainer.json"
SCORE_KINDS = {"step": (int,), "value": (int, float), "families": (dict,), "checkpoint_digest": (str,)}
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(kw_only=True)
class TrainingState:
    """The living training. `identity` is what must be equal for a resume: settings, data and environment."""

    model: nn.Module
    optimizer: torch.optim.AdamW
    identity: dict[str, Any]
    files: dict[str, bytes]
    """What goes into each checkpoint unchanged: config.json and the tokenizer's files."""
    step: int = 0
    cursor: int = 0
    """Windows consumed."""
    losses: list[float] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    """Of each finished validation: step, value, families, checkpoint_digest."""
    validation_due: bool = False
    sampler: ZxellSampler | None = None
    """The order of the data where it has a state of its own; our own order has none."""
    _copies: dict[str, torch.Tensor] = field(default_factory=dict)
    """The newest snapshot. Its memory is taken once and used again by each save, so a save costs no page faults."""

    def contents(self) -> dict[str, Content]:
        """The files of a checkpoint of this moment, by name. The training may go on at once: they are made of copies, which stand
        until the next call. So at most one save can be under way."""
        assert self.step == len(self.losses), "one loss a step"
        streams = randomness.capture()
        described = {
            "schema": 1, "task": "language_model", "step": self.step, "cursor": self.cursor, "ties": tied_names(self.model), **self.identity,
            "losses": list(self.losses), "scores": list(self.scores), "validation_due": self.validation_due,
        }
        if self.sampler is not None:
            described["sampler"] = self.sampler.state_at(self.cursor)
        return {
            **self.files,
            WEIGHTS_NAME: _held(self._copied(self._weights())), OPTIMIZER_NAME: _held(self._copied(self.moments())),
            RANDOM_NAME: Held(lambda: file_pieces(streams)), STATE_NAME: Held(lambda: [dumps(described)]),
        }

    def restore(self, folder: Path, *, elsewhere: bool = False) -> None:
        """Become what was saved in `folder` (verified before). ResumeMismatch names each difference of the identity;
        CheckpointDamaged what does not fit. The random streams come last, so that nothing after draws from them.
        `elsewhere`: another environment is taken too; then equal bits are a finding, no promise."""
        described = read_state(folder)
        asked = {key: value for key, value in self.identity.items() if not (elsewhere and key == "environment")}
        found = differences({key: described.get(key) for key in asked}, asked)
        if found:
            raise ResumeMismatch("the checkpoint belongs to another training", where=str(folder / STATE_NAME), what="; ".join(found),
                                 fix="restore these settings, or start a new run from the model directory")
        self.step, self.cursor = described["step"], described["cursor"]
        self.losses, self.scores = described["losses"], described["scores"]
        self.validation_due = described["validation_due"]
        if self.sampler is not None:
            self.sampler.restore(described.get("sampler"), self.cursor, where=str(folder / STATE_NAME))
        fill_weights(self.model, load_tensors(folder / WEIGHTS_NAME), where=str(folder / WEIGHTS_NAME))
        self._fill_moments(load_tensors(folder / OPTIMIZER_NAME), where=str(folder / OPTIMIZER_NAME))
        _restore_streams(folder / RANDOM_NAME)

    def snapshot_bytes(self) -> int:
        """Host memory that the copies take: weights, moments and counters once more."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (*self._weights().values(), *self.moments().values()))

    def moments(self) -> dict[str, torch.Tensor]:
        """The living moments and counters of the optimizer, under the names they are stored by."""
        return {
            f"{key}/{name}": value for name, weight in trained_weights(self.model).items() for key, value in self.optimizer.state[weight].items()
        }

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach() for name, weight in trained_weights(self.model).items()}

    def _copied(self, living: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in living.items():
            if name not in self._copies:
                self._copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            self._copies[name].copy_(tensor.detach())
        return {name: self._copies[name] for name in living}

    def _fill_moments(self, tensors: dict[str, torch.Tensor], *, where: str) -> None:
        weights = trained_weights(self.model)
        shapes: dict[str, tuple[int, ...]] = {f"{key}/{name}": tuple(weight.shape) for key in MOMENTS for name, weight in weights.items()}
        check_complete(tensors, {**shapes, **{f"step/{name}": () for name in weights}}, where=where)
        for name, weight in weights.items():
            for key, value in self.optimizer.state[weight].items():
                if tensors[f"{key}/{name}"].dtype != value.dtype:
                    raise _malformed(where, f"{key}/{name} is {tensors[f'{key}/{name}'].dtype}, not {value.dtype}")
                value.copy_(tensors[f"{key}/{name}"])


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """AdamW with decay on tensors of two and more dimensions. Its moments exist from the start, so step 0 is as complete as any."""
    weights = trained_weights(model)
    groups = [
        {"params": [weight for weight in weights.values() if weight.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in weights.values() if weight.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    for weight in weights.values():
        optimizer.state[weight] = {
            "step": torch.zeros((), dtype=torch.float32, device=weight.device),
            "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight),
        }
    return optimizer


def read_state(folder: Path) -> dict[str, Any]:
    """trainer.json of a checkpoint, its own counts checked against each other."""
    path = folder / STATE_NAME
    try:
        described = read_json(path)
    except (OSError, JsonFault) as fault:
        raise _malformed(str(path), str(fault)) from fault
    if not isinstance(described, dict) or described.get("schema") != 1 or described.get("task") != "language_model":
        raise _malformed(str(path), "it is no state of schema 1 of a language model")
    step, cursor, losses = described.get("step"), described.get("cursor"), described.get("losses")
    if type(step) is not int or type(cursor) is not int or not isinstance(losses, list) or len(losses) != step:
        raise _malformed(str(path), f"step is {step!r}, cursor {cursor!r}, and the number of losses has to be the number of steps")
    if not isinstance(described.get("scores"), list) or not isinstance(described.get("validation_due"), bool):
        raise _malformed(str(path), "scores or validation_due is missing")
    # A step that another trainer took and did not log has no loss: null.
    wrong = next((place for place, loss in enumerate(losses) if loss is not None and type(loss) not in (int, float)), None)
    if wrong is not None or cursor < 0:
        told = f"cursor is {cursor}" if wrong is None else f"the loss of step {wrong + 1} is {str(losses[wrong])[:40]!r}, no number"
        raise _malformed(str(path), told)
    for number, score in enumerate(described["scores"], start=1):
        if not isinstance(score, dict) or any(type(score.get(key)) not in kinds for key, kinds in SCORE_KINDS.items()):
            raise _malformed(str(path), f"score {number} is {str(score)[:80]}, it needs {', '.join(SCORE_KINDS)}")
    return described


def _held(copies: dict[str, torch.Tensor]) -> Held:
    return Held(lambda: file_pieces(copies))


def _restore_streams(path: Path) -> None:
    try:
        randomness.restore(load_arrays(path))
    except (OSError, SafetensorError, KeyError, IndexError, ValueError, TypeError, RuntimeError) as fault:
        raise _malformed(str(path), f"the random streams can't be restored: {fault}") from fault


def _malformed(where: str, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("the checkpoint can't be restored", where=where, what=what,
                             fix="resume from an older one: set FLEETD_RESUME to its directory")
