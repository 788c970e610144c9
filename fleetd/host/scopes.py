"""The kernel's part of a cap where no cgroup may be made by hand: a transient systemd scope that holds only the trainer's tree.

On a machine with cgroup v2 an ordinary user, or root inside a unit that delegates nothing, can't make a limited group. The service
manager can: the trainer-to-be executes `systemd-run --scope`, which puts its own process into a fresh scope and then executes the gate
(fleetd.host.birth) in it; nobody's pid changes. What systemd-run says proves nothing: the scope is found in /proc/PID/cgroup under its
own name, and its limit is read back there.

A user's manager ends with the user's last login and takes its scopes along, so it is asked only where lingering is enabled.
"""

from __future__ import annotations

import os
import pwd
import shutil
from dataclasses import dataclass
from pathlib import Path

from fleetd.host import cgroups
from fleetd.model import CapPart
from policies.facts import CapGrade
from policies.memory import gib

SYSTEMD_RUNS = Path("/run/systemd/system")
LINGERING = Path("/var/lib/systemd/linger")
SCOPE_SECONDS_MAX = 45.0
"""A manager that has not made a scope by then is given up, and the trainer starts without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """A scope to be made. `command` is executed by the process that wants to live in it, before its own program."""

    unit: str
    manager: str
    command: tuple[str, ...]
    environment: dict[str, str]
    limit_bytes: int


def plan(name: str, limit_bytes: int) -> Scope | str:
    """The scope that can be asked for here, or why none can be."""
    if not SYSTEMD_RUNS.is_dir():
        return "systemd does not run here"
    program = shutil.which("systemd-run")
    if program is None:
        return "there is no systemd-run"
    is_root = os.geteuid() == 0
    environment: dict[str, str] = {}
    if not is_root:
        reached = user_manager()
        if isinstance(reached, str):
            return reached
        environment = reached
    unit = f"{cgroups.PREFIX}{name}.scope"
    command = (
        program, *(() if is_root else ("--user",)), "--scope", "--quiet", "--collect", f"--unit={unit}", f"--property=MemoryMax={limit_bytes}",
        "--property=MemorySwapMax=0", "--",
    )
    manager = "systemd scope" if is_root else "systemd user scope"
    return Scope(unit=unit, manager=manager, command=command, environment=environment, limit_bytes=limit_bytes)


def user_manager() -> dict[str, str] | str:
    """The environment in which this user's service manager is reached, or why nothing can be left to it."""
    user = _user_name()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if not os.path.exists(f"{runtime}/systemd/private") and not os.path.exists(f"{runtime}/bus"):
        return f"no systemd manager of user {user} is running; fix: loginctl enable-linger {user}"
    if not (LINGERING / user).exists():
        return f"a scope of user {user} would end with the last login; fix: loginctl enable-linger {user}"
    return {"XDG_RUNTIME_DIR": runtime}


def found(scope: Scope, pid: int) -> tuple[cgroups.Group, CapPart]:
    """The group in which `pid` really lives, and whether its limit is the one asked for. Another group than the scope is never ours."""
    try:
        places = [each for each in cgroups.hierarchies(pid) if each is not None and os.path.basename(each.own) == scope.unit]
    except OSError as fault:
        return cgroups.Group(), _absent(scope, f"the cgroup of pid {pid} can't be seen: {fault.strerror}")
    if not places:
        return cgroups.Group(), _absent(scope, f"pid {pid} is not in {scope.unit}")
    tracker = next((each.folder for each in places if each.kind == "v2"), None)
    whys = []
    for place in places:
        try:
            set_bytes = cgroups.limit_read_back(place, place.folder, scope.limit_bytes)
        except OSError as fault:
            whys.append(str(fault.strerror or fault))
            continue
        cgroups.end_as_a_whole(place.folder)
        group = cgroups.Group(memory=place.folder, tracker=tracker if tracker != place.folder else None)
        return group, CapPart(grade=CapGrade.ENFORCED, means=f"{scope.manager} {place.own}, limit read back {gib(set_bytes)}")
    return cgroups.Group(tracker=tracker), _absent(scope, "; ".join(whys))


def _absent(scope: Scope, why: str) -> CapPart:
    return CapPart(grade=CapGrade.ABSENT, means=f"{scope.manager}: {why}")


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
