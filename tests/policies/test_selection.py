"""The choice: the unchanged base comes first, only the minimum improvement replaces an incumbent, the lowest candidate wins."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.selection import (
    NO_IMPROVEMENT,
    NOTHING_ELIGIBLE,
    CandidateEvidence,
    CheckpointEvidence,
    NoSelection,
    Selection,
    better_than_incumbent,
    nano,
    select,
)


def candidate(name: str, values: list[float | None], *, refused: str | None = None, first_step: int = 0) -> CandidateEvidence:
    """A run with one checkpoint per value; None is a checkpoint that was refused."""
    checkpoints = tuple(
        CheckpointEvidence(
            step=first_step + 100 * number, checkpoint_digest=f"{name}-{number}", value=value, refused="its rows differ" if value is None else None,
        )
        for number, value in enumerate(values)
    )
    return CandidateEvidence(run_id=f"run-{name}", candidate=name, checkpoints=checkpoints, refused=refused)


def chosen(result: Selection | NoSelection) -> Selection:
    assert isinstance(result, Selection), result
    return result


def test_an_improvement_of_exactly_the_minimum_counts_and_a_billionth_less_does_not() -> None:
    assert better_than_incumbent(0.999, 1.0, 0.001)
    assert not better_than_incumbent(0.999000001, 1.0, 0.001)
    assert better_than_incumbent(6.099, 6.1, 0.001)  # 6.1 - 6.099 is below 0.001 as a float


def test_an_equal_value_never_replaces_the_incumbent_even_without_a_minimum() -> None:
    assert not better_than_incumbent(1.0, 1.0, 0.0)
    assert better_than_incumbent(0.999999999, 1.0, 0.0)


def test_small_steps_add_up_against_the_incumbent_and_not_against_the_last_checkpoint() -> None:
    result = chosen(select((candidate("a", [1.0000, 0.9995, 0.9989]),), 0.001))
    assert result.step == 200


def test_a_later_lower_value_within_the_minimum_leaves_the_earlier_checkpoint_chosen() -> None:
    result = chosen(select((candidate("a", [1.0000, 0.9985, 0.9980]),), 0.001))
    assert (result.step, result.value, result.base_value, result.base_checkpoint_digest) == (100, 0.9985, 1.0, "a-0")


def test_the_lowest_of_all_runs_is_chosen_and_the_others_say_so() -> None:
    result = chosen(select((candidate("a", [9.0, 6.2]), candidate("b", [9.1, 6.0]), candidate("c", [9.0, 9.0])), 0.001))
    assert (result.candidate, result.checkpoint_digest) == ("b", "b-1")
    words = {(row.candidate, row.step): row.because for row in result.table}
    assert "chosen, the lowest of 3" in words["b", 100]
    assert "b is lower" in words["a", 100]
    assert "not better than step 0 by 0.001" in words["c", 100]
    assert "unchanged base" in words["a", 0]


def test_equal_values_are_decided_by_the_checkpoint_digest() -> None:
    first, second = candidate("b", [9.0, 6.0]), candidate("a", [9.0, 6.0])
    assert chosen(select((first, second), 0.001)).checkpoint_digest == "a-1"


def test_values_that_differ_below_a_billionth_are_equal() -> None:
    assert chosen(select((candidate("a", [9.0, 6.0000000002]), candidate("b", [9.0, 6.0])), 0.001)).candidate == "a"


def test_nothing_is_chosen_when_no_run_beats_its_unchanged_base() -> None:
    result = select((candidate("a", [6.0, 6.5, 5.9995]), candidate("b", [6.1, 7.0])), 0.001)
    assert isinstance(result, NoSelection)
    assert result.reason == NO_IMPROVEMENT
    assert len(result.table) == 5


def test_a_trained_checkpoint_worse_than_another_runs_unchanged_base_is_not_chosen() -> None:
    result = select((candidate("a", [5.0, 5.5]), candidate("b", [9.0, 8.0])), 0.001)
    assert isinstance(result, NoSelection)
    assert "unchanged base of a" in result.because


def test_a_refused_checkpoint_is_passed_over_with_its_reason() -> None:
    result = chosen(select((candidate("a", [9.0, 6.0, None, 6.5]),), 0.001))
    refused = next(row for row in result.table if row.step == 200)
    assert (refused.eligible, refused.value, refused.because) == (False, None, "its rows differ")
    assert result.step == 100


def test_a_refused_run_takes_all_its_checkpoints_along_and_the_others_go_on() -> None:
    result = chosen(select((candidate("a", [9.0, 1.0], refused="a byte changed"), candidate("b", [9.0, 8.0])), 0.001))
    assert result.candidate == "b"
    assert [row.because for row in result.table if row.candidate == "a"] == ["a byte changed", "a byte changed"]
    assert not any(row.eligible for row in result.table if row.candidate == "a")


def test_a_run_without_its_unchanged_base_takes_no_part() -> None:
    missing, refused = candidate("a", [1.0], first_step=100), candidate("b", [None, 1.0])
    result = select((missing, refused), 0.001)
    assert isinstance(result, NoSelection)
    assert result.reason == NOTHING_ELIGIBLE
    assert "nothing to improve on" in result.table[0].because
    assert all(not row.eligible for row in result.table)


def test_a_run_without_any_checkpoint_still_has_its_line() -> None:
    result = select((CandidateEvidence(run_id="run-x", candidate="x", checkpoints=(), refused="a command of its own"),), 0.001)
    assert isinstance(result, NoSelection)
    assert [(row.step, row.because) for row in result.table] == [(None, "a command of its own")]
    assert select((), 0.001).table == ()


_values = st.lists(st.one_of(st.none(), st.floats(0.1, 20.0, allow_nan=False)), min_size=1, max_size=7)


@given(st.lists(_values, min_size=1, max_size=5), st.floats(0.0, 0.5), st.randoms())
def test_the_order_in_which_evidence_arrives_changes_nothing(runs: list[list[float | None]], minimum: float, dice: random.Random) -> None:
    candidates = [candidate(f"c{number}", values) for number, values in enumerate(runs)]
    shuffled = []
    for each in candidates:
        checkpoints = list(each.checkpoints)
        dice.shuffle(checkpoints)
        shuffled.append(CandidateEvidence(run_id=each.run_id, candidate=each.candidate, checkpoints=tuple(checkpoints)))
    dice.shuffle(shuffled)
    assert select(tuple(shuffled), minimum) == select(tuple(candidates), minimum)


@given(st.lists(_values, min_size=1, max_size=5), st.floats(0.0, 0.5))
def test_the_chosen_checkpoint_beats_its_base_and_no_earlier_one_of_its_run_is_better(runs: list[list[float | None]], minimum: float) -> None:
    candidates = tuple(candidate(f"c{number}", values) for number, values in enumerate(runs))
    result = select(candidates, minimum)
    assert len(result.table) == sum(len(each.checkpoints) for each in candidates)
    if isinstance(result, NoSelection):
        return
    rows = [row for row in result.table if row.run_id == result.run_id and row.eligible and row.value is not None]
    assert nano(result.value) <= nano(result.base_value) - nano(minimum)
    assert all(nano(row.value) > nano(result.value) for row in rows if row.step is not None and row.step < result.step and row.value is not None)
    assert all(nano(row.value) > nano(result.value) - max(1, nano(minimum)) for row in rows if row.value is not None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_is_never_compared(value: float) -> None:
    with pytest.raises(AssertionError, match="finite"):
        better_than_incumbent(value, 1.0, 0.001)
