"""One seed, one story: a fleet of virtual machines, a few campaigns, faults until the heal, and every law until the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fleetd import logs
from fleetd.coordinator.targets import is_over
from fleetd.kept_clock import KeptClock
from fleetd.wire import encode
from policies.facts import GIB
from policies.lifecycle import SETTLED
from tests.sim.coordinator import Office
from tests.sim.coverage import Coverage
from tests.sim.faults import Faults
from tests.sim.laws_office import FleetLaws
from tests.sim.link import Network
from tests.sim.machine import Machine
from tests.sim.people import People
from tests.sim.plans import LATER_THEMES, NEWEST_THEMES, THEMES, Nature, Theme, random_plan
from tests.sim.world import Broken, World

LOOK_SECONDS = 15.0
PATIENCE_SECONDS = 900.0
"""After the last deadline and the heal, everything has to be over within this."""
LINES_SHOWN = 60
EDITION = 3
"""What may happen in a story grows. A seed tells its old story in the edition in which it was found."""


@dataclass
class Told:
    """How a story went. `fault` is None when every law held."""

    seed: int
    campaigns: int
    troubled: int
    """Campaigns during whose life something went wrong that was planned to: a kill, a cut, a full disk, ..."""
    state_events: int
    happened: int
    seconds: float
    fault: BaseException | None
    lines: list[str]


class Story:
    def __init__(self, seed: int, coverage: Coverage, *, echo: bool = False, about: tuple[str, ...] = (), edition: int = EDITION) -> None:
        self.world = World(seed, echo=echo)
        world, dice = self.world, self.world.random
        self.laws = FleetLaws(world, coverage)
        calm = world.chance(0.1) and not about
        self.theme = theme = Theme(faults=about) if about else dice.choice({1: THEMES, 2: LATER_THEMES}.get(edition, NEWEST_THEMES))
        misfortune = dice.choice((0.1, 0.3, 0.6)) if theme.misfortune is None else theme.misfortune
        nature = Nature(world, 0.0 if calm else misfortune, theme)
        self.machines = [
            Machine(
                world, name, self.laws, memory_bytes=dice.choice((5, 8, 16)) * GIB, has_cgroup=world.chance(0.7), reuse=dice.choice((0.2, 0.8)),
            )
            for name in ("gx10", "spark-a", "spark-b")[:dice.choice((1, 2, 2, 3))]
        ]
        for machine in self.machines:
            machine.nature, machine.laziness, machine.reads_exits = nature, dice.choice((1.0, 3.0, 4.0)), world.chance(0.5)
            machine.offset_seconds = dice.choice((0.0, 0.0, 0.5, -2.0, 100.0))
            if edition > 1 and world.chance(0.7):
                machine.kept, machine.has_ntp = KeptClock(), world.chance(0.6)
                machine.synchronised_at = 0.0 if machine.has_ntp else math.inf
        self.laws.machines = self.machines
        self.networks = {machine.name: Network(machine) for machine in self.machines}
        self.office = Office(world, Machine(world, "office", self.laws), self.networks, self.laws, pace_seconds=dice.choice((1.0, 4.0, 6.0)))
        self.laws.office = self.office
        self.launches = dice.choice((1, 2, 3))
        self.last_seconds = 0.0
        heals_at = dice.choice((150.0, 400.0, 800.0))
        self.heals_at = heals_at
        self.nature = nature
        self.people = People(world, self.office, leaves_at=heals_at)
        faults = Faults(world, self.office, self.machines, heals_at=heals_at, edition=edition)
        if not calm:
            faults.plan(dice.choice((2, 6, 15, 30)), theme.faults, theme.within)
        self.people.plan(dice.choice((0, 1, 3, 8)))
        if "damage_job" in theme.faults and world.chance(theme.damage):
            self.office.archive.fails[dice.choice(("preflight", "stage"))] = 1

    def play(self) -> None:
        world, office = self.world, self.office
        hosts = tuple(office.plan_of(machine) for machine in self.machines)
        world.after(0.0, office.start)
        for number in range(self.launches):
            plan = random_plan(world, number, hosts, self.theme)
            begins_at = 1.0 if number == 0 else world.between(1.0, 200.0)
            world.after(begins_at, self._launch, plan, 0)
            assert plan.deadline_seconds is not None
            self.last_seconds = max(self.last_seconds, begins_at + plan.deadline_seconds)
        world.after(LOOK_SECONDS, self._look)
        world.after(self.heals_at, self._heal)
        self.last_seconds = max(self.last_seconds, self.heals_at) + PATIENCE_SECONDS
        world.run(self.last_seconds, self._is_over)
        self._end()

    def _launch(self, plan: Any, tries: int) -> None:
        """A person launches until it is accepted, but not for ever."""
        names = {campaign.plan.name for campaign in self.office.loop.fleet.campaigns.values()} if self.office.loop else set()
        if plan.name in names or tries > 6:
            return
        self.people.leave("launch", plan=encode(plan), plan_text="name: demo")
        if self.world.chance(self.theme.early_stops):
            self.world.after(self.world.between(0.1, 9.0), partial(self.people.leave, "stop", target="all", mode="graceful"))
        self.world.after(45.0, self._launch, plan, tries + 1)

    def _look(self) -> None:
        self.laws.check_document(self.office.show())
        self.world.after(LOOK_SECONDS, self._look)

    def _heal(self) -> None:
        """No fault begins any more, and whoever set a wrong clock right starts the coordinator again, as its status asks for."""
        self.nature.misfortune = 0.0
        office = self.office
        if abs(office.machine.offset_seconds) > 1.0 or abs(self.laws.offset_seconds) > 1.0:
            office.machine.step_clock(-office.machine.offset_seconds)
            office.kept_clock = KeptClock()  # its clock.json is removed, as the status says
            office.crash("by a person, its clock is right again", 2.0)
        self.world.say("world", "every fault is over")

    def _is_over(self) -> bool:
        """Nothing is left to happen that could matter."""
        if self.world.seconds < self.heals_at * 0.5 or self.world.happened % 64:
            return False
        loop = self.office.loop
        if loop is None or len(loop.fleet.campaigns) < self.launches or self.laws.unanswered:
            return False
        fleet = loop.fleet
        settled = all(run.state in SETTLED for run in fleet.runs.values()) and all(is_over(campaign) for campaign in fleet.campaigns.values())
        alive = any(run.is_locked() or run.living_tree() for machine in self.machines for run in machine.runs.values())
        return settled and not alive and loop.journal.is_durable

    def troubled(self, campaigns: Iterable[str]) -> int:
        lives, faults_at = self.laws.lives, self.world.faults_at
        return sum(any(lives[name][0] <= at <= lives[name][1] for at in faults_at) for name in campaigns)

    def _end(self) -> None:
        if self.office.loop is None:
            self.world.run(self.world.seconds + 60.0)
        self.laws.check_document(self.office.show())
        self.laws.settled()
        self.laws.whole_history()
        self.laws.whole_knowledge()


def tell(seed: int, coverage: Coverage | None = None, *, echo: bool = False, about: tuple[str, ...] = (), edition: int = EDITION) -> Told:
    """Play the story of this seed; `about` names the only faults that may happen in it."""
    logger, was_disabled = logs.logger, logs.logger.disabled
    logger.disabled = True
    logging.captureWarnings(False)
    story = Story(seed, coverage or Coverage(), echo=echo, about=about, edition=edition)
    fault: BaseException | None = None
    try:
        story.play()
    except (Broken, Exception) as found:
        fault = found
    finally:
        logger.disabled = was_disabled
    counts, fleet = story.laws.counts, story.office.loop.fleet if story.office.loop else None
    lines = [f"{seconds:9.2f} {who:>12}  {text}" for seconds, who, text in list(story.world.lines)[-LINES_SHOWN:]] if fault else []
    return Told(
        seed=seed, campaigns=len(fleet.campaigns) if fleet else 0, troubled=story.troubled(fleet.campaigns if fleet else ()),
        state_events=counts["events"], happened=story.world.happened, seconds=story.world.seconds, fault=fault, lines=lines,
    )
