"""What people ask for: launch, stop, resume, open; hosts are in decide_operator. Each request is granted as events or refused in three lines."""

from __future__ import annotations

from collections.abc import Callable

from fleetd.coordinator import decide_operator
from fleetd.coordinator.decide_displacement import restore
from fleetd.coordinator.decide_fence import add_successor, newest_copy
from fleetd.coordinator.decide_launch import launch
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Request
from fleetd.coordinator.specs import role, wish
from fleetd.coordinator.strangers import strangers
from fleetd.coordinator.targets import AFTER_FREEZE, find_campaign, find_runs, training_stage
from fleetd.fleet import Run
from fleetd.model import Continuation, WantOrder
from fleetd.wire import encode
from policies.errors import ExplainedError, FreezeRefused, NotFound, RequestRefused
from policies.facts import RESERVED_SPLITS, CampaignStage, Reason, RunKind, RunState, Split, StopMode, Want, format_moment
from policies.lifecycle import FINAL, SETTLED


def read_requests(pen: Pen) -> None:
    kinds: dict[str, Callable[[Pen, Request], None]] = {
        "launch": launch, "stop": _stop, "restore": restore, "resume": _resume, "open": _open,
        "drain": decide_operator.drain, "undrain": decide_operator.undrain,
        "fence": decide_operator.fence, "clear": decide_operator.clear, "takeover": decide_operator.takeover, "took_over": decide_operator.took_over,
    }
    for request in pen.sight.requests:
        try:
            kinds[request.kind](pen, request)
        except ExplainedError as error:
            pen.refuse(request, error)


def _stop(pen: Pen, request: Request) -> None:
    mode, actor = StopMode(str(request.body.get("mode") or "graceful")), str(request.body.get("actor") or "user")
    stopped = _stop_strangers(pen, str(request.body.get("target") or ""), mode, actor)
    for run_id in find_runs(pen.fleet, str(request.body.get("target") or "")) if not stopped or request.body.get("target") == "all" else ():
        run = pen.run(run_id)
        if run.state in SETTLED:
            continue
        stopped.append(run_id)
        if run.state is RunState.QUEUED:
            pen.move_run(run_id, RunState.STOPPED, "stopped before it was started", reason=Reason.USER, actor=actor)
        _want(pen, run, Want.STOP, mode, actor)
    if not stopped and request.body.get("target") != "all":
        raise RequestRefused(
            "nothing to stop", where=str(request.body.get("target")), what="every run of it has already come to rest",
            fix="fleetd status   (shows where each run is)",
        )
    pen.answer(request, {"runs": stopped})


def _stop_strangers(pen: Pen, target: str, mode: StopMode, actor: str) -> list[str]:
    """Runs that only their hosts know are named by their whole id, or by `all`. The host counts the order after the one it obeys."""
    named = [each for each in strangers(pen.fleet, pen.sight) if target in (each.run_id, "all")]
    for stranger in named:
        wished = WantOrder(sequence=1, want=Want.STOP, mode=mode, reason=Reason.USER, actor=actor, at=pen.now)
        because = f"stop {mode}, a run that history does not know"
        pen.write("stranger_want_changed", {"want": encode(wished)}, run=stranger.run_id, host=stranger.host, actor=actor, because=because)
    return [each.run_id for each in named]


def _want(pen: Pen, run: Run, want: Want, mode: StopMode, actor: str) -> None:
    before = wish(run, pen.campaign(run.campaign_id))
    is_known = f"want:{run.run_id}:{before.sequence}" in pen.sight.acknowledged
    if before.want is want and before.mode is mode and want is Want.STOP and is_known:
        return  # asked before, and the host obeys it; an order that it has not taken may still be outranked there
    order = WantOrder(sequence=before.sequence + 1, want=want, mode=mode, reason=Reason.USER, actor=actor, at=pen.now)
    words = f"{want} {mode}" if want is Want.STOP else want.value
    pen.write("want_changed", {"want": encode(order)}, run=run.run_id, host=run.host, actor=actor, because=words)


