"""What runs on this host of the work that a plan names under `displace`: a unit by its manager, processes by their command line. Looks only.

Our own programs carry the pattern in their argv and never match: this process and those above it, and whatever was started through the
door of a release. A process below a matching one belongs to it.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path

import psutil

from fleetd import clock
from fleetd.host import devices, meters, units
from fleetd.host.processes import identity_of, open_process, read_file
from fleetd.host.tree import Member, all_pids
from policies.facts import ENV_RUN_DIR, ProcessIdentity
from policies.workloads import FoundProcess, Workload, WorkloadSight

ENVIRON_BYTES_MAX = 256 * 1024
DOOR = "fleetd/host/__main__.py"
FOUND_MAX = 64
"""More matches than this are counted and not described: the pattern is wrong."""


def find(root: Path, workload: Workload) -> WorkloadSight:
    """Everything that fits the workload's description now."""
    if workload.unit is not None:
        return _find_unit(root, workload, workload.unit)
    try:
        leaders = matching(workload)
    except re.error as fault:
        return WorkloadSight(name=workload.name, agent_uid=os.geteuid(), fault=f"the pattern is no regular expression: {fault}")
    found = tuple(_found(root, workload, each, below(each.pid)) for each in leaders[:FOUND_MAX])
    return WorkloadSight(name=workload.name, agent_uid=os.geteuid(), processes=found)


def matching(workload: Workload) -> tuple[ProcessIdentity, ...]:
    """The living processes whose command line and user fit, without those below another one that does."""
    assert workload.pattern is not None
    wanted, never = re.compile(workload.pattern), _ourselves()
    found: dict[int, ProcessIdentity] = {}
    for pid in sorted(all_pids() - never):
        words = _words_of(pid)
        if words is None or not wanted.search(" ".join(words)) or any(word.endswith(DOOR) for word in words):
            continue
        identity = identity_or_none(pid)
        if identity is not None and identity.uid == workload.uid and wanted.search(" ".join(identity.argv)):
            found[pid] = identity
    return tuple(identity for pid, identity in found.items() if not found.keys() & _above(pid))


def below(pid: int) -> tuple[ProcessIdentity, ...]:
    """The identities of every living process below this one."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return ()
    return tuple(identity for each in children if (identity := identity_or_none(each.pid)) is not None)


def identity_or_none(pid: int) -> ProcessIdentity | None:
    try:
        return identity_of(pid)
    except OSError:  # it has ended, or does not show itself
        return None


def topmost(pids: set[int]) -> tuple[int, ...]:
    """Those of these processes that are below none of the others."""
    return tuple(sorted(pid for pid in pids if not pids & _above(pid)))


def variables_of(pid: int) -> dict[str, str] | None:
    """The environment that the process was started with; None when it can't be read."""
    try:
        folder = open_process(pid)
    except OSError:
        return None
    try:
        entries = read_file(folder, "environ", ENVIRON_BYTES_MAX).split(b"\0")
    except OSError:
        return None
    finally:
        os.close(folder)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if entry)
    return {name: value for name, _, value in pairs}


def _find_unit(root: Path, workload: Workload, unit: str) -> WorkloadSight:
    uid = os.geteuid()
    try:
        seen = units.show(unit, is_user=workload.is_user_unit)
    except units.UnitFault as fault:
        return WorkloadSight(name=workload.name, agent_uid=uid, fault=str(fault))
    if not seen.is_up:
        return WorkloadSight(name=workload.name, agent_uid=uid, unit_state=seen.state)
    identity = identity_or_none(seen.main_pid) if seen.main_pid else None
    if identity is None:
        why = "it has no main process whose identity could be kept: name its process instead"
        return WorkloadSight(name=workload.name, agent_uid=uid, unit_state=seen.state, fault=why)
    others = {pid: found for pid in seen.pids if pid != identity.pid and (found := identity_or_none(pid)) is not None}
    others.update({each.pid: each for each in below(identity.pid)})
    return WorkloadSight(
        name=workload.name, agent_uid=uid, unit_state=seen.state, killed_after_seconds=seen.killed_after_seconds,
        processes=(_found(root, workload, identity, tuple(others.values())),),
    )


def _found(root: Path, workload: Workload, identity: ProcessIdentity, members: tuple[ProcessIdentity, ...]) -> FoundProcess:
    moment = clock.read()
    age_seconds = moment.boottime_seconds - identity.start_ticks / os.sysconf("SC_CLK_TCK")
    everybody = (identity, *members)
    memory = meters.tree_memory(tuple(Member(identity=each, proofs=("descent",)) for each in everybody))
    variables = variables_of(identity.pid)
    asked = workload.restart.environment if workload.restart is not None else ()
    return FoundProcess(
        identity=identity, started_at=moment.now - timedelta(seconds=age_seconds), members=members, host_bytes=memory.host_bytes,
        accelerator_bytes=devices.bytes_of((each.pid for each in everybody), devices.look()).known, working_directory=_folder_of(identity.pid),
        unset=tuple(name for name in asked if variables is not None and name not in variables),
        is_ours=variables is not None and variables.get(ENV_RUN_DIR, "").startswith(f"{root}/"),
    )


def _words_of(pid: int) -> list[str] | None:
    try:
        folder = open_process(pid)
    except OSError:
        return None
    try:
        data = read_file(folder, "cmdline")
    except OSError:
        return None
    finally:
        os.close(folder)
    return os.fsdecode(data).removesuffix("\0").split("\0") if data else None


def _ourselves() -> frozenset[int]:
    return frozenset({os.getpid(), *_above(os.getpid())})


def _above(pid: int) -> frozenset[int]:
    try:
        return frozenset(each.pid for each in psutil.Process(pid).parents())
    except psutil.Error:
        return frozenset()


def _folder_of(pid: int) -> str | None:
    try:
        return os.fsencode(os.readlink(f"/proc/{pid}/cwd")).decode("utf-8", "backslashreplace")
    except OSError:
        return None
