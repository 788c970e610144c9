"""JSON at the edges: frozen dataclasses to plain values and back, and one message per line.

`decode` is strict about what it knows and silent about what it does not: a missing field without a default or a wrong type is
a WireError that names the path, an unknown field is left out, so that an older supervisor understands a newer coordinator.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
import typing
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import Any, TypeVar

from policies.facts import format_moment, parse_moment

LINE_BYTES_MAX = 8 * 1024 * 1024
PROTOCOL = 1

T = TypeVar("T")

_PLAIN = frozenset({str, int, float, bool, type(None)})
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
"""Where a surrogate may stand: as an escape, which is whole where two make a pair, or as such."""


class WireError(ValueError):
    """Bytes that are not what the type says; the text names the field."""


def encode(value: Any) -> Any:
    """Plain JSON values for a dataclass, enum, moment, tuple or mapping of them."""
    kind = type(value)
    if kind in _PLAIN:  # most of them, so they come first
        return value
    if dataclasses.is_dataclass(kind):
        return {name: encode(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return format_moment(value)
    if isinstance(value, dict):
        return {str(key.value if isinstance(key, Enum) else key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    assert value is None or isinstance(value, (str, int, float, bool)), f"{type(value).__name__} does not cross a wire"
    return value


def decode(kind: type[T], value: Any, where: str = "$") -> T:
    """A `kind` from plain JSON values; WireError names the field that is wrong."""
    return typing.cast(T, _decode(kind, value, where))


def dumps(value: Any) -> str:
    """One line of canonical JSON: sorted keys, no spaces, no NaN."""
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def loads(text: str | bytes, *, any_float: bool = False) -> Any:
    """The JSON value of one line; WireError when it is too long, malformed, repeats a key, or holds what `dumps` could not write again:
    half a character, or (unless `any_float`, for lines that trainers wrote) NaN or infinity."""
    if len(text) > LINE_BYTES_MAX:
        raise WireError(f"a line of {len(text)} bytes is over the limit of {LINE_BYTES_MAX}")
    numbers: dict[str, Any] = {} if any_float else {"parse_constant": _finite, "parse_float": _finite}
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_unique, **numbers)
        if _HALF_CHARACTER.search(text) is not None:
            json.dumps(value, ensure_ascii=False).encode()
    except WireError:
        raise
    except (ValueError, RecursionError) as fault:
        raise WireError(f"not JSON: {fault}") from fault
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise WireError(f"{text} is no finite number")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise WireError("an object repeats a key")
    return found


def _decode(kind: Any, value: Any, where: str) -> Any:
    if kind is Any:
        return value
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(kind, value, where)
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise WireError(f"{where}: expected a list, found {type(value).__name__}")
        item = typing.get_args(kind)[0]
        items = [_decode(item, each, f"{where}[{index}]") for index, each in enumerate(value)]
        return tuple(items) if origin is tuple else items
    if origin is dict:
        if not isinstance(value, dict):
            raise WireError(f"{where}: expected an object, found {type(value).__name__}")
        key_kind, item = typing.get_args(kind)
        return {_decode(key_kind, key, where): _decode(item, each, f"{where}.{key}") for key, each in value.items()}
    return _decode_plain(kind, value, where)


def _decode_plain(kind: Any, value: Any, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(typing.cast(type, kind), value, where)
    try:
        if isinstance(kind, type) and issubclass(kind, Enum):
            return kind(value)
        if kind is datetime:
            return parse_moment(value)
    except (ValueError, TypeError, AttributeError) as fault:
        raise WireError(f"{where}: {fault}") from fault
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
        raise WireError(f"{where}: expected {kind.__name__}, found {type(value).__name__}")
    return value


def _decode_union(kind: Any, value: Any, where: str) -> Any:
    options = typing.get_args(kind)
    if value is None and type(None) in options:
        return None
    real = [option for option in options if option is not type(None)]
    assert len(real) == 1, f"{where}: a wire type is one type or None"
    return _decode(real[0], value, where)


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise WireError(f"{where}: expected an object, found {type(value).__name__}")
    arguments: dict[str, Any] = {}
    for name, hint, is_needed in _fields(kind):
        if name in value:
            arguments[name] = _decode(hint, value[name], f"{where}.{name}")
        elif is_needed:
            raise WireError(f"{where}: {name} is missing")
    return kind(**arguments)


@lru_cache(maxsize=256)
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@lru_cache(maxsize=256)
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Of each field of a dataclass: its name, its type, and whether a value has to be given."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return tuple((field.name, hints[field.name], field.default is missing and field.default_factory is missing) for field in dataclasses.fields(kind))
