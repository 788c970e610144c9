"""How an attempt ended when its shim can't say any more: the ladder of evidence, strongest first.

    supervisor   the orphan became our child (we are its subreaper): our own wait
    pidfd        a pidfd opened while it lived, and a kernel that keeps the exit there once init has reaped it
    trainer      the last record of its own log: finished, or stopped as asked
    kernel       the cgroup's counter of out-of-memory kills
    nobody       it is not known, and is never called 0 or killed
"""

from __future__ import annotations

import os
import signal
import time
from datetime import datetime
from typing import Any

from fleetd.host.observe import AttemptWatch
from fleetd.host.processes import can_read_exit_by_pidfd, exit_status_by_pidfd
from fleetd.host.progress import Progress
from fleetd.model import ExitRecord
from policies.facts import Reason, TrainerExit

REAP_TRIES_MAX = 60
REAP_WAIT_SECONDS = 0.05
"""Only once init has reaped an orphan does its pidfd tell the exit. Some init processes look for orphans only every second."""
CHILDREN_PER_CALL_MAX = 1000

_LAST_WORDS = {"finish": TrainerExit.FINISHED, "stop": TrainerExit.STOPPED}


def reap_children(trainer_pid: int | None) -> tuple[tuple[int, ...], int | None]:
    """Reap every ended child but the trainer. Returns the pids reaped, and the trainer's raw wait status if it ended as our child.

    The trainer stays a zombie until its exit is on disk: a crash of ours in between leaves it to be asked again.
    """
    reaped: list[int] = []
    trainer_status: int | None = None
    if trainer_pid is not None:
        trainer_status = _peek(os.P_PID, trainer_pid)
    for _ in range(CHILDREN_PER_CALL_MAX):
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if ended is None or ended.si_pid == trainer_pid:
            break
        os.waitpid(ended.si_pid, 0)
        reaped.append(ended.si_pid)
    return tuple(reaped), trainer_status


def _peek(kind: int, pid: int) -> int | None:
    try:
        ended = os.waitid(kind, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    if ended.si_code == os.CLD_EXITED:
        return ended.si_status << 8
    return ended.si_status | (0x80 if ended.si_code == os.CLD_DUMPED else 0)


def record_of(watch: AttemptWatch, progress: Progress, *, own_status: int | None, at: datetime, because: str) -> ExitRecord:
    """The best that can still be said of how this attempt ended."""
    evidence: dict[str, Any] = {"because": because, "leader": watch.leader.text, "oom_kills": watch.oom_kill_count}
    if watch.record.value is None:
        evidence |= {"reason": Reason.LAUNCH_TIMEOUT, "start": "its shim ended before it had started a trainer; attempts/*/shim.log says why"}
    if own_status is not None:
        return exit_record(watch.number, at, own_status, "supervisor", evidence)
    held = watch.leader.grip
    if held is not None and (status := _status_by_pidfd(held.fileno())) is not None:
        return exit_record(watch.number, at, status, "pidfd", evidence)
    said = _LAST_WORDS.get(progress.last_event or "")
    if said is not None:
        evidence["last_record"] = {"event": progress.last_event, "because": progress.last_because, "step": progress.step}
        return ExitRecord(attempt=watch.number, at=at, wait_status=None, exit_code=int(said), signal=None, observed_by="trainer", evidence=evidence)
    if watch.oom_kill_count > 0:
        return ExitRecord(
            attempt=watch.number, at=at, wait_status=None, exit_code=None, signal=int(signal.SIGKILL), observed_by="kernel", evidence=evidence
        )
    return ExitRecord(attempt=watch.number, at=at, wait_status=None, exit_code=None, signal=None, observed_by="nobody", evidence=evidence)


def exit_record(attempt: int, at: datetime, status: int, observed_by: str, evidence: dict[str, Any]) -> ExitRecord:
    """The record of a raw wait status."""
    by_signal = os.WIFSIGNALED(status)
    return ExitRecord(
        attempt=attempt, at=at, wait_status=status, exit_code=None if by_signal else os.WEXITSTATUS(status),
        signal=os.WTERMSIG(status) if by_signal else None, observed_by=observed_by, evidence=evidence,
    )


def _status_by_pidfd(descriptor: int) -> int | None:
    if not can_read_exit_by_pidfd():
        return None
    for _ in range(REAP_TRIES_MAX):
        status = exit_status_by_pidfd(descriptor)
        if status is not None:
            return status
        time.sleep(REAP_WAIT_SECONDS)
    return None
