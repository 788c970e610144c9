"""The one state of the coordinator: what replaying its journal says. Every view is made from a Fleet.

An Event is past tense and carries its verdict (actor, rule, evidence), so replay repeats history and never judges again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fleetd.campaign import Plan
from fleetd.model import Continuation, RunSpec, WantOrder
from fleetd.records import Campaign, Displaced, Event, Fleet, Host, Mark, Replica, Run, Saved, Validated
from fleetd.wire import decode
from policies.facts import CampaignStage, Reason, RunKind, RunState, parse_moment
from policies.lifecycle import check_campaign_step, check_run_step
from policies.workloads import DISPLACED_TRANSITIONS, DisplacedState, Workload, WorkloadSight

__all__ = ["Campaign", "Displaced", "Event", "Fleet", "Host", "Mark", "Replica", "Run", "Saved", "Validated", "apply", "replay"]


def apply(fleet: Fleet, event: Event) -> Fleet:
    """The fleet after one more event. IllegalTransition or AssertionError when history contradicts itself."""
    assert event.sequence == fleet.sequence + 1, f"event {event.sequence} after {fleet.sequence}"
    return replace(_APPLY[event.kind](fleet, event), sequence=event.sequence)


def replay(events: list[Event]) -> Fleet:
    """The fleet that these events, from the first on, add up to."""
    fleet = Fleet()
    for event in events:
        fleet = apply(fleet, event)
    return fleet


def _with_run(fleet: Fleet, run: Run) -> Fleet:
    return replace(fleet, runs={**fleet.runs, run.run_id: run})


def _with_campaign(fleet: Fleet, campaign: Campaign) -> Fleet:
    return replace(fleet, campaigns={**fleet.campaigns, campaign.campaign_id: campaign})


def _run(fleet: Fleet, event: Event) -> Run:
    assert event.run_id is not None
    return fleet.runs[event.run_id]


def _campaign(fleet: Fleet, event: Event) -> Campaign:
    assert event.campaign_id is not None
    return fleet.campaigns[event.campaign_id]


def _campaign_launched(fleet: Fleet, event: Event) -> Fleet:
    assert event.campaign_id is not None and event.campaign_id not in fleet.campaigns
    body = event.body
    campaign = Campaign(
        campaign_id=event.campaign_id, plan=decode(Plan, body["plan"]), stage=CampaignStage.PREFLIGHT, since=event.at,
        launched_at=event.at, launched_sequence=event.sequence, final_at=parse_moment(body["final_at"]), cutoff_at=parse_moment(body["cutoff_at"]),
        plan_text=body.get("plan_text", ""),
    )
    return _with_campaign(fleet, campaign)


def _campaign_moved(fleet: Fleet, event: Event) -> Fleet:
    campaign, stage = _campaign(fleet, event), CampaignStage(event.body["to"])
    check_campaign_step(campaign.stage, stage)
    return _with_campaign(fleet, replace(campaign, stage=stage, since=event.at, detail=event.because))


def _preflight_warned(fleet: Fleet, event: Event) -> Fleet:
    return _with_campaign(fleet, replace(_campaign(fleet, event), warnings=tuple(event.body["warnings"])))


def _displacement_planned(fleet: Fleet, event: Event) -> Fleet:
    """What preflight showed of the work that is to make room; nothing of it is touched yet."""
    campaign = _campaign(fleet, event)
    found = tuple(
        Displaced(
            host=each["host"], workload=decode(Workload, each["workload"]), found=decode(WorkloadSight, each["found"]), state=DisplacedState.FOUND,
            since=event.at,
        ) for each in event.body["displaced"]
    )
    shown = tuple(event.body["hosts"])
    return _with_campaign(fleet, replace(campaign, displaced=found, displaced_shown=shown, displaced_moves=campaign.displaced_moves + 1))


def _displacement_moved(fleet: Fleet, event: Event) -> Fleet:
    campaign, state = _campaign(fleet, event), DisplacedState(event.body["to"])
    before = next(each for each in campaign.displaced if (each.host, each.workload.name) == (event.host, event.body["name"]))
    assert state is before.state or state in DISPLACED_TRANSITIONS[before.state], f"{before.state} to {state} of {before.workload.name}"
    asking = before.asking + (state is DisplacedState.RESTORING and before.state is not state)
    since = before.since if state is before.state else event.at
    after = replace(before, state=state, since=since, detail=event.because, asking=asking)
    displaced = tuple(after if each is before else each for each in campaign.displaced)
    return _with_campaign(fleet, replace(campaign, displaced=displaced, displaced_moves=campaign.displaced_moves + 1))


def _run_book_written(fleet: Fleet, event: Event) -> Fleet:
    return _with_campaign(fleet, replace(_campaign(fleet, event), run_book_moves=event.body["moves"]))


def _data_staged(fleet: Fleet, event: Event) -> Fleet:
    campaign = _campaign(fleet, event)
    what = event.body.get("what")
    staged = (*campaign.staged, f"{event.host}:{what}") if what else campaign.staged
    digests, rows = {**campaign.digests, **event.body["digests"]}, {**campaign.reserved_rows, **event.body.get("rows", {})}
    return _with_campaign(fleet, replace(campaign, digests=digests, reserved_rows=rows, staged=staged))


def _cutoff_moved(fleet: Fleet, event: Event) -> Fleet:
    campaign, cutoff = _campaign(fleet, event), parse_moment(event.body["cutoff_at"])
    assert cutoff <= campaign.cutoff_at, "a cutoff only moves earlier"
    return _with_campaign(fleet, replace(campaign, cutoff_at=cutoff, cutoff_moves=campaign.cutoff_moves + 1))


def _run_added(fleet: Fleet, event: Event) -> Fleet:
    assert event.run_id is not None and event.run_id not in fleet.runs
    run = Run(
        run_id=event.run_id, campaign_id=event.campaign_id or "", candidate=event.body["candidate"], kind=RunKind(event.body["kind"]),
        host=None, state=RunState.QUEUED, since=event.at, added_at=event.at,
        continues=decode(Continuation, event.body["continues"]) if event.body.get("continues") else None,
    )
    campaign = _campaign(fleet, event)
    if run.continues is not None:
        before = fleet.runs[run.continues.run_id]
        assert before.successor is None, "the work of a run goes on once"
        fleet = _with_run(fleet, replace(before, successor=run.run_id))
        if run.continues.step is not None:
            run = replace(run, pilot=before.pilot)  # it goes on behind the pilot that was judged
    return _with_run(_with_campaign(fleet, replace(campaign, runs=(*campaign.runs, run.run_id))), run)


def _run_placed(fleet: Fleet, event: Event) -> Fleet:
    """The intent: from here on the order may have reached the host."""
    run = replace(_run(fleet, event), host=event.host, spec=decode(RunSpec, event.body["spec"]))
    return _with_run(fleet, run)


def _run_moved(fleet: Fleet, event: Event) -> Fleet:
    """A change of state; `notice` in the body when a host's notice told of it."""
    run, state = _run(fleet, event), RunState(event.body["to"])
    check_run_step(run.state, state)
    if "notice" in event.body:
        run = _counted(run, event)
    reason = Reason(event.body["reason"]) if event.body.get("reason") else None
    return _with_run(fleet, replace(run, state=state, reason=reason, detail=event.because, since=event.at, cleared=None))


