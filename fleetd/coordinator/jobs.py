"""What worker threads do: each kind of job as one function from the fleet, couriers and files to a plain result.

Every job may run twice and may be cut short at any point; the files it makes appear whole. It decides nothing: its result goes
back to `decide`, its errors too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd import logs
from fleetd.campaign import Plan
from fleetd.coordinator.corpora import read_corpus
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.environments import Environments, kept_lock
from fleetd.coordinator.evaluation import collect_evaluation, judge, prepare_evaluation
from fleetd.coordinator.ledger import Act
from fleetd.coordinator.pipeline import freeze_campaign, select_campaign
from fleetd.coordinator.preflight import displaced_in, parity_of, preflight, refusal
from fleetd.coordinator.registration import register_campaign
from fleetd.coordinator.releases import Releases, code_digest
from fleetd.coordinator.replication import prune_checkpoints, replicate_checkpoint, replicate_logs, replicate_predictions, stored_checkpoint_fault
from fleetd.coordinator.run_book import write_run_book
from fleetd.coordinator.sessions import Session
from fleetd.coordinator.shards import read_shard_set
from fleetd.coordinator.sight import Job
from fleetd.coordinator.specs import RELEASE, environment_key, host_plan, release_key
from fleetd.coordinator.staging import stage_data
from fleetd.coordinator.targets import OVER
from fleetd.coordinator.trees import read_manifest
from fleetd.coordinator.vault import read_frozen
from fleetd.coordinator.wheelhouses import Wheelhouses
from fleetd.files import write_record, write_text
from fleetd.fleet import Campaign, Fleet
from fleetd.paths import CampaignPaths, StatePaths
from policies.errors import CheckpointDamaged, ExplainedError, FreezeRefused, HostUnreachable
from policies.facts import RESERVED_SPLITS, Split
from policies.freeze import FrozenSelection, frozen_digest

WriteReport = Callable[[str], tuple[Path, Path]]
"""Writes report.html and report.json of the campaign with this id and returns their paths."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """One job's surroundings."""

    job: Job
    fleet: Fleet
    campaign: Campaign
    paths: CampaignPaths
    couriers: dict[str, Courier]
    act: Act
    python: str
    releases: Releases
    environments: Environments

    @property
    def courier(self) -> Courier:
        """The courier of the job's own host. HostUnreachable when there is no road to it now."""
        found = self.couriers.get(self.job.host or "")
        if found is None:
            raise HostUnreachable("the host can't be reached", where=f"host {self.job.host}", what="no session with it now", fix="it is tried again")
        return found

    @property
    def run_id(self) -> str:
        assert self.job.run_id is not None
        return self.job.run_id

    @property
    def frozen(self) -> FrozenSelection:
        """The proof that reserved data may be opened."""
        found = read_frozen(self.paths)
        if found is None and self.campaign.frozen_digest is not None:
            what, fix = "the selection was frozen, but its file is gone", "restore frozen.json from a backup: the ledger holds its SHA-256"
            raise FreezeRefused("the frozen selection is gone, so nothing is opened", where=str(self.paths.frozen), what=what, fix=fix)
        if found is None:
            raise FreezeRefused("nothing is frozen", where=str(self.paths.frozen), what="there is no frozen selection", fix="wait until it is frozen")
        return found


class Jobs:
    """Runs jobs on behalf of the loop; the one place that knows all kinds of them."""

    def __init__(self, state: StatePaths, *, python: str, releases: Releases, write_report: WriteReport) -> None:
        self._state, self._python, self._releases, self._write_report = state, python, releases, write_report
        self._environments = Environments(Wheelhouses(state))

    def run(self, job: Job, fleet: Fleet, sessions: dict[str, Session], now: datetime) -> dict[str, Any]:
        reachable = {name for name, host in fleet.hosts.items() if host.reachable}
        place = Workplace(
            job=job, fleet=fleet, campaign=fleet.campaigns[job.campaign_id], paths=self._state.campaign(job.campaign_id),
            couriers={name: session.courier for name, session in sessions.items() if name in reachable},
            act=Act(actor=str(job.body.get("actor") or "coordinator"), at=now, code_digest=code_digest()), python=self._python,
            releases=self._releases, environments=self._environments,
        )
        if job.kind == "report":
            return self._report(place)
        return _KINDS[job.kind](place)

    def _report(self, place: Workplace) -> dict[str, Any]:
        os.makedirs(place.paths.root, mode=0o700, exist_ok=True)
        for run_id in place.campaign.runs:
            courier = place.couriers.get(place.fleet.runs[run_id].host or "")
            if courier is not None:
                copy_story(courier, place.paths, run_id)
        html, data = self._write_report(place.job.campaign_id)
        return {"html": str(html), "json": str(data)}


