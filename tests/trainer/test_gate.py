"""The proof at the end of a training: made by a fresh process, never beyond the cutoff, and its verdict the truth."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_stage import StopAfter, finish, log_of, make_run, make_task, prepare, start, train_here

from policies.errors import PlanInvalid
from policies.facts import TrainerExit
from trainer import gate
from trainer.config import ProofSettings, parse_task
from trainer.models.build import trained_weights
from trainer.records import RunRecords
from trainer.stopping import Stop

END = 12
TERMS = ProofSettings(steps=3, required=True)


def proof_task(shards: Path, **changes: Any) -> dict[str, Any]:
    return make_task(shards / "train", shards / "val", **{"proof": {"steps": 3, "required": True}, **changes})


def evidence_of(run_dir: Path) -> dict[str, Any]:
    found = json.loads((run_dir / gate.EVIDENCE_NAME).read_text())
    assert isinstance(found, dict)
    return found


def ended(tmp_path: Path, shards: Path) -> Path:
    """A run that has just finished, its proof still to be made."""
    run_dir = make_run(tmp_path, "run", proof_task(shards))
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert gate.is_due(run_dir, RunRecords(run_dir), END)
    return run_dir


def proven(run_dir: Path, stop: Stop | None = None) -> dict[str, Any]:
    assert gate.prove_the_end(run_dir, END, TERMS, stop or Stop(), RunRecords(run_dir)) == TrainerExit.FINISHED
    assert not gate.is_due(run_dir, RunRecords(run_dir), END), "once"
    told = [record for record in log_of(run_dir) if record.get("event") == "proof" and record["phase"] == "end"]
    assert [(record["verdict"], record["because"], record["required"]) for record in told] == [
        (evidence_of(run_dir)["verdict"], evidence_of(run_dir)["because"], True)]
    assert log_of(run_dir)[-1]["event"] == "finish", "the last word, for whoever did not see the exit"
    return evidence_of(run_dir)


def test_a_finished_training_becomes_a_fresh_process_that_takes_its_last_steps_again(tmp_path: Path, shards: Path) -> None:
    run_dir = make_run(tmp_path, "run", proof_task(shards))
    process = start(run_dir)
    status, output = finish(process)
    assert status == TrainerExit.FINISHED, output
    evidence = evidence_of(run_dir)
    assert (evidence["verdict"], evidence["because"]) == ("exact", "steps 10 to 12 taken again: every bit is the same")
    assert evidence["from"]["step"] == 9 and evidence["compared_checkpoints"] == [END], "a checkpoint on either side of these steps"
    assert {part["verdict"] for part in evidence["parts"].values()} == {"exact"}
    written = (run_dir / gate.EVIDENCE_NAME).read_bytes()
    assert train_here(run_dir) == TrainerExit.FINISHED and gate.is_judged(run_dir, END)
    assert (run_dir / gate.EVIDENCE_NAME).read_bytes() == written, "a run that is started again is not proven again"


def test_a_run_whose_last_steps_were_disturbed_is_inexact_and_the_step_is_named(tmp_path: Path, shards: Path) -> None:
    run_dir = make_run(tmp_path, "run", proof_task(shards))
    train_here(run_dir, StopAfter(10))
    (run_dir / "checkpoints/step-000000010").rename(tmp_path / "step-000000010")  # so that steps 10 to 12 are compared at once
    training = prepare(run_dir, FLEETD_RESUME=str(tmp_path / "step-000000010"))
    with torch.no_grad():
        next(iter(trained_weights(training.state.model).values())).view(-1)[0] += 1e-3
    training.saved = training.resumed  # the state at step 10 is not saved again here
    assert training.train() == TrainerExit.FINISHED
    evidence = proven(run_dir)
    assert evidence["verdict"] == "inexact" and evidence["first"]["from_step"] == 10, evidence
    assert evidence["parts"]["losses"]["from_step"] == 11, "the first loss after it"
    assert "differs from step 10 on: " in evidence["because"]


def test_near_the_cutoff_the_proof_is_left_out(shards: Path, tmp_path: Path) -> None:
    now = datetime.now(timezone.utc)
    assert gate.has_time(Stop(), TERMS) and gate.has_time(Stop(now + timedelta(minutes=10)), TERMS)
    assert not gate.has_time(Stop(now + timedelta(seconds=50)), TERMS)
    slow = Stop(now + timedelta(minutes=10))
    slow.note_step(200.0)
    assert not gate.has_time(slow, TERMS), "three of its steps do not fit"


def test_a_stop_ends_the_proof_between_two_steps_and_a_cutoff_before_it_begins(tmp_path: Path, shards: Path) -> None:
    run_dir = ended(tmp_path, shards)
    evidence = proven(run_dir, StopAfter(2))
    assert evidence["verdict"] == "unknown" and evidence["stopped_at"] == 11 and "asked to stop" in evidence["because"]
    (run_dir / gate.EVIDENCE_NAME).unlink()
    (run_dir / "log.jsonl").unlink()
    RunRecords(run_dir).lineage("finish", step=END, because="steps")
    assert proven(run_dir, Stop(datetime.now(timezone.utc)))["because"] == "cutoff"


def test_a_process_that_died_at_the_proof_is_not_followed_by_another_try(tmp_path: Path, shards: Path) -> None:
    run_dir = ended(tmp_path, shards)
    RunRecords(run_dir).lineage("proof", step=END)  # the last that was heard of it
    evidence = proven(run_dir)
    assert evidence["verdict"] == "unknown" and "ended before it was done" in evidence["because"]


def test_what_can_not_be_taken_again_is_unknown_and_fails_nothing(tmp_path: Path, shards: Path) -> None:
    run_dir = ended(tmp_path, shards)
    for name in ("step-000000000", "step-000000006", "step-000000009"):
        (run_dir / "checkpoints" / name / "manifest.json").unlink(missing_ok=True)
    evidence = proven(run_dir)
    assert evidence["verdict"] == "unknown" and "nothing after this checkpoint" in evidence["because"]


@pytest.mark.parametrize("change", [{"proof": {"steps": 12}}, {"checkpoint": {"keep": 1}}])
def test_a_proof_without_steps_or_without_a_checkpoint_to_start_from_is_refused(shards: Path, change: dict[str, Any]) -> None:
    with pytest.raises(PlanInvalid, match="proof: it needs fewer steps"):
        parse_task(proof_task(shards, **change), where="here")
