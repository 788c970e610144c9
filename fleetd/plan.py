"""plan.yaml to the frozen Plan that everything else works from, or one PlanInvalid that lists all of its faults with their lines.

    text ─ plan_yaml ─▶ values + lines ─ plan_shape ─▶ typed sections ─ plan_resolve ─▶ defaults merged ─ plan_rules,
    plan_environment ─▶ Plan

The only door to those files: `load_plan`, `plan_schema`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from fleetd import clock
from fleetd.campaign import Plan
from fleetd.plan_environment import check_environments, environment_plan
from fleetd.plan_model import PlanFile
from fleetd.plan_resolve import Resolution, ResolvedCandidate, Source, build_plan, leaves, resolve
from fleetd.plan_rules import check_rules
from fleetd.plan_shape import read_shape
from fleetd.plan_units import Seconds, SizeBytes, write_duration, write_size
from fleetd.plan_yaml import PLAN_BYTES_MAX, Fault, Tree, dotted, read_tree
from policies.errors import PlanInvalid

FAULTS_SHOWN_MAX = 100

__all__ = ["LoadedPlan", "Source", "load_plan", "plan_schema"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPlan:
    """A valid plan and where it came from. `sources` and `values` have the same keys: dotted paths such as `candidates.slow.stop.grace_floor`."""

    path: Path
    text: str
    plan: Plan
    sources: dict[str, Source]
    values: dict[str, Any]
    """Each value as a person wrote or would write it: sizes are SizeBytes, durations Seconds."""


def load_plan(path: Path, *, now: datetime | None = None) -> LoadedPlan:
    """Read, check and resolve a plan. PlanInvalid lists every fault that was found; `now` is for tests of deadlines."""
    text = _read(path)
    tree = read_tree(text)
    file = read_shape(tree)
    if file is None:
        raise _invalid(path, tree)
    resolution = resolve(tree, file, path.resolve().parent)
    check_rules(resolution, now or clock.read().now)
    check_environments(resolution)
    if tree.faults:
        raise _invalid(path, tree)
    environments = {name: found for name in file.hosts if (found := environment_plan(resolution, name)) is not None}
    plan = build_plan(resolution, environments, sha256=hashlib.sha256(text.encode()).hexdigest())
    values, sources = _explained(resolution)
    return LoadedPlan(path=path, text=text, plan=plan, sources=sources, values=values)


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(PLAN_BYTES_MAX + 1).decode("utf-8-sig")
    except OSError as fault:
        fix = f"name the file in it: fleetd check {path / 'plan.yaml'}" if path.is_dir() else "name the plan's file: fleetd check DIRECTORY/plan.yaml"
        raise PlanInvalid("the plan can't be read", where=str(path), what=fault.strerror or str(fault), fix=fix) from fault
    except UnicodeDecodeError as fault:
        what = f"byte {fault.start} is not UTF-8"
        raise PlanInvalid("the plan can't be read", where=str(path), what=what, fix="save the file as UTF-8 text") from fault


def _invalid(path: Path, tree: Tree) -> PlanInvalid:
    faults = sorted(tree.faults, key=lambda fault: (fault.line, fault.path))
    lines = [_fault_line(path, fault) for fault in faults[:FAULTS_SHOWN_MAX]]
    if len(faults) > FAULTS_SHOWN_MAX:
        lines.append(f"and {len(faults) - FAULTS_SHOWN_MAX} more")
    count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
    return PlanInvalid(f"the plan has {count}", where=str(path), what="\n         ".join(lines), fix=f"edit {path}, then: fleetd check {path}")


def _fault_line(path: Path, fault: Fault) -> str:
    return f"{path.name}:{fault.line or 1}: {fault.path}: {fault.what} — {fault.fix}"


def _explained(resolution: Resolution) -> tuple[dict[str, Any], dict[str, Source]]:
    """Value and origin of every key of the resolved plan."""
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for key_path, value in leaves(resolution.file):
        if key_path[0] not in ("defaults", "candidates"):
            written = key_path if key_path in resolution.tree.lines else _scalar_above(resolution.tree, key_path)
            values[dotted(key_path)] = value
            sources[dotted(key_path)] = Source(kind="plan", line=resolution.tree.lines[written]) if written else Source(kind="default")
    for candidate in resolution.candidates:
        for key_path, value in leaves(candidate.section):
            if _concerns(candidate, str(key_path[0])):
                name = f"candidates.{candidate.name}.{dotted(key_path)}"
                values[name], sources[name] = value, candidate.source(key_path)
    return values, sources


def _scalar_above(tree: Tree, path: tuple[str | int, ...]) -> tuple[str | int, ...] | None:
    """`memory_cap: 2GiB` decides `memory_cap.host`: the line of a scalar speaks for the keys below it."""
    value = tree.value
    for index, part in enumerate(path):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
        if not isinstance(value, dict) and path[-1] != "demand":
            return path[: index + 1]
    return None


def _concerns(candidate: ResolvedCandidate, key: str) -> bool:
    """A command has no trainer settings, and the trainer no command."""
    return key not in (("training", "checkpoint", "validation") if candidate.section.command else ("command", "working_directory"))


class _Schema(GenerateJsonSchema):
    """Defaults as a plan writes them: `15m` instead of 900 seconds."""

    def encode_default(self, dft: Any) -> Any:
        if isinstance(dft, Seconds):
            return write_duration(dft)
        if isinstance(dft, SizeBytes):
            return write_size(dft)
        if hasattr(dft, "model_fields_set"):
            return {name: self.encode_default(getattr(dft, name)) for name in type(dft).model_fields}
        return super().encode_default(dft)


def plan_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of plan.yaml, for editors and for `fleetd plan-schema`."""
    schema = PlanFile.model_json_schema(schema_generator=_Schema, mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "fleetd plan"}