def _resume(pen: Pen, request: Request) -> None:
    target, actor = str(request.body.get("target") or ""), str(request.body.get("actor") or "user")
    runs = [pen.run(run_id) for run_id in find_runs(pen.fleet, target)]
    resting = [run for run in runs if run.state in (RunState.STOPPED, RunState.HELD)]
    if target == "all":
        resting = [run for run in resting if _is_resumable(pen, run)]
    if not resting:
        going = [run.candidate for run in runs if run.state not in FINAL]
        what = f"still under way: {', '.join(going)}" if going else "its runs are finished or failed, and that is final"
        fix = f"fleetd wait {target}, then fleetd resume {target}" if going else "launch a new campaign"
        raise RequestRefused("nothing to resume", where=target, what=what, fix=fix)
    for run in resting:
        _check_resumable(pen, run)
    resumed = [run.run_id if not run.left_behind else _go_on_elsewhere(pen, run, actor) for run in resting]
    for run in resting:
        if run.left_behind:
            continue
        if run.spec is not None or run.want is not None:
            _want(pen, run, Want.RUN, StopMode.GRACEFUL, actor)
        to = RunState.STARTING if run.state is RunState.HELD else RunState.QUEUED
        pen.move_run(run.run_id, to, "resumed", actor=actor)
    for campaign_id in dict.fromkeys(run.campaign_id for run in resting):
        if pen.campaign(campaign_id).stage is CampaignStage.STOPPED:
            pen.move_campaign(campaign_id, training_stage(pen.fleet, pen.campaign(campaign_id)), f"{actor} resumed it", actor=actor)
    pen.answer(request, {"runs": resumed})


def _go_on_elsewhere(pen: Pen, run: Run, actor: str) -> str:
    """A run whose host was fenced while it was at rest: that one stays there for good, its work goes on in a new run."""
    pen.move_run(run.run_id, RunState.QUEUED, "resumed", actor=actor)
    because = f"{run.host or 'a host that may have it'} was fenced; its work goes on in a new run"
    pen.move_run(run.run_id, RunState.FAILED, because, reason=Reason.SUPERSEDED, actor=actor)
    begins = newest_copy(run) if run.kind is RunKind.TRAIN else Continuation(run_id=run.run_id)
    return add_successor(pen, run, begins, actor)


def _is_resumable(pen: Pen, run: Run) -> bool:
    try:
        _check_resumable(pen, run)
    except ExplainedError:
        return False
    return True


def _check_resumable(pen: Pen, run: Run) -> None:
    campaign = pen.campaign(run.campaign_id)
    if run.kind is RunKind.TRAIN and campaign.stage in AFTER_FREEZE:
        what = "its selection is frozen: a longer training could not take part any more"
        raise FreezeRefused(f"{run.candidate} can't be resumed", where=f"campaign {campaign.campaign_id}", what=what, fix="launch a new campaign")
    limit = campaign.final_at if run.kind is RunKind.EVALUATE else campaign.cutoff_at
    if pen.now >= limit or campaign.stage in (CampaignStage.SELECTING, CampaignStage.FAILED, CampaignStage.FINISHED):
        what = f"its deadline {format_moment(limit)} has passed" if pen.now >= limit else f"the campaign is {campaign.stage}"
        fix = "launch a new campaign; a resume never moves a deadline"
        raise RequestRefused(f"{run.candidate} can't be resumed", where=f"campaign {campaign.campaign_id}", what=what, fix=fix)


def _open(pen: Pen, request: Request) -> None:
    campaign = find_campaign(pen.fleet, str(request.body.get("campaign") or ""))
    assert campaign is not None
    actor, because = str(request.body.get("actor") or "user"), str(request.body.get("because") or "")
    word = str(request.body.get("split") or "")
    where = f"campaign {campaign.campaign_id}, split {word}"
    if word not in RESERVED_SPLITS or role(campaign, Split(word)) is None:
        names = [each.split.value for each in campaign.plan.data if each.split in RESERVED_SPLITS]
        what = f"it registered {', '.join(names) or 'none'}"
        raise NotFound(f"{word!r} is no reserved split of this campaign", where=where, what=what, fix="name one of those")
    if campaign.frozen_digest is None:
        what = f"the campaign is {campaign.stage}: no selection is frozen yet"
        raise FreezeRefused(f"{word} stays closed", where=where, what=what, fix="wait until it is frozen; fleetd status shows the stage")
    wanted = (*(split.value for split in campaign.plan.after_freeze.evaluate), *(asked["split"] for asked in campaign.asked))
    if word in wanted:
        what = "it was opened and judged already" if word in campaign.results else "it is being opened and judged already"
        raise FreezeRefused(f"{word} is not opened twice", where=where, what=what, fix=f"fleetd report {campaign.campaign_id}   (shows its figures)")
    pen.write("open_asked", {"split": word}, campaign=campaign.campaign_id, actor=actor, because=because)
    pen.answer(request, {"campaign_id": campaign.campaign_id, "split": word})
