"""Stories of whole campaigns through the pure judgement, on a virtual host."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from virtual_fleet import START, VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import AfterFreeze, HostPlan
from fleetd.fleet import Event, replay
from fleetd.model import CapPart
from fleetd.wire import decode
from policies.errors import DataDamaged, RequestRefused
from policies.facts import GIB, CampaignStage, CapGrade, Reason, RunKind, RunState, Split


@pytest.fixture
def fleet() -> VirtualCoordinator:
    found = VirtualCoordinator()
    found.launch(plan())
    found.tick()
    return found


def refusal(fleet: VirtualCoordinator, number: int) -> dict[str, str]:
    reply = fleet.replies[number]
    assert reply.error is not None, f"it was granted: {reply.body}"
    return reply.error


def test_a_campaign_goes_from_launch_to_its_report(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.EVALUATED)

    stages = [event.body["to"] for event in fleet.events("campaign_moved")]
    assert stages == ["staging", "training", "selecting", "frozen", "evaluated"]
    assert fleet.campaign().results == {"test": {"rows": 100}}
    assert fleet.run("evaluate-test").state is RunState.FINISHED
    assert {run.state for run in fleet.fleet.runs.values()} == {RunState.FINISHED}
    assert fleet.replies[1].body["campaign_id"] == fleet.campaign().campaign_id


def test_the_ledger_opening_is_history_before_the_evaluation_is_placed(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.EVALUATED)

    kinds = [(event.kind, event.run_id) for event in fleet.events()]
    opened = next(index for index, (kind, _) in enumerate(kinds) if kind == "split_opened")
    frozen = next(index for index, (kind, _) in enumerate(kinds) if kind == "selection_frozen")
    placed = kinds.index(("run_placed", fleet.run("evaluate-test").run_id))
    assert frozen < opened < placed


def test_what_is_replayed_is_what_was_lived(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.EVALUATED)

    assert replay([decode(Event, json.loads(line)) for line in fleet.journal]) == fleet.fleet


def test_the_start_order_carries_what_the_plan_says(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    spec = fleet.run("low").spec

    assert spec is not None and spec.argv == ("/usr/bin/python3", "-m", "trainer", "train")
    assert spec.environment["PYTHONPATH"] == f"/virtual/gx10/releases/{'r' * 64}"
    assert spec.digests == {"train": "t" * 64, "validation": "v" * 64, "release": "r" * 64}
    assert spec.deadline is not None and spec.deadline.cutoff_at == spec.deadline.final_at - timedelta(seconds=600)


def test_a_command_gets_nothing_of_ours_on_its_path() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("own", task=None, command=("sh", "-c", "train"), environment={"A": "1"}), candidate("low")))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    spec = fleet.run("own").spec

    assert spec is not None and spec.argv == ("sh", "-c", "train") and not spec.contract
    assert spec.environment == {"A": "1"}


def test_a_campaign_of_commands_alone_is_finished_and_reported_when_they_are_over() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("own", task=None, command=("sh", "-c", "train")), after_freeze=AfterFreeze()))
    fleet.tick()
    fleet.until(CampaignStage.FINISHED)
    for _ in range(3):
        fleet.round()

    assert fleet.run("own").state is RunState.FINISHED
    assert "nothing to choose from" in fleet.campaign().detail
    assert fleet.campaign().reported
    assert not fleet.events("selection_made")


def test_a_campaign_that_is_over_without_a_silent_host_is_reported_once() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("own", task=None, command=("sh", "-c", "train")), after_freeze=AfterFreeze()))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.silent.add("gx10")
    left = (fleet.campaign().final_at - fleet.now).total_seconds()
    fleet.round(left, work=False)
    for _ in range(8):
        fleet.round(work=False)

    assert fleet.run("own").state is RunState.LOST and fleet.campaign().stage is CampaignStage.FINISHED
    assert fleet.campaign().reported and len(fleet.events("report_written")) == 1, "nobody writes it again at every tick"
    assert not fleet.jobs


def test_a_second_campaign_waits_for_memory_and_says_what_holds_it() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("big", memory_host_bytes=6 * GIB)))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.launch(plan(candidate("second", memory_host_bytes=4 * GIB), name="other", plan_sha256="cd" * 32))
    for _ in range(3):
        fleet.round(work=False)

    second = fleet.run("second")
    assert second.state is RunState.QUEUED and second.host is None
    assert second.detail == "waits for memory on gx10: asks 4.0 GiB; 8.0 GiB capacity − 1.0 GiB floor − 6.0 GiB held by big = 1.0 GiB"
    assert len(fleet.events("run_waits")) <= 2, "the same words are journaled once"

    for _ in range(12):
        fleet.round()
    assert fleet.run("second").host == "gx10"


def test_wandering_figures_do_not_fill_the_journal() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("big", memory_host_bytes=6 * GIB), candidate("second", memory_host_bytes=4 * GIB)))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    for number in range(120):
        fleet.hosts["gx10"].memory_bytes = 3 * GIB + number * GIB // 10
        fleet.round(work=False)

    assert fleet.run("second").state is RunState.QUEUED
    assert 1 <= len(fleet.events("run_waits")) <= 5


def test_a_cap_that_fits_no_host_is_refused_with_the_arithmetic() -> None:
    fleet = VirtualCoordinator()
    number = fleet.launch(plan(candidate("huge", memory_host_bytes=20 * GIB)))
    for _ in range(3):
        fleet.round()

    assert "asks 20.0 GiB; 8.0 GiB capacity − 1.0 GiB floor = 7.0 GiB" in refusal(fleet, number)["what"]
    assert not fleet.fleet.campaigns


def test_a_demand_for_an_enforced_cap_is_refused_where_no_host_can_keep_it_and_kept_where_one_can() -> None:
    absent = CapPart(grade=CapGrade.ABSENT, means="cgroup v2: no group may be made below /user.slice; fix: loginctl enable-linger anna")
    hosts = (HostPlan(name="bare", root="/b"), HostPlan(name="able", root="/a"))
    strict = candidate("strict", host="any", memory_host_bytes=GIB, memory_demand=CapGrade.ENFORCED)

    bare = VirtualCoordinator(VirtualHost("bare"))
    bare.hosts["bare"].cgroup = absent
    number = bare.launch(plan(strict, hosts=hosts[:1]))
    for _ in range(3):
        bare.round()
    assert refusal(bare, number)["what"] == f"bare: it can't enforce the cap: {absent.means}" and not bare.fleet.campaigns

    both = VirtualCoordinator(VirtualHost("bare"), VirtualHost("able"))
    both.hosts["bare"].cgroup, both.hosts["bare"].memory_bytes = absent, 100 * GIB
    both.launch(plan(strict, candidate("easy", host="bare", memory_host_bytes=GIB), hosts=hosts))
    both.tick()
    both.until(CampaignStage.TRAINING)
    for _ in range(2):
        both.round(work=False)
    assert (both.run("strict").host, both.run("easy").host) == ("able", "bare")


def test_an_evaluation_runs_under_both_parts_of_its_own_cap_and_where_its_demand_is_kept() -> None:
    terms = AfterFreeze(evaluate=(Split.TEST,), memory_host_bytes=GIB, memory_accelerator_bytes=3 * GIB, memory_demand=CapGrade.ENFORCED)
    fleet = VirtualCoordinator()
    fleet.launch(plan(after_freeze=terms))
    fleet.tick()
    fleet.until(CampaignStage.EVALUATED)
    caps = next(run.spec.caps for run in fleet.fleet.runs.values() if run.kind is RunKind.EVALUATE and run.spec is not None)
    assert (caps.host_bytes, caps.accelerator_bytes, caps.floor_bytes, caps.demand) == (GIB, 3 * GIB, GIB, CapGrade.ENFORCED)

    for changes in ({"memory_host_bytes": 20 * GIB}, {"memory_demand": CapGrade.ENFORCED}):
        bare = VirtualCoordinator()
        bare.hosts["gx10"].cgroup = CapPart(grade=CapGrade.ABSENT, means="no cgroup is mounted")
        number = bare.launch(plan(after_freeze=replace(AfterFreeze(evaluate=(Split.TEST,)), **changes)))
        for _ in range(3):
            bare.round()
        assert refusal(bare, number)["title"] == "after_freeze fits no host", "known at launch, not in the night of the freeze"


def test_any_goes_where_most_memory_is_free() -> None:
    fleet = VirtualCoordinator(VirtualHost("small"), VirtualHost("large"))
    hosts = (HostPlan(name="small", root="/s", capacity_bytes=6 * GIB), HostPlan(name="large", root="/l", capacity_bytes=12 * GIB))
    big = candidate("three", host="any", memory_host_bytes=5 * GIB)
    fleet.launch(plan(candidate("one", host="any"), candidate("two", host="any"), big, hosts=hosts))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    for _ in range(2):
        fleet.round(work=False)

    assert [fleet.run(name).host for name in ("one", "two", "three")] == ["large", "large", "large"]


@pytest.mark.parametrize(("changes", "title"), [
    ({"deadline_at": START - timedelta(hours=1)}, "the deadline is already past"),
    ({"deadline_seconds": 300.0}, "no time is left for training"),
    ({"candidates": (candidate("a"), candidate("a"))}, "the candidates can't be told apart"),
    ({"hosts": (HostPlan(name="gx10", root="/r", transport="pigeon"),)}, "host gx10 can't be reached"),
])
def test_a_plan_that_can_not_work_is_refused(changes: dict[str, Any], title: str) -> None:
    fleet = VirtualCoordinator()
    number = fleet.launch(plan(**changes))
    for _ in range(3):
        fleet.round()

    assert refusal(fleet, number)["title"] == title
    assert not fleet.fleet.campaigns


def test_the_same_plan_is_not_launched_twice_and_the_refusal_names_the_first(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    number = fleet.launch(plan())
    fleet.round()

    assert fleet.campaign().campaign_id in refusal(fleet, number)["what"]
    assert len(fleet.fleet.campaigns) == 1


def test_a_host_that_never_answers_refuses_the_launch_with_its_words() -> None:
    fleet = VirtualCoordinator()
    fleet.silent.add("gx10")
    number = fleet.launch(plan())
    for _ in range(20):
        fleet.round()

    error = refusal(fleet, number)
    assert error["error"] == "HostUnreachable" and "silence" in error["what"]


def test_damaged_data_fails_the_launch_and_nothing_starts() -> None:
    fleet = VirtualCoordinator()
    fleet.failing["preflight"] = DataDamaged("a shard is damaged", where="train_000.bin", what="digest", fix="restore it").to_json()
    number = fleet.launch(plan())
    for _ in range(4):
        fleet.round()

    assert refusal(fleet, number)["where"] == "train_000.bin"
    assert fleet.campaign().stage is CampaignStage.FAILED and not fleet.hosts["gx10"].start_orders


def test_a_silent_host_makes_its_runs_lost_and_nothing_is_started_again(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    starts = len(fleet.hosts["gx10"].start_orders)
    fleet.silent.add("gx10")
    for _ in range(40):
        fleet.round()

    assert fleet.run("low").state is RunState.LOST
    assert len(fleet.hosts["gx10"].start_orders) == starts == 2
    fleet.silent.clear()
    fleet.until(CampaignStage.EVALUATED)
    assert len(fleet.events("run_placed")) == 3, "two trainings and one evaluation, each placed once"


def test_a_host_that_stays_silent_can_not_hold_the_campaign_hostage(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    for _ in range(3):
        fleet.round()
    fleet.silent.add("gx10")
    for _ in range(3):
        fleet.round()
    fleet.round(seconds=7000.0)
    for _ in range(4):
        fleet.round()

    assert fleet.campaign().frozen_digest is not None
    moved = next(event for event in fleet.events("campaign_moved") if event.body["to"] == "selecting")
    assert "low (lost)" in moved.because


def test_a_refused_start_ends_the_run_with_the_words_of_the_host(fleet: VirtualCoordinator) -> None:
    host = fleet.hosts["gx10"]
    host.refuse_start = RequestRefused("no room for a run", where="/virtual", what="disk full", fix="free it")
    fleet.until(CampaignStage.FAILED)

    assert fleet.run("low").state is RunState.FAILED and "no room for a run" in fleet.run("low").detail
    assert "every candidate failed" in fleet.campaign().detail


def test_a_start_that_the_host_never_got_is_sent_again_with_the_same_spec(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.orders.clear()
    fleet.crash()
    fleet.until(CampaignStage.EVALUATED)

    specs = {spec.run_id: spec for spec in fleet.hosts["gx10"].start_orders}
    assert all(spec == specs[spec.run_id] for spec in fleet.hosts["gx10"].start_orders)
    assert all(run.spec == specs[run.run_id] for run in fleet.fleet.runs.values())


def test_a_slow_validation_moves_the_cutoff_earlier_and_tells_the_host(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    before = fleet.campaign().cutoff_at
    run_id = fleet.run("low").run_id
    fleet.hosts["gx10"].tell(run_id, "validation", fleet.now, step=50, value=8.0, rows=10, seconds=50.0, sha256="slow")
    for _ in range(3):
        fleet.round(work=False)

    needed_seconds = 1.3 * 200 * 5.0 + 60
    assert fleet.campaign().cutoff_at == fleet.campaign().final_at - timedelta(seconds=needed_seconds) < before
    assert set(fleet.hosts["gx10"].cutoffs) == {run.run_id for run in fleet.fleet.runs.values() if run.host}


def test_no_choice_ends_the_campaign_with_the_reason_of_the_policy(fleet: VirtualCoordinator) -> None:
    fleet.selection = {"because": "the unchanged base is not beaten", "checkpoint_digest": None, "table": []}
    fleet.until(CampaignStage.FAILED)

    assert fleet.campaign().detail == "no checkpoint can be chosen: the unchanged base is not beaten"


def test_damaged_predictions_are_given_up_and_told(fleet: VirtualCoordinator) -> None:
    fleet.failing["predictions"] = DataDamaged("predictions can't be used", where="x", what="SHA-256", fix="-").to_json()
    for _ in range(30):
        fleet.round(seconds=3.0)

    assert fleet.run("low").faults and not fleet.run("low").predictions
    assert fleet.campaign().selection is not None, "the selection does not wait for copies that can't come"


def test_a_failed_evaluation_leaves_the_freeze_standing(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.FROZEN)
    for _ in range(10):
        if "evaluate-test" in {run.candidate for run in fleet.fleet.runs.values() if run.state is RunState.RUNNING}:
            break
        fleet.round()
    run_id = fleet.run("evaluate-test").run_id
    fleet.hosts["gx10"].move(run_id, RunState.FAILED, fleet.now, Reason.EXIT_NONZERO, "exit 30")
    fleet.until(CampaignStage.FAILED)

    assert fleet.campaign().frozen_digest == "f" * 64
    assert fleet.campaign().detail.endswith("the frozen selection stands")


def test_notify_tells_of_trouble_and_of_the_end() -> None:
    from fleetd.campaign import Notify

    fleet = VirtualCoordinator()
    fleet.launch(plan(notify=(Notify(command=("mail",), on=("finished", "failed")), Notify(command=("page",), on=("needs_you",)))))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.hosts["gx10"].move(fleet.run("low").run_id, RunState.FAILED, fleet.now, Reason.NOT_FINITE, "loss is nan")
    fleet.until(CampaignStage.EVALUATED)

    assert [event.body["kind"] for event in fleet.events("notified")] == ["needs_you", "finished"]


def test_the_reserve_counts_only_splits_that_will_be_judged() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(after_freeze=AfterFreeze(evaluate=(Split.HOLDOUT,))))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.hosts["gx10"].tell(fleet.run("low").run_id, "validation", fleet.now, step=50, value=8.0, rows=1, seconds=900.0, sha256="s")
    fleet.round(work=False)

    assert not fleet.events("cutoff_moved")
