"""A real supervisor, shim and trainer on a real run directory: finish, restarts, stops, adoption."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil
import pytest
from host_runs import BRIEF, WAIT_SECONDS, HostRun, is_alive, spec_for, wait_for

from fleetd import clock
from fleetd.files import write_record
from fleetd.host.processes import boot_id, can_read_exit_by_pidfd
from fleetd.journal import Journal
from fleetd.kept_clock import KeptPair
from fleetd.model import RestartTerms
from fleetd.paths import HostPaths
from policies.facts import Reason, RunState, SignalTarget, StopMode, Want, format_moment

EARLIER_BOOT = "00000000-0000-0000-0000-000000000000"


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(*arguments: str, **changes: Any) -> HostRun:
        run = HostRun(tmp_path / f"root-{len(runs)}", spec_for(*arguments, **changes)).create()
        runs.append(run)
        run.supervise()
        return run

    yield begin
    for run in runs:
        run.clean()


def test_a_run_goes_from_start_to_finished_and_tells_it_in_numbered_notices(start: Callable[..., HostRun]) -> None:
    run = start("12", "0.05", "every=5", "pause_at=7")
    run.wait_state(RunState.RUNNING)  # a look that comes after all of a run finds it finished
    run.go()

    seen = run.settle()

    assert (seen.state, seen.reason, seen.step, seen.steps_planned) == (RunState.FINISHED, None, 12, 12)
    assert run.moves() == ["starting", "running", "finished"]
    kinds = [notice["kind"] for notice in run.notices()]
    assert kinds.index("attempt_started") < kinds.index("attempt_ended")
    assert [notice["body"]["step"] for notice in run.notices("checkpoint")] == [0, 5, 10, 12]
    ended = run.notices("attempt_ended")[0]["body"]
    assert ended["exit"]["exit_code"] == 0 and ended["exit"]["observed_by"] == "shim"


def test_a_crashed_trainer_is_started_again_from_its_newest_checkpoint_that_verifies(start: Callable[..., HostRun]) -> None:
    run = start("25", "0.05", "every=5", "pause_at=16", "crash_at=17")
    run.wait_state(RunState.RUNNING)
    wait_for(lambda: (run.paths.checkpoints / "step-000000015").exists(), WAIT_SECONDS, run.log_text)
    (run.paths.checkpoints / "step-000000015" / "model.bin").write_bytes(b"not what the manifest says")
    run.go()

    seen = run.settle()

    assert seen.state is RunState.FINISHED and seen.attempt == 2 and seen.restarts_used == 1
    first, second = run.notices("attempt_started")
    assert first["body"]["resume_step"] is None and second["body"]["resume_step"] == 10
    assert any("step-000000015" in refused for refused in second["body"]["refused"])
    assert any("step-000000015" in notice["body"]["text"] for notice in run.notices("alarm"))
    moves = run.moves()
    assert [move for move in moves if move != "running"] == ["starting", "backoff", "starting", "finished"]
    assert moves[1] == "running", "and the second attempt is seen running, unless all of it goes by between two looks"


def test_a_used_up_restart_budget_holds_the_run_until_a_person_wakes_it(start: Callable[..., HostRun]) -> None:
    run = start("50", "0.02", "crash_always=3", restarts=RestartTerms(restarts_max=2, first_seconds=0.1, ceiling_seconds=0.2))
    held = run.wait_state(RunState.HELD)
    assert (held.attempt, held.reason, held.restarts_used) == (3, Reason.EXIT_NONZERO, 2) and "budget used up" in held.detail
    assert held.supervisor_pid is not None
    costs: list[float] = []

    def costs_nothing() -> bool:
        """In one of several looks: what is left to do after its last change, and a machine that is slow, show in the first of them."""
        assert held.supervisor_pid is not None
        before = cpu_seconds(held.supervisor_pid)
        time.sleep(1.5)
        costs.append(cpu_seconds(held.supervisor_pid) - before)
        return costs[-1] < 0.1

    wait_for(costs_nothing, 20, lambda: f"waiting costs {costs} seconds of a processor in each 1.5")

    run.order(2, Want.RUN)
    run.wait(lambda seen: seen.attempt > 3)
    run.order(3, Want.STOP)

    assert run.settle().state is RunState.STOPPED


def test_exits_that_mean_never_again_are_not_retried(start: Callable[..., HostRun]) -> None:
    run = start("9", "0.02", "exit_at=2:31")
    seen = run.settle()
    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.NOT_FINITE, 1)


def test_a_command_that_does_not_exist_fails_at_once_and_says_which(start: Callable[..., HostRun]) -> None:
    run = start(argv=("/nowhere/to/be/found", "--help"))
    seen = run.settle()
    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.CONFIG, 1) and "/nowhere/to/be/found" in seen.detail


def test_a_graceful_stop_saves_at_the_step_where_it_stopped(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "every=1000")
    run.wait_step(5)
    run.order(2, Want.STOP)

    seen = run.settle()

    assert (seen.state, seen.reason) == (RunState.STOPPED, Reason.USER) and "asking was enough" in seen.detail
    exit_record = run.notices("attempt_ended")[0]["body"]["exit"]
    assert exit_record["exit_code"] == 10, (exit_record, run.log_text())
    assert (run.paths.checkpoints / f"step-{seen.step:09d}" / "manifest.json").exists()
    signals = run.notices("signal")
    assert [body["body"]["signal"] for body in signals] == [15, 18] and all("argv match" in notice["body"]["verdict"] for notice in signals)

    run.order(3, Want.RUN)
    run.supervise()
    run.wait(lambda again: again.attempt == 2 and (again.step or 0) > (seen.step or 0))
    assert run.notices("attempt_started")[1]["body"]["resume_step"] == seen.step
    run.order(4, Want.STOP, StopMode.NOW)
    assert run.settle().state is RunState.STOPPED


def test_a_trainer_that_ignores_the_ask_is_asked_again_and_then_killed_and_that_is_said(start: Callable[..., HostRun]) -> None:
    run = start("5000", "0.05", "ignore_term=1", "fork=2", stop=BRIEF)
    pid = run.wait_step(3).pid
    assert pid is not None
    run.order(2, Want.STOP)

    seen = run.settle()

    assert seen.state is RunState.STOPPED and "force was needed" in seen.detail and "SIGKILL" in seen.detail
    purposes = [notice["body"]["purpose"].split(":")[0] for notice in run.notices("signal")]
    assert purposes[:4] == ["ask", "ask", "ask", "ask"] and set(purposes[4:]) == {"kill"}, run.log_text()
    killed = {notice["body"]["pid"] for notice in run.notices("signal") if notice["body"]["signal"] == 9}
    assert pid in killed and len(killed) == 3, "the leader and both of its children"
    assert not any(is_alive(each) for each in killed)
    assert any("asked again" in notice["body"]["text"] for notice in run.notices("alarm"))


def test_children_that_outlive_a_finished_trainer_are_ended_before_the_run_is_finished(start: Callable[..., HostRun]) -> None:
    run = start("4", "0.05", "fork=2")
    seen = run.settle()
    killed = [notice["body"] for notice in run.notices("signal") if notice["body"]["signal"] == 9]
    assert seen.state is RunState.FINISHED and len({body["pid"] for body in killed}) == 2, "one that dies slowly may be killed again"
    assert all("outlived" in body["purpose"] for body in killed)
    assert not any(is_alive(body["pid"]) for body in killed)


def test_a_stop_during_backoff_starts_nothing_any_more(start: Callable[..., HostRun]) -> None:
    run = start("50", "0.02", "crash_always=2", restarts=RestartTerms(restarts_max=5, first_seconds=60.0))
    run.wait_state(RunState.BACKOFF)
    run.order(2, Want.STOP)
    seen = run.settle()
    assert (seen.state, seen.attempt) == (RunState.STOPPED, 1)


def test_a_stop_wished_before_the_start_starts_nothing(tmp_path: Path) -> None:
    run = HostRun(tmp_path, spec_for("50", "0.02")).create()
    run.order(2, Want.STOP)
    run.supervise()
    seen = run.settle()
    assert (seen.state, seen.attempt) == (RunState.STOPPED, 0)


def test_a_shell_wrapper_is_stopped_with_its_children_where_the_order_says_group(start: Callable[..., HostRun]) -> None:
    run = start(argv=("/bin/sh", "-c", "sleep 600; echo never"), contract=False, signal=SignalTarget.GROUP)
    pid = run.wait_state(RunState.RUNNING).pid
    assert pid is not None
    wait_for(lambda: [each.name() for each in psutil.Process(pid).children()] == ["sleep"], WAIT_SECONDS, lambda: "the shell has started nothing")
    run.order(2, Want.STOP)
    seen = run.settle()
    assert seen.state is RunState.STOPPED and "asking was enough" in seen.detail, run.log_text()
    assert len({notice["body"]["pid"] for notice in run.notices("signal")}) == 2


def test_a_killed_supervisor_is_replaced_by_one_that_adopts_the_same_trainer(start: Callable[..., HostRun]) -> None:
    run = start("250", "0.05", "every=50", "pause_at=100", "exit_at=110:32")
    first = run.wait_step(5)
    run.kill_program(run.paths.supervisor)

    second = run.wait(lambda seen: seen if seen.supervisor_pid != first.supervisor_pid else None)
    assert (second.pid, second.attempt) == (first.pid, 1)
    run.go()
    seen = run.settle()

    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.GATE_FAILED, 1)
    assert run.notices("attempt_ended")[0]["body"]["exit"]["exit_code"] == 32
    assert [notice["body"]["trainer_pid"] for notice in run.notices("adopted")] == [first.pid]
    assert len(run.notices("attempt_started")) == 1


def test_when_the_shim_dies_the_supervisor_inherits_the_trainer_and_sees_its_exit(start: Callable[..., HostRun]) -> None:
    run = start("60", "0.05", "pause_at=20", "exit_at=40:32")
    run.wait_step(5)
    run.kill_program(run.paths.shim)
    run.go()

    seen = run.settle()

    ended = run.notices("attempt_ended")[0]["body"]["exit"]
    assert (ended["observed_by"], ended["exit_code"], ended["wait_status"]) == ("supervisor", 32, 32 << 8)
    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.GATE_FAILED, 1)


def test_supervisor_and_shim_dead_a_new_supervisor_adopts_and_still_knows_the_exit(start: Callable[..., HostRun]) -> None:
    run = start("120", "0.05", "pause_at=60", "exit_at=70:32")
    first = run.wait_step(5)
    pid = first.pid
    run.orphan()
    run.supervise()
    run.wait(lambda seen: seen.supervisor_pid != first.supervisor_pid and seen.pid == pid)
    run.go()

    seen = run.settle()

    ended = run.notices("attempt_ended")[0]["body"]["exit"]
    assert run.notices("adopted")[0]["body"]["trainer_pid"] == pid and seen.attempt == 1
    if can_read_exit_by_pidfd():
        assert (ended["observed_by"], ended["exit_code"], seen.reason) == ("pidfd", 32, Reason.GATE_FAILED)
    else:
        assert ended["observed_by"] == "nobody" and ended["exit_code"] is None


def test_an_exit_that_nobody_saw_is_called_unobserved_and_tried_again(start: Callable[..., HostRun]) -> None:
    run = start("60", "0.05", "every=10", "pause_at=20", "crash_at=30")
    pid = run.wait_step(12).pid
    assert pid is not None
    run.orphan()
    run.go()
    wait_for(lambda: not is_alive(pid), WAIT_SECONDS, lambda: "it does not crash")
    run.supervise()

    seen = run.settle()

    ended = run.notices("attempt_ended")[0]["body"]
    assert (ended["exit"]["observed_by"], ended["exit"]["exit_code"], ended["exit"]["signal"]) == ("nobody", None, None)
    assert ended["reason"] == "unobserved" and (seen.state, seen.attempt) == (RunState.FINISHED, 2)


def test_after_a_reboot_the_attempt_is_over_and_the_run_goes_on_from_its_checkpoint(start: Callable[..., HostRun]) -> None:
    run = start("40", "0.05", "every=5", "pause_at=20")
    pid = run.wait_step(12).pid
    assert pid is not None
    run.orphan()
    run.kill_trainer()
    run.go()
    for path in (run.paths.attempt(1).record, run.paths.shim):  # as if all of it had been recorded before this boot
        record = json.loads(path.read_text())
        record["identity"]["boot_id"] = "00000000-0000-0000-0000-000000000000"
        path.write_text(json.dumps(record))
    run.supervise()

    seen = run.settle()

    assert (seen.state, seen.attempt) == (RunState.FINISHED, 2)
    assert run.notices("attempt_ended")[0]["body"]["reason"] == "host_rebooted"
    assert run.notices("attempt_started")[1]["body"]["resume_step"] >= 10


def test_after_a_reboot_the_next_attempt_waits_for_a_known_time_and_has_no_more_of_it_than_was_left(
    start: Callable[..., HostRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(clock.ENV_OFFSET_FILE, str(tmp_path / "offset"))  # a clock that nobody disciplines
    run = start("5000", "0.05", "every=5")
    run.wait_step(12)
    run.orphan()
    run.kill_trainer()
    recorded_at = datetime.now(timezone.utc) + timedelta(minutes=3)
    journal = Journal.open(run.paths.journal)
    history = journal.state_get("history")
    assert history is not None
    history["anchor"]["boot_id"], history["clock_seen_at"] = EARLIER_BOOT, format_moment(recorded_at)
    journal.append([], state={"history": history})
    journal.close()
    for path in (run.paths.attempt(1).record, run.paths.shim):
        record = json.loads(path.read_text())
        record["identity"]["boot_id"] = EARLIER_BOOT
        path.write_text(json.dumps(record))
    run.supervise()
    waiting = run.wait(lambda seen: seen if seen.next_attempt_at and seen.at > seen.next_attempt_at + timedelta(seconds=1) else None)
    assert (waiting.state, waiting.attempt) == (RunState.BACKOFF, 1) and not run.paths.attempt(2).root.exists()

    moment = clock.read()  # a coordinator tells it an earlier time than what was recorded: that gives none back
    pair = KeptPair(boot_id=boot_id(), now=moment.now, boottime_seconds=moment.boottime_seconds, is_confirmed=True)
    write_record(HostPaths(run.root).clock, pair)
    seen = run.wait(lambda seen: seen if seen.attempt == 2 and seen.pid else None)
    assert seen.at >= recorded_at, "time never runs back, so what was left stays the most that is left"
