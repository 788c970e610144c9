"""What supervision costs and how soon it tells: `python benchmarks/supervision.py` prints three tables and writes them to benchmarks/README.md.

    cost       processor share and resident memory of each of fleetd's processes beside one idle run, over a window
    slowdown   one training of our own, with fleetd's processes on and off (SIGSTOP, SIGCONT) in turns: pairs of neighbouring windows
    news       from the end of a trainer's process (held by a pidfd) to its attempt standing as ended in `GET /v1/status`

How busy the machine was with others stands above each table: a share or a delay means little without.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "live"))

from live_fleet import EXAMPLE, Fleet, step_of, trainer_pid, words_of  # noqa: E402  (the live tests' own installation, found by its path)

from fleetd.paths import StatePaths  # noqa: E402
from fleetd.screens.client import Client  # noqa: E402
from policies.facts import parse_moment  # noqa: E402

WINDOW_SECONDS = 60.0
SETTLE_SECONDS = 10.0
DOOR = "/fleetd/host/__main__.py"
DEATHS = 120
PAIRS = 20
TURN_SECONDS = 4.0
"""One window of the slowdown: shorter than any silence that the shim would take for a death."""
TURN_EDGE_SECONDS = 0.3
LOOK_SECONDS = 0.02
NEWS_SECONDS_MAX = 30.0
ROLES = ("supervisor", "shim", "agent", "coordinator")
TABLE = ROOT / "benchmarks" / "README.md"
DIES = (
    "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]); print('ready', flush=True); "
    "signal.sigwait([signal.SIGUSR1]); sys.exit(int(sys.argv[1]))"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=WINDOW_SECONDS, help="window of the cost")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of windows of the slowdown")
    parser.add_argument("--deaths", type=int, default=DEATHS, help="deaths, a third of each kind")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--only", choices=("cost", "slowdown", "news"), action="append", help="only these, the others stay as they were measured")
    given = parser.parse_args()
    parts: dict[str, tuple[Callable[[Fleet, Any], str], Any]] = {
        "cost": (cost, given.seconds), "slowdown": (slowdown, given.pairs), "news": (news, given.deaths),
    }
    for name in given.only or parts:
        text = measured(*parts[name])
        print(f"{text}\n", flush=True)
        if given.write:
            start, end = f"<!-- {name} of benchmarks/supervision.py -->", f"<!-- end of {name} -->"
            before, _, rest = TABLE.read_text(encoding="utf-8").partition(start)
            TABLE.write_text(f"{before}{start}\n\n{text}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def measured(part: Callable[[Fleet, Any], str], amount: Any) -> str:
    fleet, busy = Fleet(EXAMPLE), Busy()
    try:
        table = part(fleet, amount)
        return f"{busy.words()}\n\n{table}"
    finally:
        fleet.close()


class Busy:
    """How much of the machine was at work from its making on, ourselves included."""

    def __init__(self) -> None:
        self._before, self._at = psutil.cpu_times(), datetime.now(timezone.utc)

    def words(self) -> str:
        now, before = psutil.cpu_times(), self._before
        idle = (now.idle + now.iowait) - (before.idle + before.iowait)
        whole = sum(now[:8]) - sum(before[:8])
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        return (
            f"Measured {self._at:%Y-%m-%d %H:%M} UTC on {os.cpu_count()} cores ({platform.machine()}), Linux {platform.release()}, "
            f"Python {platform.python_version()}. {1 - idle / whole:.0%} of its processor time was in use meanwhile, the trainers' own share "
            f"included; load average at the end {load}; its own priority was nice {os.nice(0)}."
        )



# Cost.


def cost(fleet: Fleet, window_seconds: float) -> str:
    fleet.launch(fleet.plan(candidates={"idle": {"command": ["sleep", "3600"]}}, data={}, after_freeze={"evaluate": []}))
    fleet.until(lambda document: document["runs"][0]["state"] == "running", "running")
    time.sleep(SETTLE_SECONDS)
    processes = by_role(fleet)
    before = {role: spent_seconds(process.pid) for role, process in processes.items()}
    time.sleep(window_seconds)
    lines = [f"| process | share of one core over {window_seconds:.0f} s | resident |", "|---|---|---|"]
    for role, process in processes.items():
        share = (spent_seconds(process.pid) - before[role]) / window_seconds
        lines.append(f"| {role} | {share:.2%} | {process.memory_info().rss / 1e6:.1f} MB |")
    return "\n".join(lines)


def by_role(fleet: Fleet) -> dict[str, psutil.Process]:
    found = {role: process for process in fleet.processes() if (role := role_of(process)) in ROLES}
    return dict(sorted(found.items(), key=lambda pair: ROLES.index(pair[0])))


def role_of(process: psutil.Process) -> str | None:
    words = words_of(process).split()
    if "fleetd.coordinator.daemon" in words:
        return "coordinator"
    return next((after for word, after in pairwise(words) if word.endswith(DOOR)), None)


def spent_seconds(pid: int) -> float:
    """Processor seconds of all its threads, to the nanosecond."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


# Slowdown.


