"""What can be seen of a plan's local hosts before anything is launched: is the root usable, is there room, do the programs exist.

Looks only: nothing is created, and no trainer is imported. The coordinator asks every host itself again when it launches.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from fleetd.campaign import CandidatePlan, HostPlan
from fleetd.environments import PLAIN_PYTHONS
from fleetd.model import CapPart
from fleetd.plan import LoadedPlan
from fleetd.plan_resolve import listed_files
from fleetd.plan_units import show_size
from fleetd.wire import decode
from policies.errors import ExplainedError, RequestRefused
from policies.facts import MIB, CapGrade
from policies.memory import admit

PYTHON_SECONDS_MAX = 30.0
PYTHON_OLDEST = (3, 10)
DISK_SLACK_BYTES = 256 * MIB
AGENT_MODULES = ("psutil",)
BUILD_MODULES = ("venv", "zlib")
TRAINER_MODULES = ("torch", "numpy", "safetensors", "transformers", "sentencepiece")
BYTES_PER_WEIGHT = 12
"""A checkpoint holds each weight and its two moments in fp32."""
EXTRA_CHECKPOINTS = 3
"""Kept besides the newest: the unchanged base, the best, and the one being written."""

LocalCaps = dict[str, dict[str, CapPart]]
"""By host, then by mechanism."""

_PROBE = (
    "import importlib.util as u, json, sys; "
    "print(json.dumps([list(sys.version_info[:2]), [m for m in sys.argv[1:] if u.find_spec(m) is None]]))"
)


def local_preflight(loaded: LoadedPlan) -> list[ExplainedError]:
    """Everything that would keep the plan's local hosts from doing it now; empty when nothing would."""
    faults: list[ExplainedError] = []
    for host in loaded.plan.hosts:
        if host.transport == "local":
            candidates = [each for each in loaded.plan.candidates if each.host in (host.name, "any")]
            checks = [_root(host), _disk(loaded, host, candidates), *_memory(host, candidates)]
            checks += [*_pythons(host, candidates), *_programs(host, candidates)]
            faults += [fault for fault in checks if fault is not None]
    return faults


def local_caps(loaded: LoadedPlan) -> LocalCaps:
    """By host of this machine: by what its caps could be held for this user, from here. A host that can't say is left out."""
    found: LocalCaps = {}
    for host in loaded.plan.hosts:
        if host.is_local:
            argv = [sys.executable, "-m", "fleetd.host.means", host.root]
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=PYTHON_SECONDS_MAX, check=True)
                found[host.name] = {name: decode(CapPart, part, name) for name, part in json.loads(done.stdout).items()}
            except (OSError, subprocess.SubprocessError, ValueError):
                continue
    return found


def cap_faults(loaded: LoadedPlan, caps: LocalCaps) -> list[ExplainedError]:
    """Demands for an enforced cap that no host of the plan could keep, as far as its hosts are on this machine."""
    plan = loaded.plan
    faults: list[ExplainedError] = []
    asking = [(each.name, each.host, each.memory_demand) for each in plan.candidates]
    asking += [("after_freeze", "any", plan.after_freeze.memory_demand)] if plan.after_freeze.evaluate else []
    for name, wanted, demand in asking:
        options = [host for host in plan.hosts if wanted in ("any", host.name)]
        parts = [caps[host.name]["cgroup"] for host in options if host.name in caps]
        if demand is CapGrade.ENFORCED and options and len(parts) == len(options) and all(part.grade is not demand for part in parts):
            what = f"memory_cap.demand is enforced, here it is {parts[0].grade}: {parts[0].means}"
            faults.append(_refused(options[0], f"the cap of {name} can't be enforced", what, "mend that, or set memory_cap.demand: sampled"))
    return faults


def _refused(host: HostPlan, title: str, what: str, fix: str) -> RequestRefused:
    return RequestRefused(title, where=f"host {host.name}", what=what, fix=fix)


