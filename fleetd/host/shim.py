"""The tiny parent of one trainer: `<release>/fleetd/host shim RUN_DIR ATTEMPT`.

The supervisor makes attempts/NNNN (`rundir.create_attempt`) and starts this program as its direct child, in its own session,
with `launch.program_argv(release, "shim", run_dir, attempt)` and `launch.program_environment(...)`. The shim takes trainer.lock, refuses
(exit 3) unless its attempt is the newest, unstarted and wanted, chooses what to resume from (`rundir.choose_resume`), writes
attempt.json, lets the trainer exec, waits, writes exit.json, and leaves when the tree is empty.

Evidence in exit.json, each key only where there is something to say:
    reason         a word of policies.facts.Reason, where the shim knows it: config (exec failed), preflight, deadline, launch_timeout
    start          why the trainer never ran, in words
    cap            what the kernel's part of the cap was;  oom_kills, peak_bytes from its counters
    asked_at       when the shim asked (SIGTERM) for want of a supervisor;  killed_at  when it killed the tree at the cutoff
    signals        every signal the shim sent or was refused: pid, signal, delivered, verdict
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleetd import clock, faults, logs
from fleetd.clock import Moment
from fleetd.host import cgroups, cradle, rundir, tidy, tree
from fleetd.host.audit import Audit
from fleetd.host.birth import conceive, read_report, trainer_environment
from fleetd.host.claim import ROOM_WAIT_SECONDS, claim, is_no_room, is_wanted
from fleetd.host.guard import TICK_SECONDS, DeadlineGuard, Due, SupervisorGuard
from fleetd.host.kills import KillCounter, wait_for_kills
from fleetd.host.presence import Presence
from fleetd.host.processes import identity_of, look, set_child_subreaper, sight_of
from fleetd.host.rundir import AttemptRecord
from fleetd.kept_clock import counted
from fleetd.model import CapPart, ExitRecord, RunSpec
from fleetd.paths import HostPaths, RunPaths
from policies.facts import ENV_TREE_TOKEN, CapGrade, ProcessIdentity, Reason, SignalTarget, format_moment

EXIT_REFUSED = 3
EXIT_USAGE = 2
CORE_DUMPED = 0x80
"""Of a raw wait status (wait(2)): the signal that ended the process left a core."""
SIGNALS_RECORDED_MAX = 200
FAILURE_WAIT_SECONDS = 0.1
ORPHANS_REAPED_PER_TICK_MAX = 1000


class StartRefused(Exception):
    """The attempt was claimed but no trainer may be started; exit.json says why."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(text)
        self.reason, self.text = reason, text


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not arguments[1].isdigit():
        sys.stderr.write("usage: fleetd/host/__main__.py shim RUN_DIR ATTEMPT\n")
        return EXIT_USAGE
    paths, attempt = RunPaths(Path(arguments[0]).resolve()), int(arguments[1])
    if not paths.attempt(attempt).root.is_dir():
        return _refuse(f"{paths.attempt(attempt).root} does not exist")
    _stand_alone()
    logs.to_file(paths.attempt(attempt).shim_log)
    claimed = claim(paths, attempt)
    if isinstance(claimed, str):
        return _refuse(claimed)
    Shim(paths, rundir.read_spec(paths), attempt, claimed).live()
    return 0


def _refuse(why: str) -> int:
    logs.failed("shim_refused", because=why)
    sys.stderr.write(f"shim refused: {why}\n")
    return EXIT_REFUSED


def _stand_alone() -> None:
    """Own session, nothing on stdin, deaf to whatever is sent to a whole session or service: only SIGKILL ends a shim early."""
    try:
        os.setsid()
    except PermissionError:
        pass  # the supervisor gave us one already
    os.environ.pop(ENV_TREE_TOKEN, None)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _hear_nothing)  # a handler, not SIG_IGN: that would be inherited through every exec


def _hear_nothing(number: int, _frame: object) -> None:
    logs.changed("signal_heard", signal=number, because="the shim stays as long as its trainer")


