"""`fleetd-trainer prove RUN_DIR`: is this run what its settings, data and first checkpoint make of it, bit for bit?

A stretch of the run is taken again from one of its checkpoints, in a temporary directory and without touching the run, and
compared with what the run itself left: the loss and the rate of every step, and all parts of every checkpoint on the way. The
state is also compared right after it was restored, so a part that a restore loses is named before the first step.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policies.errors import CheckpointDamaged, LossNotFinite, PlanInvalid
from policies.facts import TrainerExit, step_name, step_of
from trainer.checkpoint import CHECKPOINTS, Checkpoint, steps_in, verify
from trainer.config import TASK_NAME, TrainTask, read_task
from trainer.data.shards import open_role
from trainer.environment import fix_arithmetic, keep_big_blocks, read_environment
from trainer.files import dumps, replace_whole
from trainer.findings import PARTS, Part, Verdict, as_text, compare_state, first_cause
from trainer.fingerprint import code_digest, differences
from trainer.gate import EVIDENCE_NAME
from trainer.loop import Training
from trainer.models.families import model_config
from trainer.prepare import prepare_training
from trainer.records import LOG_NAME, RunRecords, now_text
from trainer.state import read_state
from trainer.stopping import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the run left of itself: verified checkpoints by step, the loss and the rate of each step."""

    checkpoints: dict[int, Checkpoint]
    losses: dict[int, float]
    rates: dict[int, float]
    damaged: dict[int, str]


@dataclass(frozen=True, kw_only=True)
class Proof:
    """The outcome. `verdict` is exact only when all parts are."""

    run_dir: Path
    start: Checkpoint
    end: int
    compared: tuple[int, ...]
    parts: dict[str, Part]
    other_environment: str
    code: str
    stopped_at: int | None

    @property
    def verdicts(self) -> dict[str, tuple[Verdict, str]]:
        found = {name: self.parts[name].verdict(self.other_environment) for name in PARTS}
        if found["schedule"][0] is Verdict.UNKNOWN and found["weights"][0] is Verdict.EXACT and self.parts["schedule"].seen_step is None:
            found["schedule"] = (Verdict.EXACT, "not logged, but other rates would have given other weights")
        return found

    @property
    def verdict(self) -> Verdict:
        found = {verdict for verdict, _ in self.verdicts.values()}
        return next(verdict for verdict in (Verdict.INEXACT, Verdict.UNKNOWN, Verdict.EXACT) if verdict in found)

    @property
    def cause(self) -> Part | None:
        return first_cause(self.parts, self.start.step) if self.verdict is Verdict.INEXACT else None

    def to_json(self) -> dict[str, Any]:
        cause = self.cause
        return {
            "schema": 1, "verdict": self.verdict.value, "from": {"step": self.start.step, "digest": self.start.digest}, "to_step": self.end,
            "compared_checkpoints": list(self.compared), "code": self.code, "other_environment": self.other_environment or None,
            "first": None if cause is None else {"part": cause.name, "from_step": cause.from_step, "seen_step": cause.seen_step},
            "stopped_at": self.stopped_at,
            "parts": {
                name: {"verdict": verdict.value, "because": because or None, "from_step": self.parts[name].from_step,
                       "seen_step": self.parts[name].seen_step, "equal_steps": len(self.parts[name].equal_steps)}
                for name, (verdict, because) in self.verdicts.items()
            },
        }

    def summary(self) -> str:
        """The outcome in one line."""
        if self.end == self.start.step:
            return f"asked to stop before step {self.end + 1} was taken again"
        span = f"steps {self.start.step + 1} to {self.end} taken again" + (", then asked to stop" if self.stopped_at is not None else "")
        if (cause := self.cause) is not None:
            return f"{span}: {cause.name} differs from step {cause.from_step} on: {cause.because}"
        if self.verdict is Verdict.EXACT:
            return f"{span}: every bit is the same"
        open_ones = [f"{name}: {because}" for name, (verdict, because) in self.verdicts.items() if verdict is Verdict.UNKNOWN]
        return f"{span}: {open_ones[0]}" + (f" (and {len(open_ones) - 1} more)" if len(open_ones) > 1 else "")

    def to_text(self) -> str:
        head = f"{self.run_dir.name}: steps {self.start.step + 1} to {self.end} taken again from {self.start.path.name}, compared with "
        head += ", ".join(step_name(step) for step in self.compared) or "no later checkpoint"
        body = as_text((name, verdict, self.parts[name], because) for name, (verdict, because) in self.verdicts.items())
        last = {Verdict.EXACT: "exact: every bit is the same", Verdict.UNKNOWN: "unknown: not all parts could be compared"}.get(self.verdict, "")
        if (cause := self.cause) is not None:
            last = f"inexact: look at {cause.name} first, from step {cause.from_step}" + (
                "" if cause.seen_step == cause.from_step else f" (seen at step {cause.seen_step}, the next checkpoint)")
        return f"{head}\n{body}\n  {'code':<12}{self.code}\n{last}"


