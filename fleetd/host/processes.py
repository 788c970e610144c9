"""What the kernel says about a process, and the only way in which fleetd signals one.

A look opens /proc/PID once and reads everything below that handle, so that all fields belong to one process even if the pid
is handed on in between. A signal goes through a Grip: the pidfd is opened first, every field is verified after, and only then
is the signal sent, through that pidfd. No signal anywhere in fleetd goes to a bare number.
"""

from __future__ import annotations

from policies.facts import ProcessIdentity
from policies.identity import IdentityVerdict, ProcessSight


def boot_id() -> str:
    """The kernel's id of this boot, read once per process."""
    raise NotImplementedError


def identity_of(pid: int) -> ProcessIdentity:
    """The record that will prove this process later. ProcessLookupError when it is gone (or a zombie), PermissionError when unreadable."""
    raise NotImplementedError


def sight_of(pid: int) -> ProcessSight:
    """One consistent look at whatever has this pid now. Never raises for a process that is gone or unreadable."""
    raise NotImplementedError


def look(recorded: ProcessIdentity) -> IdentityVerdict:
    """`classify` over a fresh look."""
    raise NotImplementedError


class Grip:
    """An open pidfd of a process that was verified after the opening. Signals through it can't reach anybody else."""

    identity: ProcessIdentity
    verdict: IdentityVerdict

    def send(self, signal_number: int) -> bool:
        """True when delivered, False when the process had already ended. PermissionError when the kernel refuses."""
        raise NotImplementedError

    def exited(self) -> bool:
        """Whether the process has ended (also as an unreaped zombie). Never blocks."""
        raise NotImplementedError

    def fileno(self) -> int:
        """The pidfd: readable (select, poll) once the process has ended."""
        raise NotImplementedError

    def close(self) -> None: ...

    def __enter__(self) -> Grip:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None: ...


def grip(recorded: ProcessIdentity) -> Grip | IdentityVerdict:
    """A Grip when every field matches, else the verdict that says why not. The caller closes the grip."""
    raise NotImplementedError


def exit_status_by_pidfd(descriptor: int) -> int | None:
    """The raw wait status of a process that has ended AND been reaped by its parent, from a pidfd opened while it lived.

    None when the kernel has no PIDFD_GET_INFO with the exit bit (6.15 and newer have), or the process isn't reaped yet.
    """
    raise NotImplementedError


def set_child_subreaper() -> None:
    """Orphaned descendants of this process become its children from now on. OSError when the kernel refuses."""
    raise NotImplementedError
