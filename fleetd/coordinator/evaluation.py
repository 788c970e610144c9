"""Looking at a reserved split: bring it to a host with the frozen checkpoint and its unchanged base, and judge what comes back, once.

    prepare_evaluation   vault (ledger first) → dataset and models on the host
    judge                prediction files → results/<split>.json, written once → an entry in the ledger
A restarted evaluation goes on with the same opening until its predictions are judged.
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass
from typing import Any

from fleetd.campaign import Plan
from fleetd.coordinator.corpora import corpus_rows, read_corpus
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.ledger import Act, Ledger, LedgerEntry, enter, read_ledger
from fleetd.coordinator.predictions import Scored, score_file, short
from fleetd.coordinator.registration import RegisteredSet
from fleetd.coordinator.replication import copy_predictions, stored_checkpoint_fault
from fleetd.coordinator.shards import read_shard_set, registered_rows
from fleetd.coordinator.staging import role_of, stage_role
from fleetd.coordinator.trees import read_manifest
from fleetd.coordinator.vault import OpenedSplit, check_frozen, open_split, verified_split
from fleetd.files import create_record, read_record
from fleetd.paths import CampaignPaths
from policies.errors import CheckpointDamaged, DataDamaged, FreezeRefused, RequestRefused
from policies.facts import Split, format_moment
from policies.freeze import JUDGED, FrozenSelection, Opening, canonical, frozen_digest, openings_of
from policies.token_nll import TokenNll, perplexity

MODELS = ("selected", "base", "unigram")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedEvaluation:
    """Everything an evaluation needs lies on the host. `digests` of the split, of train, and of both models."""

    opened: OpenedSplit
    digests: dict[str, str]


def prepare_evaluation(
    paths: CampaignPaths, plan: Plan, digests: dict[str, str], split: Split, frozen: FrozenSelection, courier: Courier, act: Act, because: str = "",
) -> PreparedEvaluation:
    """Open the split (or go on with its unfinished opening) and bring it, the train data and both models to a host. `digests` are those of
    the registration. FreezeRefused, DataDamaged or CheckpointDamaged before anything is opened, where possible."""
    check_frozen(paths, split, frozen)
    for digest in (frozen.checkpoint_digest, frozen.base_checkpoint_digest):
        fault = stored_checkpoint_fault(paths, digest)
        if fault is not None:
            fix = "restore it from a backup; no other checkpoint may stand in for a frozen one"
            raise CheckpointDamaged("a frozen checkpoint does not verify", where=str(paths.store_checkpoints / digest), what=fault, fix=fix)
    for digest in (frozen.checkpoint_digest, frozen.base_checkpoint_digest):
        folder = paths.store_checkpoints / digest
        courier.put_tree(TreeKind.MODELS, digest, folder, read_manifest(folder))
    stage_role(plan, Split.TRAIN, digests[Split.TRAIN.value], courier)
    opened = open_split(paths, split, frozen, act, because)
    courier.put_tree(TreeKind.DATASETS, opened.digest, opened.folder, opened.entries)
    staged = {
        split.value: opened.digest, Split.TRAIN.value: digests[Split.TRAIN.value], "selected": frozen.checkpoint_digest,
        "base": frozen.base_checkpoint_digest,
    }
    return PreparedEvaluation(opened=opened, digests=staged)


def collect_evaluation(courier: Courier, paths: CampaignPaths, split: Split, run_id: str) -> str:
    """Bring an evaluation's predictions into the store, verified; the SHA-256 over all of them. NotFound while they are incomplete."""
    copies = [copy_predictions(courier, paths, run_id, split.value, name) for name in MODELS]
    return hashlib.sha256("".join(copy.sha256 for copy in copies).encode()).hexdigest()


def judge(paths: CampaignPaths, plan: Plan, split: Split, frozen: FrozenSelection, run_id: str, act: Act) -> dict[str, Any]:
    """The result of the latest look at `split`, recomputed from the predictions in the store, written once. Judged again from the same
    predictions it gives back what was written and adds no look; other predictions for a judged look are refused."""
    opening = _last_opening(paths, split, frozen)
    scored = _scored(paths, split, frozen, run_id, _reserved_set(paths, plan, split))
    inputs = {name: each.sha256 for name, each in scored.items()}
    path = paths.result(split.value, opening.number)
    try:
        result: dict[str, Any] = read_record(path)
    except FileNotFoundError:
        result = _result(split, opening, frozen, run_id, scored, inputs, act)
        os.makedirs(paths.results, exist_ok=True)
        create_record(path, result)
    if result["inputs"] != inputs:
        raise RequestRefused(
            f"{split} is judged already", where=str(path), what=f"from predictions {_named(result['inputs'])}; these are {_named(inputs)}",
            fix="ask for another look with a written reason: it is entered into the ledger and gets a result of its own",
        )
    body = {"split": split.value, "number": opening.number, "results_sha256": hashlib.sha256(canonical(result)).hexdigest()}
    enter(paths.ledger, JUDGED, body, act, unless=lambda ledger: _judged(ledger, split, opening.number))
    return result


