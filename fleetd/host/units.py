"""Systemd units of others, as their manager tells of them and through their manager only: show, stop, start, and a kill where a plan says so.

Every call returns at once (`--no-block`): whoever asked looks again. A user's units are reached where that user lingers, since they would
end with the last login otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass

from fleetd.host import cgroups, scopes

CALL_SECONDS_MAX = 10.0
PROPERTIES = ("LoadState", "ActiveState", "SubState", "MainPID", "ControlGroup", "TimeoutStopUSec", "SendSIGKILL", "Result")
WORDS_MAX = 200
_SPAN = re.compile(r"(\d+)\s*(us|ms|s|min|h|d|w)\b")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


class UnitFault(Exception):
    """The manager can't be asked, or refuses, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSight:
    state: str
    """`active`, `inactive`, `failed`, `activating`, ...: systemd's ActiveState."""
    main_pid: int
    """0: it has no main process."""
    pids: tuple[int, ...]
    """Everything in its cgroup, as far as that can be seen."""
    killed_after_seconds: float | None
    result: str

    @property
    def is_up(self) -> bool:
        return self.state in ("active", "reloading", "activating")


def show(unit: str, *, is_user: bool) -> UnitSight:
    """What the manager says of the unit now. UnitFault when there is no such unit."""
    said = dict(line.partition("=")[::2] for line in _systemctl(is_user, "show", f"--property={','.join(PROPERTIES)}", "--", unit).splitlines())
    if said.get("LoadState") != "loaded":
        raise UnitFault(f"systemd calls {unit} {said.get('LoadState') or 'unknown'}")
    kills = said.get("SendSIGKILL", "yes") == "yes"
    return UnitSight(
        state=said.get("ActiveState", "unknown"), main_pid=int(said.get("MainPID") or 0), pids=_pids_in(said.get("ControlGroup", "")),
        killed_after_seconds=_seconds(said.get("TimeoutStopUSec", "")) if kills else None, result=said.get("Result", ""),
    )


def stop(unit: str, *, is_user: bool) -> None:
    _systemctl(is_user, "stop", "--no-block", "--", unit)


def start(unit: str, *, is_user: bool) -> None:
    _systemctl(is_user, "start", "--no-block", "--", unit)


def kill(unit: str, *, is_user: bool) -> None:
    """SIGKILL for everything in the unit: only where the plan says `force`."""
    _systemctl(is_user, "kill", "--signal=SIGKILL", "--", unit)


def _systemctl(is_user: bool, *arguments: str) -> str:
    if not scopes.SYSTEMD_RUNS.is_dir():
        raise UnitFault("systemd does not run here")
    options: tuple[str, ...] = ("--no-ask-password", "--no-pager")
    environment = dict(os.environ)
    if is_user:
        reached = scopes.user_manager()
        if isinstance(reached, str):
            raise UnitFault(reached)
        options, environment = (*options, "--user"), {**environment, **reached}
    try:
        done = subprocess.run(
            ["systemctl", *options, *arguments], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=CALL_SECONDS_MAX, check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise UnitFault(f"systemctl {arguments[0]}: {fault}") from fault
    if done.returncode != 0:
        words = " ".join(done.stderr.split())[:WORDS_MAX] or f"exit status {done.returncode}"
        raise UnitFault(f"systemctl {arguments[0]}: {words}")
    return done.stdout


def _pids_in(group: str) -> tuple[int, ...]:
    """The processes of a control group and of those below it, wherever its hierarchy is mounted."""
    if not group or group == "/":
        return ()
    found: set[int] = set()
    for place in cgroups.hierarchies(os.getpid()):
        if place is not None:
            found.update(cgroups.processes_in(cgroups.Group(tracker=f"{place.mount}{group}")))
    return tuple(sorted(found))


def _seconds(text: str) -> float | None:
    """`1min 30s` as systemctl writes a span; `infinity` is None."""
    parts = _SPAN.findall(text)
    return sum(int(number) * _SECONDS[unit] for number, unit in parts) if parts else None
