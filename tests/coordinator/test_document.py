"""The status document and its verdict: every value with its age, unknown as null, and the first thing a person must know."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import ROOT, START, VirtualCoordinator, candidate, plan

from fleetd.coordinator.board import Board
from fleetd.coordinator.document import Daemon, build
from fleetd.coordinator.inbox import HostAnswer, News
from fleetd.coordinator.sight import Trouble
from fleetd.fleet import Fleet
from fleetd.model import Owner
from fleetd.paths import StatePaths
from policies.errors import DataDamaged
from policies.facts import CampaignStage, Reason, RunState, format_moment

DAEMON = Daemon(pid=7, id="c0ffee", generation=2, started_at=START, paths=StatePaths(Path("/state")))


@pytest.fixture
def fleet() -> VirtualCoordinator:
    found = VirtualCoordinator()
    found.launch(plan(candidate("low"), candidate("own", task=None, command=("train",))))
    found.tick()
    found.until(CampaignStage.TRAINING)
    found.round()
    found.round()
    return found


def document(fleet: VirtualCoordinator, *, later_seconds: float = 0.0, health: str = "ok") -> dict[str, Any]:
    sight = fleet.board.take(News(), fleet.now, health)
    found = build(fleet.fleet, sight, DAEMON, now=fleet.now + timedelta(seconds=later_seconds), journal_health=health)
    json.dumps(found, allow_nan=False)
    return found


def run_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(run for run in found["runs"] if run["candidate"] == name)


def test_every_key_of_the_contract_is_there(fleet: VirtualCoordinator) -> None:
    found = document(fleet)

    assert set(found) == {"schema", "at", "coordinator", "verdict", "campaigns", "runs", "hosts"}
    assert set(found["campaigns"][0]) == {
        "campaign_id", "name", "stage", "detail", "warnings", "since", "is_over", "launched_at", "deadline_at", "cutoff_at", "last_safe_stop_at",
        "seconds_to_deadline", "seconds_to_last_safe_stop", "runs", "selection", "frozen", "openings", "results", "report", "directory", "displaced",
    }
    assert set(found["runs"][0]) == {
        "run_id", "campaign_id", "candidate", "kind", "host", "state", "reason", "detail", "since", "want", "attempt", "attempts_ended",
        "restarts_used", "restarts_max", "pid", "identity", "step", "steps_planned", "last_step_at", "steps_per_second", "loss", "memory",
        "checkpoint", "checkpoint_on_host", "best", "stop_at", "cutoff_at", "final_at", "time_left_seconds", "next_attempt_at", "alarms",
        "exactness", "selectable", "continues", "successor", "cleared",
    }
    assert set(found["hosts"][0]) == {
        "name", "reachable", "since", "boot_id", "detail", "age_seconds", "facts", "memory_available_bytes", "disk_free_bytes", "committed_bytes",
        "capacity_bytes", "unknown_runs", "drained", "fenced", "left_behind", "clock_skew_seconds", "deliveries",
    }


def test_ages_grow_while_nothing_new_comes_and_values_stay(fleet: VirtualCoordinator) -> None:
    fleet.hear()
    fleet.tick()
    young, old = run_of(document(fleet), "low"), run_of(document(fleet, later_seconds=100.0), "low")

    assert young["pid"]["value"] == old["pid"]["value"] == 4711
    assert old["pid"]["age_seconds"] == pytest.approx(young["pid"]["age_seconds"] + 100.0)
    assert not document(fleet, later_seconds=100.0)["hosts"][0]["reachable"], "a host that was last heard long ago does not count as reachable"


def test_an_age_does_not_depend_on_the_clock_of_the_host() -> None:
    board, answer = Board(Owner(coordinator_id="c", generation=1), "python"), VirtualCoordinator()
    host = answer.hosts["gx10"]
    answer.launch(plan())
    answer.until(CampaignStage.TRAINING)
    answer.round()
    board.see(plan().hosts[0], START)
    ahead = START + timedelta(hours=5)
    reports = host.answer({}, ahead).reports or ()
    looks = [(each, replace(each.observation, at=ahead - timedelta(seconds=3))) for each in reports if each.observation]
    early = tuple(replace(each, observation=look) for each, look in looks)
    sight = board.take(News(hosts=(HostAnswer(host="gx10", at=ahead, reports=early),)), START, "ok")

    assert set(sight.observed_at.values()) == {START - timedelta(seconds=3)}


def test_what_nobody_measured_is_null_and_never_zero() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.until(CampaignStage.TRAINING)
    run = document(fleet)["runs"][0]

    for name in ("pid", "step", "loss", "steps_per_second", "best", "checkpoint_on_host"):
        assert run[name] == {"value": None, "age_seconds": None}, name
    assert run["memory"]["host_bytes"]["value"] is None and run["checkpoint"] is None
    assert run["steps_planned"] == 400


def test_a_run_says_whether_it_can_be_chosen(fleet: VirtualCoordinator) -> None:
    assert run_of(document(fleet), "low")["selectable"] == "no validation predictions yet"
    assert "keeps no trainer contract" in str(run_of(document(fleet), "own")["selectable"])
    fleet.until(CampaignStage.EVALUATED)

    found = document(fleet)
    assert run_of(found, "low")["selectable"] is True
    assert run_of(found, "evaluate-test")["selectable"] == "an evaluation is no candidate"
    assert found["campaigns"][0]["is_over"] and found["campaigns"][0]["frozen"]["sha256"] == "f" * 64
    assert run_of(found, "low")["checkpoint"]["step"] == 200


def test_a_refused_copy_is_the_reason_why_a_run_can_not_be_chosen(fleet: VirtualCoordinator) -> None:
    fleet.failing["predictions"] = DataDamaged("predictions can't be used", where="x", what="its SHA-256 is other", fix="-").to_json()
    for _ in range(20):
        fleet.round(seconds=3.0, work=False)

    assert run_of(document(fleet), "low")["selectable"] == "predictions can't be used: its SHA-256 is other"


@pytest.mark.parametrize(("verdict", "required", "is_refused"), [
    ("inexact", True, True), ("inexact", False, False), ("unknown", True, False), ("exact", True, False),
])
def test_a_run_that_is_not_exact_can_not_be_chosen_where_its_plan_requires_that(
    fleet: VirtualCoordinator, verdict: str, required: bool, is_refused: bool,
) -> None:
    said = {"step": 400, "verdict": verdict, "required": required, "because": "steps 381 to 400 taken again: so it is"}
    fleet.hosts["gx10"].tell(fleet.run("low").run_id, "proof", fleet.now, **said)
    fleet.until(CampaignStage.EVALUATED)

    run = run_of(document(fleet), "low")
    assert run["exactness"] == said
    assert (run["selectable"] == "it is not exact, and its plan requires that: steps 381 to 400 taken again: so it is") is is_refused


def test_the_times_count_down_to_deadline_and_last_safe_stop(fleet: VirtualCoordinator) -> None:
    campaign = document(fleet)["campaigns"][0]
    whole_seconds = campaign["seconds_to_deadline"]

    assert campaign["deadline_at"] == format_moment(fleet.campaign().final_at)
    assert campaign["seconds_to_last_safe_stop"] == pytest.approx(whole_seconds - 600.0 - 5.0), "reserve and the measured grace lie between"


def test_the_verdict_is_ok_while_runs_are_at_work(fleet: VirtualCoordinator) -> None:
    verdict = document(fleet)["verdict"]

    assert verdict["word"] == "OK" and verdict["text"] == "demo training: 2 running"


@pytest.mark.parametrize("state", [RunState.HELD, RunState.STUCK, RunState.FAILED])
def test_a_run_that_waits_for_a_person_comes_first(fleet: VirtualCoordinator, state: RunState) -> None:
    fleet.hosts["gx10"].move(fleet.run("low").run_id, state, fleet.now, Reason.EXIT_NONZERO, "5 of 5 restarts used")
    fleet.round(work=False)
    verdict = document(fleet)["verdict"]

    assert verdict["word"] == "NEEDS YOU"
    assert verdict["text"].startswith(f"low is {state} on gx10: 5 of 5 restarts used")
    assert verdict["since"] == format_moment(fleet.run("low").since)


def test_a_silent_host_makes_the_verdict_blind_and_trouble_with_the_journal_comes_before_it(fleet: VirtualCoordinator) -> None:
    fleet.silent.add("gx10")
    for _ in range(35):
        fleet.round()

    assert document(fleet)["verdict"]["word"] == "BLIND" and "gx10 does not answer: silence" in document(fleet)["verdict"]["text"]
    assert run_of(document(fleet), "low")["pid"]["age_seconds"] > 30.0, "an old number is not shown as new"
    troubled = document(fleet, health="read-only: disk I/O error")["verdict"]
    assert troubled["word"] == "NEEDS YOU" and "read-only" in troubled["text"]


def test_what_a_supervisor_waits_for_needs_a_person_but_a_stop_that_takes_its_time_does_not(fleet: VirtualCoordinator) -> None:
    run_id = fleet.run("low").run_id
    held = "nothing is started: somebody still holds trainer.lock although no trainer is recorded as alive"
    fleet.board.observations[run_id] = replace(fleet.board.observations[run_id], alarms=(held,))
    verdict = document(fleet)["verdict"]
    assert (verdict["word"], verdict["text"]) == ("NEEDS YOU", f"low on gx10: {held}")
    assert verdict["since"] is not None

    fleet.hosts["gx10"].move(run_id, RunState.STOPPING, fleet.now, Reason.USER, "asked")
    fleet.round(work=False)
    assert fleet.run("low").state is RunState.STOPPING
    fleet.board.observations[run_id] = replace(fleet.board.observations[run_id], alarms=("it is killed next",))
    assert document(fleet)["verdict"]["word"] == "OK"


def test_a_process_that_can_not_be_verified_needs_a_person(fleet: VirtualCoordinator) -> None:
    run_id = fleet.run("low").run_id
    fleet.board.observations[run_id] = replace(fleet.board.observations[run_id], identity="cannot verify: start ticks 900 recorded, 1200 found")
    assert document(fleet)["verdict"]["word"] == "OK", "a moment is no reason to wake anybody"
    alarm = "cannot verify the trainer: start ticks 900 recorded, 1200 found; nothing is signalled"
    fleet.board.observations[run_id] = replace(fleet.board.observations[run_id], alarms=(alarm,))

    assert "cannot verify the trainer: start ticks 900" in document(fleet)["verdict"]["text"]


def test_a_job_that_keeps_failing_needs_a_person(fleet: VirtualCoordinator) -> None:
    error = {"error": "ExplainedError", "title": "stage can't be done now", "where": "/", "what": "No space left", "fix": "free space"}
    fleet.board._job_troubles["stage:demo"] = Trouble(count=3, last_at=fleet.now, error=error)

    assert document(fleet)["verdict"] == {
        "word": "NEEDS YOU", "text": "stage: stage can't be done now: No space left; free space", "since": format_moment(fleet.now),
    }


def test_a_campaign_that_failed_needs_a_person_until_the_next_one_is_launched(fleet: VirtualCoordinator) -> None:
    fleet.selection = {"because": "nothing is eligible", "checkpoint_digest": None, "table": []}
    fleet.until(CampaignStage.FAILED)
    assert document(fleet)["verdict"]["text"] == "demo failed: no checkpoint can be chosen: nothing is eligible"

    fleet.selection = None
    fleet.launch(plan(name="next", plan_sha256="cd" * 32))
    for _ in range(4):
        fleet.round()
    assert document(fleet)["verdict"]["word"] == "OK"


def test_an_empty_fleet_has_a_document_too() -> None:
    sight = Board(Owner(coordinator_id="c", generation=1), "python").take(News(), START, "ok")

    found = build(Fleet(), sight, DAEMON, now=START, journal_health="ok")
    assert found["verdict"] == {"word": "OK", "text": "nothing was launched yet", "since": None}
    assert found["campaigns"] == found["runs"] == found["hosts"] == []


def test_a_full_disk_under_a_trainer_that_died_needs_you(fleet: VirtualCoordinator) -> None:
    run = fleet.run("low")
    assert run.state is RunState.RUNNING and document(fleet)["verdict"]["word"] == "OK"
    alarm = "the supervisor's journal is read-only: database or disk is full; 2 entries wait in memory"
    answer = fleet.hosts["gx10"].answer({}, fleet.now)
    reports = tuple(
        replace(report, observation=replace(report.observation, identity="gone", alarms=(alarm,)))
        for report in answer.reports or () if report.run_id == run.run_id and report.observation is not None
    )
    fleet._news(replace(answer, reports=reports, disk_free_bytes=0))
    fleet.tick()

    verdict = document(fleet)["verdict"]
    assert verdict["word"] == "NEEDS YOU" and verdict["text"] == (
        f"host gx10: its disk is full, 0 bytes are free; low: {alarm}; the trainer of low is gone, and how it ended waits to be recorded "
        f"(free space below {ROOT})"
    )


def test_a_full_disk_is_told_before_anything_died_of_it_and_no_more_once_nothing_runs_there(fleet: VirtualCoordinator) -> None:
    fleet._news(replace(fleet.hosts["gx10"].answer({}, fleet.now), disk_free_bytes=4096))
    fleet.tick()
    assert document(fleet)["verdict"]["text"] == f"host gx10: its disk is full, 4096 bytes are free (free space below {ROOT})"

    fleet.until(CampaignStage.EVALUATED)
    fleet._news(replace(fleet.hosts["gx10"].answer({}, fleet.now), disk_free_bytes=4096))
    fleet.tick()
    assert document(fleet)["verdict"]["word"] == "OK"
