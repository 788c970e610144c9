"""Zrodlo configurations: a Transformers config.json that states everything that is computed, every field kept as it was read.

On top of what can be computed at all (trainer.models.families) Zrodlo leaves nothing to a default: what a family needs has to
stand in the file. `n_inner: null` is refused with a request for the width; a person may choose it, and hears what was chosen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import PlanInvalid
from trainer.models.families import CONFIG_NAME, read_config

STATED = {
    "gpt2": ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "n_inner", "layer_norm_epsilon", "initializer_range",
             "embd_pdrop", "attn_pdrop", "resid_pdrop"),
    "llama": ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
              "max_position_embeddings", "rms_norm_eps", "rope_theta", "initializer_range", "hidden_act", "tie_word_embeddings"),
}
CHOICE = re.compile(r"([1-9][0-9]{0,2})x|([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZrodloConfig:
    """`body` is what was read, each field in its place, with the chosen width where the file left it open; `chosen` says so in words."""

    body: dict[str, Any]
    chosen: str | None = None


def read_zrodlo_config(folder: Path, *, n_inner: str | None = None) -> ZrodloConfig:
    """The configuration of a model directory. PlanInvalid names every key that is missing or can't be, and what would be accepted."""
    config, where = read_config(folder), str(folder / CONFIG_NAME)
    width = config.get("n_inner")
    chosen = None
    if config["model_type"] == "gpt2" and width is None and n_inner is not None:
        width = chosen_width(n_inner, config["n_embd"])
        chosen = f"n_inner is {width}, chosen as {n_inner}: the file leaves it open"
    if config["model_type"] == "gpt2" and width is None:
        raise refused(where, "n_inner is null or missing, the width of the feed-forward layer is needed",
                      f"state it, or choose it: --n-inner 4x means {4 * config['n_embd']}")
    missing = [key for key in STATED[config["model_type"]] if key != "n_inner" and _stated(config, key) is None]
    if missing:
        raise refused(where, "; ".join(f"{key} is not stated" for key in missing), "state these keys: nothing is left to a default here")
    return ZrodloConfig(body={**config, "n_inner": width} if chosen else config, chosen=chosen)


def chosen_width(choice: str, width: int) -> int:
    """`4x` as four times the model's width, or a number as it stands."""
    match = CHOICE.fullmatch(choice)
    if match is None:
        raise refused("--n-inner", f"{choice!r} is no width", "say 4x (times n_embd), or a number such as 3072")
    return int(match[1]) * width if match[1] else int(match[2])


def refused(where: str, what: str, fix: str) -> PlanInvalid:
    return PlanInvalid("the configuration is not complete", where=where, what=what, fix=fix)


def _stated(config: dict[str, Any], key: str) -> Any:
    """The value of a key; the base of the rotary embedding may stand in `rope_parameters`, where newer files have it."""
    value = config.get(key)
    return (config.get("rope_parameters") or {}).get(key) if value is None and key == "rope_theta" else value
