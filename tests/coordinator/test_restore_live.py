"""A state directory restored from an older copy, through real processes: a command that runs on, an order, a loss, a stranger."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_coordinator import Coordinator, lives

from fleetd.journal import Journal
from fleetd.paths import HostPaths
from policies.facts import RunState

pytestmark = pytest.mark.live


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    found = Coordinator(tmp_path)
    yield found
    found.end()


def restored(coordinator: Coordinator, copy: Path) -> None:
    """What a person does: end the daemon, put the older copy in its place, start it again, and let the host know that no other one is alive."""
    coordinator.kill()
    shutil.rmtree(coordinator.paths.root)
    shutil.copytree(copy, coordinator.paths.root, ignore=shutil.ignore_patterns("api.sock"))
    identity = coordinator.paths.identity
    assert identity.exists()
    coordinator.start()
    coordinator.until(lambda: "another life of this coordinator has spoken to this host" in coordinator.status()["hosts"][0]["detail"])
    taken = coordinator.call("POST", "takeover", json={"target": "here", "actor": "user:test"}).json()
    assert taken["taken_over"] and taken["restart_needed"]
    coordinator.kill(signal.SIGTERM)
    coordinator.start()


def copied(coordinator: Coordinator, folder: Path) -> Path:
    """A copy as a backup takes it, of a daemon at rest."""
    coordinator.kill()
    shutil.copytree(coordinator.paths.root, folder, ignore=shutil.ignore_patterns("api.sock"))
    coordinator.start()
    return folder


def events(coordinator: Coordinator, kind: str) -> list[dict[str, Any]]:
    found = coordinator.call("GET", "events", params={"limit": "5000"}).json()["events"]
    return [event for event in found if event["kind"] == kind]


UNKNOWN = -1
"""What a journal holds that somebody has locked just now."""


def kept_notices(coordinator: Coordinator, run_id: str) -> list[int]:
    """What the run's supervisor still has of what it told."""
    journal = Journal.open(HostPaths(coordinator.root).run(run_id).journal, read_only=True)
    try:
        kept = [int(entry["sequence"]) for entry in journal.entries(limit=10_000)]
        return kept if journal.health == "ok" else [UNKNOWN]
    finally:
        journal.close()


def is_running(coordinator: Coordinator, name: str = "own") -> bool:
    run = coordinator.run(name)
    return run["state"] == "running" and run["pid"]["value"] is not None


def test_after_an_older_copy_was_restored_a_run_is_caught_up_with_and_obeys_again(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.start()
    campaign_id = coordinator.launch()
    coordinator.until(lambda: is_running(coordinator))
    copy = copied(coordinator, tmp_path / "copy")
    coordinator.until(lambda: is_running(coordinator))
    for method, state in (("stop", "stopped"), ("resume", "running")):
        coordinator.call("POST", method, json={"target": "own", "actor": "user:test"})
        coordinator.until(lambda wanted=state: coordinator.run()["state"] == wanted)  # type: ignore[misc]
    coordinator.until(lambda: is_running(coordinator) and coordinator.run()["attempt"] == 2)
    run_id, trainer = f"{campaign_id}-own", psutil.Process(coordinator.run()["pid"]["value"])
    coordinator.until(lambda: not kept_notices(coordinator, run_id))  # the supervisor drops what was acknowledged
    restored(coordinator, copy)

    coordinator.until(lambda: is_running(coordinator) and coordinator.run()["attempt"] == 2)
    assert coordinator.run()["pid"]["value"] == trainer.pid
    lost = events(coordinator, "notices_lost")
    assert [event["run_id"] for event in lost] == [run_id] and "does not have what came after notice" in lost[0]["because"]
    assert [ended["attempt"] for ended in coordinator.run()["attempts_ended"]] == [1], "its end stands in the files of the run"

    coordinator.call("POST", "stop", json={"target": "own", "actor": "user:after"})
    coordinator.until(lambda: coordinator.run()["state"] == "stopped")
    assert not lives(trainer)
    taken, order = events(coordinator, "want_changed")[-2:]
    assert taken["body"]["want"]["sequence"] == 3 and "history had lost it" in taken["because"]
    assert (order["body"]["want"]["sequence"], order["actor"]) == (4, "user:after")
    assert coordinator.replayed().runs[run_id].state is RunState.STOPPED


def test_a_campaign_that_history_lost_is_seen_on_its_host_and_stopped_there(coordinator: Coordinator, tmp_path: Path) -> None:
    coordinator.start()
    coordinator.launch()
    coordinator.until(lambda: is_running(coordinator))
    copy = copied(coordinator, tmp_path / "copy")
    coordinator.until(lambda: is_running(coordinator))
    lost_id = coordinator.launch_other("later")
    coordinator.until(lambda: is_running(coordinator, "later"))
    run_id, trainer = f"{lost_id}-later", psutil.Process(coordinator.run("later")["pid"]["value"])
    restored(coordinator, copy)

    told = f"here has a run that nobody here knows: {run_id}, pid {trainer.pid}, running"
    coordinator.until(lambda: told in coordinator.status()["verdict"]["text"])
    status = coordinator.status()
    assert status["verdict"]["word"] == "NEEDS YOU"
    assert [run["run_id"] for run in status["hosts"][0]["unknown_runs"]] == [run_id] and lives(trainer)
    assert status["hosts"][0]["committed_bytes"] == 2 * 128 * 1024**2

    answer = coordinator.call("POST", "stop", json={"target": run_id, "actor": "user:test"})
    assert answer.json() == {"runs": [run_id]}
    coordinator.until(lambda: coordinator.status()["verdict"]["word"] == "OK")
    assert not lives(trainer) and is_running(coordinator)
