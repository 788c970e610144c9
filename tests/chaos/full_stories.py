"""Stories that are told once for each write: a run on a host, a campaign of a coordinator, a real training. In each one another write
finds no room (`full_writes`), and each must end as if all of them had.

A story returns what was wrong in words. Nothing is the promise: one attempt, every step done once, every notice told once, an unbroken
history, no temporary left, and while it lasts a word of it where a person looks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (run as a program, its neighbours are found by path)
sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).resolve().parents[1] / name) for name in ("live", "host"))]

import httpx
from chaos import ask, story_faults
from full_writes import Call, Plan, Tap
from host_runs import HostRun, spec_for
from outcome import leftovers
from zoo import animals

from fleetd.campaign import CandidatePlan, HostPlan, ReserveTerms
from fleetd.campaign import Plan as CampaignPlan
from fleetd.coordinator.loop import replay_journal
from fleetd.host import rundir
from fleetd.journal import Journal
from fleetd.model import StopTerms
from fleetd.paths import StatePaths
from fleetd.wire import encode
from policies.facts import MIB, RunState, SignalTarget
from policies.lifecycle import SETTLED

STORY_SECONDS_MAX = 240.0
ANSWER_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.1
TELL_SECONDS = 1.2
"""A trouble that is over before the next tick and the next look need not be seen."""
SWEEP_SECONDS = 3.0
"""After so long without a supervisor an agent would start one."""
STEPS, EVERY, PACE_SECONDS = 12, 4, 0.3
"""A trainer that lives longer than whatever could be done to it by mistake waits for."""
LAUNCHES_MAX = 5
SUPERVISE = "import sys; from pathlib import Path; from fleetd.host.launch import start_supervisor; start_supervisor(Path(sys.argv[1]))"
ENSURE = "import sys; from pathlib import Path; from fleetd.coordinator.daemon import ensure_running; ensure_running(Path(sys.argv[1]))"
PROGRAM = "import time\nfor step in range(5):\n    print('step', step, flush=True)\n    time.sleep(0.1)\n"


@dataclass(kw_only=True)
class Outcome:
    """How a story ended, and which writes were asked about."""

    plan: Plan
    calls: list[Call]
    faults: list[str] = field(default_factory=list)

    @property
    def refused(self) -> list[Call]:
        return [call for call in self.calls if call.is_refused]


Story = Callable[[Path, Plan], Outcome]


def host_story(folder: Path, plan: Plan) -> Outcome:
    """One run of the fake trainer, from its first supervisor to its last record."""
    folder.mkdir()
    run, tap, told = HostRun(folder, spec_for(f"{STEPS}", f"{PACE_SECONDS}", f"every={EVERY}")).create(), Tap(folder, plan), set[str]()
    end_seconds, free_since_seconds, shown_seconds = time.monotonic() + STORY_SECONDS_MAX, None, None
    faults: list[str] = []
    tap.is_awaited = lambda: bool(_silence(tap, set(told), "supervisor", run.paths.journal.name, shown_seconds, time.monotonic()))
    try:
        tap.run([sys.executable, "-c", SUPERVISE, str(run.paths.root)], dict(os.environ))
        while (seen := run.seen()) is None or seen.state not in SETTLED or rundir.is_locked(run.paths.lock):
            if seen is not None:
                told |= set(seen.alarms)
                shown_seconds = shown_seconds or time.monotonic()
            if time.monotonic() > end_seconds:
                faults.append(f"not settled after {STORY_SECONDS_MAX:.0f} s: {seen}\n{run.log_text()}")
                break
            free_since_seconds = None if rundir.is_locked(run.paths.lock) else free_since_seconds or time.monotonic()
            if free_since_seconds is not None and time.monotonic() - free_since_seconds > SWEEP_SECONDS:
                run.supervise()
                free_since_seconds = None
            time.sleep(LOOK_SECONDS)
        if not faults:
            faults += [*_host_faults(run), *_silence(tap, told, "supervisor", run.paths.journal.name, shown_seconds, time.monotonic())]
    except AssertionError as fault:
        faults.append(str(fault))
    finally:
        run.clean()
    return _ended(folder, tap, faults)


def _host_faults(run: HostRun) -> list[str]:
    seen, log = run.seen(), [json.loads(line) for line in run.paths.log.read_text(encoding="utf-8").splitlines()]
    assert seen is not None
    found = {
        "the end": (seen.state, seen.attempt, seen.step),
        "the moves": [move for move in run.moves() if move != "running"],  # a run that was over before its record had room was never seen so
        "the checkpoints": [notice["body"]["step"] for notice in run.notices("checkpoint")],
        "the steps": [record["step"] for record in log if "loss" in record],
        "the starts": len([record for record in log if record.get("event") == "start"]),
        "the exits told": len(run.notices("attempt_ended")), "temporaries": [path.name for path in run.root.rglob("*.tmp")],
        "the exit": getattr(rundir.read_exit(run.paths, 1), "exit_code", "no record"), "alarms at the end": seen.alarms,
    }
    wanted = {
        "the end": (RunState.FINISHED, 1, STEPS), "the moves": ["starting", "finished"],
        "the checkpoints": list(range(0, STEPS + 1, EVERY)),
        "the steps": list(range(1, STEPS + 1)), "the starts": 1, "the exits told": 1, "temporaries": [], "the exit": 0, "alarms at the end": (),
    }
    return [f"{name}: {value} instead of {wanted[name]}" for name, value in found.items() if value != wanted[name]]


def _silence(tap: Tap, told: set[str], role: str, journal: str, shown_seconds: float | None, seen_seconds: float) -> list[str]:
    """A journal that could not be written for a while, and nobody was told. Before a supervisor has shown itself for the first time a full
    disk keeps it from that: then the figure of the host's disk tells. Whoever is on its way out tells nobody."""
    is_due = tap.plan.mode == "full" and shown_seconds is not None and any(
        call.role == role and call.name.rpartition("/")[2].startswith(journal)
        and shown_seconds < call.at_seconds < min(tap.full_until_seconds, seen_seconds) - TELL_SECONDS for call in tap.refused
    )
    return ["nobody was told of the full disk"] if is_due and not any("journal" in text for text in told) else []


