"""Whether a plan can be launched now: time, names, hosts and memory are judged before anything of it becomes history."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from fleetd.campaign import HostPlan, Plan
from fleetd.coordinator.decide_hosts import needed_hosts
from fleetd.coordinator.decide_runs import lacks_enforcement
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import HostSight, Request
from fleetd.coordinator.specs import EVALUATE_PREFIX, caps_of
from fleetd.coordinator.targets import is_over
from fleetd.fleet import Campaign
from fleetd.model import Caps
from fleetd.wire import WireError, decode, encode
from policies.deadlines import cutoff_at, reserve_seconds
from policies.errors import ExplainedError, HostUnreachable, RequestRefused, from_json
from policies.facts import CampaignStage, format_moment, stamp
from policies.memory import admit

LAUNCH_WAIT_SECONDS = 15.0
"""How long a launch waits for hosts that have not yet answered, before it is judged by what is known."""
FIRST_ANSWER_SECONDS = 60.0
"""How long it waits for a host that has neither answered nor failed: a new one may be at the end of a slow line, with all to be brought to it."""
RUNS_PER_PLAN_MAX = 64
TRANSPORTS = ("local", "ssh")


def launch(pen: Pen, request: Request) -> None:
    """Grant or refuse. A granted launch is history at once, and answered when its data is registered: `campaign_id` in the body of a
    request that was kept names the campaign it became."""
    if "campaign_id" in request.body:
        _answer(pen, request)
        return
    try:
        plan = decode(Plan, request.body.get("plan"))
    except WireError as fault:
        raise RequestRefused("the plan can't be launched", where="plan", what=str(fault), fix="fleetd check PLAN") from fault
    final_at = plan.deadline_at or pen.now + timedelta(seconds=plan.deadline_seconds or 0.0)
    cutoff = cutoff_at(final_at, reserve_seconds(
        rows=None, seconds_per_row=None, minimum_seconds=plan.reserve.minimum_seconds, factor=plan.reserve.factor,
        margin_seconds=plan.reserve.margin_seconds,
    ))
    _check_plan(pen, plan, final_at, cutoff)
    if not _hosts_known(pen, plan, request):
        pen.keep(request)
        return
    _check_hosts(pen, plan)
    campaign_id = _new_id(pen, plan)
    actor = str(request.body.get("actor") or "user")
    resolved = replace(plan, deadline_at=final_at)
    body = {
        "plan": encode(resolved), "plan_text": str(request.body.get("plan_text") or ""), "final_at": format_moment(final_at),
        "cutoff_at": format_moment(cutoff),
    }
    because = f"{len(plan.candidates)} candidates, final deadline {format_moment(final_at)}"
    pen.write("campaign_launched", body, campaign=campaign_id, actor=actor, because=because)
    for candidate in plan.candidates:
        run_id = f"{campaign_id}-{candidate.name}"
        pen.write("run_added", {"candidate": candidate.name, "kind": candidate.kind.value}, campaign=campaign_id, run=run_id, actor=actor)
    pen.keep(replace(request, body={"campaign_id": campaign_id, "actor": actor}))


def _answer(pen: Pen, request: Request) -> None:
    campaign = pen.campaign(request.body["campaign_id"])
    if campaign.stage is CampaignStage.PREFLIGHT:
        _check_held_up(pen, campaign)
        pen.keep(request)
        return
    errors = [done.error for done in pen.sight.jobs_done if done.job.campaign_id == campaign.campaign_id and done.error]
    if campaign.stage is CampaignStage.FAILED:
        if errors:
            raise from_json(errors[0])
        where, fix = f"campaign {campaign.campaign_id}", "mend that and launch again"
        raise RequestRefused("the launch failed", where=where, what=campaign.detail, fix=fix)
    pen.answer(request, {"campaign_id": campaign.campaign_id, "runs": list(campaign.runs), "warnings": list(campaign.warnings)})


def _check_held_up(pen: Pen, campaign: Campaign) -> None:
    """Tell the caller after a while what a launch waits for: a full disk may stay full for hours, and nobody waits that long in silence."""
    trouble = pen.sight.job_troubles.get(f"preflight:{campaign.campaign_id}")
    if trouble is not None and (pen.now - campaign.launched_at).total_seconds() > LAUNCH_WAIT_SECONDS:
        raise ExplainedError(
            "the launch is held up", where=f"campaign {campaign.campaign_id}, {trouble.error['where']}", what=trouble.error["what"],
            fix=f"mend that, and it goes on by itself (fleetd wait {campaign.campaign_id}); to give it up: fleetd stop {campaign.campaign_id}",
        )


def _check_plan(pen: Pen, plan: Plan, final_at: datetime, cutoff: datetime) -> None:
    where = f"plan {plan.name}"
    if pen.sight.journal_health != "ok":
        raise RequestRefused(
            "nothing can be launched now", where="the coordinator's journal", what=pen.sight.journal_health,
            fix="free space on its disk, then launch again",
        )
    for campaign in pen.fleet.campaigns.values():
        if campaign.plan.name == plan.name and campaign.plan.plan_sha256 == plan.plan_sha256 and not is_over(campaign):
            what = f"campaign {campaign.campaign_id} was launched from it and is {campaign.stage}"
            fix = f"fleetd status {campaign.campaign_id}   (or fleetd stop {campaign.campaign_id})"
            raise RequestRefused("this plan is already under way", where=where, what=what, fix=fix)
    if final_at <= pen.now:
        what = f"the deadline {format_moment(final_at)} lies {_span(pen.now, final_at)} in the past"
        raise RequestRefused("the deadline is already past", where=where, what=what, fix="give a later deadline in the plan, then launch again")
    if cutoff <= pen.now:
        reserved = f"the reserve keeps the last {plan.reserve.minimum_seconds:.0f} s of it for evaluation"
        what = f"the deadline is {_span(final_at, pen.now)} away, and {reserved}"
        raise RequestRefused("no time is left for training", where=where, what=what, fix="give a later deadline or a smaller reserve.minimum")
    names = [candidate.name for candidate in plan.candidates]
    clash = next((name for name in names if names.count(name) > 1 or name.startswith(EVALUATE_PREFIX)), None)
    if clash is not None or not names or len(names) > RUNS_PER_PLAN_MAX:
        counted = f"it has {len(names)} candidates, 1 to {RUNS_PER_PLAN_MAX} are possible"
        what = counted if clash is None else f"candidate name {clash!r} occurs twice or starts with {EVALUATE_PREFIX!r}"
        raise RequestRefused("the candidates can't be told apart", where=where, what=what, fix="give each candidate its own name, then launch again")
    for host in plan.hosts:
        if host.transport not in TRANSPORTS:
            what = f"transport {host.transport!r} of host {host.name} is not supported by this version"
            raise RequestRefused(f"host {host.name} can't be reached", where=where, what=what, fix=f"use transport: {' or '.join(TRANSPORTS)}")
        _check_known_host(pen, host)


def _check_known_host(pen: Pen, host: HostPlan) -> None:
    for name, other in needed_hosts(pen.fleet).items():
        if (name == host.name) != (other.place == host.place):
            what = f"a campaign under way knows {name} as {other.place}, here {host.name} is {host.place}"
            fix = "use the same name and root for the same machine in both plans"
            raise RequestRefused("two names for one host", where=f"host {host.name}", what=what, fix=fix)


def _hosts_known(pen: Pen, plan: Plan, request: Request) -> bool:
    """Whether every host of the plan has answered, or has had its time to. Asks for a session with each."""
    for host in plan.hosts:
        pen.need_host(host)
    sights = [pen.sight.hosts.get(host.name) for host in plan.hosts]
    if all(sight is not None and sight.facts is not None for sight in sights):
        return True
    for sight in sights:
        if sight is not None and sight.facts is None and sight.trouble is not None and sight.trouble["error"] != "HostUnreachable":
            raise from_json(sight.trouble)
    is_trying = any(sight is None or (sight.facts is None and sight.trouble is None) for sight in sights)
    if (pen.now - request.received_at).total_seconds() < (FIRST_ANSWER_SECONDS if is_trying else LAUNCH_WAIT_SECONDS):
        return False
    silent = [(host, sight) for host, sight in zip(plan.hosts, sights, strict=True) if sight is None or sight.facts is None]
    if len(silent) == len(plan.hosts):
        host, sight = silent[0]
        trouble = sight.trouble if sight is not None and sight.trouble else {}
        what = f"{trouble['title']}: {trouble['what']}" if trouble else f"no answer in {FIRST_ANSWER_SECONDS:.0f} s"
        fix = trouble.get("fix", f"see daemon.log and {host.root}/agent.log, then launch again")
        raise HostUnreachable(f"host {host.name} does not answer", where=host.place, what=what, fix=fix)
    return True


def _check_hosts(pen: Pen, plan: Plan) -> None:
    known = {host.name: (host, pen.sight.hosts[host.name]) for host in plan.hosts if pen.sight.hosts.get(host.name)}
    for host, sight in known.values():
        if sight.facts is not None and not sight.facts.root_writable:
            what, fix = f"its root {host.root} can't be written", f"make {host.root} writable for the user that fleetd runs as"
            raise RequestRefused(f"host {host.name} can't be used", where=f"{host.name}:{host.root}", what=what, fix=fix)
    asking: list[tuple[str, str, Caps]] = [(f"candidate {each.name}", each.host, caps_of(each)) for each in plan.candidates]
    if plan.after_freeze.evaluate:
        asking.append(("after_freeze", "any", caps_of(plan.after_freeze)))
    for name, wanted, caps in asking:
        options = [each for host, each in known.items() if wanted in ("any", host)]
        verdicts = [_fits(host, sight, caps) for host, sight in options]
        if verdicts and all(text is not None for text in verdicts):
            what = "; ".join(f"{host.name}: {text}" for (host, _), text in zip(options, verdicts, strict=True))
            raise RequestRefused(
                f"{name} fits no host", where=f"plan {plan.name}, {name}", what=what,
                fix="give it a smaller memory_cap, a host with more memory, or set memory_cap.demand: sampled",
            )


def _fits(host: HostPlan, sight: HostSight, caps: Caps) -> str | None:
    """Why the cap could never be kept on this host, or None when it could or nobody knows yet."""
    if sight.facts is None:
        return None
    if (lacking := lacks_enforcement(sight.facts, caps.demand)) is not None:
        return lacking
    verdict = admit(
        capacity_bytes=host.capacity_bytes or sight.facts.memory_total_bytes, floor_bytes=host.floor_bytes, available_bytes=None, committed=(),
        asked_bytes=caps.host_bytes + (caps.accelerator_bytes if sight.facts.accelerators else 0),
    )
    return None if verdict.possible else verdict.text


def _new_id(pen: Pen, plan: Plan) -> str:
    """Ids are counted, never drawn: the second launch of a name within one second gets -2."""
    base = f"{stamp(pen.now)}-{plan.name}"
    taken = sum(1 for known in pen.fleet.campaigns if known == base or known.startswith(f"{base}-"))
    return base if not taken else f"{base}-{taken + 1}"


def _span(later: datetime, earlier: datetime) -> str:
    seconds = abs((later - earlier).total_seconds())
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
