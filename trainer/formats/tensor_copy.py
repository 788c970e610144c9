"""Tensors from file to file as the bytes they are: renamed, gathered or split, never converted, a chunk in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.files import COPY_CHUNK_BYTES
from trainer.formats.tensor_files import DTYPE_BYTES, LENGTH_BYTES, TensorEntry, damaged

ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where the bytes of a tensor lie."""

    file: Path
    entry: TensorEntry


def copy_tensors(target: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write a safetensors file of these tensors: wide types first, by name within a type, so that each is aligned."""
    ordered = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].entry.dtype], tensors[name].entry.dtype, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in ordered:
        entry = tensors[name].entry
        length = entry.end - entry.begin
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [place, place + length]}
        place += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT_BYTES)
    with open(target, "xb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for name in ordered:
            _copy_bytes(tensors[name], name, file)


def _copy_bytes(tensor: StoredTensor, name: str, target: Any) -> None:
    left = tensor.entry.end - tensor.entry.begin
    with open(tensor.file, "rb") as source:
        source.seek(tensor.entry.begin)
        while left:
            chunk = source.read(min(left, COPY_CHUNK_BYTES))
            if not chunk:
                raise damaged(tensor.file, f"it was cut while tensor {name!r} was read")
            target.write(chunk)
            left -= len(chunk)
