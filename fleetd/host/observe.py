"""The supervisor's eyes: everything it reads of its run, each tick, as one HostSight.

Cheap by design: files are read again only when they changed, processes are held by pidfd instead of being looked up, and the
whole of /proc is walked only every few seconds, when the cgroup's list changed, or while the tree has to end.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from fleetd import clock
from fleetd.clock import Moment
from fleetd.host import cgroups, meters, rundir, tree
from fleetd.host.history import History
from fleetd.host.processes import Grip, boot_id, grip, look
from fleetd.host.sampler import Sampler
from fleetd.host.sight import AttemptSight, HostSight, MemoryLook
from fleetd.model import ExitRecord, RunSpec
from fleetd.paths import RunPaths
from policies.deadlines import EffectiveTime
from policies.facts import CapGrade, ProcessIdentity
from policies.identity import Standing

SCAN_SECONDS = 10.0
WELCOME_SECONDS = 0.25
"""Between two looks for newborn processes: each of the whole machine is one."""
SHIM_PATIENCE_SECONDS = 10.0
"""A shim that was started just before its supervisor died needs a moment to write shim.json."""

T = TypeVar("T")


class Cached(Generic[T]):
    """A record that is read again only when its file changed; a damaged or unreadable one keeps the last good value."""

    def __init__(self, path: Path, read: Callable[[], T | None]) -> None:
        self._path, self._read = path, read
        self._mark: tuple[int, int, int] | None = None
        self.value: T | None = None
        self.fault = ""

    def get(self) -> T | None:
        try:
            status = os.stat(self._path)
            mark = (status.st_mtime_ns, status.st_ino, status.st_size)
            if mark != self._mark:
                self.value = self._read()
                self._mark, self.fault = mark, ""
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as fault:
            self.fault = f"{self._path.name}: {fault}"
        return self.value


class Held:
    """A process by its recorded identity: looked up until it is gripped, then held by its pidfd."""

    def __init__(self) -> None:
        self.grip: Grip | None = None
        self.standing: Standing | None = None
        self.text = ""
        self.is_dead = False

    def look(self, recorded: ProcessIdentity) -> None:
        if self.grip is None and not self.is_dead:
            found = grip(recorded)
            if isinstance(found, Grip):
                self.grip, self.text = found, found.verdict.explanation
            else:
                self.standing, self.text, self.is_dead = found.standing, found.explanation, found.is_dead
        if self.grip is not None:
            self.is_dead = self.grip.exited()
            self.standing = Standing.GONE if self.is_dead else Standing.VERIFIED
            self.text = f"pid {recorded.pid} has ended" if self.is_dead else self.grip.verdict.explanation

    def close(self) -> None:
        if self.grip is not None:
            self.grip.close()
            self.grip = None


class AttemptWatch:
    """One attempt from its folder to its exit: its record, its leader, its shim, its tree."""

    def __init__(self, paths: RunPaths, number: int, began_seconds: float, shim_pid: int | None, limit_bytes: int) -> None:
        self.paths, self.number, self.began_seconds, self.limit_bytes = paths, number, began_seconds, limit_bytes
        self.shim_pid = shim_pid
        """Of the shim that this very supervisor started, and has not reaped."""
        self.is_shim_reaped = False
        self.record = Cached(paths.attempt(number).record, lambda: rundir.read_attempt(paths, number))
        self.exit = Cached(paths.attempt(number).exit, lambda: rundir.read_exit(paths, number))
        self.shim_record = Cached(paths.shim, lambda: rundir.read_program(paths.shim))
        self.leader, self.shim = Held(), Held()
        self._leader_process: tuple[str, int, int] | None = None
        self.members: tuple[tree.Member, ...] = ()
        self.scanned_seconds: float | None = None
        self.cgroup_pids: tuple[int, ...] = ()
        self.seen_pids: frozenset[int] = frozenset()
        self.unverified_since_seconds: float | None = None
        self.oom_kill_count = 0
        self.is_limit_hit = True
        self.cap_fault = ""
        self.welcome_due_seconds = float("-inf")
        self.host_peak_bytes: int | None = None
        self.is_adopted = shim_pid is None

    def close(self) -> None:
        self.leader.close()
        self.shim.close()

    def look(self, seconds: float, *, thorough: bool) -> AttemptSight:
        record, exit_record = self.record.get(), self.exit.get()
        if record is not None:
            self._look_at_leader(record.identity)
        if record is not None and exit_record is None and not record.is_executed and self.leader.is_dead and self._shim_is_alive(seconds):
            # Sent away from its gate: the record of it could not be made durable, and the shim that lives will bear another, or say why not.
            return AttemptSight(
                number=self.number, standing=None, is_executed=False, shim_is_alive=True, is_started=rundir.is_started(self.paths, self.number),
                age_seconds=seconds - self.began_seconds,
            )
        if record is not None and not record.is_executed and self._shim_is_alive(seconds) is False:
            self._complete(record)
        self._watch_for_strangers(seconds, record)
        has_ended = self.leader.standing is Standing.GONE or (self.leader.standing is Standing.STRANGER and self.leader.is_dead)
        if record is not None and (thorough or has_ended or self._is_scan_due(seconds, record)):
            self._scan(seconds, record)
        if record is not None:
            self._count_kills(record, exit_record)
            self.cap_fault = "" if has_ended else self._cap_fault(record)
        return AttemptSight(
            number=self.number, standing=self.leader.standing, standing_text=self.leader.text, is_dead=self.leader.is_dead,
            is_executed=record is not None and record.is_executed, exit=exit_record, tree_count=self._tree_count(record),
            shim_is_alive=self._shim_is_alive(seconds), is_started=rundir.is_started(self.paths, self.number),
            age_seconds=seconds - self.began_seconds, host_rebooted=record is not None and record.identity.boot_id != boot_id(),
            unverified_seconds=0.0 if self.unverified_since_seconds is None else seconds - self.unverified_since_seconds,
            oom_kill_count=self.oom_kill_count, is_limit_hit=self.is_limit_hit, cap_fault=self.cap_fault, is_contested=self._is_contested(record),
        )

    def _look_at_leader(self, recorded: ProcessIdentity) -> None:
        """A shim that had to send its first newborn away records another one: whoever held the first one knows nothing of the second."""
        process = (recorded.boot_id, recorded.pid, recorded.start_ticks)
        if self._leader_process not in (None, process):
            self.leader.close()
            self.leader, self.scanned_seconds = Held(), None
        self._leader_process = process
        self.leader.look(recorded)

    def _complete(self, record: rundir.AttemptRecord) -> None:
        """A shim that ended between the exec and its record of it left the argv that the newborn had. Nobody could verify the trainer, and
        so nobody could stop it, if the one who watches did not write down what is as provable: the very process, running what was ordered."""
        identity = replace(record.identity, argv=record.argv)
        if self.leader.standing is not Standing.STRANGER or self.leader.is_dead or not look(identity).is_verified:
            return
        try:
            rundir.write_attempt(self.paths, replace(record, identity=identity, is_executed=True))
        except OSError:
            rundir.overwrite_attempt(self.paths, replace(record, identity=identity, is_executed=True))

    def welcome(self, seconds: float) -> bool:
        """Take in whoever was born since the last look, where no cgroup counts for us. Whether anybody was, or went."""
        record = self.record.value
        if record is None or self.leader.standing is not Standing.VERIFIED:
            return False
        if seconds < self.welcome_due_seconds or cgroups.decode_group(record.cgroup).memory is not None:
            return False
        self.welcome_due_seconds, before = seconds + WELCOME_SECONDS, self.members
        self._welcome(record)
        return self.members is not before

    def never(self) -> frozenset[int]:
        """Pids that no signal of ours may reach although they may look like the tree: this supervisor, the shim, and whoever has the
        leader's pid without being the leader. The pid of a shim that has ended protects nobody."""
        pids = {os.getpid(), *(() if self.shim_pid is None else (self.shim_pid,))}
        shim, leader = self.shim_record.value, self.record.value
        if shim is not None and not self.shim.is_dead:
            pids.add(shim.identity.pid)
        if leader is not None and self.leader.standing is Standing.STRANGER:
            pids.add(leader.identity.pid)
        return frozenset(pids)

    def ancestor(self) -> int | None:
        """The shim's pid while it is proven alive: whatever descends from it belongs to the tree."""
        held = self.shim.grip
        return held.identity.pid if held is not None and not held.exited() else None

    def _watch_for_strangers(self, seconds: float, record: rundir.AttemptRecord | None) -> None:
        if self.leader.standing not in (Standing.STRANGER, Standing.UNKNOWN) or record is None:
            self.unverified_since_seconds = None
        elif self.unverified_since_seconds is None:
            self.unverified_since_seconds = seconds

    def _is_scan_due(self, seconds: float, record: rundir.AttemptRecord) -> bool:
        if self.scanned_seconds is None or seconds - self.scanned_seconds >= SCAN_SECONDS:
            return True
        group = cgroups.decode_group(record.cgroup)
        if group.folders:
            return cgroups.processes_in(group) != self.cgroup_pids
        self._welcome(record)
        return False

    def _welcome(self, record: rundir.AttemptRecord) -> None:
        """Without a cgroup that lists them, whoever was born since the last look is asked whether it is of the tree: a child that
        eats memory is seen at the next peek, and the rest of /proc is left alone until the next whole scan."""
        pids = tree.all_pids()
        born, self.seen_pids = pids - self.seen_pids, pids
        if born:
            found = tree.members(
                record.token, record.session, record.cgroup, record.identity, never=self.never(), ancestor=self.ancestor(), among=born,
            )
            self.members = (*(member for member in self.members if member.identity.pid not in born), *found)

    def _scan(self, seconds: float, record: rundir.AttemptRecord) -> None:
        self.cgroup_pids = cgroups.processes_in(cgroups.decode_group(record.cgroup))
        self.seen_pids = tree.all_pids()
        untouchable = self.never() - {record.identity.pid}  # whoever has the leader's pid is looked at, if never signalled
        self.members = tree.members(
            record.token, record.session, record.cgroup, record.identity, never=untouchable, ancestor=self.ancestor(),
        )
        self.scanned_seconds = seconds

    def _cap_fault(self, record: rundir.AttemptRecord) -> str:
        """A limit may be changed under us, and root may leave a cgroup: what was enforced at the birth is said only as long as it is."""
        group = cgroups.decode_group(record.cgroup)
        if group.memory is None or record.cap.grade is not CapGrade.ENFORCED:
            return ""
        inside = cgroups.processes_in(cgroups.Group(memory=group.memory))
        outside = [member.identity for member in self.members if member.identity.pid not in inside]
        living = [identity.pid for identity in outside if look(identity).is_verified]
        if living:
            return f"pid {living[0]} of the tree lives outside of it"
        return cgroups.limit_fault(group, self.limit_bytes)

    def _tree_count(self, record: rundir.AttemptRecord | None) -> int | None:
        """Living members beside a leader that has ended; a zombie leader is no member."""
        if record is None or self.scanned_seconds is None:
            return None
        return sum(1 for member in self.members if member.identity.pid != record.identity.pid or not self.leader.is_dead)

    def _is_contested(self, record: rundir.AttemptRecord | None) -> bool:
        if record is None or self.leader.standing is not Standing.STRANGER:
            return False
        return any(member.identity.pid == record.identity.pid for member in self.members)

    def shim_was_reaped(self) -> None:
        self.shim_pid, self.is_shim_reaped = None, True

    def _shim_is_alive(self, seconds: float) -> bool | None:
        if self.is_shim_reaped:
            return False
        record = self.shim_record.get()
        if record is None or record.identity.argv[-1:] != (str(self.number),):
            if self.shim_pid is not None:
                return True
            return None if seconds - self.began_seconds < SHIM_PATIENCE_SECONDS else False
        self.shim.look(record.identity)
        if self.shim.is_dead:
            return False
        return True if self.shim.standing is Standing.VERIFIED else None

    def _count_kills(self, record: rundir.AttemptRecord, exit_record: ExitRecord | None) -> None:
        counted = cgroups.oom_kills(cgroups.decode_group(record.cgroup))
        if counted is not None:
            if counted > self.oom_kill_count:
                self.is_limit_hit = cgroups.limit_was_hit(cgroups.decode_group(record.cgroup))
            self.oom_kill_count = max(self.oom_kill_count, counted)
        said = exit_record.evidence.get("oom_kills") if exit_record is not None else None
        if isinstance(said, int):
            self.oom_kill_count = max(self.oom_kill_count, said)


