"""`hosts.NAME.displace` of a plan: what a person may name there.

A unit needs no more than its name. A process needs whose it is and how it is started again: neither can be guessed.
"""

from __future__ import annotations

import re

from fleetd.plan_hosts import DisplaceSection
from fleetd.plan_resolve import Resolution
from fleetd.plan_types import NAME
from fleetd.plan_yaml import Path

OF_PROCESSES = ("uid", "count", "restart")


def check_displaced(resolution: Resolution) -> None:
    """Every fault of every workload."""
    for host_name, host in resolution.file.hosts.items():
        for name, section in host.displace.items():
            path: Path = ("hosts", host_name, "displace", name)
            if not NAME.fullmatch(name):
                resolution.tree.fault(path, f"{name!r} is no name", "use small letters, digits and -, beginning with a letter or digit")
            _check(resolution, path, section)


def _check(resolution: Resolution, path: Path, section: DisplaceSection) -> None:
    fault = resolution.tree.fault
    if (section.unit is None) == (section.process is None):
        both = "both a unit and a process are named" if section.unit else "neither a unit nor a process is named"
        fault(path, both, "name one: `unit: vllm.service`, or `process: PATTERN` with uid and restart")
        return
    if section.grace <= 0:
        fault((*path, "grace"), "it would have no time to end", "write a duration such as 60s")
    if section.unit is not None:
        for key in OF_PROCESSES:
            if key in section.model_fields_set:
                fault((*path, key), f"`{key}` is for a process; systemd knows how it starts {section.unit}", f"remove {key}")
        return
    _check_process(resolution, path, section)


def _check_process(resolution: Resolution, path: Path, section: DisplaceSection) -> None:
    fault = resolution.tree.fault
    if section.user_unit:
        fault((*path, "user_unit"), "`user_unit` is for a unit", "remove it")
    try:
        re.compile(section.process or "")
    except re.error as error:
        fault((*path, "process"), f"no regular expression: {error}", "write a part of its command line, with \\ before . * + ? ( ) [ ]")
    if not (section.process or "").strip():
        fault((*path, "process"), "it would match everything", "write a part of its command line")
    if section.uid is None:
        fault(path, "uid is missing: whose process it is", "add `uid:`, as `id -u USER` on the host says it")
    restart = section.restart
    if restart is None or restart.command is None:
        fault(path, "restart.command is missing: how it is started again", "add `restart: {command: [program, argument]}`")
        return
    for key in ("working_directory", "output"):
        value = getattr(restart, key)
        if value is not None and not value.startswith("/"):
            fault((*path, "restart", key), f"{value} is no whole path, and it is one on the host", "write it such as /srv/vllm")
