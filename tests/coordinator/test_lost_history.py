"""A coordinator that knows less than its hosts: its state directory was restored from an older copy, or its journal salvaged."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from virtual_fleet import VirtualCoordinator, plan

from fleetd.fleet import Event, replay
from fleetd.wire import decode
from policies.facts import CampaignStage, RunState, Want, format_moment


@pytest.fixture
def fleet() -> VirtualCoordinator:
    found = VirtualCoordinator()
    found.launch(plan())
    found.tick()
    found.until(CampaignStage.TRAINING)
    found.round()
    found.round(work=False)
    return found


def stop_and_resume(fleet: VirtualCoordinator) -> None:
    """History that will be lost: orders 2 and 3."""
    fleet.ask("stop", target="low")
    for _ in range(4):
        fleet.round()
    assert fleet.run("low").state is RunState.STOPPED
    fleet.ask("resume", target="low")
    for _ in range(3):
        fleet.round(work=False)
    assert fleet.hosts["gx10"].wants[fleet.run("low").run_id].sequence == 3


def test_a_stop_after_a_restore_is_given_again_under_a_number_that_the_host_takes(fleet: VirtualCoordinator) -> None:
    copied = len(fleet.journal)
    stop_and_resume(fleet)
    fleet.restore(copied)
    fleet.ask("stop", target="low")
    for _ in range(5):
        fleet.round(work=False)
    fleet.round()

    host, run = fleet.hosts["gx10"], fleet.run("low")
    held = host.wants[run.run_id]
    assert (held.sequence, held.want, held.actor) == (4, Want.STOP, "user:test") and run.want == held
    assert host.states[run.run_id] is RunState.STOPPED
    again = fleet.events("want_changed")[-1]
    assert again.actor == "user:test" and "had obeyed order 3" in again.because and "this is order 4" in again.because
    assert replay([decode(Event, json.loads(line)) for line in fleet.journal]) == fleet.fleet


def test_an_order_that_was_not_applied_is_never_believed_delivered(fleet: VirtualCoordinator) -> None:
    copied = len(fleet.journal)
    stop_and_resume(fleet)
    fleet.restore(copied)
    fleet.ask("stop", target="low")
    fleet.round(work=False)
    fleet.carry()
    fleet.tick()
    key = f"want:{fleet.run('low').run_id}"

    assert f"{key}:2" not in fleet.board.take(fleet.news, fleet.now, "ok").acknowledged
    fleet.round(work=False)
    assert f"{key}:4" in fleet.board.take(fleet.news, fleet.now, "ok").acknowledged


def test_a_later_wish_that_only_the_host_still_knows_holds(fleet: VirtualCoordinator) -> None:
    fleet.ask("stop", target="low")
    fleet.round()
    copied = len(fleet.journal)
    for _ in range(3):
        fleet.round()
    fleet.ask("resume", target="low")
    for _ in range(3):
        fleet.round(work=False)
    fleet.restore(copied)
    forgetful = fleet.run("low").want
    assert forgetful is not None and forgetful.want is Want.STOP
    for _ in range(4):
        fleet.round(work=False)

    run = fleet.run("low")
    assert run.want is not None and (run.want.sequence, run.want.want) == (3, Want.RUN)
    taken = fleet.events("want_changed")[-1]
    assert taken.actor == "host:gx10" and "history had lost it" in taken.because
    assert fleet.hosts["gx10"].wants[run.run_id].sequence == 3, "the host was told nothing new"


def test_a_stop_asked_twice_while_the_first_is_still_outranked_is_not_swallowed(fleet: VirtualCoordinator) -> None:
    fleet.ask("stop", target="low")
    fleet.round()
    copied = len(fleet.journal)
    for _ in range(3):
        fleet.round()
    fleet.ask("resume", target="low")
    for _ in range(3):
        fleet.round(work=False)
    fleet.restore(copied)
    fleet.ask("stop", target="low")
    for _ in range(5):
        fleet.round()

    assert fleet.hosts["gx10"].wants[fleet.run("low").run_id].want is Want.STOP


def test_an_earlier_cutoff_that_only_the_host_still_knows_holds(fleet: VirtualCoordinator) -> None:
    run, cutoff = fleet.run("low"), fleet.campaign().cutoff_at
    fleet.hosts["gx10"].cutoffs[run.run_id] = format_moment(cutoff - timedelta(seconds=600))
    slow = {"step": 300, "value": 5.0, "rows": 10, "seconds": 40.0, "sha256": "late"}
    fleet.hosts["gx10"].tell(run.run_id, "validation", fleet.now, **slow)
    for _ in range(4):
        fleet.round(work=False)

    moved = fleet.events("cutoff_moved")
    assert [event.actor for event in moved] == ["coordinator", "host:gx10"], "ours moved it a little, the host's holds"
    assert fleet.campaign().cutoff_at == cutoff - timedelta(seconds=600)


def test_notices_that_were_acknowledged_and_dropped_are_given_up_and_the_run_is_brought_up_to_date() -> None:
    fleet = VirtualCoordinator()
    host = fleet.hosts["gx10"]
    host.forgets = True
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round(work=False)
    copied, seen = len(fleet.journal), fleet.run("low").notices_seen
    assert fleet.run("low").state is RunState.STARTING
    for _ in range(3):
        fleet.round()
    for _ in range(2):
        fleet.round(work=False)
    before = fleet.run("low")
    fleet.restore(copied)
    for _ in range(3):
        fleet.round(work=False)

    run, lost = fleet.run("low"), next(event for event in fleet.events("notices_lost") if event.run_id == before.run_id)
    assert (lost.body["from"], lost.body["to"]) == (seen + 1, before.notices_seen) and "gx10 does not have notices" in lost.because
    assert (run.state, run.attempt, run.notices_seen) == (RunState.RUNNING, 1, before.notices_seen)
    assert (run.saved, run.validated) == (before.saved, before.validated), "files told them again"
    assert replay([decode(Event, json.loads(line)) for line in fleet.journal]) == fleet.fleet
    fleet.until(CampaignStage.EVALUATED)
    assert [exit["attempt"] for exit in fleet.run("low").exits] == [1] and fleet.run("low").state is RunState.FINISHED


def test_a_run_that_ended_in_the_lost_part_of_history_ends_here_too() -> None:
    fleet = VirtualCoordinator()
    host = fleet.hosts["gx10"]
    host.forgets = True
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    copied = len(fleet.journal)
    for _ in range(5):
        fleet.round()
    assert host.states[fleet.run("low").run_id] is RunState.FINISHED
    fleet.restore(copied)
    fleet.until(CampaignStage.EVALUATED)

    run = fleet.run("low")
    assert run.state is RunState.FINISHED and len(run.exits) == 1 and len(run.validated) == 3
    assert len(fleet.events("notices_lost")) == 2


def test_a_run_that_rests_here_and_goes_on_there_is_taken_up_again() -> None:
    fleet = VirtualCoordinator()
    host = fleet.hosts["gx10"]
    host.forgets = True
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.ask("stop", target="all")
    fleet.until(CampaignStage.STOPPED)
    copied, run_id = len(fleet.journal), fleet.run("low").run_id
    fleet.ask("resume", target="low")
    for _ in range(2):
        fleet.round(work=False)
    host.move(run_id, RunState.RUNNING, fleet.now)
    for _ in range(3):
        fleet.round(work=False)
    fleet.restore(copied)
    assert fleet.run("low").state is RunState.STOPPED and fleet.campaign().stage is CampaignStage.STOPPED
    for _ in range(4):
        fleet.round(work=False)

    run = fleet.run("low")
    assert run.state is RunState.RUNNING and fleet.campaign().stage is CampaignStage.TRAINING
    assert run.want is not None and (run.want.want, run.want.sequence) == (Want.RUN, 3)
