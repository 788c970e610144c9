"""zxell's `.pt`: one dict of model, optimizer, sampler, step, config, args; read without ever running what is in it.

The archive is looked at as a zip file first (stored entries only, their checksums right, no more bytes than the file has), then
`torch.load(weights_only=True)` reads it, which builds tensors and plain values and nothing else. All that comes out is checked
by name, shape and value before anybody believes it. Written in one canonical form: equal states give equal bytes.
"""

from __future__ import annotations

import math
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from policies.errors import CheckpointDamaged, PlanInvalid
from trainer.data.zxell_sampler import checked_generator
from trainer.formats.zxell_weights import EMBEDDING, HEAD, Tensors, ZxellModel, check_tensors, parse_model, shapes_of

FULL_KEYS = ("model", "optimizer", "sampler", "step", "config", "args")
WEIGHTS_KEYS = ("model", "step", "config", "args")
PICKLE_BYTES_MAX = 64 * 1024 * 1024
STEPS_MAX = 10**9 - 1
MOMENTS = ("exp_avg", "exp_avg_sq")
LFS_HEAD = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerState:
    """AdamW's state by the names of the tensors, and the settings that its groups carry."""

    moments: dict[str, Tensors]
    """exp_avg and exp_avg_sq, each by tensor name."""
    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ZxellCheckpoint:
    """What a `.pt` holds, checked. `optimizer` and `generator` are None in a weights-only file."""

    model: ZxellModel
    tensors: Tensors
    step: int
    args: dict[str, Any]
    optimizer: OptimizerState | None = None
    generator: dict[str, Any] | None = None


def read_checkpoint(path: Path) -> ZxellCheckpoint:
    """The checkpoint in a `.pt`, full or weights only. CheckpointDamaged names the file and the key or tensor."""
    body = _load(path)
    if not isinstance(body, dict):
        raise _damaged(path, f"it holds {type(body).__name__}, a dict of {', '.join(FULL_KEYS)} is needed")
    unknown = sorted(str(key) for key in body if key not in FULL_KEYS)
    if unknown:
        raise _damaged(path, f"{unknown[0]}: unknown key, perhaps of a later version; known are {', '.join(FULL_KEYS)}")
    is_full = "optimizer" in body or "sampler" in body
    for key in FULL_KEYS if is_full else WEIGHTS_KEYS:
        if key not in body:
            raise _damaged(path, f"{key}: missing")
    step = body["step"]
    if type(step) is not int or not 0 <= step <= STEPS_MAX:
        raise _damaged(path, f"step: a number of steps is needed, not {step!r:.100}")
    if not isinstance(body["args"], dict) or not isinstance(body["model"], dict):
        raise _damaged(path, "args and model: objects are needed")
    try:
        model = parse_model(body["config"], where=str(path))
    except PlanInvalid as refused:
        raise _damaged(path, f"config: {refused.what}") from refused
    return ZxellCheckpoint(
        model=model, tensors=check_tensors(model, body["model"], where=str(path), what="model."), step=step, args=body["args"],
        optimizer=_optimizer(path, model, body["optimizer"], step) if is_full else None,
        generator=_generator(path, body["sampler"]) if is_full else None,
    )


def write_checkpoint_file(path: Path, checkpoint: ZxellCheckpoint) -> None:
    """Write a full `.pt`, or a weights-only one where the checkpoint has no optimizer. The file must not exist."""
    tensors = dict(checkpoint.tensors)
    tensors[HEAD] = tensors[EMBEDDING]  # the same storage, as a state dict of tied tensors has it
    body: dict[str, Any] = {"model": tensors}
    if checkpoint.optimizer is not None:
        body["optimizer"] = _optimizer_body(checkpoint.model, checkpoint.optimizer)
        body["sampler"] = {"rng": checkpoint.generator}
    body |= {"step": checkpoint.step, "config": checkpoint.model.to_json(), "args": checkpoint.args}
    _save(path, body)


