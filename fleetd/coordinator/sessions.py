"""The road to one host: a session that carries orders to its agent, and the thread that keeps asking it.

A session answers or raises HostUnreachable within the time it was given; a dead or slow host costs its own thread and nobody
else's. `LocalSession` speaks to an agent on this machine over pipes; `ssh_session` carries the same lines over SSH.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from fleetd import faults, logs
from fleetd.campaign import HostPlan
from fleetd.coordinator.couriers import Courier, LocalCourier
from fleetd.coordinator.deliveries import Deliveries
from fleetd.coordinator.specs import agent_python
from fleetd.logs import LOG_BYTES_MAX
from fleetd.model import Owner
from fleetd.paths import HostPaths
from fleetd.wire import LINE_BYTES_MAX, WireError, dumps, encode, loads
from policies.errors import ExplainedError, HostUnreachable, from_json

ESTABLISH_SECONDS_MAX = 90.0
"""What a new agent is given for its first answer, however little its caller would wait for a later one. It counts from its start: before that
the release is put in place, whose many files are synced one by one, and a slow disk says nothing of whether the host answers."""
END_SECONDS_MAX = 2.0
"""How long an agent may take to leave once its channel is closed."""
READ_BYTES = 256 * 1024
TAIL_BYTES = 400


class Session(Protocol):
    """One host's agent. Used by one thread at a time; every call may raise HostUnreachable or what the agent explains."""

    courier: Courier

    def call(self, order: str, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Send one order and return its answer."""

    def close(self) -> None:
        """End the channel; the agent leaves by itself, its runs go on."""


class LocalSession:
    """An agent on this machine, started at the first call and again after it died."""

    def __init__(self, plan: HostPlan, owner: Owner, *, stage: Callable[[Courier], str], deliveries: Deliveries | None = None) -> None:
        self._plan, self._owner, self._stage = plan, owner, stage
        self.courier: Courier = LocalCourier(plan.name, Path(plan.root), plan.agent_python, deliveries)
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._number = 0

    def call(self, order: str, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        process, is_fresh = self._agent()
        deadline = time.monotonic() + (max(timeout_seconds, ESTABLISH_SECONDS_MAX) if is_fresh else timeout_seconds)
        self._number += 1
        line = dumps({"id": self._number, "order": order, "owner": encode(self._owner), "body": body}).encode() + b"\n"
        try:
            self._write(process, line, deadline)
            answer = self._read(process, deadline)
            faults.after(f"{order} answered")
        except (OSError, WireError, TimeoutError) as fault:
            self._end()
            raise self._unreachable(order, str(fault) or type(fault).__name__) from fault
        if answer.get("ok") is True and isinstance(answer.get("body"), dict):
            found: dict[str, Any] = answer["body"]
            return found
        raise from_json(answer.get("error") or {})

    def close(self) -> None:
        self._end()

    def _agent(self) -> tuple[subprocess.Popen[bytes], bool]:
        """The living one, or a new one; and whether it is new."""
        if self._process is not None and self._process.poll() is None:
            return self._process, False
        self._end()
        release = self._stage(self.courier)
        root = Path(self._plan.root)
        door = HostPaths(root).releases / release / "fleetd" / "host" / "__main__.py"
        argv = [agent_python(self._plan, sys.executable), "-I", str(door), "agent", str(root)]
        self._turn_log(root / "agent.log")
        faults.before("agent.log")
        errors = open(root / "agent.log", "ab")  # noqa: SIM115 - the child inherits it, closed right after
        try:
            # A session of its own: an interrupt at the coordinator's terminal is no order to the agent.
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=root, start_new_session=True,
            )
        except OSError as fault:
            raise self._unreachable("start of the agent", str(fault)) from fault
        finally:
            errors.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._buffer = b""
        logs.changed("agent_started", host=self._plan.name, pid=self._process.pid, release=release[:12])
        return self._process, True

    def _turn_log(self, path: Path) -> None:
        """Begin a new agent.log when the old one is large; one older is kept."""
        try:
            if path.stat().st_size > LOG_BYTES_MAX:
                os.replace(path, path.with_name("agent.log.1"))
        except OSError:
            pass  # there is none yet, or the disk will say more at the next write

    def _write(self, process: subprocess.Popen[bytes], line: bytes, deadline: float) -> None:
        assert process.stdin is not None
        descriptor, rest = process.stdin.fileno(), memoryview(line)
        while rest:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not select.select([], [descriptor], [], left_seconds)[1]:
                raise TimeoutError("the agent takes no orders")
            rest = rest[os.write(descriptor, rest):]

    def _read(self, process: subprocess.Popen[bytes], deadline: float) -> dict[str, Any]:
        """The answer to the newest request; answers to older ones can't come, their agent was ended."""
        assert process.stdout is not None
        descriptor = process.stdout.fileno()
        while b"\n" not in self._buffer:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0 or not select.select([descriptor], [], [], left_seconds)[0]:
                raise TimeoutError("no answer in time")
            chunk = os.read(descriptor, READ_BYTES)
            if not chunk:
                raise OSError(f"the agent left: {self._last_words(process)}")
            self._buffer += chunk
            if len(self._buffer) > LINE_BYTES_MAX:
                raise WireError(f"an answer is over the limit of {LINE_BYTES_MAX} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer = loads(line)
        if not isinstance(answer, dict) or answer.get("id") != self._number:
            raise WireError(f"the agent answered something else: {line[:TAIL_BYTES]!r}")
        return answer

    def _last_words(self, process: subprocess.Popen[bytes]) -> str:
        try:
            status = process.wait(timeout=END_SECONDS_MAX)
            with open(Path(self._plan.root) / "agent.log", "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
                text = log.read(TAIL_BYTES).decode(errors="replace").strip()
        except (OSError, subprocess.TimeoutExpired):
            return "it closed its channel"
        last = text.splitlines()[-1] if text else "it said nothing"
        return f"exit status {status}, {last}"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        process.stdin.close()
        process.stdout.close()
        try:
            process.wait(timeout=END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()  # our own child, not yet reaped: its pid can't be anybody else's
            process.wait()

    def _unreachable(self, doing: str, what: str) -> ExplainedError:
        root = self._plan.root
        return HostUnreachable(
            f"host {self._plan.name} does not answer", where=f"{self._plan.transport}:{root}, order {doing}", what=what, fix=f"see {root}/agent.log",
        )
