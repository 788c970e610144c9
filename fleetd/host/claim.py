"""How a shim claims its attempt: trainer.lock without waiting, then every reason not to start, then `started`, created exclusively.

A full disk is no reason to give up and no failed attempt: nothing has begun. The shim waits for room and asks every question again.
"""

from __future__ import annotations

import errno
import os
import time

from fleetd import logs
from fleetd.host import rundir
from fleetd.paths import RunPaths
from policies.facts import Want

ROOM_WAIT_SECONDS = 1.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def claim(paths: RunPaths, attempt: int) -> int | str:
    """The descriptor of trainer.lock once the attempt is claimed, or in words why it must not start."""
    lock = -1
    while True:
        try:
            if lock < 0:
                found = rundir.try_lock(paths.trainer_lock)
                if found is None:
                    return f"another shim or trainer holds {paths.trainer_lock}"
                lock = found
            why = _refusal(paths, attempt)
            if why is not None:
                os.close(lock)
                return why
            rundir.mark_started(paths, attempt)
            return lock
        except OSError as fault:
            if not is_no_room(fault):
                raise
            logs.failed("claim_waits", attempt=attempt, because=fault)
        time.sleep(ROOM_WAIT_SECONDS)


def is_no_room(fault: BaseException) -> bool:
    return isinstance(fault, OSError) and fault.errno in _NO_ROOM


def is_wanted(paths: RunPaths) -> bool:
    want = rundir.read_want(paths)
    return want is not None and want.want is Want.RUN


def _refusal(paths: RunPaths, attempt: int) -> str | None:
    """Why this attempt must not start, judged while trainer.lock is ours; None when it may."""
    newest = rundir.newest_attempt(paths)
    if newest != attempt:
        return f"attempt {attempt} is not the newest, {newest} is"
    if rundir.is_started(paths, attempt) or rundir.read_exit(paths, attempt) is not None:
        return f"attempt {attempt} was started before"
    return None if is_wanted(paths) else "the order in force is not to run"
