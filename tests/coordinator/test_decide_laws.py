"""Laws of the coordinator's judgement, for any order of news, losses, repetitions, crashes and wishes.

Each story is a list of acts drawn by hypothesis; a failing one is printed as the acts that lead to it.
"""

from __future__ import annotations

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from virtual_fleet import VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import HostPlan
from fleetd.coordinator.targets import is_over
from fleetd.fleet import Event, Fleet, apply, replay
from fleetd.wire import decode
from policies.errors import DataDamaged, HostUnreachable
from policies.facts import GIB, CampaignStage, Reason, RunState
from policies.lifecycle import FINAL

ACTS = (
    "round", "round", "round", "tick", "hear", "work", "carry", "jobs", "lose_polls", "lose_answers", "repeat_polls", "old_polls", "crash", "silence",
    "speech", "stop", "stop_now", "resume", "job_trouble", "job_recovery", "time", "long_time", "fail_run", "hold_run", "second_launch",
)
WORLD_ERROR = HostUnreachable("away", where="x", what="y", fix="z").to_json()


class Story:
    """One fleet under a list of acts; everything that must hold is checked after each."""

    def __init__(self, *, trains: bool) -> None:
        self.fleet = VirtualCoordinator(VirtualHost("gx10"), VirtualHost("spark"))
        hosts = (HostPlan(name="gx10", root="/g", capacity_bytes=6 * GIB), HostPlan(name="spark", root="/s", capacity_bytes=5 * GIB))
        self.plan = plan(candidate("low"), candidate("high", host="any"), candidate("own", host="spark", task=None, command=("train",)), hosts=hosts)
        self.fleet.launch(self.plan)
        if trains:
            self.fleet.until(CampaignStage.TRAINING)
        self.old = self.fleet.hosts["gx10"].answer({}, self.fleet.now)

    def act(self, name: str, choice: int) -> None:
        getattr(self, f"_{name}", lambda _: None)(choice)
        self.check()

    def check(self) -> None:
        fleet = self.fleet
        assert replay([decode(Event, json.loads(line)) for line in fleet.journal]) == fleet.fleet, "replay equals life"
        placed: dict[str, object] = {}
        for event in fleet.events("run_placed"):
            assert event.run_id is not None and event.run_id not in placed, "a run is placed at most once"
            placed[event.run_id] = event.body["spec"]
        for host in fleet.hosts.values():
            for spec in host.start_orders:
                assert spec.run_id in placed, "no start order without its recorded intent"
                assert fleet.fleet.runs[spec.run_id].host == host.name, "a run is never started on two hosts"
                assert fleet.fleet.runs[spec.run_id].spec == spec, "a start order never changes"
        self._notices()

    def _notices(self) -> None:
        seen: dict[str, int] = {}
        for event in self.fleet.events():
            if event.run_id is not None and "notice" in event.body:
                assert event.body["notice"] == seen.get(event.run_id, 0) + 1, "notices are journaled in order, each once"
                seen[event.run_id] = event.body["notice"]

    def _round(self, choice: int) -> None:
        self.fleet.round()

    def _tick(self, choice: int) -> None:
        self.fleet.tick()

    def _hear(self, choice: int) -> None:
        self.fleet.hear()

    def _carry(self, choice: int) -> None:
        self.fleet.carry()

    def _jobs(self, choice: int) -> None:
        self.fleet.do_jobs()

    def _work(self, choice: int) -> None:
        for host in self.fleet.hosts.values():
            for run_id in host.specs:
                host.work(run_id, self.fleet.now)

    def _lose_polls(self, choice: int) -> None:
        self.fleet.news = type(self.fleet.news)(asked=self.fleet.news.asked, jobs=self.fleet.news.jobs, orders=self.fleet.news.orders)

    def _lose_answers(self, choice: int) -> None:
        """Orders reach the host, their answers do not: the loop hears of a fault."""
        from fleetd.coordinator.sight import OrderDone

        lost = tuple(OrderDone(order=done.order, error=WORLD_ERROR) for done in self.fleet.news.orders)
        self.fleet.news = type(self.fleet.news)(asked=self.fleet.news.asked, hosts=self.fleet.news.hosts, jobs=self.fleet.news.jobs, orders=lost)

    def _repeat_polls(self, choice: int) -> None:
        for news in self.fleet.news.hosts:
            self.fleet._news(news)

    def _old_polls(self, choice: int) -> None:
        self.fleet._news(self.old)
        self.old = self.fleet.hosts["gx10"].answer({}, self.fleet.now)

    def _crash(self, choice: int) -> None:
        self.fleet.crash()

    def _silence(self, choice: int) -> None:
        self.fleet.silent.add(("gx10", "spark")[choice % 2])

    def _speech(self, choice: int) -> None:
        self.fleet.silent.clear()

    def _stop(self, choice: int) -> None:
        self.fleet.ask("stop", target=("all", "demo", "low", "own")[choice % 4], mode="graceful")

    def _stop_now(self, choice: int) -> None:
        self.fleet.ask("stop", target=("all", "high")[choice % 2], mode="now")

    def _resume(self, choice: int) -> None:
        self.fleet.ask("resume", target=("demo", "low", "high")[choice % 3])

    def _job_trouble(self, choice: int) -> None:
        kinds = ("preflight", "stage", "predictions", "checkpoint", "select", "freeze", "stage_evaluation", "collect", "judge", "report", "prune")
        kind = kinds[choice % len(kinds)]
        damaged = DataDamaged("broken", where="x", what="y", fix="z").to_json()
        self.fleet.failing[kind] = damaged if kind in ("predictions", "checkpoint") and choice % 2 else WORLD_ERROR

    def _job_recovery(self, choice: int) -> None:
        self.fleet.failing.clear()

    def _time(self, choice: int) -> None:
        self.fleet.now = self.fleet.now.__class__.fromtimestamp(self.fleet.now.timestamp() + 40, self.fleet.now.tzinfo)

    def _long_time(self, choice: int) -> None:
        if choice % 6 == 0:
            self.fleet.now = self.fleet.now.__class__.fromtimestamp(self.fleet.now.timestamp() + 6000, self.fleet.now.tzinfo)

    def _some_run(self, choice: int) -> tuple[VirtualHost, str] | None:
        live = [(host, run_id) for host in self.fleet.hosts.values() for run_id in host.specs if host.states[run_id] is RunState.RUNNING]
        return live[choice % len(live)] if live else None

    def _fail_run(self, choice: int) -> None:
        if found := self._some_run(choice):
            found[0].move(found[1], RunState.FAILED, self.fleet.now, Reason.CONFIG)

    def _hold_run(self, choice: int) -> None:
        if found := self._some_run(choice):
            found[0].move(found[1], RunState.HELD, self.fleet.now, Reason.EXIT_NONZERO)

    def _second_launch(self, choice: int) -> None:
        self.fleet.launch(self.plan)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 11)), min_size=10, max_size=60))
