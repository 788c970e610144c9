"""How bytes travel between the coordinator and one host. `LocalCourier` copies below a root on this machine; a courier over SSH
keeps the same promises over a wire.

Trees go out under their digest, once, and appear whole. Files of a run come back verified against entries that the caller trusts.
"""

from __future__ import annotations

import errno
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleetd import faults
from fleetd.coordinator.deliveries import Deliveries, Delivery
from fleetd.coordinator.trees import (
    TEMPORARY_PREFIX,
    TreeFault,
    copy_tree,
    discard_tree,
    locked,
    read_entry,
    read_manifest,
    tree_fault,
    write_manifest,
)
from fleetd.files import files_below, sync_folder
from fleetd.paths import HostPaths
from fleetd.release_use import prune_releases
from policies.errors import DataDamaged, ExplainedError, NoRoom, NotFound, RequestRefused
from policies.facts import Word
from policies.manifest import FileEntry, directory_digest

READ_BYTES_MAX = 4 * 1024 * 1024
COMPILE_SECONDS_MAX = 120
OUTPUT_CHARACTERS_MAX = 400
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class TreeKind(Word):
    """The stores of a host root; the word is the directory's name."""

    RELEASES = "releases"
    DATASETS = "datasets"
    MODELS = "models"
    WHEELHOUSES = "wheelhouses"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a program on the host answered."""

    status: int
    stdout: str
    stderr: str


class Courier(Protocol):
    """One host's end of the road. Every method may raise HostUnreachable; all may be called again after any failure."""

    @property
    def host(self) -> str: ...

    @property
    def machine(self) -> str:
        """The host's architecture, as uname -m says it."""

    def tree_path(self, kind: TreeKind, digest: str) -> str:
        """Where the tree lies on the host."""

    def has_tree(self, kind: TreeKind, digest: str) -> bool:
        """Whether the host has the tree, by its manifest; `tree_fault` reads the bytes."""

    def tree_fault(self, kind: TreeKind, digest: str) -> str | None:
        """What is wrong with the host's copy, every byte read; None when it is whole."""

    def put_tree(self, kind: TreeKind, digest: str, source: Path, entries: tuple[FileEntry, ...]) -> bool:
        """Bring the tree to the host. False when it was there already, and whole. DataDamaged, RequestRefused."""

    def look(self, run_id: str, path: str) -> tuple[FileEntry, ...]:
        """The files at `path` in the run directory (one file, or all below a folder) with their digests; empty when there is nothing."""

    def fetch_tree(self, run_id: str, path: str, destination: Path, entries: tuple[FileEntry, ...]) -> None:
        """Copy `entries` from the folder `path` of the run directory into the new folder `destination`, verified. TreeFault."""

    def read_tail(self, run_id: str, path: str, offset: int, bytes_max: int) -> bytes:
        """Up to `bytes_max` bytes of a growing file from `offset`; empty at its end or when it does not exist."""

    def read_part(self, run_id: str, path: str, offset: int, bytes_max: int) -> tuple[bytes, int, int]:
        """Bytes of a file from `offset` (negative: from the end), where they begin, and the file's size. NotFound."""

    def run_program(self, argv: tuple[str, ...], timeout_seconds: float) -> Finished:
        """Run a short program there, without a shell. OSError when it can't be run or does not end in time."""

    def prune_releases(self, keep: frozenset[str]) -> tuple[str, ...]:
        """Remove releases that neither `keep` nor a run nor a living process needs; their digests."""


