"""What an operator says of hosts, through the pure judgement: fence, drain, clear; and what is left of the fenced when it comes back."""

from __future__ import annotations

import pytest
from virtual_fleet import VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import AfterFreeze, HostPlan
from fleetd.coordinator.inbox import HostAnswer
from fleetd.coordinator.verdict import judge
from policies.facts import GIB, CampaignStage, Reason, RunState, Split, Want
from policies.lifecycle import FINAL

A, B = "gx10", "spark-b"


def two_hosts(*candidates: object, **changes: object) -> VirtualCoordinator:
    fleet = VirtualCoordinator(VirtualHost(A), VirtualHost(B))
    hosts = tuple(HostPlan(name=name, root=f"/virtual/{name}", capacity_bytes=8 * GIB) for name in (A, B))
    fleet.launch(plan(*(candidates or (candidate("one"),)), hosts=hosts, **changes))  # type: ignore[arg-type]
    fleet.tick()
    return fleet


def at_work(fleet: VirtualCoordinator, strides: int = 2) -> None:
    """Until `one` runs on its host, has validated, and copies of it lie here."""
    fleet.until(CampaignStage.TRAINING)
    for _ in range(strides + 4):
        fleet.round(work=fleet.run("one").state is not RunState.RUNNING or not fleet.run("one").checkpoints)


def silence(fleet: VirtualCoordinator, host: str) -> None:
    fleet.silent.add(host)
    fleet.round(seconds=31.0, work=False)
    fleet.round(work=False)


def returns(fleet: VirtualCoordinator, name: str) -> None:
    """The machine answers: its agent ends what was left behind before it says anything else, as `left_behind` of the hello tells it to."""
    fleet.silent.discard(name)
    host = fleet.hosts[name]
    for run_id in fleet.fleet.hosts[name].superseded:
        if run_id in host.specs and host.states[run_id] not in FINAL:
            host.move(run_id, RunState.STOPPED, fleet.now, Reason.SUPERSEDED)


def refusal(fleet: VirtualCoordinator, number: int) -> dict[str, str]:
    error = fleet.replies[number].error
    assert error is not None, f"it was granted: {fleet.replies[number].body}"
    return error


def test_a_fenced_run_goes_on_as_a_new_run_from_the_newest_verified_copy_on_another_host() -> None:
    fleet = two_hosts()
    at_work(fleet)
    old = fleet.run("one")
    copied = max(copy.step for copy in old.checkpoints)
    silence(fleet, A)
    assert fleet.run("one").state is RunState.LOST

    number = fleet.ask("fence", target=A, because="the power supply is on fire")
    fleet.round(work=False)
    told = fleet.replies[number].body["runs"]
    new_id = told[0]["successor"]
    old, new = fleet.fleet.runs[old.run_id], fleet.fleet.runs[new_id]
    assert (old.state, old.reason, old.successor) == (RunState.FAILED, Reason.SUPERSEDED, new_id)
    assert new.continues is not None and (new.continues.run_id, new.continues.step) == (old.run_id, copied)
    fenced = fleet.events("host_fenced")[0]
    assert (fenced.actor, fenced.because, fenced.body["runs"]) == ("user:test", "the power supply is on fire", [old.run_id])

    for _ in range(4):
        fleet.round(work=False)
    spec = fleet.hosts[B].specs[new_id]
    assert spec.continues == new.continues, "the host is told what to begin with"
    assert [job.body["digest"] for job in fleet.done_jobs if job.kind == "stage_seed"] == [new.continues.digest]
    assert not any(order.run_id == new_id for order in fleet.hosts[A].start_orders)
    fleet.until(CampaignStage.EVALUATED)
    assert fleet.fleet.runs[new_id].state is RunState.FINISHED


