"""Sizes, durations and moments as people write them, and back: `16GiB`, `2h30m`, `2026-12-01T06:00:00+01:00`.

The first stop of every value in plan.yaml that has a unit. A value without a clear one is refused rather than guessed.
"""

from __future__ import annotations

import itertools
import re
from datetime import datetime, timezone
from typing import Any

from policies.facts import parse_moment

SIZE_BYTES_MAX = 2**60
DURATION_SECONDS_MAX = 366 * 86400.0

_SIZE_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}
_DURATION_UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[dhms])")


class Refused(ValueError):
    """A value that can't be used: what is wrong with it, and what would be taken instead."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(f"{what} — {fix}")
        self.what, self.fix = what, fix


class SizeBytes(int):
    """A number of bytes that knows it is one, so that screens can say `16 GiB`."""


class Seconds(float):
    """A duration that knows it is one, so that screens can say `2 h 30 min`."""


def parse_size(value: object) -> SizeBytes:
    """Bytes from `16GiB`, `500MB` or a bare number of bytes; Refused when the unit is unclear or the size absurd."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _size_in_range(value, str(value))
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise Refused(f"{value!r} is no size", "write a number with a unit, such as 16GiB, or bytes, such as 1024")
    number, unit = match.groups()
    known = {name.lower(): name for name in _SIZE_UNITS}
    if unit and unit not in _SIZE_UNITS and len(unit) == 1:
        raise Refused(f"{value!r}: {unit!r} could mean 1000 or 1024", f"write {number}{unit.upper()}iB (1024) or {number}{unit.upper()}B (1000)")
    name = known.get(unit.lower() or "b")
    if name is None:
        raise Refused(f"{value!r}: {unit!r} is no unit of size", f"use one of {', '.join(_SIZE_UNITS)}")
    exact = float(number) * _SIZE_UNITS[name]
    if name == "B" and not number.isdigit():
        raise Refused(f"{value!r} is a part of a byte", "write whole bytes, or a unit such as GiB")
    return _size_in_range(int(number) * _SIZE_UNITS[name] if number.isdigit() else round(exact), str(value))


def _size_in_range(count: int, text: str) -> SizeBytes:
    if not 0 <= count <= SIZE_BYTES_MAX:
        raise Refused(f"{text} is out of range", "write a size between 0 and 1048576TiB")
    return SizeBytes(count)


def parse_duration(value: Any) -> Seconds:
    """Seconds from `15m`, `2h30m`, `90s`, `1d` or `0`; Refused when a unit is missing or repeated."""
    if isinstance(value, Seconds) or (value == 0 and not isinstance(value, bool)):
        return Seconds(value)  # a section that is read again after its defaults were merged in
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise Refused(f"{value} has no unit", f"write {value:g}s for seconds, {value:g}m for minutes or {value:g}h for hours")
    text = value.strip() if isinstance(value, str) else ""
    parts = _DURATION_PART.findall(text)
    if not parts or _DURATION_PART.sub("", text).strip():
        raise Refused(f"{value!r} is no duration", "write hours, minutes and seconds such as 2h30m, 15m, 90s or 1d")
    units = [unit for _, unit in parts]
    if units != sorted(set(units), key=list(_DURATION_UNITS).index):
        raise Refused(f"{value!r} repeats a unit or has them out of order", "write each unit once, the largest first, such as 2h30m")
    seconds = sum(float(number) * _DURATION_UNITS[unit] for number, unit in parts)
    if seconds > DURATION_SECONDS_MAX:
        raise Refused(f"{value!r} is longer than a year", "write a shorter duration")
    return Seconds(seconds)


def parse_deadline(value: object) -> Seconds | datetime:
    """A duration from launch, or an aware UTC moment; Refused for a time without a zone."""
    if isinstance(value, str) and re.match(r"\s*\d{4}-", value):
        text = value.strip()
        if not re.match(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d", text):
            raise Refused(f"{text!r} is no date with a time of day", "write it such as 2026-12-01T06:00:00+01:00")
        try:
            return parse_moment(text)
        except ValueError as fault:
            if "zone" in str(fault):
                raise Refused(
                    f"{text} names no time zone", f"add one: {text}Z for UTC, or {text}{_local_offset(text)} for this machine's zone"
                ) from None
            raise Refused(f"{text!r} is no date and time", "write it such as 2026-12-01T06:00:00+01:00") from None
    return parse_duration(value)


def _local_offset(text: str) -> str:
    """This machine's offset from UTC at that local time: a suggestion only, never assumed."""
    offset = datetime.fromisoformat(text).astimezone().strftime("%z")
    return f"{offset[:3]}:{offset[3:5]}"


def write_size(count: int) -> str:
    """The size as a plan writes it, exactly: `16GiB`, or bytes."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        if count and count % _SIZE_UNITS[name] == 0:
            return f"{count // _SIZE_UNITS[name]}{name}"
    return str(count)


def write_duration(seconds: float) -> str:
    """The duration as a plan writes it, to the millisecond: `2h30m`."""
    text, rest = "", round(seconds * 1000)
    for unit, length in _DURATION_UNITS.items():
        count, rest = divmod(rest, round(length * 1000))
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def show_size(count: int) -> str:
    """`16 GiB`, `1.5 GiB`, `812 KiB`: binary units, at most one decimal, exact bytes below 1 KiB."""
    for name in ("TiB", "GiB", "MiB", "KiB"):
        unit = _SIZE_UNITS[name]
        if count >= unit:
            text = f"{count / unit:.1f}"
            return f"{text[:-2] if text.endswith('.0') else text} {name}"
    return f"{count} B"


def show_duration(seconds: float) -> str:
    """`2 h 30 min`, `15 min`, `90 s`, `0.5 s`: at most two units."""
    if seconds < 0:
        return f"−{show_duration(-seconds)}"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds % 1 and seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    for (large, large_name), (small, small_name) in itertools.pairwise(_SHOWN):
        if whole >= large:
            count, rest = divmod(whole, large)
            rest //= small
            return f"{count} {large_name} {rest} {small_name}" if rest else f"{count} {large_name}"
    raise AssertionError("at least 120 seconds are at least one minute")


_SHOWN = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def show_moment(moment: datetime) -> str:
    """`2026-12-01 06:00:00 UTC`, for tables; records use RFC 3339."""
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
