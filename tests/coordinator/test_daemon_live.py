"""The coordinator as a real process, with the real agent, supervisor and shim, and a small program as its candidate."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from live_coordinator import WAIT_SECONDS_MAX, Coordinator, lives

from fleetd.coordinator import daemon
from fleetd.coordinator.daemon import AlreadyRunning, ensure_running, run_foreground
from fleetd.journal import Journal
from fleetd.paths import StatePaths
from fleetd.screens.client import Client
from fleetd.wire import encode
from policies.errors import JournalDamaged, from_json
from policies.facts import RunState

pytestmark = pytest.mark.live


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    found = Coordinator(tmp_path)
    yield found
    found.end()


def test_a_killed_coordinator_finds_the_same_trainer_and_adds_no_attempt(coordinator: Coordinator) -> None:
    coordinator.start()
    campaign_id = coordinator.launch()
    coordinator.until(lambda: coordinator.run()["state"] == "running" and bool(coordinator.run()["pid"]["value"]))
    trainer = psutil.Process(coordinator.run()["pid"]["value"])
    coordinator.kill()
    before = coordinator.replayed()
    assert lives(trainer)

    coordinator.start()
    coordinator.until(lambda: coordinator.run()["pid"]["value"] is not None)
    after = coordinator.status()
    assert coordinator.run()["pid"]["value"] == trainer.pid and coordinator.run()["attempt"] == 1
    assert after["coordinator"]["generation"] == 2
    run_id = f"{campaign_id}-own"
    assert before.runs[run_id].spec == coordinator.replayed().runs[run_id].spec

    coordinator.finish.touch()
    coordinator.until(lambda: bool(coordinator.status()["campaigns"][0]["is_over"]))
    fleet = coordinator.replayed()
    assert fleet.runs[run_id].state is RunState.FINISHED and len(fleet.runs[run_id].exits) == 1
    assert fleet.campaigns[campaign_id].detail == "1 of 1 commands are over; a plain command leaves nothing to choose from"
    kinds = [event["kind"] for event in coordinator.call("GET", "events", params={"run": "own"}).json()["events"]]
    assert kinds.count("run_placed") == 1
    assert coordinator.run()["selectable"] == "its command keeps no trainer contract: no manifest, no validation predictions"


def test_a_stop_and_a_resume_over_the_socket(coordinator: Coordinator) -> None:
    coordinator.start()
    campaign_id = coordinator.launch("own", "other")
    coordinator.until(lambda: {run["state"] for run in coordinator.status()["runs"]} == {"running"})
    asked = coordinator.call("POST", "stop", json={"target": campaign_id, "mode": "graceful", "actor": "user:test"}).json()
    assert len(asked["runs"]) == 2
    coordinator.until(lambda: coordinator.status()["campaigns"][0]["stage"] == "stopped")
    assert coordinator.run()["reason"] == "user" and coordinator.run()["want"] == "stop"

    again = coordinator.call("POST", "resume", json={"target": "own", "actor": "user:test"}).json()
    assert again["runs"] == [f"{campaign_id}-own"]
    coordinator.until(lambda: coordinator.run()["state"] == "running" and coordinator.run()["attempt"] == 2)
    assert coordinator.run("other")["state"] == "stopped"
    log = coordinator.call("GET", "logs", params={"run": "own", "stream": "stdout", "attempt": "1", "offset": "-7"}).json()
    assert log["next"] == log["size"]
    coordinator.until(lambda: "step" in coordinator.call("GET", "logs", params={"run": "own"}).json()["data"])


def test_the_end_of_a_coordinator_leaves_its_runs_alone(coordinator: Coordinator) -> None:
    coordinator.start()
    coordinator.launch()
    coordinator.until(lambda: coordinator.run()["state"] == "running" and bool(coordinator.run()["pid"]["value"]))
    trainer = psutil.Process(coordinator.run()["pid"]["value"])
    coordinator.kill(signal.SIGTERM)

    assert lives(trainer)
    assert not coordinator.paths.socket.exists()
    journal = Journal.open(coordinator.paths.journal, read_only=True)
    assert journal.entries(after=0, limit=1000)[-1]["kind"] == "coordinator_stopped"
    journal.close()


def test_the_api_is_for_its_user_alone_and_explains_every_refusal(coordinator: Coordinator) -> None:
    coordinator.start()
    assert stat.S_IMODE(coordinator.paths.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(coordinator.paths.root.stat().st_mode) == 0o700
    campaign_id = coordinator.launch()

    refused = {
        ("POST", "stop", 404): {"json": {"target": "nobody"}},
        ("POST", "open", 404): {"json": {"campaign": campaign_id, "split": "test"}},
        ("POST", "launch", 422): {"json": {"plan": {"name": "half"}}},
        ("POST", "resume", 422): {"content": b"[1, 2"},
        ("GET", "logs?run=nobody", 404): {},
        ("GET", "events?after=soon", 422): {},
    }
    for (method, path, code), given in refused.items():
        answer = coordinator.call(method, path, **given)
        assert answer.status_code == code, (path, answer.text)
        assert {"error", "title", "where", "what", "fix"} == set(answer.json()), path
    again = coordinator.call("POST", "launch", json={"plan": encode(coordinator.plan()), "actor": "user:test"})
    assert again.status_code == 422 and campaign_id in str(from_json(again.json()))


def test_only_one_coordinator_has_a_state_directory(coordinator: Coordinator) -> None:
    pid = coordinator.start()
    assert ensure_running(coordinator.paths.root) == (pid, False)
    with pytest.raises(AlreadyRunning, match=f"pid {pid} holds"):
        run_foreground(coordinator.paths.root)

    environment = {**os.environ, "FLEETD_STATE": str(coordinator.paths.root)}
    second = subprocess.run([sys.executable, "-m", "fleetd.coordinator.daemon"], env=environment, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert second.stderr.startswith("error: a coordinator is running here already\n  where: ")
    assert f"pid {pid} holds" in second.stderr and "fleetd daemon stop" in second.stderr


def test_a_start_waits_for_a_coordinator_that_is_just_ending(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process holds its lock until the machine has come to it: here until a start has found it held."""
    coordinator.paths.root.mkdir()
    holds = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); time.sleep(3600)"
    looks, look = list[StatePaths](), daemon.answering_pid
    with subprocess.Popen([sys.executable, "-c", holds, str(coordinator.paths.lock)], stdout=subprocess.PIPE) as ending:
        assert ending.stdout is not None and ending.stdout.readline()

        def look_and_let_go(paths: StatePaths) -> int | None:
            looks.append(paths)
            if len(looks) == 2:
                ending.kill()
            return look(paths)

        monkeypatch.setattr(daemon, "answering_pid", look_and_let_go)
        coordinator.start()
    assert len(looks) >= 2 and coordinator.status()["coordinator"]["pid"] == coordinator.pids[-1]


