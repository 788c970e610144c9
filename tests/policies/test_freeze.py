"""What a freeze permits: nothing before it, one look at each reserved split after it, a second one only with a reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import EXIT_FREEZE, FreezeRefused
from policies.facts import RESERVED_SPLITS, Split
from policies.freeze import (
    FROZEN,
    JUDGED,
    OPENED,
    REGISTERED,
    FrozenSelection,
    LedgerEvent,
    Opening,
    Permitted,
    frozen_digest,
    frozen_record,
    may_open,
    openings_of,
    order_faults,
    parse_frozen,
)
from policies.selection import TableRow

ROW = TableRow(run_id="r1", candidate="a", step=100, checkpoint_digest="d1", value=6.1, eligible=True, because="chosen")
FROZEN_SELECTION = FrozenSelection(
    campaign_id="c", criterion="token_nll_v1", minimum_improvement=0.001, run_id="r1", candidate="a", step=100, checkpoint_digest="d1", value=6.1,
    base_checkpoint_digest="d0", base_value=9.0, candidates=(ROW,), exclusions=(replace(ROW, step=200, eligible=False, value=None),),
    inputs={"predictions/r1/100": "ab"}, frozen_at=datetime(2026, 9, 16, 18, 59, 10, tzinfo=timezone.utc), code_digest="c0de",
)


def opening(split: Split, number: int, *, judged: bool) -> Opening:
    return Opening(split=split, number=number, sequence=number + 2, because="", judged=judged)


@pytest.mark.parametrize("split", RESERVED_SPLITS)
def test_without_a_frozen_selection_no_reserved_split_opens(split: Split) -> None:
    refusal = may_open(split, None, (), "a very good reason")
    assert isinstance(refusal, FreezeRefused)
    assert refusal.exit_code == EXIT_FREEZE
    assert "no selection is frozen" in refusal.what


def test_the_first_look_needs_no_reason() -> None:
    assert may_open(Split.TEST, FROZEN_SELECTION, (), "") == Permitted(number=1)


def test_a_look_at_one_split_does_not_use_up_another() -> None:
    assert may_open(Split.HOLDOUT, FROZEN_SELECTION, (opening(Split.TEST, 1, judged=True),), "") == Permitted(number=1)


def test_an_evaluation_that_starts_again_shares_its_unfinished_opening() -> None:
    unfinished = opening(Split.TEST, 1, judged=False)
    assert may_open(Split.TEST, FROZEN_SELECTION, (unfinished,), "") == Permitted(number=1, shares=unfinished)


def test_a_second_look_needs_a_written_reason_and_gets_its_own_number() -> None:
    judged = opening(Split.TEST, 1, judged=True)
    for empty in ("", "  ", "\n\t", "ok"):
        refusal = may_open(Split.TEST, FROZEN_SELECTION, (judged,), empty)
        assert isinstance(refusal, FreezeRefused)
        assert "reason" in refusal.what
    assert may_open(Split.TEST, FROZEN_SELECTION, (judged,), "the first host had a broken GPU") == Permitted(number=2)


@pytest.mark.parametrize("split", [Split.TRAIN, Split.VALIDATION])
def test_what_is_not_reserved_is_never_opened(split: Split) -> None:
    assert isinstance(may_open(split, FROZEN_SELECTION, (), ""), FreezeRefused)


def test_a_frozen_selection_survives_its_record_and_keeps_its_digest() -> None:
    again = parse_frozen(frozen_record(FROZEN_SELECTION))
    assert again == FROZEN_SELECTION
    assert frozen_digest(again) == frozen_digest(FROZEN_SELECTION)


@pytest.mark.parametrize("field", sorted(frozen_record(FROZEN_SELECTION)))
def test_every_field_of_a_frozen_record_counts(field: str) -> None:
    record = frozen_record(FROZEN_SELECTION)
    without = {name: value for name, value in record.items() if name != field}
    with pytest.raises(ValueError, match=r"."):
        parse_frozen(without)
    changed = replace(FROZEN_SELECTION, **{field: _other(getattr(FROZEN_SELECTION, field))}) if field != "schema" else None
    if changed is not None:
        assert frozen_digest(changed) != frozen_digest(FROZEN_SELECTION)


def _other(value: object) -> object:
    if isinstance(value, datetime):
        return value.replace(microsecond=1)
    if isinstance(value, (int, float)):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    return {} if isinstance(value, dict) else ()


def test_a_record_with_a_field_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="frozen selection"):
        parse_frozen({**frozen_record(FROZEN_SELECTION), "extra": 1})
    for broken in (None, [], "x", 7, {}):
        with pytest.raises(ValueError, match=r"."):
            parse_frozen(broken)


def story(*kinds: tuple[str, dict[str, object]]) -> tuple[LedgerEvent, ...]:
    return tuple(LedgerEvent(sequence=number, kind=kind, body=dict(body)) for number, (kind, body) in enumerate(kinds, 1))


REGISTER = (REGISTERED, {"splits": {}, "digests": {}})
FREEZE = (FROZEN, {"frozen_sha256": "f"})
OPEN_1 = (OPENED, {"split": "test", "number": 1, "because": "", "frozen_sha256": "f"})
JUDGE_1 = (JUDGED, {"split": "test", "number": 1})
OPEN_2 = (OPENED, {"split": "test", "number": 2, "because": "a broken host", "frozen_sha256": "f"})


def test_the_ordinary_story_has_no_fault() -> None:
    events = story(REGISTER, FREEZE, OPEN_1, JUDGE_1, OPEN_2)
    assert order_faults(events) == ()
    assert [(each.number, each.judged) for each in openings_of(events)] == [(1, True), (2, False)]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ((REGISTER, OPEN_1, FREEZE), "opened before any freeze"),
        ((REGISTER, FREEZE, FREEZE), "a second freeze"),
        ((FREEZE, REGISTER), "registered after the freeze"),
        ((REGISTER, FREEZE, JUDGE_1), "judged without an opening"),
        ((REGISTER, FREEZE, OPEN_1, JUDGE_1, JUDGE_1), "judged twice"),
        ((REGISTER, FREEZE, OPEN_1, OPEN_2), "before the earlier look was judged"),
        ((REGISTER, FREEZE, OPEN_1, JUDGE_1, (OPENED, {**OPEN_2[1], "because": " "})), "without a reason"),
        ((REGISTER, FREEZE, OPEN_2), "look 2 at test after 0"),
        ((REGISTER, FREEZE, (OPENED, {**OPEN_1[1], "frozen_sha256": "other"})), "another selection"),
    ],
)
def test_each_broken_order_is_named(events: tuple[tuple[str, dict[str, object]], ...], words: str) -> None:
    faults = order_faults(story(*events))
    assert any(words in fault for fault in faults), faults


@given(st.lists(st.sampled_from([Split.TEST, Split.HOLDOUT]), max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_openings_made_by_the_rule_never_break_the_order(asked: list[Split], finished: list[bool]) -> None:
    events = [REGISTER, FREEZE]
    for split, is_finished in zip(asked, finished, strict=False):
        permit = may_open(split, FROZEN_SELECTION, openings_of(story(*events)), "another try")
        assert isinstance(permit, Permitted)
        body = {"split": split.value, "number": permit.number}
        if permit.shares is None:
            events.append((OPENED, {**body, "because": "another try", "frozen_sha256": "f"}))
        if is_finished:
            events.append((JUDGED, body))
    assert order_faults(story(*events)) == ()
