"""The SQLite file under a journal: made whole, opened only if its bytes are right, and read as far as it goes when they are not.

A new file is built beside its name and linked there complete, so an empty file is never a young journal: it is a lost one, and SQLite
would throw away the write-ahead log beside it.
"""

from __future__ import annotations

import os
import shlex
import sqlite3
import sys
import tempfile
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.files import sync_folder
from fleetd.seals import unsealed
from policies.errors import ExplainedError, JournalDamaged

SCHEMA_VERSION = 1
APPLICATION_ID = 0x666C6474
BUSY_SECONDS_MAX = 2.0
"""A reader that recovers the write-ahead log holds the file for milliseconds; more than this is retried on the next call."""
EMPTY_BYTES_MAX = 1
"""SQLite takes a file of one byte for a new one, too."""

READ_STATE = "SELECT CAST(key AS BLOB), CAST(value AS BLOB) FROM state"
"""As bytes, because SQLite calls text that is no UTF-8 an operational error, as it calls a full disk."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS entries (sequence INTEGER PRIMARY KEY, body TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS state (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)


def connect(path: Path, *, read_only: bool) -> sqlite3.Connection:
    """An open connection; a writer's creates the file when there is none. sqlite3.OperationalError or OSError when the disk does not let
    it be opened now, another DatabaseError when its bytes are wrong."""
    if not read_only:
        faults.before("journal open", sqlite3.OperationalError)
        if not path.exists():
            _make(path)
    if path.exists() and path.stat().st_size <= EMPTY_BYTES_MAX:
        raise sqlite3.DatabaseError("the file is empty")
    # A journal that its owner closed has no -wal and -shm files; a reader may make and remove them, so `mode=ro` and not `immutable`.
    connection = _opened(path, "ro" if read_only else "rw")
    try:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise ExplainedError(
                "the journal was written by a newer fleetd", where=str(path), what=f"it has schema {version}, this program knows {SCHEMA_VERSION}",
                fix="start the newer fleetd again",
            )
        if read_only:
            return connection
        verdict = connection.execute("PRAGMA integrity_check(3)").fetchall()
        if verdict != [("ok",)]:
            raise sqlite3.DatabaseError("; ".join(str(row[0]) for row in verdict))
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        if version < SCHEMA_VERSION:
            _create_tables(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _make(path: Path) -> None:
    """A journal without entries under its name, complete and durable."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-{os.getpid()}-", suffix=".tmp")
    try:
        with closing(_opened(Path(temporary), "rw")) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # nobody reads it yet, and what is cut short here is thrown away
            _create_tables(connection)
        os.fchmod(descriptor, 0o644)  # an agent of another user has to read a supervisor's
        os.fsync(descriptor)
        faults.after("journal made")
        with suppress(FileExistsError):  # another writer was quicker, and made the same
            os.link(temporary, path)
    finally:
        os.close(descriptor)
        os.unlink(temporary)
    sync_folder(path.parent)


def _opened(path: Path, mode: str) -> sqlite3.Connection:
    target = f"file:{_quoted(path)}?mode={mode}"
    return sqlite3.connect(target, uri=True, isolation_level=None, timeout=BUSY_SECONDS_MAX, check_same_thread=False)


def _create_tables(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    for table in _TABLES:
        connection.execute(table)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def read_entry(path: Path, sequence: int, body: bytes) -> dict[str, Any]:
    """The entry of one row. JournalDamaged when it is not what was written."""
    try:
        entry = unsealed(body)
    except ValueError as fault:
        raise damaged(path, f"entry {sequence}: {fault}") from fault
    if not isinstance(entry, dict) or entry.get("sequence") != sequence:
        raise damaged(path, f"entry {sequence} does not carry its own number")
    return entry


def damaged(path: Path, what: str) -> JournalDamaged:
    fix = f"{sys.executable} -m fleetd.journal salvage {shlex.quote(str(path))}   (keeps the damaged bytes beside it and what still reads)"
    return JournalDamaged("the journal is damaged", where=str(path), what=what, fix=fix)


def _quoted(path: Path) -> str:
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def readable(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Entries from the first one up to the first that does not read, and the named values that do."""
    entries: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    try:
        if path.stat().st_size <= EMPTY_BYTES_MAX:
            return entries, state
        connection = _opened(path, "ro")
    except (sqlite3.DatabaseError, OSError):
        return entries, state
    try:
        for sequence, body in connection.execute("SELECT sequence, CAST(body AS BLOB) FROM entries ORDER BY sequence"):
            entries.append(read_entry(path, sequence, body))
    except (sqlite3.DatabaseError, JournalDamaged):
        pass  # what came before the damage is what can be kept
    with suppress(sqlite3.DatabaseError):
        for key, value in connection.execute(READ_STATE):
            with suppress(ValueError):
                state[(key or b"").decode()] = unsealed(value)
    connection.close()
    return entries, state
