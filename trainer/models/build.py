"""A model from its config, seeded; its weights out of and into safetensors, tied ones once.

`transformers` gives the arithmetic, and nothing else: no code from a model directory, no network, no pickle. Weights are
copied into tensors that this process allocated, because training on mapped memory would change alignment and with it bits.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from policies.errors import CheckpointDamaged
from trainer.files import read_json

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
BARE_PREFIXES = ("transformer.", "model.")
"""A bare GPT2Model or LlamaModel stores its names without the one of these that the whole model has."""


def build_model(config: dict[str, Any], *, seed: int) -> nn.Module:
    """A freshly initialised model in fp32. Sets the random streams of Python, NumPy and torch to `seed`: training goes on from there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    named = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "torch_dtype", "dtype")}
    described = AutoConfig.for_model(config["model_type"], **named)
    model = AutoModelForCausalLM.from_config(described, attn_implementation="sdpa", dtype=torch.float32)  # type: ignore[no-untyped-call]
    assert isinstance(model, nn.Module)
    stored = set(model.state_dict())
    trained = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert stored == trained, f"a buffer would be lost on resume: {sorted(stored ^ trained)}"
    return model


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, by its first name: what is trained, stored and resumed."""
    return dict(model.named_parameters())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Second names of shared tensors: `lm_head.weight` to `model.embed_tokens.weight`."""
    first = {id(weight): name for name, weight in model.named_parameters()}
    return {name: first[id(weight)] for name, weight in model.named_parameters(remove_duplicate=False) if first[id(weight)] != name}


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, as copies in memory. CheckpointDamaged names the file."""
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError, ValueError) as fault:
        raise CheckpointDamaged("a file of tensors can't be read", where=str(path), what=str(fault),
                                fix="resume from an older checkpoint: the trainer takes the newest one that verifies") from fault


def load_model_directory(model: nn.Module, folder: Path) -> None:
    """Fill a model from the weights of a model directory (one file or shards, whole or bare layout, any float type)."""
    index = folder / WEIGHTS_INDEX_NAME
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [WEIGHTS_NAME]
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        tensors.update(load_tensors(folder / name))
    fill_weights(model, _whole_names(model, tensors), where=str(folder / names[0]))


def fill_weights(model: nn.Module, tensors: dict[str, torch.Tensor], *, where: str) -> None:
    """Copy tensors into the parameters of those names: all of them, of the right shape, finite. CheckpointDamaged else."""
    weights, ties = trained_weights(model), tied_names(model)
    given = {name: tensor for name, tensor in tensors.items() if name not in ties}
    check_complete(given, {name: tuple(weight.shape) for name, weight in weights.items()}, where=where)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(given[name])


def check_complete(tensors: dict[str, torch.Tensor], shapes: dict[str, tuple[int, ...]], *, where: str) -> None:
    """CheckpointDamaged unless `tensors` are exactly those of `shapes`, floating and finite."""
    faults = [f"{name} is missing" for name in shapes if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in shapes]
    for name in shapes.keys() & tensors.keys():
        tensor = tensors[name]
        if tuple(tensor.shape) != shapes[name]:
            faults.append(f"{name} has shape {tuple(tensor.shape)}, not {shapes[name]}")
        elif not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            faults.append(f"{name} holds values that are no finite numbers")
    if faults:
        raise CheckpointDamaged("the weights do not fit the model", where=where, what="; ".join(sorted(faults)[:5]),
                                fix="name the model directory these weights belong to, or resume from an older checkpoint")


def _whole_names(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors under the names of the whole model; masks that old GPT-2 files carry are left out."""
    known = set(trained_weights(model)) | set(tied_names(model))
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    for prefix in BARE_PREFIXES:
        if not known & kept.keys() and any(prefix + name in known for name in kept):
            return {prefix + name: tensor for name, tensor in kept.items()}
    return kept
