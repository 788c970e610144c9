"""What finished jobs mean: each result becomes its event, each failure a retry, a copy given up, or the end of the campaign.

A job is never remembered: what the fleet's state calls for is asked for again each tick until its event is there.
"""

from __future__ import annotations

from collections.abc import Callable

from fleetd.coordinator.decide_displacement import plan_displacement, run_book_written
from fleetd.coordinator.decide_fence import newest_copy
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import JobDone
from fleetd.coordinator.targets import AFTER_FREEZE, OVER, is_registered
from fleetd.wire import encode
from policies.facts import CampaignStage, Reason, RunState, format_moment

COPY_TRIES_MAX = 3
"""A copy is tried again this often although the host says its bytes are wrong: it may have been caught in the writing."""

COPIES = frozenset({"predictions", "checkpoint"})
GIVES_UP = frozenset({"DataDamaged", "CheckpointDamaged", "NotFound"})
"""A copy that fails with one of these will not get better; a full disk will."""
MENDABLE = frozenset({"FreezeRefused", "LedgerDamaged", "DataDamaged", "CheckpointDamaged"})
"""What a person may mend from a backup. Once training is over, a campaign waits for that until its deadline: it can't be trained again."""
HARMLESS = frozenset({"report", "prune", "run_book"})
"""Jobs whose failure is told and tried again, but ends nothing."""


def read_job_results(pen: Pen) -> None:
    for done in pen.sight.jobs_done:
        if done.error is not None:
            _failed(pen, done)
        else:
            _DONE[done.job.kind](pen, done)


def fail_campaign(pen: Pen, campaign_id: str, because: str) -> None:
    """The campaign can't go on. Runs that never started go with it; live ones are left to their deadline and to people."""
    for run_id in pen.campaign(campaign_id).runs:
        if pen.run(run_id).state is RunState.QUEUED:
            pen.move_run(run_id, RunState.FAILED, because, reason=Reason.PREFLIGHT)
    if pen.may_stage(campaign_id, CampaignStage.FAILED):
        pen.move_campaign(campaign_id, CampaignStage.FAILED, because)


def _failed(pen: Pen, done: JobDone) -> None:
    assert done.error is not None
    job, text = done.job, f"{done.error['title']}: {done.error['what']}"
    trouble = pen.sight.job_troubles.get(job.key)
    tries = trouble.count if trouble is not None else 1
    if job.kind in COPIES and done.error["error"] in GIVES_UP:
        if tries >= COPY_TRIES_MAX:
            body = {"what": job.kind, "step": job.body["step"], "digest": job.body["digest"]}
            pen.write("replication_failed", body, run=job.run_id, host=job.host, because=text)
        return
    if job.kind == "stage_seed" and done.error["error"] in GIVES_UP:
        _refuse_seed(pen, done, text)
        return
    if tries == 1:
        pen.write("job_failed", {"job": job.key, **done.error}, campaign=job.campaign_id, run=job.run_id, host=job.host, because=text)
    campaign = pen.campaign(job.campaign_id)
    is_late_stage = campaign.stage in AFTER_FREEZE or campaign.stage is CampaignStage.SELECTING
    if is_late_stage and done.error["error"] in MENDABLE and pen.now < campaign.final_at:
        return
    if done.is_final and job.kind not in COPIES | HARMLESS:
        fail_campaign(pen, job.campaign_id, f"{text}; {done.error['where']}; {done.error['fix']}")


def _refuse_seed(pen: Pen, done: JobDone, because: str) -> None:
    """A copy that doesn't verify is no beginning: the next older one is, or the beginning itself."""
    assert done.job.run_id is not None
    run = pen.run(done.job.run_id)
    if run.continues is None or run.continues.digest != done.job.body["digest"] or run.spec is not None:
        return
    older = newest_copy(pen.run(run.continues.run_id), below_step=run.continues.step)
    where = "its beginning" if older.step is None else f"step {older.step}"
    pen.write("seed_refused", {"continues": encode(older)}, run=run.run_id, host=done.job.host, because=f"{because}; it goes on from {where}")


def _preflight(pen: Pen, done: JobDone) -> None:
    campaign = pen.campaign(done.job.campaign_id)
    if campaign.stage is CampaignStage.PREFLIGHT or not is_registered(campaign):
        body = {"digests": done.result["digests"], "rows": done.result.get("rows", {})}
        pen.write("data_staged", body, campaign=done.job.campaign_id, because="registered: digests, rows, reserved splits held back")
    if campaign.stage is CampaignStage.PREFLIGHT:
        if warnings := done.result.get("warnings"):
            pen.write("preflight_warned", {"warnings": warnings}, campaign=done.job.campaign_id, because="; ".join(warnings))
        plan_displacement(pen, done.job.campaign_id, done.result.get("displaced", []), done.result.get("looked_at", []))
        pen.move_campaign(done.job.campaign_id, CampaignStage.STAGING, "hosts answer, roots can be written, interpreters are complete")


