"""Is the process under a recorded pid still the one that was recorded? One classifier for start-up, poll, sweep and signals.

A pid alone proves nothing: the kernel hands numbers out again. `classify` compares everything that was recorded with everything
that /proc showed, and only an exact match may be signalled.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.facts import ProcessIdentity, Word

DEAD_STATES = frozenset("ZXx")
"""State letters of /proc/PID/stat that mean: it has ended (proc(5))."""
ARGV_TEXT_MAX = 200


class Standing(Word):
    VERIFIED = "verified"
    GONE = "gone"
    STRANGER = "stranger"
    UNKNOWN = "cannot verify"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSight:
    """What the kernel showed of one pid at one look. None is not seen; `unreadable` names the fields that could not be read."""

    boot_id: str
    pid: int
    exists: bool
    state: str = ""
    start_ticks: int | None = None
    uid: int | None = None
    argv: tuple[str, ...] | None = None
    pidfd_inode: int | None = None
    unreadable: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityVerdict:
    """`explanation` names what was found. `is_dead`: the recorded process itself has provably ended (another may have its pid)."""

    standing: Standing
    explanation: str
    is_dead: bool = False

    @property
    def is_verified(self) -> bool:
        return self.standing is Standing.VERIFIED

    def __str__(self) -> str:
        return str(self.standing) if self.is_verified else f"{self.standing}: {self.explanation}"


def classify(recorded: ProcessIdentity, sight: ProcessSight) -> IdentityVerdict:
    """Compare a record with a look at its pid. Only VERIFIED allows a signal; UNKNOWN allows nothing at all.

    Another start time or another pidfd inode proves another process whatever else is unreadable. Another argv or uid at the
    same start time may be the same process after an exec: a stranger to us all the same, but not proof of a death.
    """
    assert sight.pid == recorded.pid, "a sight is compared with the record of its own pid"
    if sight.boot_id != recorded.boot_id:
        return _dead(Standing.GONE, f"the machine has booted since (boot {sight.boot_id[:8]}, recorded {recorded.boot_id[:8]})")
    if not sight.exists:
        return _dead(Standing.GONE, f"no process has pid {recorded.pid}")
    if sight.start_ticks is not None and sight.start_ticks != recorded.start_ticks:
        found = f"started at tick {sight.start_ticks}, recorded {recorded.start_ticks}"
        return _dead(Standing.STRANGER, f"pid {recorded.pid} {found}, and runs {_words(sight.argv)}")
    if sight.pidfd_inode is not None and recorded.pidfd_inode is not None and sight.pidfd_inode != recorded.pidfd_inode:
        found = f"has pidfd inode {sight.pidfd_inode}, recorded {recorded.pidfd_inode}"
        return _dead(Standing.STRANGER, f"pid {recorded.pid} {found}, and runs {_words(sight.argv)}")
    if sight.state in DEAD_STATES and "state" not in sight.unreadable:
        return _dead(Standing.GONE, f"pid {recorded.pid} has ended (state {sight.state})")
    return _living(recorded, sight)


def _living(recorded: ProcessIdentity, sight: ProcessSight) -> IdentityVerdict:
    missing = set(sight.unreadable)
    missing |= {name for name, value in (("start time", sight.start_ticks), ("uid", sight.uid), ("argv", sight.argv)) if value is None}
    if missing:
        return IdentityVerdict(standing=Standing.UNKNOWN, explanation=f"{', '.join(sorted(missing))} of pid {recorded.pid} can't be read")
    if sight.uid != recorded.uid:
        return IdentityVerdict(standing=Standing.STRANGER, explanation=f"pid {recorded.pid} belongs to uid {sight.uid}, recorded {recorded.uid}")
    if sight.argv != recorded.argv:
        explanation = f"pid {recorded.pid} runs {_words(sight.argv)}, recorded {_words(recorded.argv)}"
        return IdentityVerdict(standing=Standing.STRANGER, explanation=explanation)
    return IdentityVerdict(standing=Standing.VERIFIED, explanation=f"pid {recorded.pid}: boot, start time, uid and argv match")


def _dead(standing: Standing, explanation: str) -> IdentityVerdict:
    return IdentityVerdict(standing=standing, explanation=explanation, is_dead=True)


def _words(argv: tuple[str, ...] | None) -> str:
    text = " ".join(argv) if argv else "an unknown command"
    return repr(text if len(text) <= ARGV_TEXT_MAX else text[:ARGV_TEXT_MAX] + "…")