def copy_story(courier: Courier, paths: CampaignPaths, run_id: str) -> None:
    """Bring log, trace and lineage of a run up to date. A report does without what can't be had."""
    try:
        os.makedirs(paths.store_run(run_id), exist_ok=True)
        replicate_logs(courier, paths, run_id)
    except (ExplainedError, OSError) as fault:
        logs.failed("story_not_copied", run=run_id, what=str(fault))


def _preflight(place: Workplace) -> dict[str, Any]:
    """Put the plan on record, look at its hosts, and register its data."""
    plan = place.campaign.plan
    os.makedirs(place.paths.root, mode=0o700, exist_ok=True)
    if place.campaign.plan_text and not place.paths.plan.exists():
        write_text(place.paths.plan, place.campaign.plan_text)
    write_record(place.paths.resolved, plan)
    for asked in (host.environment for host in plan.hosts if host.environment is not None):
        kept_lock(place.paths, asked)  # also those of hosts that are silent now
    seen = preflight(
        plan, place.couriers, own_python=place.python, stage=place.releases.stage,
        prepare=lambda host, courier, release: place.environments.prepare(place.paths, host, courier, release),
    )
    write_record(place.paths.preflight, seen)
    if seen.refusals:
        raise refusal(seen.refusals)
    digests = register_campaign(place.paths, plan, place.act)
    return {
        "digests": digests, "rows": _reserved_rows(plan), "warnings": list(seen.warnings), "displaced": displaced_in(plan, seen),
        "looked_at": list(seen.looks),
    }


def _run_book(place: Workplace) -> dict[str, Any]:
    write_run_book(place.paths, place.campaign)
    return {"moves": place.campaign.displaced_moves, "path": str(place.paths.displaced)}


def _reserved_rows(plan: Plan) -> dict[str, int]:
    """How many documents each reserved split of token shards or of a corpus holds: what an evaluation has to score."""
    found: dict[str, int] = {}
    for role in plan.data:
        if role.split in RESERVED_SPLITS and role.shard_split is not None:
            shards = read_shard_set(Path(plan.directory) / role.path, role.shard_split, role.include, scored=True)
            found[role.split.value] = sum(shard.docs for shard in shards.shards)
        elif role.split in RESERVED_SPLITS and role.is_corpus:
            found[role.split.value] = read_corpus(Path(plan.directory) / role.path).documents
    return found


def _stage(place: Workplace) -> dict[str, Any]:
    release = place.releases.stage(place.courier)
    stage_data(place.campaign.plan, place.campaign.digests, place.courier)
    name, differences = _build_environment(place, release)
    place.courier.prune_releases(_needed(place.fleet, RELEASE) | {release})
    environment = {environment_key(place.courier.host): name} if name is not None else {}
    return {"digests": {"release": release, release_key(place.courier.host): release, **environment}, "warnings": differences}


def _build_environment(place: Workplace, release: str) -> tuple[str | None, list[str]]:
    """The environment that the plan asks for on this host, built and verified there, and in what it differs from those of other hosts; away
    with those that nobody needs."""
    host, environments = host_plan(place.campaign, place.courier.host), place.environments
    if host.environment is None:
        return None, []
    answer, differences = environments.bring(place.paths, host, place.courier, release, parity_of(place.campaign.plan))
    environments.prune(host, place.courier, release, _needed(place.fleet, environment_key(host.name)) | {answer.name})
    return answer.name, [f"the hosts differ: {each}" for each in differences]


