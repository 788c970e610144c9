"""What hosts told, and what their silence means.

Notices are taken strictly in their order, each journaled exactly once; the next poll's `after` acknowledges them. A silent host
makes its runs `lost`: never failed, never started anywhere else.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.decide_fence import judge_returned
from fleetd.coordinator.decide_found import is_unplaced, take_over_placing
from fleetd.coordinator.decide_orders import catch_up_with_wish
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Poll, Sight
from fleetd.coordinator.specs import wish
from fleetd.coordinator.targets import AFTER_FREEZE, OVER, TRAINS, training_stage
from fleetd.fleet import Fleet, Run
from fleetd.model import Notice, Observation, RunReport
from policies.facts import CampaignStage, Reason, RunKind, RunState, Want
from policies.lifecycle import ACTIVE, FINAL, RUN_TRANSITIONS, SETTLED
from policies.workloads import DisplacedState

HOST_SILENT_SECONDS = 30.0
"""Silence after which a host counts as lost. A local agent answers each second; a busy box or a slow link may take some more."""
RECONCILE_SECONDS = 5.0
"""How much newer than the run's last change a look must be, before it corrects a state for which no notice came."""

COUNT_MAX = 1 << 53
"""Beyond it a float no longer counts, and no step, row or second of a run is so high."""

_GOING = frozenset({RunState.STARTING, RunState.RUNNING, RunState.STOPPING, RunState.BACKOFF})
_LOSABLE = _GOING | {RunState.STUCK}
"""States that a host may leave by itself while nobody hears of it. A held run has no process, and waits for a person whether or not its
host answers."""
_RESUMABLE = TRAINS | {CampaignStage.STOPPED}
_NONE = type(None)
_RETOLD = frozenset({"attempt_started", "attempt_ended", "checkpoint", "validation", "pilot", "proof"})
_COUNTED = frozenset({"step", "attempt", "rows", "seconds"})
_NOTICE_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "state_changed": {"to": (str,)},
    "attempt_started": {"attempt": (int,)},
    "attempt_ended": {"attempt": (int,)},
    "checkpoint": {"step": (int,), "digest": (str,), "bytes": (int, _NONE)},
    "validation": {"step": (int,), "sha256": (str, _NONE), "value": (int, float, _NONE), "rows": (int, _NONE), "seconds": (int, float, _NONE)},
    "pilot": {"step": (int,)},
    "proof": {"step": (int,), "verdict": (str,)},
}
"""What the fleet will read of a notice. One that is not so is kept as it came and read by nobody: history must never stop a replay."""


def needed_hosts(fleet: Fleet) -> dict[str, HostPlan]:
    """The hosts that need a session: those of campaigns under way and of runs not yet settled, the newest plan's word for each."""
    needed: dict[str, HostPlan] = {}
    fenced = {name for name, host in fleet.hosts.items() if host.fenced is not None}  # what is left behind there has to be ended
    for campaign in fleet.campaigns.values():
        live = {fleet.runs[run_id].host for run_id in campaign.runs if fleet.runs[run_id].state not in SETTLED}
        live |= {item.host for item in campaign.displaced if item.state is DisplacedState.RESTORING}
        going = campaign.stage not in OVER
        needed.update({host.name: host for host in campaign.plan.hosts if going or host.name in live | fenced})
    return needed


def shown_hosts(fleet: Fleet) -> dict[str, HostPlan]:
    """The hosts worth a session: those needed, and those of the newest campaign, so that a status after its end still shows them."""
    newest = next(reversed(fleet.campaigns.values()), None)
    return {**({host.name: host for host in newest.plan.hosts} if newest is not None else {}), **needed_hosts(fleet)}


def forgotten_hosts(sight: Sight) -> dict[str, HostPlan]:
    """The hosts of campaigns that the journal has lost: whatever goes on there has to be seen."""
    return {host.name: host for plan in sight.forgotten.values() for host in plan.hosts}


def acknowledgements(fleet: Fleet) -> dict[str, dict[str, int]]:
    """By host, the last notice of each run that history holds: what the next poll acknowledges."""
    after: dict[str, dict[str, int]] = {}
    for campaign in fleet.campaigns.values():
        going = campaign.stage not in OVER
        for run in (fleet.runs[run_id] for run_id in campaign.runs):
            if run.host is not None and (going or run.state not in SETTLED):
                after.setdefault(run.host, {})[run.run_id] = run.notices_seen
            for host in campaign.plan.hosts if is_unplaced(run) and going else ():
                after.setdefault(host.name, {})[run.run_id] = 0  # a part of history that is lost may have placed it there
    return after


