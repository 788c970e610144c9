"""What the kernel says about a process, and the only way in which fleetd signals one.

A look opens /proc/PID once and reads everything below that handle, so that all fields belong to one process even if the pid
is handed on in between. A signal goes through a Grip: the pidfd is opened first, every field is verified after, and only then
is the signal sent, through that pidfd. No signal anywhere in fleetd goes to a bare number.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
import time
from functools import lru_cache

from fleetd.clock import boot_id as boot_id
from policies.facts import ProcessIdentity
from policies.identity import IdentityVerdict, ProcessSight, Standing, classify

PROC_BYTES_MAX = 64 * 1024
"""Of any one file below /proc/PID: a longer command line is compared by its beginning."""
IDENTITY_TRIES_MAX = 40
IDENTITY_WAIT_SECONDS = 0.005
"""A process in the middle of an exec has no argv for an instant."""

_PR_SET_CHILD_SUBREAPER = 36
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
"""_IOWR(0xFF, 11, 64 bytes), linux/pidfd.h."""
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("<QQ11Ii")


def identity_of(pid: int) -> ProcessIdentity:
    """The record that will prove this process later. ProcessLookupError when it is gone (or a zombie), PermissionError when unreadable."""
    for _ in range(IDENTITY_TRIES_MAX):
        sight = sight_of(pid)
        identity = _identity(sight)
        if identity is not None:
            return identity
        if "argv" not in sight.unreadable:
            break
        time.sleep(IDENTITY_WAIT_SECONDS)
    raise PermissionError(f"{', '.join(sight.unreadable)} of pid {pid} can't be read")


def _identity(sight: ProcessSight) -> ProcessIdentity | None:
    if not sight.exists or (sight.state in "ZXx" and "state" not in sight.unreadable):
        raise ProcessLookupError(f"no process has pid {sight.pid}" if not sight.exists else f"pid {sight.pid} has ended")
    if sight.unreadable or sight.start_ticks is None or sight.uid is None or sight.argv is None:
        return None
    return ProcessIdentity(
        boot_id=sight.boot_id, pid=sight.pid, start_ticks=sight.start_ticks, uid=sight.uid, argv=sight.argv, pidfd_inode=sight.pidfd_inode,
    )


def sight_of(pid: int) -> ProcessSight:
    """One consistent look at whatever has this pid now. Never raises for a process that is gone or unreadable."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return ProcessSight(boot_id=boot_id(), pid=pid, exists=False)
    except OSError:
        # No pidfd is to be had: the number of a mere thread, a kernel or a sandbox without the call. What /proc shows may
        # still prove a stranger, never a friend.
        return _sight(pid, None)
    try:
        return _sight(pid, descriptor)
    finally:
        os.close(descriptor)


def look(recorded: ProcessIdentity) -> IdentityVerdict:
    """`classify` over a fresh look."""
    return classify(recorded, sight_of(recorded.pid))


class Grip:
    """An open pidfd of a process that was verified after the opening. Signals through it can't reach anybody else."""

    def __init__(self, descriptor: int, identity: ProcessIdentity, verdict: IdentityVerdict) -> None:
        assert verdict.is_verified, "only a verified process is gripped"
        self._descriptor, self.identity, self.verdict = descriptor, identity, verdict

    def send(self, signal_number: int) -> bool:
        """True when delivered, False when the process had already ended. PermissionError when the kernel refuses."""
        assert self._descriptor >= 0, "the grip is open"
        if self.exited():
            return False
        try:
            signal.pidfd_send_signal(self._descriptor, signal_number)
        except ProcessLookupError:
            return False
        return True

    def exited(self) -> bool:
        """Whether the process has ended (also as an unreaped zombie). Never blocks."""
        return _has_ended(self._descriptor)

    def fileno(self) -> int:
        """The pidfd: readable (select, poll) once the process has ended."""
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Grip:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def grip(recorded: ProcessIdentity) -> Grip | IdentityVerdict:
    """A Grip when every field matches, else the verdict that says why not. The caller closes the grip."""
    try:
        descriptor = os.pidfd_open(recorded.pid)
    except ProcessLookupError:
        return classify(recorded, ProcessSight(boot_id=boot_id(), pid=recorded.pid, exists=False))
    except OSError as fault:
        verdict = look(recorded)
        if verdict.standing in (Standing.GONE, Standing.STRANGER):
            return verdict
        return IdentityVerdict(standing=Standing.UNKNOWN, explanation=f"no pidfd of pid {recorded.pid}: {fault.strerror}")
    try:
        verdict = classify(recorded, _sight(recorded.pid, descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    if verdict.is_verified:
        return Grip(descriptor, recorded, verdict)
    os.close(descriptor)
    return verdict


def exit_status_by_pidfd(descriptor: int) -> int | None:
    """The raw wait status of a process that has ended AND been reaped by its parent, from a pidfd opened while it lived.

    None when the kernel has no PIDFD_GET_INFO with the exit bit (6.15 and newer have), or the process isn't reaped yet.
    """
    request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *([0] * 13)))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    fields = _PIDFD_INFO.unpack(request)
    return int(fields[-1]) if fields[0] & _PIDFD_INFO_EXIT else None


