"""Faults of the coordinator's judgement that the simulation of tests/sim found, each as the small story that it came down to."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from virtual_fleet import VirtualCoordinator, VirtualHost, plan

from fleetd.coordinator.inbox import HostAnswer
from fleetd.fleet import Event, replay
from fleetd.model import Observation, RunReport
from fleetd.wire import decode
from policies.escalation import seconds_until_empty
from policies.facts import CampaignStage, Reason, RunKind, RunState, Want


class RestingHost(VirtualHost):
    """Where a run has come to rest and is not wished to run, no supervisor lives, and the last look is as old as that."""

    def answer(self, after, now):  # type: ignore[no-untyped-def]
        found = super().answer(after, now)
        return type(found)(
            host=found.host, at=found.at, memory_available_bytes=found.memory_available_bytes, disk_free_bytes=found.disk_free_bytes,
            reports=tuple(self._rested(report) for report in found.reports or ()),
        )

    def _rested(self, report: RunReport) -> RunReport:
        look = report.observation
        if self.states[report.run_id] is not RunState.STOPPED or self.wants[report.run_id].want is Want.RUN or look is None:
            return report
        rested_at = next(notice.at for notice in reversed(self.notices[report.run_id]) if notice.body.get("to") == RunState.STOPPED)
        old = Observation(
            run_id=report.run_id, at=rested_at, state=RunState.STOPPED, reason=Reason.USER, detail="", attempt=1, pid=None, identity="gone",
        )
        return RunReport(run_id=report.run_id, supervisor="gone", observation=old, notices=report.notices)


def test_a_resume_that_was_taken_back_before_the_host_heard_of_it_does_not_leave_the_run_starting_for_ever() -> None:
    fleet = VirtualCoordinator(RestingHost("gx10"))
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.ask("stop", target="all")
    fleet.until(CampaignStage.STOPPED)
    fleet.ask("resume", target="low")
    fleet.tick()
    fleet.ask("stop", target="low")
    fleet.tick()
    # Only the newest wish reaches the host, which had come to rest long before and sees nothing to do.
    fleet.orders[:] = [order for order in fleet.orders if order.key.endswith(":4")]
    for _ in range(12):
        fleet.round()

    assert fleet.run("low").state is RunState.STOPPED


def test_an_evaluation_that_a_person_stopped_ends_with_the_final_deadline() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.FROZEN)
    for _ in range(10):
        if any(run.kind is RunKind.EVALUATE and run.state is RunState.RUNNING for run in fleet.fleet.runs.values()):
            break
        fleet.round(work=False)
        for host in fleet.hosts.values():
            for run_id in [run_id for run_id in host.specs if host.states[run_id] is RunState.STARTING]:
                host.work(run_id, fleet.now)
    fleet.ask("stop", target="evaluate-test")
    for _ in range(5):
        fleet.round()
    assert fleet.run("evaluate-test").state is RunState.STOPPED and fleet.campaign().stage is CampaignStage.FROZEN

    fleet.tick(seconds=7200.0)
    assert fleet.run("evaluate-test").reason is Reason.DEADLINE
    assert fleet.campaign().stage is CampaignStage.FAILED and fleet.campaign().detail.endswith("the frozen selection stands")


def test_a_campaign_that_was_stopped_before_its_data_was_registered_registers_it_after_the_resume() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.hear()
    fleet.tick()
    assert fleet.campaign().stage is CampaignStage.PREFLIGHT
    fleet.jobs.clear()  # the preflight is lost with the process
    fleet.crash()
    fleet.ask("stop", target="all")
    fleet.tick()
    assert fleet.campaign().stage is CampaignStage.STOPPED
    fleet.ask("resume", target="all")
    fleet.until(CampaignStage.EVALUATED)

    kinds = [job.kind for job in fleet.done_jobs]
    assert kinds.index("preflight") < kinds.index("stage"), "what is not registered can't be staged"
    assert fleet.campaign().digests["train"] == "t" * 64


def test_a_cutoff_that_has_to_move_as_far_as_now_still_leaves_the_trainings_time_to_save() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.hosts["gx10"].tell(fleet.run("low").run_id, "validation", fleet.now, step=50, value=8.0, rows=1, seconds=30.0, sha256="slow")
    fleet.round(work=False)

    grace_seconds = max(candidate.stop.grace_ceiling_seconds for candidate in fleet.campaign().plan.candidates)
    assert fleet.campaign().cutoff_at >= fleet.now + timedelta(seconds=seconds_until_empty(grace_seconds)), "who is asked can still answer"
    moves = len(fleet.events("cutoff_moved"))
    for _ in range(20):
        fleet.round(work=False)
    assert len(fleet.events("cutoff_moved")) == moves == 1


def test_notices_that_a_damaged_journal_lost_are_given_up_and_told_and_what_follows_is_heard() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    host, run = fleet.hosts["gx10"], fleet.run("low")
    for text in ("one", "two", "three"):
        host.tell(run.run_id, "alarm", fleet.now, text=text)
    host.notices[run.run_id][-3:-1] = []  # only the last of them still reads
    asked = {run.run_id: run.notices_seen}
    answer = host.answer({}, fleet.now)
    reports = tuple(replace(report, notices=report.notices[-1:]) for report in answer.reports or () if report.run_id == run.run_id)
    fleet._news(replace(answer, reports=reports, after=asked))
    fleet.tick()

    lost = fleet.events("notices_lost")[0]
    assert (lost.body["from"], lost.body["to"]) == (run.notices_seen + 1, run.notices_seen + 2) and "journal was damaged" in lost.because
    assert fleet.run("low").notices_seen == run.notices_seen + 3
    assert replay([decode(Event, json.loads(line)) for line in fleet.journal]) == fleet.fleet


def takes(fleet: VirtualCoordinator, name: str, state: RunState, *, supervisor: str, has_more: bool = False, age_seconds: float = 0.0) -> RunState:
    """What the coordinator makes of a host's last look at a run when no notice comes with it."""
    run = fleet.run(name)
    look = Observation(run_id=run.run_id, at=run.since, state=state, reason=None, detail="exit", attempt=1, pid=None, identity="gone")
    report = RunReport(
        run_id=run.run_id, supervisor=supervisor, observation=look, notices=(), has_more=has_more, look_age_seconds=age_seconds,
    )
    fleet._news(HostAnswer(host="gx10", at=fleet.now, reports=(report,)))
    fleet.tick()
    return fleet.run(name).state


