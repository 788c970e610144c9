"""The network between the coordinator and one host, and the coordinator's end of it. Mirrors fleetd/coordinator/links.py and sessions.py.

The thread of the real HostLink is a generator here: it yields a call or a pause, and is resumed with the answer or the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator import host_keys
from fleetd.coordinator.host_keys import HostKey, KnownKey, Marker
from fleetd.coordinator.inbox import HostAnswer, HostTrouble, Inbox
from fleetd.coordinator.links import (
    BACKOFF_SECONDS_FIRST,
    BACKOFF_SECONDS_MAX,
    CALL_SECONDS_MAX,
    FACTS_SECONDS,
    ORDERS_QUEUED_MAX,
    POLL_PAUSE_SECONDS,
)
from fleetd.coordinator.sight import Order, OrderDone
from fleetd.model import HostFacts, Owner
from fleetd.wire import PROTOCOL, decode
from policies.errors import ExplainedError, HostUnreachable, from_json
from policies.facts import format_moment, parse_moment
from tests.sim.agent import VirtualAgent
from tests.sim.machine import Machine
from tests.sim.world import World

HURRY_SECONDS = 0.5
HELD_SECONDS = (20.0, 300.0)
REFUSED_SECONDS = 0.2
"""A host without power does not even take the connection."""


@dataclass
class Network:
    """The road to one host."""

    machine: Machine
    is_cut: bool = False
    delay_seconds: tuple[float, float] = (0.001, 0.02)
    loss: float = 0.0
    repeat: float = 0.0
    holds_start: Callable[[], None] | None = None
    """What happens when the next order to start is held up on its way: it comes minutes later, and nobody hears of it."""
    impostor: HostKey | None = None
    """The key of whoever answers at this address in place of the host."""

    @property
    def shown_key(self) -> HostKey:
        return self.impostor or self.machine.key

    @property
    def is_open(self) -> bool:
        return not self.is_cut and self.impostor is None and self.machine.is_up

    def loses(self, world: World) -> bool:
        return not self.is_open or (self.loss > 0 and world.chance(self.loss))


@dataclass(frozen=True)
class Call:
    order: str
    body: dict[str, Any]
    timeout_seconds: float


@dataclass(frozen=True)
class Pause:
    seconds: float


def known_keys(machine: Machine) -> tuple[KnownKey, ...]:
    """What known_hosts says of a host: its key, and the one that was stolen, which somebody revoked and did not take out."""
    file, lines = Path("/virtual/known_hosts"), ((machine.key, Marker.KNOWN), (machine.old_key, Marker.KNOWN), (machine.old_key, Marker.REVOKED))
    return tuple(KnownKey(key=key, marker=marker, file=file, line=number) for number, (key, marker) in enumerate(lines, 1))


class VirtualSession:
    """One host's agent as one life of the coordinator speaks to it. `courier` is the machine: jobs copy from it."""

    def __init__(self, world: World, network: Network, owner: Owner) -> None:
        self.world, self.network, self.owner = world, network, owner
        self.courier = network
        self._known_keys = known_keys(network.machine)
        self.agent: VirtualAgent | None = None

    def call(self, call: Call, resume: Any) -> None:
        """Send, and resume with the answer, or with an error once the time is up."""
        world, network = self.world, self.network
        is_done = [False]

        def finish(answer: dict[str, Any]) -> None:
            if not is_done[0]:
                is_done[0] = True
                timer.call_off()
                resume(answer)

        def arrive(agent: VirtualAgent, answer: Any) -> None:
            if network.machine.is_up and agent.is_alive:
                agent.carry_out(call.order, call.body, self.owner, answer)

        def come_back(answer: dict[str, Any]) -> None:
            if not network.loses(world):
                world.after(self._delay(), finish, answer)

        wait_seconds = call.timeout_seconds if network.machine.is_up else REFUSED_SECONDS
        is_new = self.agent is None or not self.agent.is_alive
        answers = not network.is_cut and (network.machine.is_up or network.impostor is not None)
        is_refused = is_new and answers and host_keys.judge(network.shown_key, self._known_keys) is not host_keys.Standing.ACCEPTED
        timer = world.after(REFUSED_SECONDS if is_refused else wait_seconds, finish, {"error": self._unreachable(call.order)})
        if is_refused:
            return
        if is_new and answers:
            network.machine.laws.trusted(network.machine, network.shown_key)
        if self.agent is None or not self.agent.is_alive:
            self.agent = VirtualAgent(network.machine)
        if call.order == "start" and network.holds_start is not None:
            holds_start, network.holds_start = network.holds_start, None
            holds_start()
            world.after(world.between(*HELD_SECONDS), arrive, VirtualAgent(network.machine), lambda _: None)
            return
        if not network.loses(world):
            world.after(self._delay(), arrive, self.agent, come_back)
        if network.repeat and call.order in ("start", "want", "cutoff") and world.chance(network.repeat):
            # What was on its way to an agent that hung may be carried out much later, and nobody hears of it.
            world.after(world.between(0.1, 20.0), arrive, VirtualAgent(network.machine), lambda _: None)

    def hurry(self) -> None:
        """A real poll waits half a second at most, a virtual one longer: an order that waits behind it ends the wait."""
        if self.agent is not None:
            self.agent.answer_poll()

    def end(self) -> None:
        if self.agent is not None:
            self.agent.leave()
            self.agent = None

    def _delay(self) -> float:
        return self.world.between(*self.network.delay_seconds)

    def _unreachable(self, order: str) -> dict[str, str]:
        name = self.network.machine.name
        return HostUnreachable(f"host {name} does not answer", where=f"order {order}", what="no answer in time", fix="see its agent.log").to_json()


