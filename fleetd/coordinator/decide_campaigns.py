"""How a campaign goes from stage to stage, and which jobs its state calls for.

    preflight → staging → (pilot →) training → selecting → frozen → evaluated
                                      ↑ ↓  ↘ finished (commands alone)      and, from most of them, failed
                                    stopped
Everything is concluded from the Fleet and the moment: a restarted coordinator asks for exactly what is still missing.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from fleetd.campaign import HostPlan
from fleetd.coordinator.decide_jobs import fail_campaign
from fleetd.coordinator.decide_pilot import judge_pilots
from fleetd.coordinator.decide_replicas import ask_for_copies, has_every_copy
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Job
from fleetd.coordinator.specs import EVALUATE_PREFIX
from fleetd.coordinator.targets import AFTER_FREEZE, TRAINS, is_registered, training_stage
from fleetd.fleet import Campaign, Run
from policies.deadlines import cutoff_at, reserve_seconds
from policies.escalation import seconds_until_empty
from policies.facts import CampaignStage, Reason, RunKind, RunState, Split, format_moment
from policies.lifecycle import SETTLED

CUTOFF_TOLERANCE_SECONDS_MAX = 180.0
"""After the cutoff, how long the selection waits for hosts that have not reported; never more than half of the reserve."""
CUTOFF_MOVE_SECONDS_MIN = 1.0
ORDER_SECONDS = 10.0
"""An order may need this long to reach a busy host, and its supervisor to read it."""
NEIGHBOUR_TRIES_MAX = 3
"""A host waits for a neighbour's data through so many failures of it: the first may be nothing but a session that is not up yet."""
MODELS_EVALUATED = 2
"""The reserve counts rows for the chosen model and for the unchanged base."""

_BEFORE_TRAINING = frozenset({CampaignStage.PREFLIGHT, CampaignStage.STAGING})


def advance_campaigns(pen: Pen) -> None:
    for campaign_id in pen.fleet.campaigns:
        stage = pen.campaign(campaign_id).stage
        is_early = stage is CampaignStage.PREFLIGHT and _may_be_looked_at(pen, campaign_id)
        if is_early or (stage in TRAINS and not is_registered(pen.campaign(campaign_id))):
            pen.start(Job(key=f"preflight:{campaign_id}", kind="preflight", campaign_id=campaign_id))
        if stage in (CampaignStage.STAGING, *TRAINS) or (stage in AFTER_FREEZE and _goes_on_elsewhere(pen, campaign_id)):
            _stage_data(pen, campaign_id)
        if stage in (*TRAINS, CampaignStage.STOPPED, CampaignStage.SELECTING):
            ask_for_copies(pen, campaign_id)
        if pen.campaign(campaign_id).stage is CampaignStage.PILOT:
            judge_pilots(pen, campaign_id)
        if stage in (*_BEFORE_TRAINING, *TRAINS, CampaignStage.STOPPED) and pen.campaign(campaign_id).stage is not CampaignStage.FAILED:
            _shorten(pen, campaign_id)
            _settle(pen, campaign_id)
        if pen.campaign(campaign_id).stage is CampaignStage.SELECTING:
            _select(pen, campaign_id)
        if pen.campaign(campaign_id).stage in AFTER_FREEZE:
            _evaluate(pen, campaign_id)
        _report(pen, campaign_id)


def _may_be_looked_at(pen: Pen, campaign_id: str) -> bool:
    """Whether every host that has answered is known to be there: a launch is granted by a host's first words, jobs go by its first poll, and a
    preflight in between would look at nobody."""
    sights = (pen.sight.hosts.get(host.name) for host in pen.campaign(campaign_id).plan.hosts)
    return all(sight is None or sight.facts is None or sight.trouble is not None or _answers(pen, sight.plan.name) for sight in sights)


def training_runs(pen: Pen, campaign: Campaign) -> list[Run]:
    """The trainings, each line of work once: where a fence cut one off, the run that goes on with it stands for both."""
    return [run for run in (pen.run(run_id) for run_id in campaign.runs) if run.kind is RunKind.TRAIN and run.successor is None]


def tolerance_seconds(campaign: Campaign) -> float:
    return min(CUTOFF_TOLERANCE_SECONDS_MAX, (campaign.final_at - campaign.cutoff_at).total_seconds() / 2)


def _stage_data(pen: Pen, campaign_id: str) -> None:
    campaign = pen.campaign(campaign_id)
    if not is_registered(campaign):
        return  # it was stopped before its preflight was done, and resumed
    used = {candidate.host for candidate in campaign.plan.candidates}
    if _goes_on_elsewhere(pen, campaign_id):
        used.add("any")  # the host that the plan named for it is gone
    staged = frozenset(campaign.staged)
    missing = [each for each in campaign.plan.hosts if (each.name in used or "any" in used) and f"{each.name}:campaign" not in staged]
    for host in missing:
        if _answers(pen, host.name) and not _waits_for_neighbour(pen, campaign_id, host, {each.name for each in missing}):
            pen.start(Job(key=f"stage:{campaign_id}:{host.name}", kind="stage", campaign_id=campaign_id, host=host.name, body={"what": "campaign"}))
    if campaign.stage is CampaignStage.STAGING and campaign.staged:
        because = f"release and data lie on {campaign.staged[0].split(':')[0]}"
        pen.move_campaign(campaign_id, training_stage(pen.fleet, campaign), because)


