"""A zxell run directory: config.json (model, args, train_shards), log.jsonl, ckpt_last.pt and ckpt_final.pt.

Read strictly where a training depends on it, kept as it is everywhere else: unknown args and records are carried along.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import CheckpointDamaged, PlanInvalid
from trainer.files import JsonFault, loads, read_json
from trainer.formats.zxell_weights import ZxellModel, parse_model

CONFIG_NAME, LOG_NAME, LAST_NAME, FINAL_NAME = "config.json", "log.jsonl", "ckpt_last.pt", "ckpt_final.pt"
LOG_BYTES_MAX = 512 * 1024 * 1024
COUNT_MAX = 10**9 - 1
COUNTED_ARGS = {"steps": 1, "batch": 1, "grad_accum": 1, "warmup": 0, "seed": 0}
NUMBER_ARGS = ("lr", "min_lr_ratio", "wd", "clip")
OPTIONAL_COUNTS = ("eval_every", "ckpt_every", "log_every")
LOG_EVERY = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ZxellRun:
    """`args` as they stand in config.json, those that a training depends on checked. `config_bytes` is the file itself."""

    folder: Path
    model: ZxellModel
    args: dict[str, Any]
    train_shards: tuple[str, ...]
    config_bytes: bytes

    @property
    def window(self) -> int:
        return int(self.args.get("ctx") or self.model.ctx)

    def checkpoint(self) -> Path:
        """The file to go on from: the final one where there is one."""
        for name in (FINAL_NAME, LAST_NAME):
            if (self.folder / name).is_file():
                return self.folder / name
        raise CheckpointDamaged("the zxell run has no checkpoint", where=str(self.folder / LAST_NAME), what="there is no such file",
                                fix="name a run directory that holds ckpt_last.pt or ckpt_final.pt")


def read_run(folder: Path) -> ZxellRun:
    """The settings of a run directory. PlanInvalid names the file and every key that can't be."""
    path = folder / CONFIG_NAME
    try:
        body, data = read_json(path), path.read_bytes()
    except FileNotFoundError as fault:
        raise _refused(path, "the file is missing, so this is no zxell run directory") from fault
    except (OSError, JsonFault) as fault:
        raise _refused(path, str(fault)) from fault
    if not isinstance(body, dict):
        raise _refused(path, f"an object is needed, not {type(body).__name__}")
    model, args, shards = parse_model(body.get("model"), where=str(path)), body.get("args"), body.get("train_shards", [])
    faults = args_faults(args, model)
    if not isinstance(shards, list) or not all(isinstance(name, str) for name in shards):
        faults.append("train_shards: a list of names is needed")
    if faults:
        raise _refused(path, "; ".join(faults))
    return ZxellRun(folder=folder, model=model, args=args or {}, train_shards=tuple(Path(name).name for name in shards), config_bytes=data)


def args_faults(args: Any, model: ZxellModel) -> list[str]:
    """What is wrong with the args that a training depends on."""
    if not isinstance(args, dict):
        return [f"args: an object is needed, not {type(args).__name__}"]
    faults = []
    for key, least in COUNTED_ARGS.items():
        most = 2**63 - 1 if key == "seed" else COUNT_MAX
        if type(args.get(key)) is not int or not least <= args[key] <= most:
            faults.append(f"args.{key}: a count from {least} is needed, not {args.get(key)!r:.100}")
    for key in NUMBER_ARGS:
        value: Any = args.get(key)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            faults.append(f"args.{key}: a number of at least 0 is needed, not {value!r:.100}")
    for key in OPTIONAL_COUNTS:
        if args.get(key) is not None and (type(args[key]) is not int or args[key] < 0):
            faults.append(f"args.{key}: a count is needed, not {args[key]!r:.100}")
    window = args.get("ctx")
    if window is not None and (type(window) is not int or not 1 <= window <= model.ctx):
        faults.append(f"args.ctx: a count from 1 to the model's {model.ctx} is needed, not {window!r:.100}")
    return faults


def read_log(folder: Path) -> list[dict[str, Any]]:
    """The records of log.jsonl in order, a torn tail left out; [] when there is none. CheckpointDamaged names the line."""
    path = folder / LOG_NAME
    if not path.is_file():
        return []
    if path.stat().st_size > LOG_BYTES_MAX:
        raise _log_damaged(path, f"over the limit of {LOG_BYTES_MAX} bytes")
    lines, records = path.read_bytes().split(b"\n"), []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = loads(line)
        except JsonFault as fault:
            if number == len(lines):
                break  # no newline after it: the write was cut short
            raise _log_damaged(path, f"line {number}: {fault}") from fault
        if not isinstance(record, dict) or type(record.get("step")) is not int:
            raise _log_damaged(path, f"line {number}: an object with a step is needed")
        records.append(record)
    return records


def losses_by_step(records: list[dict[str, Any]], steps: int) -> list[float | None]:
    """One entry a step up to `steps`: the logged loss (the last word where a step was repeated), None where none was logged."""
    losses: list[float | None] = [None] * steps
    for record in records:
        if "loss" in record and 1 <= record["step"] <= steps and type(record["loss"]) in (int, float):
            losses[record["step"] - 1] = float(record["loss"])
    return losses


def training_records(records: list[dict[str, Any]], *, after: int, every: int, elapsed_seconds: float) -> list[dict[str, Any]]:
    """Our step records after step `after` as zxell writes them: step 1 and every `every`-th, the last word of a repeated step."""
    steps = {record["step"]: record for record in records if "loss" in record and "event" not in record and record["step"] > after}
    written = []
    for step, record in sorted(steps.items()):
        seconds = float(record["seconds"])
        elapsed_seconds += seconds
        if step == 1 or step % every == 0:
            written.append({
                "step": step, "loss": record["loss"], "lr": record["lr"], "grad_norm": record["grad_norm"],
                "tok_per_s": round(record["tokens"] / seconds, 1) if seconds > 0 else 0.0, "elapsed_s": round(elapsed_seconds, 1),
            })
    return written


def _refused(path: Path, what: str) -> PlanInvalid:
    return PlanInvalid("the zxell run can't be read", where=str(path), what=what, fix="restore the run's own config.json, or correct these keys")


def _log_damaged(path: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("the zxell log can't be read", where=str(path), what=what,
                             fix="restore log.jsonl, or move it away: only its losses are used")
