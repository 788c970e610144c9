"""Where a queued run goes, and which orders a placed one still needs.

Placing is journaled with the whole RunSpec before any order is sent. Orders are derived from the difference between the Fleet and
what hosts have acknowledged, so that a restarted coordinator sends what may be missing again: harmless twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.decide_displacement import room_held_up
from fleetd.coordinator.decide_found import holders, options, unheard
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Job, Order, Sight
from fleetd.coordinator.specs import asked_bytes, asking, build_spec, build_task, can_be_built, host_plan, split_of, wish
from fleetd.coordinator.strangers import memory_bytes, strangers, strangers_on
from fleetd.coordinator.targets import is_time
from fleetd.fleet import Campaign, Fleet, Run
from fleetd.model import Continuation, CutoffOrder, HostFacts
from fleetd.wire import encode
from policies.facts import CapGrade, RunKind, RunState, StopMode
from policies.lifecycle import ACTIVE
from policies.memory import Admission, admit

WAIT_WORDS_SECONDS = 60.0

_FIGURES = re.compile(r"[0-9.]+")
_HOLDS_MEMORY = ACTIVE | {RunState.STAGING}


def place_runs(pen: Pen) -> None:
    """Place queued runs in the order of their campaigns and candidates; a run that can't be placed says what it waits for."""
    for campaign_id in pen.fleet.campaigns:
        for run_id in pen.campaign(campaign_id).runs:
            run = pen.run(run_id)
            if run.state is RunState.QUEUED and is_time(pen.campaign(campaign_id), run):
                _place(pen, run)
            elif run.state is RunState.STAGING:
                # The tick that placed it ended here, in a history that was salvaged: its order may have left.
                pen.move_run(run_id, RunState.STARTING, f"its placing on {run.host} was cut short; the order goes to it again")


def committed(fleet: Fleet, sight: Sight, host: str, runs: Iterable[Run] | None = None) -> tuple[tuple[str, int], ...]:
    """What the runs that are not settled hold on a host, over all campaigns and beyond them: (candidate, bytes). `runs` are those of this host,
    for whoever asks about every host and has them already."""
    has_accelerator = _has_accelerator(sight, host)
    known = tuple(
        (run.candidate, asked_bytes(fleet.campaigns[run.campaign_id], run, has_accelerator=has_accelerator))
        for run in (fleet.runs.values() if runs is None else runs) if run.host == host and run.state in _HOLDS_MEMORY
    )
    unknown = strangers_on(fleet, host, sight.hosts.get(host))
    return (*known, *((f"{each.run_id}, unknown here", memory_bytes(each, has_accelerator=has_accelerator)) for each in unknown))


def _committed(pen: Pen, host: str) -> tuple[tuple[str, int], ...]:
    return committed(pen.fleet, pen.sight, host, pen.runs_on(host))


def _place(pen: Pen, run: Run) -> None:
    campaign = pen.campaign(run.campaign_id)
    waits: list[str] = []
    found: list[tuple[int, str, str]] = []
    may_have_it = _may_have_it(pen, run)
    if may_have_it is not None:
        _wait(pen, run, may_have_it)
        return
    for host in options(campaign, run):
        held_up = _held_up(pen, campaign, run, host) or room_held_up(pen, campaign, host)
        if held_up is not None:
            waits.append(held_up)
            continue
        verdict = _admission(pen, campaign, run, host)
        if verdict.admitted:
            found.append((-_free_bytes(pen, host), host.name, verdict.text))
        else:
            waits.append(f"memory on {host.name}: {verdict.text}")
    if not found:
        _wait(pen, run, f"waits for {'; '.join(waits)}")
        return
    _, name, text = min(found, key=lambda option: option[0])
    _start(pen, run, host_plan(campaign, name), text)


def _may_have_it(pen: Pen, run: Run) -> str | None:
    """Why no host is given an unplaced run yet: one has it, or may have it, by a part of history that is lost."""
    having, silent = holders(pen.sight, run), unheard(pen.fleet, pen.sight, run)
    if having:
        return f"waits for host {', '.join(having)}: it has this run already, which history had lost, and its order there can't be read"
    if silent:
        words = "it has not told yet whether it has this run, by a part of history that is lost (fleetd fence, if it is off)"
        return f"waits for host {', '.join(silent)}: {words}"
    return None


