"""Work of others that a plan wants out of a host's way: what it names, what a look at the host found, how far it has come.

    plan ─► Workload      preflight's look ─► WorkloadSight      a host's answer ─► Progress      history ─► DisplacedState
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from policies.facts import ProcessIdentity, Word

GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """How a displaced process is started again. Nobody can guess that from what runs: its argv may have been a launcher's."""

    command: tuple[str, ...]
    working_directory: str | None = None
    """None: where the process was when preflight looked."""
    environment: tuple[str, ...] = ()
    """Names of variables. Their values are the process's own; they never leave the host."""
    output: str | None = None
    """A file on the host that its output is appended to. None: one below the host's root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One line of `displace`: a systemd unit, or processes by their command line."""

    name: str
    unit: str | None = None
    is_user_unit: bool = False
    pattern: str | None = None
    """A regular expression, searched in the words of a command line joined by blanks."""
    uid: int | None = None
    count: int = 1
    """How many processes match. Those below a matching one belong to it."""
    restart: Restart | None = None
    grace_seconds: float = GRACE_SECONDS
    force: bool = False
    """What has not ended after the grace is killed."""
    optional: bool = False
    """It may be absent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundProcess:
    """One process as preflight showed it. Its identity then is the identity that gets the signal."""

    identity: ProcessIdentity
    started_at: datetime
    members: tuple[ProcessIdentity, ...] = ()
    """What lives below it, or beside it in its unit."""
    host_bytes: int | None = None
    accelerator_bytes: int | None = None
    """Both over the whole of it; None is unknown."""
    working_directory: str | None = None
    unset: tuple[str, ...] = ()
    """Variables that the restart asks for and that it does not have."""
    is_ours: bool = False
    """It belongs to a run of this root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSight:
    """What a host found of one workload. Nothing found and no fault: it does not run."""

    name: str
    agent_uid: int
    """Who looked: the user that would have to stop it."""
    processes: tuple[FoundProcess, ...] = ()
    unit_state: str = ""
    killed_after_seconds: float | None = None
    """So long after a stop systemd kills the unit by itself, as the unit says. None: never, or no unit."""
    fault: str | None = None
    """Why it can't be said what runs."""


class DisplacedState(Word):
    """`found` was shown and not touched; `held` waits for a person; `returned` runs again though nobody asked fleetd for it; `left` stays away,
    by a person's word."""

    FOUND = "found"
    STOPPING = "stopping"
    HELD = "held"
    DISPLACED = "displaced"
    RETURNED = "returned"
    RESTORING = "restoring"
    RESTORED = "restored"
    FAILED = "failed"
    LEFT = "left"


DISPLACED_TRANSITIONS: dict[DisplacedState, frozenset[DisplacedState]] = {
    DisplacedState.FOUND: frozenset({DisplacedState.STOPPING, DisplacedState.HELD, DisplacedState.DISPLACED}),
    DisplacedState.STOPPING: frozenset({DisplacedState.HELD, DisplacedState.DISPLACED, DisplacedState.RESTORING, DisplacedState.LEFT}),
    DisplacedState.HELD: frozenset({DisplacedState.STOPPING, DisplacedState.DISPLACED, DisplacedState.RESTORING, DisplacedState.LEFT}),
    DisplacedState.DISPLACED: frozenset({DisplacedState.RETURNED, DisplacedState.RESTORING, DisplacedState.LEFT}),
    DisplacedState.RETURNED: frozenset({DisplacedState.DISPLACED, DisplacedState.RESTORING, DisplacedState.LEFT}),
    DisplacedState.RESTORING: frozenset({DisplacedState.RESTORED, DisplacedState.FAILED, DisplacedState.LEFT}),
    DisplacedState.FAILED: frozenset({DisplacedState.RESTORING, DisplacedState.LEFT}),
    DisplacedState.LEFT: frozenset({DisplacedState.RESTORING}),
    DisplacedState.RESTORED: frozenset(),
}
IN_THE_WAY = frozenset({DisplacedState.FOUND, DisplacedState.STOPPING, DisplacedState.HELD})
"""No run starts on the host before it has left one of these."""
TO_RESTORE = frozenset({DisplacedState.STOPPING, DisplacedState.HELD, DisplacedState.DISPLACED, DisplacedState.RETURNED, DisplacedState.FAILED})
"""What `fleetd restore` is about: it was asked to end, or the host was, and is not back for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A host's answer to `displace` and `restore`. `text` says the same words as long as nothing changes: they become history."""

    state: DisplacedState
    text: str
    pids: tuple[int, ...] = ()
    available_bytes: int | None = None
