"""What the agent tells of its runs: one RunReport each, whether there is news, and the sweep for runs that lost their supervisor.

An agent holds no state that matters: what it keeps here is only what it read, so that asking ten times a second costs a few stats.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetd import clock, logs
from fleetd.clock import Moment
from fleetd.files import write_record
from fleetd.host import launch, rundir, tidy
from fleetd.host.observe import Cached
from fleetd.host.processes import boot_id, look
from fleetd.host.retell import retell
from fleetd.journal import Journal
from fleetd.model import Notice, Observation, RunReport, RunSpec
from fleetd.paths import HostPaths, RunPaths
from fleetd.wire import WireError, decode, dumps
from policies.errors import ExplainedError, JournalDamaged
from policies.facts import RunState, Want
from policies.lifecycle import SETTLED

NOTICES_PER_RUN_MAX = 500
UNREAD_SECONDS_MAX = 60.0
ANSWER_BYTES_MAX = 4 * 1024 * 1024
"""Notices beyond this wait for the next poll: a line may hold 8 MiB."""
SPOOL_RETRY_SECONDS = 1.0
"""What could not be read may be readable a moment later, although nothing of the file has changed."""
SWEEP_SECONDS = 2.0
SHIM_PATIENCE_SECONDS = 20.0
"""A living shim starts a new supervisor itself, within 5 s; the sweep is for where that fails."""
SWEEP_WAIT_SECONDS_MAX = 60.0
WAL_INDEX_HEADER_BYTES = 48


@dataclass
class RunWatch:
    """One run directory as this agent last read it."""

    paths: RunPaths
    mark: tuple[object, ...] = ()
    notices: tuple[Notice, ...] = ()
    read_after: int = -1
    lost_to: int = 0
    retold: tuple[Notice, ...] = ()
    trouble: str = ""
    """Why the spool could not be read at the last look."""
    is_damaged: bool = False
    """Whether its bytes are wrong: the next supervisor keeps what still reads, and tells what files say of the rest."""
    retry_seconds: float = 0.0
    unread_since_seconds: float | None = None
    """Since when the spool is there and can't be read."""
    acknowledged: int = 0
    free_since_seconds: float | None = None
    starts: int = 0
    next_start_seconds: float = 0.0
    state: RunState | None = None
    supervisor: str = ""
    told: tuple[object, ...] = ()
    is_tidy: bool = False
    spec: RunSpec | None = None
    observation: Cached[Any] = field(init=False)
    want: Cached[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.observation = Cached(self.paths.observation, lambda: rundir.read_observation(self.paths))
        self.want = Cached(self.paths.want, lambda: rundir.read_want(self.paths))

    def look(self) -> None:
        was_over = self.is_settled and self.supervisor == "gone"  # seen in this order: "gone" is only as new as the look it came after
        seen = self.observation.get()
        self.state = seen.state if seen is not None else None
        if not (was_over and self.is_settled):
            self.supervisor = "alive" if rundir.is_locked(self.paths.lock) else "gone"

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to do here. A stopped run that is wished to run has been woken by a later order."""
        wish = self.want.get()
        woken = self.state is RunState.STOPPED and wish is not None and wish.want is Want.RUN
        return self.state in SETTLED and not woken

    def order(self) -> RunSpec | None:
        """What this run is, for a coordinator that may not know it. None where its record can't be read."""
        if self.spec is None:
            try:
                self.spec = rundir.read_spec(self.paths)
            except (OSError, WireError) as fault:
                logs.failed("order_unreadable", run=self.paths.root.name, because=str(fault).replace("\n", " "))
        return self.spec

    def acknowledge(self, sequence: int) -> None:
        """Tell the supervisor that the coordinator's history holds its notices up to here."""
        if sequence <= self.acknowledged:
            return
        try:
            # Durable: the supervisor deletes on its word, and a spool that is lost later goes on counting from it.
            write_record(self.paths.acknowledged, {"notice": sequence})
        except OSError as fault:
            logs.failed("acknowledgement_refused", run=self.paths.root.name, because=fault)
            return  # the notices are kept a little longer
        self.acknowledged = sequence

    def read_notices(self, after: int) -> None:
        """Read the spool again if it changed, or if other notices are asked for."""
        mark = (_mark(self.paths.journal), _commits(self.paths.journal))
        if mark == self.mark and after == self.read_after and (not self.trouble or time.monotonic() < self.retry_seconds):
            return
        trouble, is_damaged = "", False
        try:
            journal = Journal.open(self.paths.journal, read_only=True)
            try:
                entries = journal.entries(after, NOTICES_PER_RUN_MAX)
                if journal.health != "ok":  # what could not be read now is neither nothing nor lost
                    raise sqlite3.OperationalError(journal.health)
                self.notices = tuple(decode(Notice, entry) for entry in entries)
                self._find_lost(after, journal.last)
            finally:
                journal.close()
        except (ExplainedError, WireError, sqlite3.Error) as fault:
            self.notices, self.retry_seconds = (), time.monotonic() + SPOOL_RETRY_SECONDS
            trouble, is_damaged = str(fault).replace("\n", " "), isinstance(fault, JournalDamaged)
            is_there = self.paths.journal.exists()
            if trouble != self.trouble and is_there:
                logs.failed("spool_unreadable", run=self.paths.root.name, because=trouble)
            if is_there and not is_damaged and self.unread_since_seconds is None:
                self.unread_since_seconds = time.monotonic()
        if not trouble or is_damaged:
            self.unread_since_seconds = None
        self.mark, self.read_after, self.trouble, self.is_damaged = mark, after, trouble, is_damaged

    def has_more(self, told: int) -> bool:
        """Whether notices lie here beyond the first `told` of those that were read. What stays unreadable is waited for no longer."""
        since = self.unread_since_seconds
        is_unread = since is not None and time.monotonic() - since < UNREAD_SECONDS_MAX
        return is_unread or told < len(self.notices) or told >= NOTICES_PER_RUN_MAX

    def _find_lost(self, after: int, last: int) -> None:
        """A coordinator whose history was lost in part asks for notices that it once acknowledged: they are gone, their files may not be."""
        lost_to = self.notices[0].sequence - 1 if self.notices else last
        if lost_to <= after:
            self.lost_to, self.retold = 0, ()
        elif lost_to != self.lost_to:
            self.lost_to, self.retold = lost_to, retell(self.paths)


class Reports:
    def __init__(self, paths: HostPaths, start: Callable[[Path], int] = launch.start_supervisor) -> None:
        self.paths, self._start = paths, start
        self._watches: dict[str, RunWatch] = {}
        self._swept_seconds = float("-inf")

    def watch(self, run_id: str) -> RunWatch:
        if run_id not in self._watches:
            self._watches[run_id] = RunWatch(self.paths.run(run_id))
        return self._watches[run_id]

    def take(self, after: dict[str, int]) -> None:
        """Note what the coordinator has, and look at every run that it asks for or that is not settled."""
        for run_id in self._run_ids():
            watch = self.watch(run_id)
            watch.look()
            if run_id in after:
                watch.acknowledge(after[run_id])
            if run_id in after or not watch.is_settled:
                watch.read_notices(after.get(run_id, 0))

    def has_news(self, after: dict[str, int]) -> bool:
        """Whether there are notices beyond `after`, or a run whose state or supervisor is not what the last answer said."""
        self.take(after)
        return any(
            (run_id in after and watch.notices) or (watch.told and watch.told != (watch.state, watch.supervisor))
            for run_id, watch in self._reported(after)
        )

    def answer(self, after: dict[str, int]) -> tuple[RunReport, ...]:
        reports, size = [], 0
        for run_id, watch in self._reported(after):
            notices: list[Notice] = []
            for notice in watch.notices:
                size += len(dumps(notice))
                if size > ANSWER_BYTES_MAX:
                    break
                notices.append(notice)
            watch.told = (watch.state, watch.supervisor)
            seen = watch.observation.value
            is_asked = run_id in after
            reports.append(RunReport(
                run_id=run_id, supervisor=watch.supervisor, observation=seen, notices=tuple(notices), has_more=watch.has_more(len(notices)),
                look_age_seconds=look_age_seconds(seen, boot_id(), clock.read()),
                notices_lost_to=watch.lost_to if is_asked else 0, retold=watch.retold if is_asked else (),
                spec=watch.order() if after.get(run_id, 0) == 0 else None, want=watch.want.value,
            ))
        return tuple(reports)

    def at_work(self) -> list[dict[str, Any]]:
        """The runs of this root that are not settled, whosever they are: `run_id`, `state`, `supervisor`, `pid`."""
        found = []
        for run_id in self._run_ids():
            watch = self.watch(run_id)
            watch.look()
            seen = watch.observation.value
            if watch.supervisor == "alive" or not watch.is_settled:
                found.append({"run_id": run_id, "state": watch.state, "supervisor": watch.supervisor, "pid": seen.pid if seen is not None else None})
        return found

    def sweep(self) -> None:
        """Start a supervisor for each run that is not settled and has none, unless its shim is about to."""
        if time.monotonic() - self._swept_seconds < SWEEP_SECONDS:
            return
        self._swept_seconds = time.monotonic()
        for run_id in self._run_ids():
            try:
                self._sweep_one(self.watch(run_id))
            except (OSError, WireError, ExplainedError) as fault:
                logs.failed("sweep_failed", run=run_id, because=str(fault).replace("\n", " "))

    def ensure_supervisor(self, run_id: str) -> str:
        """`alive`, `started`, or `settled` where there is nothing to watch."""
        watch = self.watch(run_id)
        watch.look()
        if watch.supervisor == "alive":
            return "alive"
        if watch.is_settled:
            return "settled"
        self._start_for(watch, "an order came and its supervisor was gone")
        return "started"

    def _sweep_one(self, watch: RunWatch) -> None:
        now_seconds = time.monotonic()
        watch.look()
        if watch.supervisor == "alive" or (watch.is_settled and not watch.is_damaged):
            watch.free_since_seconds = None
            _keep_tidy(watch)
            return
        if watch.free_since_seconds is None:
            watch.free_since_seconds = now_seconds
        patience = SHIM_PATIENCE_SECONDS if _has_living_shim(watch.paths) else 0.0
        if now_seconds - watch.free_since_seconds >= patience and now_seconds >= watch.next_start_seconds:
            self._start_for(watch, "the sweep found it without one")

    def _start_for(self, watch: RunWatch, because: str) -> None:
        watch.starts += 1
        watch.next_start_seconds = time.monotonic() + min(SWEEP_WAIT_SECONDS_MAX, 2.0 ** min(watch.starts, 10))
        watch.free_since_seconds = None
        pid = self._start(watch.paths.root)
        logs.changed("supervisor_started", run=watch.paths.root.name, pid=pid, because=because)

    def _reported(self, after: dict[str, int]) -> list[tuple[str, RunWatch]]:
        """Those that were asked for first: others must not take the room of their notices."""
        found = [(run_id, watch) for run_id, watch in sorted(self._watches.items()) if run_id in after or not watch.is_settled]
        return sorted(found, key=lambda each: each[0] not in after)

    def _run_ids(self) -> list[str]:
        try:
            names = os.listdir(self.paths.runs)
        except FileNotFoundError:
            return []
        return sorted(name for name in names if not name.startswith(".") and (self.paths.run(name).order).exists())


def _keep_tidy(watch: RunWatch) -> None:
    """Once nobody watches a settled run any more, take away what those who did have left."""
    if watch.supervisor == "alive":
        watch.is_tidy = False
    elif not watch.is_tidy and not _has_living_shim(watch.paths):
        watch.is_tidy = tidy.tidy_run(watch.paths)


def look_age_seconds(seen: Observation | None, boot: str, moment: Moment) -> float | None:
    """How old a look is. No step of the wall clock makes it newer; one from before this boot is at least as old as the boot."""
    if seen is None or seen.boottime_seconds is None:
        return None
    if seen.boot_id == boot:
        return max(0.0, moment.boottime_seconds - seen.boottime_seconds)
    return max(moment.boottime_seconds, (moment.now - seen.at).total_seconds())


def _has_living_shim(paths: RunPaths) -> bool:
    try:
        record = rundir.read_program(paths.shim)
    except (OSError, WireError):
        return False
    return record is not None and look(record.identity).is_verified


def _commits(journal: Path) -> bytes:
    """The header of the index beside the write-ahead log (sqlite.org/walformat.html, 2.1), which changes with every commit, and only once
    readers can see it. The log's own time and size change before that, by as long as a sync takes: a look in between would be the last."""
    try:
        with open(f"{journal}-shm", "rb", buffering=0) as index:
            return index.read(WAL_INDEX_HEADER_BYTES)
    except OSError:
        return b""  # its owner has closed it: all of it lies in the file itself


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