def coordinator_story(folder: Path, plan: Plan, releases: Path | None = None, keep_releases: Path | None = None) -> Outcome:
    """One campaign of a small command, from the start of its coordinator to its end. `releases`: staged before, below another root;
    `keep_releases`: where to leave them for that, by place."""
    folder.mkdir()
    state, host, faults = folder / "state", folder / "host", list[str]()
    for place in (state, host) if releases is not None else ():
        place.mkdir(mode=0o700)
        shutil.copytree(releases / place.name, place / "releases", copy_function=os.link)
    tap, eyes = Tap(folder, plan), Eyes(state)
    tap.is_awaited = lambda: bool(_silence(tap, _told(eyes.seen), "coordinator", "journal.db", eyes.shown_seconds, eyes.seen_seconds))
    try:
        _start_coordinator(state, tap, faults)
        eyes.start()
        _launch(folder, state, host, faults)
        documents = eyes.until_over()
        faults += _campaign_faults(state, host, documents, tap, eyes)
    except AssertionError as fault:
        faults.append(str(fault))
    eyes.is_leaving = True
    eyes.join()
    _end_coordinator(folder)
    faults += leftovers(folder)
    if not faults:
        faults += _replay_faults(state, documents[-1])
    if keep_releases is not None:
        for place in (state, host):
            shutil.copytree(place / "releases", keep_releases / place.name)
    return _ended(folder, tap, faults)


def start_story(folder: Path, plan: Plan) -> Outcome:
    """A coordinator that starts, perhaps a second time, answers, and ends: the first fifty of its writes."""
    folder.mkdir()
    state, tap, faults = folder / "state", Tap(folder, plan), list[str]()
    _start_coordinator(state, tap, faults)
    try:
        end_seconds = time.monotonic() + STORY_SECONDS_MAX
        while (document := _answer(state, "/v1/status"))["coordinator"]["journal"] != "ok" and time.monotonic() < end_seconds:
            time.sleep(LOOK_SECONDS)
        if (document["verdict"]["word"], document["coordinator"]["journal"]) != ("OK", "ok"):
            faults.append(f"it answers {document}")
        faults += story_faults(_answer(state, "/v1/events"))
    except AssertionError as fault:
        faults.append(str(fault))
    _end_coordinator(folder)
    faults += leftovers(folder)
    return _ended(folder, tap, faults)


def _start_coordinator(state: Path, tap: Tap, faults: list[str]) -> None:
    """A person, or systemd, starts a coordinator again that found no room at its start."""
    argv, environment = [sys.executable, "-c", ENSURE, str(state)], {**os.environ, "FLEETD_STATE": str(state)}
    done = tap.run(argv, environment)
    if done.returncode != 0:
        said = done.stderr.decode()
        faults += [] if "fix:" in said else [f"a start that found no room says {said}"]
        done = tap.run_freely(argv, environment)
        faults += [] if done.returncode == 0 else [f"the second start says {done.stderr.decode()}"]


def _end_coordinator(folder: Path) -> None:
    for animal in animals(folder):
        if animal.role == "coordinator":
            with contextlib.suppress(ProcessLookupError):
                os.kill(animal.pid, signal.SIGTERM)


