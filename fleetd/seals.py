"""JSON text behind its checksum, as the journal keeps it: SQLite checks the shape of its pages and never what stands in them."""

from __future__ import annotations

import json
import zlib
from typing import Any

SEAL = "crc:"
"""No JSON text begins like this; what has no seal was written before there were any."""


def sealed(text: str) -> str:
    return f"{SEAL}{zlib.crc32(text.encode()):08x}:{text}"


def unsealed(value: bytes | None) -> Any:
    """The JSON value behind a seal, or without one. ValueError when it is not what was written; a damaged file may hold nothing at all."""
    if value is None:
        raise ValueError("there is nothing where something was written")
    if not value.startswith(SEAL.encode()):
        return json.loads(value)
    told, _, text = value[len(SEAL) :].partition(b":")
    if told != b"%08x" % zlib.crc32(text):
        raise ValueError("it is not what was written: its checksum is another one")
    return json.loads(text)
