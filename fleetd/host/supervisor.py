"""The small process that watches one run: `<release>/fleetd/host supervisor RUN_DIR`. Detached, no network, one thread.

Each tick: read both clocks once, look (`observe`), fold what the trainer logged, decide (`decide`, pure), act, write it down,
show it (`notices`). Signals for cap, deadline and stop are sent before anything touches the disk; a start needs the durable record
first. SIGTERM ends only this process: the trainer goes on, its shim starts another supervisor, and that one adopts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from fleetd import clock, logs
from fleetd.clock import Moment
from fleetd.host import launch, rundir, tidy, tree
from fleetd.host.audit import Audit, told_of, untold
from fleetd.host.decide import decide
from fleetd.host.exits import reap_children, record_of
from fleetd.host.follow import Follower
from fleetd.host.history import (
    Action,
    Alarm,
    Anchor,
    Ask,
    AskAgain,
    EndAttempt,
    Finish,
    KillTree,
    Move,
    RecordExit,
    StartAttempt,
    after_action,
    after_gap,
    attempt_started,
    time_is_known,
)
from fleetd.host.homes import own_home
from fleetd.host.notices import Looks, Spool, numbers_of, observation_of, signal_notices
from fleetd.host.observe import Observer
from fleetd.host.pace import TICK_SECONDS, pause_seconds
from fleetd.host.presence import Presence
from fleetd.host.processes import boot_id, set_child_subreaper
from fleetd.host.sight import AttemptSight, HostSight
from fleetd.host.trusted_time import began_in_this_boot, known_time
from fleetd.kept_clock import counted, pair_of
from fleetd.model import RunSpec
from fleetd.paths import HostPaths, RunPaths
from policies.deadlines import ClockPair, EffectiveTime, after_reboot, effective_time
from policies.facts import SignalTarget
from policies.identity import Standing

FAULTY_TICKS_MAX = 30
"""So many failed looks in a row, and another supervisor may try from the beginning."""
CLOCK_RECORD_SECONDS = 60.0
UNWATCHED_SECONDS = 10.0
"""Longer than any pause between two looks: the machine slept, or this process was held up."""


class Supervisor:
    def __init__(self, paths: RunPaths, spec: RunSpec) -> None:
        self.paths, self.spec = paths, spec
        self.spool, self.looks, self.observer = Spool(paths), Looks(paths), Observer(paths, spec)
        self.history = self.spool.load()
        self.follower = Follower(paths, self.history.log_offset, clock.boottime_seconds())
        self.audit = Audit(paths.audit, "supervisor")
        self.presence = Presence(paths.root, clock.boottime_seconds())
        self.own_status: int | None = None
        self.attempt_seen: AttemptSight | None = None
        self.start_refused = ""
        self.is_done = False
        self.looked_seconds: float | None = None
        self.heard_seconds: float | None = None

    def run(self) -> None:
        """Watch until the run is settled and every notice is on disk."""
        self.looks.introduce(clock.read().now)
        tidy.tidy_run(self.paths)
        self._resume(clock.read())
        faults = 0
        while not self.is_done and not self._is_needless():
            try:
                sight = self.tick(clock.read())
            except OSError as fault:  # out of descriptors, a disk that fails: the trainer must not lose its watch for it
                faults += 1
                logs.failed("tick_failed", count=faults, because=repr(fault))
                if faults >= FAULTY_TICKS_MAX:
                    raise
                self.observer.wait(TICK_SECONDS)
                continue
            faults = 0
            self.observer.wait(0.0 if self.is_done else self._pause_seconds(sight))

    def _is_needless(self) -> bool:
        """The run directory was removed and nothing of ours lives: what is seen from here on can be told to nobody."""
        self.presence.look(clock.boottime_seconds())
        lives = not self.history.is_attempt_over and (self.attempt_seen is None or self.attempt_seen.may_live)
        if self.presence.was_removed and not lives:
            logs.failed("run_removed", because=f"{self.paths.root} was removed")
            return True
        return False

    def tick(self, moment: Moment) -> HostSight:
        """One look, one decision, one round of acts. Returns what was seen."""
        self._note_gap(moment)
        self._trust_clock(moment)
        time = self._effective_time(moment)
        true_moment = Moment(now=time.now, boottime_seconds=moment.boottime_seconds)
        self.spool.tend()
        self._reap()
        sight = self.observer.look(
            moment, time, self.history, silent_since_seconds=self.follower.log_grew_seconds, is_durable=self.spool.journal.is_durable,
        )
        self.attempt_seen = sight.attempt
        self._remember(sight, true_moment)
        sight = replace(sight, silent_seconds=self._silent_seconds(moment), clock_doubted_seconds=self._clock_doubted_seconds(moment))
        self._act(decide(sight, self.history), sight, true_moment)
        self._show(sight)
        return sight

    def _resume(self, moment: Moment) -> None:
        """Go on where the last supervisor was: the clock of this boot, and the attempt that may still run."""
        if self.history.anchor is None or self.history.anchor.boot_id != boot_id():
            was_rebooted = self.history.anchor is not None
            anchor = self._new_anchor(boot_id(), moment)
            self.history = replace(self.history, anchor=anchor, leader_gone_seconds=None, was_rebooted=was_rebooted)
        newest = rundir.newest_attempt(self.paths)
        if newest > self.history.attempt:
            self.history = attempt_started(self.history, newest)
        if not self.history.is_attempt_over:
            self.observer.begin(self.history.attempt, moment.boottime_seconds, None)
        if self.spool.salvaged:
            self.spool.tell(moment, "alarm", text=self.spool.salvaged)
        self._tell_of_others(moment)

    def _new_anchor(self, boot: str, moment: Moment) -> Anchor:
        """The clock pair of this boot, as its host has counted it so far. It is never earlier than what the last boot recorded, nor than
        the orders that lie here: a clock that is behind must not make a stop late."""
        known = (self.history.clock_seen_at, self.spec.created_at, rundir.told_at(self.observer.want.get()))
        least_now = max(each for each in known if each is not None)
        pair = after_reboot(reading=self._counted(moment), recorded_now=least_now)
        trusted = self.history.anchor is None and self._began_in_this_boot()
        return Anchor(
            boot_id=boot, now=pair.now, boottime_seconds=pair.boottime_seconds, is_trusted=trusted, least_now=None if trusted else least_now,
        )

    def _trust_clock(self, moment: Moment) -> None:
        """After a reboot the wall clock may be anything: begin to count anew once somebody knows the time."""
        anchor = self.history.anchor
        if anchor is None or anchor.is_trusted:
            return
        known = self._known_time(moment)
        if known is not None:
            self.history = time_is_known(self.history, known, rundir.told_at(self.observer.want.get()))
            logs.changed("clock_trusted", now=known.now.isoformat(), boottime_seconds=known.boottime_seconds)

    def _began_in_this_boot(self) -> bool:
        return began_in_this_boot(self.paths, self.history.attempt)

    def _known_time(self, moment: Moment) -> ClockPair | None:
        return known_time(HostPaths(self.paths.root.parent.parent).clock, pair_of(moment))

    def _clock_doubted_seconds(self, moment: Moment) -> float | None:
        anchor = self.history.anchor
        return None if anchor is None or anchor.is_trusted else max(0.0, moment.boottime_seconds - anchor.boottime_seconds)

    def _counted(self, moment: Moment) -> ClockPair:
        return pair_of(counted(HostPaths(self.paths.root.parent.parent).clock, moment))

    def _effective_time(self, moment: Moment) -> EffectiveTime:
        anchor = self.history.anchor
        assert anchor is not None, "resume sets it"
        return effective_time(anchor=ClockPair(now=anchor.now, boottime_seconds=anchor.boottime_seconds), reading=pair_of(moment))

    def _reap(self) -> None:
        watch = self.observer.watch
        record = watch.record.value if watch is not None else None
        keep = record.identity.pid if record is not None and not self.history.is_attempt_over and record.identity.boot_id == boot_id() else None
        reaped, self.own_status = reap_children(keep)
        if watch is not None and watch.shim_pid in reaped:
            watch.shim_was_reaped()

    def _remember(self, sight: HostSight, moment: Moment) -> None:
        """Fold into the memory what was seen, before anything is decided on it."""
        attempt, history = sight.attempt, self.history
        if attempt is not None and attempt.is_dead and history.leader_gone_seconds is None:
            self.history = replace(history, leader_gone_seconds=sight.boottime_seconds)
        if attempt is not None and attempt.standing is not None:
            self._announce(sight, moment)
        self.history = self.follower.follow(self.history, moment, self.spool.tell)
        seen_at, anchor = self.history.clock_seen_at, self.history.anchor
        is_known = anchor is not None and anchor.is_trusted
        if is_known and (seen_at is None or (moment.now - seen_at).total_seconds() >= CLOCK_RECORD_SECONDS):
            self.history = replace(self.history, clock_seen_at=moment.now)

    def _note_gap(self, moment: Moment) -> None:
        if self.looked_seconds is not None:
            self.history = after_gap(self.history, moment.boottime_seconds - self.looked_seconds)
        self.looked_seconds = moment.boottime_seconds

    def _silent_seconds(self, moment: Moment) -> float:
        """Since the trainer last said something, as far as it could have been heard. Asked once its log was read: what is new there ends
        its silence before anybody judges by it."""
        seconds, follower = moment.boottime_seconds, self.follower
        unheard_seconds = 0.0 if self.heard_seconds is None else seconds - self.heard_seconds  # also while looks failed
        self.heard_seconds = seconds
        if unheard_seconds > UNWATCHED_SECONDS:
            follower.log_grew_seconds = min(seconds, follower.log_grew_seconds + unheard_seconds)
        if self.looks.is_refused or not self.spool.journal.is_durable:
            follower.log_grew_seconds = seconds  # a disk that takes nothing takes no log either
        return seconds - follower.log_grew_seconds

    def _announce(self, sight: HostSight, moment: Moment) -> None:
        watch = self.observer.watch
        assert watch is not None and watch.record.value is not None
        record, attempt = watch.record.value, sight.attempt
        assert attempt is not None
        if not self.history.is_attempt_announced and (attempt.is_executed or attempt.is_dead):
            self.history = replace(self.history, is_attempt_announced=True)
            self.spool.tell(
                moment, "attempt_started", attempt=record.attempt, pid=record.identity.pid, start_ticks=record.identity.start_ticks,
                resume_step=record.resume_step, resume_digest=record.resume_digest, refused=list(record.refused),
            )
            if record.refused:
                self.spool.tell(moment, "alarm", text="checkpoints were refused: " + "; ".join(record.refused))
        if watch.is_adopted and attempt.standing is Standing.VERIFIED:
            watch.is_adopted = False
            self.spool.tell(moment, "adopted", supervisor_pid=os.getpid(), trainer_pid=record.identity.pid, verified=attempt.standing_text)

    def _act(self, actions: tuple[Action, ...], sight: HostSight, moment: Moment) -> None:
        """Signals first, then one write for all of it, then the start that rests on that write."""
        start: StartAttempt | None = None
        finish = False
        for action in sorted(actions, key=lambda each: not isinstance(each, Ask | AskAgain | KillTree)):
            if isinstance(action, Ask | AskAgain | KillTree):
                self._signal(action, moment)
            elif isinstance(action, RecordExit):
                self._record_exit(action, moment)
            elif isinstance(action, StartAttempt):
                start = action
            elif isinstance(action, Finish):
                finish = True
            else:
                self._tell(action, sight, moment)
            want_sequence = 0 if sight.want is None else sight.want.sequence
            self.history = after_action(
                self.history, action, now=moment.now, boottime_seconds=sight.boottime_seconds, want_sequence=want_sequence,
            )
        self.spool.write(self.history)
        if start is not None and self.spool.journal.is_durable:
            self.looks.beat(sight, self.history)  # the shim takes from it what time it is
            self._start(start, moment)
        self.is_done = finish and self.spool.journal.is_durable

    def _signal(self, action: Ask | AskAgain | KillTree, moment: Moment) -> None:
        watch = self.observer.watch
        assert watch is not None and watch.record.value is not None, "only a recorded trainer is signalled"
        record = watch.record.value
        act = "kill" if isinstance(action, KillTree) else "ask"
        self.audit.intend(moment, f"{act}: {action.because}", record.identity, watch.leader.text)
        if isinstance(action, KillTree):
            outcome = tree.kill_tree(
                record.token, record.session, record.cgroup, record.identity, never=watch.never(), ancestor=watch.ancestor(),
            )
            reports, purpose = outcome.reports, f"kill: {action.because}"
        elif self.spec.signal is SignalTarget.GROUP:
            members = tree.members(
                record.token, record.session, record.cgroup, record.identity, never=watch.never(), ancestor=watch.ancestor(),
            )
            reports, purpose = tree.signal_group(members, signal.SIGTERM, signal.SIGCONT), f"ask: {action.because}"
        else:
            reports, purpose = tree.signal_one(record.identity, signal.SIGTERM, signal.SIGCONT), f"ask: {action.because}"
        self.observer.rescan()
        for body in signal_notices(reports, purpose):
            self.spool.tell(moment, "signal", **body)
        self._tell_of_others(moment)

    def _tell_of_others(self, moment: Moment) -> None:
        """Signals of the shim, and of a supervisor before this one that died before it could tell of them."""
        lines, offset = untold(self.paths.audit, self.history.audit_offset, own_pid=os.getpid())
        for line in lines:
            self.spool.tell(moment, "signal", **told_of(line))
        self.history = replace(self.history, audit_offset=offset)

    def _record_exit(self, action: RecordExit, moment: Moment) -> None:
        watch = self.observer.watch
        assert watch is not None
        record = record_of(watch, self.history.progress, own_status=self.own_status, at=moment.now, because=action.because)
        try:
            rundir.write_exit(self.paths, record)
        except OSError as fault:
            logs.failed("exit_not_recorded", attempt=watch.number, because=fault)
            return
        if self.own_status is not None and watch.record.value is not None:
            os.waitpid(watch.record.value.identity.pid, 0)
            self.own_status = None

    def _tell(self, action: Action, sight: HostSight, moment: Moment) -> None:
        if isinstance(action, Move):
            evidence = {**action.evidence, **numbers_of(sight, self.history)}
            self.spool.tell(
                moment, "state_changed", **{"from": self.history.state}, to=action.to, reason=action.reason, detail=action.detail,
                attempt=self.history.attempt, evidence=evidence,
            )
        elif isinstance(action, EndAttempt):
            assert sight.attempt is not None
            self._tell_of_others(moment)  # the shim may have ended it, while we were held up
            body = {"attempt": sight.attempt.number, "exit": sight.attempt.exit, "reason": action.reason, "detail": action.detail}
            self.spool.tell(moment, "attempt_ended", **body)
            self._tidy(sight)
            self.observer.rest()
        elif isinstance(action, Alarm):
            self.spool.tell(moment, "alarm", text=action.text)

    def _tidy(self, sight: HostSight) -> None:
        """The shim takes its cgroup away; where it is dead, nobody else would."""
        if sight.attempt is not None and sight.attempt.shim_is_alive is not True:
            tidy.tidy_attempt(self.paths, sight.attempt.number, patient=True)

    def _start(self, action: StartAttempt, moment: Moment) -> None:
        try:
            # What could not be executed has used up no attempt: the folder that was made for it still waits.
            is_made = bool(self.start_refused) and self.history.attempt > 0 and not rundir.is_started(self.paths, self.history.attempt)
            number = self.history.attempt if is_made else rundir.create_attempt(self.paths)
            self.history = attempt_started(self.history, number)
            self.spool.write(self.history)
            release = launch.release_folder(self.paths.root.parent.parent, self.spec.release_digest)
            with open(self.paths.supervisor_log, "ab") as log:
                shim = subprocess.Popen(
                    launch.program_argv(release, "shim", str(self.paths.root), str(number)), env=launch.program_environment(release),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                )
        except OSError as fault:
            if self.start_refused != str(fault):
                logs.failed("start_refused", because=fault)
            self.start_refused = str(fault)
            return
        self.start_refused = ""
        self.observer.begin(number, moment.boottime_seconds, shim.pid)
        shim.returncode = 0  # it is reaped by number together with the orphans, never through this object
        self.follower.log_grew_seconds = moment.boottime_seconds
        logs.changed("attempt_created", attempt=number, shim=shim.pid, because=action.because)

    def _show(self, sight: HostSight) -> None:
        self.looks.beat(sight, self.history)
        health, faults = self.spool.journal.health, self.observer.faults
        if self.start_refused:
            faults = (*faults, f"nothing can be started here: {self.start_refused}")
        self.looks.observe(observation_of(sight, self.history, self.observer.watch, health=health, faults=faults))
        self.looks.trace(sight, self.history)

    def _pause_seconds(self, sight: HostSight) -> float:
        look_seconds = self.observer.sampler.look_seconds()
        return pause_seconds(sight, self.history, look_seconds=look_seconds, start_is_refused=bool(self.start_refused))


def main(arguments: list[str]) -> int:
    """0 when the run is settled, or when another supervisor has it."""
    if len(arguments) != 1:
        print("usage: fleetd/host/__main__.py supervisor RUN_DIR", file=sys.stderr)
        return 2
    paths = RunPaths(Path(arguments[0]).resolve())
    lock = rundir.try_lock(paths.lock)
    if lock is None:
        return 0
    logs.to_file(paths.supervisor_log)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logs.changed("supervisor_started", pid=os.getpid(), run=paths.root.name, home=own_home())
    try:
        set_child_subreaper()
    except OSError as fault:
        logs.failed("supervisor_start", because=fault)
    try:
        supervisor = Supervisor(paths, rundir.read_spec(paths))
        supervisor.run()
    except Exception:
        logs.logger.exception("event=supervisor_crashed")
        raise
    because = "the run is settled and every notice is on disk" if supervisor.is_done else "its run was removed and nothing of it lives"
    logs.changed("supervisor_ended", because=because)
    os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
