"""Types, ranges and unknown keys of plan.yaml: every fault at once, each in our own words and at its line.

What was wrong is cut out afterwards, so that `plan_rules` can go on judging the rest of the plan in the same pass.
"""

from __future__ import annotations

import copy
import difflib
import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from fleetd.plan_model import CandidateSection, PlanFile
from fleetd.plan_units import Refused
from fleetd.plan_yaml import Path, Tree

PASSES_MAX = 8
CLOSE_ENOUGH = 0.6
SHOWN_CHARACTERS_MAX = 60

# What people call these keys elsewhere (SkyPilot, dstack, Slurm, Ansible, Transformers).
FOREIGN_WORDS = {
    foreign: ours
    for ours, others in {
        "command": "run commands cmd argv", "environment": "envs env venv virtualenv", "lock": "requirements lockfile lock_file",
        "working_directory": "workdir cwd",
        "memory_cap": "mem memory memory_limit", "deadline": "time time_limit max_duration walltime", "restarts": "retry retries",
        "hosts": "nodes machines", "candidates": "runs trainings jobs tasks", "lr": "learning_rate", "steps": "max_steps iterations",
        "batch": "batch_size", "window": "context block_size max_length", "data": "datasets dataset", "validation": "val", "evaluate": "eval",
        "address": "ip hostname ansible_host", "user": "ssh_user username ansible_user remote_user", "port": "ssh_port ansible_port",
        "identity_file": "ssh_key private_key ansible_ssh_private_key_file", "proxy_jump": "proxyjump jump bastion",
        "python": "ansible_python_interpreter",
        "data_from": "copy_from sync_from pull_from mirror peer",
    }.items()
    for foreign in others.split()
}

_KEYS = ("a group of keys", "indented below it")
TYPES = {
    "int_type": ("a whole number", "such as 100"), "float_type": ("a number", "such as 0.001"), "string_type": ("text", "in quotes where needed"),
    "bool_type": ("true or false", "without quotes"), "list_type": ("a list", "such as [a, b]"), "dict_type": _KEYS, "model_type": _KEYS,
    "model_attributes_type": _KEYS,
}
LIMITS = {
    "greater_than": ("gt", "greater than"), "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"), "less_than_equal": ("le", "at most"),
}
PATTERNS = {
    "device": "write auto, cpu, cuda or cuda:0", "address": "write a name, such as spark-a or 10.0.0.7", "user": "write a login name",
    "proxy_jump": "write user@host:port, as for ssh -J", "unit": "write a whole name, such as vllm.service",
}


def read_shape(tree: Tree) -> PlanFile | None:
    """The plan as typed sections, without the parts that are wrong; those are faults of the tree. None when it is no plan at all."""
    if not isinstance(tree.value, dict):
        if not tree.faults:
            tree.fault(
                (), f"a plan is a list of `key: value` lines, found {found(tree.value)}",
                "begin with `name:`, `deadline:`, `hosts:` and `candidates:`"
            )
        return None
    rest = copy.deepcopy(tree.value)
    for _ in range(PASSES_MAX):
        try:
            return PlanFile.model_validate(rest)
        except ValidationError as error:
            for fault in error.errors():
                _report(tree, rest, fault)
            for fault in error.errors():
                _cut(rest, fault["loc"])
    return None


def found(value: Any) -> str:
    """What a value is, for a sentence: `text 'abc'`, `the number 3`, `nothing`."""
    shown = repr(value) if len(repr(value)) <= SHOWN_CHARACTERS_MAX else repr(value)[: SHOWN_CHARACTERS_MAX - 1] + "…"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "a group of keys"
    return f"text {shown}" if isinstance(value, str) else f"the number {shown}"


def _report(tree: Tree, value: Any, fault: Any) -> None:
    location: Path = tuple(part for part in fault["loc"] if part != "[key]")
    kind, context = fault["type"], fault.get("ctx", {})
    path = location if kind == "missing" else _reachable(value, location)
    given = _at(value, path)
    if kind == "extra_forbidden":
        what, fix = f"unknown key {str(location[-1])!r}", _suggest(location)
    elif fault["loc"][-1] == "[key]":
        what, fix = f"unknown role {location[-1]!r}", _one_of(str(location[-1]), ["train", "validation", "calibration", "test", "holdout"])
    elif kind == "value_error" and isinstance(context.get("error"), Refused):
        what, fix = context["error"].what, context["error"].fix
    elif kind == "literal_error":
        options = [word.strip("'") for word in context["expected"].replace(" or ", ", ").split(", ")]
        what, fix = f"{found(given)} is not one of the choices", _one_of(str(given), options)
    elif kind == "missing":
        what, fix = "is missing", f"add `{location[-1]}:`"
    else:
        what, fix = _ordinary(kind, context, given, fault["msg"], str(location[-1]) if location else "")
    tree.fault(path, what, fix)