class VirtualLink:
    def __init__(
        self, plan: HostPlan, session: VirtualSession, inbox: Inbox, after: Any, left_behind: Any, poll_wait_seconds: float,
        now: Callable[[], datetime],
    ) -> None:
        self.plan, self.session, self._inbox, self._after, self._wait_seconds = plan, session, inbox, after, poll_wait_seconds
        self._left_behind = left_behind
        self._left_said: tuple[str, ...] = ()
        self._now, self._host_clock = now, None
        self.world = session.world
        self._orders: deque[Order] = deque()
        self._is_closing = False
        self._hello_said, self._facts_due, self._failures = False, 0.0, 0
        self._thread = self._run()

    def start(self) -> None:
        self._go_on(None)

    def send(self, order: Order) -> bool:
        if len(self._orders) >= ORDERS_QUEUED_MAX:
            return False
        self._orders.append(order)
        self.world.after(self.world.between(0.0, HURRY_SECONDS), self.session.hurry)
        return True

    def close(self, wait_seconds: float) -> None:
        self._is_closing = True
        self.session.end()

    def _go_on(self, answer: dict[str, Any] | None) -> None:
        if self._is_closing:
            return
        if answer is not None and "error" in answer:
            step = self._thread.throw(from_json(answer["error"]))
        else:
            step = self._thread.send(answer["ok"] if answer is not None else None)
        if isinstance(step, Pause):
            self.world.after(step.seconds, self._go_on, None)
        else:
            self.session.call(step, self._go_on)

    def _run(self) -> Iterator[Any]:
        while True:
            try:
                yield from self._round()
                self._failures = 0
                yield Pause(POLL_PAUSE_SECONDS)
            except ExplainedError as error:
                yield from self._rest(error)

    def _round(self) -> Iterator[Any]:
        left_behind = self._left_behind(self.plan.name)
        if not self._hello_said or left_behind != self._left_said:
            self._take_facts((yield Call("hello", {"protocol": PROTOCOL, "left_behind": list(left_behind)}, CALL_SECONDS_MAX)))
            self._hello_said, self._left_said = True, left_behind
        elif self.world.seconds >= self._facts_due:
            self._take_facts((yield Call("facts", {}, CALL_SECONDS_MAX)))
        yield from self._carry_orders()
        wait_seconds = 0.5 if self._orders else self._wait_seconds
        after = self._after(self.plan.name)
        body = {"after": after, "wait_seconds": wait_seconds, "clock": self._host_clock}
        self._take_poll((yield Call("poll", body, CALL_SECONDS_MAX + wait_seconds)), after)

    def _take_facts(self, answer: dict[str, Any]) -> None:
        self._facts_due = self.world.seconds + FACTS_SECONDS
        facts = decode(HostFacts, answer["facts"])
        self._inbox.put_host(HostAnswer(
            host=self.plan.name, facts=facts, memory_available_bytes=facts.memory_available_bytes, disk_free_bytes=facts.disk_free_bytes,
        ))

    def _take_poll(self, answer: dict[str, Any], after: dict[str, int]) -> None:
        self.session.network.machine.laws.heard(self.plan.name)
        self._host_clock = {"now": format_moment(self._now()), "boottime_seconds": answer["boottime_seconds"]}
        self._inbox.put_host(HostAnswer(
            host=self.plan.name, at=parse_moment(answer["at"]), memory_available_bytes=answer["available"], disk_free_bytes=answer["free"],
            reports=answer["runs"], after=after, left_said=self._left_said,
        ))

    def _carry_orders(self) -> Iterator[Any]:
        while self._orders:
            order = self._orders.popleft()
            try:
                answer = yield Call(order.order, order.body, CALL_SECONDS_MAX)
            except HostUnreachable as error:
                self._inbox.put_order(OrderDone(order=order, error=error.to_json()))
                raise
            except ExplainedError as error:
                self._inbox.put_order(OrderDone(order=order, error=error.to_json()))
            else:
                self._inbox.put_order(OrderDone(order=order, answer=answer))

    def _rest(self, error: ExplainedError) -> Iterator[Any]:
        self._hello_said = False
        self._failures += 1
        self.session.end()
        self._inbox.put_host(HostTrouble(host=self.plan.name, error=error.to_json()))
        while self._orders:
            self._inbox.put_order(OrderDone(order=self._orders.popleft(), error=error.to_json()))
        yield Pause(min(BACKOFF_SECONDS_FIRST * 2.0 ** min(self._failures - 1, 16), BACKOFF_SECONDS_MAX))
