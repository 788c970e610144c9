"""What a campaign's directory holds, read for the report: nothing there is trusted to be whole, and what is missing is said.

Every reader notes its trouble in `Missing` and gives back what it could read, so that a report can be written of any campaign.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetd.files import read_record
from fleetd.wire import WireError
from policies.freeze import LedgerEvent, canonical, order_faults

LINE_BYTES_MAX = 1024 * 1024
LINES_MAX = 2_000_000
LEDGER_ENTRIES_MAX = 10_000
GENESIS = "0" * 64


@dataclass(slots=True)
class Missing:
    """What the report does not show, and why; each once."""

    notes: list[dict[str, str]] = field(default_factory=list)

    def add(self, what: str, because: str) -> None:
        note = {"what": what, "because": because}
        if note not in self.notes:
            self.notes.append(note)


def record(path: Path, what: str, missing: Missing, *, absent: str | None) -> dict[str, Any] | None:
    """A JSON record, or None with a note. `absent` says what it means when there is no file; None: that is no news."""
    try:
        value = read_record(path)
    except FileNotFoundError:
        if absent is not None:
            missing.add(what, absent)
        return None
    except (OSError, WireError) as fault:
        missing.add(what, f"{path.name} can't be read: {fault}")
        return None
    if isinstance(value, dict):
        return value
    missing.add(what, f"{path.name} holds no JSON object")
    return None


def lines(path: Path, what: str, missing: Missing) -> Iterator[dict[str, Any]]:
    """The JSON objects of a .jsonl file, in order. A torn last line is how such a file ends after a crash; other damage is noted."""
    torn = 0
    try:
        with open(path, "rb") as file:
            for _ in range(LINES_MAX):
                line = file.readline(LINE_BYTES_MAX)
                if not line:
                    break
                value = _object(line)
                if value is not None:
                    yield value
                elif line.strip() and line.endswith(b"\n"):
                    torn += 1
    except FileNotFoundError:
        missing.add(what, f"there is no {path.name} of it in the store")
    except OSError as fault:
        missing.add(what, f"{path.name} can't be read: {fault.strerror}")
    if torn:
        missing.add(what, f"{torn} {'line' if torn == 1 else 'lines'} of {path.name} could not be read and are left out")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: Any) -> float | None:
    """A finite float, or None: JSON has no NaN, and a report no surprise."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def group(value: Any) -> dict[str, Any]:
    """The value when it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSight:
    """The entries as the file has them, and what a reader finds when it checks chain and order by itself."""

    entries: tuple[dict[str, Any], ...]
    chain: str
    """`whole`, or where it breaks."""
    order: tuple[str, ...] = ()
    """What the order of entries breaks; empty when it keeps every rule."""


def read_ledger(path: Path, missing: Missing) -> LedgerSight | None:
    """The ledger with its chain checked again from the bytes. None when there is none."""
    if not path.exists():
        missing.add("ledger", "there is none yet: nothing was registered, frozen or opened")
        return None
    entries: list[dict[str, Any]] = []
    chain, previous = "whole", GENESIS
    for value in lines(path, "ledger", missing):
        if len(entries) >= LEDGER_ENTRIES_MAX or not isinstance(value.get("event"), dict):
            break
        sealed = {name: value.get(name) for name in ("sequence", "at", "code", "event")}
        expected = hashlib.sha256(previous.encode() + canonical(sealed)).hexdigest()
        if chain == "whole" and (value.get("prev") != previous or value.get("hash") != expected):
            chain = f"broken at entry {len(entries) + 1}"
        previous = str(value.get("hash"))
        entries.append(value)
    return LedgerSight(entries=tuple(entries), chain=chain, order=_order(entries))


def _order(entries: list[dict[str, Any]]) -> tuple[str, ...]:
    events = []
    for number_, entry in enumerate(entries, 1):
        body = dict(entry["event"])
        events.append(LedgerEvent(sequence=number_, kind=str(body.pop("kind", "")), body=body))
    try:
        return order_faults(tuple(events))
    except (KeyError, TypeError, AttributeError) as fault:
        return (f"an entry lacks {fault}",)
