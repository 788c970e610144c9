"""What a plan must satisfy beyond types and ranges: names, deadlines, memory, and what each candidate needs.

Every rule adds faults to the tree and goes on, so that a person sees all of them at once.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from fleetd.plan_data import check_data
from fleetd.plan_displace import check_displaced
from fleetd.plan_hosts import HostSection
from fleetd.plan_model import PilotSection, ProofSection
from fleetd.plan_resolve import Resolution, ResolvedCandidate, host_root, read_config
from fleetd.plan_types import NAME
from fleetd.plan_units import show_duration, show_moment, write_size

MODEL_TYPES = ("llama", "gpt2")
NEEDED = {"name": "the campaign", "deadline": "when everything must be done", "hosts": "the machines", "candidates": "the trainings"}
NAMES_TAKEN = {"all", "any"}
PROOF_KEEP_MIN = 2
SSH_KEYS = ("address", "user", "port", "identity_file", "proxy_jump", "ssh_config", "data_from")
NAME_RULE = "use small letters, digits and -, at most 41, beginning with a letter or digit"


def check_rules(resolution: Resolution, now: datetime) -> None:
    _check_names(resolution)
    _check_deadline(resolution, now)
    _check_hosts(resolution)
    check_displaced(resolution)
    check_data(resolution)
    for candidate in resolution.candidates:
        _check_kind(candidate)
        _check_host(resolution, candidate)
        _check_bounds(candidate)
        if candidate.section.training and not candidate.section.command:
            _check_training(resolution, candidate)
    _check_after_freeze(resolution)


def _check_names(resolution: Resolution) -> None:
    tree, raw = resolution.tree, resolution.tree.value
    for key, what in NEEDED.items():
        if not raw.get(key) and raw.get(key) != 0:
            tree.fault((key,) if key in raw else (), f"{key} is missing: {what}", f"add `{key}:`; see examples/manpages/plan.yaml")
    named: Iterable[tuple[tuple[str, ...], Any]] = [(("name",), raw.get("name"))] if isinstance(raw.get("name"), str) else []
    groups = [(key, name) for key in ("hosts", "candidates") if isinstance(raw.get(key), dict) for name in raw[key]]
    for path, name in [*named, *(((key, name), name) for key, name in groups)]:
        if name and not NAME.fullmatch(name):
            tree.fault(path, f"{name!r} is no name", NAME_RULE)
        if name in NAMES_TAKEN:
            tree.fault(path, f"{name!r} already means something to fleetd", "choose another name")


def _check_deadline(resolution: Resolution, now: datetime) -> None:
    deadline, reserve = resolution.file.deadline, resolution.file.reserve
    if deadline is None:
        return
    if isinstance(deadline, datetime):
        left = (deadline - now).total_seconds()
        if left <= 0:
            resolution.tree.fault(
                ("deadline",), f"{show_moment(deadline)} is {show_duration(-left)} ago",
                "choose a later moment, or a duration from launch such as 12h"
            )
            return
    else:
        left = float(deadline)
    least = max(float(reserve.minimum), float(reserve.margin))
    if left <= least:
        sum_text = f"deadline {show_duration(left)} ahead − reserve {show_duration(least)} = {show_duration(left - least)} for training"
        origin = ("deadline",) if "reserve" not in resolution.tree.value else ("reserve",)
        resolution.tree.fault(origin, sum_text, "move the deadline, or set a smaller reserve: {minimum: 3m, margin: 30s}")


def cutoff_if_launched(resolution_deadline: datetime | float, reserve_seconds: float, now: datetime) -> tuple[datetime, datetime]:
    """(training cutoff, final deadline) of a launch at `now`, before any speed is measured."""
    final = resolution_deadline if isinstance(resolution_deadline, datetime) else now + timedelta(seconds=resolution_deadline)
    return final - timedelta(seconds=reserve_seconds), final


def _check_hosts(resolution: Resolution) -> None:
    places: dict[tuple[str, str, int, str], str] = {}
    for name, host in resolution.file.hosts.items():
        path = ("hosts", name)
        _check_transport(resolution, name, host)
        _check_neighbour(resolution, name)
        if not host.root:
            if "root" not in (resolution.tree.value["hosts"].get(name) or {}):
                resolution.tree.fault(path, "root is missing: the directory for releases, data and runs", "add `root: ~/fleetd-host`")
            continue
        root = host_root(resolution, host)
        place = (host.transport, host.address or name, host.port or 0, root) if host.transport == "ssh" else (host.transport, "", 0, root)
        if place in places:
            resolution.tree.fault((*path, "root"), f"{root} is also the root of {places[place]!r}", "give each host a root of its own")
        places[place] = name
        if host.capacity is not None and host.floor >= host.capacity:
            sum_text = f"capacity {write_size(host.capacity)} − floor {write_size(host.floor)} leaves nothing for runs"
            resolution.tree.fault((*path, "floor"), sum_text, "lower the floor or raise the capacity")


def _check_transport(resolution: Resolution, name: str, host: HostSection) -> None:
    """Over SSH, paths are the host's own; on this machine, nothing of SSH has a meaning."""
    tree, path = resolution.tree, ("hosts", name)
    if host.transport == "local":
        for key in SSH_KEYS:
            if getattr(host, key) is not None:
                tree.fault((*path, key), f"`{key}` is for `transport: ssh`", f"add `transport: ssh` to {name}, or remove {key}")
        return
    if host.root and not host.root.startswith("/"):
        tree.fault((*path, "root"), f"{host.root} is no whole path, and over ssh there is no plan to start at", "write it such as /srv/fleetd")
    for key in ("python", "agent_python"):
        program = getattr(host, key)
        if program is not None and "/" in program and not program.startswith("/"):
            tree.fault((*path, key), f"{program} is no whole path, and over ssh there is no plan to start at", "write /path/to/python or a bare name")