def _run_cleared(fleet: Fleet, event: Event) -> Fleet:
    run = _run(fleet, event)
    assert run.state is RunState.STUCK, "only a stuck run is cleared"
    return _with_run(fleet, replace(run, cleared=_mark(event)))


def _seed_refused(fleet: Fleet, event: Event) -> Fleet:
    """The copy that a run was to go on from does not verify any more: an older one takes its place, or none."""
    run = _run(fleet, event)
    assert run.continues is not None and run.spec is None, "a placed run keeps what it begins with"
    return _with_run(fleet, replace(run, continues=decode(Continuation, event.body["continues"])))


def _run_waits(fleet: Fleet, event: Event) -> Fleet:
    return _with_run(fleet, replace(_run(fleet, event), detail=event.because, waiting_at=event.at))


def _want_changed(fleet: Fleet, event: Event) -> Fleet:
    return _with_run(fleet, replace(_run(fleet, event), want=decode(WantOrder, event.body["want"])))


def _noticed(fleet: Fleet, event: Event) -> Fleet:
    """A host's notice that changes no state; its kind is in the body. Sequences have no gaps."""
    run = _counted(_run(fleet, event), event)
    return _with_run(fleet, _told(run, event.body["kind"], event.body["body"]))


def _told(run: Run, kind: str, body: dict[str, Any]) -> Run:
    """What a host told, once: where notices were lost, their files may tell some of it again."""
    if kind == "attempt_started":
        return replace(run, attempt=body["attempt"])
    if kind == "attempt_ended" and all(ended.get("attempt") != body["attempt"] for ended in run.exits):
        return replace(run, exits=(*run.exits, body))
    if kind == "checkpoint":
        saved = Saved(step=body["step"], digest=body["digest"], bytes=body.get("bytes"))
        return run if saved in run.saved else replace(run, saved=(*run.saved, saved))
    if kind == "validation":
        validated = _validated(body)
        return run if validated in run.validated else replace(run, validated=(*run.validated, validated))
    if kind == "proof":
        return replace(run, proof=body)
    return replace(run, pilot=body) if kind == "pilot" else run