def test_history_is_consistent_whatever_happens_and_ends_when_the_faults_end(trains: bool, acts: list[tuple[str, int]]) -> None:
    story = Story(trains=trains)
    for name, choice in acts:
        story.act(name, choice)

    fleet = story.fleet
    fleet.silent.clear()
    fleet.failing.clear()
    fleet.orders.clear()  # what was under way is lost with the process
    fleet.crash()
    for _ in range(60):
        fleet.round(seconds=2.0)
    for run in [run for run in fleet.fleet.runs.values() if run.state is RunState.HELD]:
        fleet.ask("resume", target=run.run_id)
        fleet.round(seconds=2.0)
    for _ in range(30):
        fleet.round(seconds=2.0)
    for _ in range(3):
        fleet.round(seconds=3600.0)  # whatever rests is over when its deadline has passed
    for _ in range(60):
        fleet.round(seconds=3.0)
    story.check()
    for campaign in fleet.fleet.campaigns.values():
        states = [(run.candidate, run.state.value, run.detail) for run in fleet.fleet.runs.values()]
        assert is_over(campaign), f"{campaign.stage}: {campaign.detail}: {states}"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 11)), min_size=20, max_size=60))
def test_a_final_state_absorbs_every_later_event(acts: list[tuple[str, int]]) -> None:
    story = Story(trains=True)
    for name, choice in acts:
        story.act(name, choice)

    final: dict[str, RunState] = {}
    fleet = Fleet()
    for event in story.fleet.events():
        fleet = apply(fleet, event)
        for run in fleet.runs.values():
            assert final.get(run.run_id, run.state) is run.state
            if run.state in FINAL:
                final[run.run_id] = run.state
