"""What must never happen (DESIGN section 9, who is obeyed, what a fence promises), told from the truth of the virtual world as things happen.

Nothing here asks the code under test what it thinks. Host laws are below, the coordinator's in `laws_office.py`.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetd.coordinator.host_keys import HostKey
from fleetd.host.history import Action, Anchor, Ask, History, KillTree, Move, StartAttempt
from fleetd.host.rundir import AttemptRecord, told_at
from fleetd.host.sight import HostSight
from fleetd.model import Observation, Owner, WantOrder
from policies.facts import Reason, RunState, StopMode, Want
from policies.identity import Standing
from policies.memory import FLOOR_HARD_FRACTION
from tests.sim.machine import Machine, Process
from tests.sim.rundir import VirtualRun
from tests.sim.world import Broken, World, true_seconds

CLOCK_SECONDS = 6.0
"""A clock may be this far off before it counts as stepped (5 s), and a look may come a moment late."""
LATE_SECONDS = 3.0
WATCH_SECONDS = 2.0
HELD_UP_SECONDS = 1.0
GATE_SECONDS = 0.2
"""From the last look of a shim at what is wished to the exec of its trainer: what is ordered meanwhile ends it, but comes too late to keep it."""
LOOKS_KEPT_MAX = 20_000


@dataclass
class Truth:
    """What really happened with one run on its host."""

    run: VirtualRun
    boots: int
    """Of its machine, when it was created."""
    offset_seconds: float | None = None
    """How far the clock that its deadlines are counted by is off, in this boot."""
    asked_attempt: int = 0
    asked_at: float = 0.0
    asked_reason: Reason | None = None
    """Why: it was checked when it was asked, and is true from then on, whatever a power cut or a damaged journal makes forgotten."""
    grace_seconds: float = 0.0
    killed_attempt: int = 0
    """Which attempt was killed for a true cause: it may be killed again, also by a supervisor that has forgotten why."""
    soft_seen: tuple[int, float] = (0, 0.0)
    """Attempt and time at which a supervisor first saw it above a soft line."""
    births: list[int] = field(default_factory=list)
    watched: tuple[Any, float] = (None, 0.0)
    """Which supervisor watches a living trainer, and since when without a break."""

    @property
    def cutoff_seconds(self) -> float | None:
        """The hard deadline in true seconds."""
        cutoff_at = self.run.effective_cutoff()
        return None if cutoff_at is None or self.offset_seconds is None else true_seconds(cutoff_at) - self.offset_seconds


class Laws:
    def __init__(self, world: World, coverage: Any) -> None:
        self.world, self.coverage = world, coverage
        self.truths: dict[str, Truth] = {}
        self.machines: list[Machine] = []
        self.looks: dict[tuple[str, Any], tuple[float, Machine]] = {}
        self.measured_at: dict[str, float] = {}
        self.owners: dict[str, Owner] = {}
        """Whom each host has to obey: who came first, or took it over, and of that one the newest life that has spoken to it."""
        self.ended: dict[tuple[str, str], float] = {}
        """By host, when it was told of a run that its work goes on elsewhere."""
        self.counts: Counter[str] = Counter()
        self.listeners: list[Callable[[VirtualRun, RunState], bool]] = []
        """Who waits for a run to come to some state on its host. The first one that says it is for him is the only one that hears of it."""
        world.after(WATCH_SECONDS, self._watch)

    def broken(self, law: str, text: str) -> None:
        raise Broken(law, text)

    # Whom a host obeys, and what it must not start any more.

    def obeyed(self, machine: Machine, order: str, owner: Owner) -> None:
        """An order is carried out."""
        rightful = self.owners.setdefault(machine.name, owner)
        is_same_number = owner.generation == rightful.generation
        if owner.coordinator_id != rightful.coordinator_id or owner.generation < rightful.generation or (is_same_number and owner != rightful):
            self.broken("owner", f"{machine.name} obeys a {order} of {owner}, and has been spoken to by {rightful}")
        self.owners[machine.name] = owner

    def taken_over(self, machine: Machine, owner: Owner) -> None:
        """A person has said whom this host obeys from now on."""
        self.owners[machine.name] = owner

    def told_to_end(self, machine: Machine, run_id: str) -> None:
        self.ended.setdefault((machine.name, run_id), self.world.seconds)

    # Runs and their supervisors.

    def created(self, run: VirtualRun) -> None:
        if (run.machine.name, run.run_id) in self.ended:
            self.broken("fence", f"{run.run_id} is started on {run.machine.name}, which was told that it goes on elsewhere")
        if run.run_id in self.truths:
            self.broken("5", f"{run.run_id} gets a second run directory, on {run.machine.name}")
        self.truths[run.run_id] = Truth(run, run.machine.boots)

    def anchored(self, run: VirtualRun, anchor: Anchor) -> None:
        """A supervisor counts from here on in this boot. Its clock may be wrong, but the orders before it say what time it is at least."""
        truth = self.truths[run.run_id]
        truth.offset_seconds = true_seconds(anchor.now) - self.world.seconds if self._knows_time(run) else None
        if truth.offset_seconds is None:
            return
        # The order that ends what was left behind is made by the host itself, whose own clock may be the one in doubt.
        told = max(run.spec.created_at, told_at(run.want) or run.spec.created_at)
        known_seconds = true_seconds(told) - self.world.seconds
        if truth.offset_seconds < known_seconds - 0.001:
            self.broken("10", f"the deadlines of {run.run_id} are counted from {known_seconds - truth.offset_seconds:.0f} s before its orders")

    def supervised(self, run: VirtualRun) -> None:
        self.counts["supervisors"] += 1

    def ordered(self, run: VirtualRun, want: WantOrder, applied: bool) -> None:
        self.counts["orders"] += 1

    def observed(self, run: VirtualRun, observation: Observation, seconds: float) -> None:
        """A look that was taken at `seconds` is read by somebody."""
        if len(self.looks) < LOOKS_KEPT_MAX:
            self.looks[run.run_id, observation.at] = seconds, run.machine

    def measured(self, machine: Machine) -> None:
        self.measured_at[machine.name] = self.world.seconds

    # 1: signals.

    def signalled(self, process: Process, number: int, sender: str, run_id: str) -> None:
        self.counts["signals"] += 1
        if process.run_id != run_id:
            self.broken("1", f"{sender} of {run_id} sends {signal.Signals(number).name} to {process!r}")
        wanted = ("supervisor",) if sender == "guard" else ("trainer", "worker")
        if process.role not in wanted:
            self.broken("1", f"{sender} of {run_id} sends {signal.Signals(number).name} to its own {process!r}")
        if process.machine.is_hiding and process.role in ("trainer", "worker"):
            self.broken("1", f"{sender} signals {process!r}, whose fields can't be read")

    # 8: who a connection speaks to.

    def trusted(self, machine: Machine, key: HostKey) -> None:
        self.counts["connections"] += 1
        if key != machine.key:
            self.broken("8", f"orders for {machine.name} are given to whoever shows {key}")

    # 2, 4, 5: births.

    def born(self, run: VirtualRun, child: Process, record: AttemptRecord) -> None:
        self.counts["births"] += 1
        truth = self.truths[run.run_id]
        for machine in self.machines:
            for process in machine.processes.values():
                if process.run_id == run.run_id and process is not child and process.is_alive and process.role in ("trainer", "worker"):
                    self.broken("2", f"{child!r} is born while {process!r} lives")
        if record.attempt in truth.births:
            self.broken("2", f"attempt {record.attempt} of {run.run_id} is started twice")
        truth.births.append(record.attempt)
        if record.resume_step is not None:
            had = [each for each in (run.checkpoints.get(record.resume_step), run.seed()) if each is not None and each.step == record.resume_step]
            if not any(each.is_whole and each.digest == record.resume_digest for each in had):
                self.broken("4", f"{run.run_id} resumes from step {record.resume_step}, which does not verify")
        seed = run.seed()
        whole = max((step for step, found in run.checkpoints.items() if found.is_whole), default=None if seed is None else seed.step)
        told_at = self.ended.get((run.machine.name, run.run_id))
        if told_at is not None and self.world.seconds - told_at > GATE_SECONDS:
            self.broken("fence", f"attempt {record.attempt} of {run.run_id} is started, whose work goes on in another run")
        if whole != record.resume_step:
            self.broken("4", f"{run.run_id} resumes from {record.resume_step} although step {whole} verifies")

    # 3, 10, 11: stops have a true cause.

    def looked(self, run: VirtualRun, sight: HostSight) -> None:
        truth, attempt = self.truths[run.run_id], sight.attempt
        self.counts["looks"] += 1
        watcher = (run.supervisor, attempt.number) if attempt is not None and attempt.standing is Standing.VERIFIED else None
        has_slept = run.supervisor.process.hung_until > self.world.seconds - HELD_UP_SECONDS
        if watcher != truth.watched[0] or has_slept:
            truth.watched = (watcher, self.world.seconds)
        if attempt is None or attempt.standing is not Standing.VERIFIED or truth.soft_seen[0] == attempt.number:
            return
        if self._is_above(run, soft=True) and run.attempts[attempt.number].leader in run.machine.processes.values():
            truth.soft_seen = (attempt.number, self.world.seconds)

    def decided(self, run: VirtualRun, action: Action, sight: HostSight, history: History) -> None:
        if isinstance(action, Move):
            self.coverage.host[history.state, action.to] += 1
            any(listener(run, action.to) for listener in [*self.listeners])
            # What was asked for in time had its cause then; a power cut since may have set the deadline later by the time it took.
            truth = self.truths[run.run_id]
            was_asked = truth.asked_attempt == history.attempt and truth.asked_reason is Reason.DEADLINE
            if action.to is RunState.FINISHED and action.reason is Reason.DEADLINE and not was_asked:
                self._has_cause(run, action.reason, f"over: {action.detail}")
        elif isinstance(action, StartAttempt):
            self._may_start(run)
        elif isinstance(action, Ask):
            truth = self.truths[run.run_id]
            self._has_cause(run, action.reason, f"asked: {action.because}")
            truth.asked_attempt, truth.asked_at, truth.grace_seconds = history.attempt, self.world.seconds, action.grace_seconds
            truth.asked_reason = action.reason
        elif isinstance(action, KillTree):
            self._may_kill(run, action, history)

    def shim_acts(self, run: VirtualRun, due: Any) -> None:
        self._has_cause(run, Reason.DEADLINE, f"its shim does {due}")

    def _may_start(self, run: VirtualRun) -> None:
        cutoff_seconds = self.truths[run.run_id].cutoff_seconds
        if run.machine.is_disk_crowded:
            self.broken("11", f"a start of {run.run_id} is decided, and its disk has no room for what it would save")
        if not self._knows_time(run):
            self.broken("10", f"a start of {run.run_id} is decided before anybody knows what time it is on {run.machine.name}")
        living = run.living_tree()
        if living:
            self.broken("2", f"a start of {run.run_id} is decided while {living[0]!r} lives")
        if cutoff_seconds is not None and self.world.seconds > cutoff_seconds + CLOCK_SECONDS:
            self.broken("10", f"a start of {run.run_id} is decided {self.world.seconds - cutoff_seconds:.0f} s after its cutoff")

    def _knows_time(self, run: VirtualRun) -> bool:
        """Whether the time can be known on its machine: it was when the order came, and each boot since has to be told it."""
        return run.machine.boots == self.truths[run.run_id].boots or run.machine.knows_time

    def _may_kill(self, run: VirtualRun, action: KillTree, history: History) -> None:
        truth = self.truths[run.run_id]
        if truth.killed_attempt == history.attempt:
            return
        leader = run.attempts[history.attempt].leader
        if leader is None or not leader.is_alive:
            return  # what is left of a tree
        truth.killed_attempt = history.attempt
        if self._is_urgent(run):
            self._asked_in_time(run, action, history)
            return
        asked = truth.asked_attempt == history.attempt
        if not asked:
            self.broken("3", f"{run.run_id} is killed for {action.reason} without being asked: {action.because}")
        waited_seconds = self.world.seconds - truth.asked_at
        if waited_seconds < truth.grace_seconds and not run.is_damaged:  # how much of its grace was left may have been forgotten
            self.broken("3", f"{run.run_id} is killed {waited_seconds:.1f} s after it was asked, its grace is {truth.grace_seconds:.1f} s")

    def _asked_in_time(self, run: VirtualRun, action: KillTree, history: History) -> None:
        """Above the hard line at once is killed at once; but what was seen above the soft line before had to be asked then. A deadline
        comes as no surprise to whoever watches."""
        truth = self.truths[run.run_id]
        if action.reason is Reason.DEADLINE and truth.asked_attempt != history.attempt and abs(truth.offset_seconds or 0.0) < CLOCK_SECONDS:
            ladder_seconds = 1.25 * run.spec.stop.grace_ceiling_seconds + 2.0 + CLOCK_SECONDS
            # An earlier cutoff that comes late, over a road that was cut, is a surprise.
            watched_seconds = self.world.seconds - max(truth.watched[1], run.cutoff_told_at)
            if truth.watched[0] is not None and watched_seconds > ladder_seconds:
                self.broken("10", f"{run.run_id} is killed at its cutoff without being asked, watched for {watched_seconds:.0f} s: {action.because}")
        number, seen_at = truth.soft_seen
        if number == history.attempt and seen_at < self.world.seconds and truth.asked_attempt != history.attempt and not self._other_urgency(run):
            self.broken("3", f"{run.run_id} was seen above its soft line {self.world.seconds - seen_at:.1f} s ago and is killed without being asked")

    def _other_urgency(self, run: VirtualRun) -> bool:
        cutoff_seconds = self.truths[run.run_id].cutoff_seconds
        is_late = cutoff_seconds is not None and self.world.seconds >= cutoff_seconds - CLOCK_SECONDS
        return is_late or (run.want.want is Want.STOP and run.want.mode is StopMode.NOW)

    def _is_urgent(self, run: VirtualRun) -> bool:
        return self._other_urgency(run) or self._is_above(run, soft=False)

    def _is_above(self, run: VirtualRun, *, soft: bool) -> bool:
        caps, used = run.spec.caps, sum(process.bytes() for process in run.living_tree())
        cap_bytes = int(caps.host_bytes * caps.soft_fraction) if soft else caps.host_bytes
        floor_bytes = caps.floor_bytes if soft else caps.floor_bytes * FLOOR_HARD_FRACTION
        return used >= cap_bytes or run.machine.available_bytes() < floor_bytes

    def _has_cause(self, run: VirtualRun, reason: Reason, how: str) -> None:
        """5, 10, 11: neither a silent link, nor a stepped clock, nor a full disk is a reason to stop a trainer."""
        truth, spec = self.truths[run.run_id], run.spec
        if run.is_damaged and truth.asked_attempt == run.newest_attempt:
            return  # why it was stopped may have been forgotten, not that it was
        said = f"{run.run_id} is {how}, but"
        if reason in (Reason.USER, Reason.SUPERSEDED) and run.want.want is not Want.STOP:
            self.broken("5", f"{said} nobody ordered a stop")
        if reason in (Reason.MEMORY, Reason.HOST_MEMORY) and not self._is_above(run, soft=True):
            self.broken("11", f"{said} no line is reached")
        if reason is Reason.DEADLINE:
            cutoff_seconds = truth.cutoff_seconds
            ladder_seconds = 1.25 * spec.stop.grace_ceiling_seconds + 2.0 + CLOCK_SECONDS
            if cutoff_seconds is None or self.world.seconds < cutoff_seconds - ladder_seconds:
                left = "no" if cutoff_seconds is None else f"{cutoff_seconds - self.world.seconds:.0f} s to its"
                self.broken("10", f"{said} there is {left} deadline")
        speaks = run.trainer is not None and run.attempts[run.newest_attempt].leader is run.trainer.process
        if reason in (Reason.STALLED, Reason.LAUNCH_TIMEOUT) and speaks:
            silent_seconds = self.world.seconds - run.trainer.spoke_at
            limit_seconds = min(spec.stall.floor_seconds, spec.stall.launch_seconds) - LATE_SECONDS  # a launch counts from the decision
            if silent_seconds < limit_seconds:
                self.broken("11", f"{said} it spoke {silent_seconds:.0f} s ago")

    # 10: nobody lives beyond the cutoff.

    def _watch(self) -> None:
        self.world.after(WATCH_SECONDS, self._watch)
        for truth in self.truths.values():
            cutoff_seconds = truth.cutoff_seconds
            if cutoff_seconds is not None:
                cutoff_seconds = max(cutoff_seconds, truth.run.cutoff_told_at + LATE_SECONDS, truth.run.machine.shows_since + LATE_SECONDS)
            if cutoff_seconds is None or self.world.seconds < cutoff_seconds + LATE_SECONDS or not truth.run.machine.is_up:
                continue
            for process in truth.run.living_tree():
                if process.unkillable_until < cutoff_seconds and not self._is_excused(truth.run, process):
                    self.broken("10", f"{process!r} lives {self.world.seconds - cutoff_seconds:.0f} s after its cutoff")

    def _is_excused(self, run: VirtualRun, process: Process) -> bool:
        """Nobody who could end it lives, or it can't be proven to be ours."""
        recorded = run.attempts[run.newest_attempt].record
        shim_lives = any(each.run_id == run.run_id and each.role == "shim" and each.is_alive for each in run.machine.processes.values())
        supervisor = run.supervisor.process if run.supervisor is not None else None
        watches = supervisor is not None and supervisor.is_alive and supervisor.hung_until < self.world.seconds - LATE_SECONDS
        is_new = process.start_ticks / 100 + LATE_SECONDS > run.machine.boottime_seconds()
        return run.machine.is_hiding or recorded is None or not (shim_lives or watches) or is_new
