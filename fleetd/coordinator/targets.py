"""What a person means by a target: an id, a campaign's name, a candidate's name, or an unambiguous prefix of an id."""

from __future__ import annotations

from fleetd.fleet import Campaign, Fleet, Run
from policies.errors import NotFound
from policies.facts import CampaignStage, RunKind

NAMES_LISTED_MAX = 5

OVER = frozenset({CampaignStage.FAILED, CampaignStage.EVALUATED, CampaignStage.FINISHED})
AFTER_FREEZE = frozenset({CampaignStage.FROZEN, CampaignStage.EVALUATED})


TRAINS = frozenset({CampaignStage.PILOT, CampaignStage.TRAINING})
"""Stages in which trainings go on."""


def is_over(campaign: Campaign) -> bool:
    """Whether nothing will happen by itself any more."""
    return campaign.stage in OVER or (campaign.stage is CampaignStage.FROZEN and not campaign.plan.after_freeze.evaluate)


def is_registered(campaign: Campaign) -> bool:
    """Whether the digest of every data role is history: nothing can be staged or judged before."""
    return all(role.split.value in campaign.digests for role in campaign.plan.data)


def has_pilot(campaign: Campaign, run: Run) -> bool:
    """Whether the plan asks that the first steps of this run be checked before the rest."""
    return any(each.name == run.candidate and (each.task or {}).get("pilot") for each in campaign.plan.candidates) and run.kind is RunKind.TRAIN


def has_passed(run: Run) -> bool:
    return run.pilot is not None and run.pilot.get("passed") is True


def is_time(campaign: Campaign, run: Run) -> bool:
    """Whether the campaign's stage lets this run start: while pilots are judged, only runs that have one."""
    if run.kind is RunKind.EVALUATE:
        return campaign.stage in AFTER_FREEZE
    return campaign.stage is CampaignStage.TRAINING or (campaign.stage is CampaignStage.PILOT and has_pilot(campaign, run))


def runs_by_host(fleet: Fleet) -> dict[str, list[Run]]:
    """Every placed run, below the host that has it: one pass, for whoever asks about each host."""
    found: dict[str, list[Run]] = {}
    for run in fleet.runs.values():
        if run.host is not None:
            found.setdefault(run.host, []).append(run)
    return found


def training_stage(fleet: Fleet, campaign: Campaign) -> CampaignStage:
    """Where a campaign goes on when its trainings begin or are resumed: through the pilot, until one has passed and none is under way."""
    piloted = [run for run in (fleet.runs[run_id] for run_id in campaign.runs) if has_pilot(campaign, run) and run.successor is None]
    return CampaignStage.TRAINING if all(has_passed(run) for run in piloted) else CampaignStage.PILOT


def find_runs(fleet: Fleet, target: str) -> tuple[str, ...]:
    """The runs that `target` names: a run, a campaign or a candidate, by id, name or unambiguous prefix; `all` is every live campaign's.

    NotFound says what there is.
    """
    if target == "all":
        return tuple(run_id for campaign in fleet.campaigns.values() if not is_over(campaign) for run_id in campaign.runs)
    if target in fleet.runs:
        return (target,)
    campaign = find_campaign(fleet, target, or_none=True)
    if campaign is not None:
        return campaign.runs
    named = [run for run in fleet.runs.values() if run.candidate == target]
    named = [run for run in named if run.successor is None] or named  # the run that goes on stands for the one it goes on with
    live = [run for run in named if not is_over(fleet.campaigns[run.campaign_id])] or named
    found = live or [run for run in fleet.runs.values() if run.run_id.startswith(target)]
    return (_only([run.run_id for run in found], target, "run, candidate or campaign", [*fleet.campaigns]),)


def find_campaign(fleet: Fleet, target: str, *, or_none: bool = False) -> Campaign | None:
    """The campaign with this id, name (the one still going on, else the newest) or unambiguous prefix."""
    if target in fleet.campaigns:
        return fleet.campaigns[target]
    named = [campaign for campaign in fleet.campaigns.values() if campaign.plan.name == target]
    live = [campaign for campaign in named if not is_over(campaign)]
    if len(live) == 1 or (named and not live):
        return (live or named)[-1]
    found = [campaign.campaign_id for campaign in live] or [each for each in fleet.campaigns if target and each.startswith(target)]
    if or_none and not found:
        return None
    return fleet.campaigns[_only(found, target, "campaign", [*fleet.campaigns])]


def _only(found: list[str], target: str, what: str, known: list[str]) -> str:
    if len(found) == 1:
        return found[0]
    if found:
        meant = f"it could be {', '.join(found[:NAMES_LISTED_MAX])}"
        raise NotFound(f"{target!r} names more than one {what}", where="fleetd", what=meant, fix="name one of them in full")
    listed = f"known campaigns: {', '.join(known[-NAMES_LISTED_MAX:])}" if known else "no campaign was ever launched here"
    raise NotFound(f"there is no {what} {target!r}", where="fleetd", what=listed, fix="fleetd status   (lists every campaign and run)")