def read_polls(pen: Pen) -> None:
    for poll in pen.sight.polls:
        _see_host(pen, poll)
        for report in poll.reports:
            run = pen.fleet.runs.get(report.run_id)
            if run is not None and take_over_placing(pen, run, poll.host, report):
                run = pen.run(run.run_id)
            if run is None or run.host != poll.host:
                continue  # an older coordinator's run, or one that another host was given: not ours to judge
            if report.want is not None and not run.left_behind:
                catch_up_with_wish(pen, run, report.want)
            is_torn = _skip_lost(pen, run.run_id, report, poll.after.get(run.run_id))
            complete = all(_take_notice(pen, run.run_id, notice) for notice in report.notices)
            if complete:
                _reconcile(pen, run.run_id, report, is_torn=is_torn)
        judge_returned(pen, poll)


def _see_host(pen: Pen, poll: Poll) -> None:
    known = pen.fleet.hosts.get(poll.host)
    sight = pen.sight.hosts.get(poll.host)
    boot_id = sight.facts.boot_id if sight and sight.facts else None
    if known is not None and known.reachable and (boot_id is None or known.boot_id == boot_id):
        return
    because = "answers" if known is None else "answers again" if not known.reachable else "was started again: another boot id"
    body: dict[str, Any] = {"reachable": True} if boot_id is None else {"reachable": True, "boot_id": boot_id}
    pen.write("host_seen", body, host=poll.host, actor=f"host:{poll.host}", because=because)


def judge_silence(pen: Pen) -> None:
    """A host that has not answered for too long is lost, and so are the runs it may hold."""
    for name in needed_hosts(pen.fleet):
        sight, known = pen.sight.hosts.get(name), pen.fleet.hosts.get(name)
        if sight is None or (known is not None and not known.reachable):
            continue
        heard_at = max(sight.asked_since, sight.answered_at or sight.asked_since)
        silent_seconds = (pen.now - heard_at).total_seconds()
        if silent_seconds > HOST_SILENT_SECONDS:
            why = f": {sight.trouble['title']}: {sight.trouble['what']}" if sight.trouble else ""
            pen.write("host_lost", {"reachable": False}, host=name, because=f"no answer for {silent_seconds:.0f} s{why}")
    for run in pen.fleet.runs.values():
        host = pen.fleet.hosts.get(run.host) if run.host else None
        if run.state in _LOSABLE and host is not None and not host.reachable:
            pen.move_run(run.run_id, RunState.LOST, f"{host.name} is silent; unreachable is not dead, so nothing is started again")


def _skip_lost(pen: Pen, run_id: str, report: RunReport, after: int | None) -> bool:
    """Whether the host has lost what comes next: it was asked for everything after the last notice, and has only later ones, or none.

    They never come. History says so, takes what the run's files still say of them, and goes on behind the gap.
    """
    run = pen.run(run_id)
    last = max(report.notices_lost_to, report.notices[0].sequence - 1 if report.notices else 0)
    if after != run.notices_seen or last <= after:
        return False
    retold = [{"kind": told.kind, "body": told.body} for told in report.retold if told.kind in _RETOLD and _is_well_formed(told)]
    because = (
        f"{run.host} does not have what came after notice {after} any more: its journal was damaged, or this history is an older copy; "
        f"its files tell of {len(retold)} things again"
    )
    body = {"from": after + 1, "to": last, "retold": retold}
    pen.write("notices_lost", body, run=run_id, host=run.host, actor=f"host:{run.host}", because=because)
    return True


def _take_notice(pen: Pen, run_id: str, notice: Notice) -> bool:
    """Journal one notice if it is the next one. False when there is a gap: the rest waits for the next poll."""
    run = pen.run(run_id)
    if notice.sequence <= run.notices_seen:
        return True
    if notice.sequence != run.notices_seen + 1:
        return False
    if notice.kind == "state_changed" and _is_well_formed(notice) and _moves(run, notice):
        to, reason = RunState(notice.body["to"]), _reason(notice.body.get("reason"))
        detail = str(notice.body.get("detail") or reason or "")
        pen.move_run(run_id, to, detail, reason=reason, actor=f"host:{run.host}", notice=notice.sequence)
        return True
    kind = notice.kind if _is_well_formed(notice) else f"malformed {notice.kind}"
    body = {"notice": notice.sequence, "kind": kind, "body": notice.body}
    pen.write("noticed", body, run=run_id, host=run.host, actor=f"host:{run.host}", because=_words(notice))
    return True


def _is_well_formed(notice: Notice) -> bool:
    for name, kinds in _NOTICE_FIELDS.get(notice.kind, {}).items():
        value = notice.body.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        if name in _COUNTED and isinstance(value, (int, float)) and not 0 <= value < COUNT_MAX:
            return False
    return notice.kind != "state_changed" or notice.body["to"] in RunState._value2member_map_


