"""The running code as a release: what a host needs of it, named by its digest, and the digest that the ledger records.

    policies/ fleetd/*.py fleetd/host/ trainer/     our code; never the coordinator, the screens or the plan's reader
    libraries/                                      psutil for the host's architecture, nvidia-ml-py

A release is built once, from the bytes that were there when this process started, kept in `<state>/releases` and staged from there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import threading
from functools import cache
from pathlib import Path

import fleetd
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.libraries import library_files
from fleetd.coordinator.trees import TEMPORARY_PREFIX, locked, read_entry, tree_fault, write_manifest
from fleetd.files import files_below, sync_folder
from fleetd.paths import StatePaths
from policies.errors import NoRoom
from policies.manifest import FileEntry, directory_digest

PACKAGES = ("policies", "fleetd", "trainer")
HOST_FOLDERS = ("policies", "fleetd/host", "trainer")
COORDINATOR_ONLY = "fleetd/plan"
LIBRARIES = "libraries"


def installation() -> Path:
    """The directory that holds the running packages."""
    return Path(fleetd.__file__).resolve().parent.parent


def code_files(root: Path) -> dict[str, bytes]:
    """The code of a release as it lies below `root` now, by path."""
    return {path: (root / path).read_bytes() for path in _sources(root) if _travels(path)}


class Releases:
    """Releases by architecture. Safe to use from many threads."""

    def __init__(self, paths: StatePaths, *, wheels: Path | None = None) -> None:
        self._store, self._wheels = paths.releases, wheels or paths.wheels
        self._code = code_files(installation())
        self._built: dict[str, tuple[FileEntry, ...]] = {}
        self._guards: dict[str, threading.Lock] = {}

    def stage(self, courier: Courier) -> str:
        """Bring the running code to a host; the digest of its release."""
        machine = courier.machine
        with self._guards.setdefault(machine, threading.Lock()):  # a wheel that is slow to come delays no other architecture
            entries = self._built.get(machine)
            if entries is None:
                entries = self._build(machine)
        digest = directory_digest(entries)
        courier.put_tree(TreeKind.RELEASES, digest, self._store / digest, entries)
        return digest

    def placed_on(self, courier: Courier) -> str:
        """The folder of the running code's release on a host, brought there if it was not."""
        return courier.tree_path(TreeKind.RELEASES, self.stage(courier))

    def placed_here(self) -> str:
        """The folder of this machine's release in the coordinator's own store: what looks at this machine needs nothing in any root."""
        machine = platform.machine()
        with self._guards.setdefault(machine, threading.Lock()):
            return str(self._store / directory_digest(self._built.get(machine) or self._build(machine)))

    def _build(self, machine: str) -> tuple[FileEntry, ...]:
        libraries = library_files(machine, self._wheels)
        contents = {**self._code, **{f"{LIBRARIES}/{path}": data for path, data in libraries.items()}}
        entries = tuple(
            FileEntry(path=path, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for path, data in sorted(contents.items())
        )
        digest = directory_digest(entries)
        try:
            with locked(self._store / ".lock"):
                if tree_fault(self._store / digest, digest) is not None:
                    self._write(digest, contents, entries)
                self._built[machine] = entries  # under the store's lock: from here on no other architecture's build removes it
        except OSError as fault:
            fix = "free some space there; it is tried again by itself"
            raise NoRoom("can't build the release for hosts", where=str(self._store), what=str(fault), fix=fix) from fault
        return entries

    def _write(self, digest: str, contents: dict[str, bytes], entries: tuple[FileEntry, ...]) -> None:
        """Called with the store's lock held. Older releases go: hosts have their copies, and another one is built as quickly."""
        needed = self._staged_now()
        for old in self._store.iterdir():
            if old.is_dir() and old.name not in needed:
                shutil.rmtree(old, ignore_errors=True)
        temporary = self._store / f"{TEMPORARY_PREFIX}{digest}"
        for path, data in contents.items():
            (temporary / path).parent.mkdir(parents=True, exist_ok=True)
            (temporary / path).write_bytes(data)
        write_manifest(temporary, entries)
        os.rename(temporary, self._store / digest)
        sync_folder(self._store)

    def _staged_now(self) -> set[str]:
        return {directory_digest(entries) for entries in self._built.values()}


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
    return folder == "fleetd" and not path.startswith(COORDINATOR_ONLY)