class LocalCourier:
    """The courier of a host root on this machine."""

    def __init__(self, host: str, root: Path, agent_python: str | None = None, deliveries: Deliveries | None = None) -> None:
        self._host, self._paths, self._python = host, HostPaths(root), agent_python or sys.executable
        self._deliveries = deliveries or Deliveries()

    @property
    def host(self) -> str:
        return self._host

    @property
    def machine(self) -> str:
        return platform.machine()

    def tree_path(self, kind: TreeKind, digest: str) -> str:
        return str(self._tree(kind, digest))

    def has_tree(self, kind: TreeKind, digest: str) -> bool:
        try:
            entries = read_manifest(self._tree(kind, digest))
        except TreeFault:
            return False
        return directory_digest(entries) == digest

    def tree_fault(self, kind: TreeKind, digest: str) -> str | None:
        fault = tree_fault(self._tree(kind, digest), digest)
        return None if fault is None else str(fault)

    def put_tree(self, kind: TreeKind, digest: str, source: Path, entries: tuple[FileEntry, ...]) -> bool:
        assert directory_digest(entries) == digest, "a tree is named by its digest"
        final = self._tree(kind, digest)
        try:
            with locked(final.parent / ".lock"):
                if final.exists():
                    self._check_present(digest, final)
                    return False
                with self._deliveries.under_way(self._host, kind.value, digest, sum(entry.bytes for entry in entries)) as delivery:
                    delivery.goes_by("copy", "it is this machine")
                    delivery.begins(0)
                    self._bring(kind, digest, source, entries, final, delivery)
        except OSError as fault:
            raise self._no_place(kind, final, entries, fault) from fault
        return True

    def look(self, run_id: str, path: str) -> tuple[FileEntry, ...]:
        place = self._paths.run(run_id).root / path
        if place.is_dir():
            return tuple(read_entry(place, name) for name in files_below(place) if not _is_temporary(name))
        return (read_entry(place.parent, place.name),) if place.exists() else ()

    def fetch_tree(self, run_id: str, path: str, destination: Path, entries: tuple[FileEntry, ...]) -> None:
        copy_tree(self._paths.run(run_id).root / path, entries, destination)

    def read_tail(self, run_id: str, path: str, offset: int, bytes_max: int) -> bytes:
        try:
            descriptor = os.open(self._paths.run(run_id).root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, min(bytes_max, READ_BYTES_MAX), offset)
        finally:
            os.close(descriptor)

    def read_part(self, run_id: str, path: str, offset: int, bytes_max: int) -> tuple[bytes, int, int]:
        place = self._paths.run(run_id).root / path
        try:
            with open(place, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                start = max(0, size + offset) if offset < 0 else min(offset, size)
                file.seek(start)
                return file.read(min(bytes_max, READ_BYTES_MAX)), start, size
        except (FileNotFoundError, IsADirectoryError) as fault:
            raise NotFound("there is no such file", where=str(place), what=str(fault.strerror), fix="ask again once it is written") from fault

    def run_program(self, argv: tuple[str, ...], timeout_seconds: float) -> Finished:
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=timeout_seconds)
        except subprocess.TimeoutExpired as fault:
            raise OSError(str(fault)) from fault
        return Finished(status=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def prune_releases(self, keep: frozenset[str]) -> tuple[str, ...]:
        with locked(self._paths.releases / ".lock"):
            return prune_releases(self._paths, keep)

    def _tree(self, kind: TreeKind, digest: str) -> Path:
        return self._paths.root / kind.value / digest

    def _check_present(self, digest: str, final: Path) -> None:
        fault = tree_fault(final, digest)
        if fault is not None:
            raise DataDamaged(
                f"what lies staged on host {self._host} is damaged", where=str(fault.path), what=fault.what,
                fix=f"make sure that no run uses it, then rm -r {final} and launch again",
            )

    def _bring(self, kind: TreeKind, digest: str, source: Path, entries: tuple[FileEntry, ...], final: Path, delivery: Delivery) -> None:
        """Temporary sibling, copy, verify, sync, rename. Called with the kind's lock held, so older temporaries are nobody's."""
        for leftover in final.parent.glob(f"{TEMPORARY_PREFIX}*"):
            discard_tree(leftover)
        temporary = final.parent / f"{TEMPORARY_PREFIX}{digest}"
        try:
            copy_tree(source, entries, temporary, told=delivery.sent)
            delivery.settles()
            write_manifest(temporary, entries, source=source)
            if kind is TreeKind.RELEASES:
                self._compile(temporary, final)
            faults.before(f"{kind.value} in place")
            os.rename(temporary, final)
            sync_folder(final.parent)
        except TreeFault as fault:
            raise damaged_source(kind.value, self._host, fault) from fault
        finally:
            if temporary.exists():
                discard_tree(temporary)

    def _compile(self, temporary: Path, final: Path) -> None:
        """Byte code by the python that will run it, with the final path in its tracebacks."""
        argv = (self._python, "-m", "compileall", "-q", "-s", str(temporary), "-p", str(final), str(temporary))
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMPILE_SECONDS_MAX, check=False)
            trouble = ((done.stdout + done.stderr).strip() or f"exit status {done.returncode}") if done.returncode else None
        except (OSError, subprocess.TimeoutExpired) as fault:
            trouble = str(fault)
        if trouble is not None:
            raise RequestRefused(
                f"host {self._host} can't run this release", where=f"agent_python {self._python}", what=trouble[-OUTPUT_CHARACTERS_MAX:],
                fix="name a Python 3.10 or newer as agent_python of the host in the plan",
            )

    def _no_place(self, kind: TreeKind, final: Path, entries: tuple[FileEntry, ...], fault: OSError) -> ExplainedError:
        needed = sum(entry.bytes for entry in entries)
        if fault.errno in _NO_ROOM:
            free = shutil.disk_usage(next(each for each in final.parents if each.exists())).free
            return NoRoom(
                f"no room for {kind} on host {self._host}", where=str(final),
                what=f"{needed} bytes are needed, {free} are free; nothing was left behind",
                fix=f"free some space below {self._paths.root}; it is tried again by itself",
            )
        return RequestRefused(
            f"can't write {kind} on host {self._host}", where=str(final), what=str(fault),
            fix=f"make {self._paths.root} a directory that this user may write, then launch again",
        )


def damaged_source(kind: str, host: str, fault: TreeFault) -> DataDamaged:
    return DataDamaged(
        f"can't stage {kind} on host {host}", where=str(fault.path), what=fault.what,
        fix="let nothing write there while a campaign is staged, then launch again",
    )


def _is_temporary(name: str) -> bool:
    return any(part.startswith(".") for part in name.split("/"))