def prove(run_dir: Path, *, start: str | None, steps: int | None, stop: Stop, on_step: Callable[[int], None] = lambda step: None) -> Proof:
    """Take steps again and compare; `on_step` hears of each. PlanInvalid and ResumeMismatch when the run, its settings or its data are
    not what they were."""
    task = read_task(run_dir)
    if not isinstance(task, TrainTask):
        raise _unprovable(run_dir / TASK_NAME, "its task is no training", "name the run directory of a training")
    record = read_record(run_dir)
    first = _start(run_dir, record, start)
    later = [step for step in record.checkpoints if step > first.step] or list(record.losses)
    end = min(first.step + steps, task.steps) if steps is not None else max(later, default=first.step)
    if end <= first.step:
        raise _unprovable(first.path, "the run holds nothing after this checkpoint", "name an older one with --from, or wait for the next step")
    with tempfile.TemporaryDirectory(prefix="fleetd-prove-") as folder:
        training = _training(run_dir, Path(folder), task, first, stop)
        stored = read_state(first.path)["environment"]
        here = training.state.identity["environment"]
        parts, reached = _replay(training, record, first, end, on_step)
    return Proof(
        run_dir=run_dir, start=first, end=reached, compared=tuple(sorted(step for step in record.checkpoints if first.step < step <= reached)),
        parts=parts, other_environment="; ".join(differences(stored, here)), code=_code(run_dir), stopped_at=reached if reached < end else None,
    )


def read_record(run_dir: Path) -> Record:
    """Every checkpoint that verifies, the losses of the newest one, and what log.jsonl says besides (its last word for each step)."""
    checkpoints, damaged = {}, {}
    for step in steps_in(run_dir / CHECKPOINTS):
        try:
            checkpoints[step] = verify(run_dir / CHECKPOINTS / step_name(step))
        except CheckpointDamaged as damage:
            damaged[step] = damage.what
    losses, rates = _logged(run_dir / LOG_NAME)
    if checkpoints:
        losses |= dict(enumerate(read_state(checkpoints[max(checkpoints)].path)["losses"], start=1))
    return Record(checkpoints=checkpoints, losses=losses, rates=rates, damaged=damaged)


def report(proof: Proof, *, as_json: bool, is_recorded: bool) -> TrainerExit:
    """Print the proof, keep it as evidence where asked, and say it as an exit status."""
    if is_recorded:
        path = proof.run_dir / EVIDENCE_NAME
        path.parent.mkdir(exist_ok=True)
        replace_whole(path, dumps({**proof.to_json(), "at": now_text()}))
    print(json.dumps(proof.to_json(), indent=1) if as_json else proof.to_text(), flush=True)
    if proof.stopped_at is not None:
        return TrainerExit.STOPPED
    return {Verdict.EXACT: TrainerExit.FINISHED, Verdict.INEXACT: TrainerExit.GATE_FAILED, Verdict.UNKNOWN: TrainerExit.CONFIG}[proof.verdict]


