"""Directories that are copied whole and verified on the way: the one road for data, code, models and checkpoints.

A tree is a set of `FileEntry`; its digest names its directory. `copy_tree` hashes the very bytes it writes, so a source that
changes under it is found; `tree_fault` reads a directory back and says what is wrong with it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetd import faults
from fleetd.contents import difference
from fleetd.files import COPY_CHUNK_BYTES, files_below, sync_folder
from policies.manifest import MANIFEST_NAME, FileEntry, directory_digest, manifest_body, manifest_entries

MANIFEST_BYTES_MAX = 64 * 1024 * 1024
TEMPORARY_PREFIX = ".tmp-"


class TreeFault(Exception):
    """A tree is not what it should be: `path` is the file or directory, `what` is wrong with it."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path, self.what = path, what


def read_entry(folder: Path, path: str) -> FileEntry:
    """Size and SHA-256 of one regular file. TreeFault when it is missing, a link, no file, or changes while it is read."""
    return _stream(folder / path, path, None)


def copy_tree(
    source: Path, entries: Iterable[FileEntry], destination: Path, *, private: bool = False, told: Callable[[int], None] = lambda count: None,
) -> None:
    """Copy exactly these files into the new directory `destination`, each verified and synced. TreeFault names the file that differs.

    `private` makes files 0600 and folders 0700; `told` hears how many bytes were copied. The caller removes what is left of `destination`
    after a failure.
    """
    folders = {destination}
    faults.before("tree folder")
    _new_folder(destination, private)
    for entry in entries:
        for parent in reversed(Path(entry.path).parents[:-1]):
            if destination / parent not in folders:
                _new_folder(destination / parent, private)
                folders.add(destination / parent)
        faults.before("tree file")
        target = os.open(destination / entry.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
        try:
            found = _stream(source / entry.path, entry.path, target, told)
            os.fsync(target)
        finally:
            os.close(target)
        if found != entry:
            what = f"it changed: SHA-256 {found.sha256} in {found.bytes} bytes, expected {entry.sha256} in {entry.bytes}"
            raise TreeFault(source / entry.path, what)
    for folder in sorted(folders, reverse=True):
        sync_folder(folder)


def write_manifest(folder: Path, entries: tuple[FileEntry, ...], *, source: Path | None = None, private: bool = False) -> None:
    """Put `manifest.json` into a copied tree: the source's own, byte for byte, where it has one of the same digest."""
    data = manifest_bytes(entries, source)
    faults.before("tree manifest")
    descriptor = os.open(folder / MANIFEST_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    faults.after("tree complete")


def manifest_bytes(entries: tuple[FileEntry, ...], source: Path | None = None) -> bytes:
    """The bytes of `manifest.json` for these files: the source's own where it has one of the same digest."""
    if source is not None and _digest_said(source) == directory_digest(entries):
        return (source / MANIFEST_NAME).read_bytes()
    return (json.dumps(manifest_body(entries), sort_keys=True, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> tuple[FileEntry, ...]:
    """The entries that `manifest.json` lists. TreeFault when it is missing, malformed or contradicts its digest."""
    path = folder / MANIFEST_NAME
    try:
        with open(path, "rb") as file:
            body = json.loads(file.read(MANIFEST_BYTES_MAX))
        return manifest_entries(body)
    except OSError as fault:
        raise TreeFault(path, f"can't be read: {fault.strerror}") from fault
    except (ValueError, AttributeError, RecursionError) as fault:
        raise TreeFault(path, str(fault)) from fault


def tree_fault(folder: Path, digest: str) -> TreeFault | None:
    """What keeps `folder` from being the tree named `digest`, every byte read; None when it is that tree and nothing else."""
    try:
        entries = read_manifest(folder)
        said = directory_digest(entries)
        if said != digest:
            return TreeFault(folder / MANIFEST_NAME, f"it is the manifest of {said}, expected {digest}")
        for entry in entries:
            found = read_entry(folder, entry.path)
            if found != entry:
                what = difference(
                    folder / entry.path, found_bytes=found.bytes, found_sha256=found.sha256, expected_bytes=entry.bytes, expected_sha256=entry.sha256,
                )
                return TreeFault(folder / entry.path, what)
        extra = sorted(set(files_below(folder)) - {entry.path for entry in entries} - {MANIFEST_NAME})
    except TreeFault as fault:
        return fault
    except OSError as fault:
        return TreeFault(folder, str(fault))
    return TreeFault(folder / extra[0], "the manifest does not list it") if extra else None


def discard_tree(folder: Path) -> None:
    """Remove a temporary tree; what can't be removed stays for the next try."""
    assert folder.name.startswith(TEMPORARY_PREFIX), "only temporaries are discarded"
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file `path` while a temporary beside it is made; a killed holder leaves no lock behind."""
    faults.before(f"{path.name} lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _digest_said(folder: Path) -> str | None:
    try:
        return directory_digest(read_manifest(folder))
    except TreeFault:
        return None


def _new_folder(folder: Path, private: bool) -> None:
    os.mkdir(folder, 0o700 if private else 0o755)


def _stream(source: Path, name: str, target: int | None, told: Callable[[int], None] = lambda count: None) -> FileEntry:
    """Read `source` once, write what is read to `target` if there is one, and say what was read."""
    digest, size = hashlib.sha256(), 0
    try:
        # O_NONBLOCK: a pipe in a data directory must be refused, not waited for.
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as fault:
        raise TreeFault(source, "it is a link; put the file itself there" if source.is_symlink() else f"can't be read: {fault.strerror}") from fault
    try:
        before = os.fstat(descriptor)
        if not stat.S_ISREG(before.st_mode):
            raise TreeFault(source, "it is no regular file")
        while chunk := os.read(descriptor, COPY_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            if target is not None:
                _write_all(target, chunk)
            told(len(chunk))
        after = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size != after.st_size:
        raise TreeFault(source, "it changed while it was read")
    return FileEntry(path=name, bytes=size, sha256=digest.hexdigest())


def _write_all(target: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(target, rest):]
