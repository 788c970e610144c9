"""Fencing: a person says that a silent host is off, and the work that was lost with it goes on elsewhere. Pure.

    run on the fenced host                 becomes
    training, before its cutoff            failed (superseded); a NEW run goes on from the newest verified copy, on another host of the plan
    evaluation, before the deadline        failed (superseded); a new run looks at the same opening again
    wanted to stop, held, stuck, stopped   stopped; a resume goes on in a new run
    too late for more                      finished (deadline)

No run ever gets a second trainer: the old one is left behind for good. When its host answers again, its agent ends what is left of it
before anything else, and the fence falls once that is proven.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fleetd.coordinator.decide_found import given_up, is_unplaced, may_be_elsewhere, may_be_on
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Poll, Sight
from fleetd.coordinator.specs import candidate_of, wish
from fleetd.coordinator.targets import AFTER_FREEZE, TRAINS
from fleetd.fleet import Fleet, Run
from fleetd.model import Continuation
from fleetd.wire import encode
from policies.facts import CampaignStage, Reason, RunKind, RunState, Want
from policies.lifecycle import FINAL, SETTLED

_FOR_A_PERSON = frozenset({RunState.STOPPED, RunState.HELD, RunState.STUCK})
"""States in which a person decides whether there is to be another attempt; a fence does not decide it for them."""
_TRAINING_GOES_ON = TRAINS | {CampaignStage.PREFLIGHT, CampaignStage.STAGING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What a fence makes of one run. `goes_on`: a new run takes its work up, from `begins` and on one of `hosts`."""

    run_id: str
    to: RunState
    reason: Reason
    goes_on: bool
    begins: Continuation | None = None
    hosts: tuple[str, ...] = ()
    because: str


def fates(fleet: Fleet, sight: Sight, host: str, now: datetime) -> tuple[Fate, ...]:
    """What fencing `host` now would do to each run that it may hold. The same facts that `fence` goes by, so a person can be told before."""
    placed = [run for run in fleet.runs.values() if run.host == host and run.state not in FINAL and not run.left_behind]
    unplaced = [run for run in may_be_on(fleet, sight, host) if not may_be_elsewhere(fleet, sight, run, host)]
    return tuple(_fate(fleet, run, host, now) for run in (*placed, *unplaced))


def undecided(fleet: Fleet, sight: Sight, host: str) -> list[str]:
    """Unplaced runs that this host may have, and another one that is not fenced as well: they wait for what that one says."""
    return [run.run_id for run in may_be_on(fleet, sight, host) if may_be_elsewhere(fleet, sight, run, host)]


def find_left_behind(pen: Pen) -> None:
    """An unplaced run that nobody else has can only be on the fenced hosts that may have it: it is left behind there."""
    for run in list(pen.fleet.runs.values()):
        hosts = given_up(pen.fleet, pen.sight, run) if is_unplaced(run) else []
        if hosts and not may_be_elsewhere(pen.fleet, pen.sight, run):
            leave_behind(pen, run, hosts, "coordinator")
            carry_out(pen, (_fate(pen.fleet, pen.run(run.run_id), hosts[0], pen.now),), "coordinator")


def leave_behind(pen: Pen, run: Run, hosts: list[str], actor: str) -> None:
    for host in hosts:
        because = f"{host} is fenced and may have it, and no other host does: whatever is left of it there is ended"
        pen.write("run_left_behind", run=run.run_id, host=host, actor=actor, because=because)


def carry_out(pen: Pen, found: tuple[Fate, ...], actor: str) -> dict[str, str]:
    """Write the fates down; the new run of each run that goes on."""
    successors: dict[str, str] = {}
    for fate in found:
        run = pen.run(fate.run_id)
        if run.state is not fate.to:
            pen.move_run(run.run_id, fate.to, fate.because, reason=fate.reason, actor=actor)
        if fate.goes_on and fate.begins is not None:
            successors[run.run_id] = add_successor(pen, run, fate.begins, actor)
    return successors


def finish_fences(pen: Pen) -> None:
    """A history that was cut right behind a fence knows that runs were left behind, and not what was to become of them."""
    for run in list(pen.fleet.runs.values()):
        if run.left_behind and run.state not in SETTLED:
            carry_out(pen, (_fate(pen.fleet, run, run.host or "its host", pen.now),), "coordinator")


