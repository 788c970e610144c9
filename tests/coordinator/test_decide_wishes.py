"""What people ask for, through the pure judgement: stop, resume, open; granted, refused, overtaken."""

from __future__ import annotations

import pytest
from virtual_fleet import VirtualCoordinator, candidate, plan

from fleetd.campaign import AfterFreeze
from policies.facts import GIB, CampaignStage, Reason, RunState


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


def test_a_stop_reaches_running_and_queued_runs_and_a_resume_goes_on_with_the_same_order() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("first", memory_host_bytes=6 * GIB), candidate("waiting", memory_host_bytes=6 * GIB)))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    cutoff = fleet.campaign().cutoff_at
    number = fleet.ask("stop", target="demo", mode="graceful")
    fleet.round()
    assert len(fleet.replies[number].body["runs"]) == 2
    assert fleet.run("waiting").state is RunState.STOPPED
    fleet.until(CampaignStage.STOPPED)
    placed = [fleet.run("first").spec]

    number = fleet.ask("resume", target="demo")
    fleet.round()
    assert set(fleet.replies[number].body["runs"]) == set(fleet.campaign().runs)
    assert fleet.campaign().stage is CampaignStage.TRAINING
    fleet.until(CampaignStage.EVALUATED)

    assert [fleet.run("first").spec] == placed, "a resume brings no other order"
    assert fleet.campaign().cutoff_at == cutoff, "a resume never moves the deadline"
    assert {fleet.run(name).state for name in ("first", "waiting")} == {RunState.FINISHED}


def test_a_resumed_run_waits_for_memory_that_another_campaign_took_meanwhile() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("one", memory_host_bytes=6 * GIB)))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.ask("stop", target="one")
    fleet.until(CampaignStage.STOPPED)
    fleet.launch(plan(candidate("other", memory_host_bytes=6 * GIB), name="second", plan_sha256="ef" * 32))
    for _ in range(6):
        fleet.round(work=False)
    assert fleet.run("other").host == "gx10"

    fleet.ask("resume", target="one")
    fleet.round(work=False)
    assert fleet.run("one").state is RunState.QUEUED and "held by other" in fleet.run("one").detail
    for _ in range(20):
        fleet.round()
    assert fleet.run("one").state is RunState.FINISHED


def test_a_stopped_campaign_is_judged_when_its_deadline_passes(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.ask("stop", target="all")
    fleet.until(CampaignStage.STOPPED)
    fleet.round(seconds=2 * 3600.0 - 500)

    assert fleet.run("low").state is RunState.FINISHED and fleet.run("low").reason is Reason.DEADLINE
    number = fleet.ask("resume", target="low")
    fleet.until(CampaignStage.FROZEN)
    assert refusal(fleet, number)["error"] in ("RequestRefused", "FreezeRefused")


def test_a_reserved_split_stays_closed_before_the_freeze_and_is_opened_once_after_it() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(after_freeze=AfterFreeze(evaluate=())))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    early = fleet.ask("open", campaign="demo", split="test", because="curious")
    fleet.round()
    assert refusal(fleet, early)["error"] == "FreezeRefused" and fleet.replies[early].exit_code == 9

    fleet.until(CampaignStage.FROZEN)
    asked = fleet.ask("open", campaign="demo", split="test", because="now it counts")
    again = fleet.ask("open", campaign="demo", split="test", because="once more")
    unknown = fleet.ask("open", campaign="demo", split="holdout")
    fleet.until(CampaignStage.EVALUATED)
    assert fleet.replies[asked].error is None
    assert refusal(fleet, again)["error"] == "FreezeRefused" and refusal(fleet, unknown)["error"] == "NotFound"
    assert fleet.campaign().results == {"test": {"rows": 100}}
    assert [event.because for event in fleet.events("split_opened")] == ["now it counts"]


def test_a_held_run_is_started_again_by_a_resume(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    host, run_id = fleet.hosts["gx10"], fleet.run("low").run_id
    host.move(run_id, RunState.HELD, fleet.now, Reason.EXIT_NONZERO, "5 of 5 restarts used")
    fleet.round(work=False)
    assert fleet.run("low").state is RunState.HELD

    fleet.ask("resume", target="low")
    fleet.until(CampaignStage.EVALUATED)
    assert fleet.run("low").state is RunState.FINISHED


def test_a_stop_that_overtook_a_resume_is_corrected_by_what_the_host_sees(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.ask("stop", target="all")
    fleet.until(CampaignStage.STOPPED)
    fleet.ask("resume", target="low")
    fleet.tick()
    fleet.ask("stop", target="low")
    fleet.tick()
    fleet.orders[:] = [order for order in fleet.orders if order.key.endswith(":4") or order.run_id != fleet.run("low").run_id]
    for _ in range(12):
        fleet.round()

    assert fleet.run("low").state is RunState.STOPPED
