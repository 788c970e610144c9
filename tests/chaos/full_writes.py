"""A disk that is full at exactly one write: every system call that needs room, of every process below one command, is asked about here.

    launcher ── seccomp filter ── exec ──► coordinator, agent, supervisor, shim, trainer: all of them inherit the filter
                   │ listener                │ write, pwrite, open to create, mkdir, link, rename, fsync: held in the kernel
                   ▼                         ▼
                  Tap ── whose call, on which file ──► go on, "no space left on device", or half of it

No tested program knows of it, and none can write past it: SQLite, Python's buffers and the C library are asked alike
(seccomp_unotify(2)). A call is counted when its file lies below the watched folder; what a trainer writes is let through.

    once    one call finds no room, the next one does
    short   one write gets half of its bytes down, and for a moment nothing of this process finds room after it
    full    from one call on, nothing that would need another block or inode finds room, for any watched process, for a while
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

# ruff: noqa: E402 (run as a program, its neighbours are found by path)
sys.path[:0] = [str(Path(__file__).parent)]

from zoo import role_of

FULL_SECONDS, FULL_SECONDS_MAX = 2.5, 30.0
"""How long a disk stays full, and how long where somebody has yet to say so: a machine that stood still says it later."""
SHORT_SECONDS = 1.0
LOOK_SECONDS = 0.2
START_SECONDS_MAX, LEAVE_SECONDS_MAX = 180.0, 90.0
PATH_BYTES_MAX = 4096
ROLES = ("coordinator", "agent", "supervisor", "shim")

# x86-64 and ARM64; None where an architecture has only the newer call.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "write": (1, 64), "pwrite64": (18, 68), "writev": (20, 66), "pwritev": (296, 70), "pwritev2": (328, 287), "sendfile": (40, 71),
    "copy_file_range": (326, 285), "open": (2, None), "openat": (257, 56), "creat": (85, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "fallocate": (285, 47), "fsync": (74, 82), "fdatasync": (75, 83), "bind": (49, 200),
}
_ARM = platform.machine() == "aarch64"
_CALLS = {pair[_ARM]: name for name, pair in _NUMBERS.items() if pair[_ARM] is not None}
_AUDIT_ARCH = 0xC00000B7 if _ARM else 0xC000003E
_SECCOMP, _PIDFD_GETFD = (277 if _ARM else 317), 438
_PATH_ARGUMENT = {"open": 0, "creat": 0, "mkdir": 0, "openat": 1, "mkdirat": 1, "link": 1, "linkat": 3, "symlink": 1, "symlinkat": 2,
                  "rename": 1, "renameat": 3, "renameat2": 3}
"""Where the path of what would be made is; a `...at` call has its folder's descriptor right before it (renameat2: third)."""
_NEEDS_NO_BLOCK = ("rename", "renameat", "renameat2", "fsync", "fdatasync")
_O_CREAT = 0o100
_AT_FDCWD = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which write is the one. `role` empty: none. `every`: and each so many writes of the role after it again."""

    role: str = ""
    number: int = 0
    mode: str = "once"
    every: int = 0

    def hits(self, role: str, number: int) -> bool:
        beyond = number - self.number
        return role == self.role and (beyond == 0 or (self.every > 0 < beyond and beyond % self.every == 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One counted call: the role's `number`-th. `name`: the file below the watched folder, without what is different in each run."""

    role: str
    number: int
    call: str
    name: str
    is_refused: bool
    at_seconds: float

    @property
    def kind(self) -> str:
        return f"{self.call} {self.name}"

    @property
    def words(self) -> str:
        return f"{self.role} {self.number}: {self.call} {self.name}"


def _nobody() -> bool:
    return False


