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
import signal
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
SETTLE_SECONDS = 5.0
READS = 150
READ_PAUSE_SECONDS = 0.05
WISHES = 30
START_SECONDS_MAX = 600.0
RUN_SECONDS = "86400"
NICE = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    kind: str
    hosts: int
    started_seconds: float
    """From the first launch until every run was running."""
    cpu_seconds_per_minute: float
    resident_bytes: int
    reads: tuple[float, ...]
    read_cpu_seconds: float
    """Processor time of one `status` in the coordinator, beyond what it takes anyway: other people's work does not count here."""
    wishes: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help=f"KIND:HOSTS, of {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=WINDOW_SECONDS, help="window in which processor time is counted")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/README.md")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started for a case is ended with it
    busy, costs = Busy(), []
    for case in given.cases:
        kind, _, count = case.partition(":")
        costs.append(measured(kind, int(count), given.seconds))
        print(row(costs[-1]), flush=True)
        if given.write:  # after each, so that a run that is cut short leaves what it had
            write(f"{busy.words()}\n\n{table(costs)}")
    print(f"\n{busy.words()}\n\n{table(costs)}\n")


def write(text: str) -> None:
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
            before = spent_seconds(process)
            time.sleep(window_seconds)
            share = (spent_seconds(process) - before) / window_seconds
            before, began_seconds = spent_seconds(process), time.monotonic()
            reads = timed(READS, lambda number: client.status())
            read_cpu_seconds = (spent_seconds(process) - before - share * (time.monotonic() - began_seconds)) / READS
            names = list(bodies)
            wishes = timed(WISHES, lambda number: client.wish(("drain", "undrain")[number % 2], names[number // 2 % count], "benchmark", "measured"))
            return Cost(
                kind=kind, hosts=count, started_seconds=started_seconds, cpu_seconds_per_minute=share * 60.0,
                resident_bytes=process.memory_info().rss, reads=reads, read_cpu_seconds=read_cpu_seconds, wishes=wishes,
            )
    finally:
        fleet.close()
        if sshd is not None:
            sshd.stop()


def spent_seconds(process: psutil.Process) -> float:
    used = process.cpu_times()
    return float(used.user + used.system)


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
    python = stand_in_python(fleet) if kind == "stand-in" else nice_python(fleet)
    bodies = {}
    for number in range(count):
        root = fleet.root / "hosts" / f"h{number:03d}"
        root.mkdir(parents=True)
        (root / "releases").symlink_to(shared)
        over = {"transport": "local"} if sshd is None else {"transport": "ssh", "address": sshd.name, "ssh_config": str(sshd.ssh_config)}
        bodies[root.name] = {**over, "root": str(root), "capacity": "64MiB", "floor": "16MiB", "agent_python": python}
    return bodies


def nice_python(fleet: Fleet) -> str:
    """What the plan calls agent_python: this Python, giving way to the coordinator. In life a host's programs are on another machine."""
    return script(fleet.root / "nice-python", f'exec nice -n {NICE} {shlex.quote(sys.executable)} "$@"')


def stand_in_python(fleet: Fleet) -> str:
    """The same, but the agent and the survey are answered by the stand-in."""
    survey, python = fleet.root / "survey.json", f"nice -n {NICE} {shlex.quote(sys.executable)}"
    asked = [sys.executable, "-m", "fleetd.host", "survey", str(fleet.root), json.dumps({"host": True, "pythons": {}})]
    survey.write_text(subprocess.run(asked, check=True, capture_output=True, text=True, cwd=ROOT).stdout, encoding="utf-8")
    stand_in = f"STAND_IN_SURVEY={shlex.quote(str(survey))} exec {python} -I -S {shlex.quote(str(STAND_IN))}"
    return script(fleet.root / "stand-in-python", f'case " $* " in\n*" agent "*|*" survey "*) {stand_in} "$@" ;;\n*) exec {python} "$@" ;;\nesac')


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


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


COLUMNS: tuple[tuple[str, Callable[[Cost], str]], ...] = (
    ("hosts", lambda cost: str(cost.hosts)),
    ("far end", lambda cost: cost.kind),
    ("processor a minute", lambda cost: f"{cost.cpu_seconds_per_minute:.2f} s"),
    ("for each host", lambda cost: f"{cost.cpu_seconds_per_minute / cost.hosts * 1000:.0f} ms"),
    ("resident", lambda cost: f"{cost.resident_bytes / 1e6:.0f} MB"),
    ("processor a `status`", lambda cost: milliseconds(cost.read_cpu_seconds)),
    ("`status` p50", lambda cost: milliseconds(statistics.median(cost.reads))),
    ("p99", lambda cost: milliseconds(quantile(cost.reads, 0.99))),
    ("a wish p50", lambda cost: milliseconds(statistics.median(cost.wishes))),
    ("longest", lambda cost: milliseconds(max(cost.wishes))),
    ("all running after", lambda cost: f"{cost.started_seconds:.0f} s"),
)


def table(costs: list[Cost]) -> str:
    """One line a case, and what each host adds to the memory of the smallest case of its kind."""
    lines = [f"| {' | '.join(name for name, _ in COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(row, costs), ""]
    for kind in dict.fromkeys(cost.kind for cost in costs):
        least, *_, most = sorted((cost for cost in costs if cost.kind == kind), key=lambda cost: cost.hosts) * 2
        if most.hosts > least.hosts:
            added = (most.resident_bytes - least.resident_bytes) / (most.hosts - least.hosts)
            lines.append(f"From {least.hosts} to {most.hosts} hosts ({kind}), each adds {added / 1e6:.2f} MB.")
    return "\n".join(lines)


def row(cost: Cost) -> str:
    return f"| {' | '.join(shown(cost) for _, shown in COLUMNS)} |"


def quantile(values: tuple[float, ...], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"


if __name__ == "__main__":
    main()
