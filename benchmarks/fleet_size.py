"""What the coordinator costs with 3, 30 and 300 hosts: `python benchmarks/fleet_size.py` prints a table and, with --write, puts it into README.md.

    stand-in   the real coordinator, its real sessions over pipes, the real wire; at the far end a small program that speaks it (stand_in/agent.py)
    real       the real agent of each host, beside a supervisor, a shim and a command, all on this machine
    ssh        the same, each host over an SSH connection of its own through a real sshd on this machine

Each host has one run that goes on. The shares are the coordinator's alone: whatever else runs here is another process. Rows of one table are of
one run of this program, one after the other.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from supervision import TABLE, Busy

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "live"))

from live_fleet import EXAMPLE, Fleet  # noqa: E402  (the live tests' own installation, found by its path)
from sshd import Sshd  # noqa: E402

from fleetd.paths import StatePaths  # noqa: E402
from fleetd.screens.client import Client  # noqa: E402

STAND_IN = ROOT / "benchmarks" / "stand_in" / "agent.py"
CASES = ("stand-in:3", "stand-in:30", "stand-in:300", "real:3", "real:30", "ssh:3", "ssh:30")
HOSTS_PER_PLAN = 60
"""A plan may have 64 candidates: more hosts than that are several campaigns."""
WINDOW_SECONDS = 30.0
SETTLE_SECONDS = 10.0
READS = 200
READ_PAUSE_SECONDS = 0.05
WISHES = 30
START_SECONDS_MAX = 600.0
RUN_SECONDS = "86400"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    kind: str
    hosts: int
    started_seconds: float
    """From the first launch until every run was running."""
    cpu_seconds_per_minute: float
    resident_bytes: int
    reads: tuple[float, ...]
    wishes: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help=f"KIND:HOSTS, of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=WINDOW_SECONDS, help="window in which processor time is counted")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    given = parser.parse_args()
    busy, costs = Busy(), []
    for case in given.cases:
        kind, _, count = case.partition(":")
        costs.append(measured(kind, int(count), given.seconds))
        print(row(costs[-1], costs), flush=True)
    text = f"{busy.words()}\n\n{table(costs)}"
    print(f"\n{text}\n")
    if given.write:
        start, end = "<!-- hosts of benchmarks/fleet_size.py -->", "<!-- end of hosts -->"
        before, _, rest = TABLE.read_text(encoding="utf-8").partition(start)
        TABLE.write_text(f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def measured(kind: str, count: int, window_seconds: float) -> Cost:
    fleet = Fleet(EXAMPLE)
    sshd = Sshd(fleet.root / "sshd", "loopback") if kind == "ssh" else None
    try:
        bodies = hosts_of(fleet, kind, count, sshd)
        began_seconds = time.monotonic()
        for number in range(0, count, HOSTS_PER_PLAN):
            launch(fleet, number, dict(list(bodies.items())[number:number + HOSTS_PER_PLAN]))
        with Client(StatePaths(fleet.state)) as client:
            until_all_run(client, count)
            started_seconds = time.monotonic() - began_seconds
            time.sleep(SETTLE_SECONDS)
            process = psutil.Process(int(client.status()["coordinator"]["pid"]))
            cpu_seconds = cost_of(process, window_seconds)
            reads = timed(READS, lambda number: client.status())
            names = list(bodies)
            wishes = timed(WISHES, lambda number: client.wish(("drain", "undrain")[number % 2], names[number // 2 % count], "benchmark", "measured"))
            return Cost(
                kind=kind, hosts=count, started_seconds=started_seconds, cpu_seconds_per_minute=cpu_seconds * 60.0 / window_seconds,
                resident_bytes=process.memory_info().rss, reads=reads, wishes=wishes,
            )
    finally:
        fleet.close()
        if sshd is not None:
            sshd.stop()


def cost_of(process: psutil.Process, window_seconds: float) -> float:
    before = process.cpu_times()
    time.sleep(window_seconds)
    after = process.cpu_times()
    return float(after.user + after.system - before.user - before.system)


def timed(count: int, ask: Callable[[int], Any]) -> tuple[float, ...]:
    """How long each of so many calls took, in seconds, by one caller with pauses in between."""
    found = []
    for number in range(count):
        began_seconds = time.monotonic()
        ask(number)
        found.append(time.monotonic() - began_seconds)
        time.sleep(READ_PAUSE_SECONDS)
    return tuple(found)


# The hosts.


def hosts_of(fleet: Fleet, kind: str, count: int, sshd: Sshd | None) -> dict[str, dict[str, Any]]:
    """The plan's lines for so many hosts, each with a root of its own. The release is brought once, and lies in every root."""
    shared = fleet.root / "releases"
    shared.mkdir()
    python = stand_in_python(fleet) if kind == "stand-in" else None
    bodies = {}
    for number in range(count):
        root = fleet.root / "hosts" / f"h{number:03d}"
        root.mkdir(parents=True)
        (root / "releases").symlink_to(shared)
        body = {"root": str(root), "capacity": "64MiB", "floor": "16MiB"}
        if sshd is not None:
            body |= {"transport": "ssh", "address": sshd.name, "ssh_config": str(sshd.ssh_config), "agent_python": sys.executable}
        else:
            body |= {"transport": "local", **({"agent_python": python} if python else {})}
        bodies[root.name] = body
    return bodies


