"""Notices of hosts: each journaled once and in order, whatever comes twice, late, or unreadable."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_fleet import VirtualCoordinator, plan

from fleetd.model import Notice, RunReport
from policies.facts import CampaignStage


@pytest.fixture
def fleet() -> VirtualCoordinator:
    found = VirtualCoordinator()
    found.launch(plan())
    found.tick()
    return found


def test_every_notice_is_journaled_once_whatever_comes_twice_or_late(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    host = fleet.hosts["gx10"]
    everything = host.answer({}, fleet.now)
    fleet._news(everything)
    fleet._news(everything)
    fleet.round()
    fleet._news(everything)
    fleet.until(CampaignStage.EVALUATED)

    run = fleet.run("low")
    seen = [event.body["notice"] for event in fleet.events() if event.run_id == run.run_id and "notice" in event.body]
    assert seen == list(range(1, len(host.notices[run.run_id]) + 1))


def test_a_gap_in_the_notices_waits_for_what_is_missing(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round(work=False)
    run_id = fleet.run("low").run_id
    late = Notice(sequence=5, at=fleet.now, kind="alarm", body={"text": "later"})
    answer = fleet.hosts["gx10"].answer({}, fleet.now)
    fleet._news(type(answer)(host="gx10", at=fleet.now, reports=(RunReport(run_id=run_id, supervisor="alive", observation=None, notices=(late,)),)))
    fleet.tick()

    assert fleet.run("low").notices_seen < 5


def test_a_malformed_notice_is_kept_and_changes_no_state(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    host, run_id = fleet.hosts["gx10"], fleet.run("low").run_id
    state = fleet.run("low").state
    host.tell(run_id, "state_changed", fleet.now, to="flying")
    host.tell(run_id, "checkpoint", fleet.now, step="three")
    host.tell(run_id, "state_changed", fleet.now, to="queued")
    fleet.round(work=False)

    assert fleet.run("low").state is state and fleet.run("low").notices_seen == len(host.notices[run_id])
    kinds = [event.body["kind"] for event in fleet.events("noticed") if event.run_id == run_id]
    assert "malformed state_changed" in kinds and "malformed checkpoint" in kinds


@pytest.mark.parametrize("body", [
    {"step": 3, "value": "low"}, {"step": -1}, {"step": 3, "rows": "many"}, {"step": 3, "sha256": 5}, {"step": True}, {"step": 3, "seconds": -1.0},
    {"step": 3, "seconds": 1e300}, {"step": 3, "rows": 10 ** 400},
])
def test_a_validation_that_can_not_be_read_never_stops_a_replay(fleet: VirtualCoordinator, body: dict[str, Any]) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    host, run_id = fleet.hosts["gx10"], fleet.run("low").run_id
    host.tell(run_id, "validation", fleet.now, **body)
    fleet.until(CampaignStage.EVALUATED)
    fleet.crash()

    assert "malformed validation" in [event.body["kind"] for event in fleet.events("noticed") if event.run_id == run_id]
    assert fleet.campaign().stage is CampaignStage.EVALUATED
