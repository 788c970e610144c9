"""Zrodlo configurations, model directories and checkpoints: refusals by key, our own round trip, nothing lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_stage import GPT2, LLAMA, StopAfter, make_run, make_task, train_here

from policies.errors import CheckpointDamaged, PlanInvalid, RequestRefused
from policies.facts import TrainerExit
from trainer.__main__ import main
from trainer.formats.zrodlo_config import read_zrodlo_config
from trainer.formats.zrodlo_models import copy_checkpoint, export_checkpoint, export_model, read_zrodlo_checkpoint

UNTIED = {**LLAMA, "tie_word_embeddings": False}
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "llama untied": UNTIED}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """A model directory with a config of somebody else's taste, and a tokenizer."""
    from trainer.models.build import build_model, trained_weights

    weights = trained_weights(build_model(config, seed=3))
    write_config(folder, config)
    save_file({name: weight.detach().clone() for name, weight in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "x_note": [1, {"deep": None}], "torch_dtype": "float32"}, indent=7))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture(params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, shards: Path) -> Path:
    """A checkpoint of ours after three steps."""
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", shards / "val", model={"config": CONFIGS[request.param]}))
    assert train_here(run_dir, StopAfter(3)) == TrainerExit.STOPPED
    return run_dir / "checkpoints/step-000000003"


