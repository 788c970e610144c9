"""The parent of one virtual trainer. Mirrors fleetd/host/shim.py and birth.py.

It falls into the same moments that a kill may separate: claim, fork with the child at its gate, record, gate, exec, exit, record, reap.
"""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from typing import Any

from fleetd.clock import Moment
from fleetd.host.guard import TICK_SECONDS, Due
from fleetd.host.rundir import AttemptRecord, ProgramRecord
from fleetd.model import CapPart, ExitRecord
from policies.facts import CapGrade, Reason, SignalTarget, Want, format_moment
from tests.sim import eyes
from tests.sim.guard import VirtualDeadlineGuard, VirtualSupervisorGuard
from tests.sim.machine import Process
from tests.sim.rundir import VirtualRun
from tests.sim.virtual_trainer import SHIFT, Trainer

START_SECONDS = (0.05, 0.5)
GATE_SECONDS = (0.005, 0.05)
NOTICE_SECONDS = (0.002, 0.05)
QUIET_TICK_SECONDS = 6.0
"""A real shim turns each half second; nothing changes for it while a supervisor beats, so a virtual one turns less often then."""
PAUSE_SECONDS_MIN = 0.001
EXIT_REFUSED, EXIT_NOT_STARTED = 3, 127


class VirtualShim:
    def __init__(self, run: VirtualRun, number: int, process: Process) -> None:
        self.run, self.number, self.process, self.world = run, number, process, run.machine.world
        self.attempt = run.attempts[number]
        self.record: AttemptRecord | None = None
        self.is_recorded = False
        self.child: Process | None = None
        self.evidence: dict[str, Any] = {}
        self.ending: ExitRecord | None = None
        self.is_ended = False
        self._next: Any = None
        process.on_end.append(self._gate_closes)

    def claim(self) -> None:
        run = self.run
        if not self.process.is_alive:
            return
        why = self._refusal()
        if why is not None:
            self.world.say(run.machine.name, f"{self.process!r} refuses: {why}")
            self.process.leave(EXIT_REFUSED << SHIFT)
            return
        run.trainer_lock.append(self.process)
        if run.machine.is_disk_full:
            self.process.leave(1 << SHIFT)  # the claim can't be written: the program ends with a traceback
            return
        self.attempt.is_started = True
        if self._dies_at("claimed"):
            return
        self.guard, self.deadline = VirtualSupervisorGuard(run, self.number), VirtualDeadlineGuard(run)
        self.world.after(self.world.between(*GATE_SECONDS), self._fork)

    def _refusal(self) -> str | None:
        run = self.run
        if run.is_trainer_locked():
            return "another shim or trainer holds trainer.lock"
        if run.newest_attempt != self.number:
            return f"attempt {self.number} is not the newest, {run.newest_attempt} is"
        if self.attempt.is_started or self.attempt.exit is not None:
            return f"attempt {self.number} was started before"
        return None if run.want.want is Want.RUN else "the order in force is not to run"

    def _fork(self) -> None:
        """Shim._start up to the record: the child waits at its gate and is not yet a trainer."""
        run, machine = self.run, self.run.machine
        if not self.process.is_alive:
            return
        resume, refused = run.choose_resume()
        if self.deadline.due(machine.boottime_seconds(), self.guard.fresh_beat, is_supervised=True) is Due.KILL:
            self._never_ran(Reason.DEADLINE, "the cutoff passed before the start")
            return
        token = f"{run.run_id}/{self.number}"
        child = machine.spawn("trainer", self.process.argv, parent=self.process, run_id=run.run_id, token=token)
        self.child = self.attempt.leader = child
        run.trainer_lock.append(child)
        child.on_end += [self.wake, run.wake_supervisor]
        if self._dies_at("forked"):
            return
        cap = CapPart(grade=CapGrade.ENFORCED if machine.has_cgroup else CapGrade.ABSENT, means="virtual")
        record = AttemptRecord(
            attempt=self.number, identity=child.identity(), argv=run.spec.argv, resume="" if resume is None else str(resume.step),
            resume_step=resume.step if resume else None, resume_digest=resume.digest if resume else None, refused=refused, token=token,
            cgroup=None, cap=cap, session=child.pid, at=self._moment().now,
        )
        try:
            if run.spec.caps.demand is CapGrade.ENFORCED and cap.grade is not CapGrade.ENFORCED:
                self._send_away(Reason.PREFLIGHT, "the plan demands an enforced cap, here it is absent")
                return
            machine.check_disk()
            run.shim_record = ProgramRecord(identity=self.process.identity(), at=self._moment().now)
            run.write_attempt(record)
        except OSError as fault:
            self._send_away(Reason.LAUNCH_TIMEOUT, f"the host could not start it: {fault}")
            return
        self.record = record
        if self._dies_at("recorded"):
            return
        self.world.after(self.world.between(*GATE_SECONDS), self._open_gate)

    def _send_away(self, reason: Reason, text: str) -> None:
        self.evidence |= {"reason": reason, "start": text}
        assert self.child is not None
        self.child.leave(EXIT_NOT_STARTED << SHIFT)
        self._turn()

    def _never_ran(self, reason: Reason, text: str) -> None:
        self.evidence |= {"reason": reason, "start": text}
        self.ending = self._ending(None)
        self._turn()

    def _dies_at(self, boundary: str) -> bool:
        """A kill, or a power cut, that comes exactly between two acts."""
        if self.run.shim_dies_at != boundary:
            return False
        self.run.shim_dies_at = ""
        self.world.fault()
        self.world.say(self.run.machine.name, f"{self.process!r} is killed at '{boundary}'")
        self.process.leave(int(signal.SIGKILL))
        return True

    def _gate_closes(self) -> None:
        """A child that waits at its gate leaves when its shim ends: no trainer ever runs unrecorded."""
        if self.child is not None and self.child.on_signal is None and self.child.is_alive and not self.is_executed:
            self.child.leave(EXIT_NOT_STARTED << SHIFT)

    is_executed = False

    def _open_gate(self) -> None:
        if not self.process.is_alive or self.child is None or not self.child.is_alive or self.record is None:
            return
        self.is_executed = True
        fate = self.run.machine.nature.fate(self.run)
        if fate.kind == "no_exec":
            self.evidence |= {"reason": Reason.CONFIG, "start": f"{self.run.spec.argv[0]}: no such file"}
            self.child.leave(EXIT_NOT_STARTED << SHIFT)
        else:
            self.child.argv = self.run.spec.argv
            self.run.machine.laws.born(self.run, self.child, self.record)
            self.run.trainer = Trainer(self.run, self.attempt, self.child, self.run.machine.nature.habits(self.run), fate, self.record.resume_step)
            self.record = replace(self.record, is_executed=True, identity=self.child.identity())
        if not self._dies_at("opened"):
            self._turn()

    # The loop.

    def wake(self) -> None:
        if self.process.is_alive:
            self._appoint(self.world.between(*NOTICE_SECONDS))

    def _appoint(self, seconds: float) -> None:
        if self._next is not None:
            self._next.call_off()
        self._next = self.world.after(seconds, self._turn)

    def _turn(self) -> None:
        if not self.process.is_alive:
            return
        if self.process.hung_until > self.world.seconds:
            self._appoint(self.process.hung_until - self.world.seconds)
            return
        seconds = self.run.machine.boottime_seconds()
        self._watch_argv()
        if self.ending is None and self.child is not None and not self.child.is_alive:
            self.ending = self._ending(self.child.status)
        self._keep_deadline(seconds)
        self._write_exit()
        if not self.process.is_alive:
            return
        is_empty = self.is_ended and not self.run.living_tree(self._token())
        self.guard.tick(seconds)
        if is_empty and self.guard.is_needless:
            self.process.leave(0)
            return
        self._appoint(self._pause_seconds(seconds))
        return

    def _pause_seconds(self, seconds: float) -> float:
        """The real one ticks all the time; what has nothing to do here but to wait for the cutoff is woken by it."""
        cutoff_seconds = self.deadline.cutoff_seconds(self.guard.fresh_beat)
        ahead_seconds = math.inf if cutoff_seconds is None else cutoff_seconds - seconds
        is_overdue = ahead_seconds <= 0.0 and "killed_at" not in self.evidence  # a beat that was read after the look can bring it forward
        is_busy = self.ending is not None or not self.guard.is_quiet or not self.is_recorded or is_overdue
        pause_seconds = TICK_SECONDS if is_busy else QUIET_TICK_SECONDS
        return max(PAUSE_SECONDS_MIN, min(pause_seconds, ahead_seconds)) if ahead_seconds > 0.0 else pause_seconds

    def _watch_argv(self) -> None:
        if self.record is not None and self.record.is_executed and not self.is_recorded and self.ending is None:
            try:
                self.run.write_attempt(self.record)
                self.is_recorded = True
            except OSError:
                pass  # again at the next turn

    def _keep_deadline(self, seconds: float) -> None:
        if self.record is None or (self.is_ended and not self.run.living_tree(self._token())):
            return
        due = self.deadline.due(seconds, self.guard.fresh_beat, is_supervised=self.guard.is_alive)
        moment = self._moment()
        if due is Due.KILL:
            if "killed_at" not in self.evidence and self.ending is None:
                self.evidence |= {"killed_at": format_moment(moment.now), "reason": Reason.DEADLINE}
                self.world.say(self.run.machine.name, f"the shim of {self.run.spec.candidate} kills the tree: the cutoff is reached")
            self.run.machine.laws.shim_acts(self.run, due)
            self._note(eyes.kill_tree(self.run, self.record, sender="shim"))
        elif due is Due.ASK and "asked_at" not in self.evidence and self.ending is None:
            self.evidence["asked_at"] = format_moment(moment.now)
            self.world.say(self.run.machine.name, f"the shim of {self.run.spec.candidate} asks: the last safe moment, and no supervisor")
            self.run.machine.laws.shim_acts(self.run, due)
            if self.run.spec.signal is SignalTarget.GROUP:
                targets = eyes.members(self.run, self.record)
                self._note(eyes.signal_group(self.run, targets, signal.SIGTERM, signal.SIGCONT, sender="shim"))
            else:
                self._note(eyes.signal_one(self.run, self.record.identity, signal.SIGTERM, signal.SIGCONT, sender="shim"))

    def _note(self, reports: tuple[Any, ...]) -> None:
        noted = self.evidence.setdefault("signals", [])
        noted += [{"pid": each.pid, "signal": each.signal, "delivered": each.delivered, "verdict": each.verdict} for each in reports][:200]

    def _write_exit(self) -> None:
        if self.ending is None or self.is_ended or self._dies_at("ended"):
            return
        try:
            self.run.write_exit(self.ending)
        except OSError:
            return
        self.is_ended = True
        if self._dies_at("told"):
            return
        if self.child is not None and not self.child.is_alive:
            self.run.machine.reap(self.child)

    def _moment(self) -> Moment:
        return self.deadline.moment(self.run.machine.boottime_seconds(), self.guard.fresh_beat)

    def _token(self) -> str:
        return f"{self.run.run_id}/{self.number}"

    def _ending(self, status: int | None) -> ExitRecord:
        code = os.waitstatus_to_exitcode(status) if status is not None else None
        evidence = {**self.evidence, "oom_kills": self.attempt.oom_kills}
        return ExitRecord(
            attempt=self.number, at=self._moment().now, wait_status=status, observed_by="shim", evidence=evidence,
            exit_code=code if code is not None and code >= 0 else None, signal=-code if code is not None and code < 0 else None,
        )


def start_shim(run: VirtualRun, number: int, supervisor: Process) -> Process:
    machine = run.machine
    argv = ("python", "-m", "fleetd.host.shim", run.run_id, str(number))
    process = machine.spawn("shim", argv, parent=supervisor, run_id=run.run_id)
    process.on_end.append(run.wake_supervisor)
    shim = VirtualShim(run, number, process)
    machine.world.after(machine.world.between(*START_SECONDS), shim.claim)
    return process