def write_weights(path: Path, checkpoint: ZxellCheckpoint, *, half: bool) -> None:
    """Write model, step, config and args only: fp32 with the tied head, or (`half`) bf16 without it, as clients exchange them."""
    tensors = {name: tensor.to(torch.bfloat16) if half else tensor for name, tensor in checkpoint.tensors.items()}
    if not half:
        tensors[HEAD] = tensors[EMBEDDING]
    _save(path, {"model": tensors, "step": checkpoint.step, "config": checkpoint.model.to_json(), "args": checkpoint.args})


def groups_of(model: ZxellModel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that decay (two and more dimensions) and those that do not, each in zxell's order."""
    shapes = shapes_of(model)
    return tuple(name for name in shapes if len(shapes[name]) >= 2), tuple(name for name in shapes if len(shapes[name]) < 2)


def _load(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries) or sum(e.file_size for e in entries) > path.stat().st_size:
                raise _damaged(path, "its entries unpack to more than the file holds: torch never writes that")
            if any(entry.filename.endswith("data.pkl") and entry.file_size > PICKLE_BYTES_MAX for entry in entries):
                raise _damaged(path, f"data.pkl: over the limit of {PICKLE_BYTES_MAX} bytes")
            broken = archive.testzip()
        if broken is not None:
            raise _damaged(path, f"{broken}: its checksum is wrong, bytes of it were changed")
        return torch.load(path, map_location="cpu", weights_only=True)
    except (zipfile.BadZipFile, NotImplementedError) as fault:
        raise _damaged(path, _why_no_archive(path, fault)) from fault
    except FileNotFoundError as fault:
        raise _damaged(path, "there is no such file") from fault
    except (CheckpointDamaged, MemoryError):
        raise
    except Exception as fault:  # the bytes are a stranger's: whatever they make the reader say is their fault
        word, said = type(fault).__name__, (str(fault).splitlines() or [""])[0][:200]
        what = "it holds more than tensors and plain values, and is not unpacked" if word == "UnpicklingError" else word
        raise _damaged(path, f"{what}: {said}") from fault


def _why_no_archive(path: Path, fault: Exception) -> str:
    with open(path, "rb") as file:
        head = file.read(len(LFS_HEAD))
    if head == LFS_HEAD:
        return "it is a pointer of git-lfs, the file itself was never fetched"
    return f"it is no archive as torch writes it (truncated, or another format): {fault}" if head else "it is empty"


def _optimizer(path: Path, model: ZxellModel, body: Any, step: int) -> OptimizerState:
    groups = body.get("param_groups") if isinstance(body, dict) else None
    if not isinstance(groups, list) or not isinstance(body.get("state"), dict) or not all(isinstance(group, dict) for group in groups):
        raise _damaged(path, "optimizer: state and param_groups are needed")
    names, settings = _names_by_number(path, model, groups), _settings(path, groups)
    moments: dict[str, dict[str, Any]] = {key: {} for key in MOMENTS}
    for number, name in names.items():
        entry = body["state"].get(number)
        if not isinstance(entry, dict):
            raise _damaged(path, f"optimizer.state.{number}: missing, it belongs to {name}")
        count = entry.get("step")
        if not isinstance(count, (int, float, torch.Tensor)) or (isinstance(count, torch.Tensor) and count.numel() != 1) or float(count) != step:
            raise _damaged(path, f"optimizer.state.{number}.step: {step} is needed as the checkpoint says, not {count!r:.100}")
        for key in MOMENTS:
            moments[key][name] = entry.get(key)
    extra = sorted(str(number) for number in body["state"].keys() - names.keys())
    if extra:
        raise _damaged(path, f"optimizer.state.{extra[0]}: belongs to no tensor")
    checked = {key: check_tensors(model, {n: t for n, t in moments[key].items() if t is not None}, where=str(path), what=f"optimizer.{key} of ")
               for key in MOMENTS}
    return OptimizerState(moments=checked, step=step, **settings)


def _names_by_number(path: Path, model: ZxellModel, groups: list[dict[str, Any]]) -> dict[int, str]:
    """Which tensor each number of the optimizer means: the decaying group in zxell's order, then the other, wherever each stands."""
    listed = [group.get("params") for group in groups]
    wanted = groups_of(model)
    if len(groups) != len(wanted) or not all(isinstance(numbers, list) for numbers in listed):
        raise _damaged(path, f"optimizer.param_groups: {len(wanted)} groups with their params are needed, not {len(groups)}")
    # The group without decay holds the norms; where neither or both decay, zxell's order (decaying first) is taken.
    order = wanted if not (groups[0].get("weight_decay") == 0 and groups[1].get("weight_decay") != 0) else (wanted[1], wanted[0])
    names: dict[int, str] = {}
    for numbers, group_names in zip(listed, order, strict=True):
        assert isinstance(numbers, list)
        if len(numbers) != len(group_names) or not all(type(number) is int for number in numbers):
            raise _damaged(path, f"optimizer.param_groups: a group holds {len(numbers)} tensors where {len(group_names)} are needed")
        names.update(zip(numbers, group_names, strict=True))
    if len(names) != sum(len(group_names) for group_names in wanted):
        raise _damaged(path, "optimizer.param_groups: a tensor's number stands twice")
    return names


def _settings(path: Path, groups: list[dict[str, Any]]) -> dict[str, Any]:
    decays: list[Any] = [group.get("weight_decay") for group in groups]
    first: dict[str, Any] = {key: groups[0].get(key) for key in ("lr", "betas", "eps")}
    for key, value in first.items():
        numbers = list(value) if key == "betas" and isinstance(value, (list, tuple)) and len(value) == 2 else [value]
        if not all(type(number) in (int, float) and 0 <= number < math.inf for number in numbers) or len(numbers) != (2 if key == "betas" else 1):
            raise _damaged(path, f"optimizer.param_groups.{key}: {value!r:.100} is no setting of AdamW")
        if any(group.get(key) != value for group in groups):
            raise _damaged(path, f"optimizer.param_groups.{key}: the groups differ")
    for key in ("amsgrad", "maximize"):
        if any(group.get(key, False) for group in groups):
            raise _damaged(path, f"optimizer.param_groups.{key}: only false is taken")
    if not all(type(decay) in (int, float) and 0 <= decay < math.inf for decay in decays) or min(decays) != 0:
        raise _damaged(path, f"optimizer.param_groups.weight_decay: {decays!r:.100}; one group decays, the other does not")
    return {"lr": float(first["lr"]), "betas": (float(first["betas"][0]), float(first["betas"][1])), "eps": float(first["eps"]),
            "weight_decay": float(max(decays))}


def _generator(path: Path, body: Any) -> dict[str, Any]:
    if not isinstance(body, dict) or "rng" not in body:
        raise _damaged(path, "sampler.rng: missing")
    return checked_generator(body["rng"], where=f"{path}: sampler.rng")


def _optimizer_body(model: ZxellModel, optimizer: OptimizerState) -> dict[str, Any]:
    """As `torch.optim.AdamW.state_dict()` writes it: numbers follow each other through the groups."""
    groups, state, number = [], {}, 0
    for names, decay in zip(groups_of(model), (optimizer.weight_decay, 0.0), strict=True):
        groups.append({
            "lr": optimizer.lr, "betas": optimizer.betas, "eps": optimizer.eps, "weight_decay": decay, "amsgrad": False, "maximize": False,
            "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
            "params": list(range(number, number + len(names))),
        })
        for name in names:
            state[number] = {"step": torch.tensor(float(optimizer.step)), **{key: optimizer.moments[key][name] for key in MOMENTS}}
            number += 1
    return {"state": state, "param_groups": groups}


def _save(path: Path, body: dict[str, Any]) -> None:
    with open(path, "xb") as file:
        torch.save(_canonical(body), file)


def _canonical(value: Any) -> Any:
    """The same value with fresh containers and interned words: pickle writes what it has seen before as a reference, by identity."""
    if isinstance(value, dict):
        return {_canonical(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_canonical(item) for item in value])
    return sys.intern(str(value)) if isinstance(value, str) else value


def _damaged(path: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("the zxell checkpoint can't be used", where=str(path), what=what, fix="use an older ckpt_*.pt of the run")
