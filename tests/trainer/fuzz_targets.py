"""What the fuzzer feeds: for every format of the trainer small sound files, the reader that a command uses, and how to mend digests."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save as tensor_bytes
from trainer_stage import GPT2, LLAMA, make_shards, make_task
from zrodlo_stage import TEXTS, make_corpus, make_tokenizer

from policies.manifest import FileEntry, manifest_body
from policies.token_nll import ScoredRow
from trainer.checkpoint import verify
from trainer.config import read_task
from trainer.data.shards import open_corpus
from trainer.formats.tensor_files import read_header
from trainer.formats.transformers_dirs import read_model_directory
from trainer.formats.zrodlo_build import load_tokenizer, read_sources
from trainer.formats.zrodlo_config import read_zrodlo_config
from trainer.formats.zrodlo_corpus import open_zrodlo_corpus
from trainer.formats.zrodlo_models import read_zrodlo_checkpoint
from trainer.formats.zxell_checkpoint import OptimizerState, ZxellCheckpoint, read_checkpoint, write_checkpoint_file
from trainer.formats.zxell_run import read_log, read_run
from trainer.formats.zxell_weights import parse_model, shapes_of
from trainer.models.build import load_tensors
from trainer.models.families import arithmetic_config
from trainer.models.shapes import parameter_count, weight_shapes
from trainer.predictions import complete_predictions, read_rows, write_predictions
from trainer.state import read_state

Files = dict[str, bytes]
SMALL_GPT2 = {**GPT2, "vocab_size": 5, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_inner": 4}
SMALL_LLAMA = {**LLAMA, "vocab_size": 5, "hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "tie_word_embeddings": False}
SMALL_ZXELL = {"n_layer": 1, "d_model": 8, "n_head": 2, "ctx": 8, "vocab_size": 8, "rope_theta": 10000.0, "tie_embeddings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`files` are sound, `mutable` those that are changed, `read` raises ExplainedError or nothing; `mend` makes digests true again."""

    files: Files
    read: Callable[[Path], Any]
    mutable: tuple[str, ...] = ()
    mend: Callable[[Files], Files] | None = None


def make_targets(scratch: Path) -> dict[str, Target]:
    """Every target by name. Each of them takes its own sound files."""
    targets = {
        "tensors": _tensors(), "config": _config(), "model": _model(scratch / "s"), "index": _index(), "checkpoint": _zrodlo_checkpoint(),
        "corpus": _corpus(scratch / "s"), "sources": _sources(), "tokenizer": _tokenizer(scratch / "s"), "shards": _shards(scratch / "s"),
        "manifest": _manifest(), "task": _task(), "state": _state(), "predictions": _predictions(scratch / "s"),
        "zxell run": _zxell_run(), "zxell pt": _zxell_pt(scratch / "s"),
    }
    shutil.rmtree(scratch / "s")
    return {name: Target(files=each.files, read=each.read, mutable=each.mutable or tuple(sorted(each.files)), mend=each.mend)
            for name, each in targets.items()}


def _arrays(config: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.full(shape, 0.5, dtype=np.float32) for name, shape in weight_shapes(config).items()}


def _tensors() -> Target:
    arrays = {"a": np.ones((3, 4), dtype=np.float32), "b.c": np.zeros((0, 2), dtype=np.int64), "d": np.array(1.5), "e": np.ones(7, dtype=np.uint8)}

    def read(folder: Path) -> None:
        entries = read_header(folder / "x.safetensors")
        loaded = load_tensors(folder / "x.safetensors")
        assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {name: entry.shape for name, entry in entries.items()}

    return Target(files={"x.safetensors": tensor_bytes(arrays, metadata={"format": "pt"})}, read=read)


