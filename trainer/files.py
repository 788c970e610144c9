"""The trainer's system calls on its own files: strict JSON in, whole files out, append-only logs.

The trainer stands alone (it never imports fleetd), so it keeps its own few lines for what the host side does elsewhere:
write beside, sync, rename, sync the folder. JSON with a key twice or a number that is none is refused, because a checkpoint
that two readers understand differently is no checkpoint. Whatever a save does to the disk goes through `os` from here and no
other library, so that the tests can let any single call fail, fall short, or be the last one before the power goes.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from policies.manifest import MANIFEST_NAME, FileEntry

JSON_BYTES_MAX = 512 * 1024 * 1024
COPY_CHUNK_BYTES = 1024 * 1024
FILES_MAX = 100_000
RENAME_NOREPLACE = 1  # renameat2(2)
AT_FDCWD = -100

Buffer = bytes | memoryview
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""How a file begins that Git LFS has not fetched yet."""


class JsonFault(ValueError):
    """The text is no JSON document that every reader would understand the same way."""


def loads(data: bytes) -> Any:
    """The value of a JSON document. JsonFault on bad UTF-8, a key twice in an object, NaN, Infinity or a number out of range."""
    if data.startswith(LFS_POINTER):
        raise JsonFault("it is a Git LFS pointer, not the file itself: git lfs pull")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite)
    except JsonFault:
        raise
    except (ValueError, RecursionError) as fault:  # ValueError: bad UTF-8, bad JSON, an integer of thousands of digits
        raise JsonFault(f"not JSON: {fault}") from fault


def dumps(value: Any) -> bytes:
    """The one form in which records are written: sorted keys, one space, a newline at the end, no NaN."""
    return (json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def dumps_line(value: Any) -> bytes:
    return (json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_json(path: Path) -> Any:
    """The value of a JSON file. OSError when it can't be read, JsonFault when it is damaged or a link."""
    return loads(read_bounded(path, JSON_BYTES_MAX))


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """The bytes of a file. OSError when it can't be read or is a link, JsonFault when it is over the limit."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a named pipe must not make us wait for its writer
    with os.fdopen(descriptor, "rb") as file:
        # As much as there is, not as much as there may be: the reader reserves memory for what it is asked.
        data = file.read(min(os.fstat(descriptor).st_size, bytes_max) + 1)
    if len(data) > bytes_max:
        raise JsonFault(f"over the limit of {bytes_max} bytes")
    return data


def write_synced(path: Path, *pieces: Buffer) -> None:
    """Create `path` (it must not exist) with these bytes one after another, readable for all, and sync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        _write_all(descriptor, pieces)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_whole(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, whole or not at all: write beside, sync, rename, sync the folder."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            _write_all(descriptor, (data,))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        _unlink_quietly(temporary)
        raise
    sync_folder(path.parent)


def has_ended(pid: str) -> bool:
    """Whether no process of this number can write any more: a zombie, whose parent has not looked yet, is as dead as one that is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X", b"x")
    except (FileNotFoundError, ProcessLookupError):
        return True


def sweep_temporaries(folder: Path) -> tuple[str, ...]:
    """Remove what `replace_whole` left in `folder` when its process was killed. Returns the names. Our own pid is only now starting."""
    swept = []
    for path in sorted(folder.glob(".*.tmp-*")):
        pid = path.name.rpartition("-")[2]
        if pid == str(os.getpid()) or has_ended(pid):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return tuple(swept)


def rename_without_replacing(source: Path, target: Path) -> None:
    """rename(2) that fails with FileExistsError instead of replacing anything."""
    code = _rename_unless_there(source, target)
    if code == 0:
        return
    if code not in (errno.ENOSYS, errno.EINVAL):
        raise OSError(code, os.strerror(code), str(target))
    # File systems without the flag: one trainer a run (its lock) makes looking first safe, and rename(2) itself
    # refuses to replace a directory that is not empty.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)


def remove_tree(folder: Path, *, quietly: bool = False) -> None:
    """Delete a directory and all in it; links are deleted, not followed. `quietly`: what can't be deleted stays, for the next sweep."""
    try:
        for name in sorted(os.listdir(folder)):
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                remove_tree(path, quietly=quietly)
            elif quietly:
                _unlink_quietly(path)
            else:
                os.unlink(path)
        os.rmdir(folder)
    except OSError:
        if not quietly:
            raise


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def forget_cached(path: Path) -> None:
    """Ask the kernel to drop its copy of a synced file, so that the next reader sees what the disk has. A wish, not a promise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError:
        pass  # a file system without the advice: the reader gets the cached bytes
    finally:
        os.close(descriptor)


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


def folder_entries(folder: Path, known: Mapping[str, FileEntry] | None = None) -> tuple[FileEntry, ...]:
    """Every file below `folder` but its own manifest and byte code: what a directory digest is made of. OSError on a link.

    Files in `known` were just read and hashed by the caller, and are not read again."""
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
    known = known or {}
    return tuple(known.get(path) or file_entry(folder, path) for path in paths if path != MANIFEST_NAME)


def entry_of(path: str, pieces: Iterable[Buffer]) -> FileEntry:
    """Size and SHA-256 that a file of these bytes has."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return FileEntry(path=path, bytes=size, sha256=digest.hexdigest())


def _write_all(descriptor: int, pieces: Iterable[Buffer]) -> None:
    for piece in _gathered(pieces):
        left = memoryview(piece)
        while left:
            done = os.write(descriptor, left)  # at most 2 GiB at once on Linux, and fewer bytes are no error
            if done == 0:
                raise OSError(errno.EIO, "a write took no byte")
            left = left[done:]


def _gathered(pieces: Iterable[Buffer]) -> Iterator[Buffer]:
    """The same bytes with small neighbours joined: a thousand counters of four bytes are one write."""
    small = bytearray()
    for piece in pieces:
        if len(small) + len(piece) <= COPY_CHUNK_BYTES:
            small += piece
            continue
        if small:
            yield bytes(small)
            small.clear()
        if len(piece) > COPY_CHUNK_BYTES:
            yield piece
        else:
            small += piece
    if small:
        yield bytes(small)


def _rename_unless_there(source: Path, target: Path) -> int:
    """The error number of renameat2(2), 0 when it renamed."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return errno.ENOSYS
    if call(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), RENAME_NOREPLACE) == 0:
        return 0
    return ctypes.get_errno()


def _unlink_quietly(path: Path) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # gone already, or the disk refuses this too: the first error is the one to tell


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise JsonFault(f"the key {twice[0]!r} stands twice in one object")
    return keys


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise JsonFault(f"{text} is beyond the numbers that a computer keeps")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise JsonFault(f"{text} is no number of JSON")
