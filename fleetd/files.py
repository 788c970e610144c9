"""Files that appear whole: write, sync, rename, sync the folder. Write-once files are created exclusively.

Every process of fleetd writes its small records through here, so that a crash or a full disk leaves the old record or the new
one, never half of either.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.wire import WireError, encode, loads
from policies.manifest import FileEntry

RECORD_BYTES_MAX = 8 * 1024 * 1024
_TEMPORARY = re.compile(r"\..+-(\d+)-[^-]*\.tmp")
COPY_CHUNK_BYTES = 1024 * 1024
STAT_BLOCK_BYTES = 512
"""The unit of st_blocks (stat(2)), whatever the file system's own is."""


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_record(path: Path, value: Any, *, durable: bool = True) -> None:
    """Replace `path` by the JSON of `value` in one step. `durable=False` skips the syncs: for looks that are not history."""
    write_text(path, json.dumps(encode(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n", durable=durable)


def write_text(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a text file in one step."""
    descriptor, temporary = _temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            if durable:
                file.flush()
                os.fsync(file.fileno())
        faults.after(f"{path.name} written")
        os.replace(temporary, path)
    except BaseException:
        _discard(temporary)
        raise
    if durable:
        faults.after(f"{path.name} renamed")
        sync_folder(path.parent)


def create_record(path: Path, value: Any) -> None:
    """Write a write-once file, whole and durable. FileExistsError when it is already there."""
    text = json.dumps(encode(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    descriptor, temporary = _temporary(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        faults.after(f"{path.name} written")
        os.link(temporary, path)
        faults.after(f"{path.name} linked")
    except FileExistsError:
        sync_folder(path.parent)  # whoever wrote it may have been refused this: from here on it is relied on
        raise
    finally:
        _discard(temporary)
    sync_folder(path.parent)


def overwrite(path: Path, text: str) -> bool:
    """Write over an existing file in place, within the space it has: the last resort on a full disk. False where that can't be done.

    Not atomic: a reader may see it half-written, so only for records whose readers keep the last good one.
    """
    data = text.encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        if len(data) > max(status.st_size, status.st_blocks * STAT_BLOCK_BYTES):
            return False
        return os.pwrite(descriptor, data.ljust(status.st_size), 0) >= len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def read_record(path: Path) -> Any:
    """The JSON value of a record. FileNotFoundError when there is none; WireError names the path when it is damaged."""
    with open(path, "rb") as file:
        data = file.read(RECORD_BYTES_MAX + 1)
    if len(data) > RECORD_BYTES_MAX:
        raise WireError(f"{path}: over the limit of {RECORD_BYTES_MAX} bytes")
    try:
        return loads(data)
    except WireError as fault:
        raise WireError(f"{path}: {fault}") from fault


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line and sync it. A torn tail of an earlier crash is closed by a newline first."""
    line = json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    faults.before(f"{path.name} append")
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + line if torn else line)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def has_ended(pid: str) -> bool:
    """Whether no process of this number can write any more: a zombie, whose parent has not looked yet, is as dead as one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X", b"x")
    except (FileNotFoundError, ProcessLookupError):
        return True


def sweep_temporaries(folder: Path) -> tuple[str, ...]:
    """Remove what a killed writer left of its records in `folder`, not below it. Returns the names. What can't be removed stays."""
    swept = []
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    for name in names:
        writer = _TEMPORARY.fullmatch(name)
        if writer is not None and has_ended(writer[1]):
            _discard(str(folder / name))
            swept.append(name)
    return tuple(swept)


def file_entry(folder: Path, path: str) -> FileEntry:
    """Size and SHA-256 of one regular file below `folder`. OSError when it is a link or unreadable."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        while chunk := file.read(COPY_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(path=path, bytes=size, sha256=digest.hexdigest())


def files_below(folder: Path) -> Iterator[str]:
    """Relative POSIX paths of the regular files below `folder`, sorted, without byte code. Links raise OSError."""
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in folders:
            if (Path(base) / name).is_symlink():
                raise OSError(f"{Path(base) / name} is a link: a staged directory holds files only")
        for name in sorted(names):
            path = Path(base) / name
            if path.is_symlink() or not path.is_file():
                raise OSError(f"{path} is a link or no regular file: a staged directory holds files only")
            yield path.relative_to(folder).as_posix()


def _temporary(path: Path) -> tuple[int, str]:
    """An open new file beside `path`, named after its writer, so that `sweep_temporaries` knows whose it was."""
    faults.before(f"{path.name} write")
    return tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-{os.getpid()}-", suffix=".tmp")


def _discard(temporary: str) -> None:
    try:
        os.unlink(temporary)
    except OSError:
        pass  # the rename took it, or the disk is gone: the next write says so
