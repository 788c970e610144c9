"""The loss without all logits at once: the library's numbers, whatever the rows are cut into."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from trainer import head_loss

ROWS, WIDTH, WORDS = 150, 32, 500


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    hidden_ND, head_VD = torch.randn(ROWS, WIDTH, generator=draws), torch.randn(WORDS, WIDTH, generator=draws)
    return hidden_ND.requires_grad_(), head_VD.requires_grad_(), torch.randint(0, WORDS, (ROWS,), generator=draws)


@pytest.mark.parametrize("chunk", [64, 150, 512])
def test_loss_and_gradients_are_those_of_the_whole_cross_entropy(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(head_loss, "CHUNK_ROWS", chunk)
    hidden_ND, head_VD, targets_N = drawn()
    whole = functional.cross_entropy(hidden_ND @ head_VD.t(), targets_N) / 2
    whole.backward()
    wanted = [tensor.grad for tensor in (hidden_ND, head_VD)]
    hidden_ND.grad = head_VD.grad = None
    loss = head_loss.mean_nats(hidden_ND, head_VD, targets_N, parts=2)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(whole.detach()), abs=1e-6)
    for tensor, gradient in zip((hidden_ND, head_VD), wanted, strict=True):
        assert gradient is not None and tensor.grad is not None and torch.allclose(tensor.grad, gradient, rtol=1e-4, atol=1e-7)


def test_a_gradient_from_outside_scales_both_sides() -> None:
    hidden_ND, head_VD, targets_N = drawn()
    head_loss.mean_nats(hidden_ND, head_VD, targets_N, parts=1).backward()
    once = hidden_ND.grad, head_VD.grad
    hidden_ND.grad = head_VD.grad = None
    (3.0 * head_loss.mean_nats(hidden_ND, head_VD, targets_N, parts=1)).backward()
    for before, tensor in zip(once, (hidden_ND, head_VD), strict=True):
        assert before is not None and tensor.grad is not None and torch.allclose(tensor.grad, 3.0 * before, rtol=1e-5)


def test_rows_are_scored_as_the_library_scores_them_and_ignored_ones_are_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "CHUNK_ROWS", 64)
    hidden_ND, head_VD, targets_N = drawn()
    targets_N[[3, 149]] = head_loss.IGNORED
    wanted_N = functional.cross_entropy(hidden_ND @ head_VD.t(), targets_N, reduction="none", ignore_index=head_loss.IGNORED)
    found_N = head_loss.row_nats(hidden_ND, head_VD, targets_N)
    assert torch.allclose(found_N, wanted_N, rtol=1e-5) and float(found_N[3]) == 0.0 and not found_N.requires_grad
