"""One prediction file and its meta, read back and judged: do the rows say what the meta claims, and are they the registered rows?

    NAME.jsonl       one line a document
    NAME.meta.json   digests, the claim, and the SHA-256 of the rows; written last

`Distrusted` means that bytes or claims contradict each other, `Unfit` that an honest file can't be compared with the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetd.coordinator.registration import RegisteredSet
from policies.token_nll import CRITERION, RowsInvalid, ScoredRow, TokenNll, claim_holds, parse_row, token_nll

ROWS_BYTES_MAX = 1024 * 1024 * 1024
META_BYTES_MAX = 4 * 1024 * 1024
DIGEST_SHOWN = 16
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What a trainer says of its prediction file."""

    split: str
    step: int | None
    rows: int
    sha256: str
    dataset_digest: str
    checkpoint_digest: str | None
    numeric_mode: str
    claim: float
    family_claims: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """A file that holds: its meta, the criterion recomputed from its rows, and the digest of each of the two files."""

    meta: Meta
    score: TokenNll
    sha256: str
    meta_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """The file is what it says, but it can't take part."""

    because: str
    checkpoint_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distrusted:
    """Somebody or something changed the file, or its claim is wrong: nothing of this run can be believed."""

    because: str
    checkpoint_digest: str = ""


def score_file(folder: Path, name: str, registered: RegisteredSet) -> Scored | Unfit | Distrusted:
    """Read `NAME.jsonl` and its meta in full, recompute the criterion and compare everything that can be compared."""
    meta_data, data = read_bytes(folder / f"{name}.meta.json", META_BYTES_MAX), read_bytes(folder / f"{name}.jsonl", ROWS_BYTES_MAX)
    if meta_data is None or data is None:
        return Unfit(because=f"{name}.{'meta.json' if meta_data is None else 'jsonl'} is missing or too large")
    try:
        meta = parse_meta(meta_data)
    except ValueError as fault:
        return Distrusted(because=f"{name}.meta.json is damaged: {fault}")
    digest, found = meta.checkpoint_digest or "", hashlib.sha256(data).hexdigest()
    if found != meta.sha256:
        return Distrusted(because=f"{name}.jsonl was changed: its SHA-256 is {found}, its meta says {meta.sha256}", checkpoint_digest=digest)
    try:
        rows = _rows(data, name)
        score = token_nll(rows)
    except RowsInvalid as fault:
        return Unfit(because=str(fault), checkpoint_digest=digest)
    because = _not_registered(meta, rows, registered)
    if because is not None:
        return Unfit(because=f"{name}: {because}", checkpoint_digest=digest)
    because = _claim_broken(meta, score)
    if because is not None:
        return Distrusted(because=f"{name}: {because}", checkpoint_digest=digest)
    return Scored(meta=meta, score=score, sha256=found, meta_sha256=hashlib.sha256(meta_data).hexdigest())


def parse_meta(data: bytes) -> Meta:
    """The meta of its JSON bytes. ValueError says which field is wrong."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"not JSON: {fault}") from fault
    if not isinstance(body, Mapping) or body.get("schema") != 1:
        raise ValueError("not a meta of schema 1")
    if body.get("criterion") != CRITERION:
        raise ValueError(f"its criterion is {body.get('criterion')!r}, {CRITERION} is what this campaign is judged by")
    claim = body.get("claim")
    if not isinstance(claim, Mapping) or not isinstance(claim.get("families"), Mapping):
        raise ValueError("its claim has no value and families")
    return Meta(
        split=_field(body, "split", str), step=_field(body, "step", int, None), rows=_field(body, "rows", int), sha256=_field(body, "sha256", str),
        dataset_digest=_field(body, "dataset_digest", str), checkpoint_digest=_field(body, "checkpoint_digest", str, None),
        numeric_mode=_field(body, "numeric_mode", str, "not recorded"), claim=_number(claim.get("value")),
        family_claims={str(family): _number(value) for family, value in claim["families"].items()},
    )


def read_bytes(path: Path, bytes_max: int) -> bytes | None:
    """The bytes of a regular file, None when it is not there, a link, or over the limit."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(bytes_max + 1)
    return data if len(data) <= bytes_max else None


def short(digest: str | None) -> str:
    return digest[:DIGEST_SHOWN] if digest else "none"


def _rows(data: bytes, name: str) -> list[ScoredRow]:
    lines = data.split(b"\n")
    if lines.pop() != b"":
        raise RowsInvalid(f"{name}.jsonl ends in the middle of a line")
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as fault:
            raise RowsInvalid(f"{name}.jsonl line {number}: not JSON") from fault
        rows.append(parse_row(value, f"{name}.jsonl line {number}"))
    return rows


def _not_registered(meta: Meta, rows: list[ScoredRow], registered: RegisteredSet) -> str | None:
    """How the file differs from what was registered, None when it is exactly that."""
    if meta.split not in (registered.split.value, registered.shard_split):
        return f"it is of split {meta.split}, {registered.split} is what was registered"
    if meta.dataset_digest != registered.dataset_digest:
        return f"it was made from dataset {short(meta.dataset_digest)}, registered is {short(registered.dataset_digest)}"
    if meta.rows != len(rows) or len(rows) != len(registered.rows):
        names = _names_differing({row.id for row in rows}, {row.id for row in registered.rows})
        return f"it holds {len(rows)} rows, its meta says {meta.rows}, registered are {len(registered.rows)}{names}"
    for row, want in zip(rows, registered.rows, strict=True):
        if (row.id, row.family, row.tokens) != (want.id, want.family, want.tokens):
            return f"row {row.id} ({row.family}, {row.tokens} tokens) stands where {want.id} ({want.family}, {want.tokens} tokens) is registered"
    return None


def _names_differing(found: set[str], wanted: set[str]) -> str:
    missing, extra = sorted(wanted - found)[:NAMES_SHOWN], sorted(found - wanted)[:NAMES_SHOWN]
    return (f"; missing: {', '.join(missing)}" if missing else "") + (f"; not registered: {', '.join(extra)}" if extra else "")


def _claim_broken(meta: Meta, score: TokenNll) -> str | None:
    if not claim_holds(meta.claim, score.value):
        return f"it claims {meta.claim!r}, its rows give {score.value!r}"
    recomputed = {family: each.nll_per_token for family, each in score.families.items()}
    if set(recomputed) != set(meta.family_claims):
        return f"it claims families {sorted(meta.family_claims)}, its rows hold {sorted(recomputed)}"
    for family, value in recomputed.items():
        if not claim_holds(meta.family_claims[family], value):
            return f"it claims {meta.family_claims[family]!r} for {family}, its rows give {value!r}"
    return None


_REQUIRED = object()


def _field(body: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = body.get(name)
    if value is None and default is not _REQUIRED:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, which is no {kind.__name__}")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"a claim is {value!r}, a number is needed")
    return float(value)
