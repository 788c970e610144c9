"""Lines over one SSH channel: written whole, read whole, each within a moment of the monotonic clock. Also the way into a login shell.

    login shell (any)  ◄── "exec /bin/sh"      whatever its start-up files print comes before our marker and is dropped
    sh                 ◄── script              prints the marker, looks for python, becomes it
    python3 -I -c      ◄── the porter's text   from here on: JSON lines
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from importlib.resources import files
from typing import Any, Protocol

import paramiko

from fleetd.wire import LINE_BYTES_MAX, WireError, loads

READ_BYTES = 256 * 1024
CHATTER_BYTES_MAX = 1024 * 1024
"""What start-up files may print before it is our turn."""
TAIL_CHARACTERS = 400
PYTHON_OLDEST = (3, 10)

_LOADER = """
import json, os, sys
v = sys.version_info
os.write(1, (json.dumps({"python": list(v[:3]), "program": sys.executable}) + "\\n").encode())
t = b""
while v >= OLDEST and len(t) < LENGTH:
    p = os.read(0, LENGTH - len(t))
    if not p:
        break
    t += p
if t and len(t) == LENGTH:
    exec(compile(t, "porter", "exec"))
"""
"""Understood by every Python 3: the version is told before anything newer has to be read."""


class NoPython(Exception):
    """There is no interpreter of that name on the host's PATH."""


class OldPython(Exception):
    """There is one, and it is older than what we need."""


class ShortFile(Exception):
    """A file ended before its time, or can't be read on: so many bytes are missing of those that were to be written."""

    def __init__(self, missing_bytes: int) -> None:
        super().__init__(f"{missing_bytes} bytes are missing")
        self.missing_bytes = missing_bytes


class Channel(Protocol):
    """What is asked of paramiko's channel, and of a process that stands in for one."""

    @property
    def closed(self) -> bool: ...

    def settimeout(self, timeout: float | None) -> None: ...

    def send(self, data: bytes) -> int: ...

    def recv(self, nbytes: int) -> bytes: ...

    def recv_ready(self) -> bool: ...

    def recv_stderr(self, nbytes: int) -> bytes: ...

    def recv_stderr_ready(self) -> bool: ...

    def exit_status_ready(self) -> bool: ...

    def recv_exit_status(self) -> int: ...

    def close(self) -> None: ...


class ChannelLines:
    """One channel with what was read of it and not yet used. One thread at a time."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self._buffer = channel, b""

    def write(self, data: bytes, until_seconds: float) -> None:
        rest = memoryview(data)
        while rest:
            self.channel.settimeout(_left(until_seconds))
            rest = rest[self.channel.send(bytes(rest[:READ_BYTES])):]

    def write_file(self, descriptor: int, offset: int, count: int, until_seconds: float) -> None:
        """`count` bytes of a file from `offset` on. ShortFile when it ends before."""
        while count:
            sent = self._write_part(descriptor, offset, count, until_seconds)
            if not sent:
                raise ShortFile(count)
            offset, count = offset + sent, count - sent

    def _write_part(self, descriptor: int, offset: int, count: int, until_seconds: float) -> int:
        try:
            data = os.pread(descriptor, min(count, READ_BYTES), offset)
        except OSError:
            return 0
        self.write(data, until_seconds)
        return len(data)

    def read_line(self, until_seconds: float) -> bytes:
        """The next line. EOFError with the last words when there is none any more, TimeoutError, WireError."""
        while b"\n" not in self._buffer:
            self._more(until_seconds)
            if len(self._buffer) > LINE_BYTES_MAX:
                raise WireError(f"an answer is over the limit of {LINE_BYTES_MAX} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def read_object(self, until_seconds: float) -> dict[str, Any]:
        found = loads(self.read_line(until_seconds))
        if not isinstance(found, dict):
            raise WireError("an answer is no object")
        return found

    def skip_past(self, marker: bytes, until_seconds: float) -> None:
        """Drop everything up to and including the line that is the marker."""
        while marker + b"\n" not in self._buffer:
            self._more(until_seconds)
            if len(self._buffer) > CHATTER_BYTES_MAX:
                raise WireError(f"the login shell printed over {CHATTER_BYTES_MAX} bytes")
        self._buffer = self._buffer.split(marker + b"\n", 1)[1]

    def has_answer(self) -> bool:
        return bool(self._buffer) or self.channel.recv_ready() or self.channel.closed

    def _more(self, until_seconds: float) -> None:
        self.channel.settimeout(_left(until_seconds))
        data = self.channel.recv(READ_BYTES)
        if not data:
            raise EOFError(self._last_words())
        self._buffer += data

    def _last_words(self) -> str:
        said = self._buffer
        while len(said) < CHATTER_BYTES_MAX and self.channel.recv_stderr_ready() and (part := self.channel.recv_stderr(READ_BYTES)):
            said += part
        text = " ".join(said.decode(errors="replace").split())[-TAIL_CHARACTERS:]
        status = f"exit status {self.channel.recv_exit_status()}, " if self.channel.exit_status_ready() else ""
        return f"it ended: {status}{text or 'without a word'}"


def enter(lines: ChannelLines, python: str, until_seconds: float) -> list[int]:
    """From a shell that reads commands to a running porter; the version of its Python. NoPython, OldPython, and what reading raises."""
    halves, source = (secrets.token_hex(8), secrets.token_hex(8)), files("fleetd").joinpath("host", "porter.py").read_bytes()
    loader = _LOADER.replace("OLDEST", str(PYTHON_OLDEST)).replace("LENGTH", str(len(source)))
    word = shlex.quote(python)
    # One compound command in one write: a shell that reads ahead finds nothing behind it, and the marker is nowhere in what we send.
    script = f"""{{
printf '%s%s\\n' {halves[0]} {halves[1]}
command -v {word} >/dev/null 2>&1 || {{ printf '{{"python": null}}\\n'; exit 0; }}
exec {word} -I -c {shlex.quote(loader)}
}}
"""
    lines.write(script.encode(), until_seconds)
    lines.skip_past("".join(halves).encode(), until_seconds)
    try:
        found = json.loads(lines.read_line(until_seconds))
        version = found["python"]
    except (ValueError, KeyError, TypeError) as fault:
        raise WireError(f"{python} answered something else: {fault}") from fault
    if version is None:
        raise NoPython(python)
    if tuple(version[:2]) < PYTHON_OLDEST:
        raise OldPython(f"{found.get('program')} is Python {'.'.join(map(str, version))}")
    lines.write(source, until_seconds)
    return [int(part) for part in version]


def become(lines: ChannelLines, argv: tuple[str, ...], until_seconds: float) -> None:
    """From a shell that reads commands to a program that reads what we say next."""
    halves = secrets.token_hex(8), secrets.token_hex(8)
    lines.write(f"{{\nprintf '%s%s\\n' {halves[0]} {halves[1]}\nexec {shlex.join(argv)}\n}}\n".encode(), until_seconds)
    lines.skip_past("".join(halves).encode(), until_seconds)


def _left(until_seconds: float) -> float:
    left_seconds = until_seconds - time.monotonic()
    if left_seconds <= 0:
        raise TimeoutError("no answer in time")
    return left_seconds


TROUBLES = (paramiko.SSHException, EOFError, OSError, WireError)
"""What a channel may raise when the other side is gone, late, or talks nonsense."""


def in_words(fault: BaseException) -> str:
    """What went wrong; several of these errors come without a word of their own."""
    return "no answer in time" if isinstance(fault, TimeoutError) else str(fault) or type(fault).__name__