def _wait(pen: Pen, run: Run, because: str) -> None:
    """Say what a run waits for, when that changes. Figures that only wander (free memory) are told once in a while."""
    is_due = run.waiting_at is None or (pen.now - run.waiting_at).total_seconds() >= WAIT_WORDS_SECONDS
    if run.detail != because and (is_due or _FIGURES.sub("#", run.detail) != _FIGURES.sub("#", because)):
        pen.write("run_waits", run=run.run_id, because=because)


def _held_up(pen: Pen, campaign: Campaign, run: Run, host: HostPlan) -> str | None:
    """What a run waits for on this host, other than memory. Asks for the data of an evaluation on the way."""
    known = pen.fleet.hosts.get(host.name)
    sight = pen.sight.hosts.get(host.name)
    if known is not None and known.fenced is not None:
        return f"host {host.name}: it is fenced"
    if known is None or not known.reachable or sight is None or sight.facts is None:
        return f"host {host.name}: it does not answer"
    if known.drained is not None:
        return f"host {host.name}: it is drained (fleetd undrain {host.name})"
    lacking = lacks_enforcement(sight.facts, asking(campaign, run).memory_demand)
    if lacking is not None:
        return f"host {host.name}: {lacking}"
    if sight.reports is None:
        return f"host {host.name}: it has not told yet which runs it has"
    stuck = [other.candidate for other in pen.runs_on(host.name) if other.state is RunState.STUCK and not other.cleared]
    if stuck:
        return f"host {host.name}: {stuck[0]} is stuck there (fleetd clear {host.name}, once you have looked)"
    if f"{host.name}:campaign" not in campaign.staged:
        return f"data on {host.name}" if host.environment is None else f"data and environment on {host.name}"
    if run.continues is not None and run.continues.digest is not None and seed_name(run.continues) not in _staged_on(campaign, host.name):
        return _ask_for_seed(pen, run, run.continues, host.name)
    if run.kind is not RunKind.EVALUATE or f"{host.name}:{run.candidate}" in campaign.staged:
        return None
    split = split_of(run).value
    planned = {"split": split, "actor": "coordinator", "because": "after_freeze.evaluate of the plan"}
    body = {"what": run.candidate, **next((asked for asked in campaign.asked if asked["split"] == split), planned)}
    key = f"stage:{run.run_id}:{host.name}"
    pen.start(Job(key=key, kind="stage_evaluation", campaign_id=campaign.campaign_id, run_id=run.run_id, host=host.name, body=body))
    return f"data on {host.name}"


def seed_name(begins: Continuation) -> str:
    """What history calls a checkpoint that lies ready on a host for a run to begin with."""
    return f"checkpoint:{begins.digest}"


def _staged_on(campaign: Campaign, host: str) -> frozenset[str]:
    return frozenset(each.partition(":")[2] for each in campaign.staged if each.startswith(f"{host}:"))


def _ask_for_seed(pen: Pen, run: Run, begins: Continuation, host: str) -> str:
    body = {"what": seed_name(begins), "step": begins.step, "digest": begins.digest}
    key = f"seed:{run.run_id}:{host}:{str(begins.digest)[:12]}"
    pen.start(Job(key=key, kind="stage_seed", campaign_id=run.campaign_id, run_id=run.run_id, host=host, body=body))
    return f"the checkpoint of step {begins.step} on {host}"


def lacks_enforcement(facts: HostFacts, demand: CapGrade) -> str | None:
    """Why this host can't keep the demand for an enforced cap; None when it can, or none is made."""
    part = facts.cap_means.get("cgroup")
    if demand is not CapGrade.ENFORCED or (part is not None and part.grade is CapGrade.ENFORCED):
        return None
    return f"it can't enforce the cap: {part.means if part is not None else 'it has not said how'}"


