"""What the loop holds in memory between ticks: how hosts were last seen, and which orders and jobs are under way or failed.

None of it is history. A restarted coordinator begins with an empty board and learns it again from hosts and fleet.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from fleetd.campaign import HostPlan, Plan
from fleetd.coordinator.delivery import is_in_force
from fleetd.coordinator.inbox import HostAnswer, HostTrouble, News
from fleetd.coordinator.sight import SKEWS_COUNTED, HostSight, Job, JobDone, Order, OrderDone, Poll, Request, Sight, Trouble
from fleetd.model import Observation, Owner, RunReport

ACKNOWLEDGED_MAX = 50_000
TROUBLES_MAX = 5_000
AGE_SECONDS_MAX = 10 * 365 * 86400.0
"""What a host says beyond that is nonsense, and must not lead out of the calendar."""


class Board:
    def __init__(self, owner: Owner, python: str, forgotten: dict[str, Plan] | None = None, history_cut_at: int = 0) -> None:
        self._owner, self._python, self._forgotten, self._history_cut_at = owner, python, forgotten or {}, history_cut_at
        self.hosts: dict[str, HostSight] = {}
        self.observations: dict[str, Observation] = {}
        self._observed_at: dict[str, datetime] = {}
        self._jobs_running: set[str] = set()
        self._orders_in_flight: set[str] = set()
        self._job_troubles: dict[str, Trouble] = {}
        self._order_troubles: dict[str, Trouble] = {}
        self._acknowledged: dict[str, None] = {}
        self._kept: tuple[Request, ...] = ()

    def take(self, news: News, now: datetime, journal_health: str) -> Sight:
        """Fold the news in, and look."""
        polls = tuple(poll for poll in (self._take_host(each, now) for each in news.hosts) if poll is not None)
        for job in news.jobs:
            self._take_job(job, now)
        for order in news.orders:
            self._take_order(order, now)
        fresh = tuple(Request(number=number, kind=kind, body=body, received_at=now) for number, kind, body in news.asked)
        kept, self._kept = self._kept, ()
        return Sight(
            owner=self._owner, python=self._python, requests=(*kept, *fresh), polls=polls, jobs_done=news.jobs, orders_done=news.orders,
            hosts=dict(self.hosts), observations=dict(self.observations), observed_at=dict(self._observed_at),
            jobs_running=frozenset(self._jobs_running),
            job_troubles=dict(self._job_troubles), orders_in_flight=frozenset(self._orders_in_flight),
            order_troubles=dict(self._order_troubles), acknowledged=frozenset(self._acknowledged), journal_health=journal_health,
            forgotten=self._forgotten, history_cut_at=self._history_cut_at,
        )

    def keep(self, requests: tuple[Request, ...]) -> None:
        self._kept = requests

    def see(self, plan: HostPlan, now: datetime) -> None:
        """A session with this host begins now; or its plan changed."""
        known = self.hosts.get(plan.name)
        if known is None:
            self.hosts[plan.name] = HostSight(plan=plan, asked_since=now)
        elif known.plan != plan:
            self.hosts[plan.name] = replace(known, plan=plan)

    def job_started(self, job: Job) -> None:
        self._jobs_running.add(job.key)

    def order_sent(self, order: Order) -> None:
        self._orders_in_flight.add(order.key)

    def _take_host(self, news: HostAnswer | HostTrouble, now: datetime) -> Poll | None:
        host = self.hosts.get(news.host)
        if host is None:
            return None
        if isinstance(news, HostTrouble):
            self.hosts[news.host] = replace(host, trouble=news.error)
            return None
        host = replace(
            host, answered_at=now, trouble=None, measured_at=now, memory_available_bytes=news.memory_available_bytes,
            disk_free_bytes=news.disk_free_bytes,
        )
        if news.skew_seconds is not None:
            host = replace(host, skews=(*host.skews, news.skew_seconds)[-SKEWS_COUNTED:])
        if news.facts is not None:
            host = replace(host, facts=news.facts, facts_at=now)
        self.hosts[news.host] = host
        if news.reports is None:
            return None
        told = tuple(replace(report, notices=(), retold=()) for report in news.reports)
        self.hosts[news.host] = replace(host, reports=told, asked=frozenset(news.after))
        for report in news.reports:
            if report.observation is not None:
                self._take_observation(report.observation, now - timedelta(seconds=_age_seconds(report, news.at)))
        return Poll(
            host=news.host, received_at=now, at=news.at or now, memory_available_bytes=news.memory_available_bytes,
            disk_free_bytes=news.disk_free_bytes, reports=news.reports, after=news.after, left_said=news.left_said,
        )

    def _take_observation(self, look: Observation, seen_at: datetime) -> None:
        """Keep the newest look of each run; `seen_at` is its moment on our clock, whatever the host's clock says."""
        known_at = self._observed_at.get(look.run_id)
        if known_at is None or seen_at >= known_at:
            self.observations[look.run_id], self._observed_at[look.run_id] = look, seen_at

    def _take_job(self, done: JobDone, now: datetime) -> None:
        self._jobs_running.discard(done.job.key)
        _note(self._job_troubles, done.job.key, done.error, now)

    def _take_order(self, done: OrderDone, now: datetime) -> None:
        self._orders_in_flight.discard(done.order.key)
        _note(self._order_troubles, done.order.key, done.error, now)
        if is_in_force(done):
            self._acknowledged[done.order.key] = None
            while len(self._acknowledged) > ACKNOWLEDGED_MAX:
                del self._acknowledged[next(iter(self._acknowledged))]


def _age_seconds(report: RunReport, told_at: datetime | None) -> float:
    """How old a look was when its host told of it: as the host counted, else by the host's wall clock."""
    assert report.observation is not None
    if report.look_age_seconds is not None:
        age_seconds = report.look_age_seconds
    else:
        age_seconds = 0.0 if told_at is None else (told_at - report.observation.at).total_seconds()
    return min(max(0.0, age_seconds), AGE_SECONDS_MAX)


def _note(troubles: dict[str, Trouble], key: str, error: dict[str, str] | None, now: datetime) -> None:
    if error is None:
        troubles.pop(key, None)
        return
    earlier = troubles.get(key)
    troubles[key] = Trouble(count=earlier.count + 1 if earlier else 1, last_at=now, error=error)
    while len(troubles) > TROUBLES_MAX:
        del troubles[next(iter(troubles))]
