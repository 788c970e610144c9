"""A run's journal that was damaged or lost: no number means two notices, and what nobody watches any more is told all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_runs import spec_for

from fleetd import clock
from fleetd.host import rundir
from fleetd.host.history import History
from fleetd.host.notices import NUMBERS_PER_LIFE, Spool
from fleetd.host.reports import Reports
from fleetd.model import Observation, WantOrder
from fleetd.paths import HostPaths, RunPaths
from policies.facts import RunState, Want

TOLD = 3


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    """A run whose supervisor has told three notices of its first attempt, and ended."""
    spec = spec_for()
    paths = HostPaths(tmp_path).run(spec.run_id)
    rundir.create_run(paths, spec, None, WantOrder(sequence=1, want=Want.RUN, actor="user:test", at=spec.created_at))
    rundir.create_attempt(paths)
    assert tell(Spool(paths), TOLD) == [1, 2, 3]
    return paths


def tell(spool: Spool, count: int) -> list[int]:
    """The numbers of the notices that a supervisor now tells."""
    before = spool.journal.last
    for _ in range(count):
        spool.tell(clock.read(), "alarm", text="x")
    spool.write(History(state=RunState.RUNNING, attempt=1, is_attempt_over=False))
    numbers = [entry["sequence"] for entry in spool.journal.entries(after=before)]
    spool.journal.close()
    return numbers


def test_a_first_supervisor_begins_with_one_and_a_later_one_goes_on(paths: RunPaths) -> None:
    spool = Spool(paths)
    spool.load()
    assert tell(spool, 1) == [TOLD + 1]


@pytest.mark.parametrize("loss", ["damaged", "gone"])
def test_what_is_told_after_a_loss_has_numbers_that_nothing_lost_can_have_had(paths: RunPaths, loss: str) -> None:
    known = {*range(1, TOLD + 1)}
    for _ in range(2):
        if loss == "damaged":
            paths.journal.write_bytes(b"garbage" * 1000)
        else:
            paths.journal.unlink()
            rundir.write_record(paths.acknowledged, {"notice": max(known)})
        spool = Spool(paths)
        spool.load()
        fresh = tell(spool, 2)
        assert len(fresh) == 2 and not known & {*fresh} and fresh[0] > NUMBERS_PER_LIFE, "the reader sees a gap"
        known |= {*fresh}


def test_a_reader_is_told_of_the_gap_and_what_the_files_say(paths: RunPaths) -> None:
    paths.journal.write_bytes(b"garbage" * 1000)
    spool = Spool(paths)
    spool.load()
    [number] = tell(spool, 1)
    reports = Reports(HostPaths(paths.root.parent.parent), start=lambda run: 0)
    reports.take({paths.root.name: TOLD - 1})
    [report] = reports.answer({paths.root.name: TOLD - 1})
    assert (report.notices_lost_to, [notice.sequence for notice in report.notices]) == (number - 1, [number])
    assert [notice.kind for notice in report.retold] == ["attempt_started"]


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_run_at_rest_gets_a_supervisor_once_more_only_if_its_journal_is_damaged(paths: RunPaths, is_damaged: bool) -> None:
    rested = Observation(
        run_id=paths.root.name, at=clock.read().now, state=RunState.FINISHED, reason=None, detail="", attempt=1, pid=None, identity="gone",
    )
    rundir.write_observation(paths, rested)
    if is_damaged:
        paths.journal.write_bytes(b"garbage" * 1000)
    started: list[Path] = []
    reports = Reports(HostPaths(paths.root.parent.parent), start=lambda run: started.append(run) or 1)
    reports.take({paths.root.name: 0})
    reports.sweep()
    assert started == ([paths.root] if is_damaged else [])
