"""What people ask for in a story: sensible things or not, of runs and of hosts."""

from __future__ import annotations

from functools import partial
from typing import Any

from policies.facts import RunState, Split
from tests.sim.coordinator import Office
from tests.sim.world import World

PERSON_SECONDS = 25.0


class People:
    """Operators: they ask for things, sensible or not, and after a while they look at what waits for a person."""

    def __init__(self, world: World, office: Office, *, leaves_at: float) -> None:
        self.world, self.office, self.leaves_at = world, office, leaves_at

    def plan(self, count: int) -> None:
        for _ in range(count):
            self.world.after(self.world.between(5.0, self.leaves_at), self._ask)
        self.world.after(PERSON_SECONDS, self._look)

    def leave(self, kind: str, **body: Any) -> None:
        """A request; while the coordinator is down its caller is told so, and gives up."""
        if self.office.loop is not None:
            self.world.say("person", f"{kind} { {name: value for name, value in body.items() if name not in ('plan', 'plan_text')} }")
            number = self.office.loop.inbox.leave(kind, {"actor": "user:sim", **body})
            self.office.laws.unanswered.add(number)

    def _ask(self) -> None:
        dice, loop = self.world.random, self.office.loop
        if loop is None or not loop.fleet.runs:
            return
        runs = [run.candidate for run in loop.fleet.runs.values()]
        campaigns = list(loop.fleet.campaigns)
        target = dice.choice((dice.choice(runs), dice.choice(campaigns), "all", "nobody"))
        kind = dice.choice(("stop", "stop", "stop", "resume", "resume", "open", "host", "host"))
        if kind == "host":
            self._ask_of_a_host()
        elif kind == "stop":
            self.leave("stop", target=target, mode=dice.choice(("graceful", "graceful", "now")))
            if self.world.chance(0.7):
                self.world.after(self.world.between(0.5, 60.0), self.leave_resume, target)
        elif kind == "resume":
            self.leave("resume", target=target)
        else:
            split = dice.choice((Split.TEST, Split.HOLDOUT, Split.CALIBRATION)).value
            self.leave("open", campaign=dice.choice(campaigns), split=split, because=dice.choice(("", "it counts now")))

    def _ask_of_a_host(self) -> None:
        kind, dice = self.world.random.choice(("drain", "undrain", "fence", "clear")), self.world.random
        self.leave(kind, target=dice.choice([*self.office.networks]), because="the fan rattles", dry_run=kind == "fence" and self.world.chance(0.3))
        if kind == "drain":
            undrain = partial(self.leave, "undrain", target=dice.choice([*self.office.networks]), because="it is quiet")
            self.world.after(self.world.between(5.0, 90.0), undrain)

    def _fence(self) -> None:
        """Somebody takes a silent host for one that is off. It may be, or its road is cut and its trainers go on."""
        hosts = self.office.loop.fleet.hosts if self.office.loop is not None else {}
        silent = [name for name, host in hosts.items() if not host.reachable and host.fenced is None]
        if silent and self.world.chance(0.25):
            self.leave("fence", target=self.world.random.choice(silent), because="the board is dead")

    def leave_resume(self, target: str) -> None:
        if self.world.seconds < self.leaves_at:
            self.leave("resume", target=target)

    def _look(self) -> None:
        """What waits for a person is resumed or stopped, sooner or later."""
        if self.world.seconds < self.leaves_at:
            self.world.after(PERSON_SECONDS, self._look)
        loop = self.office.loop
        if loop is None:
            return
        self._fence()
        for run in loop.fleet.runs.values():
            if run.state is RunState.HELD and self.world.chance(0.4):
                self.leave("resume" if self.world.chance(0.7) else "stop", target=run.run_id)