def _check_neighbour(resolution: Resolution, name: str) -> None:
    """A host takes its data from another one of the plan, and at the end of that chain there is one which takes it from the coordinator."""
    hosts, path = resolution.file.hosts, ("hosts", name, "data_from")
    data_from = hosts[name].data_from
    if data_from is None or hosts[name].transport == "local":
        return
    if not data_from.host:
        resolution.tree.fault(path, "`host` is missing: from which host of this plan", f"write `data_from: {next(each for each in hosts)}`")
        return
    if data_from.host not in hosts:
        close = difflib.get_close_matches(data_from.host, [each for each in hosts if each != name], n=1)
        fix = f"did you mean {close[0]!r}?" if close else "name another host of this plan"
        resolution.tree.fault(path, f"there is no host {data_from.host!r} in this plan", fix)
    elif hosts[data_from.host].transport == "local":
        resolution.tree.fault(path, f"{data_from.host} is this machine, from which data comes anyway", "remove data_from")
    elif name in (chain := _neighbours(resolution, name)):
        resolution.tree.fault(path, f"the hosts wait for each other: {' → '.join([name, *chain])}", "leave one of them without data_from")
    if data_from.identity_file and not data_from.identity_file.startswith(("/", "~")):
        resolution.tree.fault((*path, "identity_file"), f"{data_from.identity_file} is a file on {name}", "write its whole path there")


def _neighbours(resolution: Resolution, name: str) -> list[str]:
    """From whom `name` takes its data, from whom that one does, and so on, up to the first that comes again."""
    chain: list[str] = []
    while (section := resolution.file.hosts.get(name)) is not None and section.data_from is not None and name not in chain[:-1]:
        name = section.data_from.host
        chain.append(name)
    return chain


def _check_kind(candidate: ResolvedCandidate) -> None:
    section, tree, path = candidate.section, candidate.tree, ("candidates", candidate.name)
    if section.training and section.command:
        tree.fault(path, "both `training` and `command` are set", "keep one: `training` for fleetd's own trainer, `command` for a program")
    if not section.training and not section.command and not _written(candidate, "training", "command"):
        tree.fault(path, "neither `training` nor `command` is set", "add `training:` (fleetd's own trainer) or `command: [program, argument]`")
    own = tree.value["candidates"].get(candidate.name) or {}
    if section.command and not section.training:
        for key in ("checkpoint", "validation", "pilot", "proof"):
            if key in own:
                tree.fault(
                    (*path, key), f"`{key}` is a setting of fleetd's own trainer, and this candidate is a command",
                    "remove it, and give the command its own"
                )
    if section.training and not section.command and section.working_directory is not None:
        tree.fault(candidate.where(("working_directory",)), "working_directory is for a command", "remove it: the trainer works in its run directory")


