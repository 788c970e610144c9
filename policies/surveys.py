"""What a look at a host and at its interpreters found: the facts that `preflight` and `parity` judge.

Unknown is None, never a guess: a trap that could not be read is not a trap that is absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorUser:
    """A process that holds memory of an accelerator."""

    pid: int
    name: str
    user: str
    bytes: int | None
    is_ours: bool = False
    """It carries the token of a run of this root."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTraps:
    """What systemd-logind does to a user's processes and shared memory at the last logout. Everything None: no logind on this host."""

    user: str
    is_system_user: bool
    """System users keep their shared memory whatever RemoveIPC says."""
    is_lingering: bool | None = None
    removes_ipc: bool | None = None
    kills_processes: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSurvey:
    """One host as its own tools show it."""

    machine: str
    """A digest of /etc/machine-id: equal for one machine under two names, and of no use elsewhere. Empty: there is none."""
    hostname: str
    boot_id: str
    kernel: str
    architecture: str
    now: datetime
    utc_offset_seconds: int
    clock_synchronised: bool | None
    memory_total_bytes: int
    memory_available_bytes: int | None
    root: str
    root_fault: str | None
    """Why the root can't be used; None when a file could be made and synced there."""
    owner: str | None = None
    """The coordinator whose orders this root obeys; None: nobody's yet."""
    owner_fault: str | None = None
    """Why nobody can say whose it is."""
    disk_free_bytes: int | None
    cleaner: str | None
    """The rule that removes old files where the root lies, such as systemd-tmpfiles on /tmp."""
    cap_grade: str
    cap_means: str
    accelerators: tuple[str, ...] = ()
    driver: str | None = None
    accelerator_users: tuple[AcceleratorUser, ...] = ()
    traps: SessionTraps
    reboot_pending: tuple[str, ...] | None = None
    """The packages that ask for a reboot; empty when one is asked for without a reason, None when none is."""
    reboots_by_itself: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSurvey:
    """One installed distribution. `files_sha256` is over its files' names and their bytes as they are now."""

    version: str
    files: int
    files_sha256: str
    damaged: tuple[str, ...] = ()
    """Files that are not what the installer recorded: missing, or other bytes. The first few."""
    damaged_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonSurvey:
    """One interpreter of a host and everything installed for it."""

    program: str
    fault: str | None
    """Why it can't be used at all: the rest is empty then."""
    version: str = ""
    implementation: str = ""
    architecture: str = ""
    missing: tuple[str, ...] = ()
    """Modules that were asked for and are not there."""
    torch: str | None = None
    """torch's own build string, such as `2.13.0+cu130`."""
    cuda: str | None = None
    packages: dict[str, PackageSurvey] = field(default_factory=dict)
    are_files_read: bool = False
    is_expected: bool = False
    """Nobody has seen it: what an environment will be once it is built from its lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSurvey:
    """What a host has, or is to have, of an environment that the plan asks for."""

    lock: str
    lock_sha256: str
    name: str
    """Where it lies below `environments/`."""
    is_built: bool
    python: str
    """Version of the Python that it is, or will be, built from."""
    packages: int
    wheels: str
    """Their digest, or `registry`."""
    wheels_bytes: int
    disk_bytes: int = 0
    """What it still takes of the host's disk: the wheels and what becomes of them. 0 when it is built, or when nobody knows its wheels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAsked:
    """The command of a candidate, to be looked for where it would run."""

    candidate: str
    program: str
    working_directory: str | None = None
    path: str | None = None
    """The PATH that the plan gives it; None: the host's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSurvey:
    candidate: str
    fault: str | None
    """Why it could not be run; None when it is there."""
    fix: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEnvironment:
    """An environment of a lock that a host has, complete. `name` as in `EnvironmentSurvey`."""

    name: str
    python: str
    packages: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that preflight says of a host."""

    host: str
    refuses: bool
    """False: worth knowing, and the launch goes on."""
    title: str
    what: str
    fix: str