def test_a_damaged_journal_stops_the_start_and_keeps_its_bytes(coordinator: Coordinator) -> None:
    coordinator.start()
    coordinator.kill(signal.SIGTERM)
    coordinator.pids.clear()
    whole = coordinator.paths.journal.read_bytes()
    damaged = whole[:100] + b"\xff" * 3000 + whole[3100:]
    coordinator.paths.journal.write_bytes(damaged)

    with pytest.raises(JournalDamaged, match="salvage"):
        ensure_running(coordinator.paths.root)
    assert coordinator.paths.journal.read_bytes() == damaged


def test_a_journal_that_has_lost_a_campaign_stops_the_start_instead_of_calling_everything_well(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path / "state")
    kept = paths.campaign("20260916T185910Z-lost").root
    kept.mkdir(parents=True)
    (kept / "frozen.json").write_text("{}")

    with pytest.raises(JournalDamaged, match="lost campaigns") as refusal:
        ensure_running(paths.root)
    assert "20260916T185910Z-lost" in refusal.value.what
    subprocess.run(["sh", "-c", refusal.value.fix.partition("without them: ")[2]], check=True)
    assert (paths.root / "campaigns-without-history" / kept.name / "frozen.json").read_text() == "{}"
    pid, started = ensure_running(paths.root)
    process = psutil.Process(pid)
    process.terminate()
    process.wait(WAIT_SECONDS_MAX)
    assert started


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_state_directory_of_another_user_is_explained_to_who_may_not_enter() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # its parent, unlike that of tmp_path, is open to all
        os.chmod(folder, 0o755)
        paths = StatePaths(Path(folder) / "state")
        paths.root.mkdir(mode=0o700)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.seteuid(65534)
            for act in (lambda: Client(paths).status(), lambda: ensure_running(paths.root)):
                try:
                    act()
                except BaseException as fault:
                    os.write(writer, f"{type(fault).__name__}: {fault}\n".encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        told = os.read(reader, 10_000).decode()
        os.close(reader)
    assert told.startswith("CoordinatorAway: this coordinator belongs to somebody else") and "only user 0" in told
    assert "ExplainedError: the state directory can't be used" in told and "FLEETD_STATE" in told


def test_a_state_directory_with_a_long_path_works(tmp_path: Path) -> None:
    root = tmp_path / ("long" * 20) / ("path" * 20)
    pid, started = ensure_running(root)
    process = psutil.Process(pid)

    assert started and ensure_running(root) == (pid, False)
    process.terminate()
    process.wait(WAIT_SECONDS_MAX)
