"""A plan file of the right shape to the frozen Plan: defaults merged into candidates, paths absolute, each value with its origin.

Nothing is judged here; `plan_rules` has the last word on whether the result may be launched.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from fleetd.campaign import AfterFreeze, CandidatePlan, DataFrom, DataRole, EnvironmentPlan, HostPlan, Notify, Plan, ReserveTerms, SelectionTerms
from fleetd.contents import LFS_POINTER, is_pointer
from fleetd.model import RestartTerms, StallTerms, StopTerms
from fleetd.plan_hosts import DisplaceSection, HostSection
from fleetd.plan_model import CandidateSection, DataSection, PlanFile, TrainingSection
from fleetd.plan_yaml import Path as KeyPath
from fleetd.plan_yaml import Tree
from policies.facts import CapGrade, OnReboot, SignalTarget, Split
from policies.workloads import Restart, Workload

CONFIG_BYTES_MAX = 1024 * 1024
TASK_SCHEMA = 1
CORPUS_FILES: tuple[str, ...] = ("corpus.json", "tokens.bin", "tokenizer.json")
"""Of a Zrodlo corpus; the tokenizer need not be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a value comes from: a line of the candidate, a line under `defaults:`, or fleetd's own default."""

    kind: str
    """`plan`, `defaults`, or `default`."""
    line: int | None = None

    def __str__(self) -> str:
        if self.kind == "default":
            return "default"
        return f"line {self.line}" if self.kind == "plan" else f"defaults: line {self.line}"


@dataclass(slots=True, kw_only=True)
class ResolvedCandidate:
    """One candidate with defaults merged in. `origin` says at which path of the file a value was written."""

    name: str
    section: CandidateSection
    given: dict[str, Any]
    tree: Tree
    config: dict[str, Any] | None = None

    def origin(self, path: KeyPath) -> KeyPath | None:
        """The path in the file that decided this value, or None for fleetd's own default."""
        for start in (("candidates", self.name), ("defaults",)):
            value: Any = self.tree.value
            for index, part in enumerate((*start, *path)):
                if not isinstance(value, dict) or part not in value:
                    break
                value = value[part]
                # A scalar above the key speaks for both sizes below it (`memory_cap: 16GiB`).
                if index >= len(start) and (index == len(start) + len(path) - 1 or (not isinstance(value, dict) and path[-1] != "demand")):
                    return (*start, *path)[: index + 1]
        return None

    def source(self, path: KeyPath) -> Source:
        origin = self.origin(path)
        if origin is None:
            return Source(kind="default")
        return Source(kind="plan" if origin[0] == "candidates" else "defaults", line=self.tree.line(origin))

    def where(self, path: KeyPath) -> KeyPath:
        """The path that a fault about this value points at."""
        return self.origin(path) or ("candidates", self.name)


@dataclass(slots=True, kw_only=True)
class Resolution:
    """All that rules and screens need: typed sections, merged candidates, and the directory where relative paths start."""

    tree: Tree
    file: PlanFile
    directory: Path
    candidates: list[ResolvedCandidate] = field(default_factory=list)

    def absolute(self, text: str) -> Path:
        return Path(os.path.normpath(self.directory / os.path.expanduser(text)))


def resolve(tree: Tree, file: PlanFile, directory: Path) -> Resolution:
    resolution = Resolution(tree=tree, file=file, directory=directory)
    defaults = file.defaults.model_dump(exclude_unset=True)
    for name, section in file.candidates.items():
        own = section.model_dump(exclude_unset=True)
        given = merge(_defaults_for(own, defaults), own)
        merged = _completed(CandidateSection.model_validate(given))
        resolution.candidates.append(ResolvedCandidate(name=name, section=merged, given=given, tree=tree))
    return resolution


_KINDS = {"training", "command"}


