"""What is killed, and what must go on: coordinator, supervisor, trainer. The deadline that holds without them: test_live_deadlines.py."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import psutil
import pytest
from deadline_place import kill
from holds import Holds
from live_fleet import Fleet, step_of, trainer_pid

pytestmark = pytest.mark.live

STEPS, HELD_STEP = 300, 280
"""A training goes on whatever dies beside it, and is not over before its test lets it go."""


def held(holds: Holds, **training: Any) -> dict[str, Any]:
    return {"training": {"steps": STEPS, **training}, "environment": holds.environment}


def supervisor_pid(fleet: Fleet, run: dict[str, Any]) -> int:
    record = json.loads((fleet.run_dir(run) / "supervisor.json").read_text(encoding="utf-8"))
    return int(record.get("pid") or record["identity"]["pid"])


def test_the_coordinator_dies_and_nothing_happens(fleet: Fleet) -> None:
    holds = Holds(fleet.root / "holds", HELD_STEP)
    campaign_id = fleet.launch(fleet.plan(candidates={"one": held(holds), "two": held(holds, seed=2)}))

    def both_train(document: dict[str, Any]) -> bool:
        return min(map(step_of, document["runs"]), default=0) > 20 and all(map(trainer_pid, document["runs"]))

    document = fleet.until(both_train, "both training")
    pids = {run["candidate"]: trainer_pid(run) for run in document["runs"]}
    kill(document["coordinator"]["pid"])
    time.sleep(3)
    assert all(psutil.pid_exists(pid) for pid in pids.values() if pid)

    fleet("launch", str(fleet.plan("other", candidates={"small": {"training": {"steps": 10}}})))

    again = fleet.until(lambda document: all(trainer_pid(run) for run in document["runs"] if run["campaign_id"] == campaign_id), "seen again")
    assert {run["candidate"]: trainer_pid(run) for run in again["runs"] if run["campaign_id"] == campaign_id} == pids
    holds.let_go(HELD_STEP)
    fleet("wait", campaign_id, "--timeout", "10m")
    assert {run["attempt"] for run in fleet.status()["runs"] if run["campaign_id"] == campaign_id} == {1}


def test_a_killed_supervisor_is_replaced_by_one_that_adopts_the_same_trainer(fleet: Fleet) -> None:
    holds = Holds(fleet.root / "holds", HELD_STEP)
    campaign_id = fleet.launch(fleet.plan(candidates={"one": held(holds)}))
    run = fleet.until(lambda document: step_of(document["runs"][0]) > 20, "training")["runs"][0]
    first = supervisor_pid(fleet, run)
    kill(first)

    fleet.until(lambda document: supervisor_pid(fleet, run) != first, "a new supervisor")
    holds.let_go(HELD_STEP)
    fleet("wait", campaign_id, "--timeout", "10m")

    after = fleet.runs()["one"]
    assert after["attempt"] == 1
    assert after["state"] == "finished"
    assert after["attempts_ended"][-1]["exit"]["exit_code"] == 0
    events = fleet("events", "--json").stdout
    assert '"adopted"' in events


def test_a_killed_trainer_resumes_from_its_last_complete_checkpoint(fleet: Fleet) -> None:
    holds = Holds(fleet.root / "holds", 55)
    campaign_id = fleet.launch(fleet.plan(candidates={"one": {"training": {"steps": 200}, "environment": holds.environment}}))

    def is_past_two_checkpoints(document: dict[str, Any]) -> bool:
        run = document["runs"][0]
        saved = run["checkpoint_on_host"]["value"]
        return step_of(run) > 50 and bool(trainer_pid(run)) and saved is not None and saved["step"] >= 40

    run = fleet.until(is_past_two_checkpoints, "past two checkpoints")["runs"][0]
    kill(trainer_pid(run) or 0)
    holds.let_go(55)

    fleet("wait", campaign_id, "--timeout", "10m")

    after = fleet.runs()["one"]
    assert after["attempt"] == 2
    assert after["attempts_ended"][0]["exit"]["signal"] == signal.SIGKILL
    resumed = [json.loads(line) for line in (fleet.run_dir(run) / "log.jsonl").read_text(encoding="utf-8").splitlines() if '"start"' in line]
    assert resumed[1]["step"] >= 40
    assert resumed[1]["resumed_from"]


def test_a_stranger_under_the_recorded_pid_is_never_signalled(fleet: Fleet) -> None:
    """Other start ticks under the same pid and argv: the record no longer proves anything, so nobody may touch the process."""
    fleet.launch(fleet.plan(candidates={"one": {"command": ["sleep", "300"]}}))
    run = fleet.until(lambda document: trainer_pid(document["runs"][0]) and document["runs"][0]["state"] == "running", "running")["runs"][0]
    pid = trainer_pid(run)
    assert pid
    record_path = fleet.run_dir(run) / "attempts" / "0001" / "attempt.json"
    shim = json.loads((fleet.run_dir(run) / "shim.json").read_text(encoding="utf-8"))
    # Nobody who would start the supervisor again, with the record as it still is, runs before the record is changed.
    coordinator, supervisor = fleet.coordinator_pid(), supervisor_pid(fleet, run)
    for watcher in (coordinator, supervisor):
        os.kill(watcher, signal.SIGSTOP)
    kill(int(shim.get("pid") or shim["identity"]["pid"]))
    kill(supervisor)
    record = json.loads(record_path.read_text(encoding="utf-8"))
    record["identity"]["start_ticks"] += 1
    record["token"] = "another-token"
    record["session"] = None
    record["cgroup"] = None
    record_path.write_text(json.dumps(record), encoding="utf-8")
    os.kill(coordinator, signal.SIGCONT)

    fleet("stop", "--all", "--now")

    def says_why(document: dict[str, Any]) -> bool:
        words = json.dumps(document["runs"]) + fleet("events", "--json").stdout
        return "start" in words and "ticks" in words

    fleet.until(says_why, "somebody looked at it, and says what is wrong with its identity")
    time.sleep(2)
    assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    psutil.Process(pid).kill()