@dataclass
class Tap:
    """Starts a command whose whole family is asked about its writes below `root`, and answers as the plan says, on a thread of its own."""

    root: Path
    plan: Plan
    calls: list[Call] = field(default_factory=list)
    full_until_seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    is_awaited: Callable[[], bool] = _nobody
    """Whether somebody has yet to say that the disk is full."""
    _full_at_seconds: float = 0.0
    _short_pid: int = 0
    _listener: int = -1
    _thread: threading.Thread | None = None

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.is_refused]

    def run(self, argv: list[str], environment: dict[str, str], seconds: float = START_SECONDS_MAX) -> subprocess.CompletedProcess[bytes]:
        """Run `argv` under the filter to its end; what it leaves running is answered on. Once for each Tap."""
        assert self._thread is None
        ours, theirs = socket.socketpair()
        with ours, theirs:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), *argv], env=environment, pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            theirs.close()
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
        assert descriptors, process.communicate()
        self._listener = descriptors[0]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    @property
    def is_new(self) -> bool:
        return self._thread is None

    def run_freely(self, argv: list[str], environment: dict[str, str], seconds: float = START_SECONDS_MAX) -> subprocess.CompletedProcess[bytes]:
        """Run `argv` without a filter: what a person does again after its one write was refused."""
        return subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False)

    def close(self, seconds: float = LEAVE_SECONDS_MAX) -> None:
        """Once the last process below the filter is gone. AssertionError when one is left."""
        if self._thread is not None:
            self._thread.join(seconds)
            assert not self._thread.is_alive(), "a process below the filter still lives"

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        while True:
            (_, events), = poll.poll()
            if events & select.POLLHUP:
                break
            notification = bytearray(80)
            try:
                fcntl.ioctl(self._listener, 0xC0502100, notification, True)
            except OSError as fault:
                if fault.errno in (errno.ENOENT, errno.EINTR):
                    continue  # whoever asked was killed
                break
            identity, thread, _, number, _, _, *arguments = struct.unpack("<QIIiIQ6Q", notification)
            try:
                value, error = self._answer(thread, _CALLS[number], arguments)
            except Exception as fault:  # it must not hang for our mistake
                value, error = 0, 0
                if not isinstance(fault, OSError):
                    self.faults.append(repr(fault))
            answer = struct.pack("<Qqi", identity, value, -error) + struct.pack("<I", 0 if value or error else 1)
            try:
                fcntl.ioctl(self._listener, 0xC0182101, bytearray(answer), True)
            except OSError as fault:
                if fault.errno != errno.ENOENT:
                    raise
        os.close(self._listener)

    def _answer(self, thread: int, call: str, arguments: list[int]) -> tuple[int, int]:
        """(bytes written, 0), (0, errno), or (0, 0) for: go on."""
        path = _target(thread, call, arguments)
        if path is None or not path.startswith(f"{self.root}/"):
            return 0, 0
        role = _role(thread)
        if role is None:
            return 0, 0
        self.counts[role] += 1
        began_seconds = time.monotonic()
        value, error = self._verdict(thread, call, arguments, is_the_one=self.plan.hits(role, self.counts[role]))
        name = re.sub(r"\d{8}T\d{6}Z[^/]*", "RUN", re.sub(r"[0-9a-f]{64}", "DIGEST", path.removeprefix(f"{self.root}/")))
        name = re.sub(r"-\d+-\w+\.tmp$", ".tmp", name)
        self.calls.append(Call(role=role, number=self.counts[role], call=call, name=name, is_refused=bool(value or error), at_seconds=began_seconds))
        return value, error

    def _verdict(self, thread: int, call: str, arguments: list[int], *, is_the_one: bool) -> tuple[int, int]:
        mode, now = self.plan.mode, time.monotonic()
        if is_the_one:
            self._full_at_seconds = now
            self.full_until_seconds = now + {"once": 0.0, "short": SHORT_SECONDS, "full": FULL_SECONDS}[mode]
            self._short_pid = thread
            if mode == "short" and call in ("write", "pwrite64") and arguments[2] >= 2:
                return _write_half(thread, call, arguments), 0
            return 0, errno.ENOSPC
        if mode == "full" and self.full_until_seconds <= now < self._full_at_seconds + FULL_SECONDS_MAX and self.is_awaited():
            self.full_until_seconds = now + LOOK_SECONDS
        if now >= self.full_until_seconds or (mode == "short" and thread != self._short_pid):
            return 0, 0
        return (0, errno.ENOSPC) if _needs_room(thread, call, arguments) else (0, 0)


def _target(thread: int, call: str, arguments: list[int]) -> str | None:
    """The path that a call would make or write to; None when it would do neither."""
    if call in _PATH_ARGUMENT:
        path = _path(thread, call, arguments)
        return None if not call.startswith("rename") and os.path.lexists(path) else path  # what is there already is not made
    if call == "bind":
        return _bound_path(thread, arguments)
    if call == "fallocate" and arguments[1] & ~1:
        return None  # a hole needs no room
    descriptor = arguments[2] if call == "copy_file_range" else arguments[0]
    return os.readlink(f"/proc/{thread}/fd/{_signed(descriptor)}").removesuffix(" (deleted)")


def _path(thread: int, call: str, arguments: list[int]) -> str:
    place = _PATH_ARGUMENT[call]
    text = os.fsdecode(_memory(thread, arguments[place], PATH_BYTES_MAX).partition(b"\0")[0])
    if text.startswith("/"):
        return os.path.normpath(text)
    folder = _signed(arguments[place - 1]) if call.endswith(("at", "at2")) else _AT_FDCWD
    base = os.readlink(f"/proc/{thread}/cwd" if folder == _AT_FDCWD else f"/proc/{thread}/fd/{folder}")
    return os.path.normpath(os.path.join(base, text))


