"""The real Loop of fleetd/coordinator/loop.py over a virtual clock, journal, network and workers; and the machine that restarts it.

Real: the tick, the Board, decide, apply, the order of record and acts, what a job's failure becomes (`_work`), replay, build_status.
Virtual: its clock, journal, links and worker threads, the callers that wait, and a kill between any two of its acts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd import clock
from fleetd.campaign import HostPlan
from fleetd.coordinator.api import build_status
from fleetd.coordinator.document import Daemon
from fleetd.coordinator.inbox import Inbox
from fleetd.coordinator.loop import Loop
from fleetd.coordinator.sight import Decision, Order, Reply, Request, Sight
from fleetd.fleet import Fleet
from fleetd.journal import SALVAGED
from fleetd.kept_clock import KeptClock
from fleetd.model import Owner
from fleetd.paths import StatePaths
from policies.facts import GIB
from tests.sim.jobs import Archive, VirtualJobs
from tests.sim.link import Network, VirtualLink, VirtualSession
from tests.sim.machine import Machine
from tests.sim.rundir import Spool, VirtualJournal
from tests.sim.world import EPOCH, World

NEWS_SECONDS = (0.01, 0.1)
JOB_SECONDS = (0.1, 4.0)
STATE = StatePaths(Path("/virtual/state"))
CRASHES = ("before_record", "after_record", "in_acts", "after_acts", "in_job")


class Crashed(Exception):
    """SIGKILL came to the coordinator, between two of its acts."""


class VirtualInbox(Inbox):
    """Callers do not block: their answers are handed to the office."""

    def __init__(self, office: Office) -> None:
        super().__init__()
        self._office = office
        self.awaited: set[int] = set()

    def wake(self) -> None:
        self._office.news()

    def leave(self, kind: str, body: dict[str, Any]) -> int:
        self._office.requests_made += 1
        number = self._office.requests_made
        self.awaited.add(number)
        self._office.laws.requested[number] = kind
        self._asked.append((number, kind, body))
        self._office.news()
        return number

    def put_host(self, news: Any) -> None:
        super().put_host(news)
        self._office.news()

    def put_job(self, done: Any) -> None:
        super().put_job(done)
        self._office.news()

    def put_order(self, done: Any) -> None:
        super().put_order(done)
        self._office.news()

    def answer(self, reply: Reply) -> None:
        self.awaited.discard(reply.number)
        self._office.replied(reply)

    def is_awaited(self, request: Request) -> bool:
        return request.number in self.awaited


class VirtualWorkers:
    """Worker threads: what is submitted happens a while later, unless the process is gone by then."""

    def __init__(self, office: Office) -> None:
        self._office, self._life = office, office.generation

    def submit(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._office.world.after(self._office.world.between(*JOB_SECONDS), self._do, work, arguments)

    def _do(self, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        office = self._office
        if office.loop is not None and office.generation == self._life:
            work(*arguments)
            if office.loop.crash_at == "in_job" and work.__name__ == "_work":
                office.world.fault()
                office.crash("after a job, before it heard of it", office.world.between(0.5, 20.0))
        elif office.world.chance(0.5) and work.__name__ == "_work":
            # Killed just after it had done what it does on disk, and before anybody heard of it.
            work(*arguments)


class VirtualLoop(Loop):
    def __init__(self, office: Office) -> None:
        self.office = office
        self.journal = VirtualJournal(office.machine, office.spool)
        owner = Owner(coordinator_id="c0ffee", generation=office.generation, life="first")
        super().__init__(
            self.journal, owner, python="/usr/bin/python3", make_session=self._session, run_job=office.jobs.run,  # type: ignore[arg-type]
            kept_clock=office.kept_clock,
        )
        self.inbox: VirtualInbox = VirtualInbox(office)
        self._workers = VirtualWorkers(office)  # type: ignore[assignment]
        self.crash_at = ""

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    @property
    def sight(self) -> Sight:
        assert self.published is not None
        return self.published.sight

    def _boundary(self, name: str) -> None:
        if self.crash_at == name:
            raise Crashed(name)

    def _write_down(self, decision: Decision) -> None:
        self.office.laws.concluded(self._fleet, decision)
        if decision.events:
            self._boundary("before_record")
        super()._write_down(decision)
        if decision.events:
            self._boundary("after_record")

    def _act(self, decision: Decision, now: datetime) -> None:
        super()._act(decision, now)
        if decision.events:
            self._boundary("after_acts")

    def _workers_for(self, job: Any) -> Any:
        return self._workers

    def _reach(self, plan: HostPlan, now: datetime) -> None:
        self._board.see(plan, now)
        if plan.name not in self._links:
            session = self._make_session(plan, self._owner)
            link = VirtualLink(
                plan, session, self.inbox, lambda host: self._after.get(host, {}), lambda host: self._left_behind.get(host, ()),  # type: ignore[arg-type]
                self.office.poll_wait_seconds, self._believed_now,
            )
            self._links[plan.name] = _Counted(link, self)  # type: ignore[assignment]
            link.start()

    def _believed_now(self) -> datetime:
        with self.office.clock():
            return self._now()

    def _session(self, plan: HostPlan, owner: Owner) -> VirtualSession:
        return VirtualSession(self.office.world, self.office.networks[plan.name], owner)

    def close(self) -> None:
        for link in self._links.values():
            link.close(0.0)


@dataclass
class _Counted:
    """A link whose `send` is a place where the process may be killed: some orders of a tick are given, others are not."""

    link: VirtualLink
    loop: VirtualLoop

    @property
    def session(self) -> VirtualSession:
        return self.link.session

    def send(self, order: Order) -> bool:
        self.loop.office.laws.sent(order, self.loop.fleet)
        taken = self.link.send(order)
        self.loop._boundary("in_acts")
        return taken

    def close(self, wait_seconds: float) -> None:
        self.link.close(wait_seconds)


class Office:
    """The coordinator's place: its disk, its clock, and whoever starts it again."""

    def __init__(self, world: World, machine: Machine, networks: dict[str, Network], laws: Any, *, pace_seconds: float) -> None:
        self.world, self.machine, self.networks, self.laws = world, machine, networks, laws
        self.pace_seconds = pace_seconds
        self.poll_wait_seconds = 6.0
        self.spool, self.archive = Spool(), Archive(machine)
        self.kept_clock = KeptClock()
        """On its disk: a coordinator that starts again goes on from what the one before it has counted."""
        self.jobs = VirtualJobs(self.archive, laws)
        self.generation = 0
        self.losses = 0
        """How often a part of its history was lost."""
        self.requests_made = 0
        self.replies: dict[int, Reply] = {}
        self.loop: VirtualLoop | None = None
        self._next: Any = None
        self._due_at = 0.0

    def start(self) -> None:
        if self.machine.is_disk_full:
            self.world.after(5.0, self.start)  # the journal can't be opened: its unit tries again
            return
        self.generation += 1
        with self.clock():
            self.loop = VirtualLoop(self)
            self.loop._record("coordinator_started", {"generation": self.generation}, "coordinator")
        self.laws.restarted(self.loop.fleet)
        self._appoint(0.0)

    def news(self) -> None:
        """The loop wakes soon; news that comes before it does is taken in the same tick."""
        if self.loop is not None and self._due_at - self.world.seconds > NEWS_SECONDS[1]:
            self._appoint(self.world.between(*NEWS_SECONDS))

    def _appoint(self, seconds: float) -> None:
        if self._next is not None:
            self._next.call_off()
        self._due_at = self.world.seconds + seconds
        self._next = self.world.after(seconds, self._turn)

    def _turn(self) -> None:
        if self.loop is None:
            return
        try:
            with self.clock():
                self.loop.tick()
        except Crashed as crash:
            self.world.fault()
            self.crash(f"at {crash}", self.world.between(0.5, 20.0))
            return
        self._appoint(self.pace_seconds)

    def crash(self, why: str, down_seconds: float) -> None:
        """Everything but the disk is gone; it is started again after a while."""
        if self.loop is None:
            return
        self.world.say("coordinator", f"is killed {why}, and starts again in {down_seconds:.1f} s")
        self.laws.crashed(self.loop.fleet, self.loop.journal)
        self.loop.close()
        self.loop = None
        self.world.after(down_seconds, self.start)

    def lose_history(self) -> None:
        """Its journal is damaged, and a salvage keeps what comes before: up to anywhere behind the newest launch. Killed is it by that."""
        of_launches = [number for number, entry in self.spool.entries.items() if entry["kind"] == "run_added" and self._is_of_a_launch(entry)]
        kept = max(of_launches, default=self.spool.last)
        last = self.world.random.randint(min(kept, self.spool.last), self.spool.last)
        if self.loop is None or last == self.spool.last:
            return
        self.crash(f"by a damaged journal, of which {last} of {self.spool.last} events read", self.world.between(2.0, 20.0))
        self.spool.entries = {number: entry for number, entry in self.spool.entries.items() if number <= last}
        self.spool.last = self.spool.state[SALVAGED] = last
        self.losses += 1
        self.laws.durable = None
        self.laws.stopped.clear()

    def plan_of(self, machine: Machine) -> HostPlan:
        return HostPlan(name=machine.name, root=f"/virtual/{machine.name}", capacity_bytes=machine.memory_bytes, floor_bytes=GIB // 2)

    def _is_of_a_launch(self, entry: dict[str, Any]) -> bool:
        return entry["body"]["kind"] == "train" and not entry["body"].get("continues")

    def replied(self, reply: Reply) -> None:
        self.replies[reply.number] = reply
        self.laws.replied(reply)

    def show(self) -> dict[str, Any] | None:
        """The status document as a reader of the API gets it now."""
        if self.loop is None or self.loop.published is None:
            return None
        daemon = Daemon(pid=1, id="c0ffee", generation=self.generation, started_at=EPOCH, paths=STATE)
        with self.clock():
            return build_status(self.loop.published, daemon)

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Within this, `fleetd.clock` reads the clocks of the coordinator's machine."""
        real = clock.read, clock.boottime_seconds
        clock.read, clock.boottime_seconds = self.machine.moment, self.machine.boottime_seconds
        try:
            yield
        finally:
            clock.read, clock.boottime_seconds = real