class Eyes(threading.Thread):
    """Looks at a coordinator all the time, also while a launch waits for its answer. Every document that was seen, with its events."""

    def __init__(self, state: Path) -> None:
        super().__init__(daemon=True)
        self.state, self.is_leaving, self.fault = state, False, ""
        self.seen: list[dict[str, Any]] = []
        self.shown_seconds: float | None = None
        self.seen_seconds = 0.0

    def run(self) -> None:
        while not self.is_leaving:
            try:
                told = _answer(self.state, "/v1/events?limit=5000")
                assert "events" in told, f"the history can't be read: {told}"
                self.seen.append({**_answer(self.state, "/v1/status"), "events": told["events"]})
            except AssertionError as fault:
                self.fault = str(fault)
                return
            self.seen_seconds = time.monotonic()
            self.shown_seconds = self.shown_seconds or self.seen_seconds
            time.sleep(LOOK_SECONDS)

    def until_over(self) -> list[dict[str, Any]]:
        end_seconds = time.monotonic() + STORY_SECONDS_MAX
        while not self.seen or not self._is_over(self.seen[-1]):
            assert not self.fault, self.fault
            assert time.monotonic() < end_seconds, f"not over after {STORY_SECONDS_MAX:.0f} s: {json.dumps(self.seen[-1:])[:3000]}"
            time.sleep(LOOK_SECONDS)
        return list(self.seen)

    @staticmethod
    def _is_over(document: dict[str, Any]) -> bool:
        return bool(document["campaigns"]) and document["campaigns"][-1]["is_over"] and document["coordinator"]["journal"] == "ok"


def _answer(state: Path, path: str) -> dict[str, Any]:
    """A full disk silences no coordinator; a busy machine may for a moment."""
    end_seconds = time.monotonic() + ANSWER_SECONDS_MAX
    while time.monotonic() < end_seconds:
        if (found := ask(state, path)) is not None:
            return found
        time.sleep(LOOK_SECONDS)
    raise AssertionError(f"the coordinator does not answer {path}")


def _launch(folder: Path, state: Path, host: Path, faults: list[str]) -> None:
    """As a person would: again, where the answer says that there was no room."""
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    candidate = CandidatePlan(
        name="own", host="here", command=(sys.executable, "-S", str(program)), signal=SignalTarget.GROUP, memory_host_bytes=128 * MIB,
        memory_accelerator_bytes=0, stop=StopTerms(grace_floor_seconds=1.0, grace_ceiling_seconds=5.0),
    )
    plan = CampaignPlan(
        name="commands", plan_sha256="ab" * 32, directory=str(folder), deadline_at=None, deadline_seconds=600.0,
        reserve=ReserveTerms(minimum_seconds=10.0, margin_seconds=0.0), hosts=(HostPlan(name="here", root=str(host), floor_bytes=64 * MIB),),
        candidates=(candidate,),
    )
    body = {"plan": encode(plan), "plan_text": "name: commands", "actor": "user:test"}
    for _ in range(LAUNCHES_MAX):
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(state / "api.sock")), trust_env=False, timeout=60.0) as client:
            answer = client.post("http://fleetd/v1/launch", json=body)
        if answer.status_code == 200:
            return
        if answer.status_code >= 500 or not answer.json().get("fix"):
            faults.append(f"a refused launch says {answer.text}")
        if _answer(state, "/v1/status")["campaigns"]:
            return  # it is held up by the disk, was answered so, and goes on by itself
        time.sleep(1.0)
    raise AssertionError(f"{LAUNCHES_MAX} launches were not enough: {answer.text}")


def _campaign_faults(state: Path, host: Path, documents: list[dict[str, Any]], tap: Tap, eyes: Eyes) -> list[str]:
    last, faults = documents[-1], []
    run = last["runs"][0]
    if (run["state"], run["attempt"], last["campaigns"][0]["stage"], len(last["campaigns"])) != ("finished", 1, "finished", 1):
        faults.append(f"the end: {run['state']}, attempt {run['attempt']}, {last['campaigns'][0]['stage']}: {run['detail']}")
    printed = (host / "runs" / run["run_id"] / "attempts" / "0001" / "stdout.log").read_text(encoding="utf-8")
    if printed != "".join(f"step {step}\n" for step in range(5)):
        faults.append(f"the program printed {printed!r}")
    if last["verdict"]["word"] != "OK":
        faults.append(f"the last verdict: {last['verdict']}")
    faults += story_faults({"events": last["events"]})
    for document in documents:
        if document["events"] != last["events"][: len(document["events"])]:
            faults.append("an event that had been shown was changed or lost")
    return faults + _silence(tap, _told(documents), "coordinator", "journal.db", eyes.shown_seconds, eyes.seen_seconds)


def _told(documents: list[dict[str, Any]]) -> set[str]:
    return {text for document in documents for text in (document["coordinator"]["journal"], document["verdict"]["text"])} - {"ok"}


def _replay_faults(state: Path, last: dict[str, Any]) -> list[str]:
    journal = Journal.open(StatePaths(state).journal, read_only=True)
    try:
        fleet = replay_journal(journal)
    finally:
        journal.close()
    found = {run_id: (run.state.value, run.attempt) for run_id, run in fleet.runs.items()}
    wanted = {run["run_id"]: (run["state"], run["attempt"]) for run in last["runs"]}
    return [] if found == wanted else [f"the journal replays to {found} instead of {wanted}"]


def _ended(folder: Path, tap: Tap, faults: list[str]) -> Outcome:
    try:
        tap.close()
    except AssertionError as fault:
        faults.append(str(fault))
    faults += tap.faults
    if not faults:
        shutil.rmtree(folder)
    return Outcome(plan=tap.plan, calls=tap.calls, faults=faults)
