"""Nats of each target, without ever holding all logits: the head and its cross entropy, some rows at a time.

    scoring   logits = hidden · headᵀ;  log-softmax in their place;  nats = −logits[target]
    training  softmax in their place, minus one at the target: the gradient of the logits, used at once for both factors

With 48,000 words the logits of a step are hundreds of megabytes, and the usual way passes over them seven times in fresh
memory. Here a chunk of them is there at a time, and its gradient is made while it is at hand (the idea of fused linear
cross entropy: Wijmans et al. 2024, "Cut Your Losses"). The number of rows decides in which order the head's gradient is added
up, so it is a constant and stands in the fingerprint.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from trainer.products import ProductSum, laid_out, times

CHUNK_ROWS = 512
IGNORED = -100


def hidden_states(model: nn.Module, inputs_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """What the head is applied to, shape (batch x time, width)."""
    hidden_BTD = model.base_model(input_ids=inputs_BT, use_cache=False).last_hidden_state  # type: ignore[operator]
    assert isinstance(hidden_BTD, torch.Tensor)
    return hidden_BTD.reshape(-1, hidden_BTD.shape[-1])


def head_weight(model: nn.Module) -> torch.Tensor:
    """The weight of the output layer, shape (vocabulary, width). Both families have no bias there."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, nn.Linear) and head.bias is None, "a head that is a plain matrix"
    return head.weight


def row_nats(hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Nats of each target, shape (rows,), 0 where the target is ignored. For scoring: it leaves no graph."""
    nats_N = torch.empty(len(hidden_ND), dtype=torch.float32, device=hidden_ND.device)
    with torch.no_grad():
        for start in range(0, len(hidden_ND), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits_NV, is_ignored_N = functional.linear(hidden_ND[rows], head_VD), targets_N[rows] == IGNORED
            torch.log_softmax(logits_NV, dim=-1, out=logits_NV)
            target_N = logits_NV.gather(1, targets_N[rows].masked_fill(is_ignored_N, 0).unsqueeze(1)).squeeze(1)
            nats_N[rows] = target_N.neg_().masked_fill_(is_ignored_N, 0.0)
    return nats_N


def mean_nats(hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor, *, parts: int) -> torch.Tensor:  # noqa: N803
    """Mean nats of all rows divided by `parts`, to be added up over the micro-batches of a step. No target may be ignored."""
    mean = _MeanNats.apply(hidden_ND, head_VD, targets_N, parts)  # type: ignore[no-untyped-call]
    assert isinstance(mean, torch.Tensor)
    return mean


class _MeanNats(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor, parts: int) -> torch.Tensor:  # noqa: N803
        count = len(hidden_ND)
        hidden_gradient_ND, head_gradient_VD, head_DV = torch.empty_like(hidden_ND), ProductSum(), laid_out(head_VD.t())
        nats_N, scale = hidden_ND.new_empty(count), 1.0 / (count * parts)
        for start in range(0, count, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            gradient_NV, nats_N[rows] = _logits_gradient(hidden_ND[rows], head_VD, targets_N[rows])
            hidden_gradient_ND[rows] = times(gradient_NV, head_DV)
            # The mean's factor goes into the narrow side: rows of the width of the model, not of the vocabulary.
            head_gradient_VD.add(gradient_NV, hidden_ND[rows] * scale)
            del gradient_NV  # the next chunk takes its place
        context.save_for_backward(hidden_gradient_ND.mul_(scale), head_gradient_VD.total())
        return nats_N.mean() / parts

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient_ND, head_gradient_VD = context.saved_tensors
        (outer,) = gradients
        if outer.device.type != "cpu" or float(outer) != 1.0:  # asking an accelerator would make it wait
            hidden_gradient_ND, head_gradient_VD = hidden_gradient_ND * outer, head_gradient_VD * outer
        return hidden_gradient_ND, head_gradient_VD, None, None


def _logits_gradient(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor,  # noqa: N803
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the summed nats by the logits of some rows, and the nats of their targets."""
    logits_NV = times(hidden_ND, head_VD)
    target_N, highest_N = logits_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1), logits_NV.amax(dim=-1)
    torch.softmax(logits_NV, dim=-1, out=logits_NV)
    # The likeliest word's share is never too small for a logarithm, whatever the target's is.
    nats_N = (highest_N - target_N) - logits_NV.amax(dim=-1).log()
    logits_NV[torch.arange(len(logits_NV), device=logits_NV.device), targets_N] -= 1.0
    return logits_NV, nats_N
