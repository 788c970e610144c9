"""Zrodlo model directories and checkpoints: read with every promise checked, written as new directories.

    config.json  tokenizer.json  model.safetensors          a model; whole names, or the bare ones of GPT2Model and LlamaModel
    + optimizer.safetensors                                 exp_avg/NAME, exp_avg_sq/NAME, step/NAME for every weight, F32
    + trainer.json                                          window, batch, micro_batch, seed, generator, precision, optimizer,
                                                            corpus_digest, tokenizer_sha256, held_out, losses

The names in the last two are our reading (docs/formats.md): Zrodlo publishes what they hold, not what it is called there. Keys
that we do not know are kept. Steps done is the number of losses.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from policies.errors import CheckpointDamaged, RequestRefused
from trainer.files import JsonFault, dumps, read_json
from trainer.formats.new_directory import new_directory
from trainer.formats.tensor_copy import StoredTensor, copy_tensors
from trainer.formats.tensor_files import TensorEntry, damaged, read_header
from trainer.formats.transformers_dirs import WEIGHTS_NAME, ModelDirectory, read_model_directory
from trainer.formats.zrodlo_config import read_zrodlo_config
from trainer.models.families import CONFIG_NAME, TOKENIZER_NAMES
from trainer.models.shapes import BODY_PREFIXES, HEAD_NAME, is_tied, weight_shapes

OPTIMIZER_NAME, STATE_NAME = "optimizer.safetensors", "trainer.json"
MOMENTS = ("exp_avg", "exp_avg_sq")
LAYOUT_WHOLE, LAYOUT_BARE = "whole", "bare"
COUNTS = ("window", "batch", "micro_batch")
CHUNK_BYTES = 16 * 1024 * 1024
STEPS_MAX = 2**24
"""Steps are counted in F32 tensors, which hold whole numbers up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZrodloCheckpoint:
    """A checkpoint whose parts agree. `described` is trainer.json with every key it has."""

    model: ModelDirectory
    described: dict[str, Any]
    moments: dict[str, TensorEntry]

    @property
    def steps(self) -> int:
        return len(self.described["losses"])


def export_model(source: Path, out: Path, *, layout: str = LAYOUT_WHOLE, n_inner: str | None = None) -> tuple[str, ...]:
    """A model directory as Zrodlo states it, from any that we read. Returns what was chosen or assumed on the way."""
    chosen = read_zrodlo_config(source, n_inner=n_inner)
    model = read_model_directory(source, config=chosen.body)
    with new_directory(out) as folder:
        _write_model(folder, model, layout)
    return tuple(line for line in (chosen.chosen, *model.assumptions()) if line)


def export_checkpoint(source: Path, out: Path) -> ZrodloCheckpoint:
    """One of our checkpoints as a Zrodlo checkpoint; our own trainer.json goes along whole, under the key `fleetd`."""
    model = read_model_directory(source)
    read_zrodlo_config(source)
    described = plain_state(read_state(source / STATE_NAME))
    with new_directory(out) as folder:
        _write_model(folder, model, LAYOUT_WHOLE)
        moments = read_header(source / OPTIMIZER_NAME)
        copy_tensors(folder / OPTIMIZER_NAME, {name: StoredTensor(file=source / OPTIMIZER_NAME, entry=entry) for name, entry in moments.items()})
        (folder / STATE_NAME).write_bytes(dumps(described))
        read_zrodlo_checkpoint(folder)
    return read_zrodlo_checkpoint(out)


def copy_checkpoint(checkpoint: ZrodloCheckpoint, out: Path, described: dict[str, Any]) -> None:
    """The checkpoint once more, with what `described` says in its trainer.json: unknown keys are whatever the caller kept."""
    check_state(described, str(out / STATE_NAME))
    source = checkpoint.model.folder / OPTIMIZER_NAME
    with new_directory(out) as folder:
        _write_model(folder, checkpoint.model, LAYOUT_WHOLE)
        copy_tensors(folder / OPTIMIZER_NAME, {name: StoredTensor(file=source, entry=entry) for name, entry in checkpoint.moments.items()})
        (folder / STATE_NAME).write_bytes(dumps(described))


def read_zrodlo_checkpoint(folder: Path) -> ZrodloCheckpoint:
    """A checkpoint with moments for every weight and as many steps as losses. CheckpointDamaged names file and tensor or key."""
    model = read_model_directory(folder, config=read_zrodlo_config(folder).body)
    described = read_state(folder / STATE_NAME)
    check_state(described, str(folder / STATE_NAME))
    path = folder / OPTIMIZER_NAME
    moments, shapes = read_header(path), weight_shapes(model.config)
    expected = {f"{moment}/{name}": shape for moment in MOMENTS for name, shape in shapes.items()} | {f"step/{name}": () for name in shapes}
    for name in sorted(expected.keys() ^ moments.keys()):
        raise damaged(path, f"tensor {name!r} is {'missing' if name in expected else 'of no weight'}")
    for name, entry in moments.items():
        if entry.shape != expected[name] or entry.dtype != "F32":
            raise damaged(path, f"tensor {name!r} at offset {entry.begin} is {entry.dtype} {list(entry.shape)}, not F32 {list(expected[name])}")
    _check_values(path, moments, len(described["losses"]))
    return ZrodloCheckpoint(model=model, described=described, moments=moments)


