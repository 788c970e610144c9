"""What a campaign left: the numbers that must equal its undisturbed twin's, and everything that must not be there any more."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG
from typing import Any

from live_fleet import Fleet
from zoo import animals

from fleetd.host import cgroups, tidy
from fleetd.host.rundir import newest_attempt
from fleetd.paths import RunPaths

TEMPORARY = re.compile(r"^\.tmp-|^\.trash-|\.tmp$|\.tmp-\d+$")
LEAVE_SECONDS_MAX = 90.0


def trainings(host_root: Path, kind: str = "train") -> dict[str, Path]:
    """Run directories by candidate."""
    orders = {path.parent: json.loads(path.read_text(encoding="utf-8")) for path in host_root.glob("runs/*/run.json")}
    return {order["candidate"]: folder for folder, order in orders.items() if order["kind"] == kind}


def losses(run: Path) -> dict[int, set[float]]:
    """Every loss that was logged, by step: a step that was done again after a crash must have lost the same."""
    found: dict[int, set[float]] = {}
    for line in (run / "log.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the torn line of a killed writer
        if "loss" in record:
            found.setdefault(record["step"], set()).add(record["loss"])
    return found


def differences(host_root: Path, twin_root: Path) -> Iterator[str]:
    """In words, everything in which a disturbed installation's trainings differ from its twin's. Nothing is the promise."""
    ours, twins = trainings(host_root), trainings(twin_root)
    if set(ours) != set(twins):
        yield f"candidates {sorted(ours)} instead of {sorted(twins)}"
    for candidate in sorted(set(ours) & set(twins)):
        run, twin = ours[candidate], twins[candidate]
        if losses(run) != losses(twin):
            yield f"{candidate}: the losses differ"
        steps = {path.name for path in twin.glob("checkpoints/step-*")}
        if {path.name for path in run.glob("checkpoints/step-*")} != steps:
            yield f"{candidate}: it keeps {sorted(path.name for path in run.glob('checkpoints/*'))}, its twin {sorted(steps)}"
        files = [f"checkpoints/{name}/manifest.json" for name in steps]
        files += [path.relative_to(twin).as_posix() for path in twin.glob("predictions/validation/step-*")]
        yield from (f"{candidate}: {name} differs" for name in sorted(files) if _bytes(run / name) != _bytes(twin / name))
        yield from (f"{candidate}: {path.name} was refused" for path in run.glob("checkpoints/refused-*"))


def unlike_its_twin(campaign: dict[str, Any], fleet: Fleet, twin: Fleet) -> list[str]:
    """In words, everything in which a whole campaign (its entry of the status document) ended otherwise than its undisturbed twin."""
    if campaign["stage"] != "evaluated":
        return [f"the campaign ended {campaign['stage']}: {campaign['detail']}"]
    ours, theirs = verdicts(Path(campaign["directory"])), verdicts(next((twin.state / "campaigns").iterdir()))
    faults = [f"{name}: {ours[name]} instead of {theirs[name]}" for name in theirs if ours[name] != theirs[name]]
    return [*differences(fleet.host_root, twin.host_root), *faults]


def verdicts(directory: Path) -> dict[str, Any]:
    """What was chosen and how it was judged, without the ids and moments of this very campaign."""
    frozen = json.loads((directory / "frozen.json").read_text(encoding="utf-8"))
    result = json.loads((directory / "results" / "test.json").read_text(encoding="utf-8"))
    ledger = [json.loads(line)["event"]["kind"] for line in (directory / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "checkpoint": frozen["checkpoint_digest"], "candidate": frozen["candidate"], "step": frozen["step"], "models": result["models"],
        "look": result["look"], "ledger": ledger,
    }


def leftovers(root: Path, seconds: float = LEAVE_SECONDS_MAX) -> list[str]:
    """What still is there of an installation whose coordinator has left, once the last process had time to go."""
    end = time.monotonic() + seconds
    # A process that is ending loses its memory, and with it its name, before its locks.
    while ((living := animals(root)) or _held_locks(root)) and time.monotonic() < end:
        time.sleep(0.1)
    found = [f"process {each.pid} ({each.role} of {each.run})" for each in living]
    found += [f"lock on {path}" for path in _held_locks(root)]
    found += [f"cgroup {path}" for path in cgroups_of(root)]
    found += [f"temporary {path.relative_to(root)}" for path in sorted(_everything(root)) if TEMPORARY.search(path.name)]
    found += [f"socket {path}" for path in _everything(root) if path.suffix == ".sock"]
    return found


def _everything(root: Path) -> Iterator[Path]:
    """Files and folders below; what goes while it is looked at is no fault, as it is for `rglob`."""
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in (*folders, *files))


def cgroups_of(root: Path) -> list[str]:
    """Groups of any attempt of this installation, by name: equal run ids lie below other roots of this machine, whose groups are not ours."""
    folders = {os.path.dirname(folder) for folder in _places() if folder}
    runs = [path for path in (*root.glob("host/runs/*"), *root.glob("runs/*")) if path.is_dir()]
    ours = {cgroups.PREFIX + tidy._group_prefix(RunPaths(path), number) for path in runs for number in range(1, newest_attempt(RunPaths(path)) + 1)}
    names = [entry.path for folder in folders for entry in os.scandir(folder) if entry.name.startswith(cgroups.PREFIX)]
    return sorted(name for name in names if os.path.basename(name).startswith(tuple(ours)))


def _places() -> list[str]:
    v1, v2 = cgroups.hierarchies()
    return [f"{v1.folder}/x" if v1 else "", f"{cgroups._parent_v2(v2)}/x" if v2 else ""]


def _held_locks(root: Path) -> list[Path]:
    """Files of the installation that /proc/locks names, by device and inode: on two small file systems equal inodes are no rarity."""
    with open("/proc/locks", encoding="ascii") as file:
        held = {line.split()[-3] for line in file if "->" not in line}
    return [path for path in _everything(root) if "lock" in path.name and _place_of(path) in held]


def _place_of(path: Path) -> str:
    """As /proc/locks has it; empty for what is no file, or none any more."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ""
    if not S_ISREG(stat.st_mode):
        return ""
    return f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"


def _bytes(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
