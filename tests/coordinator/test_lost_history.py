"""A coordinator that knows less than its hosts: its state directory was restored from an older copy, or its journal salvaged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import HostPlan
from fleetd.coordinator.board import Board
from fleetd.coordinator.document import Daemon, build
from fleetd.coordinator.inbox import News
from fleetd.coordinator.tidying import forgotten_campaigns
from fleetd.fleet import Event, Fleet, replay
from fleetd.model import Caps, Owner, RunSpec, WantOrder
from fleetd.paths import StatePaths
from fleetd.wire import decode, dumps
from policies.facts import GIB, CampaignStage, RunKind, RunState, Want, format_moment


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
    taken, stop = fleet.events("want_changed")[-2:]
    assert taken.actor == "host:gx10" and "order 3 of user:test holds on gx10; history had lost it" in taken.because
    assert (stop.actor, stop.because) == ("user:test", "stop graceful")
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
    assert (lost.body["from"], lost.body["to"]) == (seen + 1, before.notices_seen)
    assert f"gx10 does not have what came after notice {seen} any more" in lost.because
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


@pytest.mark.parametrize("to", [RunState.RUNNING, RunState.FAILED])
def test_a_run_that_is_held_here_and_was_resumed_there_follows_its_host(to: RunState) -> None:
    fleet = VirtualCoordinator()
    host = fleet.hosts["gx10"]
    host.forgets = True
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round(work=False)
    run_id = fleet.run("low").run_id
    host.move(run_id, RunState.HELD, fleet.now)
    for _ in range(3):
        fleet.round(work=False)
    copied = len(fleet.journal)
    fleet.ask("resume", target="low")
    for _ in range(3):
        fleet.round(work=False)
    host.move(run_id, to, fleet.now)
    for _ in range(3):
        fleet.round(work=False)
    fleet.restore(copied)
    assert fleet.run("low").state is RunState.HELD
    for _ in range(8):
        fleet.round(work=False)
    assert fleet.run("low").state is to


def test_a_stop_that_only_the_host_still_knows_of_holds_although_no_order_is_due() -> None:
    """The history that is left ends between the placing of the run and its start; the host was given both, and a stop."""
    fleet = VirtualCoordinator()
    fleet.hosts["gx10"].forgets = True
    fleet.launch(plan(candidate("low")))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round(work=False)
    fleet.ask("stop", target="low", mode="graceful")
    for _ in range(4):
        fleet.round()
    assert fleet.run("low").state is RunState.STOPPED
    fleet.restore(next(event.sequence for event in fleet.events("run_placed")))
    for _ in range(8):
        fleet.round(work=False)
    run = fleet.run("low")
    assert run.want is not None and (run.want.want, run.want.sequence) == (Want.STOP, 2)
    assert run.state is RunState.STOPPED and fleet.campaign().stage is CampaignStage.STOPPED


def test_a_run_that_may_go_anywhere_waits_until_every_host_has_said_that_it_does_not_have_it() -> None:
    """Its placing is lost with the end of history, and the host that has it is silent when the coordinator begins again."""
    hosts = tuple(HostPlan(name=name, root=f"/virtual/{name}", capacity_bytes=8 * GIB) for name in ("gx10", "spark"))
    fleet = VirtualCoordinator(VirtualHost("gx10"), VirtualHost("spark"))
    fleet.launch(plan(candidate("low", host="any"), hosts=hosts))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    for _ in range(3):
        fleet.round(work=False)
    placed = fleet.run("low").host
    fleet.silent.add(str(placed))
    fleet.restore(next(event.sequence for event in fleet.events("run_placed")) - 1)
    for _ in range(60):
        fleet.round(work=False)
    assert fleet.run("low").state is RunState.QUEUED and f"waits for host {placed}" in fleet.run("low").detail
    fleet.silent.clear()
    for _ in range(4):
        fleet.round(work=False)
    assert fleet.run("low").host == placed and sum(len(host.specs) for host in fleet.hosts.values()) == 1


def to_the_end(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.EVALUATED)


def stopped_and_resumed(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.ask("stop", target="all")
    fleet.until(CampaignStage.STOPPED)
    fleet.ask("resume", target="all")
    fleet.until(CampaignStage.EVALUATED)


def with_a_pilot(fleet: VirtualCoordinator) -> None:
    fleet.until(CampaignStage.PILOT)
    fleet.round()
    fleet.ask("stop", target="all")
    fleet.until(CampaignStage.STOPPED)
    fleet.ask("resume", target="all")
    fleet.until(CampaignStage.PILOT)
    fleet.round()
    fleet.hosts["gx10"].tell(fleet.run("low").run_id, "pilot", fleet.now, step=20, passed=True, because="it reloads")
    fleet.until(CampaignStage.EVALUATED)


def nothing_to_choose(fleet: VirtualCoordinator) -> None:
    fleet.selection = {"because": "no candidate is eligible", "checkpoint_digest": None, "table": []}
    fleet.until(CampaignStage.FAILED)


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("story", [to_the_end, stopped_and_resumed, with_a_pilot, nothing_to_choose])
def test_wherever_history_was_cut_short_it_goes_on_to_the_same_end(story: Callable[[VirtualCoordinator], None], *, forgets: bool) -> None:
    """Between any two events, also of one tick: a salvage keeps what comes before the first entry that can't be read."""
    told = VirtualCoordinator()
    told.hosts["gx10"].forgets = forgets
    task = {"steps": 400, "window": 128, **({"pilot": {"steps": 20}} if story is with_a_pilot else {})}
    told.launch(plan(candidate("low", task=task)))
    told.tick()
    story(told)
    end, launched = told.campaign().stage, next(event.sequence for event in told.events("run_added"))
    for kept in range(launched, len(told.journal)):
        fleet = copy.deepcopy(told)
        fleet.restore(kept)
        resumed = False
        for _ in range(40):
            fleet.round()
            if fleet.campaign().stage is CampaignStage.STOPPED and not resumed:
                fleet.ask("resume", target="all")  # of the stop, but not of the resume, history still tells
                resumed = True
        what = f"after event {kept}, {told.events()[kept - 1].kind}: {fleet.campaign().detail}"
        assert (fleet.campaign().stage, fleet.run("low").state) == (end, RunState.FINISHED), what


