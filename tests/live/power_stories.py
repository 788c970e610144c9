"""`make power`: a test host loses power while two trainings go on there, the coordinator is killed in the meantime, and both come back.

One run has `on_reboot: hold` and waits for a person, the other goes on by itself. Not in the suite: a host counts as silent only after half a
minute. Needs root.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
from fleet.hosts import Hosts
from live_fleet import Fleet

from fleetd.paths import StatePaths
from fleetd.screens.client import Client

pytestmark = pytest.mark.live

HOST = "spark-b"
CADENCE = 50


def by_candidate(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["candidate"]: run for run in document["runs"]}


def saved_step(run: dict[str, Any]) -> int:
    """The newest complete checkpoint that its host told of."""
    found = run["checkpoint_on_host"]["value"]
    return int(found["step"]) if found else 0


def trainers(hosts: Hosts) -> int:
    """Leaders of trainings on the host: none of them may be there twice."""
    done = hosts[HOST].run("pgrep", "-fc", "--", "-m trainer train$", check=False)
    return int(done.stdout or 0)


def test_after_a_power_loss_one_run_is_held_and_the_other_goes_on_though_the_coordinator_was_killed_meanwhile(fleet: Fleet) -> None:
    with Hosts([HOST]) as hosts:
        body = {"transport": "ssh", "ssh_config": str(hosts.ssh_config), "root": "/srv/fleetd", "python": sys.executable, "capacity": "6GiB",
                "floor": "256MiB"}
        training = {"training": {"steps": 100_000}}
        plan = fleet.plan(hosts={HOST: body}, cadence=CADENCE, candidates={
            "holds": {**training, "on_reboot": "hold"}, "resumes": {**training, "on_reboot": "resume"},
        })
        fleet.launch(plan)
        document = fleet.until(lambda document: min(map(saved_step, document["runs"])) >= CADENCE, "both have a checkpoint")
        boot_id = hosts[HOST].boot_id

        hosts[HOST].power_off()
        document = fleet.until(lambda document: {run["state"] for run in document["runs"]} == {"lost"}, "lost")
        saved = {candidate: saved_step(run) for candidate, run in by_candidate(document).items()}
        assert document["verdict"]["word"] == "BLIND" and HOST in document["verdict"]["text"]
        os.kill(fleet.coordinator_pid(), signal.SIGKILL)
        hosts[HOST].power_on()
        assert hosts[HOST].boot_id != boot_id
        fleet("daemon", "start")

        document = fleet.until(lambda document: by_candidate(document)["resumes"]["state"] == "running"
                               and by_candidate(document)["holds"]["state"] == "held", "one goes on, one is held")
        runs = by_candidate(document)
        assert document["verdict"]["word"] == "NEEDS YOU" and "holds is held" in document["verdict"]["text"]
        assert (runs["holds"]["attempt"], runs["resumes"]["attempt"]) == (1, 2)
        assert trainers(hosts) == 1, "nothing runs of the one that waits for a person"

        fleet("resume", "holds")
        document = fleet.until(lambda document: by_candidate(document)["holds"]["state"] == "running", "resumed by a person")
        assert by_candidate(document)["holds"]["attempt"] == 2 and trainers(hosts) == 2
        told = [event["body"]["body"] for event in events(fleet) if event["body"].get("kind") == "attempt_started"]
        started = [each for each in told if each["attempt"] == 2]
        assert len(started) == 2 and all(each["resume_step"] >= min(saved.values()) >= CADENCE for each in started), (started, saved)
        fleet("stop", "--all", "--now")
        fleet.until(lambda document: all(run["state"] == "stopped" for run in document["runs"]), "stopped")


def events(fleet: Fleet) -> list[dict[str, Any]]:
    with Client(StatePaths(fleet.state)) as client:
        return list(client.all_events())
