"""`audit.jsonl`: what supervisor and shim are about to signal, written before they do. A signal whose sender dies right after it is not lost.

    before    one line: who, whom, why, and what was verified         after    the sender tells the outcome in its own record
    at the start of a supervisor, and after each of its own signals: lines of others become notices, so history has them

The line is written by a thread, and nobody waits long for it: a stop for cap, deadline or order never hangs on a disk. It is not
synced: it has to survive its writer, and no signal survives the machine.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetd import logs
from fleetd.clock import Moment
from fleetd.wire import encode
from policies.facts import ProcessIdentity, format_moment

WRITE_SECONDS_MAX = 0.05
"""A healthy disk takes the line in far less; a signal waits no longer for any."""
LINES_WAITING_MAX = 100
FILE_BYTES_MAX = 1024 * 1024
READ_BYTES_MAX = 2 * FILE_BYTES_MAX


class Audit:
    """One process's pen for the audit of a run."""

    def __init__(self, path: Path, by: str) -> None:
        self.path, self.by = path, by
        self._lines: queue.Queue[tuple[bytes, threading.Event]] = queue.Queue(LINES_WAITING_MAX)
        self._thread: threading.Thread | None = None

    def intend(self, moment: Moment, purpose: str, target: ProcessIdentity | None, verdict: str) -> None:
        """Write down a signal that comes next, or leave it to the thread when the disk is slow."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
            self._thread.start()
        line = {
            "at": format_moment(moment.now), "by": self.by, "by_pid": os.getpid(), "purpose": purpose, "verdict": verdict,
            "pid": target.pid if target is not None else None, "start_ticks": target.start_ticks if target is not None else None,
        }
        written = threading.Event()
        try:
            self._lines.put_nowait((json.dumps(encode(line)).encode() + b"\n", written))
        except queue.Full:
            return  # the disk has taken nothing for long; the log and the outcome still tell of it
        written.wait(WRITE_SECONDS_MAX)

    def _write_all(self) -> None:
        while True:
            line, written = self._lines.get()
            try:
                descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    if os.fstat(descriptor).st_size > FILE_BYTES_MAX:
                        os.ftruncate(descriptor, 0)  # what was in it has long become notices
                    os.write(descriptor, line)
                finally:
                    os.close(descriptor)
            except OSError as fault:
                logs.failed("audit_refused", because=fault)
            written.set()


def untold(path: Path, offset: int, *, own_pid: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Whole lines behind `offset` that other processes wrote, and where the next ones begin."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            offset = offset if offset <= size else 0
            file.seek(offset)
            data = file.read(READ_BYTES_MAX)
    except OSError:
        return [], offset
    whole = data[:data.rfind(b"\n") + 1]
    return [line for line in _lines_of(whole) if line.get("by_pid") != own_pid], offset + len(whole)


def told_of(line: dict[str, Any]) -> dict[str, Any]:
    """The body of the notice for a signal of which nobody has told the outcome."""
    sender = f"{line.get('by')} pid {line.get('by_pid')}"
    return {
        "pid": line.get("pid"), "signal": None, "delivered": None, "purpose": line.get("purpose"),
        "verdict": f"{sender} was about to send it, and has not told here what came of it; it had checked: {line.get('verdict')}",
    }


def _lines_of(data: bytes) -> Iterator[dict[str, Any]]:
    for text in data.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn by a full disk
        if isinstance(line, dict):
            yield line
