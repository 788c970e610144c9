"""Faults to plant, for each line of DESIGN section 9, for fences and owners: proof that the laws bite.

A plant replaces one function, of the code under test where the promise is kept there, else of the virtual edge that keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from fleetd import kept_clock
from fleetd.coordinator import board, decide, decide_campaigns, decide_hosts, decide_requests, decide_runs, document, host_keys, targets
from fleetd.coordinator.pen import Pen
from fleetd.host import causes, ownership, supervisor
from fleetd.host import decide as host_decide
from fleetd.host.history import RecordExit
from policies.deadlines import EffectiveTime
from policies.facts import CampaignStage, Reason, RunState, StopMode
from policies.freeze import Permitted
from tests.sim import agent, eyes, jobs, rundir
from tests.sim.machine import Process
from tests.sim.rundir import VirtualJournal, VirtualRun
from tests.sim.story import tell
from tests.sim.world import Broken

SEEDS_MAX = 60
SECONDS_MAX = 60.0
"""Of a processor: what else a machine has to do meanwhile is not the laws' fault."""

Patch = Callable[[Any, str, Any], None]


def by_bare_pid(patch: Patch) -> None:
    patch(eyes, "grip", lambda machine, recorded: machine.processes.get(recorded.pid) or real_grip(machine, recorded))


def unreadable_is_ours(patch: Patch) -> None:
    patch(eyes, "grip", lambda machine, recorded: _not_hidden(machine, recorded))


def _not_hidden(machine: Any, recorded: Any) -> Any:
    found = machine.processes.get(recorded.pid)
    return found if found is not None and found.start_ticks == recorded.start_ticks and found.is_alive else real_grip(machine, recorded)


def to_the_group(patch: Patch) -> None:
    """As kill(-pid): whoever runs on the machine under this user hears it."""
    def everybody(run: VirtualRun, targets: Iterable[Process], *numbers: int, sender: str) -> tuple[Any, ...]:
        return real_signal_group(run, [each for each in run.machine.processes.values() if each.is_alive], *numbers, sender=sender)
    patch(eyes, "signal_group", everybody)


def second_start(patch: Patch) -> None:
    """Neither the tree nor the lock is looked at: what outlived its leader is started over."""
    patch(host_decide, "_leftover", _conclude_at_once)
    patch(VirtualRun, "is_trainer_locked", lambda run: False)


def start_over_a_doubt(patch: Patch) -> None:
    """What can't be verified counts as dead."""
    patch(host_decide, "_is_provably_over", lambda sight, attempt: True)
    second_start(patch)


def _conclude_at_once(sight: Any, attempt: Any, history: Any) -> Any:
    if attempt.exit is None:
        return (RecordExit(because="nobody waits for the tree"),)
    return host_decide._conclude(sight, attempt, history, attempt.exit)


def kill_unasked(patch: Patch) -> None:
    def at_once(sight: Any) -> Any:
        cause = real_by_memory(sight)
        return None if cause is None else replace(cause, mode=StopMode.NOW)
    patch(causes, "_by_memory", at_once)


def kill_early(patch: Patch) -> None:
    patch(host_decide, "rung_at", lambda **given: real_rung_at(**{**given, "grace_seconds": 0.0}))


def resume_unverified(patch: Patch) -> None:
    patch(VirtualRun, "choose_resume", lambda run: (run.checkpoints[max(run.checkpoints)] if run.checkpoints else None, ()))


def copy_unverified(patch: Patch) -> None:
    patch(jobs, "verifies", lambda found, digest: True)


def restart_on_silence(patch: Patch) -> None:
    def impatient(pen: Pen) -> None:
        real_judge_silence(pen)
        for run in pen.fleet.runs.values():
            if run.state is RunState.LOST:
                pen.move_run(run.run_id, RunState.STARTING, "silent for too long")
    patch(decide, "judge_silence", impatient)


