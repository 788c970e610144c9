"""The criterion `token_nll_v1`: nats per token of each family, then the plain mean over families.

The trainer claims a value with it, the coordinator recomputes it from the rows that the trainer wrote; both through this file.
Sums are exact (`math.fsum`), so the order of the rows changes no bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

CRITERION = "token_nll_v1"
CLAIM_TOLERANCE = 1e-9
"""Relative difference up to which a claim and its recomputation are the same number."""
ID_CHARACTERS_MAX = 400


class RowsInvalid(ValueError):
    """A row that can't be scored; the text names the row and what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """One document: `nll` is the sum over its `tokens`, in nats."""

    id: str
    family: str
    tokens: int
    nll: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyScore:
    nll_per_token: float
    tokens: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenNll:
    """`value` is the mean of the families' nats per token; perplexity is exp of it."""

    value: float
    families: dict[str, FamilyScore]
    rows: int


def parse_row(value: Any, where: str) -> ScoredRow:
    """A row from its JSON object. RowsInvalid names `where` and the field; unknown fields are left alone."""
    if not isinstance(value, Mapping):
        raise RowsInvalid(f"{where}: not an object")
    identity, family, tokens, nll = (value.get(name) for name in ("id", "family", "tokens", "nll"))
    if not isinstance(identity, str) or not 0 < len(identity) <= ID_CHARACTERS_MAX:
        raise RowsInvalid(f"{where}: id is not a text of 1 to {ID_CHARACTERS_MAX} characters")
    if not isinstance(family, str) or not family:
        raise RowsInvalid(f"{where}: row {identity} has no family")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0:
        raise RowsInvalid(f"{where}: row {identity} has tokens {tokens!r}, a count above 0 is needed")
    if not isinstance(nll, (int, float)) or isinstance(nll, bool) or not _is_sum_of_nats(nll):
        raise RowsInvalid(f"{where}: row {identity} has nll {nll!r}, a finite number of nats from 0 on is needed")
    return ScoredRow(id=identity, family=family, tokens=tokens, nll=float(nll))


def token_nll(rows: Iterable[ScoredRow]) -> TokenNll:
    """The criterion over all rows. RowsInvalid when there are none, an id occurs twice, or a sum is not finite."""
    by_family: dict[str, list[ScoredRow]] = {}
    seen: set[str] = set()
    for row in rows:
        if row.id in seen:
            raise RowsInvalid(f"row {row.id} occurs twice")
        if not row.family or row.tokens <= 0 or not _is_sum_of_nats(row.nll):
            raise RowsInvalid(f"row {row.id} can't be scored: family {row.family!r}, tokens {row.tokens}, nll {row.nll!r}")
        seen.add(row.id)
        by_family.setdefault(row.family, []).append(row)
    if not by_family:
        raise RowsInvalid("there are no rows")
    families = {family: _score(family, by_family[family]) for family in sorted(by_family)}
    value = math.fsum(score.nll_per_token for score in families.values()) / len(families)
    return TokenNll(value=value, families=families, rows=len(seen))


def claim_holds(claim: float, recomputed: float) -> bool:
    """Whether a claimed value is the recomputed one, up to the tolerance; a claim that is not finite never holds."""
    return math.isfinite(claim) and math.isclose(claim, recomputed, rel_tol=CLAIM_TOLERANCE, abs_tol=0.0)


def perplexity(nll_per_token: float) -> float:
    """exp of nats per token; infinity where that leaves the range of a float."""
    try:
        return math.exp(nll_per_token)
    except OverflowError:
        return math.inf


def _score(family: str, rows: list[ScoredRow]) -> FamilyScore:
    tokens = sum(row.tokens for row in rows)
    try:
        nll = math.fsum(row.nll for row in rows)
    except OverflowError as fault:
        raise RowsInvalid(f"the nats of family {family} add up beyond the range of a float") from fault
    return FamilyScore(nll_per_token=nll / tokens, tokens=tokens, rows=len(rows))


def _is_sum_of_nats(nll: float) -> bool:
    try:
        return math.isfinite(nll) and nll >= 0
    except OverflowError:  # an integer beyond the range of a float
        return False
