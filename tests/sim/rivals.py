"""A second coordinator that speaks to the same hosts while the first one lives, and the person who puts an end to it.

    a copy     the same coordinator, started once more from a copy of its state directory: its life has a higher number, or the same
    a stranger another coordinator, to which somebody has given a host by `takeover`

The first one is refused wherever the rival has been. In the end a person ends the rival, and takes back what it took: from a copy by
counting on from its number, from a stranger by a takeover. Mirrors fleetd/coordinator/takeover.py and ownership.take_over.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from fleetd.model import Owner, WantOrder
from fleetd.wire import encode
from policies.facts import GIB, Reason, StopMode, Want
from tests.sim.agent import VirtualAgent
from tests.sim.coordinator import Office
from tests.sim.machine import Machine
from tests.sim.world import World

TURN_SECONDS = 7.0
LIFE_SECONDS = (20.0, 120.0)
NOTICED_SECONDS = (1.0, 40.0)
"""After the rival's end, until somebody takes back what it has taken."""
AGAIN_SECONDS = 10.0
AHEAD_MAX = 3


class Rival:
    def __init__(self, world: World, office: Office, machine: Machine, *, ends_by: float) -> None:
        self.world, self.office, self.machine = world, office, machine
        self.is_copy = world.chance(0.5)
        number = office.generation + world.random.randint(1, AHEAD_MAX) if self.is_copy else 1
        self.owner = Owner(coordinator_id="c0ffee" if self.is_copy else "beef", generation=number, life="rival")
        self.ends_at = min(ends_by, world.seconds + world.between(*LIFE_SECONDS))
        self.has_it = False

    def begin(self) -> None:
        self.world.say("rival", f"{self.owner} begins to speak to {self.machine.name}")
        self._turn()

    def _turn(self) -> None:
        if self.world.seconds >= self.ends_at:
            self.world.say("rival", "is ended by a person")
            self.world.after(self.world.between(*NOTICED_SECONDS), self._take_back)
            return
        self.world.after(TURN_SECONDS, self._turn)
        if not self.office.networks[self.machine.name].is_open:
            return
        if not self.is_copy and not self.has_it and not self._takes_over(self.owner):
            return
        self._order("hello", {"left_behind": []})
        self._order("poll", {"after": {}, "wait_seconds": 0.0})
        if self.has_it and self.world.chance(0.3):
            self._stop_something()
        elif self.has_it and self.world.chance(0.3):
            self._start_something()

    def _order(self, order: str, body: dict[str, Any]) -> None:
        def answer(found: dict[str, Any]) -> None:
            self.has_it = self.has_it or "ok" in found

        VirtualAgent(self.machine).carry_out(order, body, self.owner, answer)

    def _takes_over(self, owner: Owner) -> bool:
        """As ownership.take_over: from whoever it obeys now, durably."""
        if self.machine.is_disk_full or not self.machine.is_up:
            return False
        self.world.say(self.machine.name, f"is taken over from {self.machine.owner} by {owner}")
        self.machine.owner = owner
        self.machine.laws.taken_over(self.machine, owner)
        return True

    def _stop_something(self) -> None:
        runs = list(self.machine.runs.values())
        if runs:
            run = self.world.random.choice(runs)
            order = WantOrder(
                sequence=run.want.sequence + 1, want=Want.STOP, mode=StopMode.GRACEFUL, reason=Reason.USER, actor="user:other",
                at=self.office.machine.moment().now,
            )
            self._order("want", {"run_id": run.run_id, "want": encode(order)})

    def _start_something(self) -> None:
        """A run of its own, which the first coordinator knows nothing of."""
        if not self.machine.runs or self.machine.available_bytes() < 3 * GIB:
            return
        like = self.world.random.choice(list(self.machine.runs.values()))
        now = self.office.machine.moment().now
        assert like.spec.deadline is not None
        deadline = replace(like.spec.deadline, cutoff_at=now + timedelta(seconds=90), final_at=now + timedelta(seconds=120))
        spec = replace(
            like.spec, run_id=f"rival-{self.world.happened}", campaign_id="rival", candidate="rival", owner=self.owner, created_at=now,
            deadline=deadline, caps=replace(like.spec.caps, host_bytes=GIB), continues=None,
        )
        want = WantOrder(sequence=1, want=Want.RUN, actor="user:other", at=now)
        self._order("start", {"spec": encode(spec), "task": like.task, "want": encode(want)})

    # What a person does about it.

    def _take_back(self) -> None:
        owner, office = self.machine.owner, self.office
        if owner is None or owner.life == "first" or (owner.coordinator_id == "c0ffee" and owner.generation < office.generation):
            return  # it never got so far, or the first one has counted on already
        if office.loop is None or not self.machine.is_up or self.machine.is_disk_full:
            self.world.after(AGAIN_SECONDS, self._take_back)
        elif owner.coordinator_id == "c0ffee":
            office.generation = owner.generation
            office.crash("by a person, so that its next life counts on from its copy's", 2.0)
        else:
            ours = Owner(coordinator_id="c0ffee", generation=office.generation, life="first")
            self._ask("takeover", {"host": encode(office.plan_of(self.machine)), "found": encode(owner)})
            self._takes_over(ours)
            self._ask("took_over", {"host": self.machine.name, "root": "/virtual", "from": encode(owner), "to": encode(ours), "runs": []})

    def _ask(self, kind: str, body: dict[str, Any]) -> None:
        assert self.office.loop is not None
        self.office.laws.unanswered.add(self.office.loop.inbox.leave(kind, {"actor": "user:sim", "because": "the other one is gone", **body}))
