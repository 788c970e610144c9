"""Typed readers and writers of the run directory, shared by agent, supervisor and shim.

Absent files read as None; a damaged one raises WireError that names the path. Paths come from fleetd.paths.RunPaths.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from fleetd import clock, faults
from fleetd.files import create_record, overwrite, read_record, sync_folder, write_record
from fleetd.host.checkpoints import CheckpointClaim as CheckpointClaim
from fleetd.host.checkpoints import choose_resume as choose_resume
from fleetd.host.checkpoints import newest_checkpoints as newest_checkpoints
from fleetd.host.checkpoints import verify_checkpoint as verify_checkpoint
from fleetd.host.processes import identity_of
from fleetd.host.tail import LogTail as LogTail
from fleetd.model import CapPart, CutoffOrder, ExitRecord, Observation, RunSpec, WantOrder
from fleetd.paths import HostPaths, RunPaths
from fleetd.wire import WireError, decode, encode
from policies.errors import ExplainedError, RequestRefused
from policies.facts import ProcessIdentity, Reason, RunKind, StopMode, Want, step_name

ORDERS_PATIENCE_SECONDS = 5.0
"""An agent holds the lock on orders for milliseconds; whoever can't get it in this time reports it."""
LOCK_RETRY_SECONDS = 0.01

T = TypeVar("T")


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


def create_run(paths: RunPaths, spec: RunSpec, task: dict[str, Any] | None, want: WantOrder) -> bool:
    """Create the run directory with its orders, whole or not at all. False when the same order is there already; RequestRefused for another."""
    if _is_there(paths, spec):
        sync_folder(paths.root.parent)  # whoever made it may have been refused this
        return False
    paths.root.parent.mkdir(parents=True, exist_ok=True)
    temporary = RunPaths(paths.root.with_name(f".tmp-{paths.root.name}-{os.getpid()}"))
    shutil.rmtree(temporary.root, ignore_errors=True)
    try:
        for folder in (temporary.root, temporary.orders, temporary.attempts, temporary.checkpoints, temporary.evidence):
            faults.before("run folder")
            folder.mkdir()
        for lock in (temporary.lock, temporary.trainer_lock, temporary.orders / "lock"):
            lock.touch(mode=0o644)  # made now, so that a disk which is full later keeps nobody from taking it
        write_record(temporary.order, spec)
        write_record(temporary.boot, {"boot_id": clock.boot_id()})
        if task is not None:
            write_record(temporary.task, task)
        write_record(temporary.want, want)
        if spec.continues is not None and spec.continues.digest is not None and spec.continues.step is not None:
            temporary.seed.mkdir()
            models = HostPaths(paths.root.parent.parent).models
            (temporary.seed / step_name(spec.continues.step)).symlink_to(models / spec.continues.digest, target_is_directory=True)
        os.rename(temporary.root, paths.root)
        faults.after("run renamed")
    except OSError as fault:
        if fault.errno in (errno.ENOTEMPTY, errno.EEXIST) and _is_there(paths, spec):
            return False
        raise
    finally:
        shutil.rmtree(temporary.root, ignore_errors=True)
    sync_folder(paths.root.parent)
    return True


def read_spec(paths: RunPaths) -> RunSpec:
    return decode(RunSpec, read_record(paths.order), str(paths.order))


def came_in_this_boot(paths: RunPaths) -> bool:
    """Whether this order came since the host was started. True where nobody has noted it: then it is an older release's."""
    try:
        return bool(read_record(paths.boot)["boot_id"] == clock.boot_id())
    except (FileNotFoundError, KeyError):
        return True
    except (OSError, WireError):
        return False


def read_want(paths: RunPaths) -> WantOrder | None:
    return _read(WantOrder, paths.want)


def read_cutoff(paths: RunPaths) -> CutoffOrder | None:
    return _read(CutoffOrder, paths.cutoff)


