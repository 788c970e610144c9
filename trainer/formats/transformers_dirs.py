"""A user's Transformers model directory, believed only once its files hold exactly what its config describes.

    config.json                                      GPT-2 or Llama, as transformers 4 or 5 wrote it
    model.safetensors                                all tensors; or, where there is none:
    model.safetensors.index.json + shards            weight_map: tensor to file
    names                                            of the whole model, or of the bare one (without `transformer.` or `model.`)

Headers only are read, so this takes milliseconds and no torch. Code and pickles that lie in the directory are never touched.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import CheckpointDamaged
from trainer.files import JsonFault, read_json
from trainer.formats.tensor_files import TensorEntry, check_floating, damaged, read_header
from trainer.models.families import read_config
from trainer.models.shapes import BODY_PREFIXES, HEAD_NAME, is_tied, parameter_count, weight_shapes

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
SHARDS_MAX = 10_000
FAULTS_SHOWN_MAX = 5
MASKS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Buffers that older files carry: constants of the architecture, no weights."""
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDirectory:
    """What a model directory holds. `files` are those with weights; `names` leads from a stored name to that of the whole model."""

    folder: Path
    config: dict[str, Any]
    files: tuple[str, ...]
    entries: dict[str, TensorEntry]
    names: dict[str, str]
    is_bare: bool
    parameters: int
    """Counted from the config, a tied head once; the files hold as many."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(sorted({self.entries[name].dtype for name in self.names}))

    def assumptions(self) -> tuple[str, ...]:
        """What the config leaves open, and what it was taken to mean."""
        taken, config = [], self.config
        if config["model_type"] == "gpt2":
            if config.get("n_inner") is None:
                taken.append(f"n_inner is not stated: {4 * config['n_embd']} (4 x n_embd), as the weights show")
        else:
            if config.get("head_dim") is None:
                taken.append(f"head_dim is not stated: {config['hidden_size'] // config['num_attention_heads']} (hidden_size / num_attention_heads)")
            if "rope_theta" not in config and "rope_theta" not in (config.get("rope_parameters") or {}):
                taken.append("rope_theta is not stated: 10000.0, the default of transformers")
            if "rms_norm_eps" not in config:
                taken.append("rms_norm_eps is not stated: 1e-06, the default of transformers")
            if "tie_word_embeddings" not in config:
                taken.append("tie_word_embeddings is not stated: false, the default of transformers")
        return tuple(taken)


def read_model_directory(folder: Path, *, config: dict[str, Any] | None = None) -> ModelDirectory:
    """The model in a directory. PlanInvalid for a config that can't be computed, CheckpointDamaged for files that do not fit it.

    `config` is its checked config with what a person chose, when it is not to be taken as it stands.
    """
    config = read_config(folder) if config is None else config
    files, entries = stored_tensors(folder)
    names, is_bare = whole_names(config, tuple(entries))
    where = folder / (WEIGHTS_NAME if files == (WEIGHTS_NAME,) else INDEX_NAME)
    _check_fit(where, config, entries, names)
    return ModelDirectory(folder=folder, config=config, files=files, entries=entries, names=names, is_bare=is_bare,
                          parameters=parameter_count(weight_shapes(config)))


def stored_tensors(folder: Path) -> tuple[tuple[str, ...], dict[str, TensorEntry]]:
    """The files of weights and every tensor in them. CheckpointDamaged for a missing shard, a tensor twice, an index that lies."""
    if os.path.lexists(folder / WEIGHTS_NAME):
        entries = read_header(folder / WEIGHTS_NAME)
        check_floating(folder / WEIGHTS_NAME, _without_masks(entries))
        return (WEIGHTS_NAME,), entries
    if not os.path.lexists(folder / INDEX_NAME):
        raise _no_weights(folder)
    promised = _weight_map(folder / INDEX_NAME)
    entries, files = {}, tuple(sorted(set(promised.values())))
    for file in files:
        if not os.path.lexists(folder / file):
            raise damaged(folder / file, f"the shard is missing; {INDEX_NAME} lists it")
        found = read_header(folder / file)
        check_floating(folder / file, _without_masks(found))
        for name in found:
            if promised.get(name) != file:
                told = f"puts it into {promised[name]}" if name in promised else "does not list it"
                raise damaged(folder / file, f"it holds tensor {name!r}, {INDEX_NAME} {told}")
        entries.update(found)
    absent = sorted(promised.keys() - entries.keys())
    if absent:
        raise damaged(folder / promised[absent[0]], f"tensor {absent[0]!r} is not in it, {INDEX_NAME} says so")
    return files, entries


def whole_names(config: dict[str, Any], stored: tuple[str, ...]) -> tuple[dict[str, str], bool]:
    """From each stored name to that of the whole model, buffers left out; and whether the layout is the bare one."""
    prefix = BODY_PREFIXES[config["model_type"]]
    kept = [name for name in stored if not name.endswith(MASKS)]
    is_bare = bool(kept) and not any(name.startswith(prefix) for name in kept)
    return {name: prefix + name if is_bare and name != HEAD_NAME else name for name in kept}, is_bare


def _weight_map(path: Path) -> dict[str, str]:
    try:
        body = read_json(path)
    except (OSError, JsonFault) as fault:
        raise damaged(path, str(fault)) from fault
    promised = body.get("weight_map") if isinstance(body, dict) else None
    if not isinstance(promised, dict) or not promised:
        raise damaged(path, "it has no weight_map of tensors and files")
    for name, file in promised.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\0" in file or file.startswith("."):
            raise damaged(path, f"it puts tensor {name[:80]!r} into {str(file)[:80]!r}, which is no name of a shard beside it")
    if len(set(promised.values())) > SHARDS_MAX:
        raise damaged(path, f"it lists over {SHARDS_MAX} shards")
    return promised


def _check_fit(where: Path, config: dict[str, Any], entries: dict[str, TensorEntry], names: dict[str, str]) -> None:
    shapes = dict(weight_shapes(config))
    if is_tied(config) and HEAD_NAME in names.values():
        shapes[HEAD_NAME] = next(iter(shapes.values()))  # stored although tied: allowed, compared when it is loaded
    held = {names[name]: entries[name].shape for name in names}
    faults = [f"{name} is missing" for name in shapes.keys() - held.keys()] + [f"{name} is unknown" for name in held.keys() - shapes.keys()]
    faults += [f"{name} has shape {list(held[name])}, the config says {list(shapes[name])}" for name in shapes.keys() & held.keys()
               if held[name] != shapes[name]]
    if faults:
        more = f"; and {len(faults) - FAULTS_SHOWN_MAX} more" if len(faults) > FAULTS_SHOWN_MAX else ""
        raise CheckpointDamaged("the weights do not fit the model", where=str(where), what="; ".join(sorted(faults)[:FAULTS_SHOWN_MAX]) + more,
                                fix="name the model directory these weights belong to: config.json and weights come from one place")


def _without_masks(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in entries.items() if not name.endswith(MASKS)}


def _no_weights(folder: Path) -> CheckpointDamaged:
    pickles = [name for name in PICKLES if os.path.lexists(folder / name)]
    if pickles:
        return CheckpointDamaged("the model has no safetensors", where=str(folder / pickles[0]),
                                 what="it is a pickle, which can run code, and is never opened",
                                 fix="save it once with transformers as safetensors: model.save_pretrained(DIRECTORY)")
    return CheckpointDamaged("the model has no weights", where=str(folder / WEIGHTS_NAME), what=f"neither it nor {INDEX_NAME} is there",
                             fix="copy the whole model directory")
