"""The environments that a plan asks for: which host gets which, and everything that is wrong with their locks.

A host's own keys go before those at the top of the plan; a host that names a `python` of its own has no environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fleetd.campaign import EnvironmentPlan
from fleetd.plan_hosts import EnvironmentSection
from fleetd.plan_lock import Lock, read_lock_file
from fleetd.plan_resolve import Resolution, program_path
from fleetd.plan_yaml import Path as KeyPath

TRAINER_PACKAGES = ("numpy", "safetensors", "torch", "transformers")
"""What fleetd's own trainer imports, whatever it trains."""
AUTO, REGISTRY = "auto", "registry"


def environment_plan(resolution: Resolution, name: str) -> EnvironmentPlan | None:
    """The environment of one host, its lock read. Only called when `check_environments` found no fault."""
    section = environment_of(resolution, name)
    if section is None:
        return None
    assert section.lock is not None, "a checked environment has a lock"
    path = resolution.absolute(section.lock)
    is_here = resolution.file.hosts[name].transport == "local"
    return EnvironmentPlan(
        lock=str(path), lock_sha256=read_lock_file(path)[0].sha256,
        wheels=section.wheels if section.wheels in (AUTO, REGISTRY) else str(resolution.absolute(section.wheels)),
        python=program_path(resolution, section.python) if is_here else section.python,
    )


def environment_of(resolution: Resolution, name: str) -> EnvironmentSection | None:
    """What the plan says of a host's environment, its own keys before those of the whole plan."""
    host, common = resolution.file.hosts[name], resolution.file.environment
    if host.environment is None:
        return common if host.python is None else None
    below: dict[str, Any] = common.model_dump(exclude_unset=True) if common is not None else {}
    return EnvironmentSection.model_validate({**below, **host.environment.model_dump(exclude_unset=True)})


def check_environments(resolution: Resolution) -> None:
    locks: dict[Path, Lock | None] = {}
    if not resolution.file.hosts and resolution.file.environment is not None:
        _check(resolution, resolution.file.environment, None, locks)
    for name, host in resolution.file.hosts.items():
        if host.python is not None and host.environment is not None:
            fix = "keep one: `python` for an interpreter that is there, `environment` for one that is to be built"
            resolution.tree.fault(("hosts", name, "python"), "both `python` and `environment` are set", fix)
        section = environment_of(resolution, name)
        if section is not None:
            lock = _check(resolution, section, name, locks)
            _check_packages(resolution, name, lock)


def _where(resolution: Resolution, host: str | None, key: str) -> KeyPath:
    """Where the key of a host's environment is written, or its environment as a whole."""
    own = ("hosts", host, "environment") if host is not None else ("environment",)
    for path in (own, ("environment",)):
        if (*path, key) in resolution.tree.lines:
            return (*path, key)
    return own if own in resolution.tree.lines else ("environment",)


def _check(resolution: Resolution, section: EnvironmentSection, host: str | None, locks: dict[Path, Lock | None]) -> Lock | None:
    """Add what is wrong with one environment; its lock where that can be read."""
    tree = resolution.tree
    is_ssh = host is not None and resolution.file.hosts[host].transport == "ssh"
    if is_ssh and section.python is not None and "/" in section.python and not section.python.startswith("/"):
        what = f"{section.python} is no whole path, and over ssh there is no plan to start at"
        tree.fault(_where(resolution, host, "python"), what, "write /path/to/python or a bare name")
    if section.wheels not in (AUTO, REGISTRY):
        folder = resolution.absolute(section.wheels)
        if not folder.is_dir() or not any(folder.glob("*.whl")):
            what = f"{folder} holds no wheel" if folder.is_dir() else f"{folder} is no directory"
            tree.fault(_where(resolution, host, "wheels"), what, "name a directory of *.whl files, relative to the plan, or write auto or registry")
    if section.lock is None:
        if not _is_spoiled(resolution, host):
            tree.fault(_where(resolution, host, "lock"), "environment has no lock", "add lock: requirements.lock, such as pip freeze --all writes")
        return None
    path = resolution.absolute(section.lock)
    if path not in locks:
        locks[path] = _read(resolution, path, _where(resolution, host, "lock"))
    return locks[path]


def _read(resolution: Resolution, path: Path, where: KeyPath) -> Lock | None:
    try:
        lock, _ = read_lock_file(path)
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        resolution.tree.fault(where, f"{path} can't be read: {reason}", "name a requirements file, relative to the plan")
        return None
    for each in lock.faults:
        resolution.tree.fault(where, f"{path.name}:{each.line}: {each.what}", each.fix)
    return lock


def _check_packages(resolution: Resolution, host: str, lock: Lock | None) -> None:
    """A lock that the trainer can't run with is found here, not when it has been built for minutes."""
    trains = [each for each in resolution.candidates if each.section.training and not each.section.command and each.section.host in ("any", host)]
    if lock is None or lock.faults or not trains:
        return
    missing = [name for name in TRAINER_PACKAGES if name not in {pin.name for pin in lock.pins}]
    if missing:
        what = f"the lock has no {', '.join(missing)}, and fleetd's own trainer needs them"
        resolution.tree.fault(_where(resolution, host, "lock"), what, "add them with their versions")


def _is_spoiled(resolution: Resolution, host: str | None) -> bool:
    """Whether an environment's lock is there with a wrong value, which is a fault of its own."""
    raw = resolution.tree.value
    own = (raw["hosts"].get(host) or {}) if host is not None else {}
    parts = [raw.get("environment"), own.get("environment")]
    return any(isinstance(part, dict) and "lock" in part for part in parts) or any(
        not isinstance(part, dict) and part is not None for part in parts)