def apply_want(paths: RunPaths, order: WantOrder) -> tuple[bool, WantOrder]:
    """Under the flock on orders/lock: record it when its sequence is higher, unless the run was left behind: that is the last word.
    Returns (applied, the order now in force)."""
    with _orders_locked(paths):
        current = read_want(paths)
        if current is not None and (order.sequence <= current.sequence or is_left_behind(current)):
            return False, current
        write_record(paths.want, order)
        return True, order


def leave_behind(paths: RunPaths, *, actor: str, at: datetime) -> bool:
    """End this run for good: its work goes on in another one. False when that was ordered before. No later order changes it."""
    with _orders_locked(paths):
        current = read_want(paths)
        if is_left_behind(current):
            return False
        sequence = 1 if current is None else current.sequence + 1
        last = WantOrder(sequence=sequence, want=Want.STOP, mode=StopMode.NOW, reason=Reason.SUPERSEDED, actor=actor, at=at, is_final=True)
        write_record(paths.want, last)
        return True


def is_left_behind(want: WantOrder | None) -> bool:
    return want is not None and want.is_final


def told_at(want: WantOrder | None) -> datetime | None:
    """When the order was given, which says what time it is at least. One that this host gave itself tells no time."""
    return None if want is None or want.is_final else want.at


def apply_cutoff(paths: RunPaths, order: CutoffOrder) -> tuple[bool, CutoffOrder]:
    """Record it only when it is earlier than the one in force (run.json or cutoff.json). Returns (applied, in force)."""
    spec = read_spec(paths)
    with _orders_locked(paths):
        current = read_cutoff(paths)
        in_force_at = effective_cutoff(spec, current)
        if in_force_at is None:
            raise RequestRefused(
                f"run {spec.run_id} has no deadline to move", where=str(paths.order), what=f"a {spec.kind} run ends when it is told to",
                fix=f"fleetd stop {spec.run_id}",
            )
        if order.cutoff_at >= in_force_at:
            return False, current or CutoffOrder(sequence=0, cutoff_at=in_force_at, because="run.json")
        write_record(paths.cutoff, order)
        return True, order


def effective_cutoff(spec: RunSpec, order: CutoffOrder | None) -> datetime | None:
    """The hard deadline of this run: the earlier of run.json and cutoff.json; an evaluation's is the final deadline; a serving run has none."""
    if spec.deadline is None:
        return None
    recorded_at = spec.deadline.final_at if spec.kind is RunKind.EVALUATE else spec.deadline.cutoff_at
    return recorded_at if order is None else min(recorded_at, order.cutoff_at)


def newest_attempt(paths: RunPaths) -> int:
    """The highest attempt number that has a folder, 0 when there is none."""
    try:
        names = os.listdir(paths.attempts)
    except FileNotFoundError:
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def create_attempt(paths: RunPaths) -> int:
    """Make the folder of the next attempt, exclusively and durably; returns its number. The supervisor then starts the shim."""
    number = newest_attempt(paths) + 1
    paths.attempts.mkdir(exist_ok=True)
    faults.before("attempt folder")
    paths.attempt(number).root.mkdir()
    with _undone(paths.attempt(number).root.rmdir):
        sync_folder(paths.attempts)
    faults.after("attempt made")
    return number


def is_started(paths: RunPaths, attempt: int) -> bool:
    return paths.attempt(attempt).started.exists()


