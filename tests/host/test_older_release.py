"""An upgrade in the middle of a campaign: today's agent with a supervisor and a shim from a release of yesterday, kept in tests/data."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from host_runs import WAIT_SECONDS, HostRun, spec_for, wait_for, want
from test_agent import Channel

from fleetd.host import rundir
from fleetd.host.processes import look
from fleetd.model import CutoffOrder, RunReport
from fleetd.paths import HostPaths
from fleetd.wire import decode, encode
from policies.facts import RunState, Want

RELEASES = Path(__file__).resolve().parents[1] / "data" / "releases"
OLDER = sorted(path.name.removesuffix(".tar.xz") for path in RELEASES.glob("*.tar.xz"))


class Upgraded:
    """A run whose order names an older release, and an agent of today."""

    def __init__(self, root: Path, release: str) -> None:
        self.folder = HostPaths(root).releases / release
        self.folder.mkdir(parents=True)
        with tarfile.open(RELEASES / f"{release}.tar.xz") as archive:
            archive.extractall(self.folder, filter="data")
        spec = spec_for(argv=(sys.executable, "-S", "-c", "import time; time.sleep(600)"), contract=False)
        self.run = HostRun(root, replace(spec, release_digest=release))
        self.agent = Channel(root)

    def report(self, after: int = 0) -> RunReport:
        [report] = self.agent.ok("poll", after={self.run.spec.run_id: after}, wait_seconds=0.2)["runs"]
        return decode(RunReport, report)

    def wait_state(self, state: RunState, after: int = 0) -> RunReport:
        def found() -> RunReport | None:
            report = self.report(after)
            return report if report.observation is not None and report.observation.state is state else None

        seen = wait_for(found, WAIT_SECONDS, self.run.log_text)
        assert seen is not None
        return seen

    def programs(self) -> list[psutil.Process]:
        """Supervisor and shim, verified."""
        found = [rundir.read_program(path) for path in (self.run.paths.supervisor, self.run.paths.shim)]
        assert all(each is not None and not look(each.identity).is_dead for each in found)
        return [psutil.Process(each.identity.pid) for each in found if each is not None]


@pytest.fixture(params=OLDER)
def upgraded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Upgraded]:
    found = Upgraded(tmp_path / "root", request.param)
    yield found
    found.agent.close()
    found.run.clean()


def test_a_supervisor_of_an_older_release_is_understood_and_obeys(upgraded: Upgraded) -> None:
    agent, spec = upgraded.agent, upgraded.run.spec
    agent.ok("start", spec=encode(spec), task=None, want=encode(want(1, Want.RUN)))
    report = upgraded.wait_state(RunState.RUNNING)
    for program in upgraded.programs():
        assert str(upgraded.folder) in " ".join((*program.cmdline(), *program.environ().values())), "both come from the release that the order names"
    assert [notice.sequence for notice in report.notices] == list(range(1, len(report.notices) + 1))
    assert report.supervisor == "alive" and report.observation is not None and report.observation.identity == "verified"

    assert spec.deadline is not None
    cutoff = CutoffOrder(sequence=2, cutoff_at=spec.deadline.cutoff_at.replace(microsecond=0), because="earlier")
    assert agent.ok("cutoff", run_id=spec.run_id, cutoff=encode(cutoff))["applied"]
    assert agent.ok("want", run_id=spec.run_id, want=encode(want(3, Want.STOP)))["applied"]

    last = report.notices[-1].sequence
    upgraded.wait_state(RunState.STOPPED, last)
    wait_for(lambda: "attempt_ended" in {notice.kind for notice in upgraded.report(last).notices}, WAIT_SECONDS, upgraded.run.log_text)
    rest = upgraded.report(last).notices
    assert [notice.sequence for notice in rest] == list(range(last + 1, last + 1 + len(rest))), "notices go on where the acknowledged ones end"
    assert any(notice.kind == "state_changed" and notice.body["to"] == "stopped" for notice in rest)


def test_a_supervisor_of_an_older_release_that_dies_is_followed_by_one_of_the_same(upgraded: Upgraded) -> None:
    """The agent of today starts it again, by the door that the older release has."""
    upgraded.agent.ok("start", spec=encode(upgraded.run.spec), task=None, want=encode(want(1, Want.RUN)))
    upgraded.wait_state(RunState.RUNNING)
    trainer = rundir.read_attempt(upgraded.run.paths, 1)
    before = upgraded.programs()[0].pid
    upgraded.run.kill_program(upgraded.run.paths.supervisor)

    def another() -> bool:
        upgraded.report()
        record = rundir.read_program(upgraded.run.paths.supervisor)
        return record is not None and record.identity.pid != before and not look(record.identity).is_dead

    wait_for(another, WAIT_SECONDS, upgraded.run.log_text)
    program = upgraded.programs()[0]
    assert str(upgraded.folder) in " ".join((*program.cmdline(), *program.environ().values()))
    assert trainer is not None and rundir.read_attempt(upgraded.run.paths, 1) == trainer, "the trainer went on"