def _moves(run: Run, notice: Notice) -> bool:
    """Whether the notice changes what is known. A run that waits to be placed again has left that part of its story behind; one that was
    itself left behind is not followed any more."""
    to = RunState(notice.body["to"])
    return not run.left_behind and run.state not in (RunState.QUEUED, RunState.STAGING) and to in RUN_TRANSITIONS[run.state]


def _reason(word: Any) -> Reason | None:
    return Reason(word) if isinstance(word, str) and word in Reason._value2member_map_ else None


def _words(notice: Notice) -> str:
    body = notice.body
    for name in ("detail", "text", "verdict", "reason"):
        if body.get(name):
            return str(body[name])
    for name in ("step", "attempt"):
        if name in body:
            return f"{name} {body[name]}"
    return notice.kind


def _reconcile(pen: Pen, run_id: str, report: RunReport, *, is_torn: bool) -> None:
    """Correct a state by a fresh look, where no notice tells of it: a lost run found again, an order overtaken by a newer one, a notice
    that is gone (`is_torn`)."""
    look = report.observation
    # By our own clock: the host's may be wrong.
    seen_at = pen.sight.observed_at.get(run_id, pen.now if look is None else look.at)
    is_fresh = is_torn or seen_at > pen.run(run_id).since + timedelta(seconds=RECONCILE_SECONDS)
    if look is not None and is_fresh:
        _wake(pen, run_id, report, look)
    run = pen.run(run_id)
    if run.state not in ACTIVE or run.left_behind:
        return
    if look is None:
        if run.state is RunState.LOST and run.notices_seen == 0:
            pen.move_run(run_id, RunState.STARTING, f"{run.host} answers again; the start order is sent again", actor=f"host:{run.host}")
        return
    # A host that has the order and could not start yet calls it staging; found again, the run is where its order put it.
    state = RunState.STARTING if run.state is RunState.LOST and look.state is RunState.STAGING else look.state
    if state == run.state or not pen.may_move(run_id, state):
        return
    is_untold = (report.supervisor == "alive" or report.has_more) and not is_torn
    if run.kind is RunKind.TRAIN and (state in FINAL or state is RunState.STOPPED) and is_untold:
        # A supervisor leaves once its last notices are on its disk. Without all of them a selection would miss what was validated last; an
        # evaluation is judged by its files.
        return
    if run.state is RunState.LOST or is_fresh or _stays_at_rest(pen, run, report):
        because = f"{run.host} answers again" if run.state is RunState.LOST else f"{run.host} sees it so"
        pen.move_run(run_id, state, f"{because}: {look.detail}" if look.detail else because, reason=look.reason, actor=f"host:{run.host}")


def _wake(pen: Pen, run_id: str, report: RunReport, look: Observation) -> None:
    """A run that rests here and goes on there: the resume of it was lost. Where its campaign is judged already, it stays out of it."""
    run, stage = pen.run(run_id), pen.campaign(pen.run(run_id).campaign_id).stage
    may_go_on = stage in (_RESUMABLE if run.kind is RunKind.TRAIN else AFTER_FREEZE)
    goes_on = report.supervisor == "alive" and look.state in _GOING
    has_failed_since = run.state is RunState.HELD and look.state is RunState.FAILED
    if not run.left_behind and run.state in (RunState.STOPPED, RunState.HELD) and (goes_on or has_failed_since) and may_go_on:
        pen.move_run(run_id, RunState.STARTING, f"{run.host} sees it go on: history had lost its resume", actor=f"host:{run.host}")
        if stage is CampaignStage.STOPPED:
            to = training_stage(pen.fleet, pen.campaign(run.campaign_id))
            pen.move_campaign(run.campaign_id, to, f"{run.candidate} goes on on {run.host}", actor=f"host:{run.host}")


def _stays_at_rest(pen: Pen, run: Run, report: RunReport) -> bool:
    """Whether nobody on the host has anything left to do, so that its last look is old and still true: what is final there stays so,
    and what is stopped does as long as the newest wish that it knows is to stop."""
    assert report.observation is not None
    state, wanted = report.observation.state, wish(run, pen.campaign(run.campaign_id))
    is_known = wanted.want is Want.STOP and f"want:{run.run_id}:{wanted.sequence}" in pen.sight.acknowledged
    return report.supervisor == "gone" and (state in FINAL or (state is RunState.STOPPED and is_known))


def find_unstarted(pen: Pen) -> None:
    """A lost run of which its host, which answers again, has never said anything: its start order may not have arrived."""
    for poll in pen.sight.polls:
        reported = {report.run_id for report in poll.reports}
        for run in [run for run in pen.runs_on(poll.host) if run.state is RunState.LOST]:
            never_told = run.notices_seen == 0 and f"start:{run.run_id}" not in pen.sight.acknowledged
            if never_told and run.run_id not in reported:
                pen.move_run(run.run_id, RunState.STARTING, f"{run.host} answers again; the start order is sent again", actor=f"host:{run.host}")