def test_a_fence_whose_consequences_history_has_lost_has_them_again() -> None:
    fleet = two_hosts()
    at_work(fleet)
    silence(fleet, A)
    old_id = fleet.run("one").run_id
    fleet.ask("fence", target=A)
    fleet.tick()
    fenced = fleet.events("host_fenced")[0].sequence
    assert fleet.fleet.runs[old_id].successor is not None

    fleet.restore(fenced)
    old = fleet.fleet.runs[old_id]
    assert (old.state, old.reason) == (RunState.FAILED, Reason.SUPERSEDED)
    assert old.successor is not None and fleet.fleet.runs[old.successor].continues is not None


def test_a_host_that_answers_is_not_fenced_and_nothing_happens_to_its_runs() -> None:
    fleet = two_hosts()
    at_work(fleet)
    before = fleet.fleet.runs
    for dry in (True, False):
        number = fleet.ask("fence", target=A, dry_run=dry)
        fleet.round(work=False)
        error = refusal(fleet, number)
        assert fleet.replies[number].exit_code == 3 and "last answered" in error["what"] and f"fleetd drain {A}" in error["fix"]
    assert fleet.fleet.runs == before and fleet.fleet.hosts[A].fenced is None


def test_a_dry_run_tells_what_the_fence_then_does_and_changes_nothing() -> None:
    fleet = two_hosts()
    at_work(fleet)
    silence(fleet, A)
    asked, events = fleet.ask("fence", target=A, dry_run=True), len(fleet.journal)
    fleet.tick()
    assert len(fleet.journal) == events
    done = fleet.ask("fence", target=A)
    fleet.tick()
    would, did = fleet.replies[asked].body["runs"], fleet.replies[done].body["runs"]
    assert would == [{**each, "successor": None} for each in did] and did[0]["hosts"] == [B]


def test_when_the_host_returns_nothing_is_placed_there_until_what_was_left_behind_has_ended() -> None:
    fleet = two_hosts(candidate("one"), candidate("big", host=B, memory_host_bytes=7 * GIB))
    at_work(fleet)
    silence(fleet, A)
    fleet.ask("fence", target=A)
    for _ in range(4):
        fleet.round(work=False)
    new_id = fleet.fleet.runs[fleet.run("one").run_id].successor
    assert new_id is not None and "fenced" in fleet.fleet.runs[new_id].detail, "the other host is full, this one is fenced"

    fleet.silent.discard(A)  # and its supervisor has not yet obeyed
    for _ in range(3):
        fleet.round(work=False)
    assert fleet.fleet.hosts[A].reachable and fleet.fleet.hosts[A].fenced is not None
    assert fleet.fleet.runs[new_id].host is None

    returns(fleet, A)
    host = fleet.hosts[A]
    host.is_watched = False  # its supervisor has left
    for _ in range(4):
        fleet.round(work=False)
    assert fleet.fleet.hosts[A].fenced is None and fleet.fleet.runs[new_id].host == A
    assert len(host.start_orders) == 2 and len({order.run_id for order in host.start_orders}) == 2


def test_a_fence_stands_until_the_host_was_told_what_it_has_to_end() -> None:
    """It may be fenced between the hello of its new agent and that agent's first answer, which then knows nothing of a run to come."""
    fleet = two_hosts()
    at_work(fleet)
    silence(fleet, A)
    fleet.ask("fence", target=A)
    fleet.tick()
    superseded = fleet.fleet.hosts[A].superseded
    for left_said, is_fenced in (((), True), (superseded, False)):
        fleet._news(HostAnswer(host=A, at=fleet.now, reports=(), left_said=left_said))
        fleet.tick()
        assert superseded and (fleet.fleet.hosts[A].fenced is not None) is is_fenced


