"""What the dead leave behind on a host, and how it is taken away again by whoever still lives.

    a killed writer       .NAME-PID-….tmp beside the record it was about to replace
    a killed agent        runs/.tmp-RUN-PID, half a run directory; displaced/CAMPAIGN/.NAME-PID-….tmp
    a killed shim         the cgroup of its attempt

The supervisor tidies its run when it starts and when an attempt is over; the agent tidies those that no supervisor watches any more.
Nothing that lives can lose anything by it: a temporary goes only when its writer is gone, and the kernel removes no cgroup that
holds a process.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil

from fleetd import logs
from fleetd.files import has_ended, sweep_temporaries
from fleetd.host import cgroups, rundir
from fleetd.paths import HostPaths, RunPaths

_UNSAFE_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_HALF_MADE = re.compile(r"\.tmp-.+-(\d+)")


def group_name(paths: RunPaths, attempt: int) -> str:
    """A fresh name for the cgroup of an attempt, by which `tidy_attempt` finds it even if its shim died before it had recorded it."""
    return f"{_group_prefix(paths, attempt)}{secrets.token_hex(2)}"


def tidy_attempt(paths: RunPaths, attempt: int, *, patient: bool = False) -> bool:
    """Remove the empty cgroups of an attempt that is over, and temporaries of its records. False when a cgroup is still in use.

    `patient`: nothing lives in it, so wait (bounded) until the kernel has let go of the last one.
    """
    try:
        record = rundir.read_attempt(paths, attempt)
    except (OSError, ValueError):
        record = None
    folders = {*cgroups.decode_group(record.cgroup if record is not None else None).folders, *_groups_named(_group_prefix(paths, attempt))}
    sweep_temporaries(paths.attempt(attempt).root)
    left = [folder for folder in sorted(folders) if not _remove_group(folder, patient=patient)]
    return not left


def tidy_run(paths: RunPaths) -> bool:
    """The same for every attempt whose exit is on record, and for the records of the run itself. False when something is left."""
    for folder in (paths.root, paths.orders):
        sweep_temporaries(folder)
    over = [number for number in range(1, rundir.newest_attempt(paths) + 1) if paths.attempt(number).exit.exists()]
    left = [number for number in over if not tidy_attempt(paths, number)]
    return not left


def tidy_root(paths: HostPaths) -> None:
    """Remove what killed agents left outside of the runs: half-made run directories, records of the root, cgroups of their probes."""
    sweep_temporaries(paths.root)
    for place in paths.root.glob("displaced/*"):
        sweep_temporaries(place)
    for folder in _groups_named(cgroups.PROBE_PREFIX):
        if _is_dead(folder.rpartition("-")[2]):
            _remove_group(folder)
    try:
        names = os.listdir(paths.runs)
    except OSError:
        return
    for name in names:
        maker = _HALF_MADE.fullmatch(name)
        if maker is not None and _is_dead(maker[1]):
            shutil.rmtree(paths.runs / name, ignore_errors=True)
            logs.changed("half_made_run_removed", name=name)


def _remove_group(folder: str, *, patient: bool = False) -> bool:
    if patient:
        return cgroups.remove(cgroups.Group(memory=folder))
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False  # something still lives in it: then its shim, or the next look, takes it away
    logs.changed("cgroup_removed", folder=folder)
    return True


def _group_prefix(paths: RunPaths, attempt: int) -> str:
    """Equal run ids may lie below two roots of one machine, so the place is part of the name."""
    place = hashlib.sha256(os.fsencode(paths.root.resolve())).hexdigest()[:6]
    return f"{_UNSAFE_IN_NAMES.sub('_', paths.root.name)}-{attempt:04d}-{place}-"


def _groups_named(prefix: str) -> list[str]:
    found: list[str] = []
    for place in cgroups.places():
        try:
            found += [entry.path for entry in os.scandir(place) if entry.name.startswith(cgroups.PREFIX + prefix)]
        except OSError:
            continue
    return found


def _is_dead(pid: str) -> bool:
    return pid.isdigit() and has_ended(pid)
