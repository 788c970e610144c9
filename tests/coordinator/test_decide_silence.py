"""What the silence of a host makes of the runs it has, and what their first word makes of them afterwards."""

from __future__ import annotations

import pytest
from virtual_fleet import VirtualCoordinator, candidate, plan

from policies.facts import CampaignStage, Reason, RunState


@pytest.fixture
def fleet() -> VirtualCoordinator:
    found = VirtualCoordinator()
    found.launch(plan(candidate("low")))
    found.tick()
    found.until(CampaignStage.TRAINING)
    found.round(work=False)
    return found


def fall_silent(fleet: VirtualCoordinator) -> None:
    fleet.silent.add("gx10")
    for _ in range(40):
        fleet.round(work=False)
    assert not fleet.fleet.hosts["gx10"].reachable


def test_a_stuck_run_of_a_silent_host_is_lost_and_stuck_again_when_it_answers(fleet: VirtualCoordinator) -> None:
    host, run_id = fleet.hosts["gx10"], fleet.run("low").run_id
    host.move(run_id, RunState.RUNNING, fleet.now)
    host.move(run_id, RunState.STOPPING, fleet.now)
    host.move(run_id, RunState.STUCK, fleet.now, Reason.USER)
    fleet.round(work=False)
    fleet.round(work=False)
    assert fleet.run("low").state is RunState.STUCK

    fall_silent(fleet)
    assert fleet.run("low").state is RunState.LOST, "it may have ended by now, and nobody would know"
    fleet.silent.clear()
    fleet.round(work=False)
    fleet.round(work=False)
    assert fleet.run("low").state is RunState.STUCK


def test_a_held_run_of_a_silent_host_stays_held_and_can_be_resumed(fleet: VirtualCoordinator) -> None:
    host, run_id = fleet.hosts["gx10"], fleet.run("low").run_id
    host.move(run_id, RunState.HELD, fleet.now, Reason.EXIT_NONZERO)
    fleet.round(work=False)
    fleet.round(work=False)

    fall_silent(fleet)
    assert fleet.run("low").state is RunState.HELD, "without an order of ours it stays so"
    number = fleet.ask("resume", target="low")
    fleet.round(work=False)
    assert fleet.replies[number].error is None
    fleet.round(work=False)
    assert fleet.run("low").state is RunState.LOST, "an order was given, and what became of it is not known"
    fleet.silent.clear()
    for _ in range(4):
        fleet.round()
    assert fleet.run("low").state in (RunState.RUNNING, RunState.FINISHED)


def test_a_run_that_could_not_start_yet_is_not_lost_once_its_host_answers(fleet: VirtualCoordinator) -> None:
    """Its supervisor waits for memory or for a disk: there the run is staging, and stays so for as long as it takes."""
    host, run_id = fleet.hosts["gx10"], fleet.run("low").run_id
    host.states[run_id] = RunState.STAGING
    host.tell(run_id, "alarm", fleet.now, text="nothing is started: the floor is reached")
    fall_silent(fleet)
    assert fleet.run("low").state is RunState.LOST
    fleet.silent.clear()
    for _ in range(3):
        fleet.round(work=False)
    assert fleet.run("low").state is RunState.STARTING
