"""One thread for each host: hello, then polls without end, with orders in between. Its news goes into the inbox.

The thread reads no wall clock and decides nothing. Whatever goes wrong is told as trouble and tried again, ever more slowly.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

from fleetd import logs
from fleetd.campaign import HostPlan
from fleetd.coordinator.inbox import HostAnswer, HostTrouble, Inbox
from fleetd.coordinator.sessions import Session
from fleetd.coordinator.sight import Order, OrderDone
from fleetd.model import HostFacts, RunReport
from fleetd.wire import PROTOCOL, WireError, decode
from policies.errors import ExplainedError, HostUnreachable
from policies.facts import format_moment, parse_moment

POLL_WAIT_SECONDS = 0.5
POLL_PAUSE_SECONDS = 0.1
"""Between two polls, so that news which can't be journaled now does not turn them into a busy loop."""
CALL_SECONDS_MAX = 20.0
FACTS_SECONDS = 60.0
BACKOFF_SECONDS_FIRST = 0.5
BACKOFF_SECONDS_MAX = 15.0
ORDERS_QUEUED_MAX = 128


class HostLink:
    """The host's thread. `after` gives the notices that history holds, by run; `left_behind` the runs whose remains the host has to end
    before it is asked for anything else; `now` is the coordinator's time, which a host's clock is compared with."""

    def __init__(
        self, plan: HostPlan, session: Session, inbox: Inbox, after: Callable[[str], dict[str, int]],
        left_behind: Callable[[str], tuple[str, ...]] = lambda host: (), now: Callable[[], datetime] | None = None,
    ) -> None:
        self.plan, self.session = plan, session
        self._inbox, self._after, self._left_behind = inbox, after, left_behind
        self._left_said: tuple[str, ...] = ()
        self._now = now
        self._host_clock: dict[str, Any] | None = None
        self._orders: queue.Queue[Order] = queue.Queue(ORDERS_QUEUED_MAX)
        self._closing = threading.Event()
        self._hello_said, self._facts_due = False, 0.0
        self._failures = 0
        self._unreadable: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, name=f"host-{plan.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, order: Order) -> bool:
        """Take an order to be carried soon. False when too many wait: it is asked for again at the next tick."""
        try:
            self._orders.put_nowait(order)
        except queue.Full:
            return False
        return True

    def close(self, wait_seconds: float) -> None:
        """Ask the thread to leave, and wait a little for it. Runs on the host go on."""
        self._closing.set()
        if wait_seconds > 0:
            self._thread.join(wait_seconds)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._round()
                self._failures = 0
                self._closing.wait(POLL_PAUSE_SECONDS)
            except ExplainedError as error:
                self._rest(error)
            except Exception as fault:  # whatever it is, it must cost this host's link a rest and not its life
                logs.failed("link_fault", host=self.plan.name, what=repr(fault))
                self._rest(_unreadable(self.plan, fault))
        self._refuse_orders(HostUnreachable("the coordinator is leaving", where=self.plan.name, what="the channel was closed", fix="start it again"))
        self.session.close()

    def _round(self) -> None:
        left_behind = self._left_behind(self.plan.name)
        if not self._hello_said or left_behind != self._left_said:
            self._take_facts(self.session.call("hello", {"protocol": PROTOCOL, "left_behind": list(left_behind)}, CALL_SECONDS_MAX))
            self._hello_said, self._left_said = True, left_behind
        elif time.monotonic() >= self._facts_due:
            self._take_facts(self.session.call("facts", {}, CALL_SECONDS_MAX))
        self._carry_orders()
        after = self._after(self.plan.name)
        body = {"after": after, "wait_seconds": POLL_WAIT_SECONDS, "clock": self._host_clock}
        self._take_poll(self.session.call("poll", body, CALL_SECONDS_MAX + POLL_WAIT_SECONDS), after)

    def _take_facts(self, answer: dict[str, Any]) -> None:
        self._facts_due = time.monotonic() + FACTS_SECONDS
        facts = decode(HostFacts, answer["facts"])
        self._inbox.put_host(HostAnswer(
            host=self.plan.name, facts=facts, memory_available_bytes=facts.memory_available_bytes, disk_free_bytes=facts.disk_free_bytes,
        ))

    def _take_poll(self, answer: dict[str, Any], after: dict[str, int]) -> None:
        at, skew_seconds = parse_moment(answer["at"]), None
        if self._now is not None and isinstance(answer.get("boottime_seconds"), float):
            # By the arrival, so that the way here can only make the host believe a later time than it is: its stops come early, never late.
            now = self._now()
            skew_seconds = (at - now).total_seconds()
            self._host_clock = {"now": format_moment(now), "boottime_seconds": answer["boottime_seconds"]}
        reports = tuple(report for report in (self._report(each) for each in answer["runs"]) if report is not None)
        # A run whose report can't be read may be alive: nothing is proven of what was left behind.
        left_said = self._left_said if len(reports) == len(answer["runs"]) else ()
        self._inbox.put_host(HostAnswer(
            host=self.plan.name, at=at, skew_seconds=skew_seconds, reports=reports, after=after, left_said=left_said,
            memory_available_bytes=_bytes(answer, "memory_available_bytes"), disk_free_bytes=_bytes(answer, "disk_free_bytes"),
        ))

    def _report(self, body: Any) -> RunReport | None:
        """One run's report. What one run's directory holds must not make the whole host unreadable."""
        try:
            return decode(RunReport, body)
        except WireError as fault:
            name = body.get("run_id") if isinstance(body, dict) else None
            if self._unreadable.get(str(name)) != str(fault):
                self._unreadable[str(name)] = str(fault)
                logs.failed("report_unreadable", host=self.plan.name, run=name, what=str(fault))
            return None

    def _carry_orders(self) -> None:
        while not self._closing.is_set():
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            try:
                answer = self.session.call(order.order, order.body, CALL_SECONDS_MAX)
            except HostUnreachable as error:
                self._inbox.put_order(OrderDone(order=order, error=error.to_json()))
                raise
            except ExplainedError as error:
                self._inbox.put_order(OrderDone(order=order, error=error.to_json()))
            except Exception as fault:  # an order that is never answered is never sent again, and it may be a stop
                self._inbox.put_order(OrderDone(order=order, error=_unreadable(self.plan, fault).to_json()))
                raise
            else:
                self._inbox.put_order(OrderDone(order=order, answer=answer))

    def _rest(self, error: ExplainedError) -> None:
        """Tell the trouble and wait: a new agent must say hello again."""
        self._hello_said = False
        self._failures += 1
        if self._failures == 1:
            logs.failed("host_trouble", host=self.plan.name, title=error.title, what=error.what)
        self._inbox.put_host(HostTrouble(host=self.plan.name, error=error.to_json()))
        # They never left. In the host's own words a start would count as refused by it, and its run may be alive there from an earlier try.
        self._refuse_orders(HostUnreachable(error.title, where=error.where, what=error.what, fix=error.fix))
        self._closing.wait(min(BACKOFF_SECONDS_FIRST * 2.0 ** min(self._failures - 1, 16), BACKOFF_SECONDS_MAX))

    def _refuse_orders(self, error: ExplainedError) -> None:
        while True:
            try:
                self._inbox.put_order(OrderDone(order=self._orders.get_nowait(), error=error.to_json()))
            except queue.Empty:
                return


def _unreadable(plan: HostPlan, fault: Exception) -> HostUnreachable:
    fix = f"see {plan.root}/agent.log and the coordinator's daemon.log"
    return HostUnreachable(f"host {plan.name} answers what can't be read", where=plan.name, what=f"{type(fault).__name__}: {fault}", fix=fix)


def _bytes(answer: dict[str, Any], name: str) -> int | None:
    """A figure that the loop will count with. WireError when it is none."""
    value = answer.get(name)
    return None if value is None else decode(int, value, name)
