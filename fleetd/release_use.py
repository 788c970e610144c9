"""Which staged releases of a host root are still needed, and the removal of those that are not.

A release is needed while a run names it (whether it goes on or may be resumed), while a process was started from it, and while the
coordinator says so. What is removed goes out of sight first, so that half a release never carries a digest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fleetd.files import read_record, sync_folder
from fleetd.paths import HostPaths
from fleetd.wire import WireError

TRASH_PREFIX = ".tmp-pruned-"


def prune_releases(paths: HostPaths, keep: Iterable[str]) -> tuple[str, ...]:
    """Remove every release that nobody needs; their digests. What can't be removed now is tried again another time."""
    if not paths.releases.is_dir():
        return ()
    staged = {folder.name for folder in paths.releases.iterdir() if folder.is_dir() and not folder.name.startswith(".")}
    spare = staged - set(keep)
    spare = spare - named_by_runs(paths, lambda order: order["release_digest"], staged) if spare else spare
    spare = spare - in_command_lines(paths.releases) if spare else spare
    for digest in sorted(spare):
        trash = paths.releases / f"{TRASH_PREFIX}{digest}"
        os.rename(paths.releases / digest, trash)
        shutil.rmtree(trash, ignore_errors=True)
    if spare:
        sync_folder(paths.releases)
    return tuple(sorted(spare))


def named_by_runs(paths: HostPaths, name_of: Callable[[dict[str, Any]], object], all_of_them: set[str]) -> set[str]:
    """What `name_of` finds in the order of every run. A run whose order can't be read keeps them all: nobody knows what it needs."""
    named: set[str] = set()
    for folder in paths.runs.iterdir() if paths.runs.is_dir() else ():
        try:
            named.add(str(name_of(read_record(folder / "run.json"))))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, WireError, KeyError, TypeError, AttributeError):
            return all_of_them
    return named


def in_command_lines(folder: Path, *, depth: int = 1) -> set[str]:
    """What below `folder` (`depth` names deep) stands in the command line of a living process, whoever started it."""
    needle, found = f"{folder}/".encode(), set()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        found |= {"/".join(os.fsdecode(word[len(needle):]).split("/")[:depth]) for word in words if word.startswith(needle)}
    return found
