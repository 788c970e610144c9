"""The evaluation of a reserved split: two models and the unigram baseline on the same rows, each written whole.

Complete predictions that verify are kept, so a restart goes on with what is missing and never scores a row twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policies.errors import PlanInvalid
from policies.facts import TrainerExit
from policies.token_nll import ScoredRow
from trainer.baseline import score_by_unigram, unigram_nll
from trainer.config import EvaluateTask, ModelSettings
from trainer.data.shards import Corpus, Document, documents
from trainer.files import JsonFault, read_json
from trainer.formats.transformers_dirs import read_model_directory
from trainer.models.families import check_window, model_digest, read_config
from trainer.predictions import complete_predictions, write_predictions
from trainer.records import RunRecords
from trainer.stopping import Stop


class EvaluationStopped(Exception):
    """A stop was asked for; complete predictions stay."""


def evaluate(run_dir: Path, task: EvaluateTask, train: Corpus, scored: Corpus, stop: Stop, records: RunRecords) -> TrainerExit:
    """Write the predictions of every model on the split. STOPPED when asked to stop before all are complete."""
    rows = tuple(documents(scored, task.scored.tokens_per_document_max))
    folder = run_dir / "predictions" / task.split
    windows = sum(-(-len(row.tokens) // task.window) for row in rows)
    batches = -(-windows // task.batch)
    progress = _Progress(records, stop, total=batches * len(task.models))
    records.log(event="start", step=0, steps=progress.total, resumed_from=None, pid=os.getpid())
    records.lineage("start", split=task.split)
    described = {"split": task.split, "dataset_digest": scored.digest}
    try:
        for number, (name, model) in enumerate(task.models.items()):
            progress.begin(name, number * batches)
            _score_model(folder, name, model, task, rows, {**described, "step": _steps_done(Path(str(model.path)))}, progress)
        progress.begin("unigram", progress.total)
        _score_unigram(folder, train, rows, {**described, "step": None})
    except EvaluationStopped:
        records.log(event="stop", step=progress.done, because=stop.because() or "asked", skipped=progress.left(task))
        records.lineage("stop", because=stop.because())
        return TrainerExit.STOPPED
    records.log(event="finish", step=progress.total, because="steps")
    records.lineage("finish", split=task.split)
    return TrainerExit.FINISHED


class _Progress:
    """Counts batches over all models: the steps of an evaluation."""

    def __init__(self, records: RunRecords, stop: Stop, *, total: int) -> None:
        self._records, self._stop, self.total = records, stop, total
        self.done, self._first, self._name, self._told_at = 0, 0, "", time.monotonic()

    def begin(self, name: str, first: int) -> None:
        self._name, self._first, self.done, self._told_at = name, first, first, time.monotonic()
        self._check()

    def on_batch(self, done: int) -> None:
        """One batch is one step: that is how the supervisor sees progress and the reserve learns the speed."""
        now = time.monotonic()
        self.done = self._first + done
        self._records.log(step=self.done, model=self._name, seconds=round(now - self._told_at, 6))
        self._told_at = now
        self._check()

    def left(self, task: EvaluateTask) -> list[str]:
        names = [*task.models, "unigram"]
        return names[names.index(self._name):] if self._name in names else names

    def _check(self) -> None:
        if self._stop.because() is not None:
            raise EvaluationStopped


def _score_model(
    folder: Path, name: str, model: ModelSettings, task: EvaluateTask, rows: tuple[Document, ...], described: dict[str, Any], progress: _Progress,
) -> None:
    described = {**described, "checkpoint_digest": model_digest(Path(str(model.path)), model.digest)}
    if complete_predictions(folder, name, **described) is None:
        scored, mode = _forward(model, task, rows, progress.on_batch)
        write_predictions(folder, name, scored, **described, numeric_mode=mode)


def _forward(model: ModelSettings, task: EvaluateTask, rows: tuple[Document, ...], on_batch: Callable[[int], None]) -> tuple[list[ScoredRow], str]:
    # Imported here: complete predictions and faults in the data are found without the seconds that torch takes.
    from trainer.fingerprint import choose_device, make_strict
    from trainer.models.build import build_model, load_model_directory
    from trainer.scoring import score_documents

    make_strict(task.threads)
    device = choose_device(task.device, task.precision, where="device")
    folder = Path(str(model.path))
    built = build_model(read_config(folder), seed=0)
    load_model_directory(built, folder)
    scored = score_documents(built.to(device), rows, window=task.window, batch=task.batch, precision=task.precision, on_batch=on_batch)
    return scored, f"{task.precision} {device.type}"


def _score_unigram(folder: Path, train: Corpus, rows: tuple[Document, ...], described: dict[str, Any]) -> None:
    """The vocabulary is that of the tokenizer; the digest names the shards that were counted."""
    described = {**described, "checkpoint_digest": None, "counted_digest": train.digest}
    if complete_predictions(folder, "unigram", **described) is None:
        nll = unigram_nll(train, train.vocabulary)
        write_predictions(folder, "unigram", score_by_unigram(nll, rows), **described, numeric_mode="fp64 cpu")


def _steps_done(folder: Path) -> int | None:
    """The step of a checkpoint, None for a bare model directory."""
    try:
        step = read_json(folder / "trainer.json").get("step")
    except (OSError, JsonFault, AttributeError):
        return None
    return step if isinstance(step, int) else None


def check_models(task: EvaluateTask, *, where: str) -> None:
    """PlanInvalid when a model to evaluate is no model directory or its window is too small."""
    for name, model in task.models.items():
        if model.path is None:
            raise PlanInvalid("the evaluation can't start", where=where, what=f"models.{name} has no path", fix="name a model directory")
        check_window(read_model_directory(Path(model.path)).config, task.window, where=f"{where}: models.{name}")
