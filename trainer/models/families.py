"""What a Transformers config.json has to say to be trainable here, as data. No torch: refusals must be quick.

Two families only, so that "the same function" can be promised: every key that would change the arithmetic in a way that the
family's published code does not have is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import DataDamaged, PlanInvalid
from policies.manifest import directory_digest
from trainer.config import ModelSettings
from trainer.files import JsonFault, folder_entries, read_json

CONFIG_NAME = "config.json"
TOKENIZER_NAMES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`needed` are widths and counts (integers above 0); `refused` maps a key to the only values that are taken."""

    window_key: str
    needed: tuple[str, ...]
    refused: dict[str, tuple[Any, ...]]


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        window_key="n_positions",
        needed=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
        refused={
            "activation_function": ("gelu_new",), "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        },
    ),
    "llama": Family(
        window_key="max_position_embeddings",
        needed=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        refused={
            "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "attention_dropout": (0, 0.0), "rope_scaling": (None,),
        },
    ),
}


def model_config(settings: ModelSettings, *, window: int, where: str) -> dict[str, Any]:
    """The checked config of a model that is given as keys or as a directory. No weights are read."""
    config = read_config(Path(settings.path)) if settings.path is not None else check_config(settings.config, where=f"{where}: model.config")
    check_window(config, window, where=where)
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model directory, checked. PlanInvalid names the file and every key that can't be."""
    path = folder / CONFIG_NAME
    try:
        config = read_json(path)
    except FileNotFoundError as fault:
        raise _refused(str(path), "the file is missing, so this is no model directory") from fault
    except (OSError, JsonFault) as fault:
        raise _refused(str(path), str(fault)) from fault
    return check_config(config, where=str(path))


def check_config(config: Any, *, where: str) -> dict[str, Any]:
    """`config` itself when it can be trained here. PlanInvalid tells every key that can't be, and what would be accepted."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in FAMILIES:
        raise _refused(where, f"model_type is {kind!r}, only {' and '.join(FAMILIES)} can be trained")
    family = FAMILIES[kind]
    wrong = [key for key in family.needed if type(config.get(key)) is not int or config[key] < 1]
    faults = [f"{key} is {config.get(key)!r}, a count above 0 is needed" for key in wrong]
    for key, taken in family.refused.items():
        if key in config and config[key] not in taken:
            faults.append(f"{key} is {config[key]!r}, only {' or '.join(repr(value) for value in taken[:1])} is taken")
    if not faults:
        faults = _gpt2_faults(config) if kind == "gpt2" else _llama_faults(config)
    if faults:
        raise _refused(where, "; ".join(faults))
    assert isinstance(config, dict)
    return config


def check_window(config: dict[str, Any], window: int, *, where: str) -> None:
    key = FAMILIES[config["model_type"]].window_key
    if window > config[key]:
        raise _refused(where, f"window {window} is longer than the model's {key} {config[key]}")


def model_digest(folder: Path, expected: str | None) -> str:
    """The digest of a model directory or checkpoint. DataDamaged when it is not the expected one."""
    try:
        digest = directory_digest(folder_entries(folder))
    except OSError as fault:
        raise _not_staged(folder, str(fault)) from fault
    if expected is not None and digest != expected:
        raise _not_staged(folder, f"its digest is {digest}, the task says {expected}")
    return digest


def _not_staged(folder: Path, what: str) -> DataDamaged:
    return DataDamaged("the model can't be used", where=str(folder), what=what, fix="stage the model again: delete this copy and launch")


def _gpt2_faults(config: dict[str, Any]) -> list[str]:
    faults = []
    if config["n_embd"] % config["n_head"]:
        faults.append(f"n_embd {config['n_embd']} is no multiple of n_head {config['n_head']}")
    if "n_inner" in config and config["n_inner"] is not None and (type(config["n_inner"]) is not int or config["n_inner"] < 1):
        faults.append(f"n_inner is {config['n_inner']!r}, a width or null (4 x n_embd) is needed")
    return faults


def _llama_faults(config: dict[str, Any]) -> list[str]:
    faults = []
    heads, pairs = config["num_attention_heads"], config.get("num_key_value_heads", config["num_attention_heads"])
    if type(pairs) is not int or pairs < 1 or heads % pairs:
        faults.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {pairs!r}")
    width = config.get("head_dim") or config["hidden_size"] // heads
    if width % 2 or ("head_dim" not in config and config["hidden_size"] % heads):
        faults.append(f"hidden_size {config['hidden_size']} over {heads} heads gives no even head width")
    rope = config.get("rope_parameters")
    if rope is not None and (not isinstance(rope, dict) or rope.get("rope_type", "default") != "default"):
        faults.append(f"rope_parameters is {rope!r}, only rope_type 'default' is taken")
    return faults


def _refused(where: str, what: str) -> PlanInvalid:
    return PlanInvalid("the model can't be trained", where=where, what=what, fix="correct these keys of the model's config and launch again")