class Shim:
    """One attempt, from the fork to the empty tree. Every duty is done each tick, and the failure of one never stops the others."""

    def __init__(self, paths: RunPaths, spec: RunSpec, attempt: int, lock: int) -> None:
        self.paths, self.spec, self.attempt, self.lock = paths, spec, attempt, lock
        self.token = secrets.token_hex(16)
        self.group, self.cap = cgroups.Group(), CapPart(grade=CapGrade.ABSENT, means="not made yet")
        self.kills = KillCounter(self.group)
        self.audit = Audit(paths.audit, "shim")
        self.guard = SupervisorGuard(paths, attempt, self.audit)
        self.deadline = DeadlineGuard(paths, spec, counted(HostPaths(paths.root.parent.parent).clock, clock.read()))
        self.record: AttemptRecord | None = None
        self.is_recorded = False
        self.pid: int | None = None
        self.pidfd = self.report = -1
        self.evidence: dict[str, Any] = {}
        self.ending: ExitRecord | None = None
        self.is_ended = self.is_empty = False
        self.presence = Presence(paths.root, clock.boottime_seconds())

    def live(self) -> None:
        set_child_subreaper()
        try:
            while not self._start_if_there_is_room():
                time.sleep(ROOM_WAIT_SECONDS)
                self._do(self._keep_supervisor, self._moment())
        except StartRefused as refusal:
            self._never_ran(refusal.reason, refusal.text)
        except Exception as fault:  # whatever it was, the attempt is claimed and somebody waits for its exit.json
            self._never_ran(Reason.LAUNCH_TIMEOUT, f"the host could not start it: {fault!r}")
        while not self._is_done():
            self._sleep()
            moment = self._moment()
            self.presence.look(moment.boottime_seconds)
            for duty in (self._watch_exec, self._watch_argv, self._watch_exit, self._keep_deadline, self._write_exit, self._reap):
                self._do(duty, moment)
            self._do(self._keep_supervisor, moment)
        faults.after("tree empty")
        cgroups.remove(self.group)
        logs.changed("shim_leaves", attempt=self.attempt, because="the tree is empty")

    # The start.

    def _start_if_there_is_room(self) -> bool:
        """False when the disk is full: no program has run yet, so this is no failed attempt, and it is tried again as long as it is wanted."""
        try:
            self._start()
        except OSError as fault:
            if not is_no_room(fault) or not is_wanted(self.paths):
                raise
            logs.failed("start_waits", attempt=self.attempt, because=fault)
            self._forget_newborn()
            return False
        return True

    def _forget_newborn(self) -> None:
        if self.pid is not None:
            os.waitpid(self.pid, 0)  # it was sent away from the gate
            os.close(self.pidfd)
        self.pid, self.pidfd, self.record = None, -1, None
        cgroups.remove(self.group)

    def _start(self) -> None:
        rundir.write_program(self.paths.shim, self._moment().now)
        resume, refused = rundir.choose_resume(self.paths)
        if self.deadline.due(clock.boottime_seconds(), self.guard.fresh_beat, is_supervised=True) is Due.KILL:
            raise StartRefused(Reason.DEADLINE, "the cutoff passed before the start")
        caps = self.spec.caps
        born = cradle.bear(tidy.group_name(self.paths, self.attempt), caps.host_bytes, self._conceiver(str(resume.path) if resume else ""))
        newborn, self.group, self.cap = born.newborn, born.group, born.cap
        self.kills = KillCounter(self.group)
        self.pid, self.pidfd = newborn.pid, os.pidfd_open(newborn.pid)
        try:
            self.cap = cradle.proven(self.paths.root.parent.parent, self.cap)
            if caps.demand is CapGrade.ENFORCED and self.cap.grade is not CapGrade.ENFORCED:
                raise StartRefused(Reason.PREFLIGHT, f"the plan demands an enforced cap, here it is {self.cap.grade}: {self.cap.means}")
            self.record = AttemptRecord(
                attempt=self.attempt, identity=identity_of(newborn.pid), argv=self.spec.argv, resume=str(resume.path) if resume else "",
                resume_step=resume.step if resume else None, resume_digest=resume.digest if resume else None, refused=refused,
                token=self.token, cgroup=self.group.encode(), cap=self.cap, session=newborn.pid, at=self._moment().now,
            )
            rundir.write_attempt(self.paths, self.record)
        except BaseException:
            newborn.send_away()
            os.close(newborn.report)
            raise
        self.report = newborn.report
        newborn.open_gate()
        logs.changed("trainer_started", attempt=self.attempt, pid=newborn.pid, cap=self.cap.means, resume=self.record.resume or "nothing")

    def _conceiver(self, resume: str) -> cradle.Conceive:
        environment = trainer_environment(
            self.paths, self.spec, token=self.token, resume=resume, inherited=dict(os.environ),
            cutoff_boottime_seconds=self.deadline.cutoff_seconds(self.guard.fresh_beat),
        )
        folder = Path(self.spec.working_directory) if self.spec.working_directory else self.paths.root
        output = self.paths.attempt(self.attempt).stdout
        return lambda group, scope: conceive(
            self.spec.argv, environment, folder=folder, output=output, group=group, lock=self.lock, holds_signals=self.paths.task.exists(),
            scope=scope,
        )

    def _never_ran(self, reason: Reason, text: str) -> None:
        logs.failed("trainer_not_started", attempt=self.attempt, because=text)
        self.evidence |= {"reason": reason, "start": text}
        if self.pid is None:
            self.ending = self._ending(wait_status=None)

    # The duties of a tick.

    def _sleep(self) -> None:
        """Until the next tick, or until the trainer ends or its exec is decided."""
        watched = [each for each in (self.report, self.pidfd if self.ending is None else -1) if each >= 0]
        cutoff_seconds = self.deadline.cutoff_seconds(self.guard.fresh_beat)
        wait_seconds = TICK_SECONDS
        if cutoff_seconds is not None:
            left_seconds = cutoff_seconds - clock.boottime_seconds()
            wait_seconds = min(wait_seconds, left_seconds) if left_seconds > 0 else wait_seconds
        wait_for_kills(watched, self.kills, wait_seconds)

    def _do(self, duty: Callable[[Moment], None], moment: Moment) -> None:
        try:
            duty(moment)
        except Exception as fault:  # a damaged file or a full disk must never end the one process that waits for the trainer
            logs.failed("duty_failed", duty=duty.__name__, because=repr(fault))
            time.sleep(FAILURE_WAIT_SECONDS)

    def _watch_exec(self, _moment: Moment) -> None:
        """The report pipe is readable when the exec has happened (it closes) or failed (it says why)."""
        if self.report < 0 or not select.select([self.report], [], [], 0)[0]:
            return
        report, self.report = self.report, -1
        failure = read_report(report)
        if failure is not None:
            self.evidence |= {"reason": Reason.CONFIG, "start": failure}
            logs.failed("exec_failed", attempt=self.attempt, because=failure)
        elif self.record is not None:
            self.record, self.is_recorded = replace(self.record, is_executed=True), False

    def _watch_argv(self, _moment: Moment) -> None:
        """A parent knows its child: its pid can't be reused before we reap it, so whatever runs there now is still ours."""
        if self.record is None or self.ending is not None or self.report >= 0:
            return
        sight = sight_of(self.record.identity.pid)
        if sight.argv is not None and sight.uid is not None and not sight.unreadable:
            assert sight.start_ticks == self.record.identity.start_ticks, "an unreaped child keeps its start time"
            identity = replace(self.record.identity, argv=sight.argv, uid=sight.uid)
            if identity != self.record.identity:
                self.record, self.is_recorded = replace(self.record, identity=identity), False
        if not self.is_recorded and self.record.is_executed:
            try:
                rundir.write_attempt(self.paths, self.record)
            except OSError:
                # Without the argv of now nobody could verify the trainer, so nobody could ask it to stop.
                rundir.overwrite_attempt(self.paths, self.record)
                raise
            self.is_recorded = True

    def _watch_exit(self, _moment: Moment) -> None:
        """See the leader's end without reaping it: as a zombie it keeps its pid, until exit.json is on disk."""
        if self.pid is None or self.ending is not None:
            return
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return
        status = seen.si_status << 8 if seen.si_code == os.CLD_EXITED else seen.si_status
        if seen.si_code == os.CLD_DUMPED:
            status |= CORE_DUMPED
        self.ending = self._ending(wait_status=status)
        logs.changed("trainer_ended", attempt=self.attempt, pid=self.pid, wait_status=status)

    def _keep_deadline(self, moment: Moment) -> None:
        if self.is_empty or self.record is None:
            return
        due = self.deadline.due(moment.boottime_seconds, self.guard.fresh_beat, is_supervised=self.guard.is_alive)
        if due is Due.KILL:
            self._kill_tree(moment)
        elif due is Due.ASK and "asked_at" not in self.evidence and self.ending is None:
            self.evidence["asked_at"] = format_moment(moment.now)
            self.audit.intend(moment, "ask: the last safe moment, and no supervisor", self._leader(), "its own child, not reaped")
            self._note(self._ask())
            logs.changed("trainer_asked", attempt=self.attempt, because="the last safe moment, and no supervisor")

    def _ask(self) -> tuple[tree.SignalReport, ...]:
        assert self.record is not None
        if self.spec.signal is SignalTarget.GROUP:
            return tree.signal_group(self._members(), signal.SIGTERM, signal.SIGCONT)
        return tree.signal_one(self.record.identity, signal.SIGTERM, signal.SIGCONT)

    def _kill_tree(self, moment: Moment) -> None:
        if "killed_at" not in self.evidence and self.ending is None:
            self.evidence |= {"killed_at": format_moment(moment.now), "reason": Reason.DEADLINE}
            self.audit.intend(moment, "kill: the cutoff is reached", self._leader(), "its own child, not reaped")
            logs.changed("tree_killed", attempt=self.attempt, because="the cutoff is reached")
        outcome = tree.kill_tree(
            self.token, self._session(), self.group.encode(), self._leader(), never=self._never(), ancestor=os.getpid()
        )
        self._note(outcome.reports)
        for member in outcome.remaining:
            logs.failed("member_survives", pid=member.identity.pid, proofs=",".join(member.proofs))

    def _write_exit(self, _moment: Moment) -> None:
        """Durable before anybody can know of it otherwise; on a full disk again each tick, for ever. Where somebody has removed the run
        directory there is nobody left to be told."""
        if self.ending is None or self.is_ended:
            return
        if self.presence.was_removed:
            logs.failed("exit_unheard", attempt=self.attempt, because=f"{self.paths.root} was removed")
        elif not rundir.write_exit(self.paths, self.ending):
            logs.failed("exit_known_already", attempt=self.attempt, because="another process recorded it first")
        self.is_ended = True  # from here on `_reap` may take the leader in

    def _reap(self, _moment: Moment) -> None:
        """Take in ended orphans, and see whether the tree is empty. The leader stays a zombie until its exit is recorded."""
        for _ in range(ORPHANS_REAPED_PER_TICK_MAX):
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if seen is None or (seen.si_pid == self.pid and not self.is_ended):
                break
            os.waitpid(seen.si_pid, 0)
            self.guard.pids.discard(seen.si_pid)  # from here on it may be anybody's
        if self.is_ended:
            self.is_empty = tree.is_empty(
                self.token, None, self.group.encode(), self._leader(), never=self._never(), ancestor=os.getpid()
            )

    def _keep_supervisor(self, moment: Moment) -> None:
        self.guard.tick(moment.boottime_seconds)

    # What the duties need.

    def _moment(self) -> Moment:
        return self.deadline.moment(clock.boottime_seconds(), self.guard.fresh_beat)

    def _is_done(self) -> bool:
        return self.is_ended and self.is_empty and (self.guard.is_needless or self.presence.was_removed)

    def _members(self) -> tuple[tree.Member, ...]:
        return tree.members(self.token, self._session(), self.group.encode(), self._leader(), never=self._never(), ancestor=os.getpid())

    def _leader(self) -> ProcessIdentity | None:
        return self.record.identity if self.record else None

    def _session(self) -> int | None:
        return None if self.is_ended else self.pid

    def _never(self) -> frozenset[int]:
        recorded = rundir.read_program(self.paths.supervisor)
        lives = recorded is not None and not look(recorded.identity).is_dead
        return frozenset(self.guard.pids | ({recorded.identity.pid} if recorded is not None and lives else set()))

    def _note(self, reports: tuple[tree.SignalReport, ...]) -> None:
        noted: list[dict[str, object]] = self.evidence.setdefault("signals", [])
        for report in reports:
            logs.changed("signal", pid=report.pid, signal=report.signal, delivered=report.delivered, verdict=report.verdict)
            if len(noted) < SIGNALS_RECORDED_MAX:
                noted.append({"pid": report.pid, "signal": report.signal, "delivered": report.delivered, "verdict": report.verdict})

    def _ending(self, *, wait_status: int | None) -> ExitRecord:
        cap = f"{self.cap.grade}: {self.cap.means}"
        counters = {"cap": cap, "oom_kills": self.kills.read(), "peak_bytes": cgroups.peak_bytes(self.group)}
        code = os.waitstatus_to_exitcode(wait_status) if wait_status is not None else None
        return ExitRecord(
            attempt=self.attempt, at=self._moment().now, wait_status=wait_status, observed_by="shim",
            exit_code=code if code is not None and code >= 0 else None, signal=-code if code is not None and code < 0 else None,
            evidence={**self.evidence, **{name: value for name, value in counters.items() if value is not None}},
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