def _bound_path(thread: int, arguments: list[int]) -> str | None:
    address = _memory(thread, arguments[1], min(arguments[2], 110))
    if len(address) < 3 or int.from_bytes(address[:2], sys.byteorder) != socket.AF_UNIX or address[2] == 0:
        return None
    path = os.fsdecode(address[2:].partition(b"\0")[0]).replace("/proc/self/", f"/proc/{thread}/")
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _needs_room(thread: int, call: str, arguments: list[int]) -> bool:
    """Whether a full disk would refuse it: not what fits into the blocks that a file has, nor what only changes a name."""
    if call in _NEEDS_NO_BLOCK:
        return False
    if call not in ("write", "pwrite64"):
        return True
    status = os.stat(f"/proc/{thread}/fd/{_signed(arguments[0])}")
    with open(f"/proc/{thread}/fdinfo/{_signed(arguments[0])}", encoding="ascii") as file:
        words = dict(line.split(":\t") for line in file.read().splitlines() if ":\t" in line)
    is_appended = int(words["flags"], 8) & os.O_APPEND
    offset = arguments[3] if call == "pwrite64" else status.st_size if is_appended else int(words["pos"])
    return offset + arguments[2] > max(status.st_size, status.st_blocks * 512)


def _write_half(thread: int, call: str, arguments: list[int]) -> int:
    """Do the first half of a write in the caller's place, through its own open file."""
    half = arguments[2] // 2
    data = _memory(thread, arguments[1], half)
    library = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(_process_of(thread))
    try:
        descriptor = library.syscall(_PIDFD_GETFD, pidfd, _signed(arguments[0]), 0)
    finally:
        os.close(pidfd)
    if descriptor < 0:
        raise AssertionError(f"pidfd_getfd: {os.strerror(ctypes.get_errno())}")
    try:
        return os.pwrite(descriptor, data, arguments[3]) if call == "pwrite64" else os.write(descriptor, data)
    finally:
        os.close(descriptor)


def _memory(thread: int, address: int, length: int) -> bytes:
    """Bytes of another process; fewer than asked for where a page is missing."""
    descriptor = os.open(f"/proc/{thread}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            return os.pread(descriptor, length, address)
        except OSError:
            return os.pread(descriptor, min(length, 4096 - address % 4096), address)
    finally:
        os.close(descriptor)


def _role(thread: int) -> str | None:
    with open(f"/proc/{thread}/cmdline", "rb") as file:
        words = file.read().split(b"\0")
    found = role_of(words)[0]
    return found if found in ROLES else None


def _process_of(thread: int) -> int:
    with open(f"/proc/{thread}/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))


def _signed(value: int) -> int:
    return ctypes.c_int32(value & 0xFFFFFFFF).value


def _filter() -> bytes:
    """The BPF program: notify about the calls above, of an open only when it may create. Jumps count from the next instruction."""
    def step(code: int, jump_true: int, jump_false: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, jump_true, jump_false, value)

    load, equal, any_bit, answer = 0x20, 0x15, 0x45, 0x06
    allow, notify = step(answer, 0, 0, 0x7FFF0000), step(answer, 0, 0, 0x7FC00000)
    program = [step(load, 0, 0, 4), step(equal, 1, 0, _AUDIT_ARCH), allow, step(load, 0, 0, 0)]
    for number, name in _CALLS.items():
        assert number is not None
        if name in ("open", "openat"):
            flags_at = 16 + 8 * (2 if name == "openat" else 1)
            program += [step(equal, 0, 4, number), step(load, 0, 0, flags_at), step(any_bit, 0, 1, _O_CREAT), notify, allow]
        else:
            program += [step(equal, 0, 1, number), notify]
    return b"".join([*program, allow])


def main(arguments: list[str]) -> None:
    """`full_writes.py SOCKET COMMAND …`: put the filter on, hand its listener over, become the command."""
    library = ctypes.CDLL(None, use_errno=True)
    code = ctypes.create_string_buffer(_filter())
    program = struct.pack("<HxxxxxxQ", (len(code) - 1) // 8, ctypes.addressof(code))
    assert library.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0, "no_new_privs lets anybody put a filter on"
    listener = library.syscall(_SECCOMP, 1, 8 | 32, ctypes.c_char_p(program))
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "seccomp")
    channel = socket.socket(fileno=int(arguments[0]))
    socket.send_fds(channel, [b"l"], [listener])
    channel.close()
    os.close(listener)
    os.execvp(arguments[1], arguments[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
