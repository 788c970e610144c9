"""The training, one step after another. Readable in one sitting, because everything it promises is promised here.

    step      micro-batches forward and backward, clip, check that all is finite, update; only then is it a step
    save      at the boundary between two steps: copied in memory, written beside the next steps (trainer.saving)
    validate  first saved, so that predictions carry a digest; due until it is done: a stop leaves it due, the resume repeats it first
    leave     asked (SIGTERM, cutoff): save what is done, exit 10; SIGINT: leave at once
    finish    all steps done, or no improvement for long enough

Validation, saving and logging draw from no training stream and change no tensor: with and without them the weights are equal.
"""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel
from torch.nn.utils import clip_grad_norm_

from policies.errors import LossNotFinite
from policies.facts import TrainerExit, step_name
from trainer import randomness
from trainer.checkpoint import CHECKPOINTS, Checkpoint, SaveAbandoned
from trainer.config import TrainTask
from trainer.data.batches import Batches, Sampler
from trainer.data.shards import Corpus, Document
from trainer.ending import PILOT, ending, incumbent
from trainer.fingerprint import attention_kernels, code_digest
from trainer.memory import is_out_of_memory, peak_bytes, planned_bytes
from trainer.models.build import trained_weights
from trainer.predictions import complete_predictions, write_predictions
from trainer.records import RunRecords
from trainer.saving import Saver
from trainer.schedule import learning_rate
from trainer.scoring import ScoringStopped, mean_nll, score_documents
from trainer.state import TrainingState
from trainer.stopping import Stop

PREDICTIONS = "predictions/validation"
PROGRESS_SECONDS = 2.0


class _StepAbandoned(Exception):
    """A SIGINT came into a step; nothing of it is kept."""