def _existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _root(host: HostPlan) -> ExplainedError | None:
    root = Path(host.root)
    nearest = _existing(root)
    if not nearest.is_dir():
        return _refused(host, "the host's root can't be made", f"{nearest} is a file", "name another root in the plan")
    if not os.access(nearest, os.W_OK | os.X_OK):
        what = f"{nearest} is not writable for this user" + ("" if nearest == root else f", so {root} can't be made")
        return _refused(host, "the host's root is not writable", what, f"name another root, or: sudo install -d -o {os.getuid()} {root}")
    return None


def needed_disk_bytes(loaded: LoadedPlan, candidates: list[CandidatePlan]) -> tuple[int, int]:
    """(bytes of data to stage, bytes of checkpoints kept at once), the latter estimated from the models' sizes."""
    data_bytes = sum(path.stat().st_size for role in loaded.plan.data for path in listed_files(role))
    checkpoint_bytes = 0
    for candidate in candidates:
        if candidate.task is not None:
            weights = weight_count(candidate.task["model"]["config"])
            checkpoint_bytes += weights * BYTES_PER_WEIGHT * (candidate.task["checkpoint"]["keep"] + EXTRA_CHECKPOINTS)
    return data_bytes, checkpoint_bytes


def weight_count(config: dict[str, Any]) -> int:
    """Weights of a GPT-2 or Llama model, near enough for disk space: embeddings, attention and feed-forward, no norms or biases."""
    if config.get("model_type") == "gpt2":
        width, layers = int(config.get("n_embd", 768)), int(config.get("n_layer", 12))
        inner = int(config.get("n_inner") or 4 * width)
        tables = int(config.get("vocab_size", 50257)) + int(config.get("n_positions", 1024))
        return tables * width + layers * (4 * width**2 + 2 * width * inner)
    width, layers = int(config.get("hidden_size", 0)), int(config.get("num_hidden_layers", 0))
    heads = int(config.get("num_attention_heads", 1)) or 1
    kv_width = width * int(config.get("num_key_value_heads", heads)) // heads
    tables = 1 if config.get("tie_word_embeddings") else 2
    block = 2 * width**2 + 2 * width * kv_width + 3 * width * int(config.get("intermediate_size", 0))
    return tables * int(config.get("vocab_size", 0)) * width + layers * block


def _disk(loaded: LoadedPlan, host: HostPlan, candidates: list[CandidatePlan]) -> ExplainedError | None:
    try:
        free_bytes = shutil.disk_usage(_existing(Path(host.root))).free
    except OSError as fault:
        return _refused(host, "the host's disk can't be looked at", str(fault), "name another root in the plan")
    try:
        data_bytes, checkpoint_bytes = needed_disk_bytes(loaded, candidates)
    except (TypeError, ValueError, KeyError):
        return None  # a config of odd types: the trainer names the key
    needed_bytes = data_bytes + checkpoint_bytes + DISK_SLACK_BYTES
    if free_bytes >= needed_bytes:
        return None
    what = (
        f"data {show_size(data_bytes)} + checkpoints about {show_size(checkpoint_bytes)} + slack {show_size(DISK_SLACK_BYTES)} "
        f"= {show_size(needed_bytes)}, but {show_size(free_bytes)} are free under {host.root}"
    )
    return _refused(host, "the disk is too small for this plan", what, "free some space, or name a root on another disk")


