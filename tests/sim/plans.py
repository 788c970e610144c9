"""Random plans, and the nature of the trainers in them: how each candidate trains and what befalls each attempt."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from fleetd.campaign import AfterFreeze, CandidatePlan, DataRole, HostPlan, Notify, Plan, ReserveTerms
from fleetd.model import RestartTerms, StallTerms, StopTerms
from policies.facts import GIB, CapGrade, OnReboot, RunKind, SignalTarget, Split
from tests.sim.rundir import VirtualRun
from tests.sim.virtual_trainer import GOOD, Fate, Habits
from tests.sim.world import World

FATES = (
    "bad_pilot", "exit", "signal", "stall", "silent_launch", "deaf", "slow_save", "grow", "grow", "grow_hard", "limit", "leak", "leak_hard",
    "no_exec",
)
EXITS = (1, 10, 20, 20, 30, 31, 32, 40, 137)
SIGNALS = (signal.SIGSEGV, signal.SIGKILL, signal.SIGTERM, signal.SIGABRT)
GROWTHS = (0.02 * GIB, 0.1 * GIB, 0.5 * GIB, 4.0 * GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """What a story is about: the faults that may happen (all when empty), the fates of attempts, the share of plain commands."""

    faults: tuple[str, ...] = ()
    fates: tuple[str, ...] = FATES
    misfortune: float | None = None
    commands: float = 0.12
    early_stops: float = 0.05
    pilots: float | None = None
    """The share of candidates that ask for a pilot; drawn for each campaign where it is not given."""
    within: float = 1.0
    """The share of its time of trouble in which a story's faults begin: what waits for its moment has to be there early."""
    exits: tuple[int, ...] = EXITS
    at_once: float = 0.15
    """The share of attempts whose fate is there before their first step."""
    restarts: tuple[int, ...] = (0, 1, 3)
    first_seconds: tuple[float, ...] = (1.0, 1.0, 40.0)
    """How long a run waits before its first other attempt."""
    holds: float = 0.25
    """The share of candidates that a reboot leaves to a person."""
    damage: float = 0.4
    """Where jobs find damaged bytes: the share of stories in which the first of them do."""


ANYTHING = Theme()
THEMES = (
    ANYTHING, ANYTHING, ANYTHING, ANYTHING,
    Theme(
        faults=("unkillable", "unkillable", "hog", "cut", "kill_trainer"), fates=("grow_hard", "leak_hard", "grow", "leak", "deaf", "slow_save"),
        misfortune=0.8,
    ),
    Theme(faults=("cut", "cut", "cut", "reboot"), fates=("exit", "exit", "limit", "grow_hard", "no_exec"), misfortune=0.8),
    Theme(faults=("damage_journal", "damage_journal", "cut", "crash", "reboot", "kill_supervisor"), misfortune=0.6),
    Theme(faults=("forget_in_silence", "forget_in_silence", "damage_journal"), fates=("exit", "exit", "limit", "grow_hard"), misfortune=0.9),
    Theme(commands=0.9, faults=("cut", "crash", "reboot", "kill_trainer", "kill_both")),
    Theme(faults=("damage_job", "crash_between", "cut", "full_office", "full_host"), early_stops=0.8),
)
LATER_THEMES = (
    *THEMES,
    Theme(faults=("rival", "rival", "crash", "cut", "hold_a_start")),
    Theme(faults=("hold_a_start", "hold_a_start", "cut", "lose_history", "crash_between"), fates=("exit", "limit")),
)
"""From the second edition on."""
NEWEST_THEMES = (
    *LATER_THEMES,
    Theme(
        faults=("forget_a_failure", "forget_a_failure", "forget_a_failure", "reboot_at_backoff", "reboot_at_backoff", "cut_at_backoff"),
        within=0.2, fates=("exit",), misfortune=0.9, exits=(20, 20, 20, 30), at_once=0.8, restarts=(1, 3, 3),
        first_seconds=(8.0, 12.0, 12.0, 40.0), holds=0.8, pilots=0.0, commands=0.0, early_stops=0.0,
    ),
    Theme(
        faults=("cut_at_stopping", "cut_at_stuck", "cut_at_stuck", "unkillable"), within=0.5,
        fates=("grow_hard", "grow_hard", "leak_hard"), misfortune=0.8,
    ),
    Theme(faults=("damage_job", "crash"), damage=0.8),
)
"""From the third edition on: what is rare by chance alone."""


