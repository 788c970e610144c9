"""The coordinator's byte keeping in memory: what each job leaves in a campaign's directory, and its ways to fail.

Mirrors fleetd/coordinator/jobs.py, replication.py, pipeline.py, evidence.py, vault.py and evaluation.py, each in a few lines. The choice,
the rule of openings and the ledger's order are the real policies.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from fleetd.coordinator.evidence import RunEvidence, _continued, _left_off
from fleetd.coordinator.sight import Job
from fleetd.fleet import Campaign, Fleet, Run
from fleetd.wire import encode
from policies.errors import CheckpointDamaged, DataDamaged, FreezeRefused, HostUnreachable, NoRoom, NotFound
from policies.facts import RESERVED_SPLITS, RunKind, Split
from policies.freeze import FROZEN, JUDGED, OPENED, REGISTERED, LedgerEvent, Permitted, may_open, openings_of
from policies.selection import CandidateEvidence, CheckpointEvidence, NoSelection, Selection, select
from tests.sim.link import Network
from tests.sim.machine import Machine
from tests.sim.rundir import Checkpoint, VirtualRun

RESERVED_ROWS = (50, 100, 100, 500)


@dataclass
class Store:
    """One campaign's directory."""

    campaign_id: str
    ledger: list[LedgerEvent] = field(default_factory=list)
    predictions: dict[tuple[str, int], tuple[str, float, str]] = field(default_factory=dict)
    checkpoints: dict[str, tuple[str, int]] = field(default_factory=dict)
    """By digest, of which run and step: only what was verified."""
    selection: dict[str, Any] | None = None
    frozen: dict[str, Any] | None = None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    scored: set[str] = field(default_factory=set)

    def enter(self, kind: str, body: dict[str, Any]) -> None:
        self.ledger.append(LedgerEvent(sequence=len(self.ledger) + 1, kind=kind, body=body))