def _ordinary(kind: str, context: dict[str, Any], given: Any, message: str, key: str) -> tuple[str, str]:
    """Wrong types and ranges."""
    if kind in TYPES:
        noun, example = TYPES[kind]
        return f"expected {noun}, found {found(given)}", f"write {noun}, {example}"
    if kind in LIMITS:
        name, words = LIMITS[kind]
        return f"{given} is out of range", f"write a number {words} {context[name]:g}"
    if kind == "string_pattern_mismatch":
        return f"{found(given)} is not one of the choices", PATTERNS.get(key, "write a plain name")
    if kind in ("too_long", "too_short"):
        expected = context.get("max_length", context.get("min_length"))
        return f"expected {expected} values, found {context['actual_length']}", f"write a list of {expected}"
    if kind == "finite_number":
        return f"{given} is not finite", "write an ordinary number"
    return message, "see `fleetd plan-schema`"


def _one_of(given: str, options: list[str]) -> str:
    close = difflib.get_close_matches(given, options, n=1, cutoff=CLOSE_ENOUGH)
    choices = " or ".join(options) if len(options) < 3 else f"one of {', '.join(options)}"
    return f"did you mean {close[0]}? Write {choices}" if close and len(options) > 1 else f"write {choices}"


def _suggest(location: Path) -> str:
    """The key that was probably meant: a neighbour that looks alike, or the same word where it belongs."""
    key, parent = str(location[-1]), section_at(location[:-1])
    neighbours = list(parent.model_fields) if parent else []
    words = [word for word in (key, FOREIGN_WORDS.get(key)) if word]
    places: list[str] = []
    if location[0] in ("candidates", "defaults"):
        places = [path for word in words for path in _places(CandidateSection, "").get(word, [])[:1]]
    places = places or [path for word in words for path in _places(PlanFile, "").get(word, [])[:1]]
    meant = [word for word in words if word in neighbours] or [*places, *difflib.get_close_matches(key, neighbours, n=1, cutoff=CLOSE_ENOUGH)]
    if meant:
        return f"did you mean {' or '.join(dict.fromkeys(meant))}?"
    return f"the keys here are {', '.join(neighbours)}" if neighbours else "remove it"


def _places(section: type[BaseModel], prefix: str) -> dict[str, list[str]]:
    """Where each key of a section and the sections in it stands, as dotted paths."""
    places: dict[str, list[str]] = {}
    for name, field in section.model_fields.items():
        places.setdefault(name, []).append(prefix + name)
        inner = _section_of(field.annotation)
        if inner and inner is not CandidateSection:
            for key, paths in _places(inner, f"{prefix}{name}.").items():
                places.setdefault(key, []).extend(paths)
    return places


def section_at(path: Path) -> type[BaseModel] | None:
    """The section that the keys at this path belong to."""
    section: type[BaseModel] | None = PlanFile
    skip = False
    for part in path:
        if skip or isinstance(part, int):
            skip = False
            continue
        field = section.model_fields.get(part) if section else None
        if field is None:
            return None
        section = _section_of(field.annotation)
        skip = typing.get_origin(field.annotation) is dict
    return section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for argument in typing.get_args(annotation) if (inner := _section_of(argument))), None)


def _reachable(value: Any, path: Path) -> Path:
    """The longest beginning of `path` that the file really holds: a scalar memory_cap has no `host` below it."""
    for index, part in enumerate(path):
        held = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int) and part < len(value)
        if not held:
            return path[:index]
        value = value[part]
    return path


def _at(value: Any, path: Path) -> Any:
    for part in _reachable(value, path):
        value = value[part]
    return value


def _cut(value: Any, location: Path) -> None:
    """Remove the innermost key of a mapping on the way to what was wrong; a list goes as a whole."""
    holder, key = None, ""
    for part in location:
        if not isinstance(value, dict) or part not in value:
            break
        holder, key, value = value, str(part), value[part]
    if holder is not None:
        del holder[key]