def _notices_lost(fleet: Fleet, event: Event) -> Fleet:
    """A host can't tell any more what these notices said: history goes on after the gap, and says so. `retold` is what files still say."""
    run = _run(fleet, event)
    assert event.body["from"] == run.notices_seen + 1 <= event.body["to"], f"notices {event.body} of {run.run_id} after {run.notices_seen}"
    for each in event.body.get("retold", ()):
        run = _told(run, each["kind"], each["body"])
    return _with_run(fleet, replace(run, notices_seen=event.body["to"]))


def _counted(run: Run, event: Event) -> Run:
    notice = event.body["notice"]
    assert notice == run.notices_seen + 1, f"notice {notice} of {run.run_id} after {run.notices_seen}"
    return replace(run, notices_seen=notice)


def _validated(body: dict[str, Any]) -> Validated:
    return Validated(
        step=body["step"], sha256=body.get("sha256") or "", value=body.get("value"), rows=body.get("rows") or 0, seconds=body.get("seconds") or 0.0,
    )


def _checkpoint_replicated(fleet: Fleet, event: Event) -> Fleet:
    run = _run(fleet, event)
    replica = Replica(step=event.body["step"], digest=event.body["digest"], value=None, verified_at=event.at)
    return _with_run(fleet, replace(run, checkpoints=(*run.checkpoints, replica)))


def _replica_dropped(fleet: Fleet, event: Event) -> Fleet:
    """A copy that nobody needs any more left the store."""
    run = _run(fleet, event)
    return _with_run(fleet, replace(run, checkpoints=tuple(copy for copy in run.checkpoints if copy.digest != event.body["digest"])))


def _predictions_replicated(fleet: Fleet, event: Event) -> Fleet:
    run = _run(fleet, event)
    replica = Replica(step=event.body["step"], digest=event.body["sha256"], value=event.body.get("value"), verified_at=event.at)
    return _with_run(fleet, replace(run, predictions=(*run.predictions, replica)))


def _replication_failed(fleet: Fleet, event: Event) -> Fleet:
    run = _run(fleet, event)
    return _with_run(fleet, replace(run, faults=(*run.faults, {**event.body, "because": event.because})))


def _selection_made(fleet: Fleet, event: Event) -> Fleet:
    return _with_campaign(fleet, replace(_campaign(fleet, event), selection=event.body))


def _selection_frozen(fleet: Fleet, event: Event) -> Fleet:
    return _with_campaign(fleet, replace(_campaign(fleet, event), frozen_digest=event.body["frozen_sha256"], frozen_at=event.at))


def _open_asked(fleet: Fleet, event: Event) -> Fleet:
    campaign = _campaign(fleet, event)
    asked = {"split": event.body["split"], "actor": event.actor, "because": event.because}
    return _with_campaign(fleet, replace(campaign, asked=(*campaign.asked, asked)))


def _split_opened(fleet: Fleet, event: Event) -> Fleet:
    campaign = _campaign(fleet, event)
    return _with_campaign(fleet, replace(campaign, openings=(*campaign.openings, event.body)))


def _split_judged(fleet: Fleet, event: Event) -> Fleet:
    campaign = _campaign(fleet, event)
    return _with_campaign(fleet, replace(campaign, results={**campaign.results, event.body["split"]: event.body["result"]}, reported=False))


def _report_written(fleet: Fleet, event: Event) -> Fleet:
    return _with_campaign(fleet, replace(_campaign(fleet, event), reported=True))


