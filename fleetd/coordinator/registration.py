"""What a campaign is judged by, fixed before it starts: the digest of every role, the rows of the validation set, the reserved splits.

Everything here is checked before any host is touched: a damaged shard or a file in two roles stops the launch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from fleetd.campaign import Plan
from fleetd.coordinator.corpora import check_corpus_vocabulary, corpus_rows
from fleetd.coordinator.ledger import Act, read_ledger
from fleetd.coordinator.shards import RegisteredRow, check_vocabulary, registered_rows
from fleetd.coordinator.staging import CollectedRole, check_disjoint, collect_role
from fleetd.coordinator.vault import register_reserved
from fleetd.files import write_record
from fleetd.paths import CampaignPaths
from policies.errors import DataDamaged
from policies.facts import RESERVED_SPLITS, Split
from policies.freeze import REGISTERED, canonical

REGISTERED_BYTES_MAX = 1024 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSet:
    """The rows that every prediction file of one split must hold, in order, and the digest of the data they come from."""

    split: Split
    shard_split: str
    dataset_digest: str
    rows: tuple[RegisteredRow, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(canonical([[row.id, row.family, row.tokens] for row in self.rows])).hexdigest()


def register_campaign(paths: CampaignPaths, plan: Plan, act: Act) -> dict[str, str]:
    """Fix what the campaign is made from and judged by; the digest of every role by its name (`train`, `validation`, `test`, ...).
    DataDamaged or RequestRefused name what stops the launch. Run again, it comes to the same or refuses."""
    collected = tuple(collect_role(plan.directory, role) for role in plan.data)
    check_disjoint(collected)
    vocabularies = _vocabularies(plan)
    for role in collected:
        if role.shards is not None:
            check_vocabulary(role.source, role.shards, vocabularies)
        elif role.corpus is not None:
            check_corpus_vocabulary(role.source, vocabularies)
    digests = {role.role.split.value: role.digest for role in collected}
    recorded = dict(digests)
    for role in collected:
        if role.role.split == Split.VALIDATION and (role.shards is not None or role.corpus is not None):
            validation = register_rows(role)
            write_record(paths.registered_validation, _record(validation))
            recorded["registered_validation"] = validation.sha256
    register_reserved(paths, tuple(role for role in collected if role.role.split in RESERVED_SPLITS), recorded, act)
    return digests


def _vocabularies(plan: Plan) -> dict[str, int]:
    """How many token ids the model of each candidate knows, as far as its settings say so."""
    found: dict[str, int] = {}
    for candidate in plan.candidates:
        size = (((candidate.task or {}).get("model") or {}).get("config") or {}).get("vocab_size")
        if isinstance(size, int):
            found[candidate.name] = size
    return found


def register_rows(role: CollectedRole) -> RegisteredSet:
    """The registered rows of a role of token shards or of a corpus, which has no other name for its split."""
    limit, split = role.role.tokens_per_document_max, role.role.split
    if role.corpus is not None:
        rows = corpus_rows(role.source, role.corpus, limit)
        return RegisteredSet(split=split, shard_split=split.value, dataset_digest=role.digest, rows=rows)
    assert role.shards is not None
    rows = registered_rows(role.source, role.shards, limit)
    return RegisteredSet(split=split, shard_split=role.shards.split, dataset_digest=role.digest, rows=rows)


def read_registered_validation(paths: CampaignPaths) -> RegisteredSet | None:
    """The registered validation set; None when the plan's validation data is plain files. DataDamaged when it was changed."""
    path = paths.registered_validation
    try:
        with open(path, "rb") as file:
            body = json.loads(file.read(REGISTERED_BYTES_MAX))
        rows = tuple(RegisteredRow(id=identity, family=family, tokens=tokens) for identity, family, tokens in body["rows"])
        found = RegisteredSet(split=Split(body["split"]), shard_split=body["shard_split"], dataset_digest=body["dataset_digest"], rows=rows)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as fault:
        raise _changed(paths, f"it can't be read: {fault}") from fault
    entry = read_ledger(paths.ledger).first(REGISTERED)
    said = entry.body["digests"] if entry is not None else {}
    for name, digest in (("registered_validation", found.sha256), (Split.VALIDATION.value, found.dataset_digest)):
        if said.get(name) != digest:
            raise _changed(paths, f"{name} is {digest}, the ledger says {said.get(name)}")
    return found


def _record(registered: RegisteredSet) -> dict[str, Any]:
    return {
        "schema": 1, "split": registered.split, "shard_split": registered.shard_split, "dataset_digest": registered.dataset_digest,
        "sha256": registered.sha256, "rows": [[row.id, row.family, row.tokens] for row in registered.rows],
    }


def _changed(paths: CampaignPaths, what: str) -> DataDamaged:
    return DataDamaged(
        "the registered validation set was changed", where=str(paths.registered_validation), what=what,
        fix="restore it from a backup: the first ledger entry holds its SHA-256",
    )