def _config() -> Target:
    def read(folder: Path) -> None:
        config = read_zrodlo_config(folder, n_inner="4x").body
        assert parameter_count(weight_shapes(config)) > 0 and arithmetic_config(config)

    newer = {**SMALL_LLAMA, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "dtype": "float32", "eos_token_id": [1, 2], "head_dim": 2}
    return Target(files={"config.json": json.dumps(newer).encode()}, read=read)


def _model(scratch: Path) -> Target:
    files = {"config.json": json.dumps(SMALL_GPT2).encode(), "model.safetensors": tensor_bytes(_arrays(SMALL_GPT2))}
    return Target(files=files, read=read_model_directory)


def _index() -> Target:
    arrays = _arrays(SMALL_LLAMA)
    names = sorted(arrays)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    index = {"metadata": {"total_size": 1}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    files = {file: tensor_bytes({name: arrays[name] for name in held}) for file, held in parts.items()}
    files |= {"config.json": json.dumps(SMALL_LLAMA).encode(), "model.safetensors.index.json": json.dumps(index).encode()}
    return Target(files=files, read=read_model_directory)


def _zrodlo_checkpoint() -> Target:
    arrays = _arrays(SMALL_GPT2)
    moments: dict[str, np.ndarray[Any, Any]] = {f"{key}/{name}": array for key in ("exp_avg", "exp_avg_sq") for name, array in arrays.items()}
    moments |= {f"step/{name}": np.array(2, dtype=np.float32) for name in arrays}
    state = {"schema": 1, "window": 4, "batch": 2, "micro_batch": 1, "seed": 3, "generator": "x", "precision": "fp32", "optimizer": {"lr": 0.1},
             "corpus_digest": "0", "tokenizer_sha256": None, "held_out": [], "losses": [1.5, 1.25]}
    files = {"config.json": json.dumps(SMALL_GPT2).encode(), "model.safetensors": tensor_bytes(arrays),
             "optimizer.safetensors": tensor_bytes(moments), "trainer.json": json.dumps(state).encode()}
    return Target(files=files, read=read_zrodlo_checkpoint, mutable=("optimizer.safetensors", "trainer.json"))


def _files_of(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _corpus(scratch: Path) -> Target:
    def mend(files: Files) -> Files:
        described = _object(files.get("corpus.json", b""))
        if described is None:
            return files
        held = files.get("tokens.bin", b"")
        described["tokens_sha256"] = hashlib.sha256(held).hexdigest()
        described["tokenizer_sha256"] = hashlib.sha256(files.get("tokenizer.json", b"")).hexdigest()
        described["tokens"] = len(held) // 4
        return {**files, "corpus.json": json.dumps(described).encode()}

    return Target(files=_files_of(make_corpus(scratch / "corpus")), read=open_zrodlo_corpus, mend=mend)


def _sources() -> Target:
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS[:3])

    def read(folder: Path) -> None:
        for document in read_sources([folder], "text"):
            assert document.text.encode() is not None

    return Target(files={"a.txt": TEXTS[4].encode(), "b.jsonl": lines}, read=read)


def _tokenizer(scratch: Path) -> Target:
    def read(folder: Path) -> None:
        tokenizer, _ = load_tokenizer(folder / "tokenizer.json")
        assert tokenizer is not None

    return Target(files={"tokenizer.json": make_tokenizer(scratch / "tokenizer.json").read_bytes()}, read=read)


def _shards(scratch: Path) -> Target:
    def mend(files: Files) -> Files:
        index = _object(files.get("shards_index.json", b""))
        entries = index.get("shards") if index is not None else None
        if not isinstance(entries, list) or not entries or not isinstance(entries[0], dict):
            return files
        data = files.get("val_000.bin", b"")
        entries[0] |= {"sha256": hashlib.sha256(data).hexdigest(), "tokens": len(data) // 2}
        return {**files, "shards_index.json": json.dumps(index).encode(), "val_000.bin.json": json.dumps(entries[0]).encode()}

    folder = make_shards(scratch / "shards", split="val", shards=1, documents=5, seed=4, scored=True)
    return Target(files=_files_of(folder), read=lambda place: open_corpus(place, "val", vocabulary=48), mend=mend)


def _manifest() -> Target:
    held = {"config.json": b"{}", "model.safetensors": b"x" * 64}

    def describe(files: Files) -> bytes:
        return json.dumps(manifest_body([FileEntry(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
                                         for name, data in files.items() if name != "manifest.json"])).encode()

    def mend(files: Files) -> Files:
        body = _object(files.get("manifest.json", b""))
        listed = body.get("files") if body is not None else None
        if body is None or not isinstance(listed, dict):
            return files
        try:
            entries = [FileEntry(path=path, bytes=item["bytes"], sha256=item["sha256"]) for path, item in listed.items()]
            return {**files, "manifest.json": json.dumps({**body, "digest": manifest_body(entries)["digest"]}).encode()}
        except (AssertionError, KeyError, TypeError, UnicodeEncodeError):
            return files

    return Target(files={**held, "manifest.json": describe(held)}, read=verify, mend=mend)


def _task() -> Target:
    task = make_task(Path("/shards/train"), Path("/shards/val"), model={"config": LLAMA})
    return Target(files={"task.json": json.dumps(task).encode()}, read=read_task)


def _state() -> Target:
    state = {"schema": 1, "task": "language_model", "step": 2, "cursor": 8, "losses": [1.5, 1.25], "validation_due": False, "ties": {"a": "b"},
             "scores": [{"step": 0, "value": 1.5, "families": {"en": 1.5}, "checkpoint_digest": "0" * 64}], "settings": {"window": 8}}
    return Target(files={"trainer.json": json.dumps(state).encode()}, read=read_state)


def _predictions(scratch: Path) -> Target:
    rows = [ScoredRow(id=f"val:{number}", family="en", tokens=number + 1, nll=1.5 * number) for number in range(4)]
    write_predictions(scratch / "predictions", "step", rows, split="val", step=1)

    def read(folder: Path) -> None:
        meta = complete_predictions(folder, "step", split="val", step=1)
        assert meta is None or meta["rows"] >= 0
        read_rows(folder / "step.jsonl")

    return Target(files=_files_of(scratch / "predictions"), read=read)


def _zxell_run() -> Target:
    args = {"preset": "tiny", "steps": 4, "batch": 2, "grad_accum": 1, "ctx": 8, "lr": 0.1, "min_lr_ratio": 0.1, "warmup": 1, "wd": 0.1, "clip": 1.0,
            "seed": 3, "log_every": 1}
    log = [{"step": 1, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "tok_per_s": 9.0, "elapsed_s": 1.0}, {"step": 2, "eval": "val", "all": 9.5}]
    files = {"config.json": json.dumps({"model": SMALL_ZXELL, "args": args, "train_shards": ["train_000.bin"]}).encode(),
             "log.jsonl": b"".join(json.dumps(line).encode() + b"\n" for line in log)}
    return Target(files=files, read=lambda folder: (read_run(folder), read_log(folder)))


def _zxell_pt(scratch: Path) -> Target:
    import torch

    model = parse_model(SMALL_ZXELL, where="config.json")
    tensors = {name: torch.full(shape, 0.25) for name, shape in shapes_of(model).items()}
    optimizer = OptimizerState(moments={key: dict(tensors) for key in ("exp_avg", "exp_avg_sq")}, step=2, lr=0.1, betas=(0.9, 0.95), eps=1e-8,
                               weight_decay=0.1)
    path = scratch / "last.pt"
    write_checkpoint_file(path, ZxellCheckpoint(model=model, tensors=tensors, step=2, args={"seed": 3}, optimizer=optimizer,
                                                generator=dict(np.random.default_rng(3).bit_generator.state)))
    return Target(files={"last.pt": path.read_bytes()}, read=lambda folder: read_checkpoint(folder / "last.pt"))


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