def _training(run_dir: Path, folder: Path, task: TrainTask, start: Checkpoint, stop: Stop) -> Training:
    environment = replace(read_environment(os.environ, str(folder)), resume=None, cutoff_at=None)
    fix_arithmetic(task.threads)
    keep_big_blocks()
    config = model_config(task.model, window=task.window, where=str(run_dir / TASK_NAME))
    train = open_role(task.train, vocabulary=config["vocab_size"])
    validation = open_role(task.validation_data, vocabulary=config["vocab_size"]) if task.validation_data else None
    return prepare_training(environment, task, config, train, validation, start, stop, RunRecords(folder), elsewhere=True)


def _replay(training: Training, record: Record, start: Checkpoint, end: int, on_step: Callable[[int], None]) -> tuple[dict[str, Part], int]:
    """All parts, compared from the restored state on; and the step that was reached."""
    state, parts = training.state, {name: Part(name=name) for name in PARTS}

    def compare(checkpoint: Checkpoint) -> None:
        for name, difference in compare_state(state, training.sampler, checkpoint.path).items():
            parts[name].note(state.step, difference)

    for step, loss in enumerate(state.losses, start=1):
        if record.losses.get(step, loss) != loss:
            parts["losses"].note(step, f"{record.losses[step]!r} in the newest checkpoint, {loss!r} in {start.path.name}")
    compare(start)
    while state.step < end and training.stop.because() is None:
        step = state.step + 1
        try:
            training._take_step()
        except LossNotFinite as broke:
            parts["losses"].note(step, f"the replay broke: {broke.what}")
            break
        on_step(step)
        if step in record.losses:
            loss = state.losses[-1]
            parts["losses"].note(step, None if record.losses[step] == loss else f"{record.losses[step]!r} in the record, {loss!r} in the replay")
        if step in record.rates:
            rate = float(state.optimizer.param_groups[0]["lr"])
            parts["schedule"].note(step, None if record.rates[step] == rate else f"{record.rates[step]!r} in the record, {rate!r} in the replay")
        if step in record.checkpoints:
            compare(record.checkpoints[step])
    if not any(start.step < step <= state.step for step in record.rates):
        parts["schedule"].because = "log.jsonl has no rate for these steps"
    return parts, state.step


def _start(run_dir: Path, record: Record, named: str | None) -> Checkpoint:
    """The named checkpoint, else the newest one that another one follows."""
    where = run_dir / CHECKPOINTS
    if named is not None:
        step = step_of(Path(named).name) if not named.isdigit() else int(named)
        if step is None or step not in record.checkpoints:
            why = record.damaged.get(-1 if step is None else step, "there is no checkpoint of that name")
            known = ", ".join(step_name(step) for step in sorted(record.checkpoints)) or "none"
            raise _unprovable(where / named, why, f"name one that verifies: {known}")
        return record.checkpoints[step]
    steps = sorted(record.checkpoints)
    if not steps:
        raise _unprovable(where, "no checkpoint there verifies", "wait for the first save")
    return record.checkpoints[steps[-2] if len(steps) > 1 else steps[-1]]


def _logged(path: Path) -> tuple[dict[int, float], dict[int, float]]:
    losses: dict[int, Any] = {}
    rates: dict[int, Any] = {}
    with open(path, "rb") if path.is_file() else open(os.devnull, "rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a torn tail
            if isinstance(record, dict) and type(record.get("step")) is int and "event" not in record:
                losses[record["step"]], rates[record["step"]] = record.get("loss"), record.get("lr")
    return ({step: loss for step, loss in losses.items() if isinstance(loss, float)},
            {step: rate for step, rate in rates.items() if isinstance(rate, float)})


def _code(run_dir: Path) -> str:
    """How the code of this replay relates to that of the run, in words."""
    ran = list(dict.fromkeys(str(line["code"]) for line in RunRecords(run_dir).story() if line.get("code")))
    if not ran:
        return "unknown: the run does not say which code it ran"
    if ran == [code_digest()]:
        return "the same as in every attempt of the run"
    return f"unknown: the run was made by {', '.join(digest[:12] for digest in ran)}, this is {code_digest()[:12]}"


def _unprovable(where: Path, what: str, fix: str) -> PlanInvalid:
    return PlanInvalid("the run can't be proven", where=str(where), what=what, fix=fix)