def stand_in_python(fleet: Fleet) -> str:
    """What the plan calls agent_python: this Python for everything but the agent and the survey, which the stand-in answers."""
    survey, wrapper, python = fleet.root / "survey.json", fleet.root / "stand-in-python", shlex.quote(sys.executable)
    asked = [sys.executable, "-m", "fleetd.host", "survey", str(fleet.root), json.dumps({"host": True, "pythons": {}})]
    survey.write_text(subprocess.run(asked, check=True, capture_output=True, text=True, cwd=ROOT).stdout, encoding="utf-8")
    wrapper.write_text(
        f'#!/bin/sh\ncase " $* " in\n*" agent "*|*" survey "*) STAND_IN_SURVEY={shlex.quote(str(survey))} exec {python} -I -S '
        f'{shlex.quote(str(STAND_IN))} "$@" ;;\n*) exec {python} "$@" ;;\nesac\n', encoding="utf-8",
    )
    wrapper.chmod(0o755)
    return str(wrapper)


def launch(fleet: Fleet, number: int, bodies: dict[str, dict[str, Any]]) -> None:
    candidates = {f"on-{name}": {"host": name, "command": ["sleep", RUN_SECONDS]} for name in bodies}
    defaults = {"memory_cap": "16MiB", "stop": {"grace_floor": "1s", "grace_ceiling": "5s"}}
    plan = fleet.plan(
        f"fleet-{number}", deadline="2h", hosts=bodies, candidates=candidates, defaults=defaults, data={}, parity="off",
        after_freeze={"evaluate": [], "report": False},
    )
    fleet("launch", str(plan), "--json", seconds=START_SECONDS_MAX)


def until_all_run(client: Client, count: int) -> None:
    give_up_seconds = time.monotonic() + START_SECONDS_MAX
    while True:
        states = [run["state"] for run in client.status()["runs"]]
        if states == ["running"] * count:
            return
        assert time.monotonic() < give_up_seconds, {state: states.count(state) for state in states}
        time.sleep(0.5)


# The table.


def table(costs: list[Cost]) -> str:
    head = ("hosts", "far end", "processor seconds a minute", "for each host", "resident", "for each host", "`status` p50", "p99",
            "a wish p50", "longest", "all running after")
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(row(cost, costs) for cost in costs)])


def row(cost: Cost, costs: list[Cost]) -> str:
    least = min((each for each in costs if each.kind == cost.kind), key=lambda each: each.hosts)
    more = f"{(cost.resident_bytes - least.resident_bytes) / (cost.hosts - least.hosts) / 1e6:.2f} MB" if cost is not least else "—"
    cells = (
        f"{cost.hosts}", cost.kind, f"{cost.cpu_seconds_per_minute:.2f} s", f"{cost.cpu_seconds_per_minute / cost.hosts * 1000:.0f} ms",
        f"{cost.resident_bytes / 1e6:.0f} MB", more, milliseconds(statistics.median(cost.reads)), milliseconds(quantile(cost.reads, 0.99)),
        milliseconds(statistics.median(cost.wishes)), milliseconds(max(cost.wishes)), f"{cost.started_seconds:.0f} s",
    )
    return f"| {' | '.join(cells)} |"


def quantile(values: tuple[float, ...], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


if __name__ == "__main__":
    main()
