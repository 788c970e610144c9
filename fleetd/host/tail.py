"""Following a JSON-lines file that somebody else appends to, a bounded amount at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fleetd.wire import WireError, loads

READ_BYTES_MAX = 256 * 1024


class LogTail:
    """Reads what was appended, and remembers where it was: `offset` is the first byte not yet handed out."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset, self.skipped = path, offset, 0
        self._inode: int | None = None
        self._in_long_line = False

    def read(self, bytes_max: int = READ_BYTES_MAX) -> tuple[dict[str, Any], ...]:
        """The complete new lines as objects, oldest first. A torn tail waits; lines that are no object are counted in `skipped`."""
        assert bytes_max > 0
        data = self._next_bytes(bytes_max)
        end = data.rfind(b"\n") + 1
        if end == 0:
            if len(data) == bytes_max:
                # One line fills the whole read: it is no record of a trainer's, and the tail must not stand still before it.
                self.offset += len(data)
                self._in_long_line = True
            return ()
        self.offset += end
        lines = data[:end].split(b"\n")[:-1]
        if self._in_long_line:
            self._in_long_line = False
            self.skipped += 1
            lines = lines[1:]
        records = [self._record(line) for line in lines if line.strip()]
        return tuple(record for record in records if record is not None)

    def _next_bytes(self, bytes_max: int) -> bytes:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return b""
        try:
            status = os.fstat(descriptor)
            if status.st_size < self.offset or self._inode not in (None, status.st_ino):
                self.offset, self._in_long_line = 0, False  # cut short or replaced: what is there now is read from its beginning
            self._inode = status.st_ino
            return os.pread(descriptor, bytes_max, self.offset)
        finally:
            os.close(descriptor)

    def _record(self, line: bytes) -> dict[str, Any] | None:
        try:
            value = loads(line, any_float=True)
        except WireError:
            value = None
        if not isinstance(value, dict):
            self.skipped += 1
            return None
        return value