def _waits_for_neighbour(pen: Pen, campaign_id: str, host: HostPlan, missing: set[str]) -> bool:
    """Whether the host's data will come from a neighbour that is being brought it now. One that is silent or in trouble is not waited for."""
    if host.data_from is None or host.data_from.host not in missing or not _answers(pen, host.data_from.host):
        return False
    trouble = pen.sight.job_troubles.get(f"stage:{campaign_id}:{host.data_from.host}")
    return trouble is None or trouble.count < NEIGHBOUR_TRIES_MAX


def _goes_on_elsewhere(pen: Pen, campaign_id: str) -> bool:
    """Whether work that a fence cut off waits for a place."""
    runs = [pen.run(run_id) for run_id in pen.campaign(campaign_id).runs]
    return any(run.continues is not None and run.state is RunState.QUEUED for run in runs)


def _answers(pen: Pen, host: str) -> bool:
    known = pen.fleet.hosts.get(host)
    return known is not None and known.reachable


def _shorten(pen: Pen, campaign_id: str) -> None:
    """Move the cutoff earlier when validations show that evaluation takes longer than the reserve holds. Never later."""
    campaign = pen.campaign(campaign_id)
    rows = sum(campaign.reserved_rows.get(split.value, 0) for split in campaign.plan.after_freeze.evaluate) * MODELS_EVALUATED
    latest = [run.validated[-1] for run in training_runs(pen, campaign) if run.validated]
    speeds = [validated.seconds / validated.rows for validated in latest if validated.rows > 0]
    if not rows or not speeds or pen.now >= campaign.cutoff_at:
        return
    terms = campaign.plan.reserve
    needed_seconds = reserve_seconds(
        rows=rows, seconds_per_row=max(speeds), minimum_seconds=terms.minimum_seconds, factor=terms.factor, margin_seconds=terms.margin_seconds,
    )
    earlier = max(cutoff_at(campaign.final_at, needed_seconds), pen.now + timedelta(seconds=_asking_seconds(campaign)))
    if (campaign.cutoff_at - earlier).total_seconds() >= CUTOFF_MOVE_SECONDS_MIN:
        because = f"{rows} rows x {max(speeds):.3f} s need {needed_seconds:.0f} s before the deadline"
        pen.write("cutoff_moved", {"cutoff_at": format_moment(earlier)}, campaign=campaign_id, because=because)


def _asking_seconds(campaign: Campaign) -> float:
    """What a cutoff has to leave from now on, so that its order still reaches every trainer in time to ask it: a killed one saves nothing."""
    graces = [candidate.stop.grace_ceiling_seconds for candidate in campaign.plan.candidates]
    return ORDER_SECONDS + seconds_until_empty(max(graces, default=0.0))


def _settle(pen: Pen, campaign_id: str) -> None:
    """End the training when every run has come to rest, or the cutoff and the tolerance for silent hosts are over."""
    campaign = pen.campaign(campaign_id)
    is_past = pen.now >= campaign.cutoff_at
    if is_past:
        _rest_at_deadline(pen, campaign)
    runs = training_runs(pen, pen.campaign(campaign_id))
    unsettled = [run for run in runs if run.state not in SETTLED]
    if unsettled and pen.now < campaign.cutoff_at + timedelta(seconds=tolerance_seconds(campaign)):
        if campaign.stage is CampaignStage.STOPPED and not is_past:
            # A stopped campaign has nothing under way: what is was placed or resumed in a part of history that is lost.
            to = training_stage(pen.fleet, campaign)
            pen.move_campaign(campaign_id, to, f"{', '.join(run.candidate for run in unsettled)}: under way")
        return
    if any(run.state is RunState.STOPPED for run in runs):
        if campaign.stage is not CampaignStage.STOPPED:
            names = ", ".join(run.candidate for run in runs if run.state is RunState.STOPPED)
            pen.move_campaign(campaign_id, CampaignStage.STOPPED, f"stopped by a person: {names}; fleetd resume goes on until the deadline")
        return
    if all(run.state is RunState.FAILED for run in runs):
        fail_campaign(pen, campaign_id, "every candidate failed: " + "; ".join(f"{run.candidate}: {run.detail or run.reason}" for run in runs))
    elif not any(run.host for run in runs):
        fail_campaign(pen, campaign_id, "the cutoff passed before any training could start")
    elif all(candidate.task is None for candidate in campaign.plan.candidates):
        over = f"{len(runs) - len(unsettled)} of {len(runs)} commands are over; a plain command leaves nothing to choose from"
        pen.move_campaign(campaign_id, CampaignStage.FINISHED, over)
    elif pen.may_stage(campaign_id, CampaignStage.SELECTING):
        left_out = f"; not waited for: {', '.join(f'{run.candidate} ({run.state})' for run in unsettled)}" if unsettled else ""
        pen.move_campaign(campaign_id, CampaignStage.SELECTING, f"{len(runs) - len(unsettled)} of {len(runs)} trainings are over{left_out}")


