"""What the agent reads for the coordinator: parts of a run's files, their digests, and whether a staged directory is whole.

Every path is relative to its run directory, and every component is opened without following links, so that nothing outside is
ever read, whatever a trainer put there.
"""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path
from typing import Any

from fleetd.files import file_entry, files_below, read_record
from fleetd.paths import HostPaths
from fleetd.wire import WireError, encode
from policies.errors import NotFound, RequestRefused
from policies.manifest import MANIFEST_NAME, FileEntry, directory_digest, manifest_entries

READ_BYTES_MAX = 4 * 1024 * 1024
"""Base64 makes a third more of it, and a line may hold 8 MiB."""
DIGEST_FILES_MAX = 10_000
KINDS = ("releases", "datasets", "models", "wheelhouses")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


def safe_name(text: object, what: str) -> str:
    """A run id or digest that is a plain file name. RequestRefused otherwise."""
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise RequestRefused(f"that is no {what}", where="the order", what=f"{text!r} is not a plain name", fix=f"send the {what} as it was given")
    return text


def read_part(run_root: Path, path: object, offset: int, bytes_max: int) -> dict[str, Any]:
    """Up to `bytes_max` bytes of one file from `offset` (negative: from the end), base64, with its size and the next offset."""
    descriptor = _open_below(run_root, path)
    try:
        size = os.fstat(descriptor).st_size
        start = max(0, size + offset) if offset < 0 else offset
        data = os.pread(descriptor, max(0, min(bytes_max, READ_BYTES_MAX)), start)
    finally:
        os.close(descriptor)
    return {"data": base64.b64encode(data).decode("ascii"), "size": size, "next": start + len(data)}


def entries_of(run_root: Path, path: object) -> list[dict[str, Any]]:
    """Size and SHA-256 of one file, or of every file below a directory."""
    parts = _parts(path)
    os.close(_open_below(run_root, path))
    target = run_root.joinpath(*parts)
    if not target.is_dir():
        return [encode(file_entry(target.parent, target.name))]
    names = list(files_below(target))
    if len(names) > DIGEST_FILES_MAX:
        what = f"{len(names)} files, {DIGEST_FILES_MAX} are the limit"
        raise RequestRefused("too many files", where=str(target), what=what, fix="ask for a part of it")
    return [encode(file_entry(target, name)) for name in names]


def is_present(paths: HostPaths, kind: object, digest: object) -> bool:
    """Whether a staged directory is there under its final name, which it gets only when it is complete."""
    return (_staged(paths, kind, digest) / MANIFEST_NAME).is_file()


def verify_staged(paths: HostPaths, kind: object, digest: object) -> tuple[bool, str]:
    """Read every byte of a staged directory: (whole, what is wrong with it)."""
    folder = _staged(paths, kind, digest)
    try:
        expected = manifest_entries(read_record(folder / MANIFEST_NAME))
        if directory_digest(expected) != digest:
            return False, f"its manifest gives the digest {directory_digest(expected)}"
        found: list[FileEntry] = [file_entry(folder, name) for name in files_below(folder) if name != MANIFEST_NAME]
    except (OSError, WireError, ValueError, AttributeError) as fault:
        return False, str(fault)
    wrong = sorted({entry.path for entry in {*expected} ^ {*found}})
    return (True, "") if not wrong else (False, f"{len(wrong)} files differ, the first is {wrong[0]}")


def _staged(paths: HostPaths, kind: object, digest: object) -> Path:
    if kind not in KINDS:
        raise RequestRefused("that kind of directory is not staged", where="the order", what=f"{kind!r}", fix=f"ask for one of {', '.join(KINDS)}")
    return paths.root / str(kind) / safe_name(digest, "digest")


def _parts(path: object) -> list[str]:
    parts = path.split("/") if isinstance(path, str) and path else []
    if not parts or any(part in ("", ".", "..") or "\0" in part for part in parts):
        fix = "send a relative path below the run directory"
        raise RequestRefused("that path leaves the run directory", where="the order", what=f"{path!r}", fix=fix)
    return parts


def _open_below(root: Path, path: object) -> int:
    """An open file or directory below `root`, no component of which is a link. NotFound when there is none."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in _parts(path):
        try:
            # Non-blocking: a named pipe that a trainer left there must not hold the agent.
            deeper = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor)
        except (FileNotFoundError, NotADirectoryError) as fault:
            where, fix = str(root / str(path)), "ask again once it is written"
            raise NotFound("there is no such file", where=where, what=str(fault.strerror), fix=fix) from fault
        except OSError as fault:
            where, fix = str(root / str(path)), "ask for the file itself: links are not followed"
            raise RequestRefused("that file is not read", where=where, what=str(fault.strerror), fix=fix) from fault
        finally:
            os.close(descriptor)
        descriptor = deeper
    return descriptor
