"""The status document: Fleet and observations as one JSON object, every measured value with its age. Pure.

Unknown is null, never zero; a value that was read long ago says so by its age, whatever happened since.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any

from fleetd.coordinator.decide_campaigns import last_safe_stop_at
from fleetd.coordinator.decide_displacement import told
from fleetd.coordinator.decide_hosts import HOST_SILENT_SECONDS, forgotten_hosts, shown_hosts
from fleetd.coordinator.decide_runs import committed
from fleetd.coordinator.evidence import inexactness
from fleetd.coordinator.sight import HostSight, Sight
from fleetd.coordinator.specs import candidate_of, wish
from fleetd.coordinator.strangers import Stranger, strangers_on
from fleetd.coordinator.targets import is_over, runs_by_host
from fleetd.coordinator.verdict import judge
from fleetd.fleet import Campaign, Fleet, Host, Mark, Run
from fleetd.model import Observation
from fleetd.paths import CampaignPaths, StatePaths
from fleetd.wire import encode
from policies.facts import CampaignStage, RunKind, format_moment
from policies.lifecycle import SETTLED

REPORT_TRIES_MAX = 3
"""A campaign whose report can't be written is over all the same after so many tries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """Which coordinator speaks."""

    pid: int
    id: str
    generation: int
    started_at: datetime
    paths: StatePaths


def build(
    fleet: Fleet, sight: Sight, daemon: Daemon, *, now: datetime, journal_health: str, clock_alarm: str = "",
    deliveries: Mapping[str, list[dict[str, Any]]] = MappingProxyType({}),
) -> dict[str, Any]:
    """The whole document as of `now`; `fleet` and `sight` may be older, which the ages show. `deliveries`: by host, what it is being brought."""
    verdict = judge(fleet, sight, now, journal_health, clock_alarm)
    return {
        "schema": 1, "at": format_moment(now),
        "coordinator": {
            "pid": daemon.pid, "id": daemon.id, "generation": daemon.generation, "started_at": format_moment(daemon.started_at),
            "state_dir": str(daemon.paths.root), "journal": journal_health,
        },
        "verdict": {"word": verdict.word, "text": verdict.text, "since": _moment(verdict.since)},
        "campaigns": [_campaign(fleet, sight, campaign, daemon.paths, now) for campaign in fleet.campaigns.values()],
        "runs": [_run(fleet, sight, run, now) for run in fleet.runs.values()],
        "hosts": [{**host, "deliveries": deliveries.get(host["name"], [])} for host in _hosts(fleet, sight, now)],
    }


def _campaign(fleet: Fleet, sight: Sight, campaign: Campaign, state: StatePaths, now: datetime) -> dict[str, Any]:
    paths = state.campaign(campaign.campaign_id)
    graces = [sight.observations[run_id].grace_seconds for run_id in campaign.runs if run_id in sight.observations]
    floors = [candidate.stop.grace_floor_seconds for candidate in campaign.plan.candidates]
    safe_at = last_safe_stop_at(campaign, max([*graces, *floors], default=0.0))
    frozen = {"sha256": campaign.frozen_digest, "at": _moment(campaign.frozen_at)} if campaign.frozen_digest else None
    return {
        "campaign_id": campaign.campaign_id, "name": campaign.plan.name, "stage": campaign.stage.value, "detail": campaign.detail,
        "warnings": list(campaign.warnings),
        "since": format_moment(campaign.since), "is_over": nothing_follows(sight, campaign), "launched_at": format_moment(campaign.launched_at),
        "deadline_at": format_moment(campaign.final_at), "cutoff_at": format_moment(campaign.cutoff_at), "last_safe_stop_at": format_moment(safe_at),
        "seconds_to_deadline": (campaign.final_at - now).total_seconds(), "seconds_to_last_safe_stop": (safe_at - now).total_seconds(),
        "runs": list(campaign.runs), "selection": campaign.selection, "frozen": frozen, "openings": list(campaign.openings),
        "results": campaign.results, "report": _report(paths, campaign), "directory": str(paths.root),
        "displaced": [told(item) for item in campaign.displaced],
    }


def nothing_follows(sight: Sight, campaign: Campaign) -> bool:
    """Whether nothing more happens by itself: the last stage is reached, every asked split judged, and the report written."""
    if not is_over(campaign) or any(asked["split"] not in campaign.results for asked in campaign.asked if campaign.stage is not CampaignStage.FAILED):
        return False
    trouble = sight.job_troubles.get(f"report:{campaign.campaign_id}")
    given_up = trouble is not None and trouble.count >= REPORT_TRIES_MAX
    return campaign.reported or given_up or not campaign.plan.after_freeze.report