def forget_everything(fleet: VirtualCoordinator) -> str:
    """A campaign of the same machine survives in history, a later one and its running run do not. Returns the id of that run."""
    copied = len(fleet.journal)
    fleet.launch(plan(candidate("lost"), name="second", plan_sha256="ef" * 32))
    for _ in range(8):
        fleet.round(work=False)
    host, run_id = fleet.hosts["gx10"], fleet.run("lost").run_id
    host.move(run_id, RunState.RUNNING, fleet.now)
    fleet.round(work=False)
    fleet.restore(copied)
    for _ in range(3):
        fleet.round(work=False)
    assert run_id not in fleet.fleet.runs
    return run_id


def document_of(fleet: VirtualCoordinator) -> dict[str, Any]:
    daemon = Daemon(pid=1, id="c0ffee", generation=fleet.generation, started_at=fleet.now, paths=StatePaths(Path("/virtual/state")))
    return build(fleet.fleet, fleet.board.take(News(), fleet.now, "ok"), daemon, now=fleet.now, journal_health="ok")


def test_a_run_that_nobody_here_knows_is_shown_and_needs_you(fleet: VirtualCoordinator) -> None:
    run_id = forget_everything(fleet)
    document = document_of(fleet)

    assert document["verdict"]["word"] == "NEEDS YOU"
    assert document["verdict"]["text"].startswith(f"gx10 has a run that nobody here knows: {run_id}, pid 4711, running")
    assert f"(fleetd stop {run_id})" in document["verdict"]["text"]
    shown = document["hosts"][0]["unknown_runs"]
    assert [(run["run_id"], run["candidate"], run["want"]) for run in shown] == [(run_id, "lost", "run")]


