"""A passing and a failing pilot in real campaigns: real daemons, real trainers, real processes that begin afresh."""

from __future__ import annotations

import json

import pytest
from live_fleet import Fleet

pytestmark = pytest.mark.live

PILOT = {"pilot": {"steps": 5}, "memory_cap": "1GiB"}
"""Small enough that all of them fit at once: one that has to wait would be judged later, and alone."""


def test_a_pilot_that_passes_goes_on_and_one_that_fails_ends_its_campaign_before_the_time_is_spent(fleet: Fleet) -> None:
    good = fleet.launch(fleet.plan("good", cadence=10, candidates={"one": {**PILOT, "training": {"steps": 20}}}, after_freeze={"evaluate": []}))
    broken = {**PILOT, "training": {"steps": 4000, "optimizer": {"lr": 1e30, "warmup": 0}}}
    both = {"sound": {**PILOT, "training": {"steps": 4000}}, "broken": broken}
    bad = fleet.launch(fleet.plan("bad", candidates=both, after_freeze={"evaluate": []}))

    document = fleet.until(lambda seen: {each["campaign_id"]: each["stage"] for each in seen["campaigns"]} == {good: "frozen", bad: "failed"},
                           "one campaign frozen, the other one failed")
    stages = {each["campaign_id"]: each for each in document["campaigns"]}
    assert "the pilot of broken failed" in stages[bad]["detail"]
    runs = fleet.runs()
    evidence = json.loads((fleet.run_dir(runs["one"]) / "evidence/pilot.json").read_text())
    assert evidence["passed"] and evidence["first_predictions"]["maximum_difference"] == 0.0
    assert sorted(path.name for path in (fleet.run_dir(runs["one"]) / "attempts").iterdir()) == ["0001"], "fresh processes, one attempt"
    assert runs["broken"]["state"] == "failed"
    fleet.until(lambda seen: all(run["state"] not in ("running", "stopping") for run in seen["runs"]), "the sound one was asked to stop, and did")
    assert fleet.runs()["sound"]["state"] == "stopped"
    moved = [event for event in json.loads(fleet("events", good, "--json").stdout)["events"] if event["kind"] == "campaign_moved"]
    assert [event["body"]["to"] for event in moved][:3] == ["staging", "pilot", "training"]