def slowdown(fleet: Fleet, pairs: int) -> str:
    training = {"training": {"steps": 10_000_000}, "checkpoint": {"every_steps": 10_000_000}, "validation": {"every_steps": 10_000_000}}
    fleet.launch(fleet.plan(deadline="1h", candidates={"one": training}, after_freeze={"evaluate": []}))
    document = fleet.until(lambda document: step_of(document["runs"][0]) > 200, "at work")
    log = fleet.run_dir(document["runs"][0]) / "log.jsonl"
    pids = [process.pid for process in by_role(fleet).values()]
    turns = []
    for number in range(2 * pairs):
        is_on = number % 4 in (0, 3)  # on off, off on, ...: what drifts falls on both alike
        with stopped([] if is_on else pids):
            time.sleep(TURN_EDGE_SECONDS)
            began = time.time()
            time.sleep(TURN_SECONDS)
            turns.append((is_on, began, time.time()))
    seconds = step_seconds(log, [(began, ended) for _, began, ended in turns])
    ratios = []
    for number in range(0, len(turns), 2):
        first, second = seconds[number], seconds[number + 1]
        on, off = (first, second) if turns[number][0] else (second, first)
        ratios.append(statistics.median(on) / statistics.median(off) - 1)
    low, middle, high = quartiles(ratios)
    slower = sum(ratio > 0 for ratio in ratios)
    return (
        "| a step with fleetd's processes at work, against the same training with them stopped | |\n|---|---|\n"
        f"| median of {len(ratios)} pairs | {middle:+.2%} |\n| quartiles | {low:+.2%} to {high:+.2%} |\n"
        f"| extremes | {min(ratios):+.2%} to {max(ratios):+.2%} |\n| pairs in which it was slower with them | {slower} of {len(ratios)} |\n"
        f"| steps compared, their median | {sum(map(len, seconds))}, {statistics.median(s for each in seconds for s in each) * 1000:.2f} ms |"
    )


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def step_seconds(log: Path, windows: list[tuple[float, float]]) -> list[list[float]]:
    """For each window, how long its steps took by the trainer's own clock."""
    found: list[list[float]] = [[] for _ in windows]
    number = 0
    for line in log.read_text(encoding="utf-8").splitlines():
        record = json.loads(line) if line.endswith("}") else {}
        if "loss" not in record:
            continue
        at = parse_moment(record["at"]).timestamp()
        while number < len(windows) and at > windows[number][1]:
            number += 1
        if number < len(windows) and at - record["seconds"] >= windows[number][0]:
            found[number].append(record["seconds"])
    assert all(found), "a window without a step"
    return found


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


# News.


def news(fleet: Fleet, deaths: int) -> str:
    each = -(-deaths // 3)
    found: dict[str, list[float]] = {}
    crashing = {"restarts": {"max": 10_000, "window": "1h", "first": "100ms", "ceiling": "200ms"}}
    found["SIGKILL"] = ends_of(fleet, "killed", each, 0, lambda pid: os.kill(pid, signal.SIGKILL), **crashing)
    found["exit 1"] = ends_of(fleet, "failing", each, 1, lambda pid: os.kill(pid, signal.SIGUSR1), **crashing)
    found["exit 0"] = [
        delay for number in range(each) for delay in ends_of(fleet, f"ending-{number}", 1, 0, lambda pid: os.kill(pid, signal.SIGUSR1))
    ]
    lines = ["| a trainer's end | deaths | p50 | p99 | longest |", "|---|---|---|---|---|"]
    found["all"] = [delay for kind in list(found) for delay in found[kind]]
    for kind, delays in found.items():
        p99 = sorted(delays)[min(len(delays) - 1, int(0.99 * len(delays)))]
        lines.append(f"| {kind} | {len(delays)} | {statistics.median(delays):.2f} s | {p99:.2f} s | {max(delays):.2f} s |")
    return "\n".join(lines)


def ends_of(fleet: Fleet, name: str, deaths: int, status: int, end: Callable[[int], None], **terms: Any) -> list[float]:
    """So many ends of one candidate, one attempt after the other."""
    candidate = {"command": [sys.executable, "-S", "-c", DIES, str(status)], "memory_cap": "64MiB", **terms}
    campaign_id = fleet.launch(fleet.plan(name, candidates={"one": candidate}, data={}, after_freeze={"evaluate": []}))
    delays = []
    with Client(StatePaths(fleet.state)) as client:
        for number in range(1, deaths + 1):
            run = until(client, campaign_id, lambda run, number=number: is_ready(fleet, run, number))
            pid = trainer_pid(run)
            assert pid is not None
            held = os.pidfd_open(pid)
            end(pid)
            select.select([held], [], [])
            ended = time.monotonic()
            os.close(held)
            until(client, campaign_id, lambda run, number=number: any(each["attempt"] == number for each in run["attempts_ended"]))
            delays.append(time.monotonic() - ended)
        if terms:
            fleet("stop", campaign_id, "--now")
    return delays


def is_ready(fleet: Fleet, run: dict[str, Any], number: int) -> bool:
    output = fleet.run_dir(run) / "attempts" / f"{number:04d}" / "stdout.log"
    return run["state"] == "running" and run["attempt"] == number and bool(trainer_pid(run)) and output.exists() and "ready" in output.read_text()


def until(client: Client, campaign_id: str, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    give_up_seconds = time.monotonic() + NEWS_SECONDS_MAX
    while True:
        run: dict[str, Any] = next(run for run in client.status()["runs"] if run["campaign_id"] == campaign_id)
        if met(run):
            return run
        assert time.monotonic() < give_up_seconds, run
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
