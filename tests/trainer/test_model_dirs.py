"""Transformers model directories: theirs give our numbers, ours give theirs, and what does not fit its config is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import sdpa_kernel
from trainer_stage import GPT2, LLAMA, VOCABULARY, StopAfter, make_run, make_task, train_here

from policies.errors import CheckpointDamaged, DataDamaged, ExplainedError, PlanInvalid
from policies.facts import TrainerExit
from trainer.__main__ import exit_status, main
from trainer.config import ModelSettings
from trainer.fingerprint import attention_kernels
from trainer.formats.tensor_files import HEADER_BYTES_MAX, read_header
from trainer.formats.transformers_dirs import read_model_directory
from trainer.models.build import build_model, load_model_directory, load_tensors
from trainer.models.families import model_config, read_config
from trainer.scoring import window_nll

WIDE_HEADS = {**LLAMA, "head_dim": 24}
UNTIED = {**LLAMA, "tie_word_embeddings": False, "num_key_value_heads": 2}
OPEN_WIDTH = {**GPT2, "n_inner": None, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
CONFIGS = {"gpt2": GPT2, "gpt2 n_inner null": OPEN_WIDTH, "llama": LLAMA, "llama untied": UNTIED, "llama head_dim": WIDE_HEADS}
WORDS = torch.arange(3 * 17).view(3, 17) * 7 % VOCABULARY


def theirs_of(config: dict[str, Any]) -> Any:
    """A model as a user of transformers makes one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    keys = {key: value for key, value in config.items() if key != "model_type"}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **keys), dtype=torch.float32).eval()


def loaded_by_them(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    os.environ["HF_HUB_OFFLINE"] = "1"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def loaded_by_us(folder: Path) -> torch.nn.Module:
    model = build_model(model_config(ModelSettings(path=str(folder)), window=16, where="task.json"), seed=0)
    load_model_directory(model, folder)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), sdpa_kernel(attention_kernels(torch.device("cpu"))):
        found = model(input_ids=WORDS[:, :-1], use_cache=False).logits
    assert isinstance(found, torch.Tensor)
    return found


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    theirs_of(UNTIED).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_directory_of_transformers_gives_the_same_logits_and_the_same_loss(tmp_path: Path, name: str) -> None:
    theirs = theirs_of(CONFIGS[name])
    theirs.save_pretrained(tmp_path / "model")
    found = read_model_directory(tmp_path / "model")
    assert found.parameters == sum(weight.numel() for weight in theirs.parameters()), "counted from the config"
    ours = loaded_by_us(tmp_path / "model")
    assert torch.equal(logits(ours), logits(theirs)), "the largest difference is 0"
    with torch.no_grad(), sdpa_kernel(attention_kernels(torch.device("cpu"))):
        their_loss = theirs(input_ids=WORDS[:, :-1], labels=WORDS[:, :-1], shift_labels=WORDS[:, 1:].contiguous(), use_cache=False).loss
        our_loss = window_nll(ours, WORDS[:, :-1], WORDS[:, 1:], precision="fp32").mean()
        shifted_by_them = theirs(input_ids=WORDS, labels=WORDS, use_cache=False).loss
    assert float(our_loss) == pytest.approx(float(their_loss), abs=1e-6)
    assert float(our_loss) == pytest.approx(float(shifted_by_them), abs=1e-6)


@pytest.mark.parametrize("config", [GPT2, LLAMA, UNTIED], ids=["gpt2", "llama", "llama untied"])
def test_transformers_loads_our_checkpoint_and_gives_the_same_logits(tmp_path: Path, shards: Path, config: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", None, model={"config": config}))
    assert train_here(run_dir, StopAfter(3)) == TrainerExit.STOPPED
    checkpoint = run_dir / "checkpoints/step-000000003"
    assert torch.equal(logits(loaded_by_them(checkpoint)), logits(loaded_by_us(checkpoint)))
    assert read_model_directory(checkpoint).config.items() >= config.items(), "every field of the config is there as it was given"


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    theirs = theirs_of(UNTIED)
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="16KB")
    found = read_model_directory(tmp_path / "sharded")
    assert len(found.files) > 2
    assert torch.equal(logits(loaded_by_us(tmp_path / "sharded")), logits(theirs))