@lru_cache(maxsize=1)
def can_read_exit_by_pidfd() -> bool:
    """Whether this kernel tells exits through a pidfd: tried on a child that ends with a status nobody would guess."""
    child = os.fork()
    if child == 0:
        os._exit(113)
    descriptor = os.pidfd_open(child)
    try:
        _, status = os.waitpid(child, 0)
        return exit_status_by_pidfd(descriptor) == status
    finally:
        os.close(descriptor)


def set_child_subreaper() -> None:
    """Orphaned descendants of this process become its children from now on. OSError when the kernel refuses."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) was refused")


def stat_fields(folder: int) -> list[str]:
    """State, parent, process group, session, ... of /proc/PID/stat, from field 3 on. `folder` is an open /proc/PID."""
    # The second field is the program's own name, which may hold blanks and parentheses: what counts starts after the last ')'.
    return read_file(folder, "stat").rpartition(b")")[2].decode("ascii").split()


def open_process(pid: int) -> int:
    """A handle of /proc/PID: what is read below it belongs to one process, or fails once that process is gone."""
    return os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_file(folder: int, name: str, bytes_max: int = PROC_BYTES_MAX) -> bytes:
    """The beginning of one file below an open /proc/PID. ProcessLookupError or FileNotFoundError when the process is gone."""
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    try:
        parts: list[bytes] = []
        size = 0
        while size < bytes_max and (part := os.read(descriptor, bytes_max - size)):
            parts.append(part)
            size += len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _sight(pid: int, descriptor: int | None) -> ProcessSight:
    """A look at /proc/PID while `descriptor`, a pidfd opened before, keeps watch over whose pid it is."""
    try:
        folder = open_process(pid)
    except (FileNotFoundError, ProcessLookupError):
        if descriptor is None or _has_ended(descriptor):
            return ProcessSight(boot_id=boot_id(), pid=pid, exists=False)
        return ProcessSight(boot_id=boot_id(), pid=pid, exists=True, unreadable=("/proc entry",))
    except OSError:
        return ProcessSight(boot_id=boot_id(), pid=pid, exists=True, unreadable=("/proc entry",))
    try:
        return _fields(pid, folder, descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return ProcessSight(boot_id=boot_id(), pid=pid, exists=False)
    finally:
        os.close(folder)


def _fields(pid: int, folder: int, descriptor: int | None) -> ProcessSight:
    unreadable: list[str] = [] if descriptor is not None else ["pidfd"]
    state, start_ticks, uid, argv = "", None, None, None
    try:
        stat = stat_fields(folder)
        state, start_ticks = stat[0], int(stat[19])
    except (PermissionError, IndexError, ValueError):
        unreadable += ["state", "start time"]
    try:
        uid = _uid(folder)
    except (PermissionError, IndexError, ValueError):
        unreadable.append("uid")
    try:
        argv = _argv(folder)
    except PermissionError:
        pass
    if argv is None and state not in ("Z", "X", "x"):
        unreadable.append("argv")
    if descriptor is not None and _has_ended(descriptor):
        state = "Z"
        unreadable = [name for name in unreadable if name != "state"]
    elif state == "Z" and descriptor is not None:
        unreadable.append("state")  # its first thread has ended, others live on: not dead, and without an argv
    inode = _inode(descriptor) if descriptor is not None else None
    return ProcessSight(
        boot_id=boot_id(), pid=pid, exists=True, state=state, start_ticks=start_ticks, uid=uid, argv=argv, pidfd_inode=inode,
        unreadable=tuple(unreadable),
    )


def _uid(folder: int) -> int:
    for line in read_file(folder, "status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    raise ValueError("no Uid line")


def _argv(folder: int) -> tuple[str, ...] | None:
    """None when it is empty: a process that is ending, a kernel thread, or an instant of an exec."""
    data = read_file(folder, "cmdline")
    if not data:
        return None
    return tuple(word.decode("utf-8", "backslashreplace") for word in data.removesuffix(b"\0").split(b"\0"))


def _has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _inode(descriptor: int) -> int | None:
    """The inode of a pidfd, None on kernels before 6.9, where every pidfd shares the one of all anonymous files."""
    look_at = os.fstat(descriptor)
    return look_at.st_ino if look_at.st_dev != _anonymous_device() else None


@lru_cache(maxsize=1)
def _anonymous_device() -> int:
    with select.epoll() as anonymous:
        return os.fstat(anonymous.fileno()).st_dev
