"""What the agent reads of a spool while a supervisor is in the middle of writing it: nothing is overlooked, whatever moment it looked at."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import pytest
from host_runs import WAIT_SECONDS, wait_for

from fleetd.host import rundir
from fleetd.host.reports import UNREAD_SECONDS_MAX, Reports, RunWatch
from fleetd.journal import Journal
from fleetd.model import Observation
from fleetd.paths import HostPaths, RunPaths
from fleetd.wire import dumps
from policies.facts import RunState

ROUNDS = 60
PAUSE_SECONDS_MAX = 0.004
"""A commit on a disk that really syncs takes one to ten milliseconds: the log is written, synced, and only then made visible."""
WRITER = """
import sys
from pathlib import Path
from fleetd.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
for _ in sys.stdin:
    journal.append([{"at": "2026-09-16T18:00:00Z", "kind": "alarm", "body": {}}])
    print(journal.last, flush=True)
"""


@pytest.fixture
def watch(tmp_path: Path) -> RunWatch:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    return RunWatch(paths)


def shows(watch: RunWatch, number: int) -> bool:
    """At the next look, or once a lock that hid everything is gone; what was overlooked would stay so for ever."""
    watch.read_notices(0)
    return [notice.sequence for notice in watch.notices] == list(range(1, number + 1))


def test_a_look_in_the_middle_of_a_commit_does_not_hide_what_was_committed(watch: RunWatch) -> None:
    seed = random.SystemRandom().randrange(2**32)
    dice = random.Random(seed)
    command = [sys.executable, "-c", WRITER, str(watch.paths.journal)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        for number in range(1, ROUNDS + 1):
            writer.stdin.write("\n")
            wait_seconds = dice.uniform(0.0, PAUSE_SECONDS_MAX)
            began_seconds = time.perf_counter()
            while time.perf_counter() - began_seconds < wait_seconds:
                pass  # a sleep would be longer than a commit
            os.kill(writer.pid, signal.SIGSTOP)
            watch.read_notices(0)
            os.kill(writer.pid, signal.SIGCONT)
            assert writer.stdout.readline() == f"{number}\n"

            wait_for(partial(shows, watch, number), WAIT_SECONDS, lambda: f"seed {seed}: the last one is not seen; {watch.trouble}")
        writer.stdin.close()


def test_a_spool_that_could_not_be_read_is_read_again_although_nothing_of_it_has_changed(
    watch: RunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(watch.paths.journal)
    journal.append([{"at": "2026-09-16T18:00:00Z", "kind": "alarm", "body": {}}])

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "open", lambda *_, **__: raise_locked())
        watch.read_notices(0)
    assert watch.notices == () and "locked" in watch.trouble
    assert watch.has_more(0), "nobody may take the run for told to the end"
    monkeypatch.setattr("fleetd.host.reports.time.monotonic", lambda: watch.retry_seconds)

    watch.read_notices(0)

    assert [notice.sequence for notice in watch.notices] == [1] and not watch.trouble
    assert not watch.has_more(1)
    journal.close()


def test_a_spool_that_is_locked_after_it_was_opened_has_lost_nothing(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(watch.paths.journal)
    journal.append([{"at": "2026-09-16T18:00:00Z", "kind": "alarm", "body": {}}])

    def locked(reader: Journal, *_: int) -> list[dict[str, object]]:
        reader._fault = "database is locked"
        return []

    with monkeypatch.context() as broken:
        broken.setattr(Journal, "entries", locked)
        watch.read_notices(0)
    assert "locked" in watch.trouble and watch.lost_to == 0
    monkeypatch.setattr("fleetd.host.reports.time.monotonic", lambda: watch.retry_seconds)

    watch.read_notices(0)

    assert [notice.sequence for notice in watch.notices] == [1] and not watch.trouble
    journal.close()


def test_what_an_answer_has_no_room_for_is_known_to_be_there(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.open(watch.paths.journal)
    journal.append([{"at": "2026-09-16T18:00:00Z", "kind": "alarm", "body": {}}] * 3)
    monkeypatch.setattr("fleetd.host.reports.NOTICES_PER_RUN_MAX", 3)
    watch.read_notices(0)
    assert [watch.has_more(told) for told in (0, 2, 3)] == [True, True, True], "the bound was reached: another may lie behind it"
    watch.read_notices(1)
    assert [watch.has_more(told) for told in (1, 2)] == [True, False]
    journal.close()


def test_a_spool_that_stays_unreadable_is_waited_for_no_longer(watch: RunWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    Journal.open(watch.paths.journal).close()
    monkeypatch.setattr(Journal, "open", lambda *_, **__: raise_locked())
    clock_seconds = time.monotonic()
    told = []
    for seconds in (0.0, UNREAD_SECONDS_MAX - 1, UNREAD_SECONDS_MAX + 1):
        monkeypatch.setattr("fleetd.host.reports.time.monotonic", lambda seconds=seconds: clock_seconds + seconds)
        watch.read_notices(0)
        told.append(watch.has_more(0))
    assert told == [True, True, False]


def test_a_run_that_is_over_is_watched_as_long_as_its_newest_supervisor_has_not_left(watch: RunWatch) -> None:
    """The last supervisor had died, and the next one came and saw the end between two looks of the agent."""
    seen = Observation(
        run_id="r1", at=datetime.now(timezone.utc), state=RunState.RUNNING, reason=None, detail="", attempt=1, pid=None, identity="gone",
    )
    rundir.write_observation(watch.paths, seen)
    watch.look()
    assert watch.supervisor == "gone"
    lock = rundir.try_lock(watch.paths.lock)
    assert lock is not None
    rundir.write_observation(watch.paths, replace(seen, state=RunState.FINISHED))
    watch.look()
    assert (watch.state, watch.supervisor) == (RunState.FINISHED, "alive"), "its last notices may still come"
    os.close(lock)
    watch.look()
    assert watch.supervisor == "gone"


def test_runs_that_nobody_asked_for_take_no_room_from_those_that_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Reports(HostPaths(tmp_path))
    for name in ("a-forgotten", "b-asked"):
        watch = reports.watch(name)
        watch.paths.root.mkdir(parents=True)
        watch.paths.order.write_text("{}")
        journal = Journal.open(watch.paths.journal)
        journal.append([{"at": "2026-09-16T18:00:00Z", "kind": "alarm", "body": {}}])
        journal.close()
    reports.take({"b-asked": 0})
    monkeypatch.setattr("fleetd.host.reports.ANSWER_BYTES_MAX", len(dumps(watch.notices[0])) * 3 // 2)

    told = {report.run_id: (len(report.notices), report.has_more) for report in reports.answer({"b-asked": 0})}

    assert told == {"b-asked": (1, False), "a-forgotten": (0, True)}


def raise_locked() -> Journal:
    raise sqlite3.OperationalError("database is locked")
