"""One virtual host with one run and no coordinator: a small stage for a story about a supervisor and its trainer."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from fleetd.model import Caps, DeadlineTerms, Notice, Owner, RunSpec, StallTerms, StopTerms, WantOrder
from policies.facts import GIB, RunKind, RunState, StopMode, Want
from tests.sim.coverage import Coverage
from tests.sim.laws import Laws
from tests.sim.machine import Machine
from tests.sim.plans import Nature
from tests.sim.rundir import VirtualRun
from tests.sim.supervisor import start_supervisor
from tests.sim.virtual_trainer import Fate, Habits
from tests.sim.world import EPOCH, World


class Bench:
    def __init__(self, *, habits: Habits | None = None, fate: Fate | None = None, clock_seconds: float = 0.0, **changes: Any) -> None:
        self.world = World(1)
        self.laws = Laws(self.world, Coverage())
        self.machine = Machine(self.world, "gx10", self.laws)
        self.laws.machines = [self.machine]
        self.machine.offset_seconds = clock_seconds
        self.machine.nature = _Given(self.world, habits or Habits(), fate)
        spec = RunSpec(
            run_id="r1", campaign_id="c1", candidate="low", kind=RunKind.TRAIN, owner=Owner(coordinator_id="k1", generation=1), created_at=EPOCH,
            argv=("trainer",), environment={}, release_digest="", caps=Caps(host_bytes=4 * GIB, accelerator_bytes=4 * GIB, floor_bytes=GIB // 2),
            deadline=DeadlineTerms(final_at=EPOCH + timedelta(seconds=7200), cutoff_at=EPOCH + timedelta(seconds=3600)),
            stop=StopTerms(grace_floor_seconds=5.0, grace_ceiling_seconds=60.0),
            stall=StallTerms(launch_seconds=60.0, floor_seconds=30.0, factor=5.0),
        )
        self.run = VirtualRun(self.machine, replace(spec, **changes), None, WantOrder(sequence=1, want=Want.RUN, actor="user:test", at=EPOCH))
        self.machine.runs["r1"] = self.run
        self.laws.created(self.run)
        start_supervisor(self.run)

    @property
    def state(self) -> RunState:
        state: RunState = self.run.supervisor.history.state
        return state

    def notices(self, kind: str) -> list[Notice]:
        return [notice for notice in self.run.notices(0, 10_000) if notice.kind == kind]

    def order(self, want: Want, mode: StopMode = StopMode.GRACEFUL) -> None:
        sequence = self.run.want.sequence + 1
        self.run.apply_want(WantOrder(sequence=sequence, want=want, mode=mode, actor="user:test", at=self.machine.moment().now))

    def play(self, seconds: float) -> None:
        self.world.run(self.world.seconds + seconds)


class _Given(Nature):
    """A trainer with these habits, and a fate for its first attempt alone."""

    def __init__(self, world: World, habits: Habits, fate: Fate | None) -> None:
        super().__init__(world, 0.0)
        self._given, self._fate = habits, fate

    def habits(self, run: VirtualRun) -> Habits:
        return self._given

    def fate(self, run: VirtualRun) -> Fate:
        fate, self._fate = self._fate, None
        return fate or super().fate(run)