class Observer:
    def __init__(self, paths: RunPaths, spec: RunSpec) -> None:
        self.paths, self.spec = paths, spec
        self.want = Cached(paths.want, lambda: rundir.read_want(paths))
        self.cutoff = Cached(paths.cutoff, lambda: rundir.read_cutoff(paths))
        self.watch: AttemptWatch | None = None
        self.sampler = Sampler(spec.caps)
        self.lock_held_since_seconds: float | None = None
        self._is_watching = False

    @property
    def faults(self) -> tuple[str, ...]:
        """Orders that can't be read: the last good ones are obeyed."""
        return tuple(f"an order can't be read, the last good one is obeyed: {each.fault}" for each in (self.want, self.cutoff) if each.fault)

    def begin(self, number: int, seconds: float, shim_pid: int | None) -> None:
        """Watch this attempt from now on. `shim_pid` is None for one that another supervisor started."""
        if self.watch is not None:
            self.watch.close()
        self.watch = AttemptWatch(self.paths, number, seconds, shim_pid, self.spec.caps.host_bytes)
        self.sampler = Sampler(self.spec.caps)
        self._is_watching = True

    def rest(self) -> None:
        """The attempt is over: its processes are no reason to wake up any more."""
        self._is_watching = False

    def look(self, moment: Moment, time: EffectiveTime, history: History, *, silent_since_seconds: float, is_durable: bool) -> HostSight:
        seconds = moment.boottime_seconds
        attempt = self._attempt(seconds, history)
        memory = self._measure(attempt, seconds)
        is_resting = attempt is None or attempt.standing is not Standing.VERIFIED
        is_held = is_resting and rundir.is_locked(self.paths.trainer_lock)
        self.lock_held_since_seconds = None if not is_held else seconds if self.lock_held_since_seconds is None else self.lock_held_since_seconds
        return HostSight(
            time=time, boottime_seconds=seconds, spec=self.spec, want=self.want.get(), attempt=attempt, memory=memory,
            cutoff_at=rundir.effective_cutoff(self.spec, self.cutoff.get()), silent_seconds=max(0.0, seconds - silent_since_seconds),
            is_trainer_lock_held=is_held, is_durable=is_durable, disk_free_bytes=meters.disk_free_bytes(self.paths.root) if is_resting else None,
            lock_held_seconds=0.0 if self.lock_held_since_seconds is None else seconds - self.lock_held_since_seconds,
        )

    def rescan(self) -> None:
        """Look for members of the tree at the next tick, whatever the clock says."""
        if self.watch is not None:
            self.watch.scanned_seconds = None

    def wait(self, seconds: float) -> None:
        """Sleep, but wake at once when the trainer or the shim ends, or when the tree's memory has reached a line."""
        poll = select.poll()
        watched = (self.watch.leader, self.watch.shim) if self.watch is not None and self._is_watching else ()
        for held in watched:
            if held.grip is not None and not held.is_dead:
                poll.register(held.grip.fileno(), select.POLLIN)
        until_seconds = clock.boottime_seconds() + max(0.0, seconds)
        while True:
            left_seconds = max(0.0, until_seconds - clock.boottime_seconds())
            peek_seconds = self.sampler.peek_seconds()
            try:
                ended = poll.poll(1000 * (left_seconds if peek_seconds is None else min(left_seconds, peek_seconds)))
            except OSError:
                time.sleep(min(1.0, left_seconds))
                return
            if ended or clock.boottime_seconds() >= until_seconds or self._peek(clock.boottime_seconds()):
                return

    def _peek(self, seconds: float) -> bool:
        if self.watch is not None and self._is_watching and self.watch.welcome(seconds):
            self.sampler.welcome(self.watch.members)
        return self.sampler.peek(seconds)

    def _attempt(self, seconds: float, history: History) -> AttemptSight | None:
        if self.watch is None or history.is_attempt_over:
            return None
        stopping = history.stop is not None and (history.stop.forced or self.spec.signal.value == "group")
        attempt = self.watch.look(seconds, thorough=stopping)
        record = self.watch.record.value
        if record is None or not attempt.is_dead or attempt.tree_count != 0 or attempt.host_rebooted:
            return attempt
        return replace(attempt, device_left=self.sampler.device_left(record.identity.pid))

    def _measure(self, attempt: AttemptSight | None, seconds: float) -> MemoryLook:
        record = self.watch.record.value if self.watch is not None else None
        if self.watch is None or record is None or attempt is None or attempt.standing is not Standing.VERIFIED:
            return self.sampler.rest()
        memory = self.sampler.look(self.watch.members, record.cgroup, seconds)
        if memory.host_bytes is not None:
            self.watch.host_peak_bytes = max(memory.host_bytes, self.watch.host_peak_bytes or 0)
        return memory
