"""From trained candidates to one frozen checkpoint: select, then freeze. Both may run again after a crash at any point.

    select_campaign   evidence → policies.selection → selection.json
    freeze_campaign   selection.json → frozen.json, created once → an entry in the ledger
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fleetd.campaign import SelectionTerms
from fleetd.coordinator.couriers import Courier
from fleetd.coordinator.evidence import PLACE, RunEvidence, gather_evidence
from fleetd.coordinator.ledger import Act, enter
from fleetd.coordinator.registration import RegisteredSet, read_registered_validation
from fleetd.coordinator.replication import replicate_checkpoint, stored_checkpoint_fault
from fleetd.coordinator.trees import TreeFault, read_entry
from fleetd.coordinator.vault import read_frozen
from fleetd.files import create_record, read_record, write_record
from fleetd.fleet import Run
from fleetd.paths import CampaignPaths
from fleetd.wire import WireError, encode
from policies.errors import CheckpointDamaged, DataDamaged, ExplainedError, FreezeRefused, RequestRefused
from policies.facts import RunKind, format_moment, step_name
from policies.freeze import FROZEN, FrozenSelection, frozen_digest, frozen_record
from policies.selection import CandidateEvidence, NoSelection, Selection, TableRow, select
from policies.token_nll import CRITERION

SELECTED = "selected"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copies:
    """Where checkpoints of the candidates can come from."""

    paths: CampaignPaths
    runs: dict[str, Run]
    couriers: Mapping[str, Courier]


def select_campaign(
    paths: CampaignPaths, campaign_id: str, terms: SelectionTerms, runs: tuple[Run, ...], couriers: Mapping[str, Courier], act: Act,
) -> dict[str, Any]:
    """The selection record, also written to selection.json. `outcome` is `selected`, `no_improvement` or `nothing_eligible`; without a
    choice `checkpoint_digest` is None. After the freeze the record that was frozen is given back."""
    if terms.criterion != CRITERION:
        raise RequestRefused("that criterion is unknown", where="selection.criterion", what=terms.criterion, fix=f"use {CRITERION}")
    if read_frozen(paths) is not None:
        return _stored_selection(paths)
    trained = tuple(run for run in runs if run.kind is RunKind.TRAIN)
    registered = read_registered_validation(paths)
    evidence = gather_evidence(paths, trained, couriers, registered)
    copies = _Copies(paths=paths, runs={run.run_id: run for run in trained}, couriers=couriers)
    result = _select_available(tuple(each.candidate for each in evidence), terms.minimum_improvement, copies)
    record = _record(campaign_id, terms, result, evidence, registered, act)
    write_record(paths.selection, record)
    return record


def freeze_campaign(paths: CampaignPaths, campaign_id: str, act: Act) -> FrozenSelection:
    """The frozen selection, in frozen.json and in the ledger. CheckpointDamaged or DataDamaged when what was chosen no longer verifies,
    FreezeRefused when there is no choice or another one is frozen."""
    frozen = read_frozen(paths)
    if frozen is None:
        frozen = _prepare(paths, campaign_id, act)
        try:
            create_record(paths.frozen, frozen_record(frozen))
        except FileExistsError:
            frozen = read_frozen(paths)
            assert frozen is not None
    digest = frozen_digest(frozen)
    body = {"frozen_sha256": digest, "checkpoint_digest": frozen.checkpoint_digest}
    entry = enter(paths.ledger, FROZEN, body, act, unless=lambda ledger: ledger.first(FROZEN))
    if entry.body["frozen_sha256"] != digest:
        raise FreezeRefused(
            "another selection is frozen already", where=f"{paths.ledger}, entry {entry.sequence}",
            what=f"the ledger froze {entry.body['frozen_sha256']}, frozen.json is {digest}", fix="restore frozen.json from a backup",
        )
    return frozen


def _select_available(candidates: tuple[CandidateEvidence, ...], minimum_improvement: float, copies: _Copies) -> Selection | NoSelection:
    """The choice among checkpoints that can be had: one without a verified copy is left out, with the reason, and judged again."""
    for _ in range(1 + sum(len(candidate.checkpoints) for candidate in candidates)):
        result = select(candidates, minimum_improvement)
        if isinstance(result, NoSelection):
            return result
        without_base = _copy_trouble(copies, result.run_id, 0, result.base_checkpoint_digest)
        without = _copy_trouble(copies, result.run_id, result.step, result.checkpoint_digest)
        if without_base is None and without is None:
            return result
        step, because = (0, without_base) if without_base is not None else (result.step, without)
        candidates = tuple(_without(each, step, str(because)) if each.run_id == result.run_id else each for each in candidates)
    raise AssertionError("each round leaves out one more checkpoint")


def _copy_trouble(copies: _Copies, run_id: str, step: int, digest: str) -> str | None:
    """Why no verified copy of a checkpoint is in the store, None when there is one. Fetches it where its host answers."""
    if (copies.paths.store_checkpoints / digest).exists():
        fault = stored_checkpoint_fault(copies.paths, digest)
        return None if fault is None else f"the store's copy of its checkpoint does not verify: {fault}"
    courier = copies.couriers.get(copies.runs[run_id].host or "")
    if courier is None:
        return f"left out: no copy of its checkpoint is in the store, and host {copies.runs[run_id].host} does not answer"
    try:
        replicate_checkpoint(courier, copies.paths, run_id, step, digest)
    except ExplainedError as fault:
        return f"left out: no verified copy of its checkpoint can be had: {fault.title}: {fault.what}"
    return None


def _without(candidate: CandidateEvidence, step: int, because: str) -> CandidateEvidence:
    checkpoints = tuple(replace(each, refused=because) if each.step == step else each for each in candidate.checkpoints)
    return replace(candidate, checkpoints=checkpoints)


def _record(
    campaign_id: str, terms: SelectionTerms, result: Selection | NoSelection, evidence: tuple[RunEvidence, ...],
    registered: RegisteredSet | None, act: Act,
) -> dict[str, Any]:
    chosen = result if isinstance(result, Selection) else None
    if chosen is not None:
        because = f"{chosen.candidate} at step {chosen.step}: {chosen.value:.6f}, its unchanged base {chosen.base_value:.6f}"
    else:
        assert isinstance(result, NoSelection)
        because = result.because
    inputs = {f"{kind}/{file.run_id}/{file.step}": digest for each in evidence for file in each.files
              for kind, digest in (("predictions", file.sha256), ("meta", file.meta_sha256))}
    if registered is not None:
        inputs |= {"registered_validation": registered.sha256, "dataset/validation": registered.dataset_digest}
    return {
        "schema": 1, "campaign_id": campaign_id, "criterion": terms.criterion, "minimum_improvement": terms.minimum_improvement,
        "outcome": SELECTED if chosen is not None else getattr(result, "reason", ""), "because": because,
        "run_id": chosen and chosen.run_id, "candidate": chosen and chosen.candidate, "step": chosen and chosen.step,
        "checkpoint_digest": chosen and chosen.checkpoint_digest, "value": chosen and chosen.value,
        "base_checkpoint_digest": chosen and chosen.base_checkpoint_digest, "base_value": chosen and chosen.base_value,
        "table": [encode(row) for row in result.table], "inputs": inputs,
        "compared_with_host": {each.candidate.run_id: each.compared for each in evidence},
        "at": format_moment(act.at), "code_digest": act.code_digest,
    }


def _prepare(paths: CampaignPaths, campaign_id: str, act: Act) -> FrozenSelection:
    """What will be frozen, with everything it rests on read once more."""
    record = _stored_selection(paths)
    if record["outcome"] != SELECTED or record["campaign_id"] != campaign_id:
        what = f"its outcome is {record['outcome']}: {record['because']}"
        raise FreezeRefused("there is nothing to freeze", where=str(paths.selection), what=what, fix="train candidates that improve on their base")
    for digest in (record["checkpoint_digest"], record["base_checkpoint_digest"]):
        fault = stored_checkpoint_fault(paths, digest)
        if fault is not None:
            where = str(paths.store_checkpoints / digest)
            raise CheckpointDamaged("the chosen checkpoint does not verify", where=where, what=fault, fix="select again")
    _check_inputs(paths, record["inputs"])
    rows = tuple(TableRow(**row) for row in record["table"])
    return FrozenSelection(
        campaign_id=campaign_id, criterion=record["criterion"], minimum_improvement=record["minimum_improvement"], run_id=record["run_id"],
        candidate=record["candidate"], step=record["step"], checkpoint_digest=record["checkpoint_digest"], value=record["value"],
        base_checkpoint_digest=record["base_checkpoint_digest"], base_value=record["base_value"],
        candidates=tuple(row for row in rows if row.eligible), exclusions=tuple(row for row in rows if not row.eligible),
        inputs=record["inputs"], frozen_at=act.at, code_digest=act.code_digest,
    )


def _check_inputs(paths: CampaignPaths, inputs: dict[str, str]) -> None:
    """DataDamaged when a prediction file changed between the choice and the freeze."""
    for name, digest in inputs.items():
        kind, _, rest = name.partition("/")
        if kind not in ("predictions", "meta"):
            continue
        run_id, _, step = rest.rpartition("/")
        file = f"{step_name(int(step))}.{'jsonl' if kind == 'predictions' else 'meta.json'}"
        try:
            found = read_entry(paths.store_run(run_id) / PLACE, file).sha256
        except TreeFault as fault:
            found = fault.what
        if found != digest:
            where = str(paths.store_run(run_id) / PLACE / file)
            raise DataDamaged("evidence changed after the choice", where=where, what=f"SHA-256 now {found}, chosen from {digest}", fix="select again")


def _stored_selection(paths: CampaignPaths) -> dict[str, Any]:
    where = str(paths.selection)
    try:
        record: dict[str, Any] = read_record(paths.selection)
    except FileNotFoundError as fault:
        raise FreezeRefused("nothing is selected yet", where=where, what="there is no selection", fix="wait for the trainings") from fault
    except WireError as fault:
        raise DataDamaged("the selection can't be read", where=where, what=str(fault), fix="remove it; the selection is made again") from fault
    return record
