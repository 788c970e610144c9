"""Every tensor of a GPT-2 or Llama model by name and shape, from its config alone: what a file of weights has to hold.

    gpt2    transformer.wte, .wpe, .h.i.{ln_1, attn.c_attn (fused q k v), attn.c_proj, ln_2, mlp.c_fc, mlp.c_proj}, .ln_f
    llama   model.embed_tokens, .layers.i.{self_attn.{q,k,v,o}_proj, mlp.{gate,up,down}_proj, two norms}, .norm, lm_head when untied

No torch: a config that claims a thousand billion weights is found out before anything is allocated for it.
"""

from __future__ import annotations

import math
from typing import Any

from trainer.models.families import FAMILIES

Shapes = dict[str, tuple[int, ...]]
HEAD_NAME = "lm_head.weight"
EMBEDDING_NAMES = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
BODY_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
"""What the names of the whole model begin with, and those of the bare one do not."""


def is_tied(config: dict[str, Any]) -> bool:
    """Whether the head is the embedding. A checked config."""
    return bool(config.get("tie_word_embeddings", FAMILIES[config["model_type"]].tied_by_default))


def weight_shapes(config: dict[str, Any]) -> Shapes:
    """Each tensor once, a tied head under the name of the embedding only. `config` has passed `check_config`."""
    return _gpt2_shapes(config) if config["model_type"] == "gpt2" else _llama_shapes(config)


def parameter_count(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _gpt2_shapes(config: dict[str, Any]) -> Shapes:
    width = config["n_embd"]
    inner = config.get("n_inner") or 4 * width
    shapes: Shapes = {EMBEDDING_NAMES["gpt2"]: (config["vocab_size"], width), "transformer.wpe.weight": (config["n_positions"], width)}
    # GPT-2 stores its matrices as (in, out).
    layer: Shapes = {
        "ln_1.weight": (width,), "ln_1.bias": (width,), "attn.c_attn.weight": (width, 3 * width), "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width), "attn.c_proj.bias": (width,), "ln_2.weight": (width,), "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, inner), "mlp.c_fc.bias": (inner,), "mlp.c_proj.weight": (inner, width), "mlp.c_proj.bias": (width,),
    }
    for number in range(config["n_layer"]):
        shapes.update({f"transformer.h.{number}.{name}": shape for name, shape in layer.items()})
    return {**shapes, "transformer.ln_f.weight": (width,), "transformer.ln_f.bias": (width,)}


def _llama_shapes(config: dict[str, Any]) -> Shapes:
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    pairs = config.get("num_key_value_heads") or heads
    embedding = (config["vocab_size"], width)
    shapes: Shapes = {EMBEDDING_NAMES["llama"]: embedding}
    layer: Shapes = {
        "self_attn.q_proj.weight": (heads * head, width), "self_attn.k_proj.weight": (pairs * head, width),
        "self_attn.v_proj.weight": (pairs * head, width), "self_attn.o_proj.weight": (width, heads * head),
        "mlp.gate_proj.weight": (inner, width), "mlp.up_proj.weight": (inner, width), "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
    }
    for number in range(config["num_hidden_layers"]):
        shapes.update({f"model.layers.{number}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (width,)
    return shapes if is_tied(config) else {**shapes, HEAD_NAME: embedding}
