"""Single models between zxell and Transformers: a `.pt` as a model directory, a model directory as a weights-only `.pt`."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import nn

from policies.errors import PlanInvalid
from trainer.files import read_json
from trainer.formats.new_directory import new_directory
from trainer.formats.zxell_checkpoint import ZxellCheckpoint, read_checkpoint, write_weights
from trainer.formats.zxell_weights import Tensors, ZxellModel, fresh_tensors, from_llama, llama_config, model_of_llama, to_llama
from trainer.models.build import WEIGHTS_NAME, build_model, fill_weights, load_model_directory, trained_weights
from trainer.models.families import CONFIG_NAME, FAMILIES, read_config
from trainer.state import STATE_NAME


def write_model_directory(source: Path, target: Path) -> None:
    """`target` (new): config.json and model.safetensors of the model in a `.pt`, whole or not at all."""
    checkpoint = read_checkpoint(source)
    _write_directory(target, checkpoint.model, checkpoint.tensors)


def write_fresh_model(target: Path, model: ZxellModel, *, seed: int) -> None:
    """`target` (new): a model directory as a zxell training begins, drawn from `seed`."""
    _write_directory(target, model, fresh_tensors(model, seed=seed))


def write_weights_of(source: Path, target: Path, *, half: bool) -> None:
    """A weights-only `.pt` (new) of a Llama model directory or checkpoint that zxell has words for."""
    if target.exists():
        raise PlanInvalid("the output exists already", where=str(target), what="nothing is overwritten", fix="name a file that does not exist")
    config = read_config(source)
    model = model_of_llama(config, where=str(source / CONFIG_NAME))
    filled = build_model(config, seed=0)
    load_model_directory(filled, source)
    tensors = from_llama(model, {name: weight.detach() for name, weight in trained_weights(filled).items()}, where=str(source / WEIGHTS_NAME))
    write_weights(target, ZxellCheckpoint(model=model, tensors=tensors, step=steps_done(source), args={}), half=half)


def load_any(source: Path) -> tuple[nn.Module, int, int]:
    """A model, its window and its steps from a `.pt`, a model directory or a checkpoint."""
    if source.is_dir():
        config = read_config(source)
        model = build_model(config, seed=0)
        load_model_directory(model, source)
        return model.eval(), int(config[FAMILIES[config["model_type"]].window_key]), steps_done(source)
    checkpoint = read_checkpoint(source)
    model = build_model(llama_config(checkpoint.model), seed=0)
    fill_weights(model, to_llama(checkpoint.model, checkpoint.tensors), where=str(source))
    return model.eval(), checkpoint.model.ctx, checkpoint.step


def _write_directory(target: Path, model: ZxellModel, tensors: Tensors) -> None:
    with new_directory(target) as folder:
        config = {"architectures": ["LlamaForCausalLM"], **llama_config(model)}
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
        save_file(to_llama(model, tensors), folder / WEIGHTS_NAME, metadata={"format": "pt"})


def steps_done(folder: Path) -> int:
    """The step of a checkpoint, 0 for a plain model directory."""
    path = folder / STATE_NAME
    return int(read_json(path).get("step", 0)) if path.is_file() else 0
