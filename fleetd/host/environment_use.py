"""Which environments of a host root are still needed, and the removal of those that are not; as `fleetd/release_use.py` does for releases.

An environment is needed while a run names it, while a process was started from it, and while the coordinator says so. Wheels are needed
only until they are installed. While something is being built nothing is removed: the next look finds it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

from fleetd.environments import MARK, EnvironmentMark
from fleetd.files import read_record, sync_folder
from fleetd.paths import HostPaths
from fleetd.release_use import TRASH_PREFIX, in_command_lines, named_by_runs
from fleetd.wire import WireError, decode
from policies.surveys import BuiltEnvironment

ENVIRONMENT = "environment"
"""Under which key of its digests a run names its environment."""


def read_mark(place: Path) -> EnvironmentMark | None:
    """What a complete environment says of itself; None where there is none, or half of one."""
    try:
        return decode(EnvironmentMark, read_record(place / MARK), MARK)
    except (OSError, WireError):
        return None


def built(paths: HostPaths, lock_sha256: str) -> tuple[BuiltEnvironment, ...]:
    """The complete environments of a lock, whatever they were built from."""
    marks = (read_mark(place) for place in sorted((paths.environments / lock_sha256).glob("*/")))
    return tuple(
        BuiltEnvironment(name=mark.name, python=mark.version, packages=len(mark.packages), bytes=mark.bytes) for mark in marks if mark is not None
    )


def prune(paths: HostPaths, keep: frozenset[str], wheelhouses: frozenset[str]) -> tuple[str, ...]:
    """Remove every environment and every staged wheel that nobody needs; their names."""
    if not paths.environments.is_dir():
        return _prune_wheelhouses(paths, wheelhouses)
    descriptor = os.open(paths.environments / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return (*_prune_environments(paths, keep), *_prune_wheelhouses(paths, wheelhouses))
    except BlockingIOError:
        return ()
    finally:
        os.close(descriptor)


def _prune_environments(paths: HostPaths, keep: frozenset[str]) -> tuple[str, ...]:
    there = {f"{place.parent.name}/{place.name}" for place in paths.environments.glob("[!.]*/*/")}
    spare = there - keep
    spare = spare - named_by_runs(paths, lambda order: order["digests"].get(ENVIRONMENT, ""), there) if spare else spare
    spare = spare - in_command_lines(paths.environments, depth=2) if spare else spare
    for name in sorted(spare):
        place = paths.environments / name
        trash = paths.environments / f"{TRASH_PREFIX}{place.name}"
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(place, trash)
        shutil.rmtree(trash, ignore_errors=True)
    for log in paths.environments.glob("[!.]*/*.log"):  # also of builds that failed
        if f"{log.parent.name}/{log.stem}" in spare or not (log.with_suffix("").exists() or log.parent.name in {name.split("/")[0] for name in keep}):
            log.unlink(missing_ok=True)
    for folder in paths.environments.glob("[!.]*/"):
        if not os.listdir(folder):
            os.rmdir(folder)
    if spare:
        sync_folder(paths.environments)
    return tuple(sorted(spare))


def _prune_wheelhouses(paths: HostPaths, keep: frozenset[str]) -> tuple[str, ...]:
    folders = [folder for folder in paths.wheelhouses.glob("*/") if folder.name not in keep and not _is_under_way(folder.name)]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(folder.name for folder in folders)


def _is_under_way(name: str) -> bool:
    """A tree that somebody is just bringing; who brings it removes what the dead have left."""
    return name.startswith(".") and not name.startswith(TRASH_PREFIX)
