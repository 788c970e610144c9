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


LAYERS_MAX = 1024
SHOWN_CHARACTERS = 80
COUNT_MAX = 2**31 - 1
DTYPE_KEYS = ("torch_dtype", "dtype")
"""What the weights were stored as, in files of transformers 4 and 5. Here everything is computed in fp32, so it changes nothing."""
NEVER_TAKEN: dict[str, tuple[Any, ...]] = {"quantization_config": (None,), "pruned_heads": (None, {}), "is_encoder_decoder": (False,)}
ROPE_KEYS = ("rope_theta", "rope_type", "partial_rotary_factor")
PADDING_KEY = "pad_token_id"
TOKEN_KEYS = ("bos_token_id", "eos_token_id", PADDING_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`needed` are widths and counts (integers above 0); `refused` maps a key to the only values that are taken.

    `numbers` gives the range of what may be stated besides: least and greatest, the greatest excluded. Only these keys, `refused`
    and the token ids reach the library: what a file says besides is kept and written back, and computes nothing.
    """

    window_key: str
    layers_key: str
    tied_by_default: bool
    needed: tuple[str, ...]
    refused: dict[str, tuple[Any, ...]]
    numbers: dict[str, tuple[float, float]]
    optional: tuple[str, ...]


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        window_key="n_positions", layers_key="n_layer", tied_by_default=True,
        needed=("vocab_size", "n_positions", "n_embd", "n_layer", "n_head"),
        refused={
            "activation_function": ("gelu_new",), "tie_word_embeddings": (True,), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        },
        numbers={"layer_norm_epsilon": (0.0, 1.0), "initializer_range": (0.0, 1.0), "embd_pdrop": (0.0, 1.0), "attn_pdrop": (0.0, 1.0),
                 "resid_pdrop": (0.0, 1.0)},
        optional=("n_inner",),
    ),
    "llama": Family(
        window_key="max_position_embeddings", layers_key="num_hidden_layers", tied_by_default=False,
        needed=("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
        refused={
            "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "attention_dropout": (0, 0.0), "rope_scaling": (None,),
        },
        numbers={"rms_norm_eps": (0.0, 1.0), "initializer_range": (0.0, 1.0), "rope_theta": (1e-3, 1e12)},
        optional=("num_key_value_heads", "head_dim", "tie_word_embeddings", "rope_parameters"),
    ),
}


def model_config(settings: ModelSettings, *, window: int, where: str) -> dict[str, Any]:
    """The checked config of a model that is given as keys or as a directory, whose files then hold the tensors of that config."""
    if settings.path is not None:
        from trainer.formats.transformers_dirs import read_model_directory  # it stands on this module

        config = read_model_directory(Path(settings.path)).config
    else:
        config = check_config(settings.config, where=f"{where}: model.config")
        if config["model_type"] == "gpt2" and config.get("n_inner") is None:
            width = 4 * config["n_embd"]
            raise _refused(f"{where}: model.config", f"n_inner is not stated, and nothing else tells the width; n_inner: {width} is 4 x n_embd")
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
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise _refused(where, f"model_type is {_short(kind)}, only {' and '.join(FAMILIES)} can be trained")
    family = FAMILIES[kind]
    limits = {key: LAYERS_MAX if key == family.layers_key else COUNT_MAX for key in family.needed}
    wrong = [key for key in family.needed if type(config.get(key)) is not int or not 1 <= config[key] <= limits[key]]
    faults = [f"{key} is {_short(config.get(key))}, a count of 1 to {limits[key]} is needed" for key in wrong]
    for key, taken in {**family.refused, **NEVER_TAKEN}.items():
        if key in config and not any(config[key] == value and type(config[key]) is type(value) for value in taken):  # 1 is not true here
            faults.append(f"{key} is {_short(config[key])}, only {' or '.join(repr(value) for value in taken[:1])} is taken")
    faults += _number_faults(config, family)
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


def arithmetic_config(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a checked config that say what is computed: all that the library is given of it.

    It insists on floats where a file may say 0 or 10000. Where a text begins and ends computes nothing; padding does: its row has no gradient.
    """
    family = FAMILIES[config["model_type"]]
    known = (*family.needed, *family.refused, *family.numbers, *family.optional, PADDING_KEY)
    given = {key: config[key] for key in known if key in config}
    given |= {key: float(given[key]) for key in (*family.numbers, "attention_dropout") if key in given}
    if given.get("rope_parameters") is not None:
        given["rope_parameters"] = {key: float(value) if key != "rope_type" else value for key, value in given["rope_parameters"].items()}
    return {**given, "bos_token_id": None, "eos_token_id": None}


def _number_faults(config: dict[str, Any], family: Family) -> list[str]:
    faults = []
    for key, (least, greatest) in family.numbers.items():
        value = config.get(key, least)
        if type(value) not in (int, float) or not least <= value < greatest:
            faults.append(f"{key} is {_short(value)}, a number of at least {least} and below {greatest} is needed")
    if len({str(config[key]).removeprefix("torch.") for key in DTYPE_KEYS if config.get(key) is not None}) > 1:
        faults.append(f"torch_dtype is {_short(config['torch_dtype'])} and dtype is {_short(config['dtype'])}: one of them is needed")
    for key in TOKEN_KEYS:
        value = config.get(key)
        listed = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if not all(item is None or (type(item) is int and -1 <= item <= COUNT_MAX) for item in listed):
            faults.append(f"{key} is {_short(value)}, a token id or null is needed")
    pad = config.get(PADDING_KEY)
    if type(pad) is int and type(config.get("vocab_size")) is int and pad >= config["vocab_size"]:
        faults.append(f"pad_token_id is {pad}, beyond vocab_size {config['vocab_size']}")
    return faults


def _gpt2_faults(config: dict[str, Any]) -> list[str]:
    faults = []
    if config["n_embd"] % config["n_head"]:
        faults.append(f"n_embd {config['n_embd']} is no multiple of n_head {config['n_head']}")
    inner = config.get("n_inner")
    if inner is not None and (type(inner) is not int or not 1 <= inner <= COUNT_MAX):
        faults.append(f"n_inner is {_short(inner)}, a width is needed (or null beside weights: 4 x n_embd, which they have to show)")
    return faults


def _llama_faults(config: dict[str, Any]) -> list[str]:
    faults = []
    heads, given = config["num_attention_heads"], config.get("num_key_value_heads")
    pairs = heads if given is None else given
    if type(pairs) is not int or pairs < 1 or heads % pairs:
        faults.append(f"num_attention_heads {heads} is no multiple of num_key_value_heads {_short(pairs)}")
    if type(config.get("tie_word_embeddings", False)) is not bool:
        faults.append(f"tie_word_embeddings is {_short(config['tie_word_embeddings'])}, true or false is needed")
    stated = config.get("head_dim")
    if config["hidden_size"] % heads or (stated is None and config["hidden_size"] // heads % 2):
        faults.append(f"hidden_size {config['hidden_size']} over {heads} heads gives no even head width")
    if stated is not None and (type(stated) is not int or not 2 <= stated <= COUNT_MAX or stated % 2):
        faults.append(f"head_dim is {_short(stated)}, an even width is needed")
    return faults + _rope_faults(config)


def _rope_faults(config: dict[str, Any]) -> list[str]:
    """transformers 4 wrote `rope_theta`, transformers 5 writes `rope_parameters`; both may stand there when they agree."""
    rope = config.get("rope_parameters")
    if rope is None:
        return []
    if not isinstance(rope, dict) or not set(rope) <= set(ROPE_KEYS) or rope.get("rope_type", "default") != "default":
        return [f"rope_parameters is {_short(rope)}, only rope_theta and rope_type 'default' are taken"]
    if type(rope.get("partial_rotary_factor", 1.0)) not in (int, float) or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return [f"rope_parameters.partial_rotary_factor is {_short(rope['partial_rotary_factor'])}, only 1.0 is taken"]
    theta: Any = rope.get("rope_theta")
    least, greatest = FAMILIES["llama"].numbers["rope_theta"]
    if "rope_theta" in rope and (type(theta) not in (int, float) or not least <= theta < greatest):
        return [f"rope_parameters.rope_theta is {_short(theta)}, a number of at least {least} and below {greatest} is needed"]
    if theta is not None and config.get("rope_theta", theta) != theta:
        return [f"rope_theta is {config['rope_theta']} and rope_parameters.rope_theta is {theta}: one of them is needed"]
    return []


def _short(value: Any) -> str:
    """A value in an error message: one line of it."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."


def _refused(where: str, what: str) -> PlanInvalid:
    return PlanInvalid("the model can't be trained", where=where, what=what, fix="correct these keys of the model's config and launch again")
