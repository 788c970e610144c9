"""What the trainer leaves behind while it works, followed as it grows: its log and its checkpoints.

Both are read into the supervisor's memory together with the offset read up to, so that each validation and each checkpoint is told
exactly once, whoever watches. What it prints is not read here, only held to its bound (`fleetd.bounded`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fleetd import logs
from fleetd.bounded import hold_path_within
from fleetd.clock import Moment
from fleetd.host import rundir
from fleetd.host.history import History, SeenCheckpoint
from fleetd.host.progress import after_record, finite, whole
from fleetd.paths import RunPaths

LOG_READS_PER_TICK_MAX = 64
CHECKPOINTS_REMEMBERED_MAX = 50
LOOK_AGAIN_SECONDS = 1.5
JUDGED_WORDS_MAX = 1000
VERDICTS = ("exact", "inexact", "unknown")

Tell = Callable[..., None]
"""`tell(moment, kind, **body)`: one notice."""


class Follower:
    def __init__(self, paths: RunPaths, offset: int, seconds: float) -> None:
        self.paths = paths
        self.log = rundir.LogTail(paths.log, offset)
        self.log_grew_seconds = seconds
        """Boottime at which the log was last seen to grow, or an attempt began."""
        self._checkpoints_mark: int | None = None
        self._checkpoints_changed_seconds = seconds
        self._output_fault = ""

    def follow(self, history: History, moment: Moment, tell: Tell) -> History:
        """The memory after what is new on disk; every validation and checkpoint in it is told."""
        self._hold_output(history.attempt)
        return self._checkpoints(self._records(history, moment, tell), moment, tell)

    def _hold_output(self, attempt: int) -> None:
        """No trouble with a trainer's output is a reason to stop watching the trainer."""
        try:
            dropped_bytes = hold_path_within(self.paths.attempt(attempt).stdout)
        except OSError as fault:
            if self._output_fault != str(fault):
                logs.failed("output_not_held", attempt=attempt, because=fault)
            self._output_fault = str(fault)
            return
        if dropped_bytes:
            logs.changed("output_held", attempt=attempt, hole_bytes=dropped_bytes)

    def _records(self, history: History, moment: Moment, tell: Tell) -> History:
        for _ in range(LOG_READS_PER_TICK_MAX):
            before = self.log.offset
            records = self.log.read()
            if self.log.offset == before:
                break
            self.log_grew_seconds = moment.boottime_seconds
            progress = history.progress
            for record in records:
                progress = after_record(progress, record, read_at=moment.now)
                if (news := news_of(record)) is not None:
                    tell(moment, news[0], **news[1])
            history = replace(history, progress=progress, log_offset=self.log.offset)
        return history

    def _checkpoints(self, history: History, moment: Moment, tell: Tell) -> History:
        """The folder's time changes when a checkpoint appears under its name, or goes. It counts in steps of milliseconds: what appears just
        after a look may leave it as it is, so that after a change one more look is worth it."""
        try:
            mark = os.stat(self.paths.checkpoints).st_mtime_ns
        except OSError:
            return history
        if mark != self._checkpoints_mark:
            self._checkpoints_mark, self._checkpoints_changed_seconds = mark, moment.boottime_seconds
        elif moment.boottime_seconds - self._checkpoints_changed_seconds > LOOK_AGAIN_SECONDS:
            return history
        claims = rundir.newest_checkpoints(self.paths)[:CHECKPOINTS_REMEMBERED_MAX]
        known = {(seen.step, seen.digest) for seen in history.checkpoints}
        for claim in reversed(claims):
            if (claim.step, claim.digest) not in known:
                tell(moment, "checkpoint", step=claim.step, digest=claim.digest, bytes=claim.bytes)
        return replace(history, checkpoints=tuple(SeenCheckpoint(step=claim.step, digest=claim.digest, at=claim.at) for claim in claims))


def news_of(record: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The notice, kind and body, that a record of the log is worth: the end of a validation, a pilot or a proof. None for all others."""
    kind, step = record.get("event"), whole(record.get("step"))
    if record.get("phase") != "end" or step is None:
        return None
    because = str(record.get("because", ""))[:JUDGED_WORDS_MAX]
    if kind == "validation":
        return kind, {"step": step, "value": finite(record.get("value")), "rows": whole(record.get("rows")),
                      "seconds": finite(record.get("seconds")), "sha256": str(record.get("sha256", ""))}
    if kind == "pilot":
        return kind, {"step": step, "passed": record.get("passed") is True, "because": because}
    if kind == "proof":
        verdict = str(record.get("verdict", ""))
        return kind, {"step": step, "verdict": verdict if verdict in VERDICTS else "unknown", "required": record.get("required") is True,
                      "because": because}
    return None
