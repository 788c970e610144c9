"""The one loop of the coordinator: take the news, decide, write it down, carry it out. It alone reads the clock.

    APScheduler ── tick each half second ──┐
    inbox ──────── news ───────────────────┴─► tick: drain → Board → Sight → decide → journal → Fleet → acts

Acts that begin something (start orders, jobs, acknowledgements of notices) need the durable record; orders to stop and replies go
out in any case, since no trouble with a disk may keep a stop from a host.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from apscheduler.schedulers.background import BackgroundScheduler

from fleetd import clock, faults, logs
from fleetd.campaign import HostPlan, Plan
from fleetd.coordinator.board import Board
from fleetd.coordinator.couriers import Courier
from fleetd.coordinator.decide import decide
from fleetd.coordinator.decide_hosts import acknowledgements
from fleetd.coordinator.inbox import HostAnswer, Inbox, News
from fleetd.coordinator.links import HostLink
from fleetd.coordinator.sessions import Session
from fleetd.coordinator.sight import Decision, Job, JobDone, Message, Sight
from fleetd.fleet import Event, Fleet, apply
from fleetd.journal import SALVAGED, Journal
from fleetd.kept_clock import KeptClock
from fleetd.model import Owner
from fleetd.wire import decode, dumps, encode
from policies.deadlines import ClockPair
from policies.errors import ExplainedError, HostKeyRefused, HostUnreachable, LoginRefused, NoRoom
from policies.facts import format_moment

TICK_SECONDS = 0.5
WAIT_SECONDS_MAX = 2.0
"""A tick comes at the latest after this, even if the scheduler is late."""
WORKERS = 4
WORKERS_PER_HOST = 3
"""A host at the end of a slow line holds its own: neither another host's copies nor the choice wait behind what it sends."""
MESSAGE_SECONDS_MAX = 20.0
PASSING = (HostUnreachable, HostKeyRefused, LoginRefused, NoRoom)
"""What keeps a job from being done now, and will not for ever."""
BEGINNINGS = frozenset({"start", "displace", "restore"})
"""Orders that need the durable record first."""
CLOSE_SECONDS_MAX = 3.0
REPLAY_ENTRIES = 10_000

