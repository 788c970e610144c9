"""Nats per document, from a model: every token of a document is a target exactly once.

    context   </s> t0 t1 | t1 t2 t3 | ...      windows of a fixed width; the first token follows an end of sequence,
    target    t0   t1 t2 | t2 t3 t4 | ...      each later window starts from the last token of the one before

Rows and token counts therefore do not depend on the window. Every batch has the same shape: short windows are filled up at
the right (a causal model never looks there), a short last batch with empty windows, so that a row's bits depend on its own
tokens and not on which documents happened to share its batch, as far as the library's kernels keep rows apart.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from torch import nn
from torch.nn.attention import sdpa_kernel

from policies.errors import LossNotFinite
from policies.token_nll import ScoredRow
from trainer import randomness
from trainer.data.shards import END_OF_SEQUENCE, Document
from trainer.fingerprint import attention_kernels
from trainer.head_loss import IGNORED, head_weight, hidden_states, mean_nats, row_nats


class ScoringStopped(Exception):
    """A stop was asked for; what was scored so far is thrown away and scored again later."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Inputs and targets of one window, and the document (by number) that its targets belong to."""

    document: int
    tokens: npt.NDArray[np.int64]


def score_documents(
    model: nn.Module, scored: Iterable[Document], *, window: int, batch: int, precision: str, on_batch: Callable[[int], None] = lambda done: None,
) -> list[ScoredRow]:
    """One row a document, in order. `on_batch` hears the number of batches done, and may raise ScoringStopped.

    Leaves the model in the mode it was in, and every random stream as it was. LossNotFinite when a document has no finite sum.
    """
    listed = list(scored)
    sums, device, was_training = np.zeros(len(listed)), next(model.parameters()).device, model.training
    model.eval()
    try:
        with randomness.untouched(), torch.no_grad(), sdpa_kernel(attention_kernels(device)), _as_written(model):
            for done, group in enumerate(_batches(listed, window, batch), start=1):
                nll_BT = window_nll(model, *_tensors(group, window, batch, device), precision=precision).double().cpu().numpy()
                for row, each in enumerate(group):
                    sums[each.document] += nll_BT[row].sum()
                on_batch(done)
    finally:
        model.train(was_training)
    return [_row(document, float(nll)) for document, nll in zip(listed, sums, strict=True)]


def batch_count(scored: Iterable[Document], *, window: int, batch: int) -> int:
    windows = sum(-(-len(document.tokens) // window) for document in scored)
    return -(-windows // batch)


def window_nll(model: nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, *, precision: str) -> torch.Tensor:  # noqa: N803
    """Nats of each target given what stands left of it, shape (batch, time), 0 where the target is ignored. The softmax is fp32."""
    if precision == "fp32":
        return row_nats(hidden_states(model, inputs_BT), head_weight(model), targets_BT.reshape(-1)).view(targets_BT.shape)
    return _autocast_nll(model, inputs_BT, targets_BT)


def mean_nll(model: nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor, *, precision: str, parts: int) -> torch.Tensor:  # noqa: N803
    """The loss of a micro-batch, one of `parts` of a step: its mean nats per target, divided by `parts`. Its backward gives the gradient."""
    if precision == "fp32":
        return mean_nats(hidden_states(model, inputs_BT), head_weight(model), targets_BT.reshape(-1), parts=parts)
    return _autocast_nll(model, inputs_BT, targets_BT).mean() / parts


def _autocast_nll(model: nn.Module, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803
    with torch.autocast(inputs_BT.device.type, dtype=torch.bfloat16):
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
    flat = logits_BTV.float().view(-1, logits_BTV.shape[-1])
    return functional.cross_entropy(flat, targets_BT.reshape(-1), reduction="none", ignore_index=IGNORED).view(targets_BT.shape)


def _as_written(model: nn.Module) -> AbstractContextManager[Any]:
    """Inside, a compiled model computes as it is written: its rows are then those of an evaluation, which compiles nothing."""
    is_compiled = model.base_model._compiled_call_impl is not None  # type: ignore[union-attr]
    return torch.compiler.set_stance("force_eager") if is_compiled else contextlib.nullcontext()


def _batches(scored: list[Document], window: int, batch: int) -> Iterator[list[_Window]]:
    group: list[_Window] = []
    for number, document in enumerate(scored):
        tokens = np.concatenate(([document.end_of_sequence], document.tokens)).astype(np.int64)
        for start in range(0, len(document.tokens), window):
            group.append(_Window(number, tokens[start:start + window + 1]))
            if len(group) == batch:
                yield group
                group = []
    if group:
        yield group


def _tensors(group: list[_Window], window: int, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    inputs_BT = np.full((batch, window), END_OF_SEQUENCE, dtype=np.int64)
    targets_BT = np.full((batch, window), IGNORED, dtype=np.int64)
    for row, each in enumerate(group):
        length = len(each.tokens) - 1
        inputs_BT[row, :length], targets_BT[row, :length] = each.tokens[:-1], each.tokens[1:]
    return torch.from_numpy(inputs_BT).to(device), torch.from_numpy(targets_BT).to(device)


def _row(document: Document, nll: float) -> ScoredRow:
    if not np.isfinite(nll):
        raise LossNotFinite("a document's score is no number", where=document.id, what=f"its nats add up to {nll}",
                            fix="look at the losses before this step; a smaller learning rate usually helps")
    return ScoredRow(id=document.id, family=document.family, tokens=len(document.tokens), nll=max(nll, 0.0))
