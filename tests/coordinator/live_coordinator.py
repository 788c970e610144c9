"""A coordinator as a real process, with the real agent, supervisor and shim, and a small program as its candidate."""

from __future__ import annotations

import gc
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from fleetd.campaign import CandidatePlan, HostPlan, Plan, ReserveTerms
from fleetd.coordinator.daemon import answering_pid, ensure_running
from fleetd.coordinator.loop import replay_journal
from fleetd.fleet import Fleet
from fleetd.journal import Journal
from fleetd.model import StopTerms
from fleetd.paths import StatePaths
from fleetd.wire import encode
from policies.facts import MIB, SignalTarget

WAIT_SECONDS_MAX = 150.0
PROGRAM = """
import os, sys, time
for step in range(5000):
    print("step", step, flush=True)
    if os.path.exists(sys.argv[1]):
        sys.exit(0)
    time.sleep(0.2)
"""


def lives(process: psutil.Process) -> bool:
    """What has ended is a zombie until somebody gets a processor to take it in."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Coordinator:
    """A coordinator of its own state directory, spoken to over its socket."""

    def __init__(self, folder: Path, state: str = "state") -> None:
        self.paths = StatePaths(folder / state)
        self.root = folder / "host"
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)
        self.finish = folder / "finish"
        """The program leaves with exit 0 when this file is there."""
        self.pids: list[int] = []

    def start(self) -> int:
        pid, _ = ensure_running(self.paths.root)
        self.pids.append(pid)
        return pid

    def kill(self, number: int = signal.SIGKILL) -> None:
        process = psutil.Process(self.pids[-1])
        process.send_signal(number)
        psutil.wait_procs([process], timeout=WAIT_SECONDS_MAX)
        assert not lives(process)

    def call(self, method: str, path: str, **given: Any) -> httpx.Response:
        with warnings.catch_warnings():  # httpx leaves the socket of a refused connection to the collector, which would warn of it in any test
            warnings.simplefilter("ignore", ResourceWarning)
            try:
                with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.paths.socket)), trust_env=False, timeout=120.0) as client:
                    return client.request(method, f"http://fleetd/v1/{path}", **given)
            except httpx.ConnectError as fault:
                refused = str(fault)
            gc.collect()
        raise httpx.ConnectError(refused)

    def status(self) -> dict[str, Any]:
        answer = self.call("GET", "status")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def run(self, name: str = "own") -> dict[str, Any]:
        return next(run for run in self.status()["runs"] if run["candidate"] == name)

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not what():
            assert time.monotonic() < deadline, json.dumps(self.status(), indent=1)
            time.sleep(0.1)

    def plan(self, *names: str, capacity_bytes: int | None = None) -> Plan:
        return Plan(
            name="commands", plan_sha256="ab" * 32, directory=str(self.program.parent), deadline_at=None, deadline_seconds=600.0,
            reserve=ReserveTerms(minimum_seconds=10.0, margin_seconds=0.0),
            hosts=(HostPlan(name="here", root=str(self.root), floor_bytes=64 * MIB, capacity_bytes=capacity_bytes),),
            candidates=tuple(
                CandidatePlan(
                    name=name, host="here", command=(sys.executable, str(self.program), str(self.finish)), signal=SignalTarget.GROUP,
                    memory_host_bytes=128 * MIB, memory_accelerator_bytes=0, stop=StopTerms(grace_floor_seconds=30.0, grace_ceiling_seconds=60.0),
                ) for name in names or ("own",)
            ),
        )

    def launch(self, *names: str, capacity_bytes: int | None = None) -> str:
        body = {"plan": encode(self.plan(*names, capacity_bytes=capacity_bytes)), "plan_text": "name: commands", "actor": "user:test"}
        answer = self.call("POST", "launch", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["campaign_id"])

    def launch_other(self, name: str) -> str:
        """A second campaign, from another plan, with one candidate."""
        plan = replace(self.plan(name), name=f"plan-{name}", plan_sha256="cd" * 32)
        answer = self.call("POST", "launch", json={"plan": encode(plan), "plan_text": f"name: plan-{name}", "actor": "user:test"})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["campaign_id"])

    def replayed(self) -> Fleet:
        journal = Journal.open(self.paths.journal, read_only=True)
        try:
            return replay_journal(journal)
        finally:
            journal.close()

    def end(self) -> None:
        """Leave nothing running: stop every run, wait for its supervisor, then end the coordinator."""
        if not self.pids:
            return
        if answering_pid(self.paths) is None:
            self.start()
        self.call("POST", "stop", json={"target": "all", "mode": "now", "actor": "user:test"})
        self.until(lambda: all(run["state"] in ("stopped", "finished", "failed", "queued") for run in self.status()["runs"]))
        for folder in (self.root / "runs").glob("2*"):
            record = folder / "supervisor.json"
            if record.exists():
                pid = json.loads(record.read_text())["identity"]["pid"]
                gone = [psutil.Process(pid)] if psutil.pid_exists(pid) else []
                assert not psutil.wait_procs(gone, timeout=WAIT_SECONDS_MAX)[1], f"supervisor {pid} stays"
        self.kill(signal.SIGTERM)