def _host_changed(fleet: Fleet, event: Event) -> Fleet:
    """host_seen, host_lost: the fields that changed are in the body."""
    return _with_host(fleet, event, since=event.at, detail=event.because, **event.body)


def _with_host(fleet: Fleet, event: Event, **changes: Any) -> Fleet:
    assert event.host is not None
    before = fleet.hosts.get(event.host) or Host(name=event.host, reachable=False, since=event.at)
    return replace(fleet, hosts={**fleet.hosts, event.host: replace(before, **changes)})


def _mark(event: Event) -> Mark:
    return Mark(at=event.at, actor=event.actor, because=event.because)


def _host_drained(fleet: Fleet, event: Event) -> Fleet:
    return _with_host(fleet, event, drained=_mark(event))


def _host_undrained(fleet: Fleet, event: Event) -> Fleet:
    return _with_host(fleet, event, drained=None)


def _host_fenced(fleet: Fleet, event: Event) -> Fleet:
    runs = tuple(event.body["runs"])
    for run_id in runs:
        fleet = _with_run(fleet, replace(fleet.runs[run_id], left_behind=True))
    before = fleet.hosts[event.host or ""]  # said once more, the first time still counts
    superseded, may_have = dict.fromkeys((*before.superseded, *runs)), dict.fromkeys((*before.may_have, *event.body.get("may_have", ())))
    marks = {"fenced": _mark(event), "fenced_sequence": event.sequence}
    return _with_host(fleet, event, superseded=tuple(superseded), may_have=tuple(may_have), **marks)


def _run_left_behind(fleet: Fleet, event: Event) -> Fleet:
    """Of a run that was placed nowhere: this fenced host may have it."""
    run = fleet.runs[event.run_id or ""]
    superseded = dict.fromkeys((*fleet.hosts[event.host or ""].superseded, run.run_id))
    return _with_host(_with_run(fleet, replace(run, left_behind=True)), event, superseded=tuple(superseded))


def _host_unfenced(fleet: Fleet, event: Event) -> Fleet:
    return _with_host(fleet, event, fenced=None, superseded=(), may_have=())


def _stranger_want_changed(fleet: Fleet, event: Event) -> Fleet:
    assert event.run_id is not None
    return replace(fleet, stranger_wants={**fleet.stranger_wants, event.run_id: decode(WantOrder, event.body["want"])})


def _only_recorded(fleet: Fleet, event: Event) -> Fleet:
    """History that changes no state: coordinator_started, order_refused, notified, ..."""
    return fleet


_APPLY = {
    "coordinator_started": _only_recorded,
    "coordinator_stopped": _only_recorded,
    "request_refused": _only_recorded,
    "campaign_launched": _campaign_launched,
    "campaign_moved": _campaign_moved,
    "preflight_warned": _preflight_warned,
    "displacement_planned": _displacement_planned,
    "displacement_moved": _displacement_moved,
    "run_book_written": _run_book_written,
    "data_staged": _data_staged,
    "cutoff_moved": _cutoff_moved,
    "run_added": _run_added,
    "run_placed": _run_placed,
    "run_moved": _run_moved,
    "run_waits": _run_waits,
    "want_changed": _want_changed,
    "stranger_want_changed": _stranger_want_changed,
    "noticed": _noticed,
    "notices_lost": _notices_lost,
    "checkpoint_replicated": _checkpoint_replicated,
    "replica_dropped": _replica_dropped,
    "predictions_replicated": _predictions_replicated,
    "replication_failed": _replication_failed,
    "job_failed": _only_recorded,
    "notified": _only_recorded,
    "order_refused": _only_recorded,
    "selection_made": _selection_made,
    "selection_frozen": _selection_frozen,
    "open_asked": _open_asked,
    "split_opened": _split_opened,
    "split_judged": _split_judged,
    "report_written": _report_written,
    "host_seen": _host_changed,
    "host_lost": _host_changed,
    "host_drained": _host_drained,
    "host_undrained": _host_undrained,
    "host_fenced": _host_fenced,
    "host_unfenced": _host_unfenced,
    "run_left_behind": _run_left_behind,
    "host_takeover_ordered": _only_recorded,
    "host_taken_over": _only_recorded,
    "run_cleared": _run_cleared,
    "seed_refused": _seed_refused,
}
