"""The main job on real processes: train, choose, freeze, judge, report; and a stopped run that ends as if it had never stopped."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from holds import Holds
from live_fleet import Fleet, step_of, trainer_pid

pytestmark = pytest.mark.live


def final_checkpoint(fleet: Fleet, run: dict[str, Any]) -> Path:
    return max((fleet.run_dir(run) / "checkpoints").glob("step-*"))


def losses_by_step(fleet: Fleet, run: dict[str, Any]) -> dict[int, list[float]]:
    """Every logged loss of a run, by step: a step that was done twice has two."""
    found: dict[int, list[float]] = {}
    for line in (fleet.run_dir(run) / "log.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "loss" in record:
            found.setdefault(record["step"], []).append(record["loss"])
    return found


def test_a_campaign_ends_with_one_frozen_choice_judged_on_data_that_was_held_back(fleet: Fleet) -> None:
    campaign_id = fleet.launch(fleet.plan())
    refused = fleet("evaluate", campaign_id, "--split", "test", expect=9)
    assert "no selection is frozen yet" in refused.stderr
    assert "fix:" in refused.stderr

    fleet("wait", campaign_id, "--timeout", "10m")

    campaign = fleet.campaign(campaign_id)
    directory = Path(campaign["directory"])
    ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    frozen = json.loads((directory / "frozen.json").read_text(encoding="utf-8"))
    result = json.loads((directory / "results" / "test.json").read_text(encoding="utf-8"))
    assert campaign["stage"] == "evaluated"
    assert [run["state"] for run in fleet.status()["runs"]] == ["finished"] * 3
    assert campaign["selection"]["checkpoint_digest"] in json.dumps(frozen)
    kinds = [entry["event"]["kind"] for entry in ledger]
    assert kinds == ["registered", "frozen", "opened", "judged"], "held back, frozen, and only then opened, once"
    for model in ("base", "selected", "unigram"):
        assert sorted(result["models"][model]["families"]) == ["de", "en", "fr", "ja"]
    assert result["models"]["selected"]["nll"] < result["models"]["base"]["nll"]
    assert (directory / "report.html").stat().st_size > 10_000
    assert json.loads((directory / "report.json").read_text(encoding="utf-8"))


def test_reserved_data_is_on_no_host_before_the_freeze(fleet: Fleet) -> None:
    campaign_id = fleet.launch(fleet.plan(candidates={"one": {"training": {"steps": 4000}}}))
    fleet.until(lambda document: any(step_of(run) > 10 for run in document["runs"]), "training")

    assert fleet.campaign(campaign_id)["frozen"] is None
    names = {name for _, _, names in os.walk(fleet.host_root) for name in names}
    assert "train_009.bin" in names
    assert not [name for name in names if name.startswith("test_000")]


def test_a_run_that_was_stopped_three_times_and_killed_equals_one_that_never_was(fleet: Fleet) -> None:
    """Weights, moments and random states by their manifest, byte for byte, and every loss that was ever logged."""
    steps, stops, killed_after, seed = 500, (70, 180, 310), 320, random.randrange(10**6)
    print(f"the kill's seed is {seed}")
    one, holds = {"training": {"steps": steps}}, Holds(fleet.root / "holds", *stops, killed_after)
    whole = fleet.launch(fleet.plan("whole", candidates={"one": one}, cadence=60))
    stopped = fleet.launch(fleet.plan("stopped", candidates={"one": {**one, "environment": holds.environment}}, cadence=60))

    def of(document: dict[str, Any], campaign_id: str) -> dict[str, Any]:
        return next(run for run in document["runs"] if run["campaign_id"] == campaign_id)

    for step in stops:
        fleet.until(lambda document, step=step: step_of(of(document, stopped)) >= step, "far enough to stop")
        holds.let_go(step)  # so that it is asked anywhere, and before the next hold
        fleet("stop", stopped, "--graceful")
        fleet("wait", stopped, "--timeout", "10m", expect=6)
        run = of(fleet.status(), stopped)
        assert run["state"] == "stopped", run
        assert run["attempts_ended"][-1]["exit"]["exit_code"] == 10, f"{run['attempts_ended'][-1]}\n{fleet.logs()}"
        last = max(losses_by_step(fleet, run))
        assert final_checkpoint(fleet, run).name == f"step-{last:09d}", "a complete checkpoint at the step where it stopped"
        fleet("resume", stopped)
    gone = trainer_pid(run)

    def again(document: dict[str, Any]) -> bool:
        run = of(document, stopped)
        return run["state"] == "running" and step_of(run) >= killed_after and trainer_pid(run) not in (None, gone)

    pid = trainer_pid(of(fleet.until(again, "running again"), stopped))
    assert pid
    holds.let_go(killed_after)
    time.sleep(random.Random(seed).uniform(0, 2))
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    fleet("wait", stopped, "--timeout", "10m")
    fleet("wait", whole, "--timeout", "10m")

    runs = {run["campaign_id"]: run for run in fleet.status()["runs"] if run["kind"] == "train"}
    once, often = runs[whole], runs[stopped]
    assert once["attempt"] == 1
    assert often["attempt"] >= 4
    assert final_checkpoint(fleet, once).name == final_checkpoint(fleet, often).name == f"step-{steps:09d}"
    assert (final_checkpoint(fleet, once) / "manifest.json").read_bytes() == (final_checkpoint(fleet, often) / "manifest.json").read_bytes()
    losses = losses_by_step(fleet, once)
    assert {step: set(values) for step, values in losses_by_step(fleet, often).items()} == {step: set(values) for step, values in losses.items()}
    assert len(losses) == steps
    assert all(math.isfinite(value) for values in losses.values() for value in values)


def test_one_changed_byte_in_a_prediction_file_costs_the_candidate_its_place(fleet: Fleet) -> None:
    holds = Holds(fleet.root / "holds", 45)
    candidates = {"good": {"training": {"steps": 40}}, "touched": {"training": {"seed": 2, "steps": 200}, "environment": holds.environment}}
    campaign_id = fleet.launch(fleet.plan(candidates=candidates, cadence=40))
    fleet.until(lambda document: any(run["candidate"] == "touched" and step_of(run) > 41 for run in document["runs"]), "one validation")
    path = fleet.run_dir(fleet.runs()["touched"]) / "predictions" / "validation" / "step-000000040.jsonl"
    data = bytearray(path.read_bytes())
    at = data.index(b'"nll":') + 7
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    path.write_bytes(bytes(data))
    holds.let_go(45)

    fleet("wait", campaign_id, "--timeout", "10m")

    table = fleet.campaign(campaign_id)["selection"]["table"]
    touched = [row for row in table if row["candidate"] == "touched"]
    assert touched
    assert not any(row["eligible"] for row in touched)
    assert any("step-000000040.jsonl" in row["because"] for row in touched)
    assert fleet.campaign(campaign_id)["selection"]["candidate"] == "good"
