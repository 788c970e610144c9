"""What a file's own bytes say against it, before anybody relies on it: a Git LFS pointer in place of the file, weights that were cut short.

A digest finds any change where one was recorded. These two are found where none was: on the machine that a model or a corpus comes from.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

LFS_HEAD = b"version https://git-lfs.github.com/spec/"
LFS_POINTER = "it is a Git LFS pointer, not the file itself: git lfs pull"
POINTER_BYTES_MAX = 1024
"""What the specification of Git LFS allows a pointer."""
HEADER_LENGTH_BYTES = 8
HEADER_BYTES_MAX = 100_000_000
"""What the format of safetensors allows its header."""
WEIGHTS_SUFFIX = ".safetensors"


def content_fault(path: Path) -> str | None:
    """Why this file can't be what its name says, from its first bytes and its size; None when nothing speaks against it. OSError."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(len(LFS_HEAD))
        if is_pointer(head, size):
            return LFS_POINTER
        if path.suffix != WEIGHTS_SUFFIX:
            return None
        file.seek(0)
        return _weights_fault(file, size)


def is_pointer(head: bytes, size: int) -> bool:
    return size <= POINTER_BYTES_MAX and head.startswith(LFS_HEAD)


def difference(path: Path, *, found_bytes: int, found_sha256: str, expected_bytes: int, expected_sha256: str) -> str:
    """How a file differs from what was recorded of it, in the words that help most."""
    try:
        with open(path, "rb") as file:
            if is_pointer(file.read(len(LFS_HEAD)), found_bytes):
                return LFS_POINTER
    except OSError:
        pass  # it was readable a moment ago; the digests say enough
    if found_bytes < expected_bytes:
        return f"it is cut short: {found_bytes} of {expected_bytes} bytes"
    return f"its SHA-256 is {found_sha256} in {found_bytes} bytes, the manifest says {expected_sha256} in {expected_bytes}"


def _weights_fault(file: Any, size: int) -> str | None:
    """The header of a safetensors file says where its last tensor ends, and that is the end of the file."""
    if size < HEADER_LENGTH_BYTES:
        return f"it is cut short: {size} bytes, not even a header's length"
    length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
    if length > HEADER_BYTES_MAX:
        return f"it is no safetensors file: its header would have {length} bytes"
    if size < HEADER_LENGTH_BYTES + length:
        return f"it is cut short: {size} bytes, its header alone has {length}"
    try:
        header = json.loads(file.read(length))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as fault:
        return f"it is no safetensors file: its header can't be read ({type(fault).__name__})"
    expected = HEADER_LENGTH_BYTES + length + max(ends, default=0)
    if size < expected:
        return f"it is cut short: {size} of {expected} bytes"
    return None if size == expected else f"{size - expected} bytes stand behind its last tensor"
