"""An operator's verbs against real coordinators, agents, supervisors and processes: takeover, drain, start and stop of the daemon."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_coordinator import WAIT_SECONDS_MAX, Coordinator, lives

from fleetd.coordinator.daemon import answering_pid, ensure_running, stop_running
from fleetd.wire import encode
from policies.facts import MIB

pytestmark = pytest.mark.live


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    found = Coordinator(tmp_path)
    yield found
    found.end()


@pytest.fixture
def other(tmp_path: Path, coordinator: Coordinator) -> Iterator[Coordinator]:
    """A second coordinator with a state directory of its own, which means the same host root."""
    found = Coordinator(tmp_path, "other")
    yield found
    if found.pids and answering_pid(found.paths) is not None:
        stop_running(found.paths.root)


def say(coordinator: Coordinator, verb: str, target: str, **more: Any) -> dict[str, Any]:
    answer = coordinator.call("POST", verb, json={"target": target, "actor": "user:test", "because": "a test", **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def attempts(coordinator: Coordinator) -> dict[str, int]:
    """How many trainers were ever started for each run of this root."""
    return {folder.name: len([*folder.glob("attempts/*/started")]) for folder in (coordinator.root / "runs").glob("2*")}


def give_back(coordinator: Coordinator) -> None:
    say(coordinator, "takeover", "here")
    coordinator.until(lambda: bool(coordinator.status()["hosts"][0]["reachable"]))


def test_a_host_obeys_another_coordinator_only_after_a_takeover_and_its_runs_go_on(coordinator: Coordinator, other: Coordinator) -> None:
    coordinator.start()
    coordinator.launch()
    coordinator.until(lambda: coordinator.run()["state"] == "running" and bool(coordinator.run()["pid"]["value"]))
    trainer, run_id = psutil.Process(coordinator.run()["pid"]["value"]), coordinator.run()["run_id"]

    other.start()
    plan = encode(other.plan("mine"))
    refused = other.call("POST", "launch", json={"plan": plan, "plan_text": "", "actor": "user:test"})
    assert refused.json()["error"] == "OwnerMismatch" and "fleetd takeover" in refused.json()["fix"]
    assert other.status()["campaigns"] == []

    shown = say(other, "takeover", "here", host=plan["hosts"][0], dry_run=True)
    assert shown["owner"]["coordinator_id"] == coordinator.status()["coordinator"]["id"] and not shown["taken_over"]
    assert [run["run_id"] for run in shown["runs"]] == [run_id]
    assert say(other, "takeover", "here", host=plan["hosts"][0])["taken_over"]
    other.launch("mine")
    other.until(lambda: other.run("mine")["state"] == "running")
    other.until(lambda: [run["run_id"] for run in other.status()["hosts"][0]["unknown_runs"]] == [run_id])  # the run of the old owner is shown

    coordinator.until(lambda: "belongs to another coordinator" in coordinator.status()["hosts"][0]["detail"])
    coordinator.call("POST", "stop", json={"target": "own", "mode": "now", "actor": "user:test"})
    assert lives(trainer) and coordinator.run()["attempt"] == 1
    assert set(attempts(coordinator).values()) == {1}
    lines = [json.loads(line) for line in (coordinator.root / "owners.jsonl").read_text().splitlines()]
    assert [(line["actor"], line["from"]["coordinator_id"]) for line in lines] == [("user:test", shown["owner"]["coordinator_id"])]

    say(other, "stop", "mine", mode="now")
    other.until(lambda: other.run("mine")["state"] == "stopped")
    give_back(coordinator)
    coordinator.until(lambda: coordinator.run()["state"] == "stopped")
    assert not lives(trainer), "the stop that was refused meanwhile arrives once the host obeys again"


def test_a_takeover_in_the_middle_of_a_launch_leaves_no_run_with_two_trainers(coordinator: Coordinator, other: Coordinator) -> None:
    coordinator.start()
    coordinator.launch("first")
    other.start()
    names = [f"run-{number}" for number in range(8)]
    outcome: list[str] = []

    def launch() -> None:
        """The takeover may come before its preflight too: then nothing of it began."""
        try:
            outcome.append(coordinator.launch_other(names[0]))
        except AssertionError as refused:
            outcome.extend([""] if "OwnerMismatch" in str(refused) else ["", str(refused)])

    launching = threading.Thread(target=launch)
    launching.start()
    say(other, "takeover", "here", host=encode(other.plan("mine"))["hosts"][0])
    launching.join()
    other.launch("mine")
    other.until(lambda: other.run("mine")["state"] == "running")
    counts = attempts(coordinator)
    assert counts and set(counts.values()) <= {0, 1}
    states = {run["candidate"]: run["state"] for run in coordinator.status()["runs"]}
    assert len(outcome) == 1, f"neither answered nor refused for the takeover: {outcome}"
    assert set(states) == ({"first", names[0]} if outcome[0] else {"first"}) and "failed" not in states.values()

    say(other, "stop", "mine", mode="now")
    other.until(lambda: other.run("mine")["state"] == "stopped")
    give_back(coordinator)
    coordinator.until(lambda: {run["state"] for run in coordinator.status()["runs"]} == {"running"})
    assert set(attempts(coordinator).values()) == {1}, "what was under way, and what could not be started meanwhile, each has one trainer"


def test_a_drained_host_lets_its_run_end_and_takes_the_queued_one_when_it_is_undrained(coordinator: Coordinator) -> None:
    coordinator.start()
    coordinator.launch("own", "queued", capacity_bytes=220 * MIB)
    coordinator.until(lambda: coordinator.run()["state"] == "running")
    say(coordinator, "drain", "here")
    coordinator.until(lambda: "it is drained" in coordinator.run("queued")["detail"])
    coordinator.finish.touch()
    coordinator.until(lambda: coordinator.run()["state"] == "finished")
    pid = stop_running(coordinator.paths.root)
    assert pid == coordinator.pids[-1]

    coordinator.start()
    coordinator.until(lambda: "it is drained" in coordinator.run("queued")["detail"])
    drained = coordinator.status()["hosts"][0]["drained"]
    assert (drained["by"], drained["because"]) == ("user:test", "a test"), "a new life of the coordinator knows it"
    say(coordinator, "undrain", "here")
    coordinator.until(lambda: coordinator.run("queued")["state"] == "finished")


def test_of_two_coordinators_started_at_once_on_one_directory_one_lives(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "fleetd.screens.cli", "--state", str(tmp_path / "state"), "daemon"]
    started = [psutil.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        end = time.monotonic() + WAIT_SECONDS_MAX
        while not (ended := [process for process in started if process.poll() is not None]):
            assert time.monotonic() < end, "both live"
            time.sleep(0.1)
        loser, winner = ended[0], next(process for process in started if process is not ended[0])
        said = loser.communicate()[1]
        assert loser.returncode == 1 and "a coordinator is running here already" in said and "fleetd daemon stop" in said

        assert ensure_running(tmp_path / "state") == (winner.pid, False)
        assert stop_running(tmp_path / "state") == winner.pid and winner.wait(WAIT_SECONDS_MAX) == 0
        assert stop_running(tmp_path / "state") is None, "to stop what does not run is no error"
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stderr.close()