def read_state(path: Path) -> dict[str, Any]:
    try:
        described = read_json(path)
    except (OSError, JsonFault) as fault:
        raise _malformed(str(path), str(fault)) from fault
    if not isinstance(described, dict):
        raise _malformed(str(path), f"an object is needed, not {type(described).__name__}")
    return described


def check_state(described: dict[str, Any], where: str) -> None:
    """CheckpointDamaged unless a trainer.json says what a Zrodlo checkpoint has to, all faults at once."""
    faults = []
    if described.get("schema") != 1 or type(described["schema"]) is not int:
        faults.append(f"schema is {str(described.get('schema'))[:40]!r}, this version reads 1")
    faults += [f"{key} is {str(described.get(key))[:40]!r}, a count above 0 is needed" for key in COUNTS
               if type(described.get(key)) is not int or described[key] < 1]
    if type(described.get("seed")) is not int:
        faults.append("seed is no whole number")
    for key, kind, word in (("generator", str, "text"), ("precision", str, "text"), ("optimizer", dict, "an object"),
                            ("corpus_digest", str, "text"), ("held_out", list, "a list"), ("losses", list, "a list")):
        if not isinstance(described.get(key), kind):
            faults.append(f"{key} is {str(described.get(key))[:40]!r}, {word} is needed")
    losses = described.get("losses")
    if isinstance(losses, list) and len(losses) > STEPS_MAX:
        faults.append(f"{len(losses)} losses are over the limit of {STEPS_MAX}")
    if isinstance(losses, list):
        wrong = next((place for place, loss in enumerate(losses) if type(loss) not in (int, float) or not math.isfinite(loss)), None)
        if wrong is not None:
            faults.append(f"the loss of step {wrong + 1} is {str(losses[wrong])[:40]!r}, a number is needed")
    if faults:
        raise _malformed(where, "; ".join(faults))


def plain_state(ours: dict[str, Any]) -> dict[str, Any]:
    """Our trainer.json in the plain names."""
    settings, data = ours.get("settings") or {}, ours.get("data") or {}
    return {
        "schema": 1, **{key: settings.get(key) for key in (*COUNTS, "seed", "precision", "optimizer")}, "generator": ours.get("order"),
        "corpus_digest": (data.get("train") or {}).get("digest"), "tokenizer_sha256": data.get("tokenizer_sha256"),
        "held_out": [{"step": score["step"], "value": score["value"]} for score in ours.get("scores", [])],
        "losses": ours.get("losses"), "fleetd": ours,
    }


def _write_model(folder: Path, model: ModelDirectory, layout: str) -> None:
    """config.json with every field, the tokenizer, and one file of weights in the asked layout; a tied head is not written."""
    (folder / CONFIG_NAME).write_bytes(_config_bytes(model))
    for name in TOKENIZER_NAMES:
        if (model.folder / name).is_file():
            (folder / name).write_bytes((model.folder / name).read_bytes())
    files = _files_of(model)
    prefix = BODY_PREFIXES[model.config["model_type"]] if layout == LAYOUT_BARE else ""
    if prefix and not is_tied(model.config):
        raise RequestRefused("the bare layout can't hold this model", where=str(model.folder), what=f"its {HEAD_NAME} is not tied to the embedding",
                             fix=f"write it with --layout {LAYOUT_WHOLE}")
    kept = {name: stored for stored, name in model.names.items() if not (name == HEAD_NAME and is_tied(model.config))}
    copy_tensors(folder / WEIGHTS_NAME, {
        name.removeprefix(prefix): StoredTensor(file=model.folder / files[stored], entry=model.entries[stored]) for name, stored in kept.items()})


def _config_bytes(model: ModelDirectory) -> bytes:
    """The file as it was read, byte for byte, unless a width was chosen."""
    data = (model.folder / CONFIG_NAME).read_bytes()
    return data if read_json(model.folder / CONFIG_NAME) == model.config else dumps_in_order(model.config)


def dumps_in_order(config: dict[str, Any]) -> bytes:
    return (json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _files_of(model: ModelDirectory) -> dict[str, str]:
    if len(model.files) == 1:
        return dict.fromkeys(model.entries, model.files[0])
    return {name: file for file in model.files for name in read_header(model.folder / file)}


def _check_values(path: Path, moments: dict[str, TensorEntry], steps: int) -> None:
    """Each weight's count of steps is the number of losses, and every moment is a finite number."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for name, entry in moments.items():
        for begin in range(entry.begin, entry.end, CHUNK_BYTES):
            values = data[begin:min(begin + CHUNK_BYTES, entry.end)].view(np.ndarray).tobytes()
            held = np.frombuffer(values, dtype="<f4")
            if not np.isfinite(held).all():
                raise damaged(path, f"tensor {name!r} at offset {begin + 4 * int(np.argmin(np.isfinite(held)))} holds nan or inf")
            if name.startswith("step/") and float(held[0]) != steps:
                raise damaged(path, f"tensor {name!r} at offset {entry.begin} counts {float(held[0])} steps, {STATE_NAME} has {steps} losses")


def _malformed(where: str, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("the checkpoint can't be read", where=where, what=what, fix="take an older checkpoint, or correct these keys")