JobRunner = Callable[[Job, Fleet, dict[str, Session], datetime], dict[str, Any]]
SessionMaker = Callable[[HostPlan, Owner], Session]


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The last finished tick, whole and immutable: what every reader of the API sees."""

    fleet: Fleet
    sight: Sight
    at: datetime
    boottime_seconds: float
    journal_health: str
    clock_alarm: str = ""


class Loop:
    def __init__(
        self, journal: Journal, owner: Owner, *, python: str, make_session: SessionMaker, run_job: JobRunner,
        forgotten: Callable[[Fleet], dict[str, Plan]] = lambda fleet: {}, kept_clock: KeptClock | None = None,
        came_round: Callable[[Published], None] = lambda seen: None,
    ) -> None:
        self.inbox = Inbox()
        self._journal, self._owner = journal, owner
        self._make_session, self._run_job, self._came_round = make_session, run_job, came_round
        self._links: dict[str, HostLink] = {}
        self._after: dict[str, dict[str, int]] = {}
        self._left_behind: dict[str, tuple[str, ...]] = {}
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="job")
        self._workers_by_host: dict[str, ThreadPoolExecutor] = {}
        self._scheduler = BackgroundScheduler(daemon=True)
        self._leaving = threading.Event()
        self._fleet = replay_journal(journal)
        self._board = Board(owner, python, forgotten(self._fleet), journal.state_get(SALVAGED, 0))
        self._kept_clock = kept_clock or KeptClock()
        self._clock_alarm = ""
        self.published: Published | None = None

    def run(self, *, actor: str = "coordinator") -> None:
        """Tick until `stop`. Leaves every run on every host alone."""
        self._record("coordinator_started", {"generation": self._owner.generation}, actor)
        self._scheduler.add_job(self.inbox.wake, "interval", seconds=TICK_SECONDS, max_instances=1, coalesce=True)
        self._scheduler.start()
        try:
            while not self._leaving.is_set():
                self.tick()
                self.inbox.wait(WAIT_SECONDS_MAX)
        finally:
            self._scheduler.shutdown(wait=False)
            for link in self._links.values():
                link.close(0.0)
            for link in self._links.values():
                link.close(CLOSE_SECONDS_MAX)
            for workers in (self._workers, *self._workers_by_host.values()):
                workers.shutdown(wait=False, cancel_futures=True)
        self._record("coordinator_stopped", {}, actor)

    def stop(self) -> None:
        self._leaving.set()
        self.inbox.wake()

    def tick(self) -> None:
        """One look, one decision, its record, its acts."""
        moment = self._moment()
        self._journal.retry()
        news = self.inbox.drain()
        if self._journal.is_crowded:
            news = without_reports(news)
        sight = self._board.take(news, moment.now, self._journal.health)
        decision = decide(self._fleet, sight, moment.now)
        self._write_down(decision)
        faults.after("tick recorded")
        # Before the acts: a job that writes a report must find in it what led to the job.
        self.published = Published(
            fleet=self._fleet, sight=sight, at=moment.now, boottime_seconds=moment.boottime_seconds, journal_health=self._journal.health,
            clock_alarm=self._clock_alarm,
        )
        self._act(decision, moment.now)
        self._came_round(self.published)

    def session(self, host: str) -> Session | None:
        """The session of a host, for readers of its files."""
        link = self._links.get(host)
        return link.session if link is not None else None

    def courier(self, host: str) -> Courier | None:
        """The courier of a host, for another one that takes a tree from it."""
        session = self.session(host)
        return session.courier if session is not None else None

    @property
    def owner(self) -> Owner:
        """Who this coordinator is to hosts."""
        return self._owner

    def open_session(self, plan: HostPlan) -> Session:
        """A session beside the host's own, for one errand. Whoever opens it closes it."""
        return self._make_session(plan, self._owner)

    def _now(self) -> datetime:
        """The time as the last tick judged it, counted on: for the threads, which read no wall clock."""
        trusted = self._kept_clock.trusted
        assert trusted is not None, "a tick came before every link"
        return trusted.now + timedelta(seconds=clock.boottime_seconds() - trusted.boottime_seconds)

    def _moment(self) -> ClockPair:
        """What time it is. The wall clock is followed as long as it only drifts; after a step the counted boottime rules, and status says so."""
        read = clock.read()
        time = self._kept_clock.judge(ClockPair(now=read.now, boottime_seconds=read.boottime_seconds))
        wall, counted, path = format_moment(read.now), format_moment(time.now), self._kept_clock.path
        if time.alarm is not None and not self._clock_alarm:
            logs.failed("clock_stepped", wall=wall, counted=counted)
        fix = "correct it" if path is None else f"correct it; if it is right as it is: end the coordinator, rm {path}, start it again"
        self._clock_alarm = f"the wall clock was stepped to {wall}, counted is {counted}; {fix}" if time.alarm is not None else ""
        return ClockPair(now=time.now, boottime_seconds=read.boottime_seconds)

    def _write_down(self, decision: Decision) -> None:
        if decision.events:
            self._journal.append([encode(event) for event in decision.events])
        for event in decision.events:
            logs.changed(event.kind, sequence=event.sequence, campaign=event.campaign_id, run=event.run_id, host=event.host, because=event.because)
        self._fleet = decision.fleet

    def _act(self, decision: Decision, now: datetime) -> None:
        is_durable = self._journal.is_durable
        if is_durable:
            self._left_behind = {host.name: host.superseded for host in self._fleet.hosts.values() if host.fenced is not None}
            self._after = acknowledgements(self._fleet)  # before a link begins: its first poll asks for every run that a host may have
        for plan in decision.hosts:
            self._reach(plan, now)
        self._leave_hosts(decision)
        for order in decision.orders:
            link = self._links.get(order.host)
            if link is not None and (is_durable or order.order not in BEGINNINGS) and link.send(order):
                self._board.order_sent(order)
        for job in decision.jobs if is_durable else ():
            self._board.job_started(job)
            self._workers_for(job).submit(self._work, job, self._fleet, now)
        self._board.keep(tuple(request for request in decision.kept if self.inbox.is_awaited(request)))
        for reply in decision.replies:
            self.inbox.answer(reply)
        for message in decision.messages:
            self._workers.submit(_tell, message)

    def _reach(self, plan: HostPlan, now: datetime) -> None:
        self._board.see(plan, now)
        if plan.name not in self._links:
            link = HostLink(
                plan, self._make_session(plan, self._owner), self.inbox, lambda host: self._after.get(host, {}),
                lambda host: self._left_behind.get(host, ()), self._now,
            )
            self._links[plan.name] = link
            link.start()

    def _leave_hosts(self, decision: Decision) -> None:
        """Let go of hosts that neither a campaign nor a waiting launch needs; readers of old runs use their copies."""
        needed = {plan.name for plan in decision.hosts}
        for name in [name for name in self._links if name not in needed]:
            self._links.pop(name).close(0.0)
            self._board.hosts.pop(name, None)

    def _workers_for(self, job: Job) -> ThreadPoolExecutor:
        if job.host is None:
            return self._workers
        if job.host not in self._workers_by_host:
            self._workers_by_host[job.host] = ThreadPoolExecutor(WORKERS_PER_HOST, thread_name_prefix=f"job-{job.host}")
        return self._workers_by_host[job.host]

    def _work(self, job: Job, fleet: Fleet, now: datetime) -> None:
        """One job on a worker thread. Whatever happens, the loop hears of its end."""
        sessions = {name: link.session for name, link in dict(self._links).items()}
        try:
            result = self._run_job(job, fleet, sessions, now)
            faults.after(f"{job.kind} done")
        except ExplainedError as fault:
            self.inbox.put_job(JobDone(job=job, error=fault.to_json(), is_final=type(fault) not in PASSING))
        except OSError as fault:
            fix = "free space or mend permissions there; it is tried again by itself"
            found = ExplainedError(f"{job.kind} can't be done now", where=str(fault.filename or job.key), what=str(fault), fix=fix)
            self.inbox.put_job(JobDone(job=job, error=found.to_json()))
        except Exception as fault:  # our mistake in one job must not take the loop and every other campaign with it
            logs.logger.exception("event=job_crashed job=%s", job.key)
            found = ExplainedError(f"{job.kind} broke down", where=job.key, what=repr(fault), fix="report this with daemon.log")
            self.inbox.put_job(JobDone(job=job, error=found.to_json(), is_final=True))
        else:
            self.inbox.put_job(JobDone(job=job, result=result))

    def _record(self, kind: str, body: dict[str, Any], actor: str) -> None:
        event = Event(sequence=self._fleet.sequence + 1, at=self._moment().now, kind=kind, actor=actor, body=body)
        self._journal.append([encode(event)])
        self._fleet = apply(self._fleet, event)
        logs.changed(kind, sequence=event.sequence, **body)


def without_reports(news: News) -> News:
    """The news without what hosts tell of their runs. They tell it again until it is acknowledged; what finds no room in memory is gone."""
    hosts = tuple(replace(each, reports=None) if isinstance(each, HostAnswer) else each for each in news.hosts)
    return replace(news, hosts=hosts)


def replay_journal(journal: Journal) -> Fleet:
    """The fleet that the whole journal adds up to."""
    fleet = Fleet()
    while entries := journal.entries(after=fleet.sequence, limit=REPLAY_ENTRIES):
        for entry in entries:
            fleet = apply(fleet, decode(Event, entry))
    return fleet


def _tell(message: Message) -> None:
    """Run a notify command with one line of JSON on its standard input. Its failure is logged and changes nothing."""
    try:
        done = subprocess.run(
            message.command, input=(dumps(message.body) + "\n").encode(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            timeout=MESSAGE_SECONDS_MAX, check=False,
        )
        if done.returncode != 0:
            logs.failed("notify_failed", command=message.command[0], status=done.returncode, stderr=done.stderr[-300:].decode(errors="replace"))
    except (OSError, subprocess.TimeoutExpired) as fault:
        logs.failed("notify_failed", command=message.command[0], what=str(fault))
