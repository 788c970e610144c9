"""The pilot of a campaign: candidates that ask for one are judged by their first steps, before anything else is started.

    all that were started have passed     training
    one failed before it passed           the campaign fails, and every other run is asked to stop

A candidate that waits for memory until another one is done comes to its pilot later: it is judged then, for itself alone.
"""

from __future__ import annotations

from fleetd.coordinator.decide_jobs import fail_campaign
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.specs import wish
from fleetd.coordinator.targets import has_passed, has_pilot
from fleetd.fleet import Run
from fleetd.model import WantOrder
from fleetd.wire import encode
from policies.facts import CampaignStage, Reason, RunState, StopMode, Want
from policies.lifecycle import ACTIVE


def judge_pilots(pen: Pen, campaign_id: str) -> None:
    campaign = pen.campaign(campaign_id)
    runs = [run for run in (pen.run(run_id) for run_id in campaign.runs) if has_pilot(campaign, run) and run.successor is None]
    failed = next((run for run in runs if run.state is RunState.FAILED and not has_passed(run)), None)
    if failed is not None:
        because = f"the pilot of {failed.candidate} failed: {failed.detail or failed.reason}"
        for other in (pen.run(run_id) for run_id in campaign.runs):
            _ask_to_stop(pen, other, because)
        fail_campaign(pen, campaign_id, because)
        return
    started = [run for run in runs if run.state is not RunState.QUEUED]
    if started and all(has_passed(run) for run in started):
        waiting = ", ".join(run.candidate for run in runs if run not in started)
        names = ", ".join(run.candidate for run in started)
        pen.move_campaign(campaign_id, CampaignStage.TRAINING, f"pilot passed: {names}" + (f"; comes to its own later: {waiting}" if waiting else ""))


def _ask_to_stop(pen: Pen, run: Run, because: str) -> None:
    """Gracefully, so that what it has is saved for whoever looks for the fault. Asked once."""
    before = wish(run, pen.campaign(run.campaign_id))
    if run.state not in ACTIVE or before.want is Want.STOP:
        return
    order = WantOrder(sequence=before.sequence + 1, want=Want.STOP, mode=StopMode.GRACEFUL, reason=Reason.SUPERSEDED, actor="coordinator", at=pen.now)
    pen.write("want_changed", {"want": encode(order)}, run=run.run_id, host=run.host, because=because)
