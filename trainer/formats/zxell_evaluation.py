"""zxell's own figure of a model: perplexity over one shard, all together and by the language of each target's article.

Windows of ctx + 1 tokens from the head of the shard, none overlapping, the tail cut; in each all but the first token are
targets. `tokens_max` takes so many tokens from the head first. This is not our `token_nll_v1`: articles see what stands before
them in the window, and one token in ctx + 1 is never a target.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from policies.errors import DataDamaged, LossNotFinite
from trainer import randomness
from trainer.data.shards import FAMILIES, Corpus, Shard
from trainer.fingerprint import attention_kernels
from trainer.scoring import window_nll


@dataclass(frozen=True, slots=True, kw_only=True)
class Perplexities:
    """`by_language` is None for a language that has no target. `nats` are summed over all targets."""

    all: float
    by_language: dict[str, float | None]
    targets: int
    nats: float

    def record(self, step: int, name: str) -> dict[str, Any]:
        """The line of log.jsonl."""
        return {"step": step, "eval": name, "all": self.all, **self.by_language}


def evaluate_shard(
    model: nn.Module, corpus: Corpus, *, window: int, tokens_max: int | None = None, batch: int = 8, precision: str = "fp32",
    on_batch: Callable[[int, int], None] = lambda done, total: None,
) -> Perplexities:
    """The perplexities of the first shard of a split. `on_batch` hears how many batches of how many are done."""
    shard = corpus.shards[0]
    length = len(shard.tokens) if tokens_max is None else min(tokens_max, len(shard.tokens))
    count = length // (window + 1)
    if count == 0:
        raise DataDamaged("the shard can't be evaluated", where=str(corpus.folder / shard.name),
                          what=f"its first {length} tokens hold no window of {window + 1}", fix="choose a smaller ctx, or more tokens")
    windows_BT = shard.tokens[:count * (window + 1)].reshape(count, window + 1)
    languages_BT = target_languages(shard, count, window)
    sums, targets = np.zeros(len(FAMILIES) + 1), np.zeros(len(FAMILIES) + 1, dtype=np.int64)
    device, was_training, total = next(model.parameters()).device, model.training, -(-count // batch)
    model.eval()
    try:
        with randomness.untouched(), torch.no_grad(), sdpa_kernel(attention_kernels(device)):
            for done, start in enumerate(range(0, count, batch), start=1):
                tokens_BT = torch.from_numpy(windows_BT[start:start + batch].astype(np.int64)).to(device)
                nll_BT = window_nll(model, tokens_BT[:, :-1], tokens_BT[:, 1:], precision=precision).double().cpu().numpy()
                codes = languages_BT[start:start + batch].ravel()
                sums += np.bincount(codes, weights=nll_BT.ravel(), minlength=len(sums))
                targets += np.bincount(codes, minlength=len(sums))
                on_batch(done, total)
    finally:
        model.train(was_training)
    return _perplexities(sums, targets, where=shard.name)


def target_languages(shard: Shard, count: int, window: int) -> npt.NDArray[np.int64]:
    """The language of the article of each target, shape (count, window); the number after the last one where it is unknown.

    An article ends with its end-of-sequence token, which still belongs to it.
    """
    positions = np.arange(count * (window + 1)).reshape(count, window + 1)[:, 1:]
    if shard.families is None:
        return np.full(positions.shape, len(FAMILIES), dtype=np.int64)
    return shard.families.astype(np.int64)[np.searchsorted(shard.document_ends, positions, side="left")]


def _perplexities(sums: npt.NDArray[np.float64], targets: npt.NDArray[np.int64], *, where: str) -> Perplexities:
    nats, count = math.fsum(sums), int(targets.sum())
    if not math.isfinite(nats):
        raise LossNotFinite("the evaluation has no value", where=where, what=f"its nats add up to {nats}", fix="look at the losses of the run")
    by_language = {name: _perplexity(float(sums[code]), int(targets[code])) for code, name in enumerate(FAMILIES)}
    value = _perplexity(nats, count)
    assert value is not None
    return Perplexities(all=value, by_language=by_language, targets=count, nats=nats)


def _perplexity(nats: float, targets: int) -> float | None:
    """exp of the mean; beyond what a float holds it is the largest one, because JSON has no infinity."""
    if targets == 0:
        return None
    return math.exp(min(nats / targets, 709.0))
