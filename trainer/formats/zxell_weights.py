"""A zxell model and a Llama are one function under two sets of names: the table between them, both ways without loss.

    zxell                              Llama (Transformers)
    tok_emb.weight (V,d)               model.embed_tokens.weight        lm_head tied to it on both sides
    blocks.i.norm1 / norm2             model.layers.i.input_layernorm / post_attention_layernorm
    blocks.i.attn.qkv.weight (3d,d)    self_attn.q_proj, k_proj, v_proj  stacked in this order
    blocks.i.attn.proj.weight          self_attn.o_proj
    blocks.i.ffn.w_gate, w_up, w_down  mlp.gate_proj, up_proj, down_proj
    norm_f.weight                      model.norm.weight

Both rotate the two halves of a head against each other, so no row has to move. Cutting and stacking copy bits; AdamW works on
each number by itself, so its moments travel the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from policies.errors import CheckpointDamaged, PlanInvalid

Tensors = dict[str, torch.Tensor]

HEAD, EMBEDDING = "lm_head.weight", "tok_emb.weight"
NORM_EPSILON, INITIAL_DEVIATION, WIDTH_MULTIPLE = 1e-5, 0.02, 64
LAYERS_MAX, WIDTH_MAX, VOCABULARY_MAX, CONTEXT_MAX = 1024, 2**16, 2**16, 2**20
PARTS = (
    ("norm1.weight", ("input_layernorm.weight",)), ("attn.qkv.weight", tuple(f"self_attn.{letter}_proj.weight" for letter in "qkv")),
    ("attn.proj.weight", ("self_attn.o_proj.weight",)), ("norm2.weight", ("post_attention_layernorm.weight",)),
    ("ffn.w_gate.weight", ("mlp.gate_proj.weight",)), ("ffn.w_up.weight", ("mlp.up_proj.weight",)), ("ffn.w_down.weight", ("mlp.down_proj.weight",)),
)
"""The tensors of one block in the order in which zxell names them, each with what it is cut into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZxellModel:
    """The `model` object of a zxell config.json."""

    n_layer: int
    d_model: int
    n_head: int
    ctx: int
    vocab_size: int
    rope_theta: float = 10000.0
    tie_embeddings: bool = True

    @property
    def hidden(self) -> int:
        """8/3 of the width, rounded up to a multiple of 64."""
        return math.ceil(8 * self.d_model / (3 * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PRESETS = {
    "tiny": {"n_layer": 2, "d_model": 64, "n_head": 2, "ctx": 128}, "S": {"n_layer": 6, "d_model": 384, "n_head": 6, "ctx": 1024},
    "M": {"n_layer": 12, "d_model": 768, "n_head": 12, "ctx": 1024}, "L": {"n_layer": 24, "d_model": 1280, "n_head": 20, "ctx": 2048},
}


def parse_model(body: Any, *, where: str) -> ZxellModel:
    """The model that a JSON object describes. PlanInvalid names every key that can't be, a key of a later version among them."""
    if not isinstance(body, dict):
        raise _refused(where, f"model: an object is needed, not {body!r:.100}")
    known = tuple(ZxellModel.__dataclass_fields__)
    faults = [f"model.{key}: unknown, perhaps of a later version; known are {', '.join(known)}" for key in body if key not in known]
    limits = {"n_layer": LAYERS_MAX, "d_model": WIDTH_MAX, "n_head": WIDTH_MAX, "ctx": CONTEXT_MAX, "vocab_size": VOCABULARY_MAX}
    for key, most in limits.items():
        if type(body.get(key)) is not int or not 1 <= body[key] <= most:
            faults.append(f"model.{key}: a count from 1 to {most} is needed, not {body.get(key)!r:.100}")
    theta = body.get("rope_theta", 10000.0)
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        faults.append(f"model.rope_theta: a number above 0 is needed, not {theta!r:.100}")
    if body.get("tie_embeddings", True) is not True:
        faults.append("model.tie_embeddings: only true is taken, the head is the embedding")
    if not faults and (body["d_model"] % body["n_head"] or body["d_model"] // body["n_head"] % 2):
        faults.append(f"model.d_model: {body['d_model']} over {body['n_head']} heads gives no even head width")
    if faults:
        raise _refused(where, "; ".join(faults))
    return ZxellModel(**body)


def shapes_of(model: ZxellModel) -> dict[str, tuple[int, ...]]:
    """Name and shape of each trained tensor, in zxell's order. The tied head is not one of its own."""
    width, hidden = model.d_model, model.hidden
    by_part: dict[str, tuple[int, ...]] = {
        "norm1.weight": (width,), "attn.qkv.weight": (3 * width, width), "attn.proj.weight": (width, width), "norm2.weight": (width,),
        "ffn.w_gate.weight": (hidden, width), "ffn.w_up.weight": (hidden, width), "ffn.w_down.weight": (width, hidden),
    }
    blocks = {f"blocks.{layer}.{part}": by_part[part] for layer in range(model.n_layer) for part, _ in PARTS}
    return {EMBEDDING: (model.vocab_size, width), **blocks, "norm_f.weight": (width,)}


def parameter_count(model: ZxellModel) -> int:
    return sum(math.prod(shape) for shape in shapes_of(model).values())


def check_tensors(model: ZxellModel, tensors: Mapping[str, Any], *, where: str, what: str = "") -> Tensors:
    """The trained tensors in zxell's order, in fp32. CheckpointDamaged names each that is missing, unknown, misshapen or not finite.

    `lm_head.weight` may be there; it has to be the embedding then, bit for bit.
    """
    shapes, faults = shapes_of(model), []
    for name in tensors.keys() - shapes.keys() - {HEAD}:
        faults.append(f"{what}{name} is unknown")
    for name, shape in {**shapes, HEAD: shapes[EMBEDDING]}.items():
        tensor = tensors.get(name)
        if tensor is None:
            faults += [f"{what}{name} is missing"] if name != HEAD else []
        elif not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or not tensor.is_floating_point():
            faults.append(f"{what}{name} is no tensor of floating numbers")
        elif tuple(tensor.shape) != shape:
            faults.append(f"{what}{name} has shape {tuple(tensor.shape)}, not {shape}")
        elif not bool(torch.isfinite(tensor).all()):
            faults.append(f"{what}{name} holds numbers that are nan or inf")
    if not faults and HEAD in tensors and not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
        faults.append(f"{what}{HEAD} differs from {EMBEDDING}, which it is tied to")
    if faults:
        raise CheckpointDamaged("the zxell tensors do not fit the model", where=where, what="; ".join(sorted(faults)[:5]),
                                fix="use an older ckpt_*.pt, or the config.json that belongs to this one")
    return {name: tensors[name].detach().to(torch.float32, copy=True).contiguous() for name in shapes}


def to_llama(model: ZxellModel, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """zxell tensors (or moments) under the names of a Llama, fused ones cut."""
    named = {"model.embed_tokens.weight": tensors[EMBEDDING], "model.norm.weight": tensors["norm_f.weight"]}
    for layer in range(model.n_layer):
        for part, names in PARTS:
            cut = torch.chunk(tensors[f"blocks.{layer}.{part}"], len(names), dim=0)
            named.update({f"model.layers.{layer}.{name}": piece.clone() for name, piece in zip(names, cut, strict=True)})
    return named


def from_llama(model: ZxellModel, tensors: Mapping[str, torch.Tensor], *, where: str) -> Tensors:
    """The other way. CheckpointDamaged when a tensor is missing or does not fit."""
    sources = {EMBEDDING: ["model.embed_tokens.weight"], "norm_f.weight": ["model.norm.weight"]}
    for layer in range(model.n_layer):
        sources.update({f"blocks.{layer}.{part}": [f"model.layers.{layer}.{name}" for name in names] for part, names in PARTS})
    missing = sorted(name for names in sources.values() for name in names if name not in tensors)
    if missing:
        raise CheckpointDamaged("the weights do not fit the model", where=where, what=f"{', '.join(missing[:5])} missing",
                                fix="name the model directory these weights belong to")
    stacked = {name: torch.cat([tensors[source] for source in sources[name]], dim=0) for name in shapes_of(model)}
    return check_tensors(model, stacked, where=where)


def llama_config(model: ZxellModel) -> dict[str, Any]:
    """The Transformers config of the same function."""
    return {
        "model_type": "llama", "vocab_size": model.vocab_size, "hidden_size": model.d_model, "intermediate_size": model.hidden,
        "num_hidden_layers": model.n_layer, "num_attention_heads": model.n_head, "num_key_value_heads": model.n_head,
        "max_position_embeddings": model.ctx, "rms_norm_eps": NORM_EPSILON, "rope_theta": model.rope_theta, "hidden_act": "silu",
        "initializer_range": INITIAL_DEVIATION, "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    }


def model_of_llama(config: Mapping[str, Any], *, where: str) -> ZxellModel:
    """The zxell model of a Llama config. PlanInvalid names each key that zxell has no words for."""
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    rope = config.get("rope_parameters") or {}
    body = {
        "n_layer": config.get("num_hidden_layers"), "d_model": width, "n_head": heads, "ctx": config.get("max_position_embeddings"),
        "vocab_size": config.get("vocab_size"), "rope_theta": config.get("rope_theta", rope.get("rope_theta", 10000.0)),
    }
    if config.get("model_type") != "llama":
        raise _refused(where, f"model_type is {config.get('model_type')!r}, a zxell model is a llama")
    model = parse_model(body, where=where)
    needed = {
        "num_key_value_heads": (heads, heads), "head_dim": (model.d_model // model.n_head, model.d_model // model.n_head),
        "intermediate_size": (model.hidden, None), "rms_norm_eps": (NORM_EPSILON, 1e-6), "tie_word_embeddings": (True, False),
    }
    faults = []
    for key, (only, when_absent) in needed.items():
        found = when_absent if config.get(key) is None else config[key]
        if found != only:
            faults.append(f"{key} is {found!r}, zxell has only {only!r} here")
    if faults:
        raise _refused(where, "; ".join(faults))
    return model


def fresh_tensors(model: ZxellModel, *, seed: int) -> Tensors:
    """Tensors as zxell begins: normal 0.02, the two projections into the residual stream 0.02 / sqrt(2 layers), norms 1."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes_of(model).items():
        is_output = name.endswith(("attn.proj.weight", "ffn.w_down.weight"))
        deviation = INITIAL_DEVIATION / math.sqrt(2 * model.n_layer) if is_output else INITIAL_DEVIATION
        tensors[name] = torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0.0, deviation, generator=generator)
    return tensors


def _refused(where: str, what: str) -> PlanInvalid:
    return PlanInvalid("this is no zxell model", where=where, what=what, fix="correct these keys, or use the config.json of the run")