class Archive:
    """The coordinator's disk beside its journal."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stores: dict[str, Store] = {}
        self.fails: dict[str, int] = {}
        """Kinds of job that fail for good, and how often still: a damaged shard, an interpreter that lacks a module."""

    def store(self, campaign_id: str) -> Store:
        return self.stores.setdefault(campaign_id, Store(campaign_id))


@dataclass
class Place:
    job: Job
    fleet: Fleet
    campaign: Campaign
    store: Store
    couriers: dict[str, Network]

    def machine(self, host: str | None) -> Machine:
        """The host that a job copies from or to. HostUnreachable when the road is closed now."""
        network = self.couriers.get(host or "")
        if network is None or not network.is_open:
            raise HostUnreachable("the host can't be reached", where=f"host {host}", what="no road to it now", fix="it is tried again")
        return network.machine

    def run_directory(self, run: Run) -> VirtualRun:
        found = self.machine(run.host).runs.get(run.run_id)
        if found is None:
            raise NotFound("there is no such run", where=run.run_id, what="nothing is recorded of it", fix="fleetd status")
        return found

    @property
    def run(self) -> Run:
        return self.fleet.runs[self.job.run_id or ""]


class VirtualJobs:
    def __init__(self, archive: Archive, laws: Any) -> None:
        self.archive, self.laws = archive, laws

    def run(self, job: Job, fleet: Fleet, sessions: dict[str, Any], now: datetime) -> dict[str, Any]:
        reachable = {name for name, host in fleet.hosts.items() if host.reachable}
        place = Place(
            job=job, fleet=fleet, campaign=fleet.campaigns[job.campaign_id], store=self.archive.store(job.campaign_id),
            couriers={name: session.courier for name, session in sessions.items() if name in reachable},
        )
        if job.kind in ("predictions", "checkpoint", "collect"):
            self._room_for_a_copy()
        elif job.kind != "prune":
            self.archive.machine.check_disk()
        if self.archive.fails.get(job.kind, 0) > 0:
            self.archive.fails[job.kind] -= 1
            raise DataDamaged(f"{job.kind} found damage", where=job.key, what="SHA-256 differs", fix="repair it, then launch again")
        result: dict[str, Any] = getattr(self, f"_{job.kind}")(place)
        return result

    def _preflight(self, place: Place) -> dict[str, Any]:
        digests = {role.split.value: _digest(f"{place.campaign.plan.name}/{role.split}") for role in place.campaign.plan.data}
        if not any(event.kind == REGISTERED for event in place.store.ledger):
            place.store.enter(REGISTERED, {"digests": digests, "splits": {}})
        count = RESERVED_ROWS[int(place.campaign.plan.plan_sha256, 16) % len(RESERVED_ROWS)]
        rows = {role.split.value: count for role in place.campaign.plan.data if role.split in RESERVED_SPLITS}
        return {"digests": digests, "rows": rows}

    def _stage(self, place: Place) -> dict[str, Any]:
        machine = place.machine(place.job.host)
        for split in (Split.TRAIN, Split.VALIDATION):
            if any(role.split is split for role in place.campaign.plan.data):
                assert place.campaign.digests[split.value], "stage_data looks its digest up"
        self._room_on(machine)
        return {"digests": {"release": _digest("release")}}

    def _room_for_a_copy(self) -> None:
        if self.archive.machine.is_disk_full:
            raise NoRoom("can't keep a copy", where="the store", what="no space left", fix="free some space on that disk; it is tried again")

    def _room_on(self, machine: Machine) -> None:
        if machine.is_disk_full:
            fix = "free some space; it is tried again by itself"
            raise NoRoom(f"no room on host {machine.name}", where=machine.name, what="the disk is full", fix=fix)

    def _predictions(self, place: Place) -> dict[str, Any]:
        return {"value": self._copy_predictions(place, place.run, place.job.body["step"], place.job.body["digest"])}

    def _copy_predictions(self, place: Place, run: Run, step: int, sha256: str | None) -> float:
        stored = place.store.predictions.get((run.run_id, step))
        if stored is None or sha256 not in (None, stored[0]):
            found = place.run_directory(run).predictions.get(step)
            if found is None:
                raise NotFound("there are no such predictions", where=run.run_id, what=f"step {step}", fix="wait until they are written")
            if sha256 not in (None, found[0]):
                raise DataDamaged("predictions can't be used", where=run.run_id, what="its SHA-256 is another", fix="validate again")
            stored = place.store.predictions[run.run_id, step] = found
        return stored[1]

    def _checkpoint(self, place: Place) -> dict[str, Any]:
        self._copy_checkpoint(place, place.run, place.job.body["step"], place.job.body["digest"])
        return {"bytes": 1000}

    def _copy_checkpoint(self, place: Place, run: Run, step: int, digest: str) -> None:
        """Every byte is verified before the copy gets its name."""
        if digest in place.store.checkpoints:
            return
        found = place.run_directory(run).checkpoints.get(step)
        if found is None:
            raise NotFound("the host no longer has that checkpoint", where=run.run_id, what=f"step {step}", fix="use another one")
        if not verifies(found, digest):
            raise CheckpointDamaged("a checkpoint does not verify", where=run.run_id, what=f"step {step}", fix="keep it for inspection")
        place.store.checkpoints[digest] = (run.run_id, step)
        self.laws.copied(found, digest)

    def _prune(self, place: Place) -> dict[str, Any]:
        if place.store.frozen is not None:
            return {"removed": []}
        removed = [digest for digest in place.store.checkpoints if digest not in set(place.job.body["keep"])]
        for digest in removed:
            del place.store.checkpoints[digest]
        return {"removed": removed}

    # The choice and the freeze.

    def _select(self, place: Place) -> dict[str, Any]:
        if place.store.frozen is not None and place.store.selection is not None:
            return place.store.selection
        runs = [run for run in (place.fleet.runs[run_id] for run_id in place.campaign.runs) if run.kind is RunKind.TRAIN]
        candidates = self._lines_of_work(place, runs)
        result = self._select_available(place, candidates)
        chosen = result if isinstance(result, Selection) else None
        place.store.selection = {
            "because": f"{chosen.candidate} at step {chosen.step}" if chosen else result.because, "table": [encode(row) for row in result.table],  # type: ignore[union-attr]
            "outcome": "selected" if chosen else "none", "run_id": chosen and chosen.run_id, "candidate": chosen and chosen.candidate,
            "step": chosen and chosen.step, "checkpoint_digest": chosen and chosen.checkpoint_digest,
            "base_checkpoint_digest": chosen and chosen.base_checkpoint_digest, "value": chosen and chosen.value,
        }
        self.laws.selected(place.store, place.store.selection, runs)
        return place.store.selection

    def _lines_of_work(self, place: Place, runs: list[Run]) -> tuple[CandidateEvidence, ...]:
        """As evidence.gather_evidence joins a run with the one that it goes on with."""
        found = {run.run_id: RunEvidence(candidate=self._evidence(place, run)) for run in runs}
        for run in runs:
            if run.continues is not None and run.continues.run_id in found:
                found[run.run_id] = _continued(run, found[run.run_id], found[run.continues.run_id])
        return tuple(_left_off(found[run.run_id], run).candidate for run in runs)

    def _evidence(self, place: Place, run: Run) -> CandidateEvidence:
        if run.spec is None or not run.spec.contract:
            because = "it never started" if run.spec is None else "a command of its own writes no validation predictions"
            return CandidateEvidence(run_id=run.run_id, candidate=run.candidate, checkpoints=(), refused=because)
        checkpoints, distrust = [], []
        for step, claim in sorted({claim.step: claim for claim in run.validated}.items()):
            refused = None
            try:
                self._copy_predictions(place, run, step, claim.sha256 or None)
            except HostUnreachable:
                refused = None if (run.run_id, step) in place.store.predictions else "left out: its host does not answer"
            except (NotFound, DataDamaged) as fault:
                distrust.append(fault.what)
                refused = fault.what
            _, value, digest = place.store.predictions.get((run.run_id, step), ("", 0.0, ""))
            checkpoints.append(CheckpointEvidence(step=step, checkpoint_digest=digest, value=None if refused else value, refused=refused))
        refused = "; ".join(distrust) or None
        return CandidateEvidence(run_id=run.run_id, candidate=run.candidate, checkpoints=tuple(checkpoints), refused=refused)

    def _select_available(self, place: Place, candidates: tuple[CandidateEvidence, ...]) -> Selection | NoSelection:
        """A checkpoint of which no verified copy can be had is left out, and the choice is made again."""
        while True:
            result = select(candidates, place.campaign.plan.selection.minimum_improvement)
            if isinstance(result, NoSelection):
                return result
            wanted = ((0, result.base_checkpoint_digest), (result.step, result.checkpoint_digest))
            trouble = next(((step, text) for step, digest in wanted if (text := self._trouble(place, result.run_id, step, digest))), None)
            if trouble is None:
                return result
            candidates = tuple(_without(each, *trouble) if each.run_id == result.run_id else each for each in candidates)

    def _trouble(self, place: Place, run_id: str, step: int, digest: str) -> str | None:
        try:
            self._copy_checkpoint(place, place.fleet.runs[run_id], step, digest)
        except (HostUnreachable, NotFound, CheckpointDamaged) as fault:
            return f"left out: {fault.title}"
        return None

    def _freeze(self, place: Place) -> dict[str, Any]:
        store = place.store
        if store.frozen is None:
            record = store.selection
            if record is None or record["outcome"] != "selected":
                raise FreezeRefused("there is nothing to freeze", where=store.campaign_id, what="no selection", fix="select first")
            for digest in (record["checkpoint_digest"], record["base_checkpoint_digest"]):
                if digest not in store.checkpoints:
                    raise CheckpointDamaged("the chosen checkpoint does not verify", where=digest, what="it is gone", fix="select again")
            store.frozen = dict(record)
        digest = _digest(repr(sorted(store.frozen.items(), key=str)))
        if not any(event.kind == FROZEN for event in store.ledger):
            store.enter(FROZEN, {"frozen_sha256": digest, "checkpoint_digest": store.frozen["checkpoint_digest"]})
        return {"frozen_sha256": digest}

    # Looks at reserved splits.

    def _stage_evaluation(self, place: Place) -> dict[str, Any]:
        store, body = place.store, place.job.body
        machine, split = place.machine(place.job.host), Split(body["split"])
        frozen = self._frozen_of(store)
        self._room_on(machine)
        because = body["because"] if body["actor"] != "coordinator" else ""
        permit = may_open(split, frozen, openings_of(tuple(store.ledger)), because)  # type: ignore[arg-type]
        if not isinstance(permit, Permitted):
            raise permit
        frozen_sha256 = next((event.body["frozen_sha256"] for event in store.ledger if event.kind == FROZEN), None)
        if permit.shares is None:
            store.enter(OPENED, {"split": split.value, "number": permit.number, "frozen_sha256": frozen_sha256, "because": because})
        self.laws.opened(store, split)
        return {"digests": {split.value: _digest(f"{place.campaign.plan.name}/{split}")}, "opening": {"split": split.value, "number": permit.number}}

    def _stage_seed(self, place: Place) -> dict[str, Any]:
        """A verified copy is brought to the host on which another run goes on from it."""
        digest, machine = place.job.body["digest"], place.machine(place.job.host)
        if digest not in place.store.checkpoints:
            raise CheckpointDamaged("the copy of a checkpoint does not verify", where=digest, what="it is gone", fix="an older copy takes its place")
        self._room_on(machine)
        machine.models.add(digest)
        return {"digests": {}}

    def _frozen_of(self, store: Store) -> Any:
        """The proof that reserved data may be opened."""
        if store.frozen is None:
            raise FreezeRefused("nothing is frozen", where=store.campaign_id, what="there is no frozen selection", fix="wait until it is frozen")
        return store.frozen

    def _collect(self, place: Place) -> dict[str, Any]:
        split = place.job.body["split"]
        found = place.run_directory(place.run).scored.get(split)
        if found is None:
            raise NotFound("the predictions are incomplete", where=place.run.run_id, what=split, fix="wait until they are written")
        place.store.scored.add(split)
        return {"sha256": found}

    def _judge(self, place: Place) -> dict[str, Any]:
        store, split = place.store, place.job.body["split"]
        number = max(opening.number for opening in openings_of(tuple(store.ledger)) if opening.split == split)
        store.results.setdefault(split, {"rows": place.campaign.reserved_rows[split]})
        if not any(event.kind == JUDGED and (event.body["split"], event.body["number"]) == (split, number) for event in store.ledger):
            store.enter(JUDGED, {"split": split, "number": number})
        return {"result": store.results[split]}

    def _report(self, place: Place) -> dict[str, Any]:
        return {"html": "report.html", "json": "report.json"}


def verifies(found: Checkpoint, digest: str) -> bool:
    """Whether every byte of a checkpoint is what its manifest says, and the manifest what its host told."""
    return found.is_whole and found.digest == digest


def _without(candidate: CandidateEvidence, step: int, because: str) -> CandidateEvidence:
    checkpoints = tuple(replace(each, refused=because) if each.step == step else each for each in candidate.checkpoints)
    return replace(candidate, checkpoints=checkpoints)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
