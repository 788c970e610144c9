"""Live chaos: `python tests/chaos/chaos.py --kills 300 --seed 1`. Real trainings, real processes, SIGKILL at random moments.

    twin       one campaign that nobody disturbs: the numbers that every other one must reach
    round      the same campaign while strikes hit coordinator, agent, supervisor, shim, newborn and trainer; whoever is needed to
               go on by hand (a dead coordinator) is started again after a pause; rounds follow until the kills are used up
    witness    a process of its own that never may see two living trainers on one run
    end        every training byte-equal to its twin, the same choice and figures, nothing left behind

One seed is one sequence of strikes; what they hit depends on the machine. A round that fails keeps its directory and prints it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (run as a program, its neighbours are found by path)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "live")]

import yaml
from live_fleet import Fleet
from outcome import leftovers, unlike_its_twin
from zoo import Animal, age_seconds, animals, kill

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "manpages" / "data"
STEPS = 160
ROUND_SECONDS_MAX = 800.0
ANSWER_SECONDS_MAX = 120.0
KILLS_PER_ROUND = 25
YOUNG_SECONDS = 1.0
PATIENCE_SECONDS = 4.0
LAUNCHES_MAX = 10
STRIKES: tuple[tuple[float, tuple[str, ...]], ...] = (
    (1.0, ("coordinator",)), (0.8, ("agent",)), (1.5, ("supervisor",)), (1.5, ("shim",)), (0.5, ("newborn",)), (1.5, ("trainer",)),
    (0.7, ("supervisor", "shim")), (0.5, ("shim", "trainer")), (0.4, ("supervisor", "trainer")), (0.3, ("coordinator", "agent")),
    (0.4, ("supervisor", "shim", "trainer")), (0.2, ("coordinator", "agent", "supervisor", "shim", "trainer")),
)
"""What one strike hits together, of one run, and how often in proportion."""
BOUNDARIES = {"coordinator": 90, "agent": 30, "supervisor": 50, "shim": 20, "trainer": 60}
"""In a round of boundaries each process draws the number of its last one from 1 to this (fleetd/faults.py; a trainer's are its syncs
and renames). Each role has its share of the kills."""


def cut_shards(folder: Path, example: Path = EXAMPLE) -> Path:
    """One small train shard with the whole val and test shards."""
    index = json.loads((example / "shards_index.json").read_text(encoding="utf-8"))
    index["shards"] = [shard for shard in index["shards"] if shard["name"] in {"train_009.bin", "val_000.bin", "test_000.bin"}]
    (folder / "shards_index.json").write_text(json.dumps(index), encoding="utf-8")
    shutil.copy(example / index["tokenizer"], folder)
    for shard in index["shards"]:
        for path in example.glob(f"{shard['name'].removesuffix('.bin')}.*"):
            shutil.copy(path, folder)
    return folder


@dataclass(kw_only=True)
class Tally:
    """What happened in all rounds together."""

    kills: Counter[str] = field(default_factory=Counter)
    attempts: int = 0
    runs_equal: int = 0
    samples: int = 0
    trainers_seen: int = 0
    gap_seconds_max: float = 0.0
    faults: list[str] = field(default_factory=list)


def ask(state: Path, path: str) -> dict[str, Any] | None:
    """What the coordinator answers now, None when nobody does."""
    try:
        with closing(http.client.HTTPConnection("fleetd", timeout=5.0)) as connection:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(5.0)
            connection.sock.connect(str(state / "api.sock"))
            connection.request("GET", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
    except (OSError, ValueError, http.client.HTTPException):
        return None


class Round:
    """One campaign under strikes."""

    def __init__(self, fleet: Fleet, dice: random.Random, kills_max: int, say: Callable[[str], None]) -> None:
        self.fleet, self.dice, self.kills_max, self.say = fleet, dice, kills_max, say
        self.kills: Counter[str] = Counter()
        self.purse: Path | None = None
        self.is_patient = False
        """Whether a launch that is refused is tried again although nobody died over it: the disk was full."""
        self.starting: subprocess.Popen[bytes] | None = None
        self.restart_seconds: float | None = None

    def run(self) -> dict[str, Any]:
        """Until the campaign is over; its entry of the status document. AssertionError when it takes too long."""
        campaign_id, end = self.launch(), time.monotonic() + ROUND_SECONDS_MAX
        while True:
            self._revive()
            document = ask(self.fleet.state, "/v1/status")
            found = next((each for each in (document or {}).get("campaigns", ()) if each["campaign_id"] == campaign_id), None)
            if found is not None and found["is_over"]:
                return dict(found)
            assert time.monotonic() < end, f"the campaign is not over after {ROUND_SECONDS_MAX:.0f} s: {json.dumps(document)[:3000]}"
            if self.purse is None and self.kills.total() < self.kills_max:
                self._strike()
            else:
                time.sleep(0.5)

    def history(self) -> dict[str, Any] | None:
        """All events, from a coordinator that may have died just now and was started again."""
        end = time.monotonic() + ANSWER_SECONDS_MAX
        while (document := ask(self.fleet.state, "/v1/events?limit=5000")) is None and time.monotonic() < end:
            self._revive()
            time.sleep(0.1)
        return document

    def launch(self) -> str:
        """Launch, and again if the coordinator died over it before the campaign was history, as a person would."""
        plan = plan_of(self.fleet)
        for _ in range(LAUNCHES_MAX):
            done = self.fleet("launch", str(plan), "--json", expect=None)
            if done.returncode == 0:
                return str(json.loads(done.stdout)["campaign_id"])
            assert self.purse is not None or self.is_patient, done.stderr
            while (document := ask(self.fleet.state, "/v1/status")) is None:
                self._revive()
                time.sleep(0.1)
            if document["campaigns"]:
                return str(document["campaigns"][0]["campaign_id"])
        raise AssertionError(f"{LAUNCHES_MAX} launches were not enough")

    def pay(self) -> None:
        """Let the processes kill themselves, each at a boundary of its own, as often as there are coins for its role."""
        self.purse = self.fleet.root / "purse"
        for number in range(self.kills_max):
            role = list(BOUNDARIES)[number % len(BOUNDARIES)]
            (self.purse / role).mkdir(parents=True, exist_ok=True)
            (self.purse / role / f"coin-{number:04d}").touch()
        switches = [f"{role}:~{number}:kill:{self.purse / role}" for role, number in BOUNDARIES.items()]
        self.fleet.environment |= {
            "FLEETD_FAULT": ",".join(switches), "CHAOS_TRAINER": f"~{BOUNDARIES['trainer']}:{self.purse / 'trainer'}",
        }

    def count_deaths(self) -> None:
        """What the processes in a round of boundaries died of."""
        if self.purse is None:
            return
        for path in sorted(self.purse.glob("*/*"), key=lambda each: each.stat().st_ctime):
            if not path.name.startswith("coin-"):
                role, _, point = path.name.split("-", 2)
                self.kills[role] += 1
                self.say(f"{self.kills.total():4d} {role:11s} at {point}")

    def _revive(self) -> None:
        """Start the coordinator again, some time after it died: nobody else would."""
        if self.starting is not None and self.starting.poll() is None:
            return
        if any(animal.role == "coordinator" for animal in animals(self.fleet.root)):
            self.restart_seconds = None
        elif self.restart_seconds is None:
            self.restart_seconds = time.monotonic() + self.dice.uniform(0.0, 4.0)
        elif time.monotonic() >= self.restart_seconds:
            code = "import sys; from pathlib import Path; from fleetd.coordinator.daemon import ensure_running; ensure_running(Path(sys.argv[1]))"
            self.restart_seconds = None
            self.starting = subprocess.Popen(
                [sys.executable, "-c", code, str(self.fleet.state)], env=self.fleet.environment, cwd=self.fleet.root, stderr=subprocess.DEVNULL,
            )

    def _strike(self) -> None:
        roles = self.dice.choices([each for _, each in STRIKES], [weight for weight, _ in STRIKES])[0]
        aim = self.dice.choice(("any", "young", "saving")) if "trainer" in roles else self.dice.choice(("any", "young"))
        if aim == "any":
            time.sleep(self.dice.uniform(0.0, 2.5))
        victim = self._victim(roles[0], aim)
        if victim is None:
            return
        time.sleep(0.0 if aim == "saving" else min(self.dice.expovariate(5.0), 1.0))
        living = animals(self.fleet.root)
        victims = [victim, *(other for role in roles[1:] for other in living if other.role == role and other.run in ("", victim.run))]
        for each in victims:
            if kill(each):
                self.kills[each.role] += 1
                self.say(f"{self.kills.total():4d} {aim:6s} {each.role:11s} pid {each.pid} age {age_seconds(each):6.2f} s {each.run}")

    def _victim(self, role: str, aim: str) -> Animal | None:
        """Somebody of this role: anybody, one just born, or (a trainer) one that is writing a checkpoint at this moment."""
        end = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < end:
            if aim == "saving" and not (saving := list(self.fleet.host_root.glob("runs/*/checkpoints/.tmp-*"))):
                time.sleep(0.001)
                continue
            found = [animal for animal in animals(self.fleet.root) if animal.role == role]
            if aim == "saving":
                found = [animal for animal in found if any(path.name.endswith(f"-{animal.pid}") for path in saving)]
            if aim == "young":
                found = [animal for animal in found if age_seconds(animal) < YOUNG_SECONDS]
            if found:
                return self.dice.choice(found)
            if aim == "any":
                return None
            self._revive()
            time.sleep(0.005)
        return None


def plan_of(fleet: Fleet) -> Path:
    """Two small trainings with an ample budget, saving often, and their evaluation."""
    changes = {
        "deadline": "40m",
        "candidates": {"one": {"training": {"steps": STEPS}}, "two": {"training": {"steps": STEPS, "seed": 2, "optimizer": {"lr": 0.01}}}},
    }
    path = fleet.plan("chaos", **changes)
    body = yaml.safe_load(path.read_text(encoding="utf-8"))
    body["defaults"]["checkpoint"]["every_steps"] = 8
    body["defaults"]["validation"]["every_steps"] = 80
    body["defaults"]["environment"] = {"PYTHONPATH": str(Path(__file__).with_name("trainer_faults"))}
    body["defaults"]["restarts"] = {"max": 1000, "window": "1h", "first": "100ms", "ceiling": "1s"}
    path.write_text(json.dumps(body), encoding="utf-8")
    return path


def end_coordinator(fleet: Fleet) -> None:
    for animal in animals(fleet.root):
        if animal.role == "coordinator":
            with suppress(ProcessLookupError):
                os.kill(animal.pid, signal.SIGTERM)
            while any(each.pid == animal.pid for each in animals(fleet.root)):
                time.sleep(0.1)


def disturbed(
    shards: Path, twin: Fleet, dice: random.Random, kills_max: int, tally: Tally, say: Callable[[str], None], *, at_boundaries: bool
) -> bool:
    """One round with its witness, judged into the tally. False when something was wrong: its directory is kept then."""
    fleet = Fleet(shards)
    argv = [sys.executable, str(Path(__file__).with_name("witness.py")), str(fleet.root)]
    witness = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    faults: list[str] = []
    work = Round(fleet, dice, kills_max, say)
    if at_boundaries:
        work.pay()
    try:
        campaign = work.run()
        faults += unlike_its_twin(campaign, fleet, twin)
        faults += story_faults(work.history())
    except AssertionError as fault:
        faults.append(str(fault))
    except BaseException:
        witness.kill()  # interrupted
        fleet.close()
        raise
    if work.starting is not None:
        work.starting.wait(ANSWER_SECONDS_MAX)
    work.count_deaths()
    end_coordinator(fleet)
    faults += leftovers(fleet.root)
    seen = json.loads(witness.communicate(b"\n", timeout=ANSWER_SECONDS_MAX)[0])
    faults += [f"two trainers on one run: {each}" for each in seen["violations"]]
    tally.kills += work.kills
    tally.attempts += len(list(fleet.host_root.glob("runs/*/attempts/*")))
    tally.runs_equal += 2 if not faults else 0
    tally.samples += seen["samples"]
    tally.trainers_seen += seen["trainers_seen"]
    tally.gap_seconds_max = max(tally.gap_seconds_max, seen["gap_seconds_max"])
    tally.faults += faults
    if faults:
        say("\n".join(["FAULTS", *faults, f"kept: {fleet.root}"]))
        return False
    fleet.close()
    return True


def story_faults(document: dict[str, Any] | None) -> list[str]:
    """What is wrong with the history: a number missing, or a host's notice journaled twice or not at all."""
    if document is None:
        return ["the coordinator does not answer at the end"]
    events = document["events"]
    faults = [] if [event["sequence"] for event in events] == list(range(1, len(events) + 1)) else ["the events have gaps"]
    notices: dict[str, list[int]] = {}
    for event in events:
        if event["run_id"] and "notice" in event["body"]:
            notices.setdefault(event["run_id"], []).append(event["body"]["notice"])
    return faults + [f"{run}: notices {numbers}" for run, numbers in notices.items() if numbers != list(range(1, len(numbers) + 1))]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-round", type=int, default=KILLS_PER_ROUND)
    parser.add_argument("--only", choices=("strikes", "boundaries"))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    asked = parser.parse_args(arguments)
    dice, tally, began = random.Random(asked.seed), Tally(), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="fleetd-chaos-") as folder:
        shards = cut_shards(Path(folder))
        twin = Fleet(shards)
        try:
            say("the twin trains undisturbed")
            Round(twin, dice, 0, say).run()
            end_coordinator(twin)
            whole = not (found := leftovers(twin.root))
            tally.faults += found
            number = 0
            while whole and tally.kills.total() < asked.kills and time.monotonic() - began < asked.seconds:
                at_boundaries = asked.only == "boundaries" or (asked.only is None and number % 2 == 1)
                kills_max, number = min(asked.per_round, asked.kills - tally.kills.total()), number + 1
                whole = disturbed(shards, twin, dice, kills_max, tally, say, at_boundaries=at_boundaries)
        finally:
            twin.close()
    print(json.dumps({
        "seed": asked.seed, "seconds": round(time.monotonic() - began), "kills": dict(tally.kills), "kills_total": tally.kills.total(),
        "attempts": tally.attempts, "runs_equal_to_twin": tally.runs_equal, "witness_samples": tally.samples,
        "witness_gap_seconds_max": tally.gap_seconds_max, "trainers_seen": tally.trainers_seen, "faults": tally.faults,
    }, indent=1))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a story started is ended with it
    sys.exit(main(sys.argv[1:]))
