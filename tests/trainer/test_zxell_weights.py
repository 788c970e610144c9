"""zxell and Llama: one function, two sets of names, no bit lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zxell_reference import TINY, Zxell, expected_shapes, hidden_width

from policies.errors import CheckpointDamaged, PlanInvalid
from trainer.formats.zxell_weights import (
    PRESETS,
    fresh_tensors,
    from_llama,
    llama_config,
    model_of_llama,
    parameter_count,
    parse_model,
    shapes_of,
    to_llama,
)
from trainer.models.build import build_model, fill_weights, trained_weights

S = {**PRESETS["S"], "vocab_size": 48_000}


def test_the_s_preset_has_the_parameters_names_and_shapes_of_the_page() -> None:
    model = parse_model(S, where="S")
    assert round(parameter_count(model) / 1e6, 1) == 29.1
    assert round((parameter_count(model) - 48_000 * 384) / 1e6, 1) == 10.6
    assert {**shapes_of(model), "lm_head.weight": (48_000, 384)} == expected_shapes(S)
    assert list(shapes_of(model)) == [name for name, _ in Zxell({**TINY, "n_layer": 6}).named_parameters()]
    with torch.device("meta"):
        llama = build_model(llama_config(model), seed=0)
    assert sum(weight.numel() for weight in trained_weights(llama).values()) == parameter_count(model)


@pytest.mark.parametrize("width", [16, 64, 384, 512, 768, 1280])
def test_the_hidden_width_is_eight_thirds_rounded_up_to_64(width: int) -> None:
    assert parse_model({**S, "d_model": width, "n_head": 2}, where="").hidden == hidden_width(width)


def test_there_and_back_is_bitwise() -> None:
    model = parse_model(TINY, where="tiny")
    tensors = {name: tensor.detach() for name, tensor in Zxell(TINY, seed=3).state_dict().items() if name != "lm_head.weight"}
    back = from_llama(model, to_llama(model, tensors), where="tiny")
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert parse_model(model_of_llama(llama_config(model), where="").to_json(), where="") == model


def test_the_llama_computes_the_function_of_the_page() -> None:
    torch.set_num_threads(1)
    model, reference = parse_model(TINY, where="tiny"), Zxell(TINY, seed=3)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(8.0)  # as if trained: fresh weights hide a wrong head or a wrong rotation behind their smallness
    llama = build_model(llama_config(model), seed=0).eval()
    tensors = {name: tensor.detach() for name, tensor in reference.state_dict().items() if name != "lm_head.weight"}
    fill_weights(llama, to_llama(model, tensors), where="tiny")
    tokens = torch.randint(0, 48, (3, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs, ours = reference(tokens), llama(input_ids=tokens, use_cache=False).logits
    assert float(theirs.abs().max()) > 1.0
    assert torch.allclose(theirs, ours, rtol=0, atol=1e-5 * float(theirs.abs().max()))
    assert torch.equal(theirs.argmax(-1), ours.argmax(-1))


def test_a_fresh_model_begins_as_the_page_says() -> None:
    model = parse_model({**S, "vocab_size": 4000}, where="S")
    tensors = fresh_tensors(model, seed=1)
    assert float(tensors["blocks.0.attn.qkv.weight"].std()) == pytest.approx(0.02, rel=0.02)
    assert float(tensors["blocks.5.ffn.w_down.weight"].std()) == pytest.approx(0.02 / 12**0.5, rel=0.02)
    assert bool((tensors["norm_f.weight"] == 1).all())


@pytest.mark.parametrize(("change", "named"), [
    ({"n_layer": 0}, "n_layer"), ({"d_model": 15}, "even head width"), ({"d_model": "16"}, "d_model"), ({"tie_embeddings": False}, "tie_embeddings"),
    ({"n_kv_head": 1}, "n_kv_head"), ({"vocab_size": 70_000}, "vocab_size"), ({"rope_theta": float("nan")}, "rope_theta"), ({"ctx": True}, "ctx"),
])
def test_a_config_that_is_none_is_refused_by_key(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanInvalid, match="zxell") as refused:
        parse_model({**TINY, **change}, where="config.json")
    assert named in refused.value.what


@pytest.mark.parametrize(("change", "named"), [
    ({"num_key_value_heads": 1}, "num_key_value_heads"), ({"tie_word_embeddings": False}, "tie_word_embeddings"),
    ({"intermediate_size": 100}, "intermediate_size"), ({"rms_norm_eps": 1e-6}, "rms_norm_eps"), ({"model_type": "gpt2"}, "model_type"),
    ({"head_dim": 4}, "head_dim"),
])
def test_a_llama_that_zxell_has_no_words_for_is_refused_by_key(change: dict[str, Any], named: str) -> None:
    config = {**llama_config(parse_model(TINY, where="")), **change}
    with pytest.raises(PlanInvalid) as refused:
        model_of_llama(config, where="config.json")
    assert named in refused.value.what


def test_a_missing_tensor_is_named_on_the_way_back() -> None:
    model = parse_model(TINY, where="")
    llama = to_llama(model, fresh_tensors(model, seed=0))
    del llama["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointDamaged) as refused:
        from_llama(model, llama, where="x")
    assert "model.layers.1.self_attn.k_proj.weight" in refused.value.what
