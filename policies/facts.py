"""The words that every process shares: states, reasons, grades, exit codes, identities, moments.

The run directory is the whole interface between fleetd and a trainer; this file is its vocabulary. Both sides import it,
so it needs nothing but the standard library and runs on Python 3.10.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum, IntEnum

GIB = 1024**3
MIB = 1024**2


class Word(str, Enum):
    """A closed set of words that reads, prints and serialises as its own value on every Python."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, spec: str) -> str:
        return format(str(self.value), spec)


class RunKind(Word):
    TRAIN = "train"
    EVALUATE = "evaluate"
    SERVE = "serve"


class RunState(Word):
    QUEUED = "queued"
    STAGING = "staging"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    LOST = "lost"
    HELD = "held"
    STUCK = "stuck"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class CampaignStage(Word):
    PREFLIGHT = "preflight"
    STAGING = "staging"
    PILOT = "pilot"
    """The first steps of each candidate that asks for it are judged before the rest of the time is spent."""
    TRAINING = "training"
    SELECTING = "selecting"
    FROZEN = "frozen"
    EVALUATED = "evaluated"
    FINISHED = "finished"
    """Every run is over and there was nothing to choose: a campaign of plain commands."""
    STOPPED = "stopped"
    FAILED = "failed"


class Want(Word):
    RUN = "run"
    STOP = "stop"


class StopMode(Word):
    GRACEFUL = "graceful"
    NOW = "now"


class Reason(Word):
    """Why a run is where it is. `policies.lifecycle` says which of them are retried."""

    USER = "user"
    DEADLINE = "deadline"
    MEMORY = "memory"
    HOST_MEMORY = "host_memory"
    OOM = "oom"
    EXIT_NONZERO = "exit_nonzero"
    SIGNAL = "signal"
    STALLED = "stalled"
    LAUNCH_TIMEOUT = "launch_timeout"
    HOST_REBOOTED = "host_rebooted"
    UNOBSERVED = "unobserved"
    PREFLIGHT = "preflight"
    GATE_FAILED = "gate_failed"
    NOT_FINITE = "not_finite"
    CONFIG = "config"
    SUPERSEDED = "superseded"


class CapGrade(Word):
    """How strongly one part of a memory cap holds: by the kernel or allocator, by looking, or not at all."""

    ENFORCED = "enforced"
    SAMPLED = "sampled"
    ABSENT = "absent"


class SignalTarget(Word):
    LEADER = "leader"
    GROUP = "group"


class OnReboot(Word):
    RESUME = "resume"
    HOLD = "hold"


class Split(Word):
    TRAIN = "train"
    VALIDATION = "validation"
    CALIBRATION = "calibration"
    TEST = "test"
    HOLDOUT = "holdout"


RESERVED_SPLITS = (Split.CALIBRATION, Split.TEST, Split.HOLDOUT)


class TrainerExit(IntEnum):
    """Exit statuses of the trainer contract. 30 to 40 are never retried without a person."""

    FINISHED = 0
    STOPPED = 10
    RETRY = 20
    CONFIG = 30
    NOT_FINITE = 31
    GATE_FAILED = 32
    MEMORY = 40


# The trainer contract: environment of every attempt.
ENV_RUN_DIR = "FLEETD_RUN_DIR"
ENV_RUN_ID = "FLEETD_RUN_ID"
ENV_RESUME = "FLEETD_RESUME"
ENV_MEMORY_CAP_BYTES = "FLEETD_MEMORY_CAP_BYTES"
ENV_TRAIN_CUTOFF = "FLEETD_TRAIN_CUTOFF"
ENV_TRAIN_CUTOFF_BOOTTIME = "FLEETD_TRAIN_CUTOFF_BOOTTIME"
"""The same moment in seconds of CLOCK_BOOTTIME, as the host counts it. It rules where both are given: no step of the wall clock moves it."""
ENV_TREE_TOKEN = "FLEETD_TREE_TOKEN"
ENV_PYTHON = "FLEETD_PYTHON"
"""The interpreter of the environment that fleetd built for this host, given to a user's own command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """What proves that a pid is still the process that was recorded.

    `start_ticks` is field 22 of /proc/PID/stat (clock ticks since boot, proc(5)); `pidfd_inode` is the inode of a pidfd
    on kernels where pidfs gives each process its own (6.9 and newer), else None.
    """

    boot_id: str
    pid: int
    start_ticks: int
    uid: int
    argv: tuple[str, ...]
    pidfd_inode: int | None = None


def format_moment(moment: datetime) -> str:
    """RFC 3339 in UTC with microseconds, e.g. `2026-09-16T18:59:10.000000Z`. A naive datetime is our own mistake."""
    assert moment.tzinfo is not None, "a moment carries its zone"
    return moment.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_moment(text: str) -> datetime:
    """An aware UTC datetime from RFC 3339; ValueError when the text is no date or names no zone."""
    moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith(("Z", "z")) else text)
    if moment.tzinfo is None:
        raise ValueError(f"{text!r} names no time zone")
    return moment.astimezone(timezone.utc)


def stamp(moment: datetime) -> str:
    """The compact UTC form that ids carry: `20260916T185910Z`."""
    assert moment.tzinfo is not None
    return moment.astimezone(timezone.utc).strftime("%Y%m%dT%H%M%SZ")


def step_name(step: int) -> str:
    """The directory and file name of a step: `step-000000128`."""
    assert 0 <= step < 10**9
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    """The step a `step-000000128` name carries, else None (temporary, trash and foreign names)."""
    digits = name[5:]
    return int(digits) if name.startswith("step-") and len(digits) == 9 and digits.isdigit() else None