def in_training() -> VirtualCoordinator:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round(work=False)
    return fleet


def test_a_run_that_is_over_on_its_host_is_over_even_if_its_last_notices_were_lost() -> None:
    fleet = in_training()
    before = fleet.run("low").state
    assert takes(fleet, "low", RunState.FINISHED, supervisor="alive", age_seconds=60.0) is before
    assert takes(fleet, "low", RunState.FINISHED, supervisor="gone", age_seconds=60.0) is RunState.FINISHED


@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.STOPPED])
def test_a_run_that_is_over_is_not_judged_before_its_supervisor_could_tell_its_last_notices(state: RunState) -> None:
    """Found by a disk that was full for one write: the last look was seen at once, the last validation waited, another candidate was frozen."""
    fleet = in_training()
    before = fleet.run("low").state
    fleet.now = fleet.run("low").since + timedelta(seconds=60)
    assert takes(fleet, "low", state, supervisor="alive") is before
    assert takes(fleet, "low", state, supervisor="gone", has_more=True) is before
    assert takes(fleet, "low", state, supervisor="gone") is state


def test_an_evaluation_is_over_by_its_files_and_waits_for_no_notice() -> None:
    fleet = in_training()
    fleet.until(CampaignStage.FROZEN)
    while not any(run.kind is RunKind.EVALUATE and run.state is RunState.RUNNING for run in fleet.fleet.runs.values()):
        fleet.round()
    fleet.now = fleet.run("evaluate-test").since + timedelta(seconds=60)
    assert takes(fleet, "evaluate-test", RunState.FINISHED, supervisor="alive", has_more=True) is RunState.FINISHED