def place_elsewhere(patch: Patch) -> None:
    """A run whose host is silent is queued again, as if it had never been placed."""
    def elsewhere(pen: Pen) -> None:
        real_judge_silence(pen)
        for run in pen.fleet.runs.values():
            if run.state is RunState.LOST:
                pen.write("run_placed", {"spec": real_encode(run.spec)}, run=run.run_id, host=run.host, because="moved")
    patch(decide, "judge_silence", elsewhere)


def stop_when_the_link_is_down(patch: Patch) -> None:
    """A supervisor that takes the silence of its coordinator for an order."""
    def lonely(sight: Any) -> Any:
        found = real_by_order(sight)
        return found or (causes.Cause(Reason.USER, StopMode.GRACEFUL, "nobody asks any more") if sight.silent_seconds > 3.0 else None)
    patch(causes, "by_order", lonely)


def open_before_the_freeze(patch: Patch) -> None:
    early = frozenset({CampaignStage.TRAINING, CampaignStage.SELECTING, CampaignStage.FROZEN, CampaignStage.EVALUATED})
    patch(decide_campaigns, "AFTER_FREEZE", early)
    patch(targets, "AFTER_FREEZE", early)
    patch(jobs.VirtualJobs, "_frozen_of", lambda self, store: "nothing")


def open_twice(patch: Patch) -> None:
    patch(jobs, "may_open", lambda split, frozen, openings, because: Permitted(number=1 + sum(each.split == split for each in openings)))


def evaluate_another(patch: Patch) -> None:
    def another(campaign: Any, run: Any, host: Any) -> Any:
        task = real_build_task(campaign, run, host)
        if task is None or "models" not in task:
            return task
        return {**task, "models": {name: {**model, "digest": "0" * 64} for name, model in task["models"].items()}}
    patch(decide_runs, "build_task", another)


def old_as_new(patch: Patch) -> None:
    patch(board, "_age_seconds", lambda report, told_at: 0.0)


def unknown_as_zero(patch: Patch) -> None:
    def zero(self: Any, name: str) -> dict[str, Any]:
        found = real_field(self, name)
        return {**found, "value": found["value"] or 0}
    patch(document._Measured, "field", zero)


def host_believes_its_wall_clock(patch: Patch) -> None:
    patch(supervisor, "effective_time", lambda *, anchor, reading: EffectiveTime(now=reading.now, alarm=None))


def coordinator_believes_its_wall_clock(patch: Patch) -> None:
    patch(kept_clock, "effective_time", lambda *, anchor, reading: EffectiveTime(now=reading.now, alarm=None))


def no_deadline(patch: Patch) -> None:
    patch(causes, "_by_deadline", lambda sight, history: None)
    patch(eyes, "kill_tree", lambda run, record, *, sender: () if sender == "shim" else real_kill_tree(run, record, sender=sender))


def kill_when_the_journal_is_full(patch: Patch) -> None:
    """What pueue does: its state can't be saved, so every task has to go."""
    def panic(sight: Any) -> Any:
        return real_by_memory(sight) if sight.is_durable else causes.Cause(Reason.HOST_MEMORY, StopMode.GRACEFUL, "the state can't be saved")
    patch(causes, "_by_memory", panic)


def silence_on_a_full_disk(patch: Patch) -> None:
    patch(supervisor.Supervisor, "_silent_seconds", lambda self, moment: moment.boottime_seconds - self.follower.log_grew_seconds)


def start_before_the_record(patch: Patch) -> None:
    patch(VirtualJournal, "is_durable", property(lambda self: True))


def no_reason(patch: Patch) -> None:
    def silent(self: Pen, kind: str, *arguments: Any, **named: Any) -> None:
        real_write(self, kind, *arguments, **{**named, "because": ""})
    patch(Pen, "write", silent)


def change_without_an_event(patch: Patch) -> None:
    """The fleet is changed past the pen: replay can't know of it."""
    def secretly(pen: Pen) -> None:
        real_judge_silence(pen)
        for run in pen.fleet.runs.values():
            if run.state is RunState.LOST and run.attempt < 99:
                pen.fleet = replace(pen.fleet, runs={**pen.fleet.runs, run.run_id: replace(run, attempt=99)})
    patch(decide, "judge_silence", secretly)