def test_what_a_fenced_run_tells_later_never_brings_it_back() -> None:
    fleet = two_hosts()
    at_work(fleet)
    silence(fleet, A)
    fleet.ask("fence", target=A)
    fleet.round(work=False)
    old = fleet.run("one").run_id
    fleet.silent.discard(A)
    for _ in range(5):
        fleet.round()  # it had gone on all the time
    assert fleet.fleet.runs[old].state is RunState.FAILED and fleet.fleet.runs[old].reason is Reason.SUPERSEDED
    assert not any(order.run_id == old for order in fleet.hosts[A].start_orders[1:])


def test_a_run_that_was_to_stop_stays_stopped_and_a_resume_goes_on_in_a_new_run() -> None:
    fleet = two_hosts()
    at_work(fleet)
    silence(fleet, A)
    fleet.ask("stop", target="one")
    fleet.round(work=False)
    fleet.ask("fence", target=A)
    fleet.round(work=False)
    old = fleet.run("one")
    assert (old.state, old.successor) == (RunState.STOPPED, None)

    number = fleet.ask("resume", target="one")
    fleet.round(work=False)
    new_id = fleet.replies[number].body["runs"][0]
    assert new_id != old.run_id and fleet.fleet.runs[old.run_id].successor == new_id
    fleet.until(CampaignStage.EVALUATED)
    assert fleet.fleet.runs[new_id].host == B and len(fleet.hosts[A].start_orders) == 1


def test_work_without_a_copy_begins_anew_and_says_so() -> None:
    fleet = two_hosts(candidate("one", command=("sleep", "9"), task=None))
    fleet.until(CampaignStage.TRAINING)
    fleet.round(work=False)
    silence(fleet, A)
    number = fleet.ask("fence", target=A)
    fleet.round(work=False)
    told = fleet.replies[number].body["runs"][0]
    assert told["goes_on"] and told["from_step"] is None
    assert "from its beginning" in fleet.events("run_added")[-1].because


def test_a_copy_that_does_not_verify_is_no_beginning() -> None:
    fleet = two_hosts()
    at_work(fleet)
    fleet.failing["stage_seed"] = {"error": "CheckpointDamaged", "title": "the copy does not verify", "where": "store", "what": "rot", "fix": "-"}
    silence(fleet, A)
    fleet.ask("fence", target=A)
    for _ in range(12):
        fleet.round(work=False)
    refused = fleet.events("seed_refused")
    steps = [event.body["continues"]["step"] for event in refused]
    assert steps and steps == sorted(set(steps), key=lambda step: -1 if step is None else step, reverse=True) and steps[-1] is None
    assert fleet.campaign().stage is CampaignStage.TRAINING, "a damaged copy ends no campaign"
    new = fleet.fleet.runs[str(fleet.run("one").successor)]
    assert new.host == B and new.spec is not None and new.spec.continues is not None and new.spec.continues.step is None


def test_after_the_cutoff_a_fence_starts_nothing() -> None:
    fleet = two_hosts()
    at_work(fleet)
    fleet.silent.add(A)
    fleet.round(seconds=(fleet.campaign().cutoff_at - fleet.now).total_seconds() + 1, work=False)
    number = fleet.ask("fence", target=A)
    fleet.round(work=False)
    told = fleet.replies[number].body["runs"]
    assert [(each["becomes"], each["goes_on"]) for each in told] == [("finished", False)]
    fleet.until(CampaignStage.FROZEN)


def test_an_evaluation_cut_off_by_a_fence_is_looked_at_again_under_the_same_opening() -> None:
    fleet = two_hosts(after_freeze=AfterFreeze(evaluate=(Split.TEST,)))
    fleet.until(CampaignStage.FROZEN)
    for _ in range(6):
        fleet.round(work=False)
    first = fleet.run("evaluate-test")
    assert first.host is not None
    silence(fleet, first.host)
    fleet.ask("fence", target=first.host)
    fleet.until(CampaignStage.EVALUATED)
    second = fleet.fleet.runs[str(fleet.fleet.runs[first.run_id].successor)]
    assert second.state is RunState.FINISHED and second.host != first.host
    assert len(fleet.campaign().openings) == 1


