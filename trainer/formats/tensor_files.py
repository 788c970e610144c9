"""safetensors files, looked at before the library sees them: the whole header is checked against the size of the file.

    8 bytes      length N of the header, little-endian
    N bytes      JSON: name to {dtype, shape, data_offsets [begin, end]}, and __metadata__ of strings
    the rest     the tensors, one after another, without a gap and without a byte too many

Nothing is allocated for a number that the file merely claims. Every refusal names the file, and the tensor or the offset.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import CheckpointDamaged
from trainer.files import LFS_POINTER, JsonFault, loads

LENGTH_BYTES = 8
HEADER_BYTES_MAX = 32 * 1024 * 1024
TENSORS_MAX = 200_000
DIMENSIONS_MAX = 16
NAME_CHARACTERS_MAX = 1024
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}
FLOATING = ("F16", "BF16", "F32", "F64")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a file. `begin` and `end` are offsets in the file itself."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors that a safetensors file holds, by name. CheckpointDamaged unless header and size say the same."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise damaged(path, "it is no regular file")
            size = status.st_size
            start = file.read(LENGTH_BYTES)
            length = _header_length(path, start + file.read(len(LFS_POINTER)), size)
            file.seek(LENGTH_BYTES)
            header = file.read(length)
    except OSError as fault:
        raise damaged(path, str(fault)) from fault
    return parse_header(header, size - LENGTH_BYTES - length, path)


def parse_header(header: bytes, data_bytes: int, path: Path) -> dict[str, TensorEntry]:
    """The entries of a header that is followed by `data_bytes` bytes. CheckpointDamaged names what contradicts."""
    try:
        described = loads(header)
    except JsonFault as fault:
        raise damaged(path, f"its header, at offset {LENGTH_BYTES}, is {fault}") from fault
    if not isinstance(described, dict):
        raise damaged(path, f"its header, at offset {LENGTH_BYTES}, is no JSON object")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged(path, "its __metadata__ holds something other than strings")
    if len(described) > TENSORS_MAX:
        raise damaged(path, f"{len(described)} tensors are over the limit of {TENSORS_MAX}")
    first = LENGTH_BYTES + len(header)
    entries = {name: _entry(path, name, body, data_bytes, first) for name, body in described.items()}
    _check_layout(path, entries, first, first + data_bytes)
    return entries


def check_floating(path: Path, entries: Mapping[str, TensorEntry]) -> None:
    """CheckpointDamaged unless every tensor is of a type that weights have."""
    for name, entry in entries.items():
        if entry.dtype not in FLOATING:
            raise damaged(path, f"tensor {name!r} at offset {entry.begin} is {entry.dtype}, weights are one of {', '.join(FLOATING)}")


def damaged(path: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("a file of tensors can't be read", where=str(path), what=what,
                             fix="fetch or copy the file again from where it came; of checkpoints, take an older one")


def _header_length(path: Path, start: bytes, size: int) -> int:
    """The length that the first bytes give, once it can be true."""
    if start[:len(LFS_POINTER)] == LFS_POINTER[:len(start)] and len(start) >= LENGTH_BYTES:
        raise damaged(path, "it is a Git LFS pointer, not the file itself: git lfs pull")
    if size < LENGTH_BYTES + 2:
        raise damaged(path, f"it has {size} bytes, which is too short for a header")
    length = int.from_bytes(start[:LENGTH_BYTES], "little")
    if length > size - LENGTH_BYTES:
        raise damaged(path, f"its header claims {length} bytes at offset {LENGTH_BYTES}, "
                      f"the file ends after {size - LENGTH_BYTES}: it is cut or no safetensors file")
    if not 2 <= length <= HEADER_BYTES_MAX:
        raise damaged(path, f"its header of {length} bytes is outside 2 to {HEADER_BYTES_MAX}")
    return length


def _entry(path: Path, name: str, body: Any, data_bytes: int, first: int) -> TensorEntry:
    if not name or len(name) > NAME_CHARACTERS_MAX or not name.isprintable():
        raise damaged(path, f"{name[:40]!r} is no name of a tensor")
    if not isinstance(body, dict) or set(body) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"tensor {name!r} has to have dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = body["dtype"], body["shape"], body["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise damaged(path, f"tensor {name!r} is of dtype {dtype!r}, known are {', '.join(DTYPE_BYTES)}")
    if not _counts(shape) or len(shape) > DIMENSIONS_MAX:
        raise damaged(path, f"tensor {name!r} has shape {str(shape)[:80]}, up to {DIMENSIONS_MAX} whole numbers are needed")
    if not _counts(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= data_bytes:
        raise damaged(path, f"tensor {name!r} lies at {str(offsets)[:80]}, the data has {data_bytes} bytes")
    begin, end = offsets
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if end - begin != needed:
        raise damaged(path, f"tensor {name!r} at offset {first + begin} has {end - begin} bytes, {dtype} {shape} needs {needed}")
    return TensorEntry(dtype=dtype, shape=tuple(shape), begin=first + begin, end=first + end)


def _counts(value: Any) -> bool:
    """A list of whole numbers that a file system could hold: products of a few of them stay small integers."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_layout(path: Path, entries: dict[str, TensorEntry], first: int, last: int) -> None:
    """No tensor shares a byte with another, and every byte belongs to one."""
    place, before = first, "the header"
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != place:
            word = "shares bytes with" if entry.begin < place else "leaves a gap after"
            raise damaged(path, f"tensor {name!r} at offset {entry.begin} {word} {before}, which ends at {place}")
        place, before = entry.end, f"tensor {name!r}"
    if place != last:
        raise damaged(path, f"{last - place} bytes follow the last tensor at offset {place}")
