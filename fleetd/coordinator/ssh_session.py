"""A session over SSH: the same JSON lines as over a local pipe, on one long-lived channel of one connection.

    connect ─► porter ─► release in place ─► the porter becomes the agent ─► orders and answers

Whatever goes wrong drops the connection, and with it everything that still waits on it; the next call begins again. A call that was
given up may still be carried out over there once the link heals: orders are idempotent for that reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from fleetd import faults, logs
from fleetd.campaign import HostPlan
from fleetd.coordinator.couriers import Courier
from fleetd.coordinator.deliveries import Deliveries
from fleetd.coordinator.ssh_courier import SshCourier
from fleetd.coordinator.ssh_road import AgentLine, SshRoad, start_agent
from fleetd.model import Owner
from policies.errors import ExplainedError, HostUnreachable

ESTABLISH_SECONDS_MAX = 90.0
"""For connection, login, release and agent together: a new host over a slow link takes its time, and nobody else waits for it."""
LAST_WORDS_SECONDS = 5.0
LAST_WORDS_BYTES = 600


class SshSession:
    """One host's agent over SSH. Used by one thread; its courier may be used by others meanwhile."""

    def __init__(
        self, plan: HostPlan, owner: Owner, *, stage: Callable[[Courier], str], deliveries: Deliveries | None = None,
        neighbour: Callable[[str], Courier | None] = lambda name: None,
    ) -> None:
        self._plan, self._stage = plan, stage
        self._road = SshRoad(plan, owner)
        self._ssh_courier = SshCourier(self._road, deliveries, neighbour)
        self.courier: Courier = self._ssh_courier
        self._agent: AgentLine | None = None

    def call(self, order: str, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        until_seconds = time.monotonic() + timeout_seconds
        is_fresh = self._agent is None
        if is_fresh:
            until_seconds = max(until_seconds, time.monotonic() + ESTABLISH_SECONDS_MAX)
            self._agent = self._establish(until_seconds)
        assert self._agent is not None
        try:
            connection = self._road.current()
            with connection.deadline(timeout_seconds if not is_fresh else until_seconds - time.monotonic(), order):
                answer = self._agent.ask(order, body, until_seconds)
            faults.after(f"{order} answered")
        except HostUnreachable as fault:
            words = self._last_words() if is_fresh else ""
            self._drop()
            if words:
                fault.what = f"{fault.what}; the end of its agent.log: {words}"
            raise
        return answer

    def close(self) -> None:
        """Leave the host for good, with everything that is on its way to it."""
        self._drop()
        self._ssh_courier.close()

    def _drop(self) -> None:
        """Give the connection up. Bulk has one of its own, and knows by itself when that is dead."""
        self._agent = None
        self._road.drop()  # first: nothing that is said to a dead host comes to an end before that
        self._ssh_courier.drop()

    def _establish(self, until_seconds: float) -> AgentLine:
        try:
            connection = self._road.connect(until_seconds)
            with connection.deadline(until_seconds - time.monotonic(), "start of the agent"):
                porter = self._road.porter(until_seconds)
                release = self._stage(self.courier)
                agent = start_agent(self._road, porter, release, until_seconds)
        except ExplainedError:
            self._drop()
            raise
        self._ssh_courier.release = release
        logs.changed("agent_started", host=self._plan.name, place=self._plan.place, release=release[:12])
        return agent

    def _last_words(self) -> str:
        """What an agent that would not live has left in its log. Nothing when there is no way to ask."""
        until_seconds = time.monotonic() + LAST_WORDS_SECONDS
        try:
            with self._road.current().deadline(LAST_WORDS_SECONDS, "last words"):
                porter = self._road.porter(until_seconds)
                text = str(porter.ask({"do": "tail", "path": "agent.log", "bytes": LAST_WORDS_BYTES}, until_seconds)["text"])
        except ExplainedError:
            return ""
        return " ".join(text.splitlines()[-1:])
