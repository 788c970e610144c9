"""The laws that concern the coordinator: placing, silence, the freeze, the status document, and that history is whole."""

from __future__ import annotations

import math
from collections import Counter
from datetime import datetime
from typing import Any

from fleetd.coordinator.loop import replay_journal
from fleetd.coordinator.sight import Decision, Order, Reply
from fleetd.coordinator.targets import has_pilot, is_over
from fleetd.fleet import Event, Fleet, Run
from fleetd.wire import encode
from policies.facts import CampaignStage, Reason, RunKind, RunState, Split, Want
from policies.freeze import order_faults
from policies.lifecycle import SETTLED
from tests.sim.laws import CLOCK_SECONDS, Laws
from tests.sim.rundir import VirtualJournal, VirtualRun
from tests.sim.world import true_seconds

SETTLING_SECONDS = 400.0
FOUND_SECONDS = 60.0
LOST_SUPERVISOR_SECONDS = 90.0
"""A supervisor that was killed again and again is started ever later: SWEEP_WAIT_SECONDS_MAX and some."""
BREAK_SECONDS = 20.0
"""Between two answers to a poll. Longer, and the coordinator was not told what may have happened meanwhile."""
AGE_SECONDS = 5.0
"""How much younger than the truth an age may claim to be: what a message needs on its way."""
# The first look at a reserved split needs no reason; a second one is refused without it, which the ledger's own rule proves.
NO_REASON_NEEDED = frozenset({"run_added", "coordinator_started", "coordinator_stopped", "report_written", "open_asked", "split_opened"})
SEEN_FIELDS = ("pid", "identity", "step", "loss", "steps_per_second")


