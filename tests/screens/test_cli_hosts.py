"""An operator's verbs as typed: what they ask for, what they say first, and that nothing is done when nobody could be asked."""

from __future__ import annotations

import json

import canned
from fake_coordinator import FakeCoordinator
from test_cli import LR_HIGH, assert_error_shape, fleetd

FATE = {
    "run_id": LR_HIGH, "candidate": "lr-high", "state": "lost", "becomes": "failed", "goes_on": True, "from_step": 400, "hosts": ["spark-b", "gx10"],
    "because": "spark-a was fenced", "successor": None,
}
WOULD = {"host": "spark-a", "silent_since": "2026-11-30T02:14:07.000000Z", "runs": [FATE], "dry_run": True}


def test_a_fence_says_run_by_run_what_it_would_do_and_does_nothing_where_nobody_can_be_asked(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/fence"] = WOULD
    done = fleetd(coordinator.root, "fence", "spark-a", "--because", "the board is dead")
    assert done.returncode == 2
    assert_error_shape(done.stderr)
    assert "goes on as a new run from step 400, a verified copy, on spark-b or gx10" in done.stderr and "fleetd fence spark-a --yes" in done.stderr
    assert [(each["target"], each["dry_run"]) for each in coordinator.asked] == [("spark-a", True)]


def test_a_fence_that_was_said_yes_to_is_asked_for_once_with_its_reason(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/fence"] = {**WOULD, "dry_run": False, "runs": [{**FATE, "successor": f"{LR_HIGH}-2"}]}
    done = fleetd(coordinator.root, "fence", "spark-a", "--yes", "--because", "the board is dead")
    assert done.returncode == 0 and f"goes on as {LR_HIGH}-2 from step 400" in done.stdout
    assert [(each["because"], "dry_run" in each) for each in coordinator.asked] == [("the board is dead", False)]
    told = json.loads(fleetd(coordinator.root, "fence", "spark-a", "--yes", "--json").stdout)
    assert told["runs"][0]["successor"] == f"{LR_HIGH}-2"


def test_stop_wait_and_resume_of_everything_name_each_other(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/stop"] = {"runs": [LR_HIGH]}
    said = fleetd(coordinator.root, "stop", "--all").stdout
    assert "fleetd wait --all" in said and "fleetd resume --all" in said and "TARGET" not in said
    assert fleetd(coordinator.root, "wait").returncode == 2
    assert fleetd(coordinator.root, "wait", "--all", "--timeout", "0").returncode == 7
    coordinator.status = {**canned.training(), "campaigns": [], "runs": []}
    assert fleetd(coordinator.root, "wait", "--all").stdout == "nothing is under way\n"


def test_a_daemon_that_does_not_run_is_stopped_already(coordinator: FakeCoordinator) -> None:
    coordinator.stop()
    done = fleetd(coordinator.root / "elsewhere", "daemon", "stop")
    assert done.returncode == 0 and "no coordinator is running" in done.stdout