def add_successor(pen: Pen, run: Run, begins: Continuation, actor: str) -> str:
    """A new run for the same line of the plan. Its id is counted, never drawn."""
    base, number = f"{run.campaign_id}-{run.candidate}", 2
    while f"{base}-{number}" in pen.fleet.runs:
        number += 1
    run_id = f"{base}-{number}"
    where = "from its beginning: no verified copy of its work lies here" if begins.step is None else f"from the verified copy of step {begins.step}"
    body = {"candidate": run.candidate, "kind": run.kind.value, "continues": encode(begins)}
    pen.write("run_added", body, campaign=run.campaign_id, run=run_id, actor=actor, because=f"goes on with {run.run_id} {where}")
    return run_id


def newest_copy(run: Run, *, below_step: int | None = None) -> Continuation:
    """The newest verified copy of a checkpoint of this run, or of the run that it goes on with."""
    copies = [copy for copy in run.checkpoints if below_step is None or copy.step < below_step]
    if copies:
        newest = max(copies, key=lambda copy: (copy.step, copy.verified_at))
        return Continuation(run_id=run.run_id, step=newest.step, digest=newest.digest)
    inherited = run.continues
    if inherited is not None and inherited.step is not None and (below_step is None or inherited.step < below_step):
        return Continuation(run_id=run.run_id, step=inherited.step, digest=inherited.digest)
    return Continuation(run_id=run.run_id)


def _fate(fleet: Fleet, run: Run, host: str, now: datetime) -> Fate:
    campaign = fleet.campaigns[run.campaign_id]
    if run.state in _FOR_A_PERSON or wish(run, campaign).want is Want.STOP:
        word = f"was {run.state}" if run.state in _FOR_A_PERSON else "was to stop"
        because = f"{host} was fenced, and it {word}; a resume goes on in a new run"
        return Fate(run_id=run.run_id, to=RunState.STOPPED, reason=run.reason or Reason.USER, goes_on=False, because=because)
    is_training = run.kind is RunKind.TRAIN
    limit = campaign.cutoff_at if is_training else campaign.final_at
    if now >= limit or campaign.stage not in (_TRAINING_GOES_ON if is_training else AFTER_FREEZE):
        because = f"{host} was fenced, and no time is left for its work"
        return Fate(run_id=run.run_id, to=RunState.FINISHED, reason=Reason.DEADLINE, goes_on=False, because=because)
    begins = newest_copy(run) if is_training else Continuation(run_id=run.run_id)
    hosts = tuple(each for each in places(fleet, run) if each != host)
    where = f"step {begins.step}" if begins.step is not None else "its beginning"
    because = f"{host} was fenced; its work goes on in a new run from {where}"
    return Fate(
        run_id=run.run_id, to=RunState.FAILED, reason=Reason.SUPERSEDED, goes_on=True, begins=begins, hosts=hosts, because=because,
    )


def places(fleet: Fleet, run: Run) -> tuple[str, ...]:
    """Where work that was fenced off may go on: wherever its plan has a host. The host that the plan named for it is gone."""
    campaign = fleet.campaigns[run.campaign_id]
    named = [host.name for host in campaign.plan.hosts]
    if run.kind is RunKind.TRAIN and candidate_of(campaign, run).host in named:
        named.sort(key=lambda name: name != candidate_of(campaign, run).host)
    return tuple(name for name in named if fleet.hosts.get(name) is None or fleet.hosts[name].fenced is None)


def left_behind(fleet: Fleet, host: str) -> tuple[str, ...]:
    """The runs whose remains this host has to end before anything else happens there."""
    known = fleet.hosts.get(host)
    return known.superseded if known is not None else ()


def judge_returned(pen: Pen, poll: Poll) -> None:
    """Let the fence fall when the host answers and nothing of what was left behind lives there any more."""
    known = pen.fleet.hosts.get(poll.host)
    if known is None or known.fenced is None:
        return
    if poll.left_said is not None and not set(known.superseded) <= set(poll.left_said):
        return  # fenced between its hello and this answer: it does not know yet what it has to end
    alive = [
        report.run_id for report in poll.reports
        if report.run_id in known.superseded and not (
            report.supervisor == "gone" and report.observation is not None and report.observation.state in SETTLED)
    ]
    if not alive:
        because = "it answers again, and nothing of what was left behind lives there"
        pen.write("host_unfenced", {"runs": list(known.superseded)}, host=poll.host, actor=f"host:{poll.host}", because=because)