@pytest.mark.parametrize(("config", "changes", "says"), [
    (GPT2, {"activation_function": "relu"}, "only 'gelu_new'"), (GPT2, {"tie_word_embeddings": False}, "only True"),
    (GPT2, {"scale_attn_weights": False}, "only True"), (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "only False"),
    (GPT2, {"add_cross_attention": True}, "only False"), (GPT2, {"n_inner": None}, "n_inner is null or missing"),
    (GPT2, {"embd_pdrop": 1.0}, "embd_pdrop"), (GPT2, {"layer_norm_epsilon": None}, "layer_norm_epsilon"), (GPT2, {"n_head": 5}, "n_head 5"),
    (LLAMA, {"hidden_act": "gelu"}, "only 'silu'"), (LLAMA, {"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
    (LLAMA, {"head_dim": 7}, "even width"), (LLAMA, {"hidden_size": 30, "num_attention_heads": 2}, "no even head width"),
    (LLAMA, {"attention_bias": True}, "only False"), (LLAMA, {"mlp_bias": True}, "only False"), (LLAMA, {"attention_dropout": 0.1}, "only 0"),
    (LLAMA, {"rope_scaling": {"type": "linear", "factor": 2}}, "only None"), (LLAMA, {"model_type": "qwen2"}, "only gpt2 and llama"),
    *[(config, {key: ...}, key) for config in (GPT2, LLAMA) for key in config if key != "model_type"],
])
def test_every_refusal_names_its_key_and_what_would_be_taken(tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    changed = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    with pytest.raises(PlanInvalid) as refusal:
        read_zrodlo_config(write_config(tmp_path / "model", changed))
    assert says in refusal.value.what and refusal.value.where.endswith("config.json")


def test_newer_names_are_read_and_kept(tmp_path: Path) -> None:
    newer = {**{key: value for key, value in LLAMA.items() if key != "rope_theta"}, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
             "dtype": "float32", "unheard_of": {"a": 1}}
    assert read_zrodlo_config(write_config(tmp_path / "model", newer)).body == newer


@pytest.mark.parametrize(("choice", "width"), [("4x", 128), ("64", 64), ("3x", 96)])
def test_an_open_width_is_chosen_in_words_never_in_silence(tmp_path: Path, choice: str, width: int) -> None:
    read = read_zrodlo_config(write_config(tmp_path / "model", {**GPT2, "n_inner": None}), n_inner=choice)
    assert read.body == {**GPT2, "n_inner": width} and f"n_inner is {width}, chosen as {choice}" in str(read.chosen)
    for nonsense in ("x", "0", "4X", "-1", "4.5x"):
        with pytest.raises(PlanInvalid, match="not complete"):
            read_zrodlo_config(tmp_path / "model", n_inner=nonsense)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_keeps_config_and_weights_byte_for_byte_through_both_layouts(tmp_path: Path, name: str) -> None:
    source = make_model(tmp_path / "source", CONFIGS[name])
    export_model(source, tmp_path / "whole")
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (source / file).read_bytes(), file
    if name == "llama untied":
        with pytest.raises(RequestRefused, match="bare layout"):
            export_model(source, tmp_path / "bare", layout="bare")
        assert "lm_head.weight" in load_file(tmp_path / "whole/model.safetensors")
        return
    export_model(source, tmp_path / "bare", layout="bare")
    assert not any(stored.startswith(("transformer.", "model.")) for stored in load_file(tmp_path / "bare/model.safetensors"))
    assert "lm_head.weight" not in load_file(tmp_path / "whole/model.safetensors")
    export_model(tmp_path / "bare", tmp_path / "back")
    assert (tmp_path / "back/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_shards_are_gathered_and_a_chosen_width_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_model(tmp_path / "source", {**GPT2, "n_inner": 128})
    (source / "config.json").write_text(json.dumps({**GPT2, "n_inner": None, "kept": 1}))
    stored = load_file(source / "model.safetensors")
    halves = [sorted(stored)[:9], sorted(stored)[9:]]
    for number, names in enumerate(halves):
        save_file({name: stored[name] for name in names}, source / f"part-{number}.safetensors")
    weight_map = {name: f"part-{number}.safetensors" for number, names in enumerate(halves) for name in names}
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    (source / "model.safetensors").unlink()
    assert main(["model", "export", str(source), "--out", str(tmp_path / "out")]) == TrainerExit.CONFIG
    assert "--n-inner 4x means 128" in capsys.readouterr().err
    wrong = ["model", "export", str(source), "--out", str(tmp_path / "out"), "--n-inner", "2x"]
    assert main(wrong) == TrainerExit.CONFIG, "the weights say otherwise"
    capsys.readouterr()
    assert main(["model", "export", str(source), "--out", str(tmp_path / "out"), "--n-inner", "4x"]) == 0
    assert "chosen as 4x" in json.loads(capsys.readouterr().out)["chosen"][0]
    assert json.loads((tmp_path / "out/config.json").read_text()) == {**GPT2, "n_inner": 128, "kept": 1}
    gathered = load_file(tmp_path / "out/model.safetensors")
    assert gathered.keys() == stored.keys() and all(torch.equal(gathered[name], stored[name]) for name in stored)


def test_a_checkpoint_goes_out_and_comes_back_with_every_key(tmp_path: Path, checkpoint: Path) -> None:
    exported = export_checkpoint(checkpoint, tmp_path / "zrodlo")
    ours = json.loads((checkpoint / "trainer.json").read_text())
    assert exported.steps == 3 and exported.described["losses"] == ours["losses"] and exported.described["fleetd"] == ours
    assert exported.described["held_out"] == [{"step": score["step"], "value": score["value"]} for score in ours["scores"]] != []
    assert exported.described["window"] == 16 and exported.described["corpus_digest"] == ours["data"]["train"]["digest"]
    moments, kept = load_file(checkpoint / "optimizer.safetensors"), load_file(tmp_path / "zrodlo/optimizer.safetensors")
    assert moments.keys() == kept.keys() and all(torch.equal(moments[name], kept[name]) for name in moments)
    copy_checkpoint(exported, tmp_path / "again", {**exported.described, "from_elsewhere": {"a": [1]}})
    again = read_zrodlo_checkpoint(tmp_path / "again")
    assert again.described["from_elsewhere"] == {"a": [1]}
    for name in ("config.json", "model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "zrodlo" / name).read_bytes()
    with pytest.raises(RequestRefused, match="there already"):
        export_checkpoint(checkpoint, tmp_path / "zrodlo")


def state(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        body = json.loads((folder / "trainer.json").read_text())
        (folder / "trainer.json").write_text(json.dumps({**body, **changes}))

    return damage


def moments(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        save_file(change(load_file(folder / "optimizer.safetensors")), folder / "optimizer.safetensors")

    return damage


NORM = "exp_avg/transformer.ln_f.weight"


@pytest.mark.parametrize(("damage", "names", "says"), [
    (state(losses=[1.0] * 11), "optimizer.safetensors", "counts 12.0 steps, trainer.json has 11 losses"),
    (state(losses=None), "trainer.json", "losses is"),
    (state(losses=[1.0, "2", 3.0]), "trainer.json", "the loss of step 2"), (state(schema=2), "trainer.json", "this version reads 1"),
    (state(window=0, batch="4"), "trainer.json", "window is '0', a count above 0 is needed; batch"), (state(seed=None), "trainer.json", "seed"),
    (lambda folder: (folder / "trainer.json").write_text('{"schema": 1, "losses": [NaN]}'), "trainer.json", "NaN"),
    (lambda folder: (folder / "trainer.json").write_text("[]"), "trainer.json", "an object"),
    (lambda folder: (folder / "optimizer.safetensors").unlink(), "optimizer.safetensors", "No such file"),
    (moments(lambda held: {name: held[name] for name in held if name != NORM}), "optimizer.safetensors", f"{NORM!r} is missing"),
    (moments(lambda held: {**held, "exp_avg/x": torch.zeros(1)}), "optimizer.safetensors", "'exp_avg/x' is of no weight"),
    (moments(lambda held: {**held, NORM: held[NORM].double()}), "optimizer.safetensors", "F64 [32], not F32 [32]"),
    (moments(lambda held: {**held, NORM: held[NORM] * float("nan")}), "optimizer.safetensors", f"tensor {NORM!r} at offset"),
    (moments(lambda held: {**held, NORM: torch.zeros(31)}), "optimizer.safetensors", "F32 [31], not F32 [32]"),
])
def test_a_damaged_checkpoint_is_refused_by_file_and_key(
    tmp_path: Path, undisturbed: Path, damage: Callable[[Path], None], names: str, says: str,
) -> None:
    folder = tmp_path / "zrodlo"
    export_checkpoint(undisturbed / "checkpoints/step-000000012", folder)
    damage(folder)
    with pytest.raises(CheckpointDamaged) as refusal:
        read_zrodlo_checkpoint(folder)
    assert Path(refusal.value.where).name == names and says in refusal.value.what
