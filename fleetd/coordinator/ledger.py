"""The ledger: what was registered, frozen, opened and judged, one JSON line each, chained by SHA-256.

    hash = SHA256(previous hash || canonical({sequence, at, code, event}))

It rules over the journal where they differ. A chain detects an edit, not a rewrite of the whole file. Entries are appended under
flock and synced before anything that they announce happens.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.files import sync_folder
from policies.errors import ExplainedError, LedgerDamaged, NoRoom
from policies.facts import format_moment
from policies.freeze import TORN, LedgerEvent, canonical

GENESIS = "0" * 64
LEDGER_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Who does something, when, and with which code: what every entry records beside the event."""

    actor: str
    at: datetime
    code_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    sequence: int
    at: str
    code: str
    kind: str
    body: dict[str, Any]
    hash: str

    @property
    def event(self) -> LedgerEvent:
        return LedgerEvent(sequence=self.sequence, kind=self.kind, body=self.body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """A verified chain. `torn` is a last line that a crash cut short: no entry, kept aside at the next append."""

    entries: tuple[LedgerEntry, ...] = ()
    torn: bytes = b""

    @property
    def head(self) -> str:
        return self.entries[-1].hash if self.entries else GENESIS

    @property
    def events(self) -> tuple[LedgerEvent, ...]:
        return tuple(entry.event for entry in self.entries)

    def first(self, kind: str) -> LedgerEntry | None:
        return next((entry for entry in self.entries if entry.kind == kind), None)


def read_ledger(path: Path) -> Ledger:
    """The verified ledger; an empty one when there is none yet. LedgerDamaged names the first entry that does not fit."""
    try:
        with open(path, "rb") as file:
            return _parse(path, file.read(LEDGER_BYTES_MAX + 1))[0]
    except FileNotFoundError:
        return Ledger()


def enter(path: Path, kind: str, body: dict[str, Any], act: Act, *, unless: Callable[[Ledger], LedgerEntry | None] | None = None) -> LedgerEntry:
    """Append one entry, durable when this returns. `unless` sees the ledger under its lock: the entry it returns stands instead,
    and what it raises keeps the ledger as it is. LedgerDamaged when the chain does not verify."""
    with _opened(path) as descriptor:
        data = _read_all(descriptor)
        ledger, whole_bytes = _parse(path, data)
        if ledger.torn:
            ledger, whole_bytes = _set_aside(path, descriptor, ledger, whole_bytes, act)
        elif data and not data.endswith(b"\n"):
            _write(path, descriptor, b"\n")  # the entry is complete, only its line end was lost
        found = unless(ledger) if unless is not None else None
        return found if found is not None else _append(path, descriptor, ledger, kind, body, act)


def _append(path: Path, descriptor: int, ledger: Ledger, kind: str, body: dict[str, Any], act: Act) -> LedgerEntry:
    sealed = {
        "sequence": len(ledger.entries) + 1, "at": format_moment(act.at), "code": act.code_digest,
        "event": {"kind": kind, "actor": act.actor, **body},
    }
    line = {**sealed, "prev": ledger.head, "hash": _hash(ledger.head, sealed)}
    _write(path, descriptor, canonical(line) + b"\n")
    return _entry(line)


def _set_aside(path: Path, descriptor: int, ledger: Ledger, whole_bytes: int, act: Act) -> tuple[Ledger, int]:
    """Keep a torn tail in a file of its own, cut it off, and enter that this was done."""
    name = f"{path.name}.torn-{len(ledger.entries) + 1}"
    aside = path.with_name(name)
    with open(aside, "ab") as file:
        file.write(ledger.torn)
        file.flush()
        os.fsync(file.fileno())
    os.ftruncate(descriptor, whole_bytes)
    os.fsync(descriptor)
    sync_folder(path.parent)
    kept = Ledger(entries=ledger.entries)
    body = {"bytes": len(ledger.torn), "sha256": hashlib.sha256(ledger.torn).hexdigest(), "kept_in": name}
    entry = _append(path, descriptor, kept, TORN, body, act)
    return Ledger(entries=(*kept.entries, entry)), os.fstat(descriptor).st_size


def _parse(path: Path, data: bytes) -> tuple[Ledger, int]:
    """The verified ledger and the length of its whole lines in bytes."""
    if len(data) > LEDGER_BYTES_MAX:
        raise _damaged(path, 0, f"it is over {LEDGER_BYTES_MAX} bytes")
    *lines, tail = data.split(b"\n")
    entries: list[LedgerEntry] = []
    if tail and _holds_an_object(tail):
        lines, tail = [*lines, tail], b""
    for line in lines:
        entries.append(_verified(path, len(entries) + 1, line, entries[-1].hash if entries else GENESIS))
    return Ledger(entries=tuple(entries), torn=tail), len(data) - len(tail)


def _verified(path: Path, sequence: int, line: bytes, previous: str) -> LedgerEntry:
    """The entry of one line, if it is spelled canonically, follows `previous` and hashes to what it says."""
    try:
        value = json.loads(line)
        if canonical(value) != line:
            raise ValueError("it is not spelled as it was written")
        sealed = {name: value[name] for name in ("sequence", "at", "code", "event")}
        if set(value) != {*sealed, "prev", "hash"}:
            raise ValueError("its fields are not those of an entry")
        if value["sequence"] != sequence:
            raise ValueError(f"it has sequence {value['sequence']}, {sequence} is next")
        if value["prev"] != previous:
            raise ValueError("it does not follow the entry before it")
        if value["hash"] != _hash(previous, sealed):
            raise ValueError("its hash is not that of what it says")
        return _entry(value)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise _damaged(path, sequence, str(fault)) from fault


def _holds_an_object(tail: bytes) -> bool:
    """Whether a last line without an end holds a complete entry: then it is verified like any other, not set aside."""
    try:
        json.JSONDecoder().raw_decode(tail.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return False
    return True


def _entry(value: dict[str, Any]) -> LedgerEntry:
    event = dict(value["event"])
    return LedgerEntry(sequence=value["sequence"], at=value["at"], code=value["code"], kind=event.pop("kind"), body=event, hash=value["hash"])


def _hash(previous: str, sealed: dict[str, Any]) -> str:
    return hashlib.sha256(previous.encode() + canonical(sealed)).hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The ledger's descriptor, locked. The folder is synced when the file is new, so that the entry does not outlive its name."""
    is_new = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if is_new:
            sync_folder(path.parent)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_all(descriptor: int) -> bytes:
    size, data = os.fstat(descriptor).st_size, b""
    while len(data) < min(size, LEDGER_BYTES_MAX + 1):
        chunk = os.pread(descriptor, size - len(data), len(data))
        if not chunk:
            break
        data += chunk
    return data


def _write(path: Path, descriptor: int, line: bytes) -> None:
    """One append, synced, or the ledger as it was: a full disk must not leave half an entry."""
    before = os.fstat(descriptor).st_size
    try:
        faults.before("ledger append")
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{written} of {len(line)} bytes were written")
        os.fsync(descriptor)
        faults.after("ledger appended")
    except OSError as fault:
        os.ftruncate(descriptor, before)
        raise NoRoom(
            "can't write the ledger, so nothing that it should record was done", where=str(path), what=str(fault),
            fix="free some space on that disk; the coordinator tries again",
        ) from fault


def _damaged(path: Path, sequence: int, what: str) -> ExplainedError:
    return LedgerDamaged(
        "the ledger does not verify", where=f"{path}, entry {sequence}", what=what,
        fix="compare it with a backup; while it is damaged nothing is frozen or opened",
    )
