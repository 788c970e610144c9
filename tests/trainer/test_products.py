"""The way the matrix products of a training step take on the CPU: torch's numbers, and torch's own way where oneDNN is not there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainer import products
from trainer.fingerprint import fingerprint
from trainer.models.build import build_model

MODELS = {
    "gpt2": {
        "model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "llama": {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 32, "attention_bias": True,
    },
}


@pytest.fixture
def without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_onednn", lambda device: False)


def test_this_suite_runs_where_onednn_is_there() -> None:
    assert products.has_onednn(torch.device("cpu")), "else the tests below compare torch with itself"


@pytest.mark.parametrize("turned", [False, True])
def test_a_product_is_torchs_whatever_the_layout(turned: bool) -> None:
    draws = torch.Generator().manual_seed(1)
    left_NK, right_MK = torch.randn(70, 33, generator=draws), torch.randn(41, 33, generator=draws)
    if turned:
        left_NK, right_MK = left_NK.t().contiguous().t(), right_MK.t().contiguous().t()
    assert torch.allclose(products.times(left_NK, right_MK), left_NK @ right_MK.t(), atol=1e-5)


def test_a_sum_over_chunks_is_the_product_of_the_whole() -> None:
    draws = torch.Generator().manual_seed(2)
    left_RN, right_RM = torch.randn(90, 50, generator=draws), torch.randn(90, 20, generator=draws)
    found = products.ProductSum()
    for start in range(0, 90, 40):
        found.add(left_RN[start:start + 40], right_RM[start:start + 40])
    assert found.total().is_contiguous() and torch.allclose(found.total(), left_RN.t() @ right_RM, atol=1e-5)


def test_without_onednn_all_is_torchs_own_to_the_bit(without_onednn: None) -> None:
    draws = torch.Generator().manual_seed(3)
    left_NK, right_MK = torch.randn(70, 33, generator=draws), torch.randn(41, 33, generator=draws)
    assert torch.equal(products.times(left_NK, right_MK), torch.mm(left_NK, right_MK.t()))
    model = nn.Sequential(nn.Linear(4, 4))
    products.quicken(model)
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("family", MODELS)
def test_a_quickened_model_trains_with_the_gradients_of_the_plain_one_and_scores_as_it_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build_model(dict(MODELS[family]), seed=5).train()
    quick = copy.deepcopy(plain)
    products.quicken(quick)
    kinds = {type(module) for module in quick.modules()}
    assert kinds & {products.QuickLinear, products.QuickConv1D} and not kinds & {nn.Linear, Conv1D}
    assert list(quick.state_dict()) == list(plain.state_dict())
    tokens_BT = torch.randint(0, 300, (3, 16), generator=torch.Generator().manual_seed(6))
    losses = []
    for model in (plain, quick):
        losses.append(model(input_ids=tokens_BT, labels=tokens_BT).loss)
        losses[-1].backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), abs=1e-6)
    for (name, wanted), found in zip(plain.named_parameters(), quick.parameters(), strict=True):
        assert wanted.grad is not None and found.grad is not None
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-3, atol=1e-6), name
    monkeypatch.setattr(products, "times", None)  # small matrices may give equal bits either way: scoring never comes here
    with torch.no_grad():
        assert torch.equal(quick(input_ids=tokens_BT).logits, plain(input_ids=tokens_BT).logits), "the training mode alone changes nothing"
        assert torch.equal(quick.eval()(input_ids=tokens_BT).logits, plain.eval()(input_ids=tokens_BT).logits)


def test_the_way_taken_stands_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert fingerprint(cpu, threads=1, precision="fp32")["products"] == "onednn"
    monkeypatch.setattr("trainer.fingerprint.has_onednn", lambda device: False)
    assert fingerprint(cpu, threads=1, precision="fp32")["products"] == "torch"
