"""Deadlines, memory, strangers, clock steps and full disks: what a supervisor does when the world misbehaves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from host_runs import BRIEF, PATIENT, WAIT_SECONDS, HostRun, fill, is_alive, needs_root, now, small_disk, spec_for, wait_for

from fleetd.files import overwrite, write_record
from fleetd.host import rundir
from fleetd.host.notices import NUMBERS_PER_LIFE
from fleetd.host.processes import can_read_exit_by_pidfd
from fleetd.journal import Journal
from fleetd.model import Caps, CutoffOrder, RestartTerms, StallTerms
from fleetd.wire import dumps
from policies.escalation import seconds_until_empty
from policies.facts import MIB, Reason, RunState, Want, parse_moment

LADDER_SECONDS = seconds_until_empty(PATIENT.grace_floor_seconds)
"""So long before its cutoff a run of quick steps is asked to stop. What a test gives it beyond that is the time in which its deadline is ahead."""
STOOD_STILL = timedelta(seconds=20)
"""Whoever is to be dead by the cutoff dies late on a machine that stands still just then."""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(*arguments: str, root: Path | None = None, **changes: Any) -> HostRun:
        run = HostRun(root or tmp_path / f"root-{len(runs)}", spec_for(*arguments, **changes)).create()
        runs.append(run)
        run.supervise()
        return run

    yield begin
    for run in runs:
        if run.paths.root.exists():
            run.clean()


def deadline_in(run: HostRun, seconds: float) -> datetime:
    """From now on the run has so many seconds. Ordered once it is under way: a machine that is slow to start it takes nothing of them."""
    cutoff = CutoffOrder(sequence=2, cutoff_at=now() + timedelta(seconds=seconds), because="test")
    assert rundir.apply_cutoff(run.paths, cutoff)[0]
    return cutoff.cutoff_at


def ended_at(run: HostRun) -> datetime:
    return parse_moment(run.notices("attempt_ended")[0]["body"]["exit"]["at"])


def test_the_deadline_stops_a_training_with_a_checkpoint_before_the_cutoff(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "every=1000")
    run.wait_step(3)
    cutoff_at = deadline_in(run, LADDER_SECONDS + 1.0)
    seen = run.settle()
    assert (seen.state, seen.reason) == (RunState.FINISHED, Reason.DEADLINE) and "asking was enough" in seen.detail, run.log_text()
    assert ended_at(run) < cutoff_at and (run.paths.checkpoints / f"step-{seen.step:09d}").exists()


def test_with_a_dead_supervisor_the_deadline_is_kept_all_the_same(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "every=1000")
    run.wait_step(3)
    cutoff_at = deadline_in(run, LADDER_SECONDS + 3.0)
    run.wait(lambda seen: seen.cutoff_at == cutoff_at)
    run.kill_program(run.paths.supervisor)
    seen = run.settle()
    assert (seen.state, seen.reason, seen.attempt) == (RunState.FINISHED, Reason.DEADLINE, 1) and ended_at(run) < cutoff_at
    ended = run.notices("attempt_ended")[0]["body"]["exit"]
    assert ended["exit_code"] == 10, (ended, run.log_text())


def test_with_supervisor_and_shim_dead_the_trainers_own_cutoff_is_left_and_its_outcome_is_told_later(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "every=1000", "pause_at=1", "own_cutoff=118", cutoff_seconds=120.0)
    pid = run.wait_step(1).pid
    assert pid is not None
    run.orphan()
    run.go()
    wait_for(lambda: not is_alive(pid), WAIT_SECONDS, lambda: "it goes on")
    assert run.spec.deadline is not None and now() < run.spec.deadline.cutoff_at
    run.supervise()
    seen = run.settle()
    ended = run.notices("attempt_ended")[0]["body"]["exit"]
    assert (seen.state, seen.reason) == (RunState.FINISHED, Reason.DEADLINE)
    assert (ended["observed_by"], ended["exit_code"]) == ("trainer", 10) and ended["evidence"]["last_record"]["because"] == "cutoff"


def test_a_trainer_that_ignores_the_deadline_is_dead_by_the_cutoff_and_the_alarm_came_first(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "ignore_term=1", stop=BRIEF)
    run.wait_step(3)
    cutoff_at = deadline_in(run, seconds_until_empty(BRIEF.grace_floor_seconds) + 2.0)
    seen = run.settle()
    assert (seen.state, seen.reason) == (RunState.FINISHED, Reason.DEADLINE) and "force was needed" in seen.detail
    assert ended_at(run) < cutoff_at + STOOD_STILL
    told = run.notices()
    kill = next(index for index, notice in enumerate(told) if notice["kind"] == "signal" and notice["body"]["purpose"].startswith("kill"))
    # A machine that stood still through the ladder finds the cutoff itself at its end: that kills at once, and asks nobody again.
    assert any(notice["kind"] == "alarm" for notice in told[:kill]) or "the cutoff" in told[kill]["body"]["purpose"], run.log_text()


def test_nothing_is_started_when_no_time_is_left(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", cutoff_seconds=1.0)
    seen = run.settle()
    assert (seen.state, seen.reason, seen.attempt) == (RunState.FINISHED, Reason.DEADLINE, 0)


def test_the_soft_line_lets_the_trainer_save_first(start: Callable[..., HostRun]) -> None:
    caps = Caps(host_bytes=120 * MIB, accelerator_bytes=MIB, floor_bytes=MIB, soft_fraction=0.5)
    run = start("5000", "0.05", "eat_at=5:70", "every=1000", caps=caps)
    seen = run.settle()
    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.MEMORY, 1) and "asking was enough" in seen.detail
    stopping = next(notice["body"] for notice in run.notices("state_changed") if notice["body"]["to"] == "stopping")
    assert "soft line" in stopping["detail"] and stopping["evidence"]["host_bytes"] >= 60 * MIB
    assert (run.paths.checkpoints / f"step-{seen.step:09d}").exists()


def test_the_hard_line_ends_the_tree_with_evidence(start: Callable[..., HostRun]) -> None:
    caps = Caps(host_bytes=60 * MIB, accelerator_bytes=MIB, floor_bytes=MIB)
    run = start("5000", "0.05", "eat_at=5:90", caps=caps, restarts=RestartTerms(restarts_max=0))
    seen = run.settle() if run.wait_state(RunState.FAILED, RunState.HELD).state is RunState.FAILED else run.seen()
    assert seen is not None
    exit_record = run.notices("attempt_ended")[0]["body"]["exit"]
    assert exit_record["signal"] == 9
    if seen.reason is Reason.OOM or "the kernel killed it before it had answered" in seen.detail:
        assert exit_record["evidence"]["oom_kills"] >= 1  # it was faster than the sampler, or than the answer: its counter says so
    else:
        assert seen.reason is Reason.MEMORY and "force was needed" in seen.detail


def test_a_hung_trainer_is_stopped_and_tried_again(start: Callable[..., HostRun]) -> None:
    run = start("30", "0.05", "hang_at=5", stall=StallTerms(launch_seconds=90.0, floor_seconds=2.0, factor=5.0), stop=BRIEF)
    # A machine that stands still before the trainer hangs is taken for a stall too; then it ends as it is asked, and hangs in the next attempt.
    rests = (RunState.BACKOFF, RunState.HELD)  # a wait of a moment may go by between two looks, the end of its tries does not
    run.wait(lambda seen: seen.state in rests and seen.reason is Reason.STALLED and "force was needed" in seen.detail)
    run.order(2, Want.STOP)
    assert run.settle().state is RunState.STOPPED


def test_a_process_that_is_not_provably_ours_is_never_signalled(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05")
    pid = run.wait_step(3).pid
    assert pid is not None
    run.orphan()
    record = json.loads(run.paths.attempt(1).record.read_text())
    genuine = run.paths.attempt(1).record.read_bytes()
    record["identity"]["start_ticks"] += 1
    run.paths.attempt(1).record.write_text(json.dumps(record))
    run.order(2, Want.STOP)
    run.supervise()

    seen = run.wait(lambda seen: seen if any("cannot verify" in alarm for alarm in seen.alarms) else None)

    assert seen.identity.startswith("cannot verify") and f"pid {pid} started at tick" in seen.identity
    assert is_alive(pid) and not run.notices("signal") and seen.state is RunState.RUNNING
    assert "although a stop was ordered" in str(run.notices("alarm"))
    run.kill_program(run.paths.supervisor)
    run.paths.attempt(1).record.write_bytes(genuine)  # so that the clean-up may end it


def test_a_clock_step_raises_an_alarm_and_moves_no_deadline(start: Callable[..., HostRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv("FLEETD_CLOCK_OFFSET_FILE", str(offset))
    run = start("5000", "0.05", "every=1000", cutoff_seconds=1800.0)
    run.wait_step(3)
    for step, word in (("3600", "forward"), ("-3600", "back")):
        offset.write_text(step)
        seen = run.wait(lambda seen, word=word: seen if any(word in alarm for alarm in seen.alarms) else None)
        assert seen.state is RunState.RUNNING and seen.cutoff_at is not None
    cutoff_at = deadline_in(run, LADDER_SECONDS + 1.0)  # to whoever believed the clock it would be an hour away
    seen = run.settle()
    assert (seen.state, seen.reason) == (RunState.FINISHED, Reason.DEADLINE) and now() < cutoff_at


@needs_root
def test_a_full_disk_hurts_no_trainer_and_nothing_is_lost_when_space_returns(start: Callable[..., HostRun], tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "3m") as folder:
        run = start("5000", "0.1", "every=1000", "ignore_term=1", root=folder, stop=BRIEF)
        pid = run.wait_step(2).pid
        assert pid is not None
        told = len(run.notices())
        cutoff, ready = CutoffOrder(sequence=2, cutoff_at=now(), because="test"), run.paths.cutoff.with_name("ready")
        write_record(ready, cutoff)
        filler = fill(folder)
        # The deadline comes while nothing can be written: the ladder is climbed all the same, to its end.
        cutoff = replace(cutoff, cutoff_at=now() + timedelta(seconds=seconds_until_empty(BRIEF.grace_floor_seconds) + 3.0))
        assert overwrite(ready, dumps(cutoff))
        os.rename(ready, run.paths.cutoff)
        wait_for(lambda: not is_alive(pid), WAIT_SECONDS, run.log_text)
        seen = run.wait(lambda seen: seen if any("the supervisor's journal is read-only" in alarm for alarm in seen.alarms) else None)
        assert seen.attempt == 1 and not run.paths.attempt(1).exit.exists()

        filler.unlink()

        ended = run.settle()
        assert (ended.state, ended.reason, ended.attempt) == (RunState.FINISHED, Reason.DEADLINE, 1)
        signals = [notice["body"] for notice in run.notices("signal")]
        assert signals[-1]["signal"] == 9 and len(run.notices()) > told
        was_asked = [body["signal"] for body in signals[:2]] == [15, 18]
        assert was_asked or "the cutoff" in signals[0]["purpose"], "who stood still through all of the ladder asks nobody any more"
        run.clean()


def test_a_damaged_spool_is_kept_aside_and_the_trainer_is_still_watched(start: Callable[..., HostRun]) -> None:
    run = start("80", "0.05", "every=1000", "pause_at=40")
    first = run.wait_step(3)
    pid = first.pid
    assert pid is not None
    run.orphan()
    run.paths.journal.write_bytes(b"garbage" * 1000)
    for suffix in ("-wal", "-shm"):
        Path(f"{run.paths.journal}{suffix}").unlink(missing_ok=True)
    run.paths.acknowledged.write_text(json.dumps({"notice": 40}))
    run.supervise()
    run.wait(lambda seen: seen.supervisor_pid != first.supervisor_pid and seen.pid == pid)
    run.go()

    seen = run.settle()

    journal = Journal.open(run.paths.journal, read_only=True)
    assert journal.entries()[0]["sequence"] == NUMBERS_PER_LIFE + 1, "numbers go on behind what was acknowledged and lost"
    assert "adopted" in [entry["kind"] for entry in journal.entries()]
    journal.close()
    assert seen.attempt == 1 and is_alive(pid) is False and Path(f"{run.paths.journal}.damaged-1").read_bytes() == b"garbage" * 1000
    if can_read_exit_by_pidfd():
        assert seen.state is RunState.FINISHED


def test_a_second_supervisor_leaves_at_once(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05")
    first = run.wait_step(2)
    second = run.supervise()
    wait_for(lambda: not is_alive(second), WAIT_SECONDS, lambda: "it stays")
    seen = run.seen()
    assert seen is not None and seen.supervisor_pid == first.supervisor_pid and rundir.is_locked(run.paths.lock)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_supervisor_is_small_and_idle(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.1", "every=1000")
    pid = run.wait_step(10).supervisor_pid
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        rss_kib = next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
    assert rss_kib < 32 * 1024, f"{rss_kib} KiB"
    assert os.path.exists(run.paths.trace)
