"""A salvaged history does not know any more where its runs were placed. No second host may start one, and what people ask still reaches it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from virtual_fleet import VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import HostPlan
from fleetd.fleet import Campaign
from policies.facts import GIB, CampaignStage, Reason, RunState, Split, Want

A, B = "gx10", "spark-b"
PILOT = {"steps": 400, "window": 128, "pilot": {"steps": 20}}


def at_work(*candidates: object) -> VirtualCoordinator:
    """Two hosts, and candidates of `any` host that were placed and are told of."""
    fleet = VirtualCoordinator(VirtualHost(A), VirtualHost(B))
    hosts = tuple(HostPlan(name=name, root=f"/virtual/{name}", capacity_bytes=8 * GIB) for name in (A, B))
    fleet.launch(plan(*(candidates or (candidate("one", host="any"),)), hosts=hosts))  # type: ignore[arg-type]
    fleet.tick()
    for _ in range(6):
        fleet.round(work=False)
    return fleet


def lose(fleet: VirtualCoordinator, first: str) -> None:
    """History ends before its first event of this kind, and a new coordinator reads what is left."""
    fleet.restore(next(index for index, line in enumerate(fleet.journal) if f'"kind":"{first}"' in line))
    assert all(run.host is None for run in fleet.fleet.runs.values())


def without_digest(campaign: Campaign, split: Split) -> Campaign:
    return replace(campaign, digests={name: digest for name, digest in campaign.digests.items() if name != split.value})


def starts(fleet: VirtualCoordinator, name: str) -> list[str]:
    return [host.name for host in fleet.hosts.values() if any(spec.candidate == name for spec in host.specs.values())]


@pytest.mark.parametrize("first", ["data_staged", "run_placed"])
def test_a_run_that_its_host_tells_of_is_taken_over_at_once_in_whatever_stage_its_campaign_is(first: str) -> None:
    fleet = at_work()
    placed_on = fleet.run("one").host
    lose(fleet, first)
    fleet.round(work=False)

    assert (fleet.run("one").host, fleet.run("one").state) == (placed_on, RunState.STARTING)
    assert fleet.campaign().stage is CampaignStage.TRAINING, "a run of it was placed, so it had been staged"
    fleet.until(CampaignStage.EVALUATED)
    assert starts(fleet, "one") == [placed_on]


def test_a_run_that_another_hosts_word_lets_start_is_not_given_to_a_second_one() -> None:
    """Found as seed 9019: in one tick a host told of the run, the pilot was judged passed, and the run was placed on the emptier host."""
    fleet = at_work(candidate("pilot", host=A, task=PILOT, memory_host_bytes=3 * GIB), candidate("plain", host="any"))
    fleet.hosts[A].tell(fleet.run("pilot").run_id, "pilot", fleet.now, step=20, passed=True, because="said so")
    for _ in range(2):
        fleet.round(work=False)
    placed_on = fleet.run("plain").host
    lose(fleet, "run_placed")
    for _ in range(3):
        fleet.round(work=False)

    assert placed_on == B and fleet.run("plain").host == B
    assert starts(fleet, "plain") == [B]


def test_a_run_whose_order_cannot_be_read_where_it_is_goes_nowhere_else() -> None:
    fleet = at_work()
    placed_on = fleet.run("one").host
    assert placed_on is not None
    lose(fleet, "run_placed")
    host, run_id = fleet.hosts[placed_on], fleet.run("one").run_id
    spec = host.specs.pop(run_id)
    host.specs = {run_id: None}  # type: ignore[dict-item]
    for _ in range(3):
        fleet.round(work=False)
    assert fleet.run("one").state is RunState.QUEUED and f"waits for host {placed_on}" in fleet.run("one").detail
    host.specs[run_id] = spec
    fleet.round(work=False)
    assert fleet.run("one").host == placed_on


def test_a_stop_reaches_a_run_that_its_host_tells_of_only_later_and_a_resume_starts_it_there_again() -> None:
    """Found as seed 477595599: the stop went to a host on which history had not placed the run, and a resume would have been lost."""
    fleet = at_work()
    placed_on = fleet.run("one").host
    assert placed_on is not None
    fleet.silent.add(placed_on)
    lose(fleet, "data_staged")
    stop = fleet.ask("stop", target="all", mode="graceful")
    fleet.tick()
    run_id, host = fleet.run("one").run_id, fleet.hosts[placed_on]
    assert fleet.replies[stop].body["runs"] == [run_id] and fleet.run("one").state is RunState.STOPPED
    assert host.states[run_id] is RunState.STARTING, "it has heard nothing yet"

    fleet.silent.clear()
    for _ in range(6):
        fleet.round()
    assert (host.states[run_id], host.wants[run_id].want) == (RunState.STOPPED, Want.STOP)
    assert (fleet.run("one").host, fleet.run("one").state, fleet.campaign().stage) == (placed_on, RunState.STOPPED, CampaignStage.STOPPED)

    fleet.ask("resume", target="one")
    for _ in range(6):
        fleet.round()
    assert host.wants[run_id].want is Want.RUN
    fleet.until(CampaignStage.EVALUATED)
    assert starts(fleet, "one") == [placed_on] and not fleet.fleet.stranger_wants


def test_a_resume_in_this_life_does_not_make_a_run_one_that_no_earlier_life_can_have_placed() -> None:
    fleet = at_work()
    placed_on = fleet.run("one").host
    assert placed_on is not None
    fleet.silent.add(placed_on)
    lose(fleet, "run_placed")
    for verb in ("stop", "resume"):
        fleet.ask(verb, target="one")
        fleet.tick()
    for _ in range(5):
        fleet.round(work=False)
    assert fleet.run("one").host is None and f"waits for host {placed_on}: it has not told yet" in fleet.run("one").detail
    fleet.silent.clear()
    fleet.until(CampaignStage.EVALUATED)
    assert starts(fleet, "one") == [placed_on] and fleet.run("one").host == placed_on


def test_a_run_that_came_to_rest_on_its_host_is_asked_for_also_when_it_is_stopped_here() -> None:
    fleet = at_work()
    fleet.ask("stop", target="one", mode="graceful")
    for _ in range(6):
        fleet.round()
    placed_on = fleet.run("one").host
    lose(fleet, "run_placed")
    fleet.ask("stop", target="one", mode="graceful")
    fleet.tick()
    fleet.round()
    fleet.ask("resume", target="one")
    fleet.until(CampaignStage.EVALUATED)
    assert starts(fleet, "one") == [placed_on]


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_fenced_host_that_may_have_an_unplaced_run_has_to_end_it_and_the_work_goes_on_in_a_new_run(is_stopped: bool) -> None:
    fleet = at_work()
    placed_on = fleet.run("one").host
    assert placed_on is not None
    fleet.silent.add(placed_on)
    lose(fleet, "run_placed")
    run_id = fleet.run("one").run_id
    if is_stopped:
        fleet.ask("stop", target="one")
    fleet.round(seconds=31.0, work=False)
    fleet.round(work=False)
    asked = fleet.ask("fence", target=placed_on, because="no light is on")
    fleet.tick()

    [told] = fleet.replies[asked].body["runs"]
    assert (told["run_id"], told["goes_on"]) == (run_id, not is_stopped)
    assert fleet.fleet.hosts[placed_on].superseded == (run_id,), "what its hello has to end"
    if is_stopped:
        fleet.ask("resume", target=run_id)
        fleet.tick()
    old = fleet.fleet.runs[run_id]
    assert (old.state, old.reason, old.successor) == (RunState.FAILED, Reason.SUPERSEDED, f"{run_id}-2")
    for _ in range(4):
        fleet.round(work=False)
    other = next(name for name in (A, B) if name != placed_on)
    assert fleet.fleet.runs[f"{run_id}-2"].host == other and run_id not in fleet.hosts[other].specs, "one id never lives on two hosts"


def unplaced_between_two_silent_hosts() -> tuple[VirtualCoordinator, str, str, str]:
    """The fleet, the run that history has placed nowhere, the host that has it, and another one that may have it for all that history knows."""
    fleet = at_work()
    has_it = fleet.run("one").host
    assert has_it is not None
    fleet.silent.update((A, B))
    lose(fleet, "run_placed")
    fleet.round(seconds=31.0, work=False)
    fleet.round(work=False)
    return fleet, fleet.run("one").run_id, has_it, next(name for name in (A, B) if name != has_it)


def fence(fleet: VirtualCoordinator, host: str) -> list[str]:
    asked = fleet.ask("fence", target=host, because="no light is on")
    fleet.tick()
    return [told["run_id"] for told in fleet.replies[asked].body["runs"]]


def test_a_fence_of_one_of_two_silent_hosts_leaves_the_run_to_the_one_that_has_it() -> None:
    """Found as seed 879776423: its work began again in a new run beside it, on the very host that had it all the time."""
    fleet, run_id, has_it, other = unplaced_between_two_silent_hosts()
    assert fence(fleet, other) == [] and fleet.fleet.hosts[other].may_have == (run_id,)
    fleet.round(work=False)
    assert f"waits for host {has_it}: it has not told yet" in fleet.run("one").detail
    fleet.silent.clear()
    for _ in range(4):
        fleet.round(work=False)
    assert fleet.run("one").host == has_it and fleet.fleet.hosts[other].fenced is None and not fleet.fleet.hosts[other].may_have
    fleet.until(CampaignStage.EVALUATED)
    assert [*fleet.fleet.runs] == [run_id, fleet.run("evaluate-test").run_id], "nothing was begun a second time"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_no_other_host_has_is_left_behind_on_the_fenced_one_that_may_have_it(is_stopped: bool) -> None:
    fleet, run_id, has_it, other = unplaced_between_two_silent_hosts()
    if is_stopped:
        fleet.ask("stop", target="one")
        fleet.tick()
    assert fence(fleet, has_it) == []
    fleet.crash()
    fleet.silent.discard(other)
    for _ in range(4):
        fleet.round(work=False)
    assert fleet.fleet.hosts[has_it].superseded == (run_id,) and fleet.fleet.runs[run_id].left_behind
    if is_stopped:
        fleet.ask("resume", target=run_id)
        for _ in range(4):
            fleet.round(work=False)
    assert fleet.fleet.runs[f"{run_id}-2"].host == other and run_id not in fleet.hosts[other].specs


def test_where_every_host_that_may_have_it_is_fenced_each_of_them_has_to_end_it() -> None:
    fleet, run_id, has_it, other = unplaced_between_two_silent_hosts()
    assert (fence(fleet, has_it), fence(fleet, other)) == ([], [run_id])
    assert [fleet.fleet.hosts[name].superseded for name in (has_it, other)] == [(run_id,), (run_id,)]
    assert fleet.fleet.runs[run_id].successor is not None


def test_an_evaluation_whose_data_history_has_lost_as_well_needs_no_order_where_it_is() -> None:
    fleet = at_work()
    fleet.until(CampaignStage.FROZEN)
    while not starts(fleet, "evaluate-test"):
        fleet.round(work=False)
    [placed_on] = starts(fleet, "evaluate-test")
    fleet.restore(max(index for index, line in enumerate(fleet.journal) if '"kind":"run_added"' in line) + 1)
    run = fleet.run("evaluate-test")
    assert run.host is None and Split.TEST.value not in {role for host in fleet.campaign().staged for role in host.split(":")}
    fleet.fleet = replace(fleet.fleet, campaigns={run.campaign_id: without_digest(fleet.campaign(), Split.TEST)})
    fleet.hosts[placed_on].notices[run.run_id] = []
    for _ in range(3):
        fleet.round(work=False)
    assert fleet.run("evaluate-test").host == placed_on and starts(fleet, "evaluate-test") == [placed_on]


def test_a_fence_from_before_a_cut_of_history_may_have_fallen_and_has_to_be_said_again() -> None:
    fleet = at_work(candidate("one", host=A), candidate("two", host="any", memory_host_bytes=7 * GIB))
    placed_on = fleet.run("two").host
    assert placed_on == B
    lose(fleet, "run_placed")
    fleet.silent.add(B)
    fleet.round(seconds=31.0, work=False)
    fleet.round(work=False)
    fleet.ask("fence", target=B, because="no light is on")
    fleet.tick()
    successor = fleet.fleet.runs[f"{fleet.run('two').run_id}-2"].run_id
    kept = len(fleet.journal)
    fleet.silent.clear()
    fleet.hosts[B].is_watched = False
    fleet.hosts[B].move(fleet.run("two").run_id, RunState.STOPPED, fleet.now, Reason.SUPERSEDED)
    for _ in range(8):
        fleet.round(work=False)
    assert fleet.fleet.hosts[B].fenced is None and fleet.fleet.runs[successor].host == B, "the fence fell, and the work goes on right there"

    fleet.restore(kept)
    fleet.silent.add(B)
    for _ in range(4):
        fleet.round(seconds=15.0, work=False)
    assert fleet.fleet.hosts[B].fenced is not None and fleet.fleet.runs[successor].host is None
    assert f"waits for host {B}: it has not told yet" in fleet.fleet.runs[successor].detail
    asked = fleet.ask("fence", target=B, because="it is still dark")
    fleet.tick()
    assert [told["run_id"] for told in fleet.replies[asked].body["runs"]] == [successor]
    assert {fleet.run("two").run_id, successor} <= {*fleet.fleet.hosts[B].superseded}
    refused = fleet.ask("fence", target=B, because="once more")
    fleet.tick()
    assert "fenced already" in (fleet.replies[refused].error or {})["title"]


@pytest.mark.parametrize("is_at_rest", [False, True])
def test_a_run_that_is_added_again_under_an_id_which_the_lost_part_had_used_waits_for_whoever_may_have_it(is_at_rest: bool) -> None:
    fleet = at_work()
    fleet.until(CampaignStage.FROZEN)
    while not starts(fleet, "evaluate-test"):
        fleet.round(work=False)
    [placed_on] = starts(fleet, "evaluate-test")
    run_id = fleet.run("evaluate-test").run_id
    if is_at_rest:
        fleet.hosts[placed_on].move(run_id, RunState.FAILED, fleet.now, Reason.CONFIG, "it can't be read")
    fleet.silent.add(placed_on)
    fleet.restore(max(index for index, line in enumerate(fleet.journal) if '"kind":"run_added"' in line))
    assert fleet.run("evaluate-test").added_at == fleet.now, "this life has added it, under the id of before"
    for _ in range(5):
        fleet.round(work=False)
    assert fleet.run("evaluate-test").run_id == run_id and fleet.run("evaluate-test").host is None
    assert f"waits for host {placed_on}: it has not told yet" in fleet.run("evaluate-test").detail
    fleet.silent.clear()
    for _ in range(4):
        fleet.round(work=False)
    assert fleet.run("evaluate-test").host == placed_on and starts(fleet, "evaluate-test") == [placed_on]
    assert fleet.run("evaluate-test").state is (RunState.FAILED if is_at_rest else RunState.STARTING)
