"""Faults that wait for their moment: until some run comes to a state in which a random fault seldom finds one.

    backoff    its host loses power · its road is cut for long · its road is cut until the next attempt has failed, and that is forgotten
    stopping   its road is cut for long, where its tree can't be killed
    stuck      its road is cut for long
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from policies.facts import RunState
from tests.sim.coordinator import Office
from tests.sim.machine import Machine
from tests.sim.rundir import VirtualRun
from tests.sim.virtual_trainer import Fate
from tests.sim.world import World

LOST_SECONDS = (38.0, 80.0)
"""A road that is cut for so long makes a host silent."""
UNHEARD_SECONDS_MAX = 26.0
"""And one that is cut for so long at most does not."""
NEVER_AGAIN = Fate(kind="exit", code=30)
POLL_SECONDS = 0.5
PATIENCE_SECONDS = 8.0

Strike = Callable[[VirtualRun], None]


class Ambushes:
    world: World
    office: Office
    machines: list[Machine]
    heals_at: float

    def _mend(self, network: Any) -> None:
        raise NotImplementedError

    def _power(self, machine: Machine, down_seconds: float) -> None:
        raise NotImplementedError

    def _for_a_while(self, low: float, high: float, end: Callable[[], None]) -> None:
        raise NotImplementedError

    # What may be planned.

    def _reboot_at_backoff(self) -> None:
        self._lie_in_wait(RunState.BACKOFF, lambda run: self._power(run.machine, self.world.between(3.0, 40.0)))

    def _cut_at_backoff(self) -> None:
        self._lie_in_wait(RunState.BACKOFF, self._cut_road)

    def _forget_a_failure(self) -> None:
        self._lie_in_wait(RunState.BACKOFF, self._cut_until_it_has_failed)

    def _cut_at_stopping(self) -> None:
        self._lie_in_wait(RunState.STOPPING, self._cut_road, is_meant=lambda run: self._can_not_die(run))

    def _cut_at_stuck(self) -> None:
        self._lie_in_wait(RunState.STUCK, self._cut_road)

    # How.

    def _lie_in_wait(self, state: RunState, strike: Strike, *, is_meant: Callable[[VirtualRun], bool] = lambda run: True) -> None:
        """The next run that comes to this state is struck, once the coordinator knows; one run for each ambush."""
        listeners = self.office.laws.listeners

        def moved(run: VirtualRun, to: RunState) -> bool:
            is_now = to is state and self.world.seconds < self.heals_at and is_meant(run)
            if is_now:
                listeners.remove(moved)
                self.world.after(POLL_SECONDS, self._strike, run, state, strike, self.world.seconds + PATIENCE_SECONDS)
            return is_now

        listeners.append(moved)

    def _strike(self, run: VirtualRun, state: RunState, strike: Strike, until: float) -> None:
        loop = self.office.loop
        known = loop.fleet.runs.get(run.run_id) if loop is not None else None
        if self.world.seconds >= self.heals_at or run.shown_state is not state:
            return
        if known is not None and known.state is state:
            self.world.fault()
            strike(run)
        elif self.world.seconds < until:
            self.world.after(POLL_SECONDS, self._strike, run, state, strike, until)

    def _can_not_die(self, run: VirtualRun) -> bool:
        return any(process.unkillable_until > self.world.seconds + LOST_SECONDS[0] for process in run.living_tree())

    def _cut_road(self, run: VirtualRun) -> None:
        self._for_a_while(*LOST_SECONDS, partial(self._mend, self._cut_off(run)))

    def _cut_off(self, run: VirtualRun) -> Any:
        network = self.office.networks[run.machine.name]
        network.is_cut = True
        self.world.say("network", f"the road to {run.machine.name} is cut, where {run.spec.candidate} is {run.shown_state}")
        return network

    def _cut_until_it_has_failed(self, run: VirtualRun) -> None:
        run.machine.nature.doomed[run.run_id] = NEVER_AGAIN
        self._forget_the_end(run, self._cut_off(run), self.world.seconds + UNHEARD_SECONDS_MAX)

    def _forget_the_end(self, run: VirtualRun, network: Any, until: float) -> None:
        """Once it has failed or its time is up: what it had to tell meanwhile is lost, and the road is good again."""
        machine, is_over = run.machine, self.world.seconds >= min(until, self.heals_at)
        if run.shown_state is not RunState.FAILED and not is_over:
            self.world.after(POLL_SECONDS, self._forget_the_end, run, network, until)
            return
        if machine.is_up and not is_over and run.spool.last > run.acknowledged:
            run.damage_spool(keeps_some=self.world.chance(0.3))
            self.world.say(machine.name, f"the journal of {run.spec.candidate} is damaged, {len(run.spool.entries)} notices still read")
            if run.is_locked():
                run.supervisor.process.leave(int(signal.SIGKILL))
        self._mend(network)
