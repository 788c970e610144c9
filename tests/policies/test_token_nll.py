"""The criterion is the plain mean over families of nats per token, and a row that can't be scored stops it."""

from __future__ import annotations

import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.token_nll import RowsInvalid, ScoredRow, claim_holds, parse_row, perplexity, token_nll


def row(identity: str = "val_000:0", family: str = "en", tokens: int = 4, nll: float = 8.0) -> ScoredRow:
    return ScoredRow(id=identity, family=family, tokens=tokens, nll=nll)


def test_the_value_is_the_mean_over_families_of_nats_per_token() -> None:
    rows = [
        row("val_000:0", "en", 10, 20.0), row("val_000:1", "en", 30, 100.0),  # 120 nats over 40 tokens: 3.0
        row("val_000:2", "de", 8, 40.0),  # 5.0
        row("val_000:3", "ja", 2, 1.0),  # 0.5
    ]
    score = token_nll(rows)
    assert {family: each.nll_per_token for family, each in score.families.items()} == {"en": 3.0, "de": 5.0, "ja": 0.5}
    assert score.value == math.fsum([3.0, 5.0, 0.5]) / 3
    assert (score.rows, score.families["en"].tokens, score.families["en"].rows) == (4, 40, 2)


def test_a_large_family_counts_no_more_than_a_small_one() -> None:
    small = [row(f"a:{number}", "en", 1, 2.0) for number in range(3)] + [row("b:0", "ja", 1, 6.0)]
    large = [row(f"a:{number}", "en", 1, 2.0) for number in range(3000)] + [row("b:0", "ja", 1, 6.0)]
    assert token_nll(small).value == token_nll(large).value == 4.0


@given(st.lists(st.tuples(st.sampled_from(["en", "de", "fr", "ja"]), st.integers(1, 5000), st.floats(0, 1e6)), min_size=1, max_size=60), st.randoms())
def test_the_order_of_the_rows_changes_no_bit(facts: list[tuple[str, int, float]], dice: random.Random) -> None:
    rows = [row(f"v:{number}", *fact) for number, fact in enumerate(facts)]
    shuffled = list(rows)
    dice.shuffle(shuffled)
    assert token_nll(shuffled) == token_nll(rows)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ({"nll": float("nan")}, "nll"), ({"nll": float("inf")}, "nll"), ({"nll": -0.5}, "nll"), ({"nll": None}, "nll"), ({"nll": True}, "nll"),
        ({"nll": 10**400}, "nll"), ({"tokens": 0}, "tokens"), ({"tokens": -3}, "tokens"), ({"tokens": 2.0}, "tokens"), ({"tokens": True}, "tokens"),
        ({"family": ""}, "family"), ({"family": None}, "family"), ({"id": ""}, "id"), ({"id": 7}, "id"), ({"id": "x" * 401}, "id"),
    ],
)
def test_a_row_that_cannot_be_scored_is_refused_by_name(broken: dict[str, object], word: str) -> None:
    good = {"id": "val_000:17", "family": "de", "source_group": "g", "label": None, "tokens": 812, "nll": 3517.25}
    assert parse_row(good, "line 1") == row("val_000:17", "de", 812, 3517.25)
    with pytest.raises(RowsInvalid, match=rf"line 1.*{word}"):
        parse_row({**good, **broken}, "line 1")


def test_not_a_number_in_a_file_is_refused_although_python_reads_it() -> None:
    with pytest.raises(RowsInvalid, match="finite"):
        parse_row(json.loads('{"id": "a", "family": "en", "tokens": 1, "nll": NaN}'), "line 3")


def test_no_rows_a_repeated_id_and_sums_beyond_a_float_are_refused() -> None:
    with pytest.raises(RowsInvalid, match="no rows"):
        token_nll([])
    with pytest.raises(RowsInvalid, match="occurs twice"):
        token_nll([row("a"), row("a", "de")])
    with pytest.raises(RowsInvalid, match="range of a float"):
        token_nll([row("a", nll=1.7e308), row("b", nll=1.7e308)])
    with pytest.raises(RowsInvalid, match="row a"):
        token_nll([row("a", nll=float("nan"))])


def test_a_claim_holds_up_to_one_part_in_a_billion_and_no_further() -> None:
    assert claim_holds(6.1, 6.1 * (1 + 5e-10))
    assert not claim_holds(6.1, 6.1 * (1 + 2e-9))
    assert not claim_holds(float("nan"), float("nan"))
    assert not claim_holds(float("inf"), float("inf"))


def test_perplexity_is_the_exponential_and_infinite_beyond_a_float() -> None:
    assert perplexity(math.log(1055.0)) == pytest.approx(1055.0)
    assert perplexity(1e6) == math.inf