class FleetLaws(Laws):
    def __init__(self, world: Any, coverage: Any) -> None:
        super().__init__(world, coverage)
        self.office: Any = None
        self.placed: dict[str, int] = {}
        """By run, the number of the event that placed it."""
        self.durable: Fleet | None = None
        self.unanswered: set[int] = set()
        self.requested: dict[int, str] = {}
        """By number, what kind of request it is."""
        self.stopped: dict[str, float] = {}
        """By run, since when a granted stop holds that nothing hindered, in a history that has it."""
        self.resumed: set[str] = set()
        """Runs that are wished to go on by an event of this life, whether or not anybody was told so."""
        self.pilots_passed_at: dict[str, float] = {}
        self.in_touch: dict[str, tuple[float, float]] = {}
        """By host, since when and until when this life of the coordinator has got its answers to polls, without a break."""
        self.lives: dict[str, tuple[float, float]] = {}
        """By campaign, when it was launched and when its stage last changed, in true seconds."""
        self.offset_seconds = 0.0
        """How far the coordinator's clock was off when the first of them started: it can't know better, and those after it know what it knew."""

    # 5, 6, 12: what is concluded.

    def concluded(self, before: Fleet, decision: Decision) -> None:
        for event in decision.events:
            self.counts["events"] += 1
            if not event.actor or (not event.because and event.kind not in NO_REASON_NEEDED):
                self.broken("12", f"{event.kind} says neither who nor why: {event}")
            check = getattr(self, f"_{event.kind}", None)
            if check is not None:
                check(before if event.kind == "run_placed" else decision.fleet, event)
            if self.world.echo:
                self._tell(event)

    def _tell(self, event: Event) -> None:
        if event.kind != "noticed":
            words = " → ".join(str(event.body[name]) for name in ("from", "to") if name in event.body)
            what = event.run_id or event.campaign_id or event.host or ""
            self.world.say("coordinator", f"{event.kind} {what} {words} by {event.actor}: {event.because}")

    def _run_placed(self, before: Fleet, event: Event) -> None:
        assert event.run_id is not None and event.host is not None
        placed = before.runs.get(event.run_id)  # one that a fence has just added is not there yet
        if placed is not None and placed.spec is not None:
            self.broken("5", f"{event.run_id} is placed twice")
        self.placed[event.run_id] = event.sequence

    def _run_moved(self, after: Fleet, event: Event) -> None:
        source, to = RunState(event.body["from"]), RunState(event.body["to"])
        self.coverage.runs[source, to] += 1
        if event.body["reason"] == Reason.DEADLINE and event.actor == "coordinator":
            run = after.runs[event.run_id or ""]
            campaign = after.campaigns[run.campaign_id]
            self._not_before(campaign.final_at if run.kind is RunKind.EVALUATE else campaign.cutoff_at, f"{event.run_id}: {event.because}")
        if source is RunState.LOST and event.actor == "coordinator" and not after.runs[event.run_id or ""].left_behind:
            self.broken("5", f"{event.run_id} leaves lost without a word of its host: {event.because}")

    def _want_changed(self, after: Fleet, event: Event) -> None:
        if event.body["want"]["want"] == Want.RUN:
            self.resumed.add(event.run_id or "")

    def _campaign_launched(self, after: Fleet, event: Event) -> None:
        self.lives[event.campaign_id or ""] = self.world.seconds, self.world.seconds

    def _campaign_moved(self, after: Fleet, event: Event) -> None:
        self.lives[event.campaign_id or ""] = self.lives[event.campaign_id or ""][0], self.world.seconds
        self.coverage.campaigns[CampaignStage(event.body["from"]), CampaignStage(event.body["to"])] += 1
        campaign = after.campaigns[event.campaign_id or ""]
        if event.body["to"] == CampaignStage.FAILED and any(words in event.because for words in ("no room", "can't keep a copy", "No space")):
            self.broken("11", f"{event.campaign_id} fails for a full disk: {event.because}")
        if event.body["to"] == CampaignStage.SELECTING and "not waited for" in event.because:
            self._not_before(campaign.cutoff_at, f"{event.campaign_id}: {event.because}")

    def _not_before(self, moment: datetime, what: str) -> None:
        """10: what is concluded from a deadline is not concluded before it, whatever the wall clock was stepped to meanwhile."""
        early_seconds = true_seconds(moment) - self.offset_seconds - self.world.seconds
        if early_seconds > CLOCK_SECONDS:
            self.broken("10", f"concluded {early_seconds:.0f} s too early: {what}")

    def _split_opened(self, after: Fleet, event: Event) -> None:
        if after.campaigns[event.campaign_id or ""].frozen_digest is None:
            self.broken("6", f"{event.campaign_id}: {event.body['split']} is opened before the freeze")

    def _job_failed(self, after: Fleet, event: Event) -> None:
        if "broke down" in event.body["title"]:
            self.broken("crash", f"{event.body['job']}: {event.body['what']}")

    def _host_unfenced(self, after: Fleet, event: Event) -> None:
        for run_id in event.body["runs"]:
            living = self.truths[run_id].run.living_tree() if run_id in self.truths else []
            if living:
                self.broken("fence", f"the fence of {event.host} falls, and {living[0]!r}, whose work goes on elsewhere, lives")

    def sent(self, order: Order, fleet: Fleet) -> None:
        run = fleet.runs.get(order.run_id)
        if run is None or run.host is None:
            self._stops_a_stranger(order)
            return
        if run.left_behind:
            self.broken("5", f"an order for {order.run_id} goes to {order.host}, which was fenced")
        if order.host != run.host:
            self.broken("5", f"an order for {order.run_id} goes to {order.host}, it was placed on {run.host}")
        if order.order == "start":
            if self.office.spool.last < self.placed[order.run_id]:
                self.broken("12", f"{order.run_id} is started before its placing is on disk")
            self._evaluates_the_frozen(run, order, fleet)

    def _stops_a_stranger(self, order: Order) -> None:
        """History does not know of this run, or not that it was ever placed. Its host may be told to stop it; nothing else, and nobody else."""
        truth = self.truths.get(order.run_id)
        is_there = truth is not None and truth.run.machine.name == order.host
        if not is_there or order.order != "want" or order.body["want"]["want"] != Want.STOP:
            self.broken("5", f"a {order.order} of {order.run_id} goes to {order.host}, and history has placed it nowhere")

    def _evaluates_the_frozen(self, run: Run, order: Order, fleet: Fleet) -> None:
        if run.kind is RunKind.EVALUATE:
            frozen = self.office.archive.store(run.campaign_id).frozen
            if frozen is None or order.body["task"]["models"]["selected"]["digest"] != frozen["checkpoint_digest"]:
                self.broken("7", f"{run.run_id} evaluates another checkpoint than the frozen one")

    def copied(self, found: Any, digest: str) -> None:
        if not found.is_whole or found.digest != digest:
            self.broken("4", f"a copy of step {found.step} is called verified, and its bytes are damaged")

    def selected(self, store: Any, selection: dict[str, Any], runs: list[Run]) -> None:
        for digest in (selection["checkpoint_digest"], selection["base_checkpoint_digest"]):
            if digest is not None and digest not in store.checkpoints:
                self.broken("4", f"{store.campaign_id} selects {digest[:12]}, of which no verified copy is in the store")

    def opened(self, store: Any, split: Split) -> None:
        faults = order_faults(tuple(store.ledger))
        if faults:
            self.broken("6", f"{store.campaign_id}: {faults[0]}")

    # 12: history.

    def crashed(self, fleet: Fleet, journal: VirtualJournal) -> None:
        self.counts["crashes"] += 1
        self.in_touch.clear()
        self.durable = fleet if journal.is_durable else None
        if not journal.is_durable:
            self.stopped.clear()

    def restarted(self, fleet: Fleet) -> None:
        self.unanswered.clear()
        trusted = self.office.kept_clock.trusted
        self.offset_seconds = true_seconds(trusted.now) - self.world.seconds
        if self.durable is None:
            return
        for run_id in self.resumed & self.stopped.keys():
            run = fleet.runs.get(run_id)
            if run is not None and run.want is not None and run.want.want is Want.RUN:
                del self.stopped[run_id]  # its resume is history, and whoever asked for it never heard
        self.resumed.clear()
        same = (self.durable.campaigns, self.durable.runs, self.durable.hosts) == (fleet.campaigns, fleet.runs, fleet.hosts)
        if not same:
            self.broken("12", f"what the journal replays to is not the fleet that lived: {_difference(self.durable, fleet)}")

    def replied(self, reply: Reply) -> None:
        self.unanswered.discard(reply.number)
        self.counts["replies"] += 1
        self.counts["refusals"] += 1 if reply.error else 0
        kind = self.requested.pop(reply.number, "")
        for run_id in reply.body.get("runs", ()) if kind in ("stop", "resume") else ():
            self.stopped.pop(run_id, None)
            if kind == "stop":
                self.stopped[run_id] = self.world.seconds

    def whole_history(self) -> None:
        """At the end: replay gives the fleet that lives, and every notice of every host is in it once, in order."""
        loop = self.office.loop
        fleet, journal = loop.fleet, loop.journal
        if journal.is_durable and replay_journal(journal) != fleet:
            self.broken("12", f"what the journal replays to is not the fleet that lives: {_difference(replay_journal(journal), fleet)}")
        heard: Counter[str] = Counter()
        for entry in journal.entries(limit=1_000_000):
            body, run_id = entry["body"], entry["run_id"]
            if "notice" in body or entry["kind"] == "notices_lost":
                first, last = (body["notice"], body["notice"]) if "notice" in body else (body["from"], body["to"])
                if first != heard[run_id] + 1:
                    self.broken("12", f"notice {first} of {run_id} is journaled where {heard[run_id] + 1} is next")
                heard[run_id] = last
            if entry["kind"] == "noticed" and encode(self.truths[run_id].run.told[body["notice"]]["body"]) != body["body"]:
                self.broken("12", f"notice {body['notice']} of {run_id} is not what its host told")

    def whole_knowledge(self) -> None:
        """At the end: of a run at rest whose every notice was heard, history knows every exit, validation and checkpoint that its files tell of."""
        for run in self.office.loop.fleet.runs.values():
            truth = self.truths.get(run.run_id)
            if truth is None or run.host != truth.run.machine.name or run.left_behind or run.state not in SETTLED:
                continue
            files = truth.run
            if files.is_locked() or files.spool.is_damaged or run.notices_seen < files.spool.last:
                continue
            known = {("exit", ended["attempt"]) for ended in run.exits} | {("validation", each.step) for each in run.validated}
            known |= {("checkpoint", each.step) for each in run.saved} | ({("pilot", run.pilot["step"])} if run.pilot is not None else set())
            told = {("exit", number) for number, attempt in files.attempts.items() if attempt.exit is not None}
            told |= {(each["event"], each["step"]) for each in files.log if each.get("event") in ("validation", "pilot") and each["phase"] == "end"}
            told |= {("checkpoint", step) for step in files.checkpoints}
            if told - known:
                self.broken("12", f"history has heard all of {run.run_id}, and does not know {sorted(told - known)}")

    def _notices_lost(self, after: Fleet, event: Event) -> None:
        """What is given up is gone where it was told, and for a reason: damage there, or a history that had it once and lost it here."""
        run, first, last = self.truths[event.run_id or ""].run, event.body["from"], event.body["to"]
        still = [number for number in run.spool.entries if first <= number <= last and not run.spool.is_damaged]
        if still:
            self.broken("12", f"notices {still} of {run.run_id} are given up, and its host has them: {event.because}")
        if not run.is_damaged and (not self.office.losses or last > run.acknowledged_ever):
            self.broken("12", f"notices of {run.run_id} are given up that nobody lost: {event.because}")

    # 9: the status document.

    def check_document(self, document: dict[str, Any] | None) -> None:
        if document is None:
            return
        self.counts["documents"] += 1
        observations = self.office.loop.published.sight.observations
        fleet: Fleet = self.office.loop.published.fleet
        for run_id in self.stopped:
            self._obeys_its_stop(run_id)
        for name in fleet.campaigns:
            self._is_told_of_its_pilots(name, fleet)
        for lost in [run for run in fleet.runs.values() if run.state is RunState.LOST]:
            self._is_out_of_sight(lost)
        for run in document["runs"]:
            look = observations.get(run["run_id"])
            told = {name: run[name] for name in SEEN_FIELDS} | {"host_bytes": run["memory"]["host_bytes"]}
            for name, measured in told.items():
                self._honest(f"{name} of {run['run_id']}", measured, look, name)
        for host in document["hosts"]:
            for name in ("memory_available_bytes", "disk_free_bytes"):
                value, age_seconds = host[name]["value"], host[name]["age_seconds"]
                if value is not None and host["name"] not in self.measured_at:
                    self.broken("9", f"{name} of {host['name']} is {value}, and nobody ever measured it")
                if value is not None and age_seconds is not None:
                    self._old_enough(f"{name} of {host['name']}", age_seconds, self.measured_at[host["name"]])

    def heard(self, host: str) -> None:
        """A host's answer to a poll has come to the coordinator."""
        since, until = self.in_touch.get(host, (0.0, -BREAK_SECONDS))
        now = self.world.seconds
        self.in_touch[host] = (since if now - until < BREAK_SECONDS else now), now

    def _in_touch_since(self, host: str | None) -> float:
        """Since when the coordinator has heard of this host without a break; the future, if it does not now."""
        since, until = self.in_touch.get(host or "", (math.inf, -math.inf))
        return since if self.world.seconds - until < BREAK_SECONDS else math.inf

    def _obeys_its_stop(self, run_id: str) -> None:
        """What was granted to be stopped has ended once its host was heard for long enough, and does not come to life again unasked."""
        truth = self.truths.get(run_id)
        living = truth.run.living_tree() if truth is not None else []
        if truth is None or not living:
            return
        machine, now = truth.run.machine, self.world.seconds
        hung = any(process.hung_until > now for process in machine.processes.values() if process.run_id == run_id)
        stuck = any(process.unkillable_until > now for process in living)
        if hung or stuck or machine.is_disk_full or machine.is_hiding or not machine.is_up:
            self.stopped[run_id] = now
        since = max(self.stopped[run_id], self._in_touch_since(machine.name))
        if now - since > FOUND_SECONDS + 1.25 * truth.run.spec.stop.grace_ceiling_seconds + LOST_SUPERVISOR_SECONDS:
            self.broken("liveness", f"{living[0]!r} lives, and {now - since:.0f} s ago its stop was granted")

    def _is_out_of_sight(self, run: Run) -> None:
        """A run is lost as long as its host is silent, and no longer than its supervisor needs to say a word once it is not."""
        heard_seconds, truth = self.world.seconds - self._in_touch_since(run.host), self.truths.get(run.run_id)
        if heard_seconds > FOUND_SECONDS and truth is not None and truth.run.is_locked():
            self.broken("9", f"{run.run_id} is called lost, and {run.host} has answered for {heard_seconds:.0f} s")

    def _is_told_of_its_pilots(self, campaign_id: str, fleet: Fleet) -> None:
        """No campaign stays in its pilot once each of those that were started has passed, and their hosts have been heard for long enough.

        A run that was fenced off has left its pilot to its successor, whatever it passes on its host until it is ended there."""
        campaign, now = fleet.campaigns[campaign_id], self.world.seconds
        piloted = [run for run in (fleet.runs[run_id] for run_id in campaign.runs) if has_pilot(campaign, run) and run.successor is None]
        runs = [run for run in piloted if run.state is not RunState.QUEUED]
        told = runs and all(run.run_id in self.truths and self._tells_of_its_pilot(self.truths[run.run_id].run) for run in runs)
        if campaign.stage is not CampaignStage.PILOT or not told:
            self.pilots_passed_at.pop(campaign_id, None)
            return
        since = max(self.pilots_passed_at.setdefault(campaign_id, now), *(self._in_touch_since(run.host) for run in runs))
        if now - since > FOUND_SECONDS:
            self.broken("liveness", f"{campaign_id} is still in its pilot, which has passed {now - since:.0f} s ago")

    def _tells_of_its_pilot(self, run: VirtualRun) -> bool:
        is_told = any(entry["kind"] == "pilot" and entry["body"]["passed"] for entry in run.told.values())
        is_watched = run.is_locked() and bool(run.living_tree()) and not run.machine.is_disk_full
        return run.has_passed_pilot and (is_told or is_watched)

    def _honest(self, what: str, measured: dict[str, Any], look: Any, name: str) -> None:
        value, age_seconds = measured["value"], measured["age_seconds"]
        if look is None:
            if value is not None:
                self.broken("9", f"{what} is {value}, and nobody ever looked")
            return
        source = look.memory if name == "host_bytes" else look
        if value != (getattr(source, name) if source is not None else None):
            self.broken("9", f"{what} is {value}, the last look says otherwise")
        if value is None or (look.run_id, look.at) not in self.looks:
            return
        seen_at, machine = self.looks[look.run_id, look.at]
        if age_seconds is None:
            self.broken("9", f"{what} is {value} without an age")
        # Of an earlier boot nobody can say how long the machine was without power.
        if look.boot_id == machine.boot_id:
            self._old_enough(what, age_seconds, seen_at)

    def _old_enough(self, what: str, age_seconds: float, seen_at: float) -> None:
        true_age_seconds = self.world.seconds - seen_at
        if age_seconds < true_age_seconds - AGE_SECONDS:
            self.broken("9", f"{what} is said to be {age_seconds:.0f} s old and is {true_age_seconds:.0f} s old")

    # Liveness.

    def settled(self) -> None:
        """Faults are over and time enough has passed: every run is settled, every campaign is over, every request answered."""
        fleet = self.office.loop.fleet
        # A deadline that was given by a wrong clock, which is right by now, may still lie ahead.
        due = {name for name, campaign in fleet.campaigns.items() if true_seconds(campaign.final_at) + SETTLING_SECONDS < self.world.seconds}
        for run in fleet.runs.values():
            if run.state not in SETTLED and run.campaign_id in due:
                self.broken("liveness", f"{run.run_id} is still {run.state}: {run.detail or 'no reason given'}")
        for campaign in fleet.campaigns.values():
            if not is_over(campaign) and campaign.campaign_id in due:
                self.broken("liveness", f"{campaign.campaign_id} is still {campaign.stage}: {campaign.detail or 'no reason given'}")
        for truth in self.truths.values():
            living = truth.run.living_tree()
            if living and truth.run.spec.campaign_id in due:
                self.broken("liveness", f"{living[0]!r} still lives")
        if self.unanswered:
            self.broken("liveness", f"{len(self.unanswered)} requests were never answered")


def _difference(left: Fleet, right: Fleet) -> str:
    words = Counter[str]()
    for name in ("campaigns", "runs", "hosts"):
        ours, theirs = getattr(left, name), getattr(right, name)
        words.update(f"{name} {key}" for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    return ", ".join(words) or f"sequence {left.sequence} and {right.sequence}"

