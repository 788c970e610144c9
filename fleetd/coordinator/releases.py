"""The running code as a release: what a host needs of it, named by its digest, and the digest that the ledger records.

A host gets policies, the shared vocabulary, `fleetd/host` and the trainer; never the coordinator or the screens.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import fleetd
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.trees import read_entry
from fleetd.files import files_below
from policies.manifest import FileEntry, directory_digest

PACKAGES = ("policies", "fleetd", "trainer")
HOST_FOLDERS = ("policies", "fleetd/host", "trainer")
COORDINATOR_ONLY = ("fleetd/plan.py",)


def installation() -> Path:
    """The directory that holds the running packages."""
    return Path(fleetd.__file__).resolve().parent.parent


def release_entries(root: Path) -> tuple[FileEntry, ...]:
    """The files of a release, as they lie below `root` now."""
    return tuple(read_entry(root, path) for path in _sources(root) if _travels(path))


def stage_release(courier: Courier) -> str:
    """Bring the running code to a host and compile it there; the digest of the release."""
    root = installation()
    entries = release_entries(root)
    digest = directory_digest(entries)
    courier.put_tree(TreeKind.RELEASES, digest, root, entries)
    return digest


@cache
def code_digest() -> str:
    """The digest of all code that this process was started from, read once."""
    root = installation()
    return directory_digest([read_entry(root, path) for path in _sources(root)])


def _sources(root: Path) -> list[str]:
    return [f"{package}/{path}" for package in PACKAGES for path in files_below(root / package) if path.endswith(".py")]


def _travels(path: str) -> bool:
    folder = path.rsplit("/", 1)[0]
    if any(folder == each or folder.startswith(f"{each}/") for each in HOST_FOLDERS):
        return True
    return folder == "fleetd" and path not in COORDINATOR_ONLY
