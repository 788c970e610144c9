"""The pilot: N steps, a fresh process that checks them, and a long run that goes on from the very checkpoint, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_stage import finish, log_of, logged_losses, make_run, make_task, manifest_bytes, prepare, start, train_here

from policies.errors import GateFailed, PlanInvalid
from policies.facts import TrainerExit
from policies.token_nll import parse_row
from trainer import pilot
from trainer.config import parse_task
from trainer.predictions import read_rows, write_predictions

STEPS = 4
THREE_STARTS_SECONDS_MAX = 280.0
"""A fresh process imports torch again, which takes long on a machine that is busy."""


def pilot_task(shards: Path, **changes: Any) -> dict[str, Any]:
    return make_task(shards / "train", shards / "val", pilot={"steps": STEPS}, validation={"every_steps": STEPS, "batch": 4}, **changes)


def after_its_steps(root: Path, shards: Path) -> Path:
    """A run that has taken its pilot's steps and is about to be checked."""
    run_dir = make_run(root, "run", pilot_task(shards))
    training = prepare(run_dir)
    training.is_pilot = True
    assert training.train() == TrainerExit.FINISHED and training.state.step == STEPS
    return run_dir


def change_one_row(run_dir: Path) -> str:
    """The stored predictions of the pilot, one sum another, everything about them consistent."""
    folder, name = run_dir / "predictions/validation", f"step-{STEPS:09d}"
    rows = read_rows(folder / f"{name}.jsonl")
    rows[3]["nll"] *= 1 + 1e-12
    meta = json.loads((folder / f"{name}.meta.json").read_text())
    described = {key: meta[key] for key in ("split", "step", "dataset_digest", "checkpoint_digest", "numeric_mode")}
    write_predictions(folder, name, [parse_row(row, "row") for row in rows], **described)
    return str(rows[3]["id"])


def pilot_verdicts(run_dir: Path) -> list[bool]:
    return [record["passed"] for record in log_of(run_dir) if record.get("event") == "pilot" and record["phase"] == "end"]


def evidence_of(run_dir: Path) -> dict[str, Any]:
    found = pilot.read_evidence(run_dir)
    assert found is not None
    return found


def test_a_pilot_that_passes_is_checked_by_fresh_processes_and_changes_no_bit_of_the_run(tmp_path: Path, shards: Path) -> None:
    twin = make_run(tmp_path, "twin", {key: value for key, value in pilot_task(shards).items() if key != "pilot"})
    assert train_here(twin) == TrainerExit.FINISHED
    run_dir = make_run(tmp_path, "run", pilot_task(shards))
    process = start(run_dir)
    status, output = finish(process, THREE_STARTS_SECONDS_MAX)
    assert status == TrainerExit.FINISHED, output
    evidence = evidence_of(run_dir)
    assert evidence["passed"] and evidence["step"] == STEPS and evidence["parts"]["step"]["peak_bytes"] > 0
    assert evidence["parts"]["reload"]["maximum_difference"] == 0.0 == evidence["first_predictions"]["maximum_difference"]
    assert {record["pid"] for record in log_of(run_dir) if record.get("event") == "start"} == {process.pid}, "fresh processes, one pid"
    story = [json.loads(line) for line in (run_dir / "lineage.jsonl").read_text().splitlines()]
    resumed = [line["digest"] for line in story if line["event"] == "resume"]
    assert resumed == [evidence["checkpoint_digest"]], "the long run starts from the pilot's own"
    assert manifest_bytes(run_dir, 12) == manifest_bytes(twin, 12) and logged_losses(run_dir) == logged_losses(twin)


def test_predictions_that_do_not_come_out_again_end_the_run_before_its_long_part(tmp_path: Path, shards: Path) -> None:
    run_dir = after_its_steps(tmp_path, shards)
    row = change_one_row(run_dir)
    status, output = finish(start(run_dir))
    assert status == TrainerExit.GATE_FAILED and "the pilot failed" in output and row in output
    evidence = evidence_of(run_dir)
    assert not evidence["passed"] and 0 < evidence["parts"]["reload"]["maximum_difference"] < 1e-6, "in the last place is too much"
    assert evidence["parts"]["step"]["passed"], "each part is judged for itself"
    assert max(record["step"] for record in log_of(run_dir) if "loss" in record) == STEPS, "nothing of the night was spent"
    assert log_of(run_dir)[-1]["event"] == "failed"


def test_the_long_run_refuses_to_start_when_it_predicts_something_else_than_the_pilot(tmp_path: Path, shards: Path) -> None:
    run_dir = after_its_steps(tmp_path, shards)
    training = prepare(run_dir)
    pilot.check(training, host_limit_bytes=None, cap_bytes=None)
    assert evidence_of(run_dir)["passed"]
    change_one_row(run_dir)
    status, output = finish(start(run_dir))
    assert status == TrainerExit.GATE_FAILED and "first predictions" in output
    assert not evidence_of(run_dir)["passed"]


def test_a_verdict_that_the_log_lost_is_told_again_before_the_long_run(tmp_path: Path, shards: Path) -> None:
    run_dir = after_its_steps(tmp_path, shards)
    pilot.check(prepare(run_dir), host_limit_bytes=None, cap_bytes=None)
    log = run_dir / "log.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"phase":"end"' not in line or '"pilot"' not in line))
    assert not pilot_verdicts(run_dir), "as a power cut leaves it: the evidence was synced, the end of the log was not"
    pilot.compare_first_predictions(prepare(run_dir))
    assert pilot_verdicts(run_dir) == [True]


def test_the_check_names_memory_and_a_weight_without_a_gradient_and_keeps_no_step(tmp_path: Path, shards: Path) -> None:
    run_dir = after_its_steps(tmp_path, shards)
    with pytest.raises(GateFailed, match="bytes at the most, 1000 are allowed"):
        pilot.check(prepare(run_dir), host_limit_bytes=1000, cap_bytes=None)
    training = prepare(run_dir)
    next(iter(training.state.model.parameters())).requires_grad_(False)
    with pytest.raises(GateFailed, match="got no gradient"):
        pilot.check(training, host_limit_bytes=None, cap_bytes=None)
    broken = prepare(run_dir)
    with torch.no_grad():
        next(iter(broken.state.model.parameters())).fill_(torch.inf)
    assert not pilot._one_step(broken, limit_bytes=None)["passed"]
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step-000000000", f"step-{STEPS:09d}"]


def test_a_pilot_needs_validation_data_and_an_end_before_that_of_the_training(shards: Path) -> None:
    for task in (make_task(shards / "train", None, pilot={"steps": STEPS}), pilot_task(shards, steps=STEPS)):
        with pytest.raises(PlanInvalid, match="pilot: it needs validation data"):
            parse_task(task, where="task.json")
