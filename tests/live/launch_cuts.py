"""Whole launches through a coordinator while the road to the host is cut once in each: `prove_ssh.py cuts`.

    launch ──► preflight ──► staging ──► placed │ order on its way │ carried out │ trainer born │ told ──► running
    aimed at   before ─────────────────────────►│ order ──────────►│ start ───────────────────►│ after ──────►

A cut kills the servers of the host's connections, at once or after they stood still for a while, and the host then refuses connections for a
moment. While it is away, and again when it is back, trainers are counted and held against what `status` says. Nobody helps: the launch that
was asked for has to end with one trainer. Each cut is a line of JSON; the tables are made of those lines alone, also of several runs' together.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from live_fleet import Fleet, words_of
from sshd import Sshd

from fleetd.paths import StatePaths
from fleetd.plan import load_plan
from fleetd.screens.client import Client
from fleetd.wire import encode
from policies.errors import ExplainedError
from policies.facts import parse_moment

ROOT = Path(__file__).resolve().parents[2]
AIMS = ("before", "order", "start", "after")
KINDS = ("killed", "stalled, then killed")
STAGES = ("before the order", "order on its way", "carried out, no trainer yet", "trainer born, not told yet", "told")
AFTER_SECONDS = 1.0
AWAY_SECONDS_MAX = 2.0
STALL_SECONDS_MAX = 2.0
LOOK_SECONDS = 0.1
EVENT_LOOK_SECONDS = 0.005
TRIGGER_SECONDS_MAX = 60.0
RUNNING_SECONDS_MAX = 120.0
MARKER_FIRST = 70_000_000
"""Every launch's trainer sleeps for its own number of seconds, so that it is told from every other process of the machine."""
UNTOUCHED = 2
NO_TRAINER = frozenset({"queued", "staging"})
"""What `status` may only say of a run while it has none."""


