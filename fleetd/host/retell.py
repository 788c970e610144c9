"""What the files of a run still say of notices that are gone: its attempts and how they ended, its validations, its checkpoints.

Asked for when a coordinator comes back with an older history than it once acknowledged. States in between are lost for good.
"""

from __future__ import annotations

from fleetd import clock
from fleetd.host import rundir
from fleetd.host.follow import news_of
from fleetd.model import Notice
from fleetd.paths import RunPaths
from fleetd.wire import WireError, encode

RETOLD_MAX = 2000
LOG_READS_MAX = 4096
"""Reads of a bounded part each; a longer log is retold as far as this."""


def retell(paths: RunPaths) -> tuple[Notice, ...]:
    """Notices without a number, by kind in their order. Whatever can't be read is left out."""
    now = clock.read().now
    found = [*_attempts(paths), *_news(paths), *_checkpoints(paths)]
    return tuple(Notice(sequence=0, at=now, kind=kind, body=encode(body)) for kind, body in found[:RETOLD_MAX])


def _attempts(paths: RunPaths) -> list[tuple[str, dict[str, object]]]:
    found: list[tuple[str, dict[str, object]]] = []
    for number in range(1, rundir.newest_attempt(paths) + 1):
        found.append(("attempt_started", {"attempt": number}))
        try:
            ended = rundir.read_exit(paths, number)
        except (OSError, WireError):
            continue
        if ended is not None:
            found.append(("attempt_ended", {"attempt": number, "exit": ended, "reason": None}))
    return found


def _news(paths: RunPaths) -> list[tuple[str, dict[str, object]]]:
    log, found = rundir.LogTail(paths.log, 0), []
    for _ in range(LOG_READS_MAX):
        before = log.offset
        try:
            records = log.read()
        except OSError:
            break
        for record in records:
            if (news := news_of(record)) is not None:
                found.append(news)
        if log.offset == before:
            break
    return found


def _checkpoints(paths: RunPaths) -> list[tuple[str, dict[str, object]]]:
    try:
        claims = rundir.newest_checkpoints(paths)
    except OSError:
        return []
    return [("checkpoint", {"step": claim.step, "digest": claim.digest, "bytes": claim.bytes}) for claim in reversed(claims)]
