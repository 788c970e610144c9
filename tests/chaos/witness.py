"""The outside witness: `python witness.py ROOT` looks at /proc as fast as it may, and swears that no run ever has two living trainers.

A look is no snapshot: one trainer may end and another begin while it is taken. So two are a violation only when the first is seen
alive again, as the same process, after the second was seen. It ends with its standard input and prints what it saw.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path

from zoo import Animal, look_at

PAUSE_SECONDS = 0.01
STRANGERS_FORGOTTEN_SECONDS = 1.0
"""A pid that is a stranger now may exec, or be handed on: it is looked at again this often."""


class Witness:
    def __init__(self, root: Path) -> None:
        self.root = os.fsencode(root)
        self.samples = 0
        self.gap_seconds_max = 0.0
        self.trainers: dict[tuple[int, int], str] = {}
        self.violations: list[dict[str, object]] = []
        self._strangers: set[str] = set()
        self._forgotten_seconds = 0.0

    def sample(self) -> None:
        now_seconds = time.monotonic()
        if now_seconds - self._forgotten_seconds > STRANGERS_FORGOTTEN_SECONDS:
            self._strangers, self._forgotten_seconds = set(), now_seconds
        alive: dict[str, list[Animal]] = {}
        for name in os.listdir("/proc"):
            if not name.isdigit() or name in self._strangers:
                continue
            animal = look_at(int(name), self.root)
            if animal is None:
                if not _is_young(name):
                    self._strangers.add(name)
            elif animal.role == "trainer":
                alive.setdefault(animal.run, []).append(animal)
                self.trainers[(animal.pid, animal.start_ticks)] = animal.run
        for run, found in alive.items():
            if len(found) > 1:
                self._judge(run, found)
        self.samples += 1

    def _judge(self, run: str, found: list[Animal]) -> None:
        again = [look_at(animal.pid, self.root) for animal in found]
        still = [a for a, b in zip(found, again, strict=True) if b is not None and (b.start_ticks, b.role) == (a.start_ticks, a.role)]
        if len(still) > 1:
            self.violations.append({"run": run, "pids": [animal.pid for animal in still], "at": time.time()})


def _is_young(name: str) -> bool:
    """Whether it began within the last two seconds, so that it may still become somebody else by an exec."""
    try:
        with open(f"/proc/{name}/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        with open("/proc/uptime", encoding="ascii") as file:
            return float(file.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK") < 2.0
    except (OSError, IndexError, ValueError):
        return False


def main() -> None:
    witness, began, last = Witness(Path(sys.argv[1])), time.monotonic(), time.monotonic()
    while not select.select([0], [], [], PAUSE_SECONDS)[0]:
        witness.sample()
        now = time.monotonic()
        witness.gap_seconds_max, last = max(witness.gap_seconds_max, now - last), now
    print(json.dumps({
        "samples": witness.samples, "trainers_seen": len(witness.trainers), "violations": witness.violations,
        "seconds": round(time.monotonic() - began, 1), "gap_seconds_max": round(witness.gap_seconds_max, 3),
    }))


if __name__ == "__main__":
    main()