def test_the_memory_of_an_unknown_run_is_not_handed_out_a_second_time() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan(candidate("small", memory_host_bytes=GIB)))
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.round(work=False)
    copied = len(fleet.journal)
    again = plan(candidate("lost", memory_host_bytes=5 * GIB), name="second", plan_sha256="ef" * 32)
    fleet.launch(again)
    for _ in range(8):
        fleet.round(work=False)
    assert len(fleet.hosts["gx10"].specs) == 2
    fleet.restore(copied)
    fleet.now += timedelta(seconds=5)
    fleet.launch(again)
    for _ in range(8):
        fleet.round(work=False)

    run = fleet.run("lost")
    assert run.state is RunState.QUEUED and "unknown here" in run.detail, run.detail
    assert len(fleet.hosts["gx10"].specs) == 2, "no second copy was started"


@pytest.mark.parametrize("target", ["its id", "all"])
def test_an_unknown_run_stops_when_it_is_asked_to(fleet: VirtualCoordinator, target: str) -> None:
    run_id = forget_everything(fleet)
    host = fleet.hosts["gx10"]
    number = fleet.ask("stop", target=run_id if target == "its id" else "all", mode="graceful")
    fleet.tick()
    assert run_id in fleet.replies[number].body["runs"]
    fleet.crash()
    fleet.tick()
    for _ in range(4):
        fleet.round()

    assert host.states[run_id] is RunState.STOPPED and host.wants[run_id].sequence == 2, "asked for once, also by a coordinator that died"
    assert host.wants[run_id].actor == "user:test" and fleet.events("stranger_want_changed")[0].run_id == run_id
    assert (host.states[fleet.run("low").run_id] is RunState.STOPPED) == (target == "all")


def test_a_run_that_was_placed_in_the_lost_part_of_history_is_not_placed_again() -> None:
    fleet = VirtualCoordinator()
    host = fleet.hosts["gx10"]
    host.forgets = True
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    copied = next(index for index, line in enumerate(fleet.journal) if '"kind":"run_placed"' in line)
    for _ in range(3):
        fleet.round()
    fleet.restore(copied)
    assert fleet.run("low").host is None
    fleet.until(CampaignStage.EVALUATED)

    assert len([spec for spec in host.start_orders if spec.candidate == "low"]) == 1, "the host has it; it was never ordered again"
    assert fleet.run("low").state is RunState.FINISHED and not fleet.events("order_refused")
    assert "history had lost it" in next(event.because for event in fleet.events("run_placed") if event.run_id == fleet.run("low").run_id)


def test_the_hosts_of_a_campaign_that_was_put_aside_without_history_are_still_asked(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path)
    for name in ("forgotten", "broken", "empty"):
        (paths.set_aside / name).mkdir(parents=True)
    (paths.set_aside / "forgotten" / "campaign.json").write_text(dumps(plan()))
    (paths.set_aside / "broken" / "campaign.json").write_text("{")
    found = forgotten_campaigns(paths)(Fleet())
    fleet = VirtualCoordinator()
    fleet.board = Board(Owner(coordinator_id="c0ffee", generation=2), "/usr/bin/python3", found)
    fleet.tick()
    host = fleet.hosts["gx10"]
    spec = RunSpec(
        run_id="forgotten-low", campaign_id="forgotten", candidate="low", kind=RunKind.TRAIN, owner=Owner(coordinator_id="c0ffee", generation=1),
        created_at=fleet.now, argv=("train",), environment={}, release_digest="r", caps=Caps(host_bytes=1, accelerator_bytes=0, floor_bytes=0),
        deadline=None,
    )
    host.specs[spec.run_id], host.notices[spec.run_id], host.states[spec.run_id] = spec, [], RunState.RUNNING
    host.wants[spec.run_id] = WantOrder(sequence=1, want=Want.RUN, actor="coordinator", at=fleet.now)
    fleet.round(work=False)

    assert set(found) == {"forgotten"}, "what can't be read names no host"
    assert document_of(fleet)["verdict"]["text"].startswith("gx10 has a run that nobody here knows: forgotten-low")
