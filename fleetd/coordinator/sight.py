"""What one tick of the coordinator looks at, and what it concludes: the two ends of `decide`.

    inbox, sessions, workers ──► Sight ──► decide(fleet, sight, now) ──► Decision ──► journal, then acts

A Sight is a frozen snapshot: news since the last tick, and what the loop holds in memory about hosts, orders and jobs. Nothing in
it is history; whatever must survive a restart is an event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleetd.campaign import HostPlan, Plan
from fleetd.fleet import Event, Fleet
from fleetd.model import HostFacts, Observation, Owner, RunReport

SKEWS_COUNTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Somebody's wish through the API: launch, stop, resume or open. Answered exactly once."""

    number: int
    kind: str
    body: dict[str, Any]
    received_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """One answer of a host to `poll`."""

    host: str
    received_at: datetime
    at: datetime
    memory_available_bytes: int | None
    disk_free_bytes: int | None
    reports: tuple[RunReport, ...]
    after: dict[str, int] = field(default_factory=dict)
    """What was asked for: notices of each run after this one."""
    left_said: tuple[str, ...] | None = None
    """The left behind runs that the host had been told of before; None where nobody noted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work for a worker thread. Equal keys are the same work: asked for again as long as the fleet's state calls for it."""

    key: str
    kind: str
    campaign_id: str
    run_id: str | None = None
    host: str | None = None
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDone:
    """How a job ended: a result, or an error as `ExplainedError.to_json` gives it. `is_final`: trying again can't help."""

    job: Job
    result: dict[str, Any] = field(default_factory=dict)
    error: dict[str, str] | None = None
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One order to a host's agent, sent until answered; `key` names what its answer acknowledges."""

    key: str
    host: str
    order: str
    run_id: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderDone:
    order: Order
    error: dict[str, str] | None = None
    answer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A job or an order that failed and is tried again after a while."""

    count: int
    last_at: datetime
    error: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSight:
    """A host as the loop sees it now. Every measurement has its moment; None was never measured."""

    plan: HostPlan
    asked_since: datetime
    answered_at: datetime | None = None
    facts: HostFacts | None = None
    facts_at: datetime | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    measured_at: datetime | None = None
    trouble: dict[str, str] | None = None
    skews: tuple[float, ...] = ()
    """How far its wall clock was ahead of ours, in seconds, at its last few answers."""
    reports: tuple[RunReport, ...] | None = None
    """The runs of its last answer to a poll, without their notices; None before the first one."""
    asked: frozenset[str] = frozenset()
    """The runs that it was asked for by that poll: of these it told also what is at rest."""

    @property
    def skew_seconds(self) -> float | None:
        """The smallest of the last few: an answer that was long under way looks like a clock that is behind. None until there are enough."""
        return min(self.skews, key=abs) if len(self.skews) >= SKEWS_COUNTED else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    owner: Owner
    python: str
    """The interpreter of trainers whose host names none: the coordinator's own."""
    requests: tuple[Request, ...] = ()
    polls: tuple[Poll, ...] = ()
    jobs_done: tuple[JobDone, ...] = ()
    orders_done: tuple[OrderDone, ...] = ()
    hosts: dict[str, HostSight] = field(default_factory=dict)
    observations: dict[str, Observation] = field(default_factory=dict)
    observed_at: dict[str, datetime] = field(default_factory=dict)
    """When each look was taken, by the coordinator's clock."""
    jobs_running: frozenset[str] = frozenset()
    job_troubles: dict[str, Trouble] = field(default_factory=dict)
    orders_in_flight: frozenset[str] = frozenset()
    order_troubles: dict[str, Trouble] = field(default_factory=dict)
    acknowledged: frozenset[str] = frozenset()
    """Keys of orders that are in force on their hosts by their own answer, since this coordinator started."""
    journal_health: str = "ok"
    history_cut_at: int = 0
    """Up to which event a salvage kept the history; 0 where it is whole. Others may go by what came after it."""
    forgotten: dict[str, Plan] = field(default_factory=dict)
    """Campaigns that the journal has lost and whose directories were put aside: their hosts are asked what still runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The answer to one request: a body, or an error with its HTTP meaning (exit code)."""

    number: int
    body: dict[str, Any] = field(default_factory=dict)
    error: dict[str, str] | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Events first, then acts. Everything but `events` can be lost and is concluded again from the fleet."""

    fleet: Fleet
    events: tuple[Event, ...] = ()
    hosts: tuple[HostPlan, ...] = ()
    """Hosts that need a session."""
    jobs: tuple[Job, ...] = ()
    orders: tuple[Order, ...] = ()
    replies: tuple[Reply, ...] = ()
    kept: tuple[Request, ...] = ()
    """Requests that wait for a fact, and come back in the next sight."""
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line of JSON for a plan's notify command."""

    command: tuple[str, ...]
    body: dict[str, Any]
