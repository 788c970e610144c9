"""Where the deadline matrix is played: an installation whose clocks, time zones and link can be tampered with, and what befalls it."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_fleet import Fleet, words_of

from fleetd import clock

KILL_SECONDS_MAX = 60.0
DEAF_VALIDATION = 3
DEAF_EVERY_STEPS = 20
STOP = {"grace_floor": "10s", "grace_ceiling": "20s"}
"""A disk that stands still for a while must not use up what a stop may take."""
DEAF_STEP = (DEAF_VALIDATION - 1) * DEAF_EVERY_STEPS
"""Step 0 is validated first."""
_REVIVE = "import sys; from pathlib import Path; from fleetd.coordinator.daemon import ensure_running; ensure_running(Path(sys.argv[1]))"


class Place(Fleet):
    """An installation whose clocks, time zones and link to the host can be tampered with."""

    def __init__(self, shards: Path) -> None:
        super().__init__(shards)
        self.offset, self.cut = self.root / "offset", self.root / "link-is-cut"
        self.offset.write_text("0")
        self.environment[clock.ENV_OFFSET_FILE] = str(self.offset)
        self.python = self.root / "host-python"
        self.time_zone()

    def time_zone(self, *, coordinator: str = "UTC", host: str = "UTC") -> None:
        """The host's processes begin with this interpreter, which also stands for the link: while it is cut, no agent comes up."""
        self.environment["TZ"] = coordinator
        self.python.write_text(f"#!/bin/sh\ntest -e {self.cut} && exit 1\nTZ={host} exec {sys.executable} \"$@\"\n")
        self.python.chmod(self.python.stat().st_mode | stat.S_IXUSR)

    def matrix_plan(self, faults: tuple[str, ...], seconds: int) -> Path:
        endless = {"training": {"steps": 10_000_000}, "checkpoint": {"every_steps": 400}, "validation": {"every_steps": 2000}, "stop": STOP}
        deaf = {
            "training": {"steps": 10_000_000}, "checkpoint": {"every_steps": DEAF_EVERY_STEPS}, "validation": {"every_steps": DEAF_EVERY_STEPS},
            "environment": {"PYTHONPATH": str(Path(__file__).with_name("deaf_trainer")), "DEAF_FROM_VALIDATION": str(DEAF_VALIDATION)},
            "stop": STOP,
        }
        candidates = {name_of(fault): deaf if fault == "deaf validation" else endless for fault in faults}
        return self.plan("matrix", deadline=f"{seconds}s", candidates=candidates, hosts=self.hosts(), after_freeze={"evaluate": []})

    def hosts(self) -> dict[str, Any]:
        host = {"transport": "local", "root": str(self.host_root), "capacity": "12GiB", "floor": "256MiB", "agent_python": str(self.python)}
        return {"workstation": host}

    def warm_up(self) -> None:
        """A coordinator and an agent that have seen what time it is, before anything of the campaign exists."""
        plan = self.plan("warm", candidates={"one": {"command": ["true"]}}, data={}, after_freeze={"evaluate": []}, hosts=self.hosts())
        self("wait", self.launch(plan))

    def kill_coordinator(self) -> None:
        kill(int((self.state / "lock").read_text()))

    def revive_coordinator(self) -> None:
        subprocess.run([sys.executable, "-c", _REVIVE, str(self.state)], env=self.environment, cwd=self.root, check=True)

    def cut_link(self) -> None:
        self.cut.touch()
        for process in self.processes():
            if "/fleetd/host/__main__.py agent " in words_of(process):
                kill(process.pid)

    def step(self, seconds: float) -> None:
        self.offset.write_text(f"{seconds}")


def kill(pid: int) -> None:
    """SIGKILL, and wait until it is gone."""
    held = os.pidfd_open(pid)
    signal.pidfd_send_signal(held, signal.SIGKILL)
    assert select.select([held], [], [], KILL_SECONDS_MAX)[0], f"{pid} survives"
    os.close(held)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """`before` the launch, or while the trainers are `at_work`."""

    before: Callable[[Place], None] = lambda place: None
    at_work: Callable[[Place], None] = lambda place: None
    has_coordinator: bool = True
    has_link: bool = True


def stepped_before(seconds: float) -> Situation:
    def before(place: Place) -> None:
        place.warm_up()
        place.step(seconds)

    return Situation(before=before)


def stepped_while_down(seconds: float) -> Situation:
    def at_work(place: Place) -> None:
        place.kill_coordinator()
        place.step(seconds)
        place.revive_coordinator()

    return Situation(at_work=at_work)


HOUR = 3600.0
SITUATIONS = {
    "nothing else": Situation(),
    "coordinator dead": Situation(at_work=Place.kill_coordinator, has_coordinator=False),
    "link down": Situation(at_work=Place.cut_link, has_link=False),
    "clock an hour forward, during the run": Situation(at_work=lambda place: place.step(HOUR)),
    "clock an hour back, during the run": Situation(at_work=lambda place: place.step(-HOUR)),
    "clock an hour forward, before the start": stepped_before(HOUR),
    "clock an hour back, before the start": stepped_before(-HOUR),
    "clock an hour forward, while the coordinator was down": stepped_while_down(HOUR),
    "clock an hour back, while the coordinator was down": stepped_while_down(-HOUR),
    "host 14 h east of UTC, coordinator 12 h west": Situation(
        before=lambda place: place.time_zone(coordinator="Etc/GMT+12", host="Pacific/Kiritimati"),
    ),
}


def name_of(fault: str) -> str:
    return fault.replace(" ", "-")
