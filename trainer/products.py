"""The matrix products of a training step on the CPU: by oneDNN, which torch carries with it and asks for other kinds of numbers only.

    times       left · rightᵀ, both fp32; both may be views of any layout
    laid_out    a right side that is used again and again
    ProductSum  leftᵀ · right, added up over chunks
    quicken     the linear layers of a model take this way while they train, forward and backward

Which library torch's own fp32 products go to was settled when it was built, as a rule MKL, and MKL takes the widest registers on
the processors of one maker alone: elsewhere oneDNN needs half the time (docs/training.md). The sums are fp32 all the same, in
another order, so the way taken stands in the fingerprint. Scoring takes torch's own: its figures are those of `transformers`, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from transformers.pytorch_utils import Conv1D


def has_onednn(device: torch.device) -> bool:
    """Whether products on this device go there. The operator is torch's own and undocumented: without it all is as torch does it."""
    is_there: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device.type == "cpu" and is_there and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def times(left_NK: torch.Tensor, right_MK: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """left · rightᵀ, shape (N, M). Leaves no graph."""
    if left_NK.dtype is torch.float32 and has_onednn(left_NK.device):
        product_NM = torch.ops.mkldnn._linear_pointwise(left_NK, right_MK, None, "none", [], "")
        assert isinstance(product_NM, torch.Tensor)
        return product_NM
    return torch.mm(left_NK, right_MK.t())


def laid_out(right_MK: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """The same right side, in the layout that is quickest to use more than once."""
    return right_MK.contiguous() if has_onednn(right_MK.device) else right_MK


class ProductSum:
    """leftᵀ · right added up over chunks of rows: (rows, N) and (rows, M) make (N, M).

    oneDNN is quickest when it may lay out the wide side as it likes, which is why it makes the transposed sum.
    """

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None

    def add(self, left_RN: torch.Tensor, right_RM: torch.Tensor) -> None:  # noqa: N803
        if has_onednn(left_RN.device):
            product_MN = times(right_RM.t(), left_RN.t())
            self._sum = product_MN if self._sum is None else self._sum.add_(product_MN)
        elif self._sum is None:
            self._sum = torch.mm(left_RN.t(), right_RM)
        else:
            self._sum.addmm_(left_RN.t(), right_RM)

    def total(self) -> torch.Tensor:
        assert self._sum is not None, "something was added"
        return self._sum.t().contiguous() if has_onednn(self._sum.device) else self._sum


class _Linear(torch.autograd.Function):
    """input · weightᵀ + bias over the last dimension."""

    @staticmethod
    def forward(context: Any, input_K: torch.Tensor, weight_MK: torch.Tensor, bias_M: torch.Tensor | None) -> torch.Tensor:  # noqa: N803
        rows_NK = input_K.reshape(-1, input_K.shape[-1])
        context.save_for_backward(rows_NK, weight_MK)
        output_NM = times(rows_NK, weight_MK)
        if bias_M is not None:
            output_NM += bias_M
        return output_NM.view(*input_K.shape[:-1], -1)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_NK, weight_MK = context.saved_tensors
        (gradient_M,) = gradients
        gradient_NM = gradient_M.reshape(-1, gradient_M.shape[-1])
        wants_input, wants_weight, wants_bias = context.needs_input_grad
        return (
            times(gradient_NM, weight_MK.t()).view(*gradient_M.shape[:-1], -1) if wants_input else None,
            times(gradient_NM.t(), rows_NK.t()) if wants_weight else None,
            gradient_NM.sum(0) if wants_bias else None,
        )


class QuickLinear(nn.Linear):
    def forward(self, input_K: torch.Tensor) -> torch.Tensor:  # noqa: N803
        if self.training and torch.is_grad_enabled():
            return _Linear.apply(input_K, self.weight, self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return functional.linear(input_K, self.weight, self.bias)


class QuickConv1D(Conv1D):
    """GPT-2's linear layer, whose weight lies the other way round."""

    def forward(self, input_K: torch.Tensor) -> torch.Tensor:  # noqa: N803
        if self.training and torch.is_grad_enabled():
            return _Linear.apply(input_K, self.weight.t(), self.bias)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(input_K)  # type: ignore[no-any-return, no-untyped-call]


def quicken(model: nn.Module) -> None:
    """Let the linear layers of a model on the CPU train through `times`. Names, weights and what they compute stay as they are."""
    if has_onednn(next(model.parameters()).device):
        for module in model.modules():
            if type(module) in (nn.Linear, Conv1D):
                module.__class__ = QuickLinear if type(module) is nn.Linear else QuickConv1D