def test_history_with_a_fence_replays_to_the_same_fleet_and_the_verdict_needs_nobody() -> None:
    fleet = two_hosts()
    at_work(fleet)
    silence(fleet, A)
    fleet.ask("fence", target=A)
    for _ in range(4):
        fleet.round(work=False)
    before = fleet.fleet
    sight = fleet.board.take(fleet.news, fleet.now, "ok")
    assert judge(fleet.fleet, sight, fleet.now, "ok").word == "OK"
    fleet.crash()
    assert fleet.fleet == before


def test_a_drained_host_takes_no_new_run_and_what_runs_there_goes_on() -> None:
    fleet = two_hosts(candidate("one"), candidate("later", memory_host_bytes=7 * GIB))
    at_work(fleet)
    number = fleet.ask("drain", target=A, because="a fan rattles")
    fleet.round(work=False)
    assert fleet.replies[number].body["runs"] == [fleet.run("one").run_id]
    again = fleet.ask("drain", target=A)
    for _ in range(20):
        fleet.round()
    assert "drained already" in refusal(fleet, again)["title"]
    assert fleet.run("one").state is RunState.FINISHED
    later = fleet.run("later")
    assert later.state is RunState.QUEUED and "it is drained" in later.detail

    fleet.ask("undrain", target=A)
    fleet.until(CampaignStage.EVALUATED)
    assert fleet.run("later").state is RunState.FINISHED
    assert [event.kind for event in fleet.events() if event.kind.endswith("drained")] == ["host_drained", "host_undrained"]


@pytest.mark.parametrize("target", [A, "one"])
def test_a_stuck_host_takes_no_new_run_until_a_person_has_cleared_it(target: str) -> None:
    fleet = two_hosts(*(candidate(name, memory_host_bytes=3 * GIB) for name in ("one", "filler", "later")))
    at_work(fleet)
    fleet.hosts[A].move(fleet.run("one").run_id, RunState.STUCK, fleet.now, Reason.USER, "SIGKILL did not end the tree")
    for _ in range(12):
        fleet.round()
    assert (fleet.run("one").state, fleet.run("filler").state) == (RunState.STUCK, RunState.FINISHED)
    assert fleet.run("later").state is RunState.QUEUED and "stuck there" in fleet.run("later").detail

    fleet.ask("clear", target=target, because="a dead NFS mount; the disk is another one")
    for _ in range(4):
        fleet.round(work=False)
    one = fleet.run("one")
    assert one.state is RunState.STUCK and one.cleared is not None and fleet.run("later").host == A
    assert len([order for order in fleet.hosts[A].start_orders if order.run_id == one.run_id]) == 1, "never a second trainer beside its remains"
    assert fleet.hosts[A].wants[one.run_id].want is Want.RUN
    nothing = fleet.ask("clear", target=target)
    fleet.round(work=False)
    assert "cleared already" in refusal(fleet, nothing)["what"]


def test_a_run_that_gets_stuck_again_has_to_be_cleared_again() -> None:
    fleet = two_hosts()
    at_work(fleet)
    host, run_id = fleet.hosts[A], fleet.run("one").run_id
    host.move(run_id, RunState.STUCK, fleet.now, Reason.USER)
    fleet.round(work=False)
    fleet.ask("clear", target="one")
    fleet.round(work=False)
    assert fleet.run("one").cleared is not None
    host.move(run_id, RunState.HELD, fleet.now, Reason.USER)
    fleet.round(work=False)
    assert fleet.run("one").cleared is None


def test_a_host_that_nobody_knows_is_named_with_those_that_are_known() -> None:
    fleet = two_hosts()
    fleet.round()
    for verb in ("drain", "undrain", "fence"):
        number = fleet.ask(verb, target="gx11")
        fleet.round(work=False)
        assert fleet.replies[number].exit_code == 4 and A in refusal(fleet, number)["what"]