class Launches:
    """One coordinator, one host behind a real sshd, and launches one after the other."""

    def __init__(self, seed: int) -> None:
        self.dice, self.seed, self.fleet = random.Random(seed), seed, Fleet(ROOT)
        self.folder = Path(tempfile.mkdtemp(prefix="fleetd-cuts-"))
        self.host = Sshd(self.folder / "spark-a", "spark-a")
        self.fleet("daemon", "start")
        self.client = Client(StatePaths(self.fleet.state))
        self.windows = {"before": (0.0, 0.0), "order": (0.0, 0.0), "start": (0.0, 0.0), "after": (0.0, AFTER_SECONDS)}
        self._events: list[dict[str, Any]] = []

    def events(self) -> list[dict[str, Any]]:
        """All of history so far."""
        self._events += self.client.all_events(after=int(self._events[-1]["sequence"]) if self._events else 0)
        return self._events

    def close(self) -> None:
        self.client.close()
        self.host.stop()
        self.fleet.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def leave_some_alone(self) -> None:
        """Launches that are left alone: they say how long each part takes here, and so when to cut the others."""
        for number in range(-UNTOUCHED, 0):
            launched = Launched(self, number)
            run = launched.until_running()
            placed, ordered, _, started = launched.passed()
            assert run is not None and placed is not None and ordered is not None and started is not None, "a launch that nobody disturbs"
            self.windows |= {"before": (0.0, placed - launched.asked_at), "order": (0.0, ordered - placed)}
            self.windows["start"] = (ordered - placed, started - placed)
            self.client.stop(run["campaign_id"], "now", "proof")

    def cut_once(self, number: int) -> dict[str, Any]:
        aim, kind = AIMS[number % len(AIMS)], KINDS[number // len(AIMS) % len(KINDS)]
        launched = Launched(self, number)
        launched.until_triggered(aim)
        time.sleep(self.dice.uniform(*self.windows[aim]))
        cut_at = time.time()  # from here on nothing comes through
        killed = self.host.leave(self.dice.uniform(0.0, STALL_SECONDS_MAX) if kind != KINDS[0] else 0.0)
        time.sleep(self.dice.uniform(0.0, AWAY_SECONDS_MAX))
        away = launched.look()
        self.host.start()
        healed = time.monotonic()
        self._until_it_answers(healed)
        run = launched.until_running()
        back, stage = launched.look(), launched.stage_at(cut_at)
        if run is not None:
            self.client.stop(run["campaign_id"], "now", "proof")
        return {
            "seed": self.seed, "number": number, "aim": aim, "kind": kind, "killed": killed, "stage": stage, "away": away, "back": back,
            "trainers_most": launched.most, "seconds_to_running": time.monotonic() - healed, "refused": launched.refused,
            "attempts_ended": len(run["attempts_ended"]) if run is not None else 0,
        }

    def _until_it_answers(self, since: float) -> None:
        """Return once the host has answered after this moment: a run that was running before the cut is told so all the time."""
        give_up_seconds = time.monotonic() + RUNNING_SECONDS_MAX
        while True:
            age_seconds = self.client.status()["hosts"][0]["age_seconds"]
            if age_seconds is not None and age_seconds < time.monotonic() - since:
                return
            assert time.monotonic() < give_up_seconds, f"no answer within {RUNNING_SECONDS_MAX:.0f} s\n{self.fleet.logs()}"
            time.sleep(LOOK_SECONDS)


class Launched:
    """One launch, asked for on a thread of its own as a person would ask for it: whoever asks waits for the answer."""

    def __init__(self, place: Launches, number: int) -> None:
        self.place, self.marker = place, f"{MARKER_FIRST + number + UNTOUCHED}"
        self.name, self.most, self.refused = f"cut-{place.seed}-{number + UNTOUCHED}", 0, ""
        self._loaded = load_plan(self._plan())
        self.asked_at = time.time()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def until_triggered(self, aim: str) -> None:
        """Return at the moment at which the part of a launch begins that the cut is aimed at."""
        kind = {"before": None, "order": "run_placed", "start": "run_placed", "after": "attempt_started"}[aim]
        self._until(lambda: kind is None or self.moment(kind) is not None, TRIGGER_SECONDS_MAX, EVENT_LOOK_SECONDS, f"no {kind}")

    def until_running(self) -> dict[str, Any] | None:
        """The run once `status` says that it runs, and as which process: a notice tells the one, the next look of its supervisor the other.
        None when the launch was refused: then nothing may run, now or a moment later."""
        self._until(lambda: self.refused or self._is_told(), RUNNING_SECONDS_MAX, LOOK_SECONDS, "not running")
        self._thread.join(RUNNING_SECONDS_MAX)
        return None if self.refused else self.run()

    def look(self) -> dict[str, Any]:
        """What lives, and what `status` says of it at the same moment."""
        run, pids = self.run(), self.trainers()
        host = next(iter(self.place.client.status()["hosts"]), {})
        told = {"state": run["state"], "pid": run["pid"]["value"], "detail": run["detail"]} if run is not None else {"state": None, "pid": None}
        return {"trainers": len(pids), "is_pid_told": [told["pid"]] == pids, **told, "host": host.get("detail", "")}

    def run(self) -> dict[str, Any] | None:
        return next((run for run in self.place.client.status()["runs"] if run["campaign_id"].endswith(f"-{self.name}")), None)

    def trainers(self) -> list[int]:
        """Every process that does this run's work; the most there ever were is remembered."""
        found = [process.pid for process in psutil.process_iter() if words_of(process) == f"sleep {self.marker}"]
        self.most = max(self.most, len(found))
        return found

    def moment(self, kind: str) -> float | None:
        """When the coordinator wrote this down of our run. `kind` is an event's, or a notice's."""
        for event in self.place.events():
            is_it = kind in (event["kind"], event["body"].get("kind")) and event["kind"] in (kind, "noticed")
            if is_it and str(event["campaign_id"]).endswith(f"-{self.name}"):
                return parse_moment(event["at"]).timestamp()
        return None

    def passed(self) -> tuple[float | None, float | None, float | None, float | None]:
        """When it was placed, its order carried out, its trainer born, and that told: by history, the host's files and the kernel."""
        born = [process.create_time() for process in psutil.process_iter() if words_of(process) == f"sleep {self.marker}"]
        orders = [path.stat().st_mtime for path in self.place.fleet.host_root.glob(f"runs/*-{self.name}-*/run.json")]
        return self.moment("run_placed"), min(orders, default=None), min(born, default=None), self.moment("attempt_started")

    def stage_at(self, cut_at: float) -> str:
        """How far the launch had come at a moment."""
        return STAGES[sum(moment is not None and moment <= cut_at for moment in self.passed())]

    def _is_told(self) -> bool:
        run = self.run()
        return run is not None and run["state"] == "running" and run["pid"]["value"] is not None

    def _until(self, met: Callable[[], Any], seconds_max: float, look_seconds: float, otherwise: str) -> None:
        give_up_seconds = time.monotonic() + seconds_max
        while not met():
            assert time.monotonic() < give_up_seconds, f"{self.name}: {otherwise} within {seconds_max:.0f} s: {self.run()}\n{self.place.fleet.logs()}"
            self.trainers()
            time.sleep(look_seconds)

    def _ask(self) -> None:
        with Client(StatePaths(self.place.fleet.state)) as client:
            try:
                client.launch(encode(self._loaded.plan), self._loaded.text, "proof")
            except ExplainedError as error:
                self.refused = f"{error.title}: {error.what}"

    def _plan(self) -> Path:
        body = {"transport": "ssh", "ssh_config": str(self.place.host.ssh_config), "root": str(self.place.fleet.host_root), "capacity": "2GiB",
                "floor": "64MiB"}
        defaults = {"memory_cap": "64MiB", "restarts": {"max": 0, "window": "1h", "first": "1s", "ceiling": "2s"},
                    "stop": {"grace_floor": "30s", "grace_ceiling": "60s"}}
        return self.place.fleet.plan(
            self.name, hosts={self.place.host.name: body}, candidates={"one": {"command": ["sleep", self.marker]}}, defaults=defaults, data={},
            after_freeze={"evaluate": [], "report": False},
        )


def faults_of(cut: dict[str, Any]) -> list[str]:
    """What of one cut is not as it has to be."""
    found, away, back = [], cut["away"], cut["back"]
    if not cut["killed"]:
        found.append("there was no connection to cut")
    if cut["trainers_most"] > 1:
        found.append(f"{cut['trainers_most']} trainers at once")
    if cut["attempts_ended"]:
        found.append(f"{cut['attempts_ended']} attempts ended")
    expected = 0 if cut["refused"] else 1
    if back["trainers"] != expected:
        found.append(f"{back['trainers']} trainers in the end, {expected} expected")
    if not cut["refused"] and not back["is_pid_told"]:
        found.append(f"status names pid {back['pid']}, which is not the trainer")
    if away["trainers"] and (away["state"] in NO_TRAINER or away["state"] is None):
        found.append(f"status said {away['state']} while a trainer lived")
    if away["state"] == "running" and not away["trainers"]:
        found.append("status said running while no trainer lived")
    return found


def tables(cuts: list[dict[str, Any]]) -> str:
    """Where the cuts fell, what lived while the host was away and what was said of it, and what there was in the end."""
    lines = [f"{'the cut fell':28} {'cuts':>5}   {'while away: none':>16} {'one':>4} {'two':>4}   {'in the end: one':>15} "
             f"{'none, told so':>13} {'two':>4}"]
    for stage in (*STAGES, "all"):
        here = [cut for cut in cuts if stage in (cut["stage"], "all")]
        away = Counter(min(cut["away"]["trainers"], 2) for cut in here)
        end = Counter("refused" if cut["refused"] and not cut["back"]["trainers"] else min(cut["back"]["trainers"], 2) for cut in here)
        lines.append(f"{stage:28} {len(here):5}   {away[0]:16} {away[1]:4} {away[2]:4}   {end[1]:15} {end['refused']:13} {end[2]:4}")
    seconds = [cut["seconds_to_running"] for cut in cuts]
    said = Counter((cut["away"]["trainers"], cut["away"]["state"] or "nothing yet") for cut in cuts)
    lines.append("said while away: " + ", ".join(f"{state} with {trainers} ({count})" for (trainers, state), count in sorted(said.items(), key=str)))
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(cut["kind"] for cut in cuts).items())
    lines.append(f"connections: {sum(cut['killed'] for cut in cuts)}, {kinds}")
    lines.append(f"from the heal to what was asked for: median {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s")
    return "\n".join(lines)


def run_cuts(count: int, seed: int, into: Path | None) -> list[str]:
    """Cut so many launches; the faults found. `into` collects the cuts of several runs, and the tables are of all that lie there."""
    place, cuts, faults = Launches(seed), [], []
    try:
        place.leave_some_alone()
        parts = ", ".join(f"{part} {first:.2f} to {last:.2f} s" for part, (first, last) in place.windows.items())
        print(f"      seed {seed}: cuts are drawn within {parts}", flush=True)
        for number in range(count):
            cuts.append(place.cut_once(number))
            found = faults_of(cuts[-1])
            faults += [f"seed {seed}, cut {number}, {cuts[-1]['stage']}: {fault}" for fault in found]
            if into is not None:
                with open(into, "a", encoding="utf-8") as lines:
                    lines.write(json.dumps(cuts[-1]) + "\n")
    finally:
        place.close()
    if into is not None:
        cuts = [json.loads(line) for line in into.read_text(encoding="utf-8").splitlines()]
    print(tables(cuts), flush=True)
    return faults
