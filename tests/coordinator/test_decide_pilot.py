"""Pilots through the pure judgement: nothing else starts before they have passed, and one that fails ends the campaign early."""

from __future__ import annotations

from typing import Any

from virtual_fleet import VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import HostPlan
from policies.facts import GIB, CampaignStage, Reason, RunState, Want

PILOT = {"steps": 400, "window": 128, "pilot": {"steps": 20}}


def launched(*candidates: Any, **changes: Any) -> VirtualCoordinator:
    """A campaign whose runs that may start have started."""
    fleet = VirtualCoordinator()
    fleet.launch(plan(*candidates, **changes))
    fleet.tick()
    fleet.until(CampaignStage.PILOT)
    for _ in range(3):
        fleet.round(work=False)
    return fleet


def host_of(fleet: VirtualCoordinator) -> VirtualHost:
    return fleet.hosts["gx10"]


def judged(fleet: VirtualCoordinator, name: str, *, passed: bool) -> None:
    host_of(fleet).tell(fleet.run(name).run_id, "pilot", fleet.now, step=20, passed=passed, because="said so")
    if not passed:
        host_of(fleet).move(fleet.run(name).run_id, RunState.FAILED, fleet.now, Reason.GATE_FAILED, "the pilot failed: said so")
    fleet.round(work=False)


def test_training_begins_once_every_pilot_has_passed_and_only_then_a_run_without_one_starts() -> None:
    fleet = launched(candidate("first", task=PILOT), candidate("second", task=PILOT), candidate("plain"))
    assert (fleet.run("first").state, fleet.run("second").state, fleet.run("plain").state) == (
        RunState.STARTING, RunState.STARTING, RunState.QUEUED)
    judged(fleet, "first", passed=True)
    assert fleet.campaign().stage is CampaignStage.PILOT, "the other one is not judged yet"
    judged(fleet, "second", passed=True)
    assert fleet.campaign().stage is CampaignStage.TRAINING and fleet.campaign().detail == "pilot passed: first, second"
    assert fleet.run("plain").state is RunState.STARTING
    fleet.until(CampaignStage.EVALUATED)
    assert [event.body["to"] for event in fleet.events("campaign_moved")][:4] == ["staging", "pilot", "training", "selecting"]


def test_a_pilot_that_fails_ends_the_campaign_and_the_other_runs_are_asked_to_stop() -> None:
    fleet = launched(candidate("first", task=PILOT), candidate("second", task=PILOT), candidate("plain"))
    judged(fleet, "second", passed=False)
    assert fleet.campaign().stage is CampaignStage.FAILED
    assert fleet.campaign().detail == "the pilot of second failed: the pilot failed: said so"
    wanted = fleet.run("first").want
    assert wanted is not None and (wanted.want, wanted.reason) == (Want.STOP, Reason.SUPERSEDED)
    assert fleet.run("plain").state is RunState.FAILED, "it never started"
    for _ in range(6):
        fleet.round()
    assert fleet.run("first").state is RunState.STOPPED, "the order reached it although the campaign was over"
    assert len(fleet.events("want_changed")) == 1, "asked once"


def test_a_run_that_breaks_in_its_pilot_for_any_reason_is_a_pilot_that_failed() -> None:
    fleet = launched(candidate("first", task=PILOT))
    host_of(fleet).move(fleet.run("first").run_id, RunState.FAILED, fleet.now, Reason.NOT_FINITE, "loss is nan")
    fleet.round(work=False)
    assert fleet.campaign().stage is CampaignStage.FAILED and "the pilot of first failed: loss is nan" in fleet.campaign().detail


def test_one_that_waits_for_memory_does_not_hold_up_the_pilot_of_the_others_and_is_judged_alone_later() -> None:
    small = (HostPlan(name="gx10", root="/virtual/gx10", capacity_bytes=3 * GIB),)
    fleet = launched(candidate("first", task=PILOT), candidate("second", task=PILOT), hosts=small)
    assert fleet.run("second").state is RunState.QUEUED and "memory" in fleet.run("second").detail
    judged(fleet, "first", passed=True)
    assert fleet.campaign().stage is CampaignStage.TRAINING and "comes to its own later: second" in fleet.campaign().detail
    while fleet.run("second").state is RunState.QUEUED:
        fleet.round()
    fleet.round(work=False)  # the order reaches its host
    judged(fleet, "second", passed=False)
    assert fleet.campaign().stage is not CampaignStage.FAILED, "the training of the first one is not thrown away"


def test_a_campaign_that_was_stopped_in_its_pilot_goes_on_with_it() -> None:
    fleet = launched(candidate("first", task=PILOT))
    fleet.ask("stop", target="demo")
    for _ in range(5):
        fleet.round()
    assert fleet.campaign().stage is CampaignStage.STOPPED
    fleet.ask("resume", target="demo")
    fleet.round(work=False)
    assert fleet.campaign().stage is CampaignStage.PILOT