def _staged(pen: Pen, done: JobDone) -> None:
    job = done.job
    if f"{job.host}:{job.body['what']}" not in pen.campaign(job.campaign_id).staged:
        body = {"digests": done.result["digests"], "rows": done.result.get("rows", {}), "what": job.body["what"]}
        pen.write("data_staged", body, campaign=job.campaign_id, host=job.host, because=f"every file verified on {job.host}")
        known = pen.campaign(job.campaign_id).warnings
        if new := [each for each in done.result.get("warnings", ()) if each not in known]:
            pen.write("preflight_warned", {"warnings": [*known, *new]}, campaign=job.campaign_id, host=job.host, because="; ".join(new))


def _predictions(pen: Pen, done: JobDone) -> None:
    assert done.job.run_id is not None
    step, sha256 = done.job.body["step"], done.result.get("sha256", done.job.body["digest"])
    if not any(each.step == step and each.digest == sha256 for each in pen.run(done.job.run_id).predictions):
        body = {"step": step, "sha256": sha256, "value": done.result.get("value")}
        pen.write("predictions_replicated", body, run=done.job.run_id, host=done.job.host, because="verified copy")


def _checkpoint(pen: Pen, done: JobDone) -> None:
    assert done.job.run_id is not None
    step, digest = done.job.body["step"], done.job.body["digest"]
    if not any(each.step == step and each.digest == digest for each in pen.run(done.job.run_id).checkpoints):
        pen.write("checkpoint_replicated", {"step": step, "digest": digest}, run=done.job.run_id, host=done.job.host, because="verified copy")


def _pruned(pen: Pen, done: JobDone) -> None:
    for run_id in pen.campaign(done.job.campaign_id).runs:
        for copy in pen.run(run_id).checkpoints:
            if copy.digest in done.result["removed"]:
                pen.write("replica_dropped", {"step": copy.step, "digest": copy.digest}, run=run_id, because="a newer or better one is kept")


def _selected(pen: Pen, done: JobDone) -> None:
    campaign = pen.campaign(done.job.campaign_id)
    if campaign.stage is not CampaignStage.SELECTING or campaign.selection is not None:
        return
    pen.write("selection_made", done.result, campaign=campaign.campaign_id, because=str(done.result["because"]))


def _frozen(pen: Pen, done: JobDone) -> None:
    campaign = pen.campaign(done.job.campaign_id)
    if campaign.frozen_digest is None:
        body = {"frozen_sha256": done.result["frozen_sha256"]}
        pen.write("selection_frozen", body, campaign=campaign.campaign_id, because="frozen.json and the ledger hold it; it is final")


def _evaluation_staged(pen: Pen, done: JobDone) -> None:
    """The ledger holds the opening already; here it becomes history, before the data that it let out."""
    campaign, asked = pen.campaign(done.job.campaign_id), done.job.body
    opening = done.result["opening"]
    if not any(each["split"] == opening["split"] and each["number"] == opening["number"] for each in campaign.openings):
        body = {**opening, "at": format_moment(pen.now)}
        pen.write("split_opened", body, campaign=campaign.campaign_id, host=done.job.host, actor=asked["actor"], because=asked["because"])
    _staged(pen, done)


def _judged(pen: Pen, done: JobDone) -> None:
    campaign, split = pen.campaign(done.job.campaign_id), done.job.body["split"]
    if split not in campaign.results:
        body = {"split": split, "result": done.result["result"]}
        pen.write("split_judged", body, campaign=campaign.campaign_id, because="recomputed from its predictions")


def _reported(pen: Pen, done: JobDone) -> None:
    campaign = pen.campaign(done.job.campaign_id)
    if campaign.stage in AFTER_FREEZE | OVER:
        pen.write("report_written", dict(done.result), campaign=campaign.campaign_id, because="the campaign is over")


_DONE: dict[str, Callable[[Pen, JobDone], None]] = {
    "preflight": _preflight, "stage": _staged, "stage_seed": _staged, "stage_evaluation": _evaluation_staged,
    "predictions": _predictions, "collect": _predictions,
    "checkpoint": _checkpoint, "prune": _pruned, "select": _selected, "freeze": _frozen, "judge": _judged, "report": _reported,
    "run_book": run_book_written,
}