def forget_what_files_tell(patch: Patch) -> None:
    patch(decide_hosts, "_RETOLD", frozenset[str]())


def count_on_over_a_loss(patch: Patch) -> None:
    """A salvaged spool goes on counting behind what it kept, as if nothing had been told after that."""
    patch(rundir, "number_after_loss", lambda acknowledged, losses: acknowledged)


def grant_a_stop_and_send_none(patch: Patch) -> None:
    patch(decide_requests, "_want", lambda *ignored: None)


def never_over(patch: Patch) -> None:
    """An exit that nobody recorded is waited for, for ever."""
    patch(supervisor, "decide", lambda sight, history: tuple(
        action for action in host_decide.decide(sight, history) if not isinstance(action, RecordExit)
    ))


def accept_any_key(patch: Patch) -> None:
    """What a client does that is told not to ask: whoever answers at the address is the host."""
    patch(host_keys, "judge", lambda shown, known: host_keys.Standing.ACCEPTED)


def accept_a_revoked_key(patch: Patch) -> None:
    """Any line of known_hosts with the key is good enough, whatever else stands there."""
    def found(shown: Any, known: Any) -> Any:
        return host_keys.Standing.ACCEPTED if any(each.key == shown for each in known) else host_keys.Standing.UNKNOWN
    patch(host_keys, "judge", found)


def start_without_room(patch: Patch) -> None:
    patch(host_decide, "_no_room", lambda sight, history: None)


def start_before_the_time_is_known(patch: Patch) -> None:
    """After a boot the wall clock is believed, whatever it shows."""
    patch(supervisor.Supervisor, "_clock_doubted_seconds", lambda self, moment: None)


def obey_an_older_life(patch: Patch) -> None:
    patch(ownership, "_refuse_strangers", lambda paths, found, owner: None)


def obey_two_masters(patch: Patch) -> None:
    """Whoever takes a host over shares it with the one before."""
    obey_an_older_life(patch)


def obey_a_copy(patch: Patch) -> None:
    """The number alone says who is obeyed, and a copy of the state directory has counted to the same one."""
    patch(ownership, "_refuse_strangers", lambda paths, found, owner: real_refuse(paths, found, replace(owner, life=found.life)))


def start_what_goes_on_elsewhere(patch: Patch) -> None:
    """An order to start that comes late, after the fence and after the host was told, is carried out as any other."""
    patch(agent.VirtualAgent, "_is_never_started", lambda self, run_id: False)


def unfence_at_the_first_word(patch: Patch) -> None:
    def at_once(pen: Pen, poll: Any) -> None:
        known = pen.fleet.hosts.get(poll.host)
        if known is not None and known.fenced is not None:
            pen.write("host_unfenced", {"runs": list(known.superseded)}, host=poll.host, because="it answers")
    patch(decide_hosts, "judge_returned", at_once)