@dataclass(kw_only=True)
class Training:
    """One training run: its state, and all that is not state."""

    task: TrainTask
    state: TrainingState
    sampler: Sampler
    stop: Stop
    records: RunRecords
    run_dir: Path
    validation: Corpus | None
    scored: tuple[Document, ...]
    memory_cap_bytes: int | None = None
    resumed: Checkpoint | None = None
    """Where this attempt went on from; it may belong to another run."""
    saved: Checkpoint | None = None
    """The newest checkpoint of this run that is written and read back."""
    is_pilot: bool = False
    """This process ends with the pilot's last step, for a fresh one to check it."""
    saver: Saver = field(init=False)
    batches: Batches = field(init=False)
    saved_at_seconds: float = field(default_factory=time.monotonic)
    update_is_torn: bool = False
    """True inside an optimizer step: the tensors belong to no step then, and are not saved."""

    def __post_init__(self) -> None:
        self.saver = Saver(self.checkpoints, keep=self.task.checkpoint.keep, abandon=lambda: self.stop.gives_up_save)
        self.batches = Batches(self.sampler, is_pinned=self.device.type == "cuda")

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / CHECKPOINTS

    @property
    def device(self) -> torch.device:
        return next(self.state.model.parameters()).device

    def train(self) -> TrainerExit:
        """Go on until finished or asked to stop. LossNotFinite when the numbers break."""
        self._announce()
        try:
            if self.saved is None:
                self._save()
            return self._go_on()
        except SaveAbandoned:
            return self._leave()
        except OSError as fault:
            return self._disk_refused(fault)
        except (MemoryError, RuntimeError) as fault:
            if not is_out_of_memory(fault):
                raise
            return self._out_of_memory(fault)
        finally:
            self.saver.join()

    def _go_on(self) -> TrainerExit:
        while True:
            self._settle(wait=self.state.validation_due)
            because = None if self.state.validation_due else ending(self.state.step, self.state.scores, self.task, is_pilot=self.is_pilot)
            if because not in (None, PILOT):
                return self._finish(str(because))
            if self.stop.because() is not None:
                return self._leave()
            if because is not None:
                self.records.log(event="pilot", phase="trained", step=self.state.step)
                return TrainerExit.FINISHED
            if self.state.validation_due:
                self._validate()
            elif self._take_step() and self._save_is_due():
                self._save()

    def _take_step(self) -> bool:
        """One optimizer step; False when it was given up on SIGINT. LossNotFinite before anything is changed."""
        task, state, began = self.task, self.state, time.monotonic()
        before = randomness.capture()
        try:
            loss = self._accumulate_gradients()
            grad_norm = float(clip_grad_norm_(trained_weights(state.model).values(), task.optimizer.clip or math.inf))
        except BaseException as fault:
            state.optimizer.zero_grad(set_to_none=True)
            randomness.restore(before)  # what is saved after this is the boundary before the step
            if isinstance(fault, _StepAbandoned):
                return False
            raise
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise self._broke(state.step + 1, f"{name} is {value}")
        rate = learning_rate(state.step, task.optimizer, task.steps)
        for group in state.optimizer.param_groups:
            group["lr"] = rate
        self.update_is_torn = True
        state.optimizer.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.step, state.cursor = state.step + 1, state.cursor + task.batch
        state.losses.append(loss)
        state.validation_due = self._validation_falls_on(state.step)
        self.update_is_torn = False
        seconds = time.monotonic() - began
        self.stop.note_step(seconds)
        if state.step % task.log_every == 0 or state.step in (1, task.steps):
            tokens = task.batch * task.window
            self.records.log(step=state.step, loss=loss, lr=rate, grad_norm=grad_norm, tokens=tokens, seconds=round(seconds, 6))
        return True

    def _accumulate_gradients(self) -> float:
        """Mean nats per token over the whole batch, gradients added up. _StepAbandoned when a SIGINT came between micro-batches."""
        task, state = self.task, self.state
        windows_BT = self.batches.take(state.cursor, task.batch)
        parts = task.batch // task.micro_batch
        total = torch.zeros((), dtype=torch.float64, device=self.device)  # added up where it lies: reading it each time would make a GPU wait
        for micro_BT in torch.split(windows_BT, task.micro_batch):
            if self.stop.gives_up_save:
                raise _StepAbandoned
            micro_BT = micro_BT.to(self.device, non_blocking=True)
            with sdpa_kernel(attention_kernels(self.device)):
                loss = mean_nll(state.model, micro_BT[:, :-1], micro_BT[:, 1:], precision=task.precision, parts=parts)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return float(total)

    def _check_weights(self) -> None:
        """A finite gradient can still carry a weight out of range; such a state is never saved, so never resumed and never best."""
        for name, weight in trained_weights(self.state.model).items():
            if not bool(torch.isfinite(weight).all()):
                raise self._broke(self.state.step, f"{name} holds numbers that are nan or inf")

    def _broke(self, step: int, what: str) -> LossNotFinite:
        """The numbers broke at `step`: told in the log, and as the error to raise. `what` ends with the value."""
        try:
            self._settle(wait=True)
        except (OSError, SaveAbandoned):
            pass  # the older checkpoint is then the last good one
        self.records.log(event="failed", step=step, because=what, value=what.rpartition(" ")[2])
        return LossNotFinite("the numbers broke", where=f"{self.run_dir.name} step {step}", what=what,
                             fix=f"try a smaller learning rate; step {self.saved.step if self.saved else 0} is the last good checkpoint")

    def _validation_falls_on(self, step: int) -> bool:
        every = self.task.validation.every_steps
        return self.validation is not None and (step in (0, self.task.steps, self.task.pilot_steps) or (every is not None and step % every == 0))

    def _save_is_due(self) -> bool:
        terms, step = self.task.checkpoint, self.state.step
        by_time = terms.every_seconds is not None and not self.saver.is_under_way and time.monotonic() - self.saved_at_seconds >= terms.every_seconds
        by_step = (terms.every_steps is not None and step % terms.every_steps == 0) or step == self.task.proof_from_step
        return self.state.validation_due or by_step or by_time or step == self.task.steps

    def _save(self) -> None:
        """Copy this step and let it be saved. Waits for the save before, and raises what became of that."""
        self._settle(wait=True)
        step, began = self.state.step, time.monotonic()
        self._check_weights()
        self.records.log(event="save", phase="begin", step=step)
        best = self._best()
        protected = frozenset({step} | ({best["step"]} if best else set()))
        self.saver.begin(step, self.state.contents(), protected=protected, began_seconds=began)
        self.saved_at_seconds = time.monotonic()

    def _settle(self, *, wait: bool) -> None:
        """Take in the save that is under way, if it is done or `wait`. OSError and SaveAbandoned leave the older checkpoints as they are."""
        if wait and self.saver.is_writing:  # said, because a disk that is slower than the steps is no stall of the training
            self.records.log(event="save", phase="wait", step=self.state.step)
        done = self.saver.settle(wait=wait)
        if done is None:
            return
        self.saved = saved = done.checkpoint
        self.stop.note_save(done.seconds)
        self.records.log(
            event="save", phase="end", step=saved.step, digest=saved.digest, bytes=saved.bytes, seconds=round(done.seconds, 6),
            blocked_seconds=round(done.blocked_seconds, 6), verify_seconds=None if done.verify_seconds is None else round(done.verify_seconds, 6),
        )
        self.records.lineage("save", step=saved.step, digest=saved.digest)
        self.records.hint("latest", step=saved.step, digest=saved.digest, value=None)
        for gone in done.pruned:
            self.records.lineage("prune", step=gone, because=f"older than the newest {self.task.checkpoint.keep}, not the best")
        if done.prune_fault is not None:
            self.records.log(event="note", text=f"an older checkpoint could not be deleted: {done.prune_fault}")

    def _validate(self) -> None:
        """Score the validation documents for the checkpoint of this step, which is saved. A stop leaves it due."""
        assert self.validation is not None and self.saved is not None and self.saved.step == self.state.step
        step, began, name = self.state.step, time.monotonic(), step_name(self.state.step)
        described: dict[str, Any] = {
            "split": "validation", "step": step, "dataset_digest": self.validation.digest, "checkpoint_digest": self.saved.digest,
            "numeric_mode": f"{self.task.precision} {self.device.type}",
        }
        self.records.log(event="validation", phase="begin", step=step)
        meta = complete_predictions(self.run_dir / PREDICTIONS, name, **described)
        kept = meta is not None
        if meta is None:
            try:
                rows = score_documents(self.state.model, self.scored, window=self.task.window, batch=self.task.validation.batch,
                                       precision=self.task.precision, on_batch=self._between_batches(step))
            except ScoringStopped:
                return
            except LossNotFinite as broke:
                raise self._broke(step, broke.what) from broke
            meta = write_predictions(self.run_dir / PREDICTIONS, name, rows, **described)
        self._enter_score(meta, None if kept else round(time.monotonic() - began, 6))

    def _between_batches(self, step: int) -> Any:
        told_at = time.monotonic()

        def on_batch(done: int) -> None:
            nonlocal told_at
            if self.stop.because() is not None:
                raise ScoringStopped
            if time.monotonic() - told_at >= PROGRESS_SECONDS:
                told_at = time.monotonic()
                self.records.log(event="validation", phase="progress", step=step, batches=done)

        return on_batch

    def _enter_score(self, meta: dict[str, Any], seconds: float | None) -> None:
        """Take a finished validation into the state. `seconds` is None when it was found complete and took no time."""
        assert self.saved is not None
        claim, step = meta["claim"], self.state.step
        before = self._best()
        self.state.scores.append({"step": step, "value": claim["value"], "families": claim["families"], "checkpoint_digest": self.saved.digest})
        self.state.validation_due = False
        best = self._best()
        assert best is not None
        is_best = before is None or best["step"] != before["step"]
        if is_best:
            self.records.hint("best", step=step, digest=self.saved.digest, value=claim["value"])
        self.records.log(
            event="validation", phase="end", step=step, value=claim["value"], families=claim["families"], rows=meta["rows"],
            seconds=seconds, sha256=meta["sha256"], checkpoint_digest=self.saved.digest, best=is_best,
        )

    def _best(self) -> dict[str, Any] | None:
        return incumbent(self.state.scores, self.task.validation.minimum_improvement)

    def _finish(self, because: str) -> TrainerExit:
        self._settle(wait=True)
        self.records.log(event="finish", step=self.state.step, because=because)
        self.records.lineage("finish", step=self.state.step, because=because)
        return TrainerExit.FINISHED

    def _leave(self) -> TrainerExit:
        """Asked to stop: what is done is saved (unless the save is given up), what is not is named."""
        because, step = self.stop.because() or "asked", self.state.step
        self.saver.is_hurried = True
        try:
            self._settle(wait=True)
            if not self._is_current() and not self.stop.gives_up_save:
                self._save()
                self._settle(wait=True)
        except SaveAbandoned:
            pass  # a SIGINT came into this save
        skipped = (["validation"] if self.state.validation_due else []) + ([] if self._is_current() else ["save"])
        self.records.log(event="stop", step=step, because=because, skipped=skipped)
        self.records.lineage("stop", step=step, because=because, skipped=skipped)
        return TrainerExit.STOPPED if self._is_current() else TrainerExit.RETRY

    def _is_current(self) -> bool:
        return self.saved is not None and self.saved.step == self.state.step

    def _disk_refused(self, fault: OSError) -> TrainerExit:
        """A save or a validation could not be written: older checkpoints are as they were, another try may find room."""
        self.records.log(event="failed", step=self.state.step, because=f"could not be written: {fault}", value=None)
        last = f"{step_name(self.saved.step)} is kept" if self.saved else "nothing is saved yet"
        failed = max(self.saver.step, self.saved.step if self.saved else 0)
        print(f"error: step {failed} could not be saved\n  where: {self.checkpoints}\n  what:  {fault}\n  fix:   free some space; {last}",
              file=sys.stderr, flush=True)
        return TrainerExit.RETRY

    def _out_of_memory(self, fault: BaseException) -> TrainerExit:
        """Save the last whole step, and say what was planned against what was reached."""
        fault.__traceback__ = None  # its frames hold the activations
        planned, peak = planned_bytes(self.state.model, self.task), peak_bytes(self.device)
        text = f"out of memory: planned {planned} bytes, peak {peak} bytes, cap {self.memory_cap_bytes} bytes"
        try:
            self._settle(wait=True)
            if not self.update_is_torn and not self._is_current():
                self._save()
                self._settle(wait=True)
        except OSError as full:
            return self._disk_refused(full)
        self.records.log(event="failed", step=self.state.step, because=text, value=None)
        print(f"{text}\n  the last whole step is {self.saved.step if self.saved else 'none'}: {str(fault).splitlines()[:1]}", flush=True)
        return TrainerExit.MEMORY if self.saved is not None else TrainerExit.CONFIG

    def _announce(self) -> None:
        resumed = self.resumed.digest if self.resumed is not None else None
        self.records.log(
            event="start", step=self.state.step, steps=self.task.steps, resumed_from=resumed, pid=os.getpid(),
            accelerator_limit_bytes=self.memory_cap_bytes if self.device.type == "cuda" else None,
            planned_bytes=planned_bytes(self.state.model, self.task), snapshot_bytes=self.state.snapshot_bytes(),
        )
        code, before = code_digest(), self.records.last_code()
        if before not in (None, code):
            self.records.log(event="note", text=f"exactness is not claimed from step {self.state.step} on: the code was {before}, it is {code} now")
        if resumed is None:
            self.records.lineage("start", step=self.state.step, code=code)
        else:
            self.records.lineage("resume", step=self.state.step, digest=resumed, code=code)