def _report(paths: CampaignPaths, campaign: Campaign) -> str | None:
    return str(paths.report_html) if campaign.reported else None


def _run(fleet: Fleet, sight: Sight, run: Run, now: datetime) -> dict[str, Any]:
    campaign, look = fleet.campaigns[run.campaign_id], sight.observations.get(run.run_id)
    measured = _Measured(look, sight.observed_at.get(run.run_id), now)
    return {
        "run_id": run.run_id, "campaign_id": run.campaign_id, "candidate": run.candidate, "kind": run.kind.value, "host": run.host,
        "state": run.state.value, "reason": run.reason.value if run.reason else None, "detail": run.detail, "since": format_moment(run.since),
        "want": wish(run, campaign).want.value, "attempt": run.attempt, "attempts_ended": list(run.exits),
        "restarts_used": look.restarts_used if look else 0 if run.attempt == 0 else None, "restarts_max": _restarts_max(campaign, run, look),
        "pid": measured.field("pid"),
        "identity": measured.field("identity"), "step": measured.field("step"), "steps_planned": _steps_planned(campaign, run, look),
        "last_step_at": _aged(_moment(look.step_at), look.step_at, now) if look else measured.value(None),
        "steps_per_second": measured.field("steps_per_second"),
        "loss": measured.field("loss"), "memory": _memory(run, look, measured), "checkpoint": _copy(run, now),
        "checkpoint_on_host": _checkpoint_on_host(look, now), "best": _best(look, now), **_times(campaign, run, look, now),
        "next_attempt_at": _moment(look.next_attempt_at) if look else None, "alarms": list(look.alarms) if look else [],
        "exactness": run.proof, "selectable": _selectable(campaign, run), "continues": encode(run.continues) if run.continues is not None else None,
        "successor": run.successor, "cleared": _mark(run.cleared),
    }


class _Measured:
    """Fields of one look, each as `{"value", "age_seconds"}`."""

    def __init__(self, look: Observation | None, seen_at: datetime | None, now: datetime) -> None:
        self._look = look
        self._age_seconds = max(0.0, (now - seen_at).total_seconds()) if seen_at is not None else None

    def field(self, name: str) -> dict[str, Any]:
        return self.value(getattr(self._look, name) if self._look is not None else None)

    def value(self, value: Any) -> dict[str, Any]:
        return {"value": value, "age_seconds": self._age_seconds if self._look is not None else None}


def _aged(value: Any, at: datetime | None, now: datetime) -> dict[str, Any]:
    return {"value": value, "age_seconds": max(0.0, (now - at).total_seconds()) if at is not None else None}


def _restarts_max(campaign: Campaign, run: Run, look: Observation | None) -> int:
    if look is not None and look.restarts_max:
        return look.restarts_max
    if run.spec is not None:
        return run.spec.restarts.restarts_max
    return candidate_of(campaign, run).restarts.restarts_max if run.kind is RunKind.TRAIN else 0


def _steps_planned(campaign: Campaign, run: Run, look: Observation | None) -> int | None:
    if look is not None and look.steps_planned is not None:
        return look.steps_planned
    task = candidate_of(campaign, run).task if run.kind is RunKind.TRAIN else None
    steps = (task or {}).get("steps")
    return steps if isinstance(steps, int) else None


def _memory(run: Run, look: Observation | None, measured: _Measured) -> dict[str, Any]:
    seen = look.memory if look is not None else None
    caps = run.spec.caps if run.spec is not None else None
    used = {name: measured.value(getattr(seen, name) if seen else None) for name in ("host_bytes", "accelerator_bytes", "host_peak_bytes")}
    return {
        **used, "host_cap_bytes": caps.host_bytes if caps else None, "accelerator_cap_bytes": caps.accelerator_bytes if caps else None,
        "parts": encode(seen.parts) if seen else {},
    }


def _copy(run: Run, now: datetime) -> dict[str, Any] | None:
    """The newest checkpoint of which a verified copy lies with the coordinator."""
    if not run.checkpoints:
        return None
    newest = max(run.checkpoints, key=lambda copy: (copy.step, copy.verified_at))
    age_seconds = (now - newest.verified_at).total_seconds()
    return {"step": newest.step, "digest": newest.digest, "verified_at": format_moment(newest.verified_at), "age_seconds": max(0.0, age_seconds)}


def _checkpoint_on_host(look: Observation | None, now: datetime) -> dict[str, Any]:
    found = look.checkpoint if look is not None else None
    return _aged({"step": found.step, "digest": found.digest} if found else None, found.at if found else None, now)


