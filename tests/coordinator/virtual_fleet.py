"""A coordinator without I/O: the real `decide` and Board, a virtual host that obeys orders, and jobs that succeed when told to.

Time is a number that the story moves on. `crash` throws everything away but the journal, as SIGKILL would.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

from fleetd.campaign import AfterFreeze, CandidatePlan, DataRole, HostPlan, Plan, ReserveTerms
from fleetd.coordinator.board import Board
from fleetd.coordinator.decide import decide
from fleetd.coordinator.decide_hosts import acknowledgements
from fleetd.coordinator.inbox import HostAnswer, HostTrouble, News
from fleetd.coordinator.sight import Job, JobDone, Order, OrderDone, Reply
from fleetd.fleet import Event, Fleet, Run, replay
from fleetd.model import CapPart, HostFacts, Notice, Observation, Owner, RunReport, RunSpec, WantOrder
from fleetd.wire import decode, dumps, encode
from policies.errors import ExplainedError, HostUnreachable
from policies.facts import GIB, CampaignStage, CapGrade, Reason, RunState, Split, Want, parse_moment
from policies.lifecycle import SETTLED

START = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
ROOT = "/virtual/gx10"


def candidate(name: str, **changes: Any) -> CandidatePlan:
    given: dict[str, Any] = {
        "name": name, "host": "gx10", "task": {"steps": 400, "window": 128}, "memory_host_bytes": 2 * GIB, "memory_accelerator_bytes": 2 * GIB,
    }
    return CandidatePlan(**{**given, **changes})


def plan(*candidates: CandidatePlan, **changes: Any) -> Plan:
    given: dict[str, Any] = {
        "name": "demo", "plan_sha256": "ab" * 32, "directory": "/virtual", "deadline_at": None, "deadline_seconds": 7200.0,
        "reserve": ReserveTerms(minimum_seconds=600.0, factor=1.3, margin_seconds=60.0),
        "hosts": (HostPlan(name="gx10", root=ROOT, capacity_bytes=8 * GIB),),
        "data": tuple(DataRole(split=split, path="shards", shard_split=word) for split, word in (
            (Split.TRAIN, "train"), (Split.VALIDATION, "val"), (Split.TEST, "test"))),
        "candidates": candidates or (candidate("low"), candidate("high")), "after_freeze": AfterFreeze(evaluate=(Split.TEST,)),
    }
    return Plan(**{**given, **changes})


class VirtualHost:
    """A host that keeps run directories, obeys orders idempotently, and remembers notices until they are acknowledged."""

    def __init__(self, name: str = "gx10", *, memory_bytes: int = 16 * GIB) -> None:
        self.name, self.memory_bytes = name, memory_bytes
        self.specs: dict[str, RunSpec] = {}
        self.wants: dict[str, WantOrder] = {}
        self.states: dict[str, RunState] = {}
        self.notices: dict[str, list[Notice]] = {}
        self.cutoffs: dict[str, str] = {}
        self.start_orders: list[RunSpec] = []
        self.boot_id = "boot-1"
        self.refuse_start: ExplainedError | None = None
        self.forgets = False
        """Whether notices are really dropped once they are acknowledged, as a supervisor does."""
        self.dropped: dict[str, int] = {}
        self.is_watched = True
        """Whether a supervisor lives for each of its runs."""
        self.cgroup = CapPart(grade=CapGrade.ENFORCED, means="cgroup v2: a hog died")

    def facts(self) -> HostFacts:
        return HostFacts(
            hostname=self.name, boot_id=self.boot_id, kernel="6.14", python="3.11", architecture="x86_64", cpu_count=2,
            memory_total_bytes=self.memory_bytes, memory_available_bytes=self.memory_bytes, disk_free_bytes=100 * GIB, root_writable=True,
            cap_means={"cgroup": self.cgroup},
        )

    def obey(self, order: Order, now: datetime) -> OrderDone:
        if order.order == "start":
            return self._start(order, now)
        if order.order == "want":
            want = decode(WantOrder, order.body["want"])
            is_higher = want.sequence > self.wants[order.run_id].sequence
            if is_higher:
                self._wish(order.run_id, want, now)
            held = self.wants[order.run_id]
            return OrderDone(order=order, answer={"applied": is_higher, "sequence": held.sequence, "want": encode(held)})
        asked, held_at = order.body["cutoff"]["cutoff_at"], self.cutoffs.get(order.run_id)
        is_earlier = held_at is None or parse_moment(asked) < parse_moment(held_at)
        if is_earlier:
            self.cutoffs[order.run_id] = asked
        return OrderDone(order=order, answer={"applied": is_earlier, "cutoff_at": self.cutoffs[order.run_id]})

    def _start(self, order: Order, now: datetime) -> OrderDone:
        spec = decode(RunSpec, json.loads(dumps(order.body["spec"])))
        self.start_orders.append(spec)
        if self.refuse_start is not None:
            return OrderDone(order=order, error=self.refuse_start.to_json())
        created = spec.run_id not in self.specs
        if created:
            self.specs[spec.run_id], self.notices[spec.run_id] = spec, []
            self.states[spec.run_id] = RunState.STARTING
            self.wants[spec.run_id] = decode(WantOrder, order.body["want"])
            if self.wants[spec.run_id].want is Want.STOP:
                self.move(spec.run_id, RunState.STOPPED, now, Reason.USER)
        assert self.specs[spec.run_id] == spec, "a second start order brought another spec"
        return OrderDone(order=order, answer={"created": created, "supervisor": "started"})

    def _wish(self, run_id: str, want: WantOrder, now: datetime) -> None:
        self.wants[run_id] = want
        state = self.states[run_id]
        if want.want is Want.STOP and state in (RunState.STARTING, RunState.RUNNING):
            self.move(run_id, RunState.STOPPING, now, Reason.USER)
        if want.want is Want.RUN and state in (RunState.STOPPED, RunState.HELD):
            self.move(run_id, RunState.STARTING, now)

    def tell(self, run_id: str, kind: str, now: datetime, **body: Any) -> None:
        notices = self.notices[run_id]
        notices.append(Notice(sequence=len(notices) + 1, at=now, kind=kind, body=body))

    def move(self, run_id: str, to: RunState, now: datetime, reason: Reason | None = None, detail: str = "") -> None:
        before, self.states[run_id] = self.states[run_id], to
        self.tell(run_id, "state_changed", now, **{"from": before.value, "to": to.value, "reason": reason and reason.value, "detail": detail})

    def work(self, run_id: str, now: datetime) -> None:
        """One stride of a run's life, as its supervisor would tell it."""
        state = self.states[run_id]
        if state is RunState.STARTING:
            self.tell(run_id, "attempt_started", now, attempt=1, pid=4711)
            self.move(run_id, RunState.RUNNING, now)
            self._validate(run_id, 0, now)
        elif state is RunState.RUNNING:
            done = sum(1 for notice in self.notices[run_id] if notice.kind == "validation")
            if done < 3:
                self._validate(run_id, done * 100, now)
            else:
                self._end(run_id, 0, now)
                self.move(run_id, RunState.FINISHED, now)
        elif state is RunState.STOPPING:
            self._end(run_id, 10, now)
            self.move(run_id, RunState.STOPPED, now, Reason.USER)

    def _end(self, run_id: str, code: int, now: datetime) -> None:
        self.tell(run_id, "attempt_ended", now, attempt=1, exit={"exit_code": code}, reason=None)

    def _validate(self, run_id: str, step: int, now: datetime) -> None:
        self.tell(run_id, "checkpoint", now, step=step, digest=f"{run_id}@{step}", bytes=1000)
        self.tell(run_id, "validation", now, step=step, value=9.0 - step / 100, rows=100, seconds=1.0, sha256=f"rows:{run_id}@{step}")

    def answer(self, after: dict[str, int], now: datetime) -> HostAnswer:
        reports = tuple(self._report(run_id, after.get(run_id, 0), now) for run_id in self.notices)
        return HostAnswer(host=self.name, at=now, memory_available_bytes=self.memory_bytes, disk_free_bytes=GIB, reports=reports, after=after)

    def _report(self, run_id: str, after: int, now: datetime) -> RunReport:
        """What is still there after `after`; of what was dropped before, the things that files still tell."""
        watched = "alive" if self.is_watched and self.states[run_id] not in SETTLED else "gone"  # it leaves with its last notice
        every, told = self.notices[run_id], RunReport(run_id=run_id, supervisor=watched, observation=self._look(run_id, now), notices=())
        dropped = self.dropped[run_id] = max(after, self.dropped.get(run_id, 0)) if self.forgets else 0
        told = replace(told, spec=self.specs[run_id] if after == 0 else None, want=self.wants[run_id])
        if dropped <= after:
            return replace(told, notices=tuple(every[after:]))
        kinds = ("attempt_started", "attempt_ended", "validation", "checkpoint", "pilot")
        retold = tuple(replace(notice, sequence=0) for notice in every if notice.kind in kinds)
        return replace(told, notices=tuple(every[dropped:]), notices_lost_to=dropped, retold=retold)

    def _look(self, run_id: str, now: datetime) -> Observation:
        return Observation(
            run_id=run_id, at=now, state=self.states[run_id], reason=None, detail="", attempt=1, pid=4711, identity="verified", step=7,
            grace_seconds=5.0,
        )


