"""zxell's .pt: what is wrong with one is told by key or tensor, and nothing in it is ever run."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from policies.errors import CheckpointDamaged, ExplainedError, PlanInvalid
from trainer.formats.zxell_checkpoint import read_checkpoint
from trainer.formats.zxell_run import read_log, read_run

SAMPLES = Path(__file__).parent.parent / "data/zxell"
SAMPLE = SAMPLES / "run/ckpt_last.pt"


def changed(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The sample with its content changed and packed again."""
    body = torch.load(SAMPLE, weights_only=True)
    change(body)
    torch.save(body, tmp_path / "ckpt_last.pt")
    return tmp_path / "ckpt_last.pt"


def put(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        del body[keys[-1]]

    return change


def spoil(*keys: Any, value: float) -> Callable[[dict[str, Any]], None]:
    def change(body: Any) -> None:
        for key in keys:
            body = body[key]
        body.view(-1)[1] = value

    return change


def test_the_sample_reads_whole() -> None:
    found = read_checkpoint(SAMPLE)
    assert (found.step, found.model.n_layer, found.args["seed"]) == (20, 2, 431)
    assert found.optimizer is not None and found.generator is not None
    assert (found.optimizer.betas, found.optimizer.weight_decay, found.optimizer.eps) == ((0.9, 0.95), 0.1, 1e-8)
    body = torch.load(SAMPLE, weights_only=True)
    # The reference numbers its parameters through the groups: the first that decays is the embedding, the first norm comes after all of them.
    assert torch.equal(found.optimizer.moments["exp_avg"]["tok_emb.weight"], body["optimizer"]["state"][0]["exp_avg"])
    first_norm = body["optimizer"]["param_groups"][1]["params"][0]
    assert torch.equal(found.optimizer.moments["exp_avg_sq"]["blocks.0.norm1.weight"], body["optimizer"]["state"][first_norm]["exp_avg_sq"])


@pytest.mark.parametrize(("change", "named"), [
    (drop("optimizer"), "optimizer: missing"), (drop("sampler"), "sampler: missing"), (drop("step"), "step: missing"),
    (drop("args"), "args: missing"),
    (drop("config"), "config: missing"), (put("version", value=3), "version: unknown key"), (put("step", value=-1), "step"),
    (put("step", value=True), "step"),
    (drop("model", "blocks.1.attn.qkv.weight"), "model.blocks.1.attn.qkv.weight is missing"),
    (put("model", "blocks.2.norm1.weight", value=torch.ones(16)), "model.blocks.2.norm1.weight is unknown"),
    (put("model", "norm_f.weight", value=torch.ones(17)), "norm_f.weight has shape (17,)"),
    (put("model", "norm_f.weight", value="x"), "norm_f.weight is no tensor"),
    (put("model", "norm_f.weight", value=torch.ones(16).long()), "floating"),
    (spoil("model", "blocks.0.ffn.w_up.weight", value=float("nan")), "blocks.0.ffn.w_up.weight holds numbers that are nan"),
    (put("model", "lm_head.weight", value=torch.zeros(48, 16)), "lm_head.weight differs from tok_emb.weight"),
    (put("config", "n_layer", value=3), "blocks.2"), (put("config", "rms_eps", value=1e-6), "model.rms_eps: unknown"),
    (spoil("optimizer", "state", 3, "exp_avg_sq", value=float("inf")), "optimizer.exp_avg_sq of"),
    (drop("optimizer", "state", 4), "optimizer.state.4: missing"), (drop("optimizer", "state", 4, "exp_avg"), "optimizer.exp_avg of"),
    (put("optimizer", "state", 2, "step", value=torch.tensor(19.0)), "optimizer.state.2.step"),
    (put("optimizer", "state", 99, value={}), "optimizer.state.99: belongs to no tensor"),
    (put("optimizer", "param_groups", value=[]), "2 groups"), (put("optimizer", "param_groups", 0, "amsgrad", value=True), "amsgrad"),
    (put("optimizer", "param_groups", 1, "betas", value=(0.9, 0.99)), "betas: the groups differ"),
    (put("sampler", "rng", "bit_generator", value="MT19937"), "PCG64"), (drop("sampler", "rng", "state", "inc"), "inc"),
    (drop("sampler", "rng"), "sampler.rng"),
])
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, change: Callable[[dict[str, Any]], Any], named: str) -> None:
    path = changed(tmp_path, change)
    with pytest.raises(CheckpointDamaged) as refused:
        read_checkpoint(path)
    assert str(path) in refused.value.where
    assert named in refused.value.what