def _judged(ledger: Ledger, split: Split, number: int) -> LedgerEntry | None:
    entries = (entry for entry in ledger.entries if entry.kind == JUDGED)
    return next((entry for entry in entries if (entry.body["split"], entry.body["number"]) == (split.value, number)), None)


def _last_opening(paths: CampaignPaths, split: Split, frozen: FrozenSelection) -> Opening:
    ledger = read_ledger(paths.ledger)
    openings = [opening for opening in openings_of(ledger.events) if opening.split == split]
    if not openings:
        raise FreezeRefused(f"{split} was never opened", where=str(paths.ledger), what="there is nothing to judge", fix=f"ask for {split} first")
    entry = ledger.entries[openings[-1].sequence - 1]
    if entry.body["frozen_sha256"] != frozen_digest(frozen):
        where, what = f"{paths.ledger}, entry {entry.sequence}", f"it was opened for selection {entry.body['frozen_sha256']}"
        raise FreezeRefused(f"{split} was opened for another selection", where=where, what=what, fix="use the selection in frozen.json")
    return openings[-1]


def _reserved_set(paths: CampaignPaths, plan: Plan, split: Split) -> RegisteredSet:
    """The rows that an evaluation on `split` must have scored, from the vault's verified copy."""
    role, opened = role_of(plan, split), verified_split(paths, split)
    assert role is not None, "a split that was opened is in the plan"
    if role.is_corpus:
        rows = corpus_rows(opened.folder, read_corpus(opened.folder), role.tokens_per_document_max)
        return RegisteredSet(split=split, shard_split=split.value, dataset_digest=opened.digest, rows=rows)
    if role.shard_split is None:
        fix = "name its data as shards or corpus in the plan"
        raise RequestRefused(f"{split} can't be judged", where=str(opened.folder), what="it is neither token shards nor a corpus", fix=fix)
    shards = read_shard_set(opened.folder, role.shard_split, ("*",), scored=True)
    rows = registered_rows(opened.folder, shards, role.tokens_per_document_max)
    return RegisteredSet(split=split, shard_split=role.shard_split, dataset_digest=opened.digest, rows=rows)


def _scored(
    paths: CampaignPaths, split: Split, frozen: FrozenSelection, run_id: str, registered: RegisteredSet,
) -> dict[str, Scored]:
    """All three prediction files, verified against the registered rows and the frozen digests. DataDamaged names the one that fails."""
    folder, scored = paths.store_run(run_id) / "predictions" / split.value, {}
    wanted = {"selected": frozen.checkpoint_digest, "base": frozen.base_checkpoint_digest}
    for name in MODELS:
        verdict = score_file(folder, name, registered)
        because = None if isinstance(verdict, Scored) else verdict.because
        if isinstance(verdict, Scored) and name in wanted and verdict.meta.checkpoint_digest != wanted[name]:
            because = f"it was made with checkpoint {short(verdict.meta.checkpoint_digest)}, frozen is {short(wanted[name])}"
        if because is not None or not isinstance(verdict, Scored):
            fix = "look who changed it; the opening stays unfinished, and a new evaluation run goes on with it"
            raise DataDamaged(f"the evaluation on {split} can't be judged", where=str(folder / f"{name}.jsonl"), what=str(because), fix=fix)
        scored[name] = verdict
    return scored


def _result(
    split: Split, opening: Opening, frozen: FrozenSelection, run_id: str, scored: dict[str, Scored], inputs: dict[str, str], act: Act,
) -> dict[str, Any]:
    return {
        "schema": 1, "split": split.value, "look": opening.number, "exploratory": opening.number > 1, "because": opening.because,
        "frozen_sha256": frozen_digest(frozen), "candidate": frozen.candidate, "step": frozen.step, "run_id": run_id, "inputs": inputs,
        "rows": scored["selected"].score.rows, "numeric_mode": scored["selected"].meta.numeric_mode,
        "models": {name: _figures(each.score) for name, each in scored.items()},
        "judged_at": format_moment(act.at), "code_digest": act.code_digest,
    }


def _figures(score: TokenNll) -> dict[str, Any]:
    families = {
        family: {"nll": each.nll_per_token, "perplexity": _finite(perplexity(each.nll_per_token)), "tokens": each.tokens, "rows": each.rows}
        for family, each in score.families.items()
    }
    return {"nll": score.value, "perplexity": _finite(perplexity(score.value)), "families": families}


def _finite(value: float) -> float | None:
    """JSON has no infinity: a perplexity beyond a float is left out."""
    return value if math.isfinite(value) else None


def _named(inputs: dict[str, str]) -> str:
    return ", ".join(f"{name} {short(digest)}" for name, digest in sorted(inputs.items()))