def mark_started(paths: RunPaths, attempt: int) -> None:
    """Claim the attempt for the calling shim, once and durably. FileExistsError when it was started before."""
    faults.before("started")
    os.close(os.open(paths.attempt(attempt).started, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    with _undone(paths.attempt(attempt).started.unlink):
        sync_folder(paths.attempt(attempt).root)
    faults.after("started")


def read_attempt(paths: RunPaths, attempt: int) -> AttemptRecord | None:
    return _read(AttemptRecord, paths.attempt(attempt).record)


def write_attempt(paths: RunPaths, record: AttemptRecord) -> None:
    write_record(paths.attempt(record.attempt).record, record)


def overwrite_attempt(paths: RunPaths, record: AttemptRecord) -> bool:
    """The same in place, where a full disk has no room for a second file."""
    return overwrite(paths.attempt(record.attempt).record, json.dumps(encode(record)))


def read_exit(paths: RunPaths, attempt: int) -> ExitRecord | None:
    return _read(ExitRecord, paths.attempt(attempt).exit)


def write_exit(paths: RunPaths, record: ExitRecord) -> bool:
    """Write-once and durable. False when an exit was already recorded (the first one rules). OSError on a full disk: try again."""
    try:
        create_record(paths.attempt(record.attempt).exit, record)
    except FileExistsError:
        return False
    return True


def read_program(path: Path) -> ProgramRecord | None:
    """supervisor.json or shim.json."""
    return _read(ProgramRecord, path)


def write_program(path: Path, at: datetime) -> ProgramRecord:
    """Record the calling process."""
    record = ProgramRecord(identity=identity_of(os.getpid()), at=at)
    write_record(path, record)
    return record


def read_heartbeat(paths: RunPaths) -> Heartbeat | None:
    """None also when it is damaged: a heartbeat is a look, not history."""
    try:
        return _read(Heartbeat, paths.heartbeat)
    except (OSError, WireError):
        return None


def write_heartbeat(paths: RunPaths, beat: Heartbeat) -> None:
    write_record(paths.heartbeat, beat, durable=False)


def read_observation(paths: RunPaths) -> Observation | None:
    """None also when it is damaged, like a heartbeat."""
    try:
        return _read(Observation, paths.observation)
    except (OSError, WireError):
        return None


def write_observation(paths: RunPaths, observation: Observation) -> None:
    write_record(paths.observation, observation, durable=False)


def try_lock(path: Path, patience_seconds: float = 0.3) -> int | None:
    """The descriptor of an exclusive flock (close-on-exec), None when somebody holds it. The short patience outlasts a probe by `is_locked`."""
    if not path.exists():
        faults.before(f"{path.name} lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up_at = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                os.close(descriptor)
                return None
            time.sleep(LOCK_RETRY_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise


def is_locked(path: Path) -> bool:
    """Whether somebody holds the flock. False when the file is absent."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _undone(undo: Callable[[], None]) -> Iterator[None]:
    """What was made and can't be synced was not made: whoever tries again must not take it for somebody else's."""
    try:
        yield
    except OSError:
        with contextlib.suppress(OSError):
            undo()
        raise


@contextlib.contextmanager
def _orders_locked(paths: RunPaths) -> Iterator[None]:
    lock = paths.orders / "lock"
    descriptor = try_lock(lock, ORDERS_PATIENCE_SECONDS)
    if descriptor is None:
        raise ExplainedError(  # no refusal: a start that finds its run there would count as one that began nothing
            "the orders of this run are locked", where=str(lock), what=f"another agent has held them for {ORDERS_PATIENCE_SECONDS:.0f} s",
            fix=f"fuser {lock}   (shows who; then send the order again)",
        )
    try:
        yield
    finally:
        os.close(descriptor)


def _is_there(paths: RunPaths, spec: RunSpec) -> bool:
    """Whether this very order was given before. The generation may have grown since: it is the same coordinator's later life."""
    try:
        found = read_spec(paths)
    except FileNotFoundError:
        return False
    if found.owner.coordinator_id == spec.owner.coordinator_id and replace(found, owner=spec.owner) == spec:
        return True
    raise RequestRefused(
        f"run {spec.run_id} exists with another order", where=str(paths.order),
        what=f"it was created at {found.created_at.isoformat()} for coordinator {found.owner.coordinator_id}",
        fix="fleetd launch PLAN   (a new run gets a new id)",
    )


def _read(kind: type[T], path: Path) -> T | None:
    try:
        value = read_record(path)
    except FileNotFoundError:
        return None
    return decode(kind, value, str(path))