def test_a_file_cut_at_any_place_is_refused(tmp_path: Path) -> None:
    data, path = SAMPLE.read_bytes(), tmp_path / "ckpt_last.pt"
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointDamaged) as refused:
            read_checkpoint(path)
        assert str(path) == refused.value.where


def test_a_flipped_byte_anywhere_is_refused_or_changes_nothing_that_is_read(tmp_path: Path) -> None:
    data, path, draws = SAMPLE.read_bytes(), tmp_path / "ckpt_last.pt", np.random.default_rng(1)
    good, refused_count = read_checkpoint(SAMPLE), 0
    for place in draws.integers(0, len(data), 80):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << int(draws.integers(0, 8)))]) + data[place + 1:])
        try:
            found = read_checkpoint(path)
        except CheckpointDamaged:
            refused_count += 1
            continue
        assert all(torch.equal(found.tensors[name], good.tensors[name]) for name in good.tensors)
        assert (found.step, found.generator) == (good.step, good.generator)
    assert refused_count > 60


@pytest.mark.parametrize(("data", "named"), [
    (b"", "empty"), (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "git-lfs"), (b"\0" * 5000, "no archive"),
    (pickle.dumps({"model": {}}), "no archive"),
])
def test_other_files_are_told_what_they_are(tmp_path: Path, data: bytes, named: str) -> None:
    (tmp_path / "ckpt_last.pt").write_bytes(data)
    with pytest.raises(CheckpointDamaged) as refused:
        read_checkpoint(tmp_path / "ckpt_last.pt")
    assert named in refused.value.what


class Evil:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.path,))


def test_code_in_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    path = changed(tmp_path, put("args", "x", value=Evil(str(tmp_path / "proof"))))
    with pytest.raises(CheckpointDamaged) as refused:
        read_checkpoint(path)
    assert "more than tensors" in refused.value.what
    assert not (tmp_path / "proof").exists()


def test_an_archive_that_unpacks_to_more_than_it_holds_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "ckpt_last.pt"
    with zipfile.ZipFile(SAMPLE) as good, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for entry in good.infolist():
            packed.writestr(entry.filename, good.read(entry.filename))
    with pytest.raises(CheckpointDamaged) as refused:
        read_checkpoint(path)
    assert "unpack" in refused.value.what


@pytest.mark.parametrize(("old", "new", "named"), [
    ('"lr": 0.01', '"lr": -1', "args.lr"), ('"steps": 40', '"steps": "40"', "args.steps"),
    ('"ctx": 16,\n    "lr"', '"ctx": 17,\n    "lr"', "args.ctx"),
    ('"n_head": 2', '"n_head": 0', "model.n_head"), ('"seed": 431', '"seed": 431, "seed": 5', "stands twice"),
    ('"train_shards": [', '"train_shards": [5,', "train_shards"),
    ('"warmup"', '"warm"', "args.warmup"), ("{", "", "not JSON"),
])
def test_a_config_that_can_not_be_is_refused_by_key(tmp_path: Path, old: str, new: str, named: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(SAMPLES / "run", folder)
    text = (folder / "config.json").read_text()
    assert old in text
    (folder / "config.json").write_text(text.replace(old, new, 1))
    with pytest.raises(PlanInvalid) as refused:
        read_run(folder)
    assert named in refused.value.what
    assert "config.json" in refused.value.where


def test_a_torn_tail_of_the_log_is_tolerated_and_a_broken_line_is_named(tmp_path: Path) -> None:
    log = (SAMPLES / "run/log.jsonl").read_bytes()
    (tmp_path / "log.jsonl").write_bytes(log + b'{"step": 30, "lo')
    assert read_log(tmp_path) == read_log(SAMPLES / "run")
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1, "lo\n' + log)
    with pytest.raises(ExplainedError) as refused:
        read_log(tmp_path)
    assert "line 1" in refused.value.what