def _written(candidate: ResolvedCandidate, *keys: str) -> bool:
    """Whether the file holds one of these keys for the candidate, even with a wrong value, which is a fault of its own."""
    parts = (candidate.tree.value["candidates"].get(candidate.name), candidate.tree.value.get("defaults"))
    return any(key in part for part in parts if isinstance(part, dict) for key in keys)


def _check_host(resolution: Resolution, candidate: ResolvedCandidate) -> None:
    wanted, hosts = candidate.section.host, resolution.file.hosts
    if wanted != "any" and wanted not in resolution.tree.value.get("hosts", {}):
        close = difflib.get_close_matches(wanted, list(hosts), n=1)
        fix = f"did you mean {close[0]!r}?" if close else f"use one of {', '.join([*hosts, 'any'])}"
        resolution.tree.fault(candidate.where(("host",)), f"there is no host {wanted!r} in this plan", fix)
        return
    possible = hosts if wanted == "any" else {name: host for name, host in hosts.items() if name == wanted}
    refusals = [_too_large(name, host, candidate) for name, host in possible.items()]
    if refusals and all(refusals):
        what = "; ".join(text for text in refusals if text)
        resolution.tree.fault(candidate.where(("memory_cap", "host")), what, "lower memory_cap, or choose a larger host")


def _too_large(name: str, host: HostSection, candidate: ResolvedCandidate) -> str | None:
    cap = candidate.section.memory_cap.host
    if host.capacity is None or cap + host.floor <= host.capacity:
        return None
    total = cap + host.floor
    over = f"{write_size(total - host.capacity)} more than {name} has ({write_size(host.capacity)})"
    return f"cap {write_size(cap)} + floor {write_size(host.floor)} = {write_size(total)}, {over}"


def _check_bounds(candidate: ResolvedCandidate) -> None:
    section = candidate.section
    for group, low, high in (("restarts", "first", "ceiling"), ("stop", "grace_floor", "grace_ceiling")):
        least, most = getattr(getattr(section, group), low), getattr(getattr(section, group), high)
        if least > most:
            candidate.tree.fault(
                candidate.where((group, low)), f"{low} {show_duration(least)} is longer than {high} {show_duration(most)}",
                f"lower {low} or raise {high}"
            )
    for path in (("restarts", "window"), ("checkpoint", "every"), ("stall", "launch"), ("stall", "floor"), ("stop", "grace_ceiling")):
        if getattr(getattr(section, path[0]), path[1]) <= 0 and candidate.origin(path):
            candidate.tree.fault(candidate.where(path), "must be longer than nothing", "write a duration such as 15m")
    if section.memory_cap.host <= 0:
        candidate.tree.fault(candidate.where(("memory_cap", "host")), "a cap of 0 bytes lets nothing run", "write a size such as 16GiB")


def _check_training(resolution: Resolution, candidate: ResolvedCandidate) -> None:
    training = candidate.section.training
    assert training is not None
    tree, where = candidate.tree, candidate.where
    missing = [key for key in ("model", "window", "batch", "steps") if getattr(training, key) is None and not _given(candidate, ("training", key))]
    missing += ["optimizer.lr"] if training.optimizer.lr is None and not _given(candidate, ("training", "optimizer", "lr")) else []
    if missing:
        tree.fault(("candidates", candidate.name), f"training needs {', '.join(missing)}", "add them to the candidate or under defaults.training")
    if training.batch and training.micro_batch and training.batch % training.micro_batch:
        tree.fault(
            where(("training", "micro_batch")), f"micro_batch {training.micro_batch} does not divide batch {training.batch}",
            "choose a divisor of the batch"
        )
    warmup = training.optimizer.warmup
    if training.steps and warmup >= training.steps:
        tree.fault(
            where(("training", "optimizer", "warmup")), f"warmup {warmup} leaves none of {training.steps} steps", "lower warmup or raise steps"
        )
    _check_steps_of(candidate, "pilot", candidate.section.pilot)
    _check_steps_of(candidate, "proof", candidate.section.proof)
    if candidate.section.proof is not None and candidate.section.checkpoint.keep < PROOF_KEEP_MIN:
        what = "a proof starts from the checkpoint before the last one, and only one is kept"
        tree.fault(candidate.where(("checkpoint", "keep")), what, f"set checkpoint.keep to {PROOF_KEEP_MIN} or more, or leave proof out")
    _check_sampler(resolution, candidate)
    for role in ("train", "validation"):
        if role not in (resolution.tree.value.get("data") or {}):
            tree.fault(
                ("data",) if "data" in tree.value else (), f"training needs a data role {role!r}",
                f"add `{role}: {{shards: data, split: {role[:3] if role == 'validation' else role}}}` under data"
            )
    if training.model is not None and not _spoiled(candidate, ("training", "model")):
        _check_model(resolution, candidate)


