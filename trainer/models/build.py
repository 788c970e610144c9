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
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from policies.errors import CheckpointDamaged, PlanInvalid
from trainer.formats.tensor_files import damaged, read_header
from trainer.formats.transformers_dirs import ModelDirectory, read_model_directory
from trainer.models.families import arithmetic_config

WEIGHTS_NAME = "model.safetensors"


def build_model(config: dict[str, Any], *, seed: int) -> nn.Module:
    """A freshly initialised model in fp32. Sets the random streams of Python, NumPy and torch to `seed`: training goes on from there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig, AutoModelForCausalLM

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        described = AutoConfig.for_model(config["model_type"], **arithmetic_config(config))
    except Exception as fault:  # its own checks raise its own errors, which differ between versions
        raise PlanInvalid("the model can't be built", where=f"model_type {config['model_type']}",
                          what=f"transformers refuses its config: {' '.join(str(fault).split())}",
                          fix="correct these keys of the model's config and launch again") from fault
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
    """The tensors of a safetensors file, as copies in memory. CheckpointDamaged names the file, and tensor or offset."""
    read_header(path)
    try:
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as fault:
        raise damaged(path, str(fault)) from fault


def load_model_directory(model: nn.Module, folder: Path) -> None:
    """Fill a model from the weights of a model directory (one file or shards, whole or bare layout, any float type).

    One tensor at a time: beside the model there is never more than one copy. CheckpointDamaged leaves the model half filled.
    """
    found, weights, ties = read_model_directory(folder), trained_weights(model), tied_names(model)
    for file in found.files:
        try:
            with safe_open(folder / file, framework="pt") as opened, torch.no_grad():
                for stored in sorted(found.names.keys() & set(opened.keys())):
                    name, tensor = found.names[stored], opened.get_tensor(stored)
                    if not bool(torch.isfinite(tensor).all()):
                        raise damaged(folder / file, f"tensor {stored!r} at offset {found.entries[stored].begin} holds nan or inf")
                    if name not in ties:
                        weights[name].copy_(tensor)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as fault:
            raise damaged(folder / file, str(fault)) from fault
    _check_stored_ties(found, weights, ties)


def _check_stored_ties(found: ModelDirectory, weights: dict[str, nn.Parameter], ties: dict[str, str]) -> None:
    """A head that is stored although it is tied has to be the embedding, or the file and its config mean two different models."""
    for stored in (stored for stored, name in found.names.items() if name in ties):
        for file in found.files:
            with safe_open(found.folder / file, framework="pt") as opened:
                name = found.names[stored]
                if stored in opened.keys() and not torch.equal(opened.get_tensor(stored).to(weights[ties[name]]), weights[ties[name]]):  # noqa: SIM118
                    raise damaged(found.folder / file, f"tensor {stored!r} differs from {ties[name]}, and the config says that they are tied")


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
