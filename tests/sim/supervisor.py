"""The real Supervisor of fleetd/host/supervisor.py over a virtual run directory and virtual processes.

Real: tick, decide, the order of acts (`_act`), what is told (`_tell`, `_announce`), the pauses, the spool's words. Virtual: whatever
touches a file, a process or a clock, in the methods below; they mirror the real ones of the same name, and exits.py and follow.py.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fleetd.clock import Moment
from fleetd.host.causes import stop_moment
from fleetd.host.exits import _LAST_WORDS, exit_record
from fleetd.host.follow import news_of
from fleetd.host.history import Ask, AskAgain, History, KillTree, RecordExit, SeenCheckpoint, StartAttempt, attempt_started
from fleetd.host.notices import Spool, _essence, first_number, observation_of, signal_notices
from fleetd.host.pace import TICK_SECONDS
from fleetd.host.progress import after_record
from fleetd.host.rundir import Heartbeat, ProgramRecord
from fleetd.host.sampler import PEEK_SECONDS
from fleetd.host.sight import HostSight
from fleetd.host.supervisor import Supervisor
from fleetd.kept_clock import pair_of
from fleetd.model import ExitRecord
from fleetd.wire import decode
from policies.deadlines import ClockPair, effective_time
from policies.facts import Reason, RunState, SignalTarget
from policies.lifecycle import SETTLED
from tests.sim import eyes
from tests.sim.machine import Process
from tests.sim.rundir import CHECKPOINT_BYTES, VirtualRun
from tests.sim.shim import start_shim

START_SECONDS = (0.1, 0.6)
HISTORY = "history"


class Killed(Exception):
    """SIGKILL came to this very supervisor, between two of its acts."""


class VirtualSpool(Spool):
    """The spool over a virtual journal. The memory is kept as an object: that it survives JSON is a test of its own."""

    def __init__(self, run: VirtualRun) -> None:
        self.run = run
        self.salvaged = "the journal was damaged" if run.salvage_spool() else ""
        self.journal = run.journal()  # type: ignore[assignment]
        self.waiting: list[dict[str, Any]] = []
        self._written: History | None = None

    def load(self) -> History:
        stored = self.journal.state_get(HISTORY)
        if stored is not None:
            self._written = stored if isinstance(stored, History) else decode(History, stored, HISTORY)
            return self._written
        attempt, seen = self.run.newest_attempt, self.run.observation
        self.journal.start_after(first_number(self.journal, self.run.acknowledged, self.run.losses, is_first=attempt == 0))
        if attempt == 0:
            return History()
        state = RunState.STAGING if seen is None else seen.state
        reason, detail = (None, "") if seen is None else (seen.reason, seen.detail)
        is_over = state in (*SETTLED, RunState.BACKOFF, RunState.HELD)
        return History(state=state, reason=reason, detail=detail, attempt=attempt, is_attempt_over=is_over, is_attempt_announced=seen is not None)

    def write(self, history: History) -> None:
        if self.waiting or self._written is None or _essence(history) != _essence(self._written):
            self.journal.append(self.waiting, state={HISTORY: history})
            self.waiting, self._written = [], history

    def tend(self) -> None:
        self.journal.retry()
        if self.run.acknowledged > self._acknowledged_upto:
            self._acknowledged_upto = self.run.acknowledged
            self.journal.trim(self.run.acknowledged)

    _acknowledged_upto = 0


class VirtualFollower:
    """Mirrors fleetd/host/follow.py: an offset into the log, and what is new among the checkpoints."""

    def __init__(self, run: VirtualRun, offset: int, seconds: float) -> None:
        self.run, self.offset, self.log_grew_seconds = run, offset, seconds
        self._changes = -1

    def follow(self, history: History, moment: Moment, tell: Any) -> History:
        log = self.run.log
        if len(log) < self.offset:
            self.offset = 0  # cut short: what is there now is read from its beginning
        if len(log) > self.offset:
            self.log_grew_seconds = moment.boottime_seconds
            progress = history.progress
            for record in log[self.offset:]:
                progress = after_record(progress, record, read_at=moment.now)
                if (news := news_of(record)) is not None:
                    tell(moment, news[0], **news[1])
            self.offset = len(log)
            history = replace(history, progress=progress, log_offset=self.offset)
        if self._changes == self.run.checkpoint_changes:
            return history
        self._changes = self.run.checkpoint_changes
        known = {(seen.step, seen.digest) for seen in history.checkpoints}
        claims = [self.run.checkpoints[step] for step in sorted(self.run.checkpoints)]
        for claim in claims:
            if (claim.step, claim.digest) not in known:
                tell(moment, "checkpoint", step=claim.step, digest=claim.digest, bytes=CHECKPOINT_BYTES)
        seen = tuple(SeenCheckpoint(step=claim.step, digest=claim.digest, at=claim.at) for claim in reversed(claims))
        return replace(history, checkpoints=seen)


@dataclass
class VirtualLooks:
    run: VirtualRun
    process: Process
    is_refused: bool = False
    is_introduced: bool = False

    def introduce(self) -> None:
        """Mirrors Looks.introduce: a disk that refuses it is asked again at each beat."""
        if not self.is_introduced and not self.run.machine.is_disk_full:
            self.run.supervisor_record = ProgramRecord(identity=self.process.identity(), at=self.run.machine.moment().now)
            self.is_introduced = True

    def beat(self, sight: HostSight, history: History) -> None:
        """Before a start; `_show` writes the beat itself."""
        self.introduce()


class VirtualSupervisor(Supervisor):
    def __init__(self, run: VirtualRun, process: Process, laziness: float) -> None:
        self.run_dir, self.machine, self.process, self.laziness = run, run.machine, process, laziness
        self.spec = run.spec
        self.spool, self.observer = VirtualSpool(run), eyes.VirtualObserver(run)  # type: ignore[assignment]
        self.history = self.spool.load()
        self.follower = VirtualFollower(run, self.history.log_offset, run.machine.boottime_seconds())  # type: ignore[assignment]
        self.own_status: int | None = None
        self.start_refused = ""
        self.is_done = False
        self.looked_seconds: float | None = None
        self.heard_seconds: float | None = None
        self.looks = VirtualLooks(run, process)  # type: ignore[assignment]
        self.dies_at = ""
        """A boundary between two acts at which a kill is due: `signalled`, `before_write`, `created`."""
        self._next: Any = None

    def begin(self) -> None:
        self._resume(self.machine.moment())
        self._turn()

    # The loop of Supervisor.run.

    def _turn(self) -> None:
        world, process = self.machine.world, self.process
        if not process.is_alive:
            return
        if process.hung_until > world.seconds:
            self._appoint(process.hung_until - world.seconds)
            return
        try:
            sight = self.tick(self.machine.moment())
        except Killed:
            world.fault()
            world.say(self.machine.name, f"{process!r} is killed at '{self.dies_at}'")
            process.leave(int(signal.SIGKILL))
            return
        if self.is_done:
            process.leave(0)
            return
        pause_seconds = self._pause_seconds(sight)
        if pause_seconds == TICK_SECONDS:
            pause_seconds *= self.laziness
        if pause_seconds > PEEK_SECONDS:
            pause_seconds = min(pause_seconds, self.observer.seconds_to_line())  # type: ignore[attr-defined]
        self._appoint(pause_seconds)

    def wake(self) -> None:
        """The trainer or the shim has ended: a real supervisor waits on their pidfds."""
        if self.process.is_alive and self._next is not None:
            self._appoint(self.machine.world.between(0.001, 0.02))

    def _appoint(self, seconds: float) -> None:
        if self._next is not None:
            self._next.call_off()
        self._next = self.machine.world.after(seconds, self._turn)

    # What touches the world.

    def _resume(self, moment: Moment) -> None:
        if self.history.anchor is None or self.history.anchor.boot_id != self.machine.boot_id:
            anchor = self._new_anchor(self.machine.boot_id, moment)
            if self.machine.kept is None:
                anchor = replace(anchor, is_trusted=True)
            was_rebooted = self.history.anchor is not None
            self.history = replace(self.history, anchor=anchor, leader_gone_seconds=None, was_rebooted=was_rebooted)
            self.machine.laws.anchored(self.run_dir, anchor)
        if self.run_dir.newest_attempt > self.history.attempt:
            self.history = attempt_started(self.history, self.run_dir.newest_attempt)
        if not self.history.is_attempt_over:
            self.observer.begin(self.history.attempt, moment.boottime_seconds, None)
        if self.spool.salvaged:
            self.spool.tell(moment, "alarm", text=self.spool.salvaged)

    def _counted(self, moment: Moment) -> ClockPair:
        kept, reading = self.machine.kept, pair_of(moment)
        if kept is None or kept.trusted is None:
            return reading
        return ClockPair(now=effective_time(anchor=kept.trusted, reading=reading).now, boottime_seconds=reading.boottime_seconds)

    def _began_in_this_boot(self) -> bool:
        record = self.run_dir.attempts[self.history.attempt].record if self.history.attempt else None
        born_in = record.identity.boot_id if record is not None else self.run_dir.came_in_boot if not self.history.attempt else None
        return born_in == self.machine.boot_id

    def _known_time(self, moment: Moment) -> ClockPair | None:
        kept = self.machine.kept
        if kept is None or kept.is_confirmed:
            return self._counted(moment)
        return pair_of(moment) if self.machine.is_synchronised else None

    def _trust_clock(self, moment: Moment) -> None:
        before = self.history.anchor
        super()._trust_clock(moment)
        if self.history.anchor is not before:
            self.machine.laws.anchored(self.run_dir, self.history.anchor)

    def _reap(self) -> None:
        watch = self.observer.watch
        attempt = self.run_dir.attempts.get(self.history.attempt)
        leader = attempt.leader if attempt is not None and not self.history.is_attempt_over else None
        self.own_status = None
        for process in [each for each in self.machine.processes.values() if each.parent is self.process and not each.is_alive]:
            if process is leader:
                self.own_status = process.status
                continue
            self.machine.reap(process)
            if watch is not None and watch.shim_pid == process.pid:
                watch.shim_was_reaped()

    def _remember(self, sight: HostSight, moment: Moment) -> None:
        super()._remember(sight, moment)
        self.machine.laws.looked(self.run_dir, sight)

    def _act(self, actions: Any, sight: HostSight, moment: Moment) -> None:
        before = self.history.state
        for action in actions:
            self.machine.laws.decided(self.run_dir, action, sight, self.history)
        super()._act(actions, sight, moment)
        if self.history.state is not before:
            self.machine.world.say(self.machine.name, f"{self.spec.candidate}: {before} → {self.history.state}: {self.history.detail}")

    def _boundary(self, name: str) -> None:
        if self.dies_at == name:
            raise Killed

    def _signal(self, action: Ask | AskAgain | KillTree, moment: Moment) -> None:
        watch, run = self.observer.watch, self.run_dir
        assert watch is not None and watch.record.value is not None, "only a recorded trainer is signalled"
        record = watch.record.value
        self.machine.world.say(self.machine.name, f"{self.spec.candidate}: {type(action).__name__}: {action.because}")
        if isinstance(action, KillTree):
            reports, purpose = eyes.kill_tree(run, record, sender="supervisor"), f"kill: {action.because}"
        elif self.spec.signal is SignalTarget.GROUP:
            targets = eyes.members(run, record)
            reports, purpose = eyes.signal_group(run, targets, signal.SIGTERM, signal.SIGCONT, sender="supervisor"), f"ask: {action.because}"
        else:
            reports, purpose = eyes.signal_one(run, record.identity, signal.SIGTERM, signal.SIGCONT, sender="supervisor"), f"ask: {action.because}"
        for body in signal_notices(reports, purpose):
            self.spool.tell(moment, "signal", **body)
        self._boundary("signalled")

    def _tell_of_others(self, moment: Moment) -> None:
        """There is no audit here: what a virtual shim signalled stands in its exit record."""

    def _tell(self, action: Any, sight: HostSight, moment: Moment) -> None:
        super()._tell(action, sight, moment)
        self._boundary("before_write")

    def _record_exit(self, action: RecordExit, moment: Moment) -> None:
        watch, run = self.observer.watch, self.run_dir
        assert watch is not None
        try:
            run.write_exit(self._exit_known(watch, moment, action.because))
        except OSError:
            return
        leader = run.attempts[watch.number].leader
        if self.own_status is not None and leader is not None:
            self.machine.reap(leader)
            self.own_status = None

    def _exit_known(self, watch: eyes.VirtualWatch, moment: Moment, because: str) -> ExitRecord:
        """Mirrors fleetd/host/exits.py: our own wait, the pidfd, the trainer's last words, the kernel's count, nobody."""
        number, progress = watch.number, self.history.progress
        evidence: dict[str, Any] = {"because": because, "oom_kills": watch.oom_kill_count}
        if watch.record.value is None:
            evidence |= {"reason": Reason.LAUNCH_TIMEOUT, "start": "its shim ended before it had started a trainer"}
        if self.own_status is not None:
            return exit_record(number, moment.now, self.own_status, "supervisor", evidence)
        held = watch.leader.process
        if held is not None and held.is_reaped and held.status is not None and self.machine.reads_exits:
            return exit_record(number, moment.now, held.status, "pidfd", evidence)
        said = _LAST_WORDS.get(progress.last_event or "")
        code, by_signal, who = (int(said), None, "trainer") if said is not None else (None, None, "nobody")
        if said is None and watch.oom_kill_count > 0:
            by_signal, who = int(signal.SIGKILL), "kernel"
        return ExitRecord(
            attempt=number, at=moment.now, wait_status=None, exit_code=code, signal=by_signal, observed_by=who, evidence=evidence,
        )

    def _tidy(self, sight: HostSight) -> None:
        """A virtual cgroup leaves nothing behind."""

    def _start(self, action: StartAttempt, moment: Moment) -> None:
        run = self.run_dir
        try:
            number = run.create_attempt()
            self._boundary("created")
            self.history = attempt_started(self.history, number)
            self.spool.write(self.history)
        except OSError as fault:
            self.start_refused = str(fault)
            return
        self.start_refused = ""
        shim = start_shim(run, number, self.process)
        self.observer.begin(number, moment.boottime_seconds, shim)
        self.follower.log_grew_seconds = moment.boottime_seconds

    def _show(self, sight: HostSight) -> None:
        """Mirrors Looks: the heartbeat is written in place even on a full disk, the observation too where its length allows."""
        run, now, seconds = self.run_dir, sight.time.now, sight.boottime_seconds
        self.looks.introduce()  # type: ignore[call-arg]
        self.looks.is_refused = self.machine.is_disk_full  # type: ignore[misc]
        stop_at, cutoff_at = stop_moment(sight, self.history), sight.cutoff_at
        run.heartbeat = Heartbeat(
            boottime_seconds=seconds, pid=self.process.pid, stop_at=stop_at, cutoff_at=cutoff_at,
            stop_boottime_seconds=None if stop_at is None else seconds + (stop_at - now).total_seconds(),
            cutoff_boottime_seconds=None if cutoff_at is None else seconds + (cutoff_at - now).total_seconds(),
        )
        before, run.shown_state = run.shown_state, self.history.state
        run.show(partial(observation_of, sight, self.history, self.observer.watch, health=self.spool.journal.health))  # type: ignore[arg-type]
        if before is not run.shown_state:
            run.changed()


def start_supervisor(run: VirtualRun) -> None:
    """Detached, nobody's child. Mirrors launch.start_supervisor and the main of supervisor.py."""
    world = run.machine.world
    process = run.machine.spawn("supervisor", ("python", "-m", "fleetd.host.supervisor", run.run_id), run_id=run.run_id)
    world.after(world.between(*START_SECONDS), _main, run, process)


def _main(run: VirtualRun, process: Process) -> None:
    if not process.is_alive:
        return
    if run.is_locked():
        process.leave(0)
        return
    run.lock = process
    run.machine.laws.supervised(run)
    supervisor = VirtualSupervisor(run, process, run.machine.laziness)
    supervisor.looks.introduce()  # type: ignore[call-arg]
    run.supervisor = supervisor
    process.on_end.append(run.changed)
    supervisor.begin()
    run.changed()