real_grip, real_signal_group, real_kill_tree = eyes.grip, eyes.signal_group, eyes.kill_tree
real_by_memory, real_by_order, real_rung_at = causes._by_memory, causes.by_order, host_decide.rung_at
real_judge_silence, real_build_task, real_field, real_write = decide.judge_silence, decide_runs.build_task, document._Measured.field, Pen.write
real_encode, real_refuse = decide_runs.encode, ownership._refuse_strangers


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault, the line of section 9 that it breaks, and the faults of the world under which it shows itself: on a full disk, where disks fill
    up. `also`: what else it may break first in some stories."""

    law: str
    act: Callable[[Patch], None]
    about: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.law}-{self.act.__name__}"


@dataclass(frozen=True, slots=True)
class Caught:
    seed: int
    seconds: float
    processor_seconds: float
    text: str


PLANTS = (
    Plant("1", by_bare_pid, ("reboot", "kill_both")),
    Plant("1", unreadable_is_ours, ("hide",)),
    Plant("1", to_the_group),
    Plant("2", second_start, ("kill_trainer", "kill_both"), ("liveness",)),
    Plant("2", start_over_a_doubt, ("hide", "kill_shim"), ("liveness",)),
    Plant("3", kill_unasked, ("hog",)),
    Plant("3", kill_early),
    Plant("4", resume_unverified, ("rot", "kill_trainer")),
    Plant("4", copy_unverified, ("rot", "cut")),
    Plant("5", restart_on_silence, ("cut",)),
    Plant("5", place_elsewhere, ("cut",)),
    Plant("5", stop_when_the_link_is_down, ("cut",)),
    Plant("6", open_before_the_freeze),
    Plant("6", open_twice, ("crash", "crash_between")),
    Plant("7", evaluate_another),
    Plant("8", accept_any_key, ("impostor",)),
    Plant("8", accept_a_revoked_key, ("impostor",)),
    Plant("9", old_as_new, ("kill_supervisor", "cut")),
    Plant("9", unknown_as_zero),
    Plant("10", host_believes_its_wall_clock, ("step_host",), ("3",)),
    Plant("10", coordinator_believes_its_wall_clock, ("step_office",), ("9",)),
    Plant("10", no_deadline),
    Plant("10", start_before_the_time_is_known, ("reboot",)),
    Plant("11", kill_when_the_journal_is_full, ("full_host",)),
    Plant("11", silence_on_a_full_disk, ("full_host_for_long",)),
    Plant("11", start_without_room, ("crowd_host", "kill_trainer")),
    Plant("12", start_before_the_record, ("full_office",)),
    Plant("12", no_reason),
    Plant("12", change_without_an_event, ("cut", "crash")),
    Plant("12", forget_what_files_tell, ("damage_journal", "forget_in_silence")),
    Plant("12", count_on_over_a_loss, ("damage_journal", "forget_in_silence")),
    Plant("fence", start_what_goes_on_elsewhere, ("hold_a_start",)),
    Plant("fence", unfence_at_the_first_word, ("cut",)),
    Plant("owner", obey_an_older_life, ("hold_a_start", "crash")),
    Plant("owner", obey_two_masters, ("rival",)),
    Plant("owner", obey_a_copy, ("rival", "crash")),
    Plant("liveness", grant_a_stop_and_send_none, ("crash",)),
    Plant("liveness", never_over, ("kill_shim", "kill_both")),
)


def catch(plant: Plant) -> Caught | str:
    """Story after story over the planted fault, until one breaks its law. What happened instead, where none does."""
    began, processor_began, others = time.monotonic(), time.process_time(), 0
    with ExitStack() as planted:
        plant.act(lambda where, name, what: planted.enter_context(mock.patch.object(where, name, what)))
        for seed in range(1, SEEDS_MAX + 1):
            fault = tell(seed, about=plant.about).fault
            if isinstance(fault, Broken) and fault.law == plant.law:
                return Caught(seed, time.monotonic() - began, time.process_time() - processor_began, str(fault))
            if fault is not None and not (isinstance(fault, Broken) and fault.law in plant.also):
                return f"seed {seed} found something else: {fault!r}"
            others += fault is not None
    return f"no story up to seed {SEEDS_MAX} caught it; {others} broke another law"


def show() -> int:
    """Every plant with the story that caught it. 1 when one was not caught within a minute."""
    missed = []
    print(f"{'planted':<42} {'story':>5} {'seconds':>8} {'of a processor':>14}  what it broke")
    for plant in PLANTS:
        caught = catch(plant)
        if isinstance(caught, str):
            print(f"{plant.name:<42} {'none':>5} {'':>23}  {caught}", flush=True)
        else:
            print(f"{plant.name:<42} {caught.seed:>5} {caught.seconds:>8.1f} {caught.processor_seconds:>14.1f}  {caught.text}", flush=True)
        if isinstance(caught, str) or caught.processor_seconds > SECONDS_MAX:
            missed.append(plant.name)
    lines = {plant.law for plant in PLANTS if plant.law.isdigit()}
    words = f"not caught within {SECONDS_MAX:.0f} s of a processor: {', '.join(missed) or 'none'}"
    print(f"{len(PLANTS)} faults planted for {len(lines)} lines of DESIGN section 9; {words}")
    return 1 if missed else 0
