"""Which copies of a run's work must lie with the coordinator, so that a silent host can't hold the campaign hostage.

Predictions of every validation; of the checkpoints the unchanged base, the latest, the lowest claim, and the incumbent of the
selection rule, which may be an earlier one than the lowest.
"""

from __future__ import annotations

from dataclasses import replace

from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Job
from fleetd.coordinator.targets import TRAINS
from fleetd.fleet import Campaign, Run, Saved, Validated
from policies.facts import CampaignStage, RunKind
from policies.lifecycle import SETTLED
from policies.selection import better_than_incumbent


def ask_for_copies(pen: Pen, campaign_id: str) -> None:
    campaign = pen.campaign(campaign_id)
    for run_id in campaign.runs:
        run = pen.run(run_id)
        if run.host is not None and run.spec is not None and run.spec.contract and not run.left_behind and _answers(pen, run.host):
            for job in _missing(run, campaign):
                pen.start(job)
    _ask_to_prune(pen, campaign)


def _ask_to_prune(pen: Pen, campaign: Campaign) -> None:
    """Drop copies that are neither wanted nor chosen, once what is wanted lies here."""
    runs = [as_copied(pen.run(run_id)) for run_id in campaign.runs]
    begun = {run.continues.digest for run in runs if run.continues is not None and run.continues.digest is not None}
    keep = begun | {saved.digest for run in runs for saved in wanted_checkpoints(run, campaign.plan.selection.minimum_improvement, _chosen(campaign))}
    held = {copy.digest for run in runs for copy in run.checkpoints}
    if campaign.stage in TRAINS | {CampaignStage.STOPPED} and held - keep and keep <= held:
        pen.start(Job(key=f"prune:{campaign.campaign_id}", kind="prune", campaign_id=campaign.campaign_id, body={"keep": sorted(keep)}))


def as_copied(run: Run) -> Run:
    """A run that was left behind counts for what was copied of it: nothing more of it comes."""
    if not run.left_behind:
        return run
    copied, rows = {copy.digest for copy in run.checkpoints}, {copy.digest for copy in run.predictions}
    saved, validated = (each for each in run.saved if each.digest in copied), (each for each in run.validated if each.sha256 in rows)
    return replace(run, saved=tuple(saved), validated=tuple(validated))


def has_every_copy(pen: Pen, run: Run) -> bool:
    """Whether nothing more of this run is to be copied, or nothing can be: its host is silent."""
    campaign = pen.campaign(run.campaign_id)
    if run.host is None or run.spec is None or not run.spec.contract or run.kind is not RunKind.TRAIN or run.left_behind:
        return True
    if not _answers(pen, run.host):
        return True
    return not _missing(run, campaign) and run.state in SETTLED


def wanted_checkpoints(run: Run, minimum_improvement: float, chosen: frozenset[str] = frozenset()) -> list[Saved]:
    """The checkpoints of `run` to keep a copy of, newest last; one for each digest."""
    if not run.saved:
        return []
    claims = _claims(run)
    steps = {0, run.saved[-1].step}
    if claims:
        steps.add(min(claims, key=lambda claim: (claim.value, claim.step)).step)
        steps.add(_incumbent(claims, minimum_improvement))
    wanted = {saved.digest: saved for saved in run.saved if saved.step in steps or saved.digest in chosen}
    return sorted(wanted.values(), key=lambda saved: saved.step)


def _answers(pen: Pen, host: str) -> bool:
    known = pen.fleet.hosts.get(host)
    return known is not None and known.reachable


def _missing(run: Run, campaign: Campaign) -> list[Job]:
    given_up = {(fault["what"], fault["digest"]) for fault in run.faults}
    copied = {("predictions", copy.digest) for copy in run.predictions} | {("checkpoint", copy.digest) for copy in run.checkpoints}
    asked = [("predictions", each.step, each.sha256) for each in _newest_claims(run)]
    wanted = wanted_checkpoints(run, campaign.plan.selection.minimum_improvement, _chosen(campaign))
    asked += [("checkpoint", each.step, each.digest) for each in wanted]
    return [
        Job(
            key=f"{what}:{run.run_id}:{step}:{digest[:12]}", kind=what, campaign_id=run.campaign_id, run_id=run.run_id, host=run.host,
            body={"step": step, "digest": digest},
        )
        for what, step, digest in asked if (what, digest) not in given_up | copied
    ]


def _chosen(campaign: Campaign) -> frozenset[str]:
    selection = campaign.selection or {}
    return frozenset({selection.get("checkpoint_digest") or "", selection.get("base_checkpoint_digest") or ""})


def _newest_claims(run: Run) -> list[Validated]:
    """The last word on each step: a resume that repeats a validation leaves the newer file on disk."""
    return [each for each in {each.step: each for each in run.validated}.values() if each.sha256]


def _claims(run: Run) -> list[Validated]:
    return sorted((each for each in _newest_claims(run) if each.value is not None), key=lambda each: each.step)


def _incumbent(claims: list[Validated], minimum_improvement: float) -> int:
    best = claims[0]
    for each in claims[1:]:
        assert best.value is not None and each.value is not None
        if better_than_incumbent(each.value, best.value, minimum_improvement):
            best = each
    return best.step