def _defaults_for(own: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A candidate that is a command takes no `training` from the defaults, and the other way round."""
    other_kind = _KINDS - own.keys() if _KINDS & own.keys() else set()
    return {key: value for key, value in defaults.items() if key not in other_kind}


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Deep merge: groups of keys are joined, anything else of `above` replaces what is below it."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def _completed(section: CandidateSection) -> CandidateSection:
    """Defaults that depend on another value: who is signalled, and the size of a micro batch."""
    training = section.training
    if training and training.micro_batch is None:
        training = training.model_copy(update={"micro_batch": training.batch})
    signal = section.signal or ("group" if section.command else "leader")
    return section.model_copy(update={"training": training, "signal": signal})


def leaves(section: BaseModel, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """Every value of a section with its path, groups of keys unfolded."""
    found: list[tuple[KeyPath, Any]] = []
    for name in type(section).model_fields:
        found += _leaves_of(getattr(section, name), (*path, name))
    return found


def _leaves_of(value: Any, path: KeyPath) -> list[tuple[KeyPath, Any]]:
    if isinstance(value, BaseModel):
        return leaves(value, path)
    if isinstance(value, dict) and value:
        return [leaf for key, item in value.items() for leaf in _leaves_of(item, (*path, str(key)))]
    return [(path, value)]


def read_config(resolution: Resolution, training: TrainingSection) -> dict[str, Any]:
    """The model's config.json, wherever the plan keeps it. OSError or ValueError with the reason when it can't be read."""
    assert training.model is not None
    config = training.model.config
    if isinstance(config, dict):
        return config
    with open(resolution.absolute(config), "rb") as file:
        data = file.read(CONFIG_BYTES_MAX + 1)
    value = json.loads(data) if len(data) <= CONFIG_BYTES_MAX else None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value


def build_plan(resolution: Resolution, environments: dict[str, EnvironmentPlan], *, sha256: str) -> Plan:
    """The frozen plan, with the environment of each host that gets one. Only called when no rule found a fault."""
    file = resolution.file
    deadline = file.deadline
    return Plan(
        name=file.name, plan_sha256=sha256, directory=str(resolution.directory),
        deadline_at=deadline if isinstance(deadline, datetime) else None,
        deadline_seconds=None if isinstance(deadline, datetime) else float(deadline),
        reserve=ReserveTerms(
            minimum_seconds=float(file.reserve.minimum), factor=file.reserve.factor, margin_seconds=float(file.reserve.margin)),
        hosts=tuple(_host(resolution, name, environments.get(name)) for name in file.hosts),
        data=tuple(data_role(resolution, Split(split), section) for split, section in file.data.items()),
        candidates=tuple(_candidate(resolution, each) for each in resolution.candidates),
        parity=file.parity,
        selection=SelectionTerms(criterion=file.selection.criterion, minimum_improvement=file.selection.minimum_improvement),
        after_freeze=_after_freeze(file),
        notify=tuple(Notify(command=tuple(each.command), on=tuple(each.on)) for each in file.notify),
        restore_displaced=file.restore_displaced,
    )


def _host(resolution: Resolution, name: str, environment: EnvironmentPlan | None) -> HostPlan:
    section = resolution.file.hosts[name]
    is_here = section.transport == "local"
    identity, config = (None if text is None else str(resolution.absolute(text)) for text in (section.identity_file, section.ssh_config))
    return HostPlan(
        name=name, transport=section.transport, root=host_root(resolution, section),
        address=section.address, user=section.user, port=section.port, identity_file=identity, proxy_jump=section.proxy_jump, ssh_config=config,
        python=program_path(resolution, section.python) if is_here else section.python,
        agent_python=program_path(resolution, section.agent_python) if is_here else section.agent_python, environment=environment,
        capacity_bytes=None if section.capacity is None else int(section.capacity), floor_bytes=int(section.floor),
        data_from=DataFrom(**section.data_from.model_dump()) if section.data_from is not None else None,
        displace=tuple(_workload(name, each) for name, each in section.displace.items()),
    )


def _workload(name: str, section: DisplaceSection) -> Workload:
    restart = section.restart
    return Workload(
        name=name, unit=section.unit, is_user_unit=section.user_unit, pattern=section.process, uid=section.uid, count=section.count,
        restart=None if restart is None else Restart(
            command=tuple(restart.command or ()), working_directory=restart.working_directory, environment=tuple(restart.environment),
            output=restart.output,
        ),
        grace_seconds=float(section.grace), force=section.force, optional=section.optional,
    )


def host_root(resolution: Resolution, section: HostSection) -> str:
    """The root as the host knows it: only on this machine can it start at the plan."""
    return str(resolution.absolute(section.root)) if section.transport == "local" else os.path.normpath(section.root)


def program_path(resolution: Resolution, text: str | None) -> str | None:
    """A program by path starts at the plan; a bare name is looked up on the host."""
    return text if text is None or ("/" not in text and not text.startswith("~")) else str(resolution.absolute(text))


def data_role(resolution: Resolution, split: Split, section: DataSection) -> DataRole:
    """The files of a role. Token shards are named one by one from their index, so that no other split travels with them."""
    if section.corpus is not None:
        folder, include = resolution.absolute(section.corpus), CORPUS_FILES
    elif section.shards is None:
        folder, include = resolution.absolute(section.path or ""), tuple(section.include or ("*",))
    else:
        folder = resolution.absolute(section.shards)
        include = shard_files(folder, section.split or "")
    return DataRole(
        split=split, path=str(folder), include=include, shard_split=section.split, is_corpus=section.corpus is not None,
        tokens_per_document_max=section.tokens_per_document_max,
    )


def read_index(folder: Path) -> dict[str, Any]:
    """shards_index.json. OSError or ValueError with the reason when it can't be read as one."""
    data = (folder / "shards_index.json").read_bytes()
    if is_pointer(data, len(data)):
        raise ValueError(LFS_POINTER)
    value = json.loads(data)
    if not isinstance(value, dict) or not isinstance(value.get("shards"), list) or not all(isinstance(each, dict) for each in value["shards"]):
        raise ValueError("it holds no list of shards")
    return value


def shard_files(folder: Path, split: str) -> tuple[str, ...]:
    """The index, the tokenizer and the files of one split, as the index names them."""
    index = read_index(folder)
    names = ["shards_index.json", str(index.get("tokenizer", ""))]
    for shard in index["shards"]:
        if shard.get("split") == split:
            name = str(shard.get("name", ""))
            names += [name, f"{name}.json", name.removesuffix(".bin") + ".langs.u8"]
    return tuple(name for name in names if name and os.path.isfile(folder / name))


def _candidate(resolution: Resolution, candidate: ResolvedCandidate) -> CandidatePlan:
    section = candidate.section
    directory, cap = section.working_directory, section.memory_cap
    return CandidatePlan(
        name=candidate.name, host=section.host, task=_task(resolution, candidate), command=tuple(section.command) if section.command else None,
        environment=dict(section.environment), working_directory=None if directory is None else str(resolution.absolute(directory)),
        signal=SignalTarget(section.signal), memory_host_bytes=int(cap.host), memory_accelerator_bytes=int(cap.accelerator),
        memory_demand=CapGrade(cap.demand),
        stop=StopTerms(grace_floor_seconds=float(section.stop.grace_floor), grace_ceiling_seconds=float(section.stop.grace_ceiling)),
        restarts=RestartTerms(
            restarts_max=section.restarts.max, window_seconds=float(section.restarts.window), first_seconds=float(section.restarts.first),
            ceiling_seconds=float(section.restarts.ceiling)),
        stall=StallTerms(launch_seconds=float(section.stall.launch), floor_seconds=float(section.stall.floor), factor=section.stall.factor),
        on_reboot=OnReboot(section.on_reboot),
    )


def _task(resolution: Resolution, candidate: ResolvedCandidate) -> dict[str, Any] | None:
    """task.json of docs/ARCHITECTURE.md without `data`: its paths exist once the coordinator has staged them. Patience counts by the same
    improvement that the selection asks for."""
    training = candidate.section.training
    if training is None:
        return None
    checkpoint, validation = candidate.section.checkpoint, candidate.section.validation
    return {
        "schema": TASK_SCHEMA, "task": training.task, "model": {"config": candidate.config}, "window": training.window, "batch": training.batch,
        "micro_batch": training.micro_batch, "steps": training.steps, "seed": training.seed, "sampler": training.sampler,
        "optimizer": training.optimizer.model_dump(),
        "checkpoint": {"every_steps": checkpoint.every_steps, "every_seconds": float(checkpoint.every), "keep": checkpoint.keep},
        "validation": {**validation.model_dump(), "minimum_improvement": resolution.file.selection.minimum_improvement},
        "threads": training.threads, "device": training.device, "precision": training.precision, "log_every": training.log_every,
        **({"compile": True} if training.compile else {}),
        **({"pilot": {"steps": candidate.section.pilot.steps}} if candidate.section.pilot else {}),
        **({"proof": candidate.section.proof.model_dump()} if candidate.section.proof else {}),
    }


def _after_freeze(file: PlanFile) -> AfterFreeze:
    section = file.after_freeze
    cap = section.memory_cap
    return AfterFreeze(
        evaluate=tuple(Split(split) for split in section.evaluate), report=section.report, memory_host_bytes=int(cap.host),
        memory_accelerator_bytes=int(cap.accelerator), memory_demand=CapGrade(cap.demand),
        settings=section.training.model_dump(exclude_none=True),
    )


def listed_files(role: DataRole) -> list[Path]:
    """The files of a role that exist, sorted: those whose path below the folder, or whose name, matches `include`."""
    folder = Path(role.path)
    if role.shard_split is not None:
        return [folder / name for name in role.include]
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in found if any(path.relative_to(folder).match(pattern) for pattern in role.include)]

