"""Numbers in the words of a screen: durations, ages, sizes, losses, moments. Unknown is never a number.

Pure: a screen passes the moment in. Everything that shows a figure to a person gets its text here, so that one figure reads the
same in the table, in the live view and in a log line.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

from policies.facts import GIB, MIB, parse_moment

UNKNOWN = "?"
ABSENT = "—"
DURATION_TEXT_MAX = 40

_UNITS_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(min|[smhd])")
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def duration(seconds: float | None) -> str:
    """`45 s`, `12 min`, `1 h 05 min`, `3 d 4 h`; whole units, rounded down. A negative one reads as zero."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def age(seconds: float | None) -> str:
    """`now` below two seconds, else `12 s ago`; `?` when nobody knows."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return "now" if seconds < 2 else f"{duration(seconds)} ago"


def until(seconds: float | None) -> str:
    """`in 12 min`, or `passed 3 min ago`."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    return f"in {duration(seconds)}" if seconds >= 0 else f"passed {duration(-seconds)} ago"


def size(count: float | None) -> str:
    """`1.20 GiB`, `512 MiB`, `900 B`."""
    if count is None:
        return UNKNOWN
    if count >= GIB:
        return f"{count / GIB:.2f} GiB" if count < 100 * GIB else f"{count / GIB:.0f} GiB"
    if count >= MIB:
        return f"{count / MIB:.0f} MiB"
    return f"{count / 1024:.0f} KiB" if count >= 1024 else f"{count:.0f} B"


def share(used: float | None, cap: float | None) -> str:
    """`1.20/2.00 GiB`: both in the unit of the cap, `?` for a part nobody knows. A little of a large cap keeps its own unit."""
    if cap is None:
        return f"{size(used)}/{UNKNOWN}"
    unit, divisor, digits = ("GiB", GIB, 2) if cap >= GIB else ("MiB", MIB, 0)
    whole = f"{cap / divisor:.{digits}f} {unit}"
    if used is not None and 0 < used < 0.05 * divisor:
        return f"{size(used)}/{whole}"
    return f"{UNKNOWN if used is None else f'{used / divisor:.{digits}f}'}/{whole}"


def loss(value: float | None) -> str:
    """Four significant digits at least: `5.231`, `12.35`, `1055`; `nan` is said as it is."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if abs(value) < 100 else f"{value:,.1f}"


def rate(value: float | None) -> str:
    """Steps per second: `2.1`, `0.034`, `120`."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def perplexity(nats_per_token: float | None) -> str:
    """exp of a mean NLL, with thousands separated: `431`, `1,055`, `9.4`."""
    if nats_per_token is None or not math.isfinite(nats_per_token) or nats_per_token > 700:
        return UNKNOWN
    value = math.exp(nats_per_token)
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def moment(text: str | None, now: datetime | None = None) -> str:
    """`16:05:00 UTC` on the day of `now`, else `2026-12-01 16:05 UTC`."""
    if not text:
        return UNKNOWN
    try:
        at = parse_moment(text)
    except ValueError:
        return clean(text)
    if now is not None and at.date() == now.date():
        return at.strftime("%H:%M:%S UTC")
    return at.strftime("%Y-%m-%d %H:%M UTC")


def clean(text: Any) -> str:
    """The text without control characters: what a trainer or a host wrote never steers the terminal of the reader."""
    return str(text).translate(_CONTROLS)


def one_line(text: Any) -> str:
    return " ".join(clean(text).split())


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration_seconds(text: str) -> float:
    """Seconds from `90`, `90s`, `15m`, `1h30m`, `2d`. ValueError says what is understood."""
    spoken = text.strip().lower()
    if len(spoken) <= DURATION_TEXT_MAX:
        if re.fullmatch(r"\d+(\.\d+)?", spoken):
            return float(spoken)
        if spoken and not _DURATION.sub("", spoken).strip():
            return sum(float(count) * _UNITS_SECONDS[unit] for count, unit in _DURATION.findall(spoken))
    raise ValueError(f"{text!r} is no duration: write seconds (90), or 90s, 15m, 1h30m, 2d")