class VirtualCoordinator:
    """One tick after another over the real Board and decide; `journal` is what a disk would hold."""

    def __init__(self, *hosts: VirtualHost) -> None:
        self.hosts = {host.name: host for host in hosts or (VirtualHost(),)}
        self.journal: list[str] = []
        self.now = START
        self.generation = self.cut_at = 0
        self.silent: set[str] = set()
        self.failing: dict[str, dict[str, str]] = {}
        """Errors by kind of job: every such job fails with it."""
        self.selection: dict[str, Any] | None = None
        self.done_jobs: list[Job] = []
        self.replies: dict[int, Reply] = {}
        self._asked = 0
        self.crash()

    def crash(self) -> None:
        """SIGKILL and a new start: only the journal is left."""
        self.generation += 1
        self.fleet: Fleet = replay([decode(Event, json.loads(line)) for line in self.journal])
        self.board = Board(Owner(coordinator_id="c0ffee", generation=self.generation), "/usr/bin/python3", history_cut_at=self.cut_at)
        self.known: set[str] = set()
        self.jobs: list[Job] = []
        self.orders: list[Order] = []
        self.news = News()

    def restore(self, events: int) -> None:
        """Only the first `events` of history are left, as after a salvage or in an older copy of the state directory. Hosts know the rest."""
        self.journal, self.cut_at = self.journal[:events], events
        self.crash()
        self.tick()

    def ask(self, kind: str, **body: Any) -> int:
        self._asked += 1
        self.news = replace(self.news, asked=(*self.news.asked, (self._asked, kind, {"actor": "user:test", **body})))
        return self._asked

    def launch(self, what: Plan, **body: Any) -> int:
        return self.ask("launch", plan=encode(what), plan_text="name: demo", **body)

    def tick(self, seconds: float = 1.0) -> tuple[Event, ...]:
        self.now += timedelta(seconds=seconds)
        news, self.news = self.news, News()
        decision = decide(self.fleet, self.board.take(news, self.now, "ok"), self.now)
        self.journal += [dumps(event) for event in decision.events]
        self.fleet = decision.fleet
        for host in decision.hosts:
            self.board.see(host, self.now)
            self.known.add(host.name)
        for order in decision.orders:
            self.board.order_sent(order)
            self.orders.append(order)
        for job in decision.jobs:
            self.board.job_started(job)
            self.jobs.append(job)
        self.board.keep(decision.kept)
        self.replies.update({reply.number: reply for reply in decision.replies})
        return decision.events

    def hear(self) -> None:
        """Every host that is not silent answers a poll, and says hello first when the board does not know it."""
        for name in sorted(self.known):
            if name in self.silent or name not in self.hosts:
                self._news(HostTrouble(host=name, error=_unreachable(name)))
                continue
            seen = self.board.hosts.get(name)
            if seen is None or seen.facts is None:
                self._news(HostAnswer(host=name, facts=self.hosts[name].facts()))
            self._news(self.hosts[name].answer(acknowledgements(self.fleet).get(name, {}), self.now))

    def carry(self) -> None:
        """Deliver the orders that wait; a silent host answers none of them."""
        orders, self.orders = self.orders, []
        for order in orders:
            if order.host in self.silent:
                done = OrderDone(order=order, error=_unreachable(order.host))
            else:
                done = self.hosts[order.host].obey(order, self.now)
            self.news = replace(self.news, orders=(*self.news.orders, done))

    def do_jobs(self) -> None:
        jobs, self.jobs = self.jobs, []
        for job in jobs:
            error = self.failing.get(job.kind)
            done = JobDone(job=job, error=error, is_final=error is not None and error["error"] != "HostUnreachable") if error else self._done(job)
            self.news = replace(self.news, jobs=(*self.news.jobs, done))
            self.done_jobs.append(job)

    def round(self, seconds: float = 1.0, *, work: bool = True) -> None:
        """Everything once: hosts work and answer, orders and jobs are done, one tick."""
        if work:
            for host in self.hosts.values():
                for run_id in list(host.specs):
                    host.work(run_id, self.now)
        self.carry()
        self.do_jobs()
        self.hear()
        self.tick(seconds)

    def until(self, stage: CampaignStage, rounds_max: int = 60) -> None:
        for _ in range(rounds_max):
            is_last = stage in (CampaignStage.EVALUATED, CampaignStage.FAILED)
            if self.fleet.campaigns and self.campaign().stage is stage and (self.campaign().reported or not is_last):
                return
            self.round()
        states = [(run.candidate, run.state.value, run.detail) for run in self.fleet.runs.values()]
        raise AssertionError(f"still {self.campaign().stage}: {self.campaign().detail}; {states}; {self.board._job_troubles}")

    def campaign(self) -> Any:
        return next(iter(self.fleet.campaigns.values()))

    def run(self, name: str) -> Run:
        return next(run for run in self.fleet.runs.values() if run.candidate == name)

    def events(self, kind: str | None = None) -> list[Event]:
        events = [decode(Event, json.loads(line)) for line in self.journal]
        return [event for event in events if kind is None or event.kind == kind]

    def _news(self, news: HostAnswer | HostTrouble) -> None:
        self.news = replace(self.news, hosts=(*self.news.hosts, news))

    def _done(self, job: Job) -> JobDone:
        chosen = next((run for run in self.fleet.runs.values() if run.predictions), None)
        results: dict[str, dict[str, Any]] = {
            "stage_seed": {"digests": {}},
            "preflight": {"digests": {"train": "t" * 64, "validation": "v" * 64, "test": "e" * 64}, "rows": {"test": 100}},
            "stage": {"digests": {"release": "r" * 64}}, "predictions": {"value": 9.0}, "checkpoint": {}, "freeze": {"frozen_sha256": "f" * 64},
            "stage_evaluation": {"digests": {"test": "e" * 64}, "opening": {"split": "test", "number": 1}}, "collect": {"sha256": "p" * 64},
            "judge": {"result": {"rows": 100}}, "report": {"html": "report.html", "json": "report.json"}, "prune": {"removed": []},
        }
        if job.kind == "select":
            return JobDone(job=job, result=self.selection or {
                "because": "the lowest", "run_id": chosen and chosen.run_id, "candidate": chosen and chosen.candidate, "step": 200,
                "checkpoint_digest": "c" * 64, "base_checkpoint_digest": "b" * 64, "value": 7.0, "table": [],
            })
        return JobDone(job=job, result=results[job.kind])


def _unreachable(name: str) -> dict[str, str]:
    return HostUnreachable(f"host {name} does not answer", where=name, what="silence", fix="wait").to_json()