def _check_steps_of(candidate: ResolvedCandidate, key: str, section: PilotSection | ProofSection | None) -> None:
    """A pilot, or a proof, has some steps of the training, and not all of them."""
    training = candidate.section.training
    if section is None or training is None:
        return
    if section.steps is None:
        if not _spoiled(candidate, (key,)):
            candidate.tree.fault(candidate.where((key,)), f"{key} has no steps", f"write {key}: {{steps: 20}}")
    elif training.steps and section.steps >= training.steps:
        what = f"a {key} of {section.steps} steps leaves none of {training.steps} steps"
        candidate.tree.fault(candidate.where((key, "steps")), what, f"lower {key}.steps, or leave {key} out")


def _check_sampler(resolution: Resolution, candidate: ResolvedCandidate) -> None:
    train = resolution.file.data.get("train")
    if candidate.section.training and candidate.section.training.sampler == "zxell" and train is not None and train.shards is None:
        what = "sampler zxell draws from token shards, and the train data is none"
        fix = "use sampler: permutation, or data.train: {shards: DIRECTORY, split: train}"
        candidate.tree.fault(candidate.where(("training", "sampler")), what, fix)


def _check_model(resolution: Resolution, candidate: ResolvedCandidate) -> None:
    training, tree = candidate.section.training, candidate.tree
    assert training is not None and training.model is not None
    path = candidate.where(("training", "model", "config"))
    if not training.model.config:
        tree.fault(path, "model has no config", "write config: model/config.json, or the keys of one")
        return
    try:
        config = candidate.config = read_config(resolution, training)
    except (OSError, ValueError, RecursionError) as fault:
        reason = getattr(fault, "strerror", None) or (f"not JSON: {fault}" if isinstance(fault, json.JSONDecodeError) else str(fault))
        tree.fault(
            path, f"{resolution.absolute(training.model.config)} can't be read: {reason}", "name a Transformers config.json, relative to the plan"
        )
        return
    if config.get("model_type") not in MODEL_TYPES:
        tree.fault(path, f"model_type is {config.get('model_type')!r}", f"use one of {', '.join(MODEL_TYPES)}")
    longest = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(longest, int) and training.window and training.window > longest:
        tree.fault(
            candidate.where(("training", "window")), f"window {training.window} is longer than the model's {longest} positions",
            "shorten the window, or enlarge max_position_embeddings"
        )


def _given(candidate: ResolvedCandidate, path: tuple[str, ...]) -> bool:
    return candidate.origin(path) is not None


def _spoiled(candidate: ResolvedCandidate, path: tuple[str, ...]) -> bool:
    """Whether something below this key is already a fault."""
    prefixes = tuple(".".join((*start, *path)) for start in (("candidates", candidate.name), ("defaults",)))
    return any(fault.path.startswith(prefixes) for fault in candidate.tree.faults)


def _check_after_freeze(resolution: Resolution) -> None:
    wanted = resolution.file.after_freeze.evaluate
    for index, split in enumerate(wanted):
        if split not in (resolution.tree.value.get("data") or {}):
            resolution.tree.fault(
                ("after_freeze", "evaluate"), f"{split} is to be judged, but `data` has no {split}",
                f"add `{split}: {{shards: data, split: {split}}}` under data, or drop it here"
            )
        if split in wanted[:index]:
            resolution.tree.fault(("after_freeze", "evaluate"), f"{split} stands twice: a reserved split is opened once", "list each split once")