def _needed(fleet: Fleet, prefix: str) -> frozenset[str]:
    """Releases, or environments of a host, that a campaign under way has: its next run there will name one."""
    going = (campaign for campaign in fleet.campaigns.values() if campaign.stage not in OVER)
    return frozenset(digest for campaign in going for key, digest in campaign.digests.items() if key.startswith(prefix))


def _stage_seed(place: Workplace) -> dict[str, Any]:
    """Bring a verified copy to the host on which another run goes on from it."""
    digest = str(place.job.body["digest"])
    folder = place.paths.store_checkpoints / digest
    fault = stored_checkpoint_fault(place.paths, digest)
    if fault is not None:
        fix = "keep it for inspection; an older copy takes its place"
        raise CheckpointDamaged("the copy of a checkpoint does not verify", where=str(folder), what=fault, fix=fix)
    place.courier.put_tree(TreeKind.MODELS, digest, folder, read_manifest(folder))
    return {"digests": {}}


def _stage_evaluation(place: Workplace) -> dict[str, Any]:
    plan, body = place.campaign.plan, place.job.body
    because = body["because"] if body["actor"] != "coordinator" else ""
    prepared = prepare_evaluation(
        place.paths, plan, place.campaign.digests, Split(body["split"]), place.frozen, place.courier, place.act, because,
    )
    opened = prepared.opened
    opening = {"split": opened.split.value, "number": opened.number, "ledger_entry": opened.sequence, "dataset_digest": opened.digest}
    return {"digests": {opened.split.value: opened.digest}, "opening": opening}


def _predictions(place: Workplace) -> dict[str, Any]:
    body = place.job.body
    os.makedirs(place.paths.store_run(place.run_id), exist_ok=True)
    copied = replicate_predictions(place.courier, place.paths, place.run_id, body["step"], body["digest"])
    copy_story(place.courier, place.paths, place.run_id)
    return {"value": copied.value}


def _checkpoint(place: Workplace) -> dict[str, Any]:
    os.makedirs(place.paths.store_run(place.run_id), exist_ok=True)
    copied = replicate_checkpoint(place.courier, place.paths, place.run_id, place.job.body["step"], place.job.body["digest"])
    return {"bytes": copied.bytes}


def _prune(place: Workplace) -> dict[str, Any]:
    """`removed`: every copy in the history that is gone now, also one that an earlier life removed and died before it could tell."""
    keep = place.job.body["keep"]
    removed = set(prune_checkpoints(place.paths, keep))
    told = {copy.digest for run_id in place.campaign.runs for copy in place.fleet.runs[run_id].checkpoints}
    return {"removed": sorted(removed | {digest for digest in told - set(keep) if not (place.paths.store_checkpoints / digest).exists()})}


def _select(place: Workplace) -> dict[str, Any]:
    campaign = place.campaign
    runs = tuple(place.fleet.runs[run_id] for run_id in campaign.runs)
    return select_campaign(place.paths, campaign.campaign_id, campaign.plan.selection, runs, place.couriers, place.act)


def _freeze(place: Workplace) -> dict[str, Any]:
    return {"frozen_sha256": frozen_digest(freeze_campaign(place.paths, place.campaign.campaign_id, place.act))}


def _collect(place: Workplace) -> dict[str, Any]:
    os.makedirs(place.paths.store_run(place.run_id), exist_ok=True)
    return {"sha256": collect_evaluation(place.courier, place.paths, Split(place.job.body["split"]), place.run_id)}


def _judge(place: Workplace) -> dict[str, Any]:
    split = Split(place.job.body["split"])
    return {"result": judge(place.paths, place.campaign.plan, split, place.frozen, place.run_id, place.act)}


_KINDS: dict[str, Callable[[Workplace], dict[str, Any]]] = {
    "preflight": _preflight, "run_book": _run_book, "stage": _stage, "stage_seed": _stage_seed, "stage_evaluation": _stage_evaluation,
    "predictions": _predictions, "checkpoint": _checkpoint,
    "prune": _prune, "select": _select, "freeze": _freeze, "collect": _collect, "judge": _judge,
}
