"""Device memory against its part of the cap, through nvidia-ml-py and a library that answers as a GB10 does: bytes by process, no totals."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_runs import WAIT_SECONDS, HostRun, spec_for, wait_for

from fleetd.host import devices
from fleetd.host.processes import identity_of
from fleetd.host.sampler import Sampler
from fleetd.host.tree import Member
from fleetd.model import Caps, RestartTerms
from policies.facts import GIB, MIB, CapGrade, Reason, RunState, Want

CAPS = Caps(host_bytes=256 * MIB, accelerator_bytes=16 * GIB, floor_bytes=MIB)
SOURCE = Path(__file__).with_name("fake_nvml.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler to build the library with")
    folder = tmp_path_factory.mktemp("nvml")
    subprocess.run(("gcc", "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)), check=True)
    return folder


@pytest.fixture
def device(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which processes say what they use. Every supervisor started from here on finds the library."""
    folder = tmp_path / "device"
    folder.mkdir()
    monkeypatch.setenv("FAKE_NVML_FOLDER", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    return folder


@pytest.fixture
def start(device: Path, tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(*arguments: str, **changes: Any) -> HostRun:
        run = HostRun(tmp_path / f"root-{len(runs)}", spec_for(*arguments, **{"caps": CAPS, **changes})).create()
        runs.append(run)
        run.supervise()
        return run

    yield begin
    for run in runs:
        run.clean()


def test_rising_device_bytes_with_flat_host_memory_are_saved_and_stopped(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "every=1000", f"device={int(15.6 * 1024)}", "device_step=40", f"device_most={int(17.6 * 1024)}")

    seen = run.settle()

    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.MEMORY, 1) and "asking was enough" in seen.detail
    stopping = next(notice["body"] for notice in run.notices("state_changed") if notice["body"]["to"] == "stopping")
    assert "accelerator" in stopping["detail"] and "soft line" in stopping["detail"]
    assert stopping["evidence"]["accelerator_bytes"] >= 17.5 * GIB and stopping["evidence"]["host_bytes"] < 40 * MIB
    assert (run.paths.checkpoints / f"step-{seen.step:09d}").exists()
    assert run.notices("attempt_ended")[0]["body"]["exit"]["exit_code"] == 10, run.log_text()


def test_a_trainer_that_fills_its_allocator_to_15_624_gib_with_a_context_on_top_is_left_alone(start: Callable[..., HostRun]) -> None:
    run = start("60", "0.05", "every=1000", "pause_at=50", f"device={int((15.624 + 1.2) * 1024)}")

    at_work = run.wait(lambda seen: seen if seen.memory and seen.memory.accelerator_bytes else None)
    run.go()
    seen = run.settle()

    assert (seen.state, seen.reason) == (RunState.FINISHED, None) and not run.notices("signal")
    assert at_work.memory is not None and at_work.memory.accelerator_bytes == int((15.624 + 1.2) * 1024) * MIB
    assert at_work.memory.parts["allocator"].grade is CapGrade.SAMPLED and "named no limit" in at_work.memory.parts["allocator"].means


def test_a_leap_beyond_the_hard_line_is_ended_by_force_with_the_figure(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "every=1000", "device=1024", "device_step=1024", restarts=RestartTerms(restarts_max=0))

    seen = run.settle()

    assert (seen.state, seen.reason) == (RunState.FAILED, Reason.MEMORY)
    assert max(notice["body"]["evidence"].get("accelerator_bytes", 0) for notice in run.notices("state_changed")) >= 17.5 * GIB


def test_a_device_that_does_not_say_how_much_trips_nothing_and_is_graded_absent(start: Callable[..., HostRun]) -> None:
    run = start("40", "0.05", "every=1000", "pause_at=30", "device=N/A")

    at_work = run.wait(lambda seen: seen if seen.memory and seen.memory.host_bytes and (seen.step or 0) > 2 else None)
    run.go()
    seen = run.settle()

    assert seen.state is RunState.FINISHED and at_work.memory is not None
    assert at_work.memory.accelerator_bytes is None and at_work.memory.parts["allocator"].grade is CapGrade.ABSENT


def test_a_device_that_falls_silent_makes_its_figure_unknown_and_hurts_nobody(start: Callable[..., HostRun], device: Path) -> None:
    run = start("200", "0.05", "every=1000", "pause_at=190", "device=1024")
    run.wait(lambda seen: seen.memory and seen.memory.accelerator_bytes)

    (device / "lost").touch()

    seen = run.wait(lambda seen: seen if seen.memory and seen.memory.accelerator_bytes is None and seen.memory.host_bytes else None)
    assert seen.state is RunState.RUNNING
    (device / "lost").unlink()
    run.go()
    assert run.settle().state is RunState.FINISHED


def test_a_stop_is_not_done_before_the_device_has_given_the_memory_back(start: Callable[..., HostRun], device: Path) -> None:
    run = start("5000", "0.05", "every=1000", "device=3072", "device_kept=1")
    pid = run.wait(lambda seen: seen.pid if seen.memory and seen.memory.accelerator_bytes else None)
    run.order(2, Want.STOP)

    wait_for(lambda: run.paths.attempt(1).exit.exists(), WAIT_SECONDS, run.log_text)
    time.sleep(1.5)

    waiting = run.seen()
    assert waiting is not None and waiting.state is RunState.STOPPING and not run.notices("attempt_ended")
    (device / f"{pid}.kept").unlink()
    seen = run.settle()
    assert (seen.state, seen.reason) == (RunState.STOPPED, Reason.USER) and "asking was enough" in seen.detail


SAMPLER_SEES = """
import os, sys
from fleetd.host.sampler import Sampler
from fleetd.host.tree import Member
from fleetd.host.processes import identity_of
from fleetd.model import Caps
pid = int(sys.argv[1])
print(Sampler(Caps(host_bytes=1, accelerator_bytes=1, floor_bytes=0)).device_left(pid))
"""


@pytest.mark.skipif(not devices.sees_machine_pids(), reason="NVML names pids of the machine, which are not seen from here")
def test_device_memory_under_a_dead_pid_is_named_and_that_of_the_pids_next_owner_is_not(device: Path) -> None:
    dead = subprocess.Popen((sys.executable, "-c", "pass"))
    dead.wait()
    for pid in (dead.pid, os.getpid()):
        (device / str(pid)).write_text(str(3 * GIB))
        (device / f"{pid}.kept").touch()

    left, taken = (
        subprocess.run((sys.executable, "-c", SAMPLER_SEES, str(pid)), capture_output=True, text=True, check=True).stdout.strip()
        for pid in (dead.pid, os.getpid())
    )

    assert left == f"the device still holds memory of pid {dead.pid} (3.0 GiB)" and taken == ""


def test_without_a_device_nothing_is_asked_and_nothing_is_left() -> None:
    sampler = Sampler(CAPS)
    sampler.look((Member(identity=identity_of(os.getpid()), proofs=("leader",)),), None, 1.0)

    assert sampler.memory.accelerator_bytes is None and sampler.device_left(os.getpid()) == ""
