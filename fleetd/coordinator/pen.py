"""The pen of one `decide`: it writes events onto a working fleet, so that each rule sees what the rules before it concluded.

Local to one call, never kept: from outside, `decide` stays a function of its arguments.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.sight import Decision, Job, Message, Order, Reply, Request, Sight, Trouble
from fleetd.coordinator.targets import runs_by_host
from fleetd.fleet import Campaign, Event, Fleet, Run, apply
from policies.errors import ExplainedError
from policies.facts import CampaignStage, Reason, RunState
from policies.lifecycle import CAMPAIGN_TRANSITIONS, RUN_TRANSITIONS

RETRY_SECONDS_FIRST = 1.0
RETRY_SECONDS_MAX = 60.0


class Pen:
    def __init__(self, fleet: Fleet, sight: Sight, now: datetime) -> None:
        self.fleet, self.sight, self.now = fleet, sight, now
        self._by_host: tuple[Fleet, dict[str, list[Run]]] | None = None
        self._events: list[Event] = []
        self._hosts: dict[str, HostPlan] = {}
        self._jobs: dict[str, Job] = {}
        self._orders: dict[str, Order] = {}
        self._replies: list[Reply] = []
        self._kept: list[Request] = []
        self._messages: list[Message] = []

    def decision(self) -> Decision:
        return Decision(
            fleet=self.fleet, events=tuple(self._events), hosts=tuple(self._hosts.values()), jobs=tuple(self._jobs.values()),
            orders=tuple(self._orders.values()), replies=tuple(self._replies), kept=tuple(self._kept), messages=tuple(self._messages),
        )

    def write(
        self, kind: str, body: dict[str, Any] | None = None, *, campaign: str | None = None, run: str | None = None, host: str | None = None,
        actor: str = "coordinator", because: str = "",
    ) -> None:
        """Conclude one event. It counts from here on for every later rule of this tick."""
        if run is not None and campaign is None and run in self.fleet.runs:
            campaign = self.fleet.runs[run].campaign_id
        event = Event(
            sequence=self.fleet.sequence + 1, at=self.now, kind=kind, campaign_id=campaign, run_id=run, host=host, actor=actor,
            because=because, body=body or {},
        )
        self.fleet = apply(self.fleet, event)
        self._events.append(event)

    def run(self, run_id: str) -> Run:
        return self.fleet.runs[run_id]

    def runs_on(self, host: str) -> list[Run]:
        """The runs that are placed there. Looked for once as long as nothing is written, since many rules ask about each host in turn."""
        if self._by_host is None or self._by_host[0] is not self.fleet:
            self._by_host = self.fleet, runs_by_host(self.fleet)
        return self._by_host[1].get(host, [])

    def campaign(self, campaign_id: str) -> Campaign:
        return self.fleet.campaigns[campaign_id]

    def may_move(self, run_id: str, to: RunState) -> bool:
        return to in RUN_TRANSITIONS[self.run(run_id).state]

    def move_run(
        self, run_id: str, to: RunState, because: str, *, reason: Reason | None = None, actor: str = "coordinator", notice: int | None = None
    ) -> None:
        body: dict[str, Any] = {"from": self.run(run_id).state.value, "to": to.value, "reason": reason.value if reason else None}
        if notice is not None:
            body["notice"] = notice
        self.write("run_moved", body, run=run_id, host=self.run(run_id).host, actor=actor, because=because)

    def may_stage(self, campaign_id: str, to: CampaignStage) -> bool:
        return to in CAMPAIGN_TRANSITIONS[self.campaign(campaign_id).stage]

    def move_campaign(self, campaign_id: str, to: CampaignStage, because: str, *, actor: str = "coordinator") -> None:
        body = {"from": self.campaign(campaign_id).stage.value, "to": to.value}
        self.write("campaign_moved", body, campaign=campaign_id, actor=actor, because=because)

    def need_host(self, plan: HostPlan) -> None:
        self._hosts.setdefault(plan.name, plan)

    def start(self, job: Job) -> None:
        """Ask for a job, unless it is under way or rests after a failure."""
        if job.key not in self.sight.jobs_running and not self._rests(self.sight.job_troubles.get(job.key)):
            self._jobs.setdefault(job.key, job)

    def send(self, order: Order) -> None:
        """Send an order, unless it is acknowledged, under way, or rests after a failure."""
        if order.key in self.sight.acknowledged or order.key in self.sight.orders_in_flight:
            return
        if not self._rests(self.sight.order_troubles.get(order.key)):
            self._orders.setdefault(order.key, order)

    def answer(self, request: Request, body: dict[str, Any]) -> None:
        self._replies.append(Reply(number=request.number, body=body))

    def refuse(self, request: Request, error: ExplainedError) -> None:
        self._replies.append(Reply(number=request.number, error=error.to_json(), exit_code=error.exit_code))
        body = {"request": request.kind, **error.to_json()}
        self.write("request_refused", body, actor=str(request.body.get("actor", "user")), because=error.what)

    def keep(self, request: Request) -> None:
        self._kept.append(request)

    def tell(self, message: Message) -> None:
        self._messages.append(message)

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    def _rests(self, trouble: Trouble | None) -> bool:
        if trouble is None:
            return False
        wait_seconds = min(RETRY_SECONDS_FIRST * 2.0 ** min(trouble.count - 1, 16), RETRY_SECONDS_MAX)
        return self.now < trouble.last_at + timedelta(seconds=wait_seconds)
