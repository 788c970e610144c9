"""Small records of the trainer: strict JSON in, whole files out, append-only logs.

The trainer stands alone (it never imports fleetd), so it keeps its own few lines for what the host side does elsewhere:
write beside, sync, rename, sync the folder. JSON with a key twice or a number that is none is refused, because a checkpoint
that two readers understand differently is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from policies.manifest import MANIFEST_NAME, FileEntry

JSON_BYTES_MAX = 512 * 1024 * 1024
COPY_CHUNK_BYTES = 1024 * 1024
FILES_MAX = 100_000


class JsonFault(ValueError):
    """The text is no JSON document that every reader would understand the same way."""


def loads(data: bytes) -> Any:
    """The value of a JSON document. JsonFault on bad UTF-8, a key twice in an object, NaN or Infinity."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as fault:
        raise JsonFault(f"not JSON: {fault}") from fault


def dumps(value: Any) -> bytes:
    """The one form in which records are written: sorted keys, one space, a newline at the end, no NaN."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def dumps_line(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """The value of a JSON file. OSError when it can't be read, JsonFault when it is damaged or a link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(JSON_BYTES_MAX + 1)
    if len(data) > JSON_BYTES_MAX:
        raise JsonFault(f"over the limit of {JSON_BYTES_MAX} bytes")
    return loads(data)


def write_synced(path: Path, data: bytes) -> None:
    """Create `path` (it must not exist) with `data` and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_whole(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, whole or not at all: write beside, sync, rename, sync the folder."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_line(path: Path, value: Any, *, durable: bool) -> None:
    """Append one JSON line. A torn tail of an earlier crash is closed first. A full disk is told on stderr and hurts nobody:
    a log that can't be written is no reason to lose a training."""
    line = dumps_line(value)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" + line if torn else line)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as fault:
        print(f"can't write {path.name}: {fault}; the line was {line.decode().rstrip()}", file=sys.stderr, flush=True)


def file_entry(folder: Path, path: str) -> FileEntry:
    """Size and SHA-256 of one regular file below `folder`. OSError when it is a link or unreadable."""
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(folder / path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        while chunk := file.read(COPY_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(path=path, bytes=size, sha256=digest.hexdigest())


def folder_entries(folder: Path) -> tuple[FileEntry, ...]:
    """Every file below `folder` but its own manifest and byte code: what a directory digest is made of. OSError on a link."""
    paths: list[str] = []
    for base, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for name in sorted(names):
            path = Path(base) / name
            if path.is_symlink():
                raise OSError(f"{path} is a link: a staged directory holds files only")
            paths.append(path.relative_to(folder).as_posix())
        if len(paths) > FILES_MAX:
            raise OSError(f"{folder} holds over {FILES_MAX} files")
    return tuple(file_entry(folder, path) for path in paths if path != MANIFEST_NAME)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        twice = sorted({key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1})
        raise JsonFault(f"the key {twice[0]!r} stands twice in one object")
    return keys


def _refuse_constant(text: str) -> NoReturn:
    raise JsonFault(f"{text} is no number of JSON")