@pytest.mark.parametrize("config", [OPEN_WIDTH, LLAMA], ids=["gpt2", "llama"])
def test_the_bare_layout_and_old_masks_are_read(tmp_path: Path, config: dict[str, Any]) -> None:
    theirs = theirs_of(config)
    theirs.base_model.save_pretrained(tmp_path / "bare")
    stored = load_file(tmp_path / "bare/model.safetensors")
    if config is OPEN_WIDTH:
        stored["h.0.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        stored["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(stored, tmp_path / "bare/model.safetensors", metadata={"format": "pt"})
    assert read_model_directory(tmp_path / "bare").is_bare
    assert torch.equal(logits(loaded_by_us(tmp_path / "bare")), logits(theirs))


def test_configs_of_transformers_4_and_5_mean_the_same_model(llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = logits(loaded_by_us(llama_dir))
    newer = json.loads((llama_dir / "config.json").read_text())
    assert "rope_parameters" in newer and "dtype" in newer, "what transformers 5 writes"
    older = {key: value for key, value in newer.items() if key not in ("rope_parameters", "dtype", "head_dim")}
    (llama_dir / "config.json").write_text(json.dumps({**older, "rope_theta": 10000.0, "torch_dtype": "float32"}))
    assert torch.equal(logits(loaded_by_us(llama_dir)), expected)
    assert torch.equal(logits(loaded_by_them(llama_dir)), expected)
    (llama_dir / "config.json").write_text(json.dumps({**older, "rope_theta": 500.0}))
    assert not torch.equal(logits(loaded_by_us(llama_dir)), expected), "the base of the rotary embedding is not passed over"
    (llama_dir / "config.json").write_text(json.dumps({**newer, "rope_theta": 500.0}))
    with pytest.raises(PlanInvalid) as refusal:
        read_config(llama_dir)
    assert "one of them is needed" in refusal.value.what
    (llama_dir / "config.json").write_text(json.dumps(older))
    assert main(["model", "inspect", str(llama_dir)]) == 0
    assert any("rope_theta is not stated: 10000.0" in line for line in json.loads(capsys.readouterr().out)["assumed"])


def test_weights_of_other_float_types_are_widened_and_nothing_else(llama_dir: Path) -> None:
    narrow = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(llama_dir / "model.safetensors").items()}
    save_file(narrow, llama_dir / "model.safetensors", metadata={"format": "pt"})
    assert read_model_directory(llama_dir).dtypes == ("BF16",)
    assert torch.equal(logits(loaded_by_us(llama_dir)), logits(loaded_by_them(llama_dir)))


def test_code_and_pickles_in_the_directory_are_never_touched(llama_dir: Path) -> None:
    marker = llama_dir / "ran"
    (llama_dir / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((llama_dir / "config.json").read_text())
    (llama_dir / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}))
    (llama_dir / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")
    loaded_by_us(llama_dir)
    assert not marker.exists()
    (llama_dir / "model.safetensors").unlink()
    with pytest.raises(CheckpointDamaged) as refusal:
        read_model_directory(llama_dir)
    assert "pickle" in refusal.value.what and refusal.value.where.endswith("pytorch_model.bin")


@pytest.mark.parametrize(("changes", "says"), [
    ({"model_type": "mistral"}, "model_type is 'mistral', only gpt2 and llama"), ({"model_type": ["llama"]}, "only gpt2 and llama"),
    ({"num_hidden_layers": 10**9}, "1 to 1024"), ({"hidden_size": True}, "hidden_size"), ({"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4}}, "rope_type 'default'"), ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"), ({"attention_dropout": 0.1}, "attention_dropout"),
    ({"mlp_bias": 1}, "mlp_bias"), ({"head_dim": 15}, "head_dim"), ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ({"rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta is None"), ({"eos_token_id": "2"}, "eos_token_id"),
    ({"hidden_size": 33, "head_dim": 16}, "hidden_size 33 over 2 heads"), ({"initializer_range": 7}, "initializer_range"),
    ({"torch_dtype": "float16", "dtype": "float32"}, "torch_dtype"), ({"pad_token_id": 48}, "pad_token_id"),
])
def test_a_config_that_means_another_arithmetic_is_refused_by_key(llama_dir: Path, changes: dict[str, Any], says: str) -> None:
    config = json.loads((llama_dir / "config.json").read_text())
    (llama_dir / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(PlanInvalid) as refusal:
        read_model_directory(llama_dir)
    assert says in refusal.value.what and refusal.value.where.endswith("config.json")


def test_whole_numbers_where_the_library_wants_floats_change_nothing(llama_dir: Path) -> None:
    expected = logits(loaded_by_us(llama_dir))
    config = json.loads((llama_dir / "config.json").read_text())
    whole = {"attention_dropout": 0, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"}, "initializer_range": 0, "eos_token_id": [2, 3]}
    (llama_dir / "config.json").write_text(json.dumps({**config, **whole}))
    assert torch.equal(logits(loaded_by_us(llama_dir)), expected)


def test_a_fresh_model_states_its_width(tmp_path: Path, shards: Path) -> None:
    with pytest.raises(PlanInvalid) as refusal:
        model_config(ModelSettings(config=OPEN_WIDTH), window=16, where="task.json")
    assert "n_inner: 128 is 4 x n_embd" in refusal.value.what


def test_weights_that_are_not_those_of_the_config_are_named_before_anything_is_allocated(llama_dir: Path) -> None:
    config = json.loads((llama_dir / "config.json").read_text())
    (llama_dir / "config.json").write_text(json.dumps({**config, "vocab_size": 2**30, "intermediate_size": 2**30}))
    with pytest.raises(CheckpointDamaged) as refusal:
        read_model_directory(llama_dir)
    assert "lm_head.weight has shape [48, 32], the config says [1073741824, 32]" in refusal.value.what
    (llama_dir / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointDamaged, match="do not fit"):
        read_model_directory(llama_dir)


def test_a_head_that_is_stored_although_tied_has_to_be_the_embedding(tmp_path: Path) -> None:
    theirs_of(LLAMA).save_pretrained(tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    stored = load_file(path)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"})
    loaded_by_us(tmp_path / "model")
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointDamaged) as refusal:
        loaded_by_us(tmp_path / "model")
    assert "'lm_head.weight' differs" in refusal.value.what


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def damage(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8:8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length:]

    return damage


def twice(data: bytes) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text = data[8:8 + length].rstrip().replace(b"{", b'{"lm_head.weight":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},', 1)
    return len(text).to_bytes(8, "little") + text + data[8 + length:]


def first(header: dict[str, Any]) -> dict[str, Any]:
    body = header[min(name for name in header if name != "__metadata__")]
    assert isinstance(body, dict)
    return body


Q_PROJ, K_PROJ = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "too short"), "truncated": (lambda data: data[:-4], "lies at"),
    "cut in the header": (lambda data: data[:40], "claims"),
    "zero-padded": (lambda data: data + bytes(512), "512 bytes follow"), "all zeros": (lambda data: bytes(len(data)), "outside 2 to"),
    "pointer": (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
    "huge header": (lambda data: (HEADER_BYTES_MAX + 1).to_bytes(8, "little") + data[8:], "claims"), "twice": (twice, "stands twice"),
    "wrong dtype": (with_header(lambda header: first(header).update(dtype="F13")), "dtype 'F13'"),
    "integers": (with_header(lambda header: first(header).update(dtype="I32")), "weights are one of"),
    "shape": (with_header(lambda header: first(header).update(shape=[2**62, 2**62, 2**62])), "needs"),
    "gap": (with_header(lambda header: first(header).update(shape=[0], data_offsets=[4, 4])), "leaves a gap"),
    "overlap": (with_header(lambda header: header[Q_PROJ].update(data_offsets=header[K_PROJ]["data_offsets"])), "shares bytes"),
    "no header": (lambda data: (16).to_bytes(8, "little") + b"not json at all!" + data, "not JSON"),
    "deep": (lambda data: (90000).to_bytes(8, "little") + b"[" * 90000 + data, "not JSON"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_of_tensors_is_refused_by_name_and_place(llama_dir: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    path = llama_dir / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointDamaged) as refusal:
        read_model_directory(llama_dir)
    assert says in refusal.value.what and refusal.value.where == str(path)
    if name not in ("integers",):
        with pytest.raises(CheckpointDamaged):
            load_tensors(path)


def test_a_number_that_is_none_is_named_by_tensor_and_offset(llama_dir: Path) -> None:
    path = llama_dir / "model.safetensors"
    entry = read_header(path)["model.layers.1.mlp.up_proj.weight"]
    data = bytearray(path.read_bytes())
    data[entry.begin + 8:entry.begin + 12] = b"\x00\x00\xc0\x7f"
    path.write_bytes(data)
    with pytest.raises(CheckpointDamaged) as refusal:
        loaded_by_us(llama_dir)
    assert f"tensor 'model.layers.1.mlp.up_proj.weight' at offset {entry.begin} holds nan" in refusal.value.what


def lose_a_shard(folder: Path, names: list[str]) -> None:
    (folder / names[1]).unlink()


def swap_two_shards(folder: Path, names: list[str]) -> None:
    first_data, second_data = ((folder / name).read_bytes() for name in names[:2])
    (folder / names[0]).write_bytes(second_data)
    (folder / names[1]).write_bytes(first_data)


def hold_a_tensor_twice(folder: Path, names: list[str]) -> None:
    stored = load_file(folder / names[0])
    save_file({**stored, next(iter(load_file(folder / names[1]))): torch.zeros(1)}, folder / names[0])


def lead_out_of_the_directory(folder: Path, names: list[str]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace(names[0], f"../{names[0]}"))


@pytest.mark.parametrize(("damage", "says"), [
    (lose_a_shard, "the shard is missing"), (swap_two_shards, "puts it into"), (hold_a_tensor_twice, "puts it into"),
    (lead_out_of_the_directory, "no name of a shard"),
])
def test_shards_and_index_that_disagree_are_refused(tmp_path: Path, damage: Callable[[Path, list[str]], None], says: str) -> None:
    theirs_of(UNTIED).save_pretrained(tmp_path / "sharded", max_shard_size="16KB")
    damage(tmp_path / "sharded", sorted(path.name for path in (tmp_path / "sharded").glob("*.safetensors")))
    with pytest.raises(CheckpointDamaged) as refusal:
        read_model_directory(tmp_path / "sharded")
    assert says in refusal.value.what


def test_a_run_starts_from_a_users_directory_and_keeps_its_config_and_tokenizer(tmp_path: Path, shards: Path, llama_dir: Path) -> None:
    (llama_dir / "tokenizer.json").write_text('{"model": {}}')
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", None, model={"path": str(llama_dir)}))
    assert train_here(run_dir, StopAfter(1)) == TrainerExit.STOPPED
    kept = run_dir / "checkpoints/step-000000000"
    assert json.loads((kept / "config.json").read_text()) == json.loads((llama_dir / "config.json").read_text())
    assert (kept / "tokenizer.json").read_bytes() == (llama_dir / "tokenizer.json").read_bytes()
    shutil.rmtree(llama_dir)
    with pytest.raises(ExplainedError) as refusal:
        model_config(ModelSettings(path=str(llama_dir)), window=16, where="task.json")
    assert exit_status(refusal.value) == TrainerExit.CONFIG and not isinstance(refusal.value, DataDamaged)
