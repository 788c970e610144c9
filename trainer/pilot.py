"""The pilot: the first N steps of a run, checked by a fresh process before the night is spent on the rest.

    steps    the run trains to step N, saves, and scores its validation documents           then a fresh process begins
    check    the checkpoint is loaded again: same predictions? gradients on a full batch, memory, one update, all finite?
             evidence/pilot.json, written whole; failed: exit 32                             then a fresh process begins
    long     the run goes on from that very checkpoint; what it predicts first is compared with what the pilot stored

Which part is next is read from the run directory alone, so a pilot that was stopped or killed anywhere goes on where it was.
The fresh processes are those of trainer.afresh.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from policies.errors import DataDamaged, GateFailed, LossNotFinite
from policies.facts import step_name
from policies.token_nll import ScoredRow
from trainer.checkpoint import Checkpoint
from trainer.files import JsonFault, dumps, read_json, replace_whole
from trainer.loop import PREDICTIONS, Training
from trainer.memory import peak_bytes
from trainer.models.build import trained_weights
from trainer.predictions import read_rows
from trainer.records import RunRecords, now_text
from trainer.scoring import score_documents

EVIDENCE_NAME = "evidence/pilot.json"
DIFFERENCES_TOLD = FAULTS_TOLD = 3


class Part(Enum):
    STEPS = "steps"
    CHECK = "check"
    LONG = "long"


def next_part(run_dir: Path, steps: int, checkpoint: Checkpoint | None) -> Part:
    """What a process that goes on from `checkpoint` has to do. A check that failed is done again: somebody asked for it. One that can't be
    done at step N any more (its checkpoint is gone, a later one is there) is not made up for."""
    if checkpoint is None or checkpoint.step < steps:
        return Part.STEPS
    evidence = read_evidence(run_dir)
    has_passed = evidence is not None and evidence.get("passed") is True
    return Part.LONG if has_passed or checkpoint.step > steps else Part.CHECK


def read_evidence(run_dir: Path) -> dict[str, Any] | None:
    """evidence/pilot.json, None where there is none that can be read."""
    try:
        found = read_json(run_dir / EVIDENCE_NAME)
    except (OSError, JsonFault):
        return None
    return found if isinstance(found, dict) else None


def check(training: Training, *, host_limit_bytes: int | None, cap_bytes: int | None) -> None:
    """Judge the pilot of a run by its checkpoint, as `training` has just loaded it: what it predicts is compared with what was stored, then
    it takes a step that nobody keeps. The verdict becomes evidence; GateFailed names the part that failed."""
    state, records, resumed = training.state, training.records, training.resumed
    assert resumed is not None
    step = state.step
    records.log(event="pilot", phase="begin", step=step)
    parts = {"reload": _reload(training)}
    parts["step"] = _one_step(training, limit_bytes=cap_bytes if training.device.type == "cuda" else host_limit_bytes)
    failed = [f"{name}: {part['because']}" for name, part in parts.items() if not part["passed"]]
    _write(training.run_dir, {"schema": 1, "step": step, "checkpoint_digest": resumed.digest, "passed": not failed, "parts": parts,
                              "first_predictions": None, "at": now_text()})
    _conclude(training.run_dir, records, step, failed)


def compare_first_predictions(training: Training) -> None:
    """The long run, before its first step: does it predict what the pilot stored? Told in the evidence; GateFailed when it does not."""
    evidence = read_evidence(training.run_dir)
    if evidence is None:
        return
    if evidence.get("passed") is True:
        # Once more at each start: whoever wrote the evidence may have been killed before the log had its word, or a power cut took the log's
        # tail, and the campaign waits for it.
        _log_end(training.records, int(evidence["step"]), "")
    if training.state.step != evidence.get("step") or evidence.get("first_predictions") is not None:
        return
    found = _reload(training)
    _write(training.run_dir, {**evidence, "passed": evidence["passed"] and found["passed"], "first_predictions": found})
    if not found["passed"]:
        _conclude(training.run_dir, training.records, training.state.step, [f"first predictions: {found['because']}"])


def _conclude(run_dir: Path, records: RunRecords, step: int, failed: Sequence[str]) -> None:
    because = "; ".join(failed)
    _log_end(records, step, because)
    records.lineage("pilot", step=step, passed=not failed, because=because)
    if failed:
        records.log(event="failed", step=step, because=f"the pilot failed: {because}", value=None)
        raise GateFailed("the pilot failed", where=str(run_dir / EVIDENCE_NAME), what=because,
                         fix="mend what it names and launch again; the checkpoint of the pilot is kept")


def _log_end(records: RunRecords, step: int, because: str) -> None:
    passed = not because
    records.log(event="pilot", phase="end", step=step, passed=passed, because=because or "reloaded exactly, one more step is finite and fits")


def _reload(training: Training) -> dict[str, Any]:
    """Score the validation documents with the weights as they were loaded, and compare with the rows that the pilot stored."""
    step, task = training.state.step, training.task
    path = training.run_dir / PREDICTIONS / f"{step_name(step)}.jsonl"
    try:
        stored = read_rows(path)
    except DataDamaged as damage:
        return {"passed": False, "because": f"{damage.where}: {damage.what}", "rows": 0, "maximum_difference": None}
    rows = score_documents(training.state.model, training.scored, window=task.window, batch=task.validation.batch, precision=task.precision,
                           on_batch=training._between_batches(step))
    return compare_rows(stored, rows)


def compare_rows(stored: Sequence[dict[str, Any]], rows: Sequence[ScoredRow]) -> dict[str, Any]:
    """Passed only when the same documents have the same nats, bit for bit."""
    names = [(row["id"], row["tokens"]) for row in stored]
    if names != [(row.id, row.tokens) for row in rows]:
        return {"passed": False, "because": f"{len(rows)} rows of other documents than the {len(stored)} stored ones", "rows": len(rows),
                "maximum_difference": None}
    apart = {row.id: abs(row.nll - float(old["nll"])) for row, old in zip(rows, stored, strict=True)}
    differing = [name for name, difference in apart.items() if difference != 0.0]
    because = f"{len(differing)} of {len(rows)} rows differ, the first: {', '.join(differing[:DIFFERENCES_TOLD])}" if differing else ""
    return {"passed": not differing, "because": because, "rows": len(rows), "maximum_difference": max(apart.values(), default=0.0)}


def _one_step(training: Training, *, limit_bytes: int | None) -> dict[str, Any]:
    """One step on a full batch of full windows, with the optimizer's moments and the copy of a save in memory: what the long run needs at
    the most. Every gradient has to be there and finite, every update finite and not nothing. Nothing of it is kept or told."""
    weights = trained_weights(training.state.model)
    before = {name: weight.detach().cpu().clone() for name, weight in weights.items()}
    training.state.contents()
    with tempfile.TemporaryDirectory(prefix="fleetd-pilot-") as folder:
        training.records = RunRecords(Path(folder))
        try:
            training._take_step()
        except LossNotFinite as broke:
            return {"passed": False, "because": broke.what}
    living = {**{name: weight.detach() for name, weight in weights.items()}, **training.state.moments()}
    faults = [f"{name} is nan or inf after the update" for name, tensor in living.items() if not bool(torch.isfinite(tensor).all())]
    faults += [f"{name} got no gradient: the update left it as it was" for name, weight in weights.items() if torch.equal(weight.cpu(), before[name])]
    peak = peak_bytes(training.device)
    if limit_bytes is not None and peak > limit_bytes:
        faults.append(f"memory: {peak} bytes at the most, {limit_bytes} are allowed")
    return {"passed": not faults, "because": "; ".join(faults[:FAULTS_TOLD]), "loss": training.state.losses[-1], "window": training.task.window,
            "batch": training.task.batch, "peak_bytes": peak, "limit_bytes": limit_bytes, "memory_of": training.device.type}


def _write(run_dir: Path, evidence: dict[str, Any]) -> None:
    (run_dir / EVIDENCE_NAME).parent.mkdir(exist_ok=True)
    replace_whole(run_dir / EVIDENCE_NAME, dumps(evidence))
