"""The main job on real processes: train, choose, freeze, judge, report; and a stopped run that ends as if it had never stopped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from conftest import Fleet, step_of

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

    fleet("wait", campaign_id, "--timeout", "3m", seconds=200)

    campaign = fleet.campaign(campaign_id)
    directory = Path(campaign["directory"])
    ledger = [json.loads(line) for line in (directory / "ledger.jsonl").read_text(encoding="utf-8").splitlines()]
    frozen = json.loads((directory / "frozen.json").read_text(encoding="utf-8"))
    result = json.loads((directory / "results" / "test.json").read_text(encoding="utf-8"))
    assert campaign["stage"] == "evaluated"
    assert [run["state"] for run in fleet.status()["runs"]] == ["finished"] * 3
    assert campaign["selection"]["checkpoint_digest"] in json.dumps(frozen)
    kinds = [entry.get("kind") or entry["event"]["kind"] for entry in ledger]
    assert [kind for kind in kinds if "froz" in kind or "open" in kind] == sorted((kind for kind in kinds if "froz" in kind or "open" in kind), key=lambda k: "open" in k)
    assert set(json.dumps(result)) and {"en", "de", "fr", "ja"} <= set(json.dumps(result).replace('"', " ").split())
    assert (directory / "report.html").stat().st_size > 10_000
    assert json.loads((directory / "report.json").read_text(encoding="utf-8"))


def test_reserved_data_is_on_no_host_before_the_freeze(fleet: Fleet) -> None:
    campaign_id = fleet.launch(fleet.plan(candidates={"one": {"training": {"steps": 4000}}}))
    fleet.until(lambda document: any(step_of(run) > 10 for run in document["runs"]), "training")

    assert fleet.campaign(campaign_id)["frozen"] is None
    assert list(fleet.host_root.rglob("train_009.bin"))
    assert not list(fleet.host_root.rglob("test_000*"))


@pytest.mark.parametrize("stops", [1, 3])
def test_a_stopped_and_resumed_run_equals_one_that_was_never_stopped(fleet: Fleet, stops: int) -> None:
    steps = 700
    candidates = {"one": {"training": {"steps": steps}}}
    whole = fleet.launch(fleet.plan("whole", candidates=candidates))
    stopped = fleet.launch(fleet.plan("stopped", candidates=candidates))

    for stop in range(1, stops + 1):
        fleet.until(lambda document, least=stop * steps // (stops + 2): step_of(next(r for r in document["runs"] if r["campaign_id"] == stopped)) >= least, "far enough to stop")
        fleet("stop", stopped, "--graceful")
        fleet("wait", stopped, "--timeout", "1m", expect=6)
        run = next(each for each in fleet.status()["runs"] if each["campaign_id"] == stopped)
        assert run["state"] == "stopped"
        assert run["attempts_ended"][-1]["exit"]["exit_code"] == 10
        newest = final_checkpoint(fleet, run)
        assert newest.name == f"step-{max(losses_by_step(fleet, run)):09d}", "a complete checkpoint at the step where it stopped"
        fleet("resume", stopped)
    fleet("wait", stopped, "--timeout", "3m", seconds=200)
    fleet("wait", whole, "--timeout", "3m", seconds=200)

    runs = {run["campaign_id"]: run for run in fleet.status()["runs"] if run["kind"] == "train"}
    once, again = runs[whole], runs[stopped]
    assert again["attempt"] == stops + 1
    assert final_checkpoint(fleet, once).name == final_checkpoint(fleet, again).name == f"step-{steps:09d}"
    assert (final_checkpoint(fleet, once) / "manifest.json").read_bytes() == (final_checkpoint(fleet, again) / "manifest.json").read_bytes()
    losses = losses_by_step(fleet, once)
    assert {step: set(values) for step, values in losses_by_step(fleet, again).items()} == {step: set(values) for step, values in losses.items()}
    assert len(losses) == steps and all(math.isfinite(value) for values in losses.values() for value in values)


def test_one_changed_byte_in_a_prediction_file_costs_the_candidate_its_place(fleet: Fleet) -> None:
    candidates = {"good": {"training": {"steps": 40}}, "touched": {"training": {"seed": 2, "steps": 4000}}}
    campaign_id = fleet.launch(fleet.plan(candidates=candidates))
    fleet.until(lambda document: any(run["candidate"] == "touched" and step_of(run) > 45 for run in document["runs"]), "two validations")
    path = fleet.run_dir(fleet.runs()["touched"]) / "predictions" / "validation" / "step-000000020.jsonl"
    data = bytearray(path.read_bytes())
    at = data.index(b'"nll":') + 7
    data[at] = ord("1") if data[at] != ord("1") else ord("2")
    path.write_bytes(bytes(data))
    fleet("stop", fleet.runs()["touched"]["run_id"], "--graceful")
    fleet.until(lambda document: all(run["state"] in ("finished", "stopped") for run in document["runs"]), "both at rest")
    fleet("resume", fleet.runs()["touched"]["run_id"])

    fleet("wait", campaign_id, "--timeout", "4m", seconds=260)

    table = fleet.campaign(campaign_id)["selection"]["table"]
    touched = [row for row in table if row["candidate"] == "touched"]
    assert touched and not any(row["eligible"] for row in touched)
    assert any("step-000000020.jsonl" in row["because"] for row in touched)
    assert fleet.campaign(campaign_id)["selection"]["candidate"] == "good"