def _memory(host: HostPlan, candidates: list[CandidatePlan]) -> list[ExplainedError]:
    memory = psutil.virtual_memory()
    if host.capacity_bytes is not None and host.capacity_bytes > memory.total:
        what = f"capacity is {show_size(host.capacity_bytes)}, but the machine has {show_size(memory.total)}"
        fix = f"set capacity of {host.name} to less than {show_size(memory.total)}"
        return [_refused(host, "the plan hands out more memory than there is", what, fix)]
    verdicts = [
        (each, admit(
            capacity_bytes=host.capacity_bytes or memory.total, floor_bytes=host.floor_bytes, available_bytes=memory.available, committed=(),
            asked_bytes=each.memory_host_bytes,
        ))
        for each in candidates
    ]
    faults: list[ExplainedError] = [
        _refused(host, f"{each.name} can never start here", verdict.text, "lower its memory_cap, or choose a larger host")
        for each, verdict in verdicts if not verdict.possible and each.host == host.name
    ]
    if verdicts and not faults and not any(verdict.admitted for _, verdict in verdicts):
        fix = "end other programs on this machine, or lower memory_cap"
        faults.append(_refused(host, "no candidate can start here now", verdicts[0][1].text, fix))
    return faults


def _pythons(host: HostPlan, candidates: list[CandidatePlan]) -> list[ExplainedError | None]:
    faults = [_python(host, "agent_python", host.agent_python or sys.executable, AGENT_MODULES)]
    if host.environment is not None:
        faults.append(_python(host, "environment.python", host.environment.python or sys.executable, BUILD_MODULES))
    elif any(each.task is not None for each in candidates):
        faults.append(_python(host, "python", host.python or sys.executable, TRAINER_MODULES))
    return faults


def _python(host: HostPlan, key: str, program: str, modules: tuple[str, ...]) -> ExplainedError | None:
    """Whether that Python runs, is new enough, and could import what is needed (found, not imported: torch takes seconds)."""
    title = f"{key} can't be used"
    fix = f"set {key} of host {host.name}, or leave it out: the coordinator's own Python is {sys.executable}"
    try:
        done = subprocess.run([program, "-c", _PROBE, *modules], capture_output=True, text=True, timeout=PYTHON_SECONDS_MAX, check=False)
        version, missing = json.loads(done.stdout)
    except OSError as fault:
        return _refused(host, title, f"{program}: {fault.strerror}", fix)
    except subprocess.TimeoutExpired:
        return _refused(host, title, f"{program} gave no answer in {PYTHON_SECONDS_MAX:.0f} s", fix)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
        return _refused(host, title, f"{program}: {lines[-1][:200]}", fix)
    if tuple(version) < PYTHON_OLDEST:
        return _refused(host, title, f"{program} is Python {version[0]}.{version[1]}, {PYTHON_OLDEST[0]}.{PYTHON_OLDEST[1]} is needed", fix)
    if missing:
        mend = f"{program} -m pip install {' '.join(missing)}"
        if modules == BUILD_MODULES:  # of the standard library: a distribution has split it off
            mend = f"sudo apt-get install python{version[0]}.{version[1]}-venv"
        return _refused(host, title, f"{program} has no {', '.join(missing)}", mend)
    return None


def _programs(host: HostPlan, candidates: list[CandidatePlan]) -> list[ExplainedError | None]:
    faults: list[ExplainedError | None] = []
    for each in candidates:
        if each.command is None or (host.environment is not None and each.command[0] in PLAIN_PYTHONS):
            continue  # our own trainer, or the environment's Python
        folder = each.working_directory
        if folder is not None and not Path(folder).is_dir():
            faults.append(_refused(host, f"{each.name} has no place to run", f"{folder} is no directory", "correct working_directory"))
        elif _program_of(each) is None:
            what, fix = f"{each.command[0]!r} is not found", "install it, or write its whole path"
            there = Path(folder or ".") / each.command[0]
            if "/" in each.command[0] and there.is_file():
                what, fix = f"{there} is not executable", f"chmod +x {shlex.quote(str(there))}, or name the program that runs it first"
            faults.append(_refused(host, f"the program of {each.name} is missing", what, fix))
    return faults


def _program_of(candidate: CandidatePlan) -> str | None:
    assert candidate.command is not None
    name, path = candidate.command[0], candidate.environment.get("PATH")
    if "/" in name and not os.path.isabs(name):
        return shutil.which(str(Path(candidate.working_directory or ".") / name))
    return shutil.which(name, path=path)
