"""safetensors files out of memory, as pieces that can be written and hashed at the same time, without another copy of the tensors.

The bytes are those that the library's own `save_file` gives (a test compares them). Writing is done by `trainer.files`, which
the library can't do: it makes its own system calls, and reading a file back is then the only way to a digest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainer.files import Buffer

DTYPES = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")
"""In the order in which the library lays tensors out: wide ones first, so that every tensor is aligned; by name within a type."""
HEADER_ALIGNMENT_BYTES = 8
FORMAT = {"format": "pt"}
"""The only metadata: a second key would make the bytes of the header depend on a hash order."""

_NUMPY = {"uint64": "U64", "int64": "I64", "float64": "F64", "float32": "F32", "uint32": "U32", "int32": "I32", "float16": "F16",
          "uint16": "U16", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"}
_TORCH = {**{f"torch.{name}": word for name, word in _NUMPY.items()}, "torch.bfloat16": "BF16"}

AnyTensor = torch.Tensor | npt.NDArray[Any]


def file_pieces(tensors: Mapping[str, AnyTensor]) -> list[Buffer]:
    """The bytes of a safetensors file of these tensors, which must stay as they are until the pieces are written."""
    kinds = {name: _dtype(tensor) for name, tensor in tensors.items()}
    names = sorted(tensors, key=lambda name: (DTYPES.index(kinds[name]), name.encode()))
    header: dict[str, Any] = {"__metadata__": FORMAT}
    pieces, place = [], 0
    for name in names:
        data = _bytes_of(tensors[name])
        header[name] = {"dtype": kinds[name], "shape": list(tensors[name].shape), "data_offsets": [place, place + len(data)]}
        place += len(data)
        pieces.append(data)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT_BYTES)
    return [len(text).to_bytes(8, "little") + text, *pieces]


def _dtype(tensor: AnyTensor) -> str:
    return _TORCH[str(tensor.dtype)] if isinstance(tensor, torch.Tensor) else _NUMPY[str(tensor.dtype)]


def _bytes_of(tensor: AnyTensor) -> Buffer:
    """A view of a tensor's memory (a copy only where it does not lie in one piece)."""
    if tensor.numel() == 0 if isinstance(tensor, torch.Tensor) else tensor.size == 0:
        return b""
    if isinstance(tensor, torch.Tensor):
        assert tensor.device.type == "cpu", "a snapshot lies in host memory"
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
