"""The digest of a directory: one rule for checkpoints, datasets, models and releases.

A manifest lists every file with its size and SHA-256; the digest is the SHA-256 of those lines in the order of the names,
so it says nothing about time, owner or place.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

MANIFEST_NAME = "manifest.json"
PATH_CHARACTERS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file: its path below the directory (POSIX separators), size and lower-case hex SHA-256."""

    path: str
    bytes: int
    sha256: str


def directory_digest(entries: tuple[FileEntry, ...] | list[FileEntry]) -> str:
    """Hex SHA-256 over `"<sha256> <bytes> <path>\\n"` of each file, sorted by path. Paths are unique and relative."""
    paths = [entry.path for entry in entries]
    assert len(set(paths)) == len(paths), "a path occurs once"
    digest = hashlib.sha256()
    for entry in sorted(entries, key=lambda item: item.path):
        assert entry.path and not entry.path.startswith("/") and ".." not in entry.path.split("/"), entry.path
        digest.update(f"{entry.sha256} {entry.bytes} {entry.path}\n".encode())
    return digest.hexdigest()


def manifest_body(entries: tuple[FileEntry, ...] | list[FileEntry], **extra: object) -> dict[str, object]:
    """The JSON object that `manifest.json` holds: schema, digest, files by path, and what else the caller records."""
    files = {entry.path: {"bytes": entry.bytes, "sha256": entry.sha256} for entry in sorted(entries, key=lambda item: item.path)}
    return {"schema": 1, "digest": directory_digest(entries), "files": files, **extra}


def manifest_entries(body: dict[str, object]) -> tuple[FileEntry, ...]:
    """The entries of a manifest body. ValueError when it is malformed or its digest is not that of its entries."""
    files = body.get("files")
    if body.get("schema") != 1 or not isinstance(files, dict):
        raise ValueError("not a manifest of schema 1")
    for path, item in files.items():
        if not isinstance(item, dict) or type(item.get("bytes")) is not int or item["bytes"] < 0 or not isinstance(item.get("sha256"), str):
            raise ValueError(f"malformed manifest: {str(path)[:80]!r} needs bytes and sha256")
        if not str(path).isprintable() or len(str(path)) > PATH_CHARACTERS_MAX:
            raise ValueError(f"malformed manifest: {str(path)[:80]!r} is no path of a file")
    try:
        entries = tuple(FileEntry(path=str(path), bytes=item["bytes"], sha256=item["sha256"]) for path, item in files.items())
        digest = directory_digest(entries)
    except (AssertionError, KeyError, TypeError) as fault:
        raise ValueError(f"malformed manifest: {fault}") from fault
    if digest != body.get("digest"):
        raise ValueError(f"the manifest says digest {body.get('digest')}, its entries give {digest}")
    return entries
