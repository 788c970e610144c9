"""What supervision costs: processor share and resident memory of each of fleetd's processes beside an idle run, read from /proc over a window.

    python benchmarks/supervision.py [SECONDS]

One run is supervised at 1 Hz and polled by the coordinator, as always. Shares are of one core, in the same window for all.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "live"))

from live_fleet import Fleet, words_of  # noqa: E402  (the live tests' own installation, found by its path)

WINDOW_SECONDS = 60.0
SETTLE_SECONDS = 10.0
DOOR = "/fleetd/host/__main__.py"


def main() -> None:
    window_seconds = float(sys.argv[1]) if len(sys.argv) > 1 else WINDOW_SECONDS
    fleet = Fleet(ROOT)
    try:
        plan = fleet.plan(candidates={"idle": {"command": ["sleep", "3600"]}}, data={}, after_freeze={"evaluate": []})
        fleet.launch(plan)
        fleet.until(lambda document: document["runs"][0]["state"] == "running", "running")
        time.sleep(SETTLE_SECONDS)
        processes = {role: process for process in fleet.processes() if (role := role_of(process))}
        before = {role: spent(process) for role, process in processes.items()}
        time.sleep(window_seconds)
        print(f"| process | share of one core over {window_seconds:.0f} s | resident |\n|---|---|---|")
        for role, process in processes.items():
            share = (spent(process) - before[role]) / window_seconds
            print(f"| {role} | {share:.2%} | {process.memory_info().rss / 1e6:.0f} MB |")
    finally:
        fleet.close()


def role_of(process: psutil.Process) -> str | None:
    words = words_of(process)
    if "fleetd.coordinator.daemon" in words:
        return "coordinator"
    return next((after for word, after in pairwise(words) if word.endswith(DOOR)), None)


def spent(process: psutil.Process) -> float:
    """Processor seconds of the process itself, user and system."""
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