def _best(look: Observation | None, now: datetime) -> dict[str, Any]:
    found = look.best if look is not None else None
    return _aged({"step": found.step, "value": found.value} if found else None, found.at if found else None, now)


def _times(campaign: Campaign, run: Run, look: Observation | None, now: datetime) -> dict[str, Any]:
    stop_at, told_at = (look.stop_at, look.cutoff_at) if look is not None else (None, None)
    cutoff_at = told_at or (campaign.final_at if run.kind is RunKind.EVALUATE else campaign.cutoff_at)
    return {
        "stop_at": _moment(stop_at), "cutoff_at": format_moment(cutoff_at), "final_at": format_moment(campaign.final_at),
        "time_left_seconds": None if run.state in SETTLED else ((stop_at or cutoff_at) - now).total_seconds(),
    }


def _selectable(campaign: Campaign, run: Run) -> bool | str:
    if run.kind is not RunKind.TRAIN:
        return "an evaluation is no candidate"
    if candidate_of(campaign, run).command is not None:
        return "its command keeps no trainer contract: no manifest, no validation predictions"
    rows = [row for row in (campaign.selection or {}).get("table", []) if row["run_id"] == run.run_id]
    if rows and not any(row["eligible"] for row in rows):
        return str(rows[0]["because"])
    if (inexact := inexactness(run)) is not None:
        return inexact
    refused = [fault for fault in run.faults if fault["what"] == "predictions"]
    if run.successor is not None:
        return f"its work goes on in {run.successor}"
    if not run.predictions and (run.continues is None or run.continues.step is None):
        return str(refused[-1]["because"]) if refused else "no validation predictions yet"
    return True


def _hosts(fleet: Fleet, sight: Sight, now: datetime) -> list[dict[str, Any]]:
    names, runs = dict.fromkeys((*shown_hosts(fleet), *forgotten_hosts(sight), *fleet.hosts)), runs_by_host(fleet)
    return [_host(fleet, sight, name, runs.get(name, []), now) for name in names]


def _host(fleet: Fleet, sight: Sight, name: str, runs: list[Run], now: datetime) -> dict[str, Any]:
    known, seen = fleet.hosts.get(name), sight.hosts.get(name)
    age_seconds = (now - seen.answered_at).total_seconds() if seen is not None and seen.answered_at is not None else None
    facts, measured_at = (seen.facts, seen.measured_at) if seen is not None else (None, None)
    capacity = (seen.plan.capacity_bytes if seen is not None else None) or (facts.memory_total_bytes if facts is not None else None)
    return {
        "name": name, "reachable": age_seconds is not None and age_seconds <= HOST_SILENT_SECONDS,
        "since": _moment(known.since) if known is not None else None,
        "boot_id": known.boot_id if known is not None else None, "detail": _host_words(known, seen),
        "age_seconds": age_seconds, "facts": encode(facts) if facts is not None else None,
        "memory_available_bytes": _aged(seen.memory_available_bytes if seen else None, measured_at, now),
        "disk_free_bytes": _aged(seen.disk_free_bytes if seen else None, measured_at, now),
        "committed_bytes": sum(amount for _, amount in committed(fleet, sight, name, runs)), "capacity_bytes": capacity,
        "drained": _mark(known.drained) if known is not None else None, "fenced": _mark(known.fenced) if known is not None else None,
        "clock_skew_seconds": _aged(seen.skew_seconds if seen else None, seen.answered_at if seen else None, now),
        "left_behind": list(known.superseded) if known is not None else [],
        "unknown_runs": [_unknown_run(each) for each in strangers_on(fleet, name, seen)],
    }


def _unknown_run(stranger: Stranger) -> dict[str, Any]:
    spec = stranger.report.spec
    return {
        "run_id": stranger.run_id, "campaign_id": spec.campaign_id if spec else None, "candidate": spec.candidate if spec else None,
        "pid": stranger.pid, "state": stranger.state, "supervisor": stranger.report.supervisor,
        "want": stranger.report.want.want.value if stranger.report.want else None,
    }


def _host_words(known: Host | None, seen: HostSight | None) -> str:
    if seen is None:
        return "not asked: no campaign needs it"
    if seen.trouble:
        return f"{seen.trouble['title']}: {seen.trouble['what']}"
    return known.detail if known is not None else "has not answered yet"


def _mark(mark: Mark | None) -> dict[str, Any] | None:
    return {"since": format_moment(mark.at), "by": mark.actor, "because": mark.because} if mark is not None else None


def _moment(moment: datetime | None) -> str | None:
    return format_moment(moment) if moment is not None else None
