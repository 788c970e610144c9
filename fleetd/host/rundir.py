"""Typed readers and writers of the run directory, shared by agent, supervisor and shim.

Absent files read as None; a damaged one raises WireError that names the path. Paths come from fleetd.paths.RunPaths.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd.model import CapPart, CutoffOrder, ExitRecord, Observation, RunSpec, WantOrder
from fleetd.paths import RunPaths
from policies.facts import ProcessIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """attempt.json, written by the shim before the trainer's exec and again after it (argv changes; identity is the newest).

    `cap` is the kernel's part of the cap as read back; `cgroup` is Group.encode().
    """

    attempt: int
    identity: ProcessIdentity
    argv: tuple[str, ...]
    resume: str = ""
    resume_step: int | None = None
    resume_digest: str | None = None
    refused: tuple[str, ...] = ()
    """Checkpoints that were newer and did not verify, each with the reason."""
    token: str
    cgroup: str | None = None
    cap: CapPart
    session: int
    is_executed: bool = False
    """False until the trainer's own program runs (the child waits for this record before its exec)."""
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """heartbeat.json, replaced by the supervisor each tick. Boottime deadlines, where given, rule over the wall clock's."""

    boottime_seconds: float
    pid: int
    stop_at: datetime | None = None
    cutoff_at: datetime | None = None
    stop_boottime_seconds: float | None = None
    cutoff_boottime_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRecord:
    """supervisor.json and shim.json."""

    identity: ProcessIdentity
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointClaim:
    """What a checkpoint's manifest says of itself; `verify_checkpoint` proves it."""

    path: Path
    step: int
    digest: str
    bytes: int
    at: datetime
    """When the manifest was written (its mtime)."""


def create_run(paths: RunPaths, spec: RunSpec, task: dict[str, Any] | None, want: WantOrder) -> bool:
    """Create the run directory with its orders, whole or not at all. False when the same spec is already there; RequestRefused for another."""
    raise NotImplementedError


def read_spec(paths: RunPaths) -> RunSpec:
    raise NotImplementedError


def read_want(paths: RunPaths) -> WantOrder | None:
    raise NotImplementedError


def read_cutoff(paths: RunPaths) -> CutoffOrder | None:
    raise NotImplementedError


def apply_want(paths: RunPaths, order: WantOrder) -> tuple[bool, WantOrder]:
    """Under the flock on orders/lock: record it when its sequence is higher. Returns (applied, the order now in force)."""
    raise NotImplementedError


def apply_cutoff(paths: RunPaths, order: CutoffOrder) -> tuple[bool, CutoffOrder]:
    """Record it only when it is earlier than the one in force (run.json or cutoff.json). Returns (applied, in force)."""
    raise NotImplementedError


def effective_cutoff(spec: RunSpec, order: CutoffOrder | None) -> datetime | None:
    """The hard deadline of this run: the earlier of run.json and cutoff.json; an evaluation's is the final deadline; a serving run has none."""
    raise NotImplementedError


def newest_attempt(paths: RunPaths) -> int:
    """The highest attempt number that has a folder, 0 when there is none."""
    raise NotImplementedError


def create_attempt(paths: RunPaths) -> int:
    """Make the folder of the next attempt, exclusively and durably; returns its number. The supervisor then starts the shim."""
    raise NotImplementedError


def is_started(paths: RunPaths, attempt: int) -> bool:
    raise NotImplementedError


def read_attempt(paths: RunPaths, attempt: int) -> AttemptRecord | None:
    raise NotImplementedError


def write_attempt(paths: RunPaths, record: AttemptRecord) -> None:
    raise NotImplementedError


def read_exit(paths: RunPaths, attempt: int) -> ExitRecord | None:
    raise NotImplementedError


def write_exit(paths: RunPaths, record: ExitRecord) -> bool:
    """Write-once and durable. False when an exit was already recorded (the first one rules). OSError on a full disk: try again."""
    raise NotImplementedError


def read_program(path: Path) -> ProgramRecord | None:
    """supervisor.json or shim.json."""
    raise NotImplementedError


def write_program(path: Path, at: datetime) -> ProgramRecord:
    """Record the calling process."""
    raise NotImplementedError


def read_heartbeat(paths: RunPaths) -> Heartbeat | None:
    """None also when it is torn or damaged: a heartbeat is a look, not history."""
    raise NotImplementedError


def write_heartbeat(paths: RunPaths, beat: Heartbeat) -> None:
    raise NotImplementedError


def read_observation(paths: RunPaths) -> Observation | None:
    raise NotImplementedError


def write_observation(paths: RunPaths, observation: Observation) -> None:
    raise NotImplementedError


def try_lock(path: Path, patience_seconds: float = 0.3) -> int | None:
    """The descriptor of an exclusive flock (close-on-exec), None when somebody holds it. The short patience outlasts a probe by `is_locked`."""
    raise NotImplementedError


def is_locked(path: Path) -> bool:
    """Whether somebody holds the flock. False when the file is absent."""
    raise NotImplementedError


class LogTail:
    """Reads what was appended to a JSON-lines file, a bounded amount per call, and remembers where it was."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset, self.skipped = path, offset, 0

    def read(self, bytes_max: int = 256 * 1024) -> tuple[dict[str, Any], ...]:
        """The complete new lines as objects, oldest first. A torn tail waits; lines that are no object are counted in `skipped`."""
        raise NotImplementedError


def newest_checkpoints(paths: RunPaths) -> tuple[CheckpointClaim, ...]:
    """Complete-looking checkpoint directories (a readable manifest), newest step first. Nothing is hashed."""
    raise NotImplementedError


def verify_checkpoint(path: Path) -> CheckpointClaim:
    """Prove a checkpoint: every file of its manifest with its size and SHA-256, and nothing missing. CheckpointDamaged otherwise."""
    raise NotImplementedError


def choose_resume(paths: RunPaths) -> tuple[CheckpointClaim | None, tuple[str, ...]]:
    """The newest checkpoint that verifies, and why newer ones were refused. The shim calls this before each start."""
    raise NotImplementedError
