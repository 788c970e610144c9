"""Where every thread of the coordinator leaves its news for the loop, which takes all of it at its own pace.

Requests and polls are bounded, since callers can be told and hosts asked again; answers to what the loop itself began are not,
since it began only so many.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleetd.coordinator.sight import JobDone, OrderDone, Reply, Request
from fleetd.model import HostFacts, RunReport
from policies.errors import ExplainedError, RequestRefused

REQUESTS_MAX = 64
NEWS_PER_HOST_MAX = 64
"""Of each host, so that no number of hosts, and none that talks much, costs another one its news."""
HOST_NEWS_SECONDS = 0.1
"""What hosts only measured waits this long for more of it: many hosts cost no more ticks than a few. What happened there does not wait, and
neither does a caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAnswer:
    """A host answered: with facts after a hello, or with reports to a poll. The loop stamps when it took it."""

    host: str
    facts: HostFacts | None = None
    at: datetime | None = None
    memory_available_bytes: int | None = None
    disk_free_bytes: int | None = None
    reports: tuple[RunReport, ...] | None = None
    after: dict[str, int] = field(default_factory=dict)
    """What the poll asked for: notices of each run after this one."""
    left_said: tuple[str, ...] | None = None
    """The left behind runs that this very agent was told of before it was polled, and of all of whose reports something could be read."""
    skew_seconds: float | None = None
    """The host's wall clock minus ours when its answer arrived; the way here counts as if the host were behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrouble:
    """A host did not answer, or not as it should."""

    host: str
    error: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Everything that came since the last tick, each kind in its order of arrival, the news of hosts by host."""

    asked: tuple[tuple[int, str, dict[str, Any]], ...] = ()
    hosts: tuple[HostAnswer | HostTrouble, ...] = ()
    jobs: tuple[JobDone, ...] = ()
    orders: tuple[OrderDone, ...] = ()


class _Asking:
    """One caller that waits for the answer to its request."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.reply: Reply | None = None


class Inbox:
    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._urgent, self._any = threading.Event(), threading.Event()
        self._numbers = itertools.count(1)
        self._asked: deque[tuple[int, str, dict[str, Any]]] = deque()
        self._hosts: dict[str, deque[HostAnswer | HostTrouble]] = {}
        self._jobs: deque[JobDone] = deque()
        self._orders: deque[OrderDone] = deque()
        self._asking: dict[int, _Asking] = {}

    def ask(self, kind: str, body: dict[str, Any], wait_seconds: float) -> Reply:
        """Leave a request and wait for its answer. RequestRefused when too many wait, or none came in time."""
        asking = _Asking()
        with self._guard:
            if len(self._asking) >= REQUESTS_MAX:
                raise _busy(f"{REQUESTS_MAX} requests wait already")
            number = next(self._numbers)
            self._asking[number] = asking
            self._asked.append((number, kind, body))
        self.wake()
        answered = asking.answered.wait(wait_seconds)
        with self._guard:
            self._asking.pop(number, None)
        if not answered or asking.reply is None:
            raise _busy(f"no answer within {wait_seconds:.0f} s; what was asked may still be done")
        return asking.reply

    def answer(self, reply: Reply) -> None:
        with self._guard:
            asking = self._asking.get(reply.number)
        if asking is not None:
            asking.reply = reply
            asking.answered.set()

    def is_awaited(self, request: Request) -> bool:
        with self._guard:
            return request.number in self._asking

    def put_host(self, news: HostAnswer | HostTrouble) -> None:
        """News of a host. Its oldest goes when the loop is far behind: notices come again until they are acknowledged."""
        with self._guard:
            self._hosts.setdefault(news.host, deque(maxlen=NEWS_PER_HOST_MAX)).append(news)
        if isinstance(news, HostAnswer) and any(report.notices for report in news.reports or ()):
            self.wake()
        else:
            self._any.set()

    def put_job(self, done: JobDone) -> None:
        with self._guard:
            self._jobs.append(done)
        self.wake()

    def put_order(self, done: OrderDone) -> None:
        with self._guard:
            self._orders.append(done)
        self.wake()

    def wake(self) -> None:
        self._urgent.set()
        self._any.set()

    def wait(self, seconds: float) -> None:
        """Return when there is news, when it is time for a tick, or after `seconds`."""
        if self._any.wait(seconds):
            self._urgent.wait(min(HOST_NEWS_SECONDS, seconds))

    def drain(self) -> News:
        with self._guard:
            self._urgent.clear()
            self._any.clear()
            hosts = tuple(news for each in self._hosts.values() for news in each)
            news = News(asked=tuple(self._asked), hosts=hosts, jobs=tuple(self._jobs), orders=tuple(self._orders))
            for queue in (self._asked, self._hosts, self._jobs, self._orders):
                queue.clear()
        return news


def _busy(what: str) -> ExplainedError:
    return RequestRefused("the coordinator is busy", where="its inbox", what=what, fix="fleetd status, then ask again if it did not happen")