def _admission(pen: Pen, campaign: Campaign, run: Run, host: HostPlan) -> Admission:
    return admit(
        capacity_bytes=_capacity_bytes(pen, host), floor_bytes=host.floor_bytes, available_bytes=pen.sight.hosts[host.name].memory_available_bytes,
        committed=_committed(pen, host.name),
        asked_bytes=asked_bytes(campaign, run, has_accelerator=_has_accelerator(pen.sight, host.name)),
    )


def _free_bytes(pen: Pen, host: HostPlan) -> int:
    return _capacity_bytes(pen, host) - host.floor_bytes - sum(amount for _, amount in _committed(pen, host.name))


def _capacity_bytes(pen: Pen, host: HostPlan) -> int:
    facts = pen.sight.hosts[host.name].facts
    assert facts is not None
    return host.capacity_bytes or facts.memory_total_bytes


def _has_accelerator(sight: Sight, host: str) -> bool:
    seen = sight.hosts.get(host)
    return bool(seen and seen.facts and seen.facts.accelerators)


def _start(pen: Pen, run: Run, host: HostPlan, text: str) -> None:
    """Two-phase start: the intent with the whole order is history before the order leaves."""
    campaign = pen.campaign(run.campaign_id)
    if run.spec is None:
        spec = build_spec(campaign, run, host, owner=pen.sight.owner, python=pen.sight.python, now=pen.now)
        pen.write("run_placed", {"spec": encode(spec)}, run=run.run_id, host=host.name, because=text)
    pen.move_run(run.run_id, RunState.STAGING, f"placed on {host.name}: {text}")
    pen.move_run(run.run_id, RunState.STARTING, f"the order to {'start' if run.notices_seen == 0 else 'go on'} goes to {host.name}")


def send_orders(pen: Pen) -> None:
    for run in pen.fleet.runs.values():
        host = pen.fleet.hosts.get(run.host) if run.host else None
        if run.spec is not None and run.state in ACTIVE and not run.left_behind and host is not None and host.reachable:
            _send_for(pen, run)


def send_to_strangers(pen: Pen) -> None:
    """A wish for a run that history does not know is sent until its host says that it obeys it, numbered after what it obeys now."""
    for stranger in strangers(pen.fleet, pen.sight):
        wished, held = pen.fleet.stranger_wants.get(stranger.run_id), stranger.report.want
        if wished is None or (held is not None and held.want is wished.want and held.mode in (wished.mode, StopMode.NOW)):
            continue
        order = replace(wished, sequence=held.sequence + 1 if held is not None else wished.sequence)
        key = f"want:{stranger.run_id}:{order.sequence}"
        body = {"run_id": stranger.run_id, "want": encode(order)}
        pen.send(Order(key=key, host=stranger.host, order="want", run_id=stranger.run_id, body=body))


def _send_for(pen: Pen, run: Run) -> None:
    assert run.spec is not None and run.host is not None
    campaign = pen.campaign(run.campaign_id)
    wanted = wish(run, campaign)
    start = f"start:{run.run_id}"
    may_be_new_there = run.notices_seen == 0 and start not in pen.sight.acknowledged
    if may_be_new_there and can_be_built(campaign, run):  # else its placing was taken over from its host, which has it
        task = build_task(campaign, run, host_plan(campaign, run.host))
        body: dict[str, Any] = {"spec": encode(run.spec), "task": task, "want": encode(wanted)}
        pen.send(Order(key=start, host=run.host, order="start", run_id=run.run_id, body=body))
        return
    if wanted.sequence > 1:
        body = {"run_id": run.run_id, "want": encode(wanted)}
        pen.send(Order(key=f"want:{run.run_id}:{wanted.sequence}", host=run.host, order="want", run_id=run.run_id, body=body))
    deadline = run.spec.deadline
    if run.kind is RunKind.TRAIN and deadline is not None and campaign.cutoff_at < deadline.cutoff_at:
        cutoff = CutoffOrder(sequence=campaign.cutoff_moves, cutoff_at=campaign.cutoff_at, because="evaluation needs more time than was reserved")
        body = {"run_id": run.run_id, "cutoff": encode(cutoff)}
        pen.send(Order(key=f"cutoff:{run.run_id}:{cutoff.sequence}", host=run.host, order="cutoff", run_id=run.run_id, body=body))