class Nature:
    """What the code under test can't know: habits of candidates and fates of attempts. `misfortune` is the share of attempts that go wrong."""

    def __init__(self, world: World, misfortune: float, theme: Theme = ANYTHING) -> None:
        self.world, self.misfortune, self.theme = world, misfortune, theme
        self._habits: dict[str, Habits] = {}
        self.doomed: dict[str, Fate] = {}
        """By run, what befalls its next attempt, whatever the dice say."""

    def habits(self, run: VirtualRun) -> Habits:
        if run.run_id not in self._habits:
            self._habits[run.run_id] = self._draw(run)
        return self._habits[run.run_id]

    def _draw(self, run: VirtualRun) -> Habits:
        world = self.world
        steps = world.random.choice((8, 20, 40, 80))
        every = world.random.choice((4, 10, 30))
        return Habits(
            steps=steps, step_seconds=world.between(1.0, 6.0), save_every=world.random.choice((2, 5, 9, 30)), save_seconds=world.between(0.2, 2.0),
            validate_every=every, validation_seconds=world.between(1.0, 12.0), launch_seconds=world.between(0.5, 8.0),
            quality=world.random.choice((0.0, 0.5, 1.0, 1.2)), worker_count=world.random.choice((0, 0, 1, 2)),
            base_bytes=int(run.spec.caps.host_bytes * 0.5), command_seconds=world.between(20.0, 400.0), command_hears=world.chance(0.8),
        )

    def fate(self, run: VirtualRun) -> Fate:
        world = self.world
        if (doom := self.doomed.pop(run.run_id, None)) is not None:
            return doom
        if not world.chance(self.misfortune):
            return GOOD
        kind = world.random.choice(self.theme.fates)
        codes = {"exit": world.random.choice(self.theme.exits), "leak_hard": 20, "signal": int(world.random.choice(SIGNALS))}
        at_step = 0 if kind == "silent_launch" or world.chance(self.theme.at_once) else world.random.randint(1, 12)
        return Fate(kind=kind, at_step=at_step, code=codes.get(kind, 0), growth=world.random.choice(GROWTHS))


def random_plan(world: World, number: int, hosts: tuple[HostPlan, ...], theme: Theme = ANYTHING) -> Plan:
    """A campaign of minutes: a few candidates on some of the hosts, with tight bounds so that every rule comes into play."""
    dice = world.random
    own = hosts if world.chance(0.6) else (dice.choice(hosts),)
    pilots = dice.choice((0.0, 0.0, 0.6, 1.0)) if theme.pilots is None else theme.pilots
    names = ("low", "high", "wide")[:dice.choice((1, 2, 2, 3))]
    candidates = tuple(_candidate(world, f"{name}{number}", own, theme, pilots) for name in names)
    deadline_seconds = dice.choice((200.0, 300.0, 450.0, 700.0))
    reserved = (Split.TEST, Split.HOLDOUT)[:dice.choice((1, 2))]
    minimum_seconds = deadline_seconds * dice.choice((0.15, 0.25, 0.4))
    return Plan(
        name=f"demo{number}", plan_sha256=f"{dice.randrange(1 << 64):064x}", directory="/virtual", deadline_at=None,
        deadline_seconds=deadline_seconds,
        reserve=ReserveTerms(minimum_seconds=minimum_seconds, factor=1.3, margin_seconds=dice.choice((5.0, 60.0))), hosts=own,
        data=tuple(DataRole(split=split, path="shards", shard_split=split.value) for split in (Split.TRAIN, Split.VALIDATION, *reserved)),
        candidates=candidates,
        after_freeze=AfterFreeze(evaluate=reserved[:dice.choice((0, 1, 1, 2))], report=world.chance(0.8), memory_host_bytes=GIB),
        notify=(Notify(command=("mail",)),) if world.chance(0.2) else (),
    )


def _candidate(world: World, name: str, hosts: tuple[HostPlan, ...], theme: Theme, pilots: float) -> CandidatePlan:
    dice = world.random
    floor_seconds = dice.choice((2.0, 5.0))
    ours = CandidatePlan(
        name=name, host=dice.choice((*(host.name for host in hosts), "any")), kind=RunKind.TRAIN, task={"steps": 40, "window": 128},
        signal=SignalTarget.GROUP if world.chance(0.2) else SignalTarget.LEADER, memory_host_bytes=dice.choice((1, 2, 3)) * GIB,
        memory_accelerator_bytes=0, memory_demand=CapGrade.ENFORCED if world.chance(0.1) else CapGrade.SAMPLED,
        stop=StopTerms(grace_floor_seconds=floor_seconds, grace_ceiling_seconds=floor_seconds + dice.choice((5.0, 15.0, 30.0))),
        restarts=RestartTerms(
            restarts_max=dice.choice(theme.restarts), window_seconds=dice.choice((60.0, 600.0)),
            first_seconds=dice.choice(theme.first_seconds), ceiling_seconds=60.0,
        ),
        stall=StallTerms(launch_seconds=dice.choice((30.0, 60.0)), floor_seconds=dice.choice((25.0, 50.0)), factor=8.0),
        on_reboot=OnReboot.HOLD if world.chance(theme.holds) else OnReboot.RESUME,
    )
    if world.chance(pilots):
        ours = replace(ours, task={**(ours.task or {}), "pilot": {"steps": dice.choice((2, 5))}})
    return replace(ours, task=None, command=("sh", "-c", name)) if world.chance(theme.commands) else ours