def _rest_at_deadline(pen: Pen, campaign: Campaign) -> None:
    for run in training_runs(pen, campaign):
        if run.state in (RunState.QUEUED, RunState.STOPPED):
            word = "never started" if run.host is None else "rested"
            pen.move_run(run.run_id, RunState.FINISHED, f"the cutoff passed while it {word}", reason=Reason.DEADLINE)


def _select(pen: Pen, campaign_id: str) -> None:
    """Select once every copy that can still come has come, among what lies verified in the store; then freeze."""
    campaign = pen.campaign(campaign_id)
    if campaign.selection is None:
        waited = pen.now >= campaign.since + timedelta(seconds=tolerance_seconds(campaign))
        is_complete = all(has_every_copy(pen, run) for run in training_runs(pen, campaign))
        if (waited or is_complete) and f"prune:{campaign_id}" not in pen.sight.jobs_running:
            pen.start(Job(key=f"select:{campaign_id}", kind="select", campaign_id=campaign_id))
        return
    if not campaign.selection.get("checkpoint_digest"):
        fail_campaign(pen, campaign_id, f"no checkpoint can be chosen: {campaign.selection.get('because')}")
    elif campaign.frozen_digest is None:
        pen.start(Job(key=f"freeze:{campaign_id}", kind="freeze", campaign_id=campaign_id))
    else:
        pen.move_campaign(campaign_id, CampaignStage.FROZEN, "the selection is final; reserved splits may be opened")


def splits_wanted(campaign: Campaign) -> tuple[Split, ...]:
    """Reserved splits to judge, in order: those of the plan, then those that a person asked for."""
    return tuple(dict.fromkeys((*campaign.plan.after_freeze.evaluate, *(Split(asked["split"]) for asked in campaign.asked))))


def _evaluate(pen: Pen, campaign_id: str) -> None:
    """One reserved split after the other: an evaluation run opens it (see decide_runs), its predictions are copied and judged."""
    campaign = pen.campaign(campaign_id)
    wanted = splits_wanted(campaign)
    split = next((split for split in wanted if split.value not in campaign.results), None)
    if split is not None:
        _judge(pen, campaign, split)
    elif wanted and campaign.stage is CampaignStage.FROZEN:
        pen.move_campaign(campaign_id, CampaignStage.EVALUATED, f"judged: {', '.join(each.value for each in wanted)}")


def _judge(pen: Pen, campaign: Campaign, split: Split) -> None:
    campaign_id = campaign.campaign_id
    name = f"{EVALUATE_PREFIX}{split}"
    looks = [pen.run(each) for each in campaign.runs if pen.run(each).candidate == name and pen.run(each).successor is None]
    run_id = looks[-1].run_id if looks else f"{campaign_id}-{name}"
    if not looks:
        body = {"candidate": name, "kind": RunKind.EVALUATE.value}
        pen.write("run_added", body, campaign=campaign_id, run=run_id, because=f"{split} is judged next")
    run = pen.run(run_id)
    if run.state in (RunState.QUEUED, RunState.STOPPED) and pen.now >= campaign.final_at:
        word = "while it rested" if run.state is RunState.STOPPED else "before it could start"
        pen.move_run(run_id, RunState.FINISHED, f"the final deadline passed {word}", reason=Reason.DEADLINE)
        run = pen.run(run_id)
    if run.state is RunState.FAILED or (run.state is RunState.FINISHED and run.reason is Reason.DEADLINE):
        if campaign.stage is CampaignStage.FROZEN:
            fail_campaign(pen, campaign_id, f"the evaluation on {split} {run.state}: {run.detail or run.reason}; the frozen selection stands")
    elif run.state is RunState.FINISHED:
        kind = "judge" if run.predictions else "collect"
        body = {"split": split.value, "step": (campaign.selection or {})["step"], "digest": (campaign.selection or {})["checkpoint_digest"]}
        pen.start(Job(key=f"{kind}:{run_id}", kind=kind, campaign_id=campaign_id, run_id=run_id, host=run.host, body=body))


def _report(pen: Pen, campaign_id: str) -> None:
    campaign = pen.campaign(campaign_id)
    if campaign.reported or not campaign.plan.after_freeze.report:
        return
    judged = all(split.value in campaign.results for split in splits_wanted(campaign))
    is_ready = (campaign.stage in AFTER_FREEZE and judged) or campaign.stage in (CampaignStage.FAILED, CampaignStage.FINISHED)
    if is_ready:
        pen.start(Job(key=f"report:{campaign_id}", kind="report", campaign_id=campaign_id))


def last_safe_stop_at(campaign: Campaign, grace_seconds: float) -> datetime:
    """The latest moment at which asking still leaves a run its grace before the cutoff."""
    return campaign.cutoff_at - timedelta(seconds=grace_seconds)
