"""What freezing means: the frozen selection as a proof, what may be opened when, and the order that a ledger must show.

`FrozenSelection` is passed as an argument to whatever opens reserved data; who holds one has earned it, and the vault still
checks it against `frozen.json` and the ledger.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from policies.errors import FreezeRefused
from policies.facts import RESERVED_SPLITS, Split, format_moment, parse_moment
from policies.selection import TableRow

REGISTERED, FROZEN, OPENED, JUDGED, TORN = "registered", "frozen", "opened", "judged", "torn_tail"
REASON_CHARACTERS_MIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenSelection:
    """The final choice. `inputs` are the digests it was made from: prediction files, validation set, datasets."""

    campaign_id: str
    criterion: str
    minimum_improvement: float
    run_id: str
    candidate: str
    step: int
    checkpoint_digest: str
    value: float
    base_checkpoint_digest: str
    base_value: float
    candidates: tuple[TableRow, ...]
    exclusions: tuple[TableRow, ...]
    inputs: dict[str, str] = field(default_factory=dict)
    frozen_at: datetime
    code_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEvent:
    """What one ledger entry says, without its chain."""

    sequence: int
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """One look at a reserved split: `number` counts from 1, `judged` once its predictions were complete and scored."""

    split: Split
    number: int
    sequence: int
    because: str
    judged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Permitted:
    """The split may be opened as look `number`; `shares` is the unfinished opening that this one goes on with."""

    number: int
    shares: Opening | None = None


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that digests are taken of: sorted keys, no spaces, UTF-8, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def frozen_record(frozen: FrozenSelection) -> dict[str, Any]:
    """The JSON object that `frozen.json` holds."""
    return {
        "schema": 1, "campaign_id": frozen.campaign_id, "criterion": frozen.criterion, "minimum_improvement": frozen.minimum_improvement,
        "run_id": frozen.run_id, "candidate": frozen.candidate, "step": frozen.step, "checkpoint_digest": frozen.checkpoint_digest,
        "value": frozen.value, "base_checkpoint_digest": frozen.base_checkpoint_digest, "base_value": frozen.base_value,
        "candidates": [_row_record(row) for row in frozen.candidates], "exclusions": [_row_record(row) for row in frozen.exclusions],
        "inputs": dict(frozen.inputs), "frozen_at": format_moment(frozen.frozen_at), "code_digest": frozen.code_digest,
    }


def frozen_digest(frozen: FrozenSelection) -> str:
    """Hex SHA-256 of the canonical record: the name under which the ledger knows this selection."""
    return hashlib.sha256(canonical(frozen_record(frozen))).hexdigest()


def parse_frozen(record: Any) -> FrozenSelection:
    """The frozen selection of a record. ValueError when it is not exactly what `frozen_record` writes."""
    try:
        fields = {name: value for name, value in record.items() if name != "schema"}
        fields["candidates"] = tuple(TableRow(**row) for row in record["candidates"])
        fields["exclusions"] = tuple(TableRow(**row) for row in record["exclusions"])
        fields["frozen_at"] = parse_moment(record["frozen_at"])
        frozen = FrozenSelection(**fields)
        if frozen_record(frozen) != record:
            raise ValueError("it is not in the form that this version writes")
    except (AttributeError, KeyError, TypeError, AssertionError) as fault:
        raise ValueError(f"not a frozen selection: {fault}") from fault
    return frozen


def openings_of(events: tuple[LedgerEvent, ...]) -> tuple[Opening, ...]:
    """Every opening that a ledger records, in order."""
    judged = {(event.body["split"], event.body["number"]) for event in events if event.kind == JUDGED}
    return tuple(
        Opening(
            split=Split(event.body["split"]), number=event.body["number"], sequence=event.sequence, because=event.body["because"],
            judged=(event.body["split"], event.body["number"]) in judged,
        )
        for event in events if event.kind == OPENED
    )


def may_open(split: Split, frozen: FrozenSelection | None, openings: tuple[Opening, ...], because: str) -> Permitted | FreezeRefused:
    """Whether `split` may be opened now. A refusal is returned, not raised: the caller decides whom it reaches."""
    if split not in RESERVED_SPLITS:
        return _refusal(split, "it is not a reserved split", f"name one of {', '.join(RESERVED_SPLITS)}")
    if frozen is None:
        return _refusal(split, "no selection is frozen yet", "wait until the campaign is frozen; `fleetd status` shows its stage")
    earlier = [opening for opening in openings if opening.split == split]
    if not earlier:
        return Permitted(number=1)
    last = max(earlier, key=lambda opening: opening.number)
    if not last.judged:
        return Permitted(number=last.number, shares=last)
    if len(because.strip()) < REASON_CHARACTERS_MIN:
        what = f"it was opened {len(earlier)} time(s) and judged; another look needs a written reason"
        return _refusal(split, what, "ask again and say why: the reason stands in the ledger and in the report")
    return Permitted(number=last.number + 1)


def order_faults(events: tuple[LedgerEvent, ...]) -> tuple[str, ...]:
    """What a ledger's order breaks, in words, empty when it keeps every rule. For the audit."""
    faults: list[str] = []
    frozen: str | None = None
    looks: dict[tuple[str, int], bool] = {}
    for event in events:
        body, name = event.body, f"entry {event.sequence} ({event.kind})"
        if event.kind == REGISTERED and (frozen is not None or looks):
            faults.append(f"{name}: reserved data registered after the freeze")
        elif event.kind == FROZEN:
            faults += [f"{name}: a second freeze"] if frozen is not None else []
            frozen = body["frozen_sha256"]
        elif event.kind == OPENED:
            faults += _opening_faults(name, body, frozen, looks)
            looks[body["split"], body["number"]] = False
        elif event.kind == JUDGED:
            faults += _judging_faults(name, body, looks)
            looks[body["split"], body["number"]] = True
    return tuple(faults)


def _opening_faults(name: str, body: dict[str, Any], frozen: str | None, looks: dict[tuple[str, int], bool]) -> list[str]:
    split, number = body["split"], body["number"]
    faults = []
    if frozen is None:
        faults.append(f"{name}: {split} opened before any freeze")
    elif body["frozen_sha256"] != frozen:
        faults.append(f"{name}: {split} opened for another selection than the frozen one")
    before = [look for look in looks if look[0] == split]
    if number != len(before) + 1:
        faults.append(f"{name}: look {number} at {split} after {len(before)}")
    if before and len(body["because"].strip()) < REASON_CHARACTERS_MIN:
        faults.append(f"{name}: {split} opened again without a reason")
    if any(not looks[look] for look in before):
        faults.append(f"{name}: {split} opened again before the earlier look was judged")
    return faults


def _judging_faults(name: str, body: dict[str, Any], looks: dict[tuple[str, int], bool]) -> list[str]:
    look = body["split"], body["number"]
    if look not in looks:
        return [f"{name}: {look[0]} judged without an opening"]
    return [f"{name}: look {look[1]} at {look[0]} judged twice"] if looks[look] else []


def _row_record(row: TableRow) -> dict[str, Any]:
    return {
        "run_id": row.run_id, "candidate": row.candidate, "step": row.step, "checkpoint_digest": row.checkpoint_digest,
        "value": row.value, "eligible": row.eligible, "because": row.because,
    }


def _refusal(split: Split, what: str, fix: str) -> FreezeRefused:
    return FreezeRefused(f"{split} stays closed", where=f"split {split}", what=what, fix=fix)
