"""A virtual trainer: it loads, steps, saves, validates, obeys or does not. Stands in for trainer/ and for a user's own command.

Its life is a generator that yields how long the next stretch takes. What it does to a log and to checkpoints follows trainer/loop.py:
first saved, then validated; a stop saves and exits 10; a full disk at a save is exit 20, a log that can't grow is nothing.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from policies.facts import RunKind
from tests.sim.machine import Process
from tests.sim.rundir import CHECKPOINT_BYTES, Attempt, VirtualRun, digest_of, rows_of

SHIFT = 8
PROGRESS_SECONDS = 4.0
KEEP = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a candidate trains, the same in every attempt."""

    steps: int = 40
    step_seconds: float = 3.0
    save_every: int = 5
    save_seconds: float = 1.0
    validate_every: int = 10
    validation_seconds: float = 4.0
    launch_seconds: float = 5.0
    quality: float = 1.0
    worker_count: int = 0
    base_bytes: int = 1 << 30
    command_seconds: float = 60.0
    command_hears: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What befalls one attempt, from `at_step` on.

    good · bad_pilot: its pilot does not pass · exit, signal: it ends with `code` · stall, silent_launch: it lives and says nothing ·
    deaf: it hears no SIGTERM · slow_save · grow: memory by `growth` bytes a second · grow_hard: and it does not die for a while ·
    limit: exit 40 · leak: a worker outlives it · leak_hard: and does not die for a while · no_exec
    """

    kind: str = "good"
    at_step: int = 0
    code: int = 0
    growth: float = 0.0


GOOD = Fate()


class Trainer:
    """The leader of one attempt's tree, from its exec on."""

    def __init__(self, run: VirtualRun, attempt: Attempt, process: Process, habits: Habits, fate: Fate, resume_step: int | None) -> None:
        self.run, self.attempt, self.process, self.habits, self.fate = run, attempt, process, habits, fate
        self.world = run.machine.world
        self.resume_step = resume_step
        self.step = resume_step if resume_step is not None else 0
        self.is_asked = False
        self.spoke_at = self.world.seconds
        """When it last had something to say, whether or not a disk took it."""
        process.on_signal = self._hear
        process.base_bytes = habits.base_bytes
        self.workers = [
            run.machine.spawn("worker", (*run.spec.argv, "worker"), parent=process, run_id=run.run_id, token=process.token)
            for _ in range(habits.worker_count + (1 if fate.kind in ("leak", "leak_hard") else 0))
        ]
        if fate.kind == "leak_hard":
            self.workers[0].unkillable_until = self.world.seconds + self.world.between(40.0, 120.0)
        process.on_end.append(self._workers_notice)
        kinds = {RunKind.EVALUATE: self._evaluate, RunKind.TRAIN: self._train}
        self._life = kinds[run.spec.kind]() if run.spec.contract else self._command()
        self._go_on()

    def _go_on(self) -> None:
        if not self.process.is_alive:
            return
        if self.process.hung_until > self.world.seconds:
            self.world.after(self.process.hung_until - self.world.seconds, self._go_on)
            return
        try:
            seconds = next(self._life)
        except StopIteration:
            return
        if self.process.is_alive and seconds != math.inf:
            self.world.after(seconds, self._go_on)

    def _hear(self, number: int) -> None:
        if number != signal.SIGTERM or self.fate.kind == "deaf" or self._is_stalled():
            return
        self.is_asked = True
        if not self.run.spec.contract and self.habits.command_hears:
            self.world.after(self.world.between(0.05, 2.0), self.process.leave, int(signal.SIGTERM))

    def _is_stalled(self) -> bool:
        return self.fate.kind in ("stall", "silent_launch") and self.step >= self.fate.at_step

    def _workers_notice(self) -> None:
        """Workers end a moment after their leader; one that leaks does not."""
        for index, worker in enumerate(self.workers):
            if self.fate.kind not in ("leak", "leak_hard") or index > 0:
                self.world.after(self.world.between(0.05, 1.5), worker.leave, 0)

    def _log(self, **record: Any) -> None:
        if not self.process.is_alive:
            return
        self.spoke_at = self.world.seconds
        if not self.run.machine.is_disk_full:
            self.run.log.append(record)

    def _exit(self, code: int) -> None:
        self.process.leave(code << SHIFT)

    # Our trainer.

    def _train(self) -> Iterator[float]:
        run, habits = self.run, self.habits
        yield math.inf if self.fate.kind == "silent_launch" else habits.launch_seconds
        if self.fate.kind in ("exit", "leak_hard") and self.fate.at_step == 0:
            return self._exit(self.fate.code)
        self._log(event="start", step=self.step, steps=habits.steps)
        if run.has_passed_pilot:  # told once more at each start: what was written of it before may be lost
            self._log(event="pilot", phase="end", step=run.task["pilot"]["steps"], passed=True, because="it reloads exactly")
        if self.step not in run.checkpoints and not (yield from self._save()):
            return None
        while True:
            if self._validation_is_due():
                yield from self._validate()
            elif self.step >= habits.steps:
                self._log(event="finish", step=self.step, because="steps")
                return self._exit(0)
            if self.is_asked:
                return (yield from self._leave("SIGTERM"))
            if self._validation_is_due() or self.step >= habits.steps:
                continue
            if self._pilot_is_due() and not (yield from self._pilot()):
                return None
            if (yield from self._befalls()):
                return None
            yield habits.step_seconds
            self.step += 1
            self._log(step=self.step, loss=self._value(), seconds=habits.step_seconds)
            is_due = self.step % habits.save_every == 0 or self._validation_is_due() or self.step == habits.steps
            if is_due and not (yield from self._save()):
                return None

    def _befalls(self) -> Iterator[float]:
        """The attempt's fate, once its step has come. True when the trainer is gone."""
        fate = self.fate
        if fate.kind == "good" or self.step < fate.at_step:
            return False
        if fate.kind in ("exit", "leak_hard"):
            if fate.code in (31, 32):
                self._log(event="failed", step=self.step, because="the numbers broke", value="nan")
            self._exit(fate.code)
            return True
        if fate.kind == "signal":
            self.process.leave(fate.code)
            return True
        if fate.kind == "stall":
            yield math.inf
        if fate.kind in ("grow", "grow_hard") and not self.process.growth:
            self._grow()
        if fate.kind == "limit":
            yield from self._save()
            self._exit(40)
            return True
        return False

    def _grow(self) -> None:
        process, run = self.process, self.run
        process.growth, process.grows_at, process.bytes_max = self.fate.growth, self.world.seconds, 12 << 30
        if self.fate.kind == "grow_hard":
            process.unkillable_until = self.world.seconds + self.world.between(40.0, 150.0)
        elif run.machine.has_cgroup and run.machine.world.chance(0.5):
            seconds = (run.spec.caps.host_bytes - process.base_bytes) / process.growth
            self.world.after(max(0.0, seconds), self._kernel_kills)

    def _kernel_kills(self) -> None:
        if self.process.is_alive and self.process.bytes() >= self.run.spec.caps.host_bytes - (1 << 20):
            self.attempt.oom_kills += 1
            self.world.say(self.run.machine.name, f"the kernel kills {self.process!r}: its cgroup is full")
            self.process.leave(int(signal.SIGKILL))

    def _save(self) -> Iterator[float]:
        """True once the step is on disk; False when the disk refused and the trainer has left with 20."""
        run, best = self.run, min(self.run.predictions, key=lambda step: self.run.predictions[step][1], default=0)
        self._log(event="save", phase="begin", step=self.step)
        seconds = self.habits.save_seconds * (8.0 if self.fate.kind == "slow_save" else 1.0)
        yield seconds
        try:
            saved = run.put_checkpoint(self.step, run.machine.moment().now, KEEP, {self.step, best})
        except OSError:
            self._log(event="failed", step=self.step, because="could not be written", value=None)
            self._exit(20)
            return False
        self._log(event="save", phase="end", step=self.step, digest=saved.digest, bytes=CHECKPOINT_BYTES, seconds=seconds)
        return True

    def _pilot_is_due(self) -> bool:
        """As trainer/pilot.py reads it from the directory: what can't be checked at its own step any more is not made up for."""
        terms = (self.run.task or {}).get("pilot")
        return terms is not None and self.step == terms["steps"] and not self.run.has_passed_pilot

    def _pilot(self) -> Iterator[float]:
        """Saved, scored, then checked by a fresh process, which has the same pid. Whether the run goes on."""
        if self.step not in self.run.checkpoints and not (yield from self._save()):
            return False
        self._log(event="pilot", phase="trained", step=self.step)
        yield self.habits.launch_seconds
        if self.is_asked:
            yield from self._leave("SIGTERM")
            return False
        self._log(event="pilot", phase="begin", step=self.step)
        yield self.habits.validation_seconds
        if self.run.machine.is_disk_full:
            self._exit(20)
            return False
        has_passed = self.run.has_passed_pilot = self.fate.kind != "bad_pilot"
        yield 0.01
        self._log(event="pilot", phase="end", step=self.step, passed=has_passed, because="it reloads exactly" if has_passed else "it does not")
        if not has_passed:
            self._exit(32)
        return has_passed

    def _validation_is_due(self) -> bool:
        falls_on = self.step % self.habits.validate_every == 0 or self.step == self.habits.steps
        return falls_on and self.step not in self.run.predictions

    def _validate(self) -> Iterator[float]:
        """A stop leaves it due, a full disk too."""
        run, seconds = self.run, self.habits.validation_seconds
        self._log(event="validation", phase="begin", step=self.step)
        left = seconds
        while left > 0:
            yield min(left, PROGRESS_SECONDS)
            left -= PROGRESS_SECONDS
            if self.is_asked:
                return
            self._log(event="validation", phase="progress", step=self.step)
        if run.machine.is_disk_full:
            return self._exit(20)
        run.predictions[self.step] = (rows_of(run.run_id, self.step), self._value(), digest_of(run.run_id, self.step))
        self._log(
            event="validation", phase="end", step=self.step, value=self._value(), rows=100, seconds=seconds, sha256=rows_of(run.run_id, self.step),
            best=min(run.predictions.values(), key=lambda each: each[1])[1] == self._value(),
        )

    def _leave(self, because: str) -> Iterator[float]:
        if self.step not in self.run.checkpoints and not (yield from self._save()):
            return
        self._log(event="stop", step=self.step, because=because)
        self._exit(10)

    def _value(self) -> float:
        """The loss falls with the steps, a little differently for each candidate; some candidates never improve."""
        return round(9.0 - self.habits.quality * (1.0 - math.exp(-self.step / 20.0)), 6)

    # Others.

    def _evaluate(self) -> Iterator[float]:
        yield self.habits.launch_seconds
        split = self.run.task["split"] if self.run.task else "test"
        for _ in range(3):
            self._log(event="validation", phase="progress", step=0)
            if self.fate.kind == "exit" and self.fate.at_step <= 5:
                return self._exit(self.fate.code)
            yield self.habits.validation_seconds
            if self.is_asked:
                return self._exit(10)
        if self.run.machine.is_disk_full:
            return self._exit(20)
        self.run.scored[split] = rows_of(self.run.run_id, 0)
        self._log(event="finish", step=0, because="steps")
        self._exit(0)

    def _command(self) -> Iterator[float]:
        """A user's own program: it says nothing, and may end in any way."""
        yield self.habits.command_seconds if self.fate.kind != "stall" else math.inf
        if self.fate.kind == "signal":
            return self.process.leave(self.fate.code)
        self._exit(self.fate.code if self.fate.kind == "exit" else 0)
