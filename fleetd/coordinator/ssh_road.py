"""The road to one host over SSH, shared by its session and its courier: one connection, and programs started on it.

Only the session's thread makes connections; whoever else needs one uses what is there, or is told that there is none now.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.specs import SSH_PYTHON, agent_python
from fleetd.coordinator.ssh_config import words_of
from fleetd.coordinator.ssh_connection import SshConnection
from fleetd.coordinator.ssh_lines import TROUBLES, ChannelLines, NoPython, OldPython, enter, in_words
from fleetd.model import Owner
from fleetd.wire import WireError, dumps, encode
from policies.errors import DataDamaged, ExplainedError, HostUnreachable, NoRoom, RequestRefused, from_json

MACHINES = ("x86_64", "aarch64")
OPEN_SECONDS_MAX = 20.0
"""From a connection to a porter that waits for its orders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RootFacts:
    """What the porter found when it made the root."""

    machine: str
    free_bytes: int


class SshRoad:
    def __init__(self, plan: HostPlan, owner: Owner) -> None:
        self.plan, self.owner = plan, owner
        self.facts: RootFacts | None = None
        self._connection: SshConnection | None = None
        self._guard = threading.Lock()

    @property
    def python(self) -> str:
        return agent_python(self.plan, SSH_PYTHON)

    @property
    def is_open(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def connect(self, until_seconds: float) -> SshConnection:
        """The living connection, or a new one. HostUnreachable, HostKeyRefused, LoginRefused, RequestRefused."""
        if self._connection is not None and self._connection.is_open:
            return self._connection
        self.drop()
        connection = SshConnection.open(words_of(self.plan), until_seconds)
        with self._guard:
            self._connection = connection
        return connection

    def current(self) -> SshConnection:
        """The connection that is there. HostUnreachable when there is none now."""
        connection = self._connection
        if connection is None or not connection.is_open:
            raise self.unreachable("there is no connection with it now")
        return connection

    def drop(self) -> None:
        """Give the connection up; what still used it fails at once."""
        with self._guard:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def unreachable(self, what: str) -> HostUnreachable:
        log = f"{self.plan.root}/agent.log on the host"
        return HostUnreachable(f"host {self.plan.name} does not answer", where=self.plan.place, what=what, fix=f"it is tried again; see {log}")

    def porter(self, until_seconds: float) -> Porter:
        """A porter on the living connection, with the root made; the caller closes it. RequestRefused when the host can't run one."""
        lines = self.lines(until_seconds)
        try:
            try:
                enter(lines, self.python, until_seconds)
            except (NoPython, OldPython) as fault:
                raise _no_python(self.plan, fault, self.python) from fault
            except TROUBLES as fault:
                raise self.unreachable(f"{self.python} did not start in its login shell: {in_words(fault)}") from fault
            porter = Porter(self, lines)
            self.facts = porter.root(until_seconds)
        except BaseException:
            lines.channel.close()
            raise
        return porter

    def lines(self, until_seconds: float) -> ChannelLines:
        connection = self.current()
        with connection.deadline(min(OPEN_SECONDS_MAX, until_seconds - time.monotonic()), "new channel"):
            return ChannelLines(connection.open_shell())


class Porter:
    """Our end of `fleetd/host/porter.py`."""

    def __init__(self, road: SshRoad, lines: ChannelLines) -> None:
        self._road, self.lines = road, lines

    def close(self) -> None:
        self.lines.channel.close()

    def root(self, until_seconds: float) -> RootFacts:
        answer = self.ask({"do": "root", "root": self._road.plan.root}, until_seconds)
        facts = RootFacts(machine=str(answer["machine"]), free_bytes=int(answer["free_bytes"]))
        if facts.machine not in MACHINES:
            raise RequestRefused(
                f"host {self._road.plan.name} has another architecture", where=self._road.plan.place,
                what=f"it is {facts.machine}; fleetd's agent runs on {' and '.join(MACHINES)}", fix="leave this host out of the plan",
            )
        return facts

    def ask(self, request: dict[str, Any], until_seconds: float) -> dict[str, Any]:
        """The answer to one request. What the porter refuses is raised in our words."""
        try:
            self.lines.write(dumps(request).encode() + b"\n", until_seconds)
            answer = self.lines.read_object(until_seconds)
        except TROUBLES as fault:
            raise self._road.unreachable(f"{request['do']}: {in_words(fault)}") from fault
        if answer.get("ok") is not True:
            raise refusal(self._road.plan, answer)
        return answer

    def send(self, parts: Iterable[bytes], silence_seconds: float) -> dict[str, Any]:
        """The bytes that a `put` announced, and what became of them. An answer before the end is a refusal."""
        try:
            for part in parts:
                try:
                    self.lines.write(part, time.monotonic() + silence_seconds)
                except TROUBLES:
                    if not self.lines.has_answer():
                        raise  # else it has refused and left, and said why before that
                if self.lines.has_answer():
                    break
            answer = self.lines.read_object(time.monotonic() + silence_seconds)
        except TROUBLES as fault:
            raise self._road.unreachable(f"files on their way: {in_words(fault)}") from fault
        if answer.get("ok") is not True:
            raise refusal(self._road.plan, answer)
        return answer


class AgentLine:
    """One agent on the far end of one channel. One thread at a time."""

    def __init__(self, road: SshRoad, lines: ChannelLines) -> None:
        self._road, self.lines, self._number = road, lines, 0

    def ask(self, order: str, body: dict[str, Any], until_seconds: float) -> dict[str, Any]:
        """The body of the answer, or what the agent explains. After HostUnreachable the line is of no use any more."""
        self._number += 1
        try:
            request = {"id": self._number, "order": order, "owner": encode(self._road.owner), "body": body}
            self.lines.write(dumps(request).encode() + b"\n", until_seconds)
            answer = self.lines.read_object(until_seconds)
            if answer.get("id") != self._number:
                raise WireError("the agent answered something else")
        except TROUBLES as fault:
            self.close()
            raise self._road.unreachable(f"order {order}: {in_words(fault)}") from fault
        if answer.get("ok") is True and isinstance(answer.get("body"), dict):
            found: dict[str, Any] = answer["body"]
            return found
        raise from_json(answer.get("error") or {})

    def close(self) -> None:
        self.lines.channel.close()


def start_agent(road: SshRoad, porter: Porter, release: str, until_seconds: float) -> AgentLine:
    """Let the porter become the agent of a release; its channel is the agent's from now on."""
    porter.ask({"do": "start", "digest": release, "arguments": ["agent", road.plan.root]}, until_seconds)
    return AgentLine(road, porter.lines)


def refusal(plan: HostPlan, answer: dict[str, Any]) -> ExplainedError:
    """What a porter could not do, for the person who has to mend it."""
    what, path, name = str(answer.get("what")), str(answer.get("path") or plan.root), plan.name
    where, number = f"host {name}, {path}", answer.get("errno")
    if answer.get("kind") == "damaged":
        fix = f"make sure that no run uses it, then on {name}: rm -r {path}; launch again"
        return DataDamaged(f"what lies staged on host {name} is damaged", where=where, what=what, fix=fix)
    if answer.get("kind") == "python":
        fix = "name a Python 3.10 or newer as agent_python of the host in the plan"
        return RequestRefused(f"host {name} can't run this release", where=where, what=what, fix=fix)
    if number in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free some space below {plan.root} on {name}; it is tried again by itself"
        return NoRoom(f"no room on host {name}", where=where, what=f"{what}; nothing was left behind", fix=fix)
    if number == errno.EROFS:
        fix = f"name a root in the plan that can be written, or on {name}: mount -o remount,rw the file system"
        return RequestRefused(f"the root on host {name} is read-only", where=where, what=what, fix=fix)
    fix = f"on {name}: sudo install -d -o {plan.user or 'USER'} {plan.root}, or name another root in the plan"
    return RequestRefused(f"the root on host {name} can't be used", where=where, what=what, fix=fix)


def _no_python(plan: HostPlan, fault: Exception, python: str) -> RequestRefused:
    fix = f"on {plan.name}: sudo apt-get install python3, or name a Python 3.10 or newer as agent_python of the host in the plan"
    if isinstance(fault, NoPython):
        return RequestRefused(f"host {plan.name} has no {python}", where=plan.place, what=f"its shell finds no {python}", fix=fix)
    return RequestRefused(f"the Python of host {plan.name} is too old", where=plan.place, what=f"{fault}; 3.10 or newer is needed", fix=fix)
