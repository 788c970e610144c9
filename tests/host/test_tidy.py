"""What killed processes leave on a host, and that the living take it away: real supervisors, shims and agents that die at named points."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_runs import WAIT_SECONDS, HostRun, spec_for, wait_for

from fleetd import files
from fleetd.files import sweep_temporaries, write_record
from fleetd.host import cgroups, porter, rundir
from fleetd.host.processes import look
from fleetd.host.reports import Reports
from fleetd.host.tidy import tidy_root, tidy_run
from fleetd.paths import HostPaths
from policies.facts import RunState


@pytest.fixture
def purse(tmp_path: Path) -> Path:
    """Pays for one death."""
    folder = tmp_path / "purse"
    folder.mkdir()
    (folder / "coin-0").touch()
    return folder


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(*arguments: str, **changes: Any) -> HostRun:
        runs.append(HostRun(tmp_path / f"root-{len(runs)}", spec_for(*arguments, **changes)).create())
        runs[-1].supervise()
        return runs[-1]

    yield begin
    for run in runs:
        run.clean()
        for folder in groups_of(run):
            os.rmdir(folder)


def groups_of(run: HostRun) -> list[str]:
    return [entry.path for place in cgroups.places() for entry in os.scandir(place) if run.spec.run_id in entry.name]


def dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    return child.pid


needs_cgroups = pytest.mark.skipif(
    not any(os.access(place, os.W_OK) for place in cgroups.places()), reason="no cgroup may be made here",
)


@needs_cgroups
def test_a_cgroup_whose_shim_died_before_it_recorded_it_is_removed(
    start: Callable[..., HostRun], purse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETD_FAULT", f"shim:cgroup made:kill:{purse}")
    run = start("5", "0.05")

    seen = run.settle()

    assert seen.state is RunState.FINISHED and seen.attempt == 2
    assert [path.name.split("-")[0] for path in purse.iterdir()] == ["shim"], "the first shim died with its cgroup made"
    assert rundir.read_attempt(run.paths, 1) is None
    wait_for(lambda: not groups_of(run), WAIT_SECONDS, lambda: f"left: {groups_of(run)}")


@needs_cgroups
def test_the_sweep_removes_the_cgroup_of_a_shim_that_died_after_its_run_was_settled(
    start: Callable[..., HostRun], purse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETD_FAULT", f"shim:tree empty:kill:{purse}")
    run = start("5", "0.05")
    run.settle()
    shim = rundir.read_program(run.paths.shim)
    assert shim is not None
    wait_for(lambda: look(shim.identity).is_dead or not look(shim.identity).is_verified, WAIT_SECONDS, run.log_text)
    reports = Reports(HostPaths(run.root))

    reports.sweep()

    assert not (purse / "coin-0").exists(), "the shim died before it removed its cgroup"
    assert groups_of(run) == []


@needs_cgroups
def test_a_cgroup_in_which_something_lives_is_left_alone(start: Callable[..., HostRun]) -> None:
    run = start("2000", "0.05")
    run.wait_step(2)
    made = groups_of(run)
    (run.paths.attempt(1).exit).write_text("{}", encoding="utf-8")  # as if the attempt were over

    assert not tidy_run(run.paths)

    (run.paths.attempt(1).exit).unlink()
    assert made and groups_of(run) == made


def test_a_killed_writers_temporary_is_removed_and_a_living_ones_is_kept(
    start: Callable[..., HostRun], purse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEETD_FAULT", f"supervisor:heartbeat.json written#4:kill:{purse}")  # by then a shim lives that starts another
    run = start("100", "0.05", "pause_at=50")
    ours = run.paths.root / f".heartbeat.json-{os.getpid()}-abcdefgh.tmp"
    ours.touch()
    wait_for(lambda: not (purse / "coin-0").exists(), WAIT_SECONDS, run.log_text)
    died = next(int(path.name.split("-")[1]) for path in purse.iterdir())

    def is_followed() -> bool:
        """Then what it left may be gone already: its follower sweeps first of all."""
        record = rundir.read_program(run.paths.supervisor)
        return record is not None and record.identity.pid != died

    wait_for(lambda: list(run.paths.root.glob(f".heartbeat.json-{died}-*.tmp")) or is_followed(), WAIT_SECONDS, run.log_text)
    run.go()

    run.settle()

    assert list(run.paths.root.glob(".*.tmp")) == [ours], "another supervisor adopted the run, and swept at its start"


def test_half_a_run_directory_is_removed_once_the_agent_that_made_it_is_gone(tmp_path: Path) -> None:
    paths = HostPaths(tmp_path)
    gone, living = paths.runs / f".tmp-20260101T000000Z-c-a-{dead_pid()}", paths.runs / f".tmp-20260101T000000Z-c-b-{os.getpid()}"
    for folder in (gone, living):
        (folder / "orders").mkdir(parents=True)

    tidy_root(paths)

    assert [path.name for path in paths.runs.iterdir()] == [living.name]


def test_temporaries_are_told_from_records_by_their_name_alone(tmp_path: Path) -> None:
    write_record(tmp_path / "best-7-of.json", {"kept": True})
    (tmp_path / ".hidden").touch()
    (tmp_path / f".run.json-{dead_pid()}-x1y2z3_q.tmp").touch()
    (tmp_path / ".run.json-notapid-x1y2z3_q.tmp").touch()

    swept = sweep_temporaries(tmp_path)

    assert len(swept) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"best-7-of.json", ".hidden", ".run.json-notapid-x1y2z3_q.tmp"}


@pytest.mark.parametrize("has_ended", [files.has_ended, porter.has_ended])
def test_a_zombie_writes_nothing_any_more_and_a_living_process_may(has_ended: Callable[[str], bool]) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert not has_ended(str(child.pid))
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert has_ended(str(child.pid))
    child.communicate()
    assert has_ended(str(child.pid))
