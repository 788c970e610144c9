"""The one durable memory of a process: numbered entries and a few named values, in SQLite.

The coordinator keeps its history here, a supervisor its spool of notices. A full or failing disk never raises into a loop: the
journal goes read-only, keeps what it was given in a bounded queue, tries again on every call, and `health` says so. Bytes that
are wrong do raise: `JournalDamaged` names the command that salvages them, and nothing is ever overwritten.

    state of the journal     append            entries           health
    writable                 durable           what is on disk   "ok"
    read-only (disk full)    queued in memory  what is on disk   "read-only since …: …"
    queue full               dropped, counted  what is on disk   "read-only since …, N entries lost"
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.journal_file import READ_STATE, connect, damaged, read_entry, readable
from fleetd.seals import sealed, unsealed
from policies.errors import ExplainedError

QUEUE_ENTRIES_MAX = 10_000
ENTRIES_PER_READ_MAX = 100_000

SALVAGED = "journal.salvaged"
"""In the state of a journal that was salvaged: up to which number it was kept. What came next is lost, and others may still go by it."""
_LAST = "journal.last"
_READ = "SELECT sequence, CAST(body AS BLOB) FROM entries WHERE sequence > ? ORDER BY sequence LIMIT ?"


class Journal:
    """Numbered entries (from 1, no gaps) and named values. One writer per file; readers open it with `read_only`."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._connection: sqlite3.Connection | None = None
        self._guard = threading.RLock()
        self._durable_last = 0
        self._queue: list[dict[str, Any]] = []
        self._state: dict[str, Any] = {}
        self._state_waiting: dict[str, Any] = {}
        self._trim_waiting = 0
        self._floor_waiting = 0
        self._fault = ""
        self._lost_count = 0

    @classmethod
    def open(cls, path: Path | str, *, read_only: bool = False, patient: bool = False) -> Journal:
        """The journal at `path`, created when there is none.

        JournalDamaged when its bytes are wrong. When the disk does not let it be opened: an ExplainedError, or, if the caller is
        `patient` (a supervisor has a trainer to watch), a journal that queues until it can be.
        """
        journal = cls(Path(path), read_only=read_only)
        if not journal._connect() and not patient:
            fix = "free space on that disk or mend its permissions, then start again"
            raise ExplainedError("the journal can't be opened", where=str(path), what=journal._fault, fix=fix)
        return journal

    @property
    def health(self) -> str:
        """`ok`, or in words what is wrong and how much waits in memory."""
        with self._guard:
            if not self._fault and not self._lost_count:
                return "ok"
            lost = f"; {self._lost_count} entries lost" if self._lost_count else ""
            state = f"read-only: {self._fault}; {len(self._queue)} entries wait in memory" if self._fault else "writable again"
            return state + lost

    @property
    def is_durable(self) -> bool:
        """Whether everything given so far is on disk. A start needs this; a signal for cap, deadline or stop does not."""
        with self._guard:
            return self._connection is not None and not self._fault and not self._queue and not self._state_waiting

    @property
    def is_crowded(self) -> bool:
        """Whether so much waits in memory that its owner should take in nothing that will come again."""
        return len(self._queue) >= QUEUE_ENTRIES_MAX // 2

    @property
    def is_known(self) -> bool:
        """Whether the file could be read at all, so that `last` and the state are what history says."""
        return self._connection is not None

    @property
    def last(self) -> int:
        """The highest number given out, including entries that still wait in memory."""
        with self._guard:
            return self._next() - 1

    def append(self, entries: Iterable[dict[str, Any]], *, state: dict[str, Any] | None = None) -> None:
        """Add entries, and set state values in the same transaction. An entry's own `sequence` must be the next one; without it, it is given."""
        assert not self.read_only, "a reader does not write"
        with self._guard:
            for entry in entries:
                self._enqueue(entry)
            if state:
                self._state.update(state)
                self._state_waiting.update(state)
            self.retry()

    def retry(self) -> None:
        """Write what waits. Cheap when nothing does; called once per tick."""
        with self._guard:
            waiting = self._queue or self._state_waiting or self._trim_waiting or self._floor_waiting
            if self.read_only or not (waiting or self._connection is None or self._fault):
                return
            if self._connection is not None or self._connect():
                self._write()

    def entries(self, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        """Durable entries with a number above `after`, in order. Empty when the file can't be read now."""
        assert 0 < limit <= ENTRIES_PER_READ_MAX
        with self._guard:
            if self._connection is None and not self._connect():
                return []
            assert self._connection is not None
            try:
                rows = self._connection.execute(_READ, (after, limit)).fetchall()
            except sqlite3.OperationalError as fault:
                self._fault = str(fault)
                return []
            except sqlite3.DatabaseError as fault:
                raise damaged(self.path, str(fault)) from fault
        return [read_entry(self.path, sequence, body) for sequence, body in rows]

    def state_get(self, key: str, default: Any = None) -> Any:
        with self._guard:
            return self._state.get(key, default)

    def state_set(self, key: str, value: Any) -> None:
        """Set one named JSON value; nothing is written when it already has it."""
        with self._guard:
            if key not in self._state or self._state[key] != value:
                self.append((), state={key: value})

    def trim(self, upto: int) -> None:
        """Forget entries numbered up to `upto`, which the reader has acknowledged. Their numbers are never given again."""
        with self._guard:
            if upto > 0:
                self._trim_waiting = max(self._trim_waiting, min(upto, self._durable_last))
                self.retry()

    def start_after(self, sequence: int) -> None:
        """Let the next number be above `sequence`: for a spool that was lost while its reader remembers what it saw."""
        with self._guard:
            if sequence > self._durable_last:
                self._floor_waiting = sequence
                self.retry()

    def close(self) -> None:
        with self._guard:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _enqueue(self, entry: dict[str, Any]) -> None:
        # Who numbers entries has already acted on them, and keeps the bound by `is_crowded`: history without one of them would be another history.
        if len(self._queue) >= QUEUE_ENTRIES_MAX and "sequence" not in entry:
            self._lost_count += 1  # the oldest stay: what happened first explains the rest
            return
        assert entry.get("sequence", self._next()) == self._next(), f"entry {entry.get('sequence')} where {self._next()} is next"
        self._queue.append(entry)

    def _next(self) -> int:
        return max(self._durable_last, self._floor_waiting) + len(self._queue) + 1

    def _connect(self) -> bool:
        try:
            connection = connect(self.path, read_only=self.read_only)
            state = {key.decode(): unsealed(value) for key, value in connection.execute(READ_STATE)}
            highest = connection.execute("SELECT max(sequence) FROM entries").fetchone()[0] or 0
        except (sqlite3.OperationalError, OSError) as fault:
            self._fault = str(fault)
            return False
        except (sqlite3.DatabaseError, ValueError) as fault:
            raise damaged(self.path, str(fault)) from fault
        self._connection, self._fault = connection, ""
        self._durable_last = max(highest, state.pop(_LAST, 0))
        self._state = {**state, **self._state_waiting}
        return True

    def _write(self) -> None:
        assert self._connection is not None
        connection, last = self._connection, max(self._durable_last, self._floor_waiting)
        try:
            faults.before("journal write", sqlite3.OperationalError)
            connection.execute("BEGIN IMMEDIATE")
            for entry in self._queue:
                last += 1
                body = json.dumps({**entry, "sequence": last}, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
                connection.execute("INSERT INTO entries VALUES (?, ?)", (last, sealed(body)))
            if self._trim_waiting:
                connection.execute("DELETE FROM entries WHERE sequence <= ?", (self._trim_waiting,))
            values = self._state_waiting
            if self._trim_waiting or self._floor_waiting:
                values = {**values, _LAST: max(last, values.get(_LAST, 0))}
            connection.executemany("INSERT OR REPLACE INTO state VALUES (?, ?)", [(key, sealed(json.dumps(value))) for key, value in values.items()])
            faults.after("journal filled")
            connection.execute("COMMIT")
        except sqlite3.DatabaseError as fault:
            _roll_back(connection)
            self._fault = str(fault)
            return
        faults.after("journal committed")
        self._durable_last, self._fault = last, ""
        self._queue, self._state_waiting, self._trim_waiting, self._floor_waiting = [], {}, 0, 0


def salvage(path: Path, aside: Path, *, start_after: int = 0) -> int:
    """Move a damaged journal to `aside`, bytes unchanged, and make a new one at `path` from what still reads. Returns the entries kept.

    Kept are the entries from the first one up to the first that does not read: history after a hole would contradict itself.
    What is added to them is numbered above `start_after`, where nothing that is lost can have been.
    """
    assert not aside.exists(), f"{aside} is in the way"
    entries, state = readable(path)
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(f"{path}{suffix}"):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
    last = state.pop(_LAST, 0)
    kept = _contiguous(entries)
    journal = Journal.open(path)
    journal.start_after(kept[0]["sequence"] - 1 if kept else last)
    if start_after:
        state[_LAST] = max(last, start_after)
    state[SALVAGED] = kept[-1]["sequence"] if kept else last
    journal.append(kept, state=state)
    journal.close()
    return len(kept)


def _roll_back(connection: sqlite3.Connection) -> None:
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.DatabaseError:
        pass  # SQLite rolls a transaction back by itself on most disk errors; a second refusal changes nothing


def _contiguous(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    for entry in entries:
        if kept and entry["sequence"] != kept[-1]["sequence"] + 1:
            break
        kept.append(entry)
    return kept


def main(arguments: list[str]) -> int:
    """`python -m fleetd.journal salvage PATH`."""
    if len(arguments) != 2 or arguments[0] != "salvage":
        print("usage: python -m fleetd.journal salvage PATH", file=sys.stderr)
        return 2
    path, number = Path(arguments[1]), 1
    if not path.exists():
        print(f"error: there is no journal at {path}", file=sys.stderr)
        return 4
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    kept = salvage(path, aside)
    print(f"kept {kept} entries in {path}; the damaged file is {aside}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
