"""Lines and tables: nothing is lost when the width shrinks, ids stay whole, and without colour there is no control code."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetd.screens import layout
from fleetd.screens.layout import Column, Span, Tone, line

COLUMNS = (Column("name", "NAME", 0, "{}"), Column("step", "STEP", 1, "step {}", right=True), Column("host", "HOST", 2, "on {}"))
ROWS = [{"name": Span("lr-high"), "step": Span("7"), "host": Span("gx10")}, {"name": Span("b"), "step": Span("123/400"), "host": Span("spark-a")}]


def shown(width: int) -> list[str]:
    kept, folded = layout.fit(COLUMNS, ROWS, width)
    lines = [layout.header_line(kept, ROWS)]
    for row in ROWS:
        lines += [layout.row_line(kept, row, ROWS), *layout.packed(layout.folded_parts(folded, row), width, hanging=0)]
    return layout.painted(lines, colour=False).split("\n")


def test_columns_stand_below_each_other_and_numbers_end_together() -> None:
    assert shown(40) == ["NAME        STEP  HOST", "lr-high        7  gx10", "b        123/400  spark-a"]


def test_what_does_not_fit_is_said_below_its_row_in_words() -> None:
    assert shown(18) == ["NAME        STEP", "lr-high        7", "on gx10", "b        123/400", "on spark-a"]


@given(width=st.integers(min_value=8, max_value=60))
def test_no_width_loses_a_value(width: int) -> None:
    text = "\n".join(shown(width))
    assert all(span.text in text for row in ROWS for span in row.values())


def test_parts_break_between_parts_and_only_a_long_part_breaks_inside() -> None:
    parts = [line("one two"), line("three four five"), line("six")]
    assert layout.painted(layout.packed(parts, 20, hanging=2), colour=False).split("\n") == ["one two", "  three four five", "  six"]
    long = [line("a part that is wider than the line")]
    assert layout.painted(layout.packed(long, 16, hanging=2), colour=False).split("\n") == ["a part that is", "  wider than the", "  line"]


def test_an_id_longer_than_the_line_stays_whole() -> None:
    run_id = "20260916T185910Z-manpages-a-long-candidate-name"
    assert run_id in layout.painted(layout.wrapped(line("run ", run_id), 20, hanging=2), colour=False).split("\n")[-1]


def test_wide_characters_count_two_cells() -> None:
    rows = [{"name": Span("日本語")}, {"name": Span("abc")}]
    column = (Column("name", "N", 0, "{}"),)
    widths = {layout.width_of(layout.text_of(layout.row_line(column, row, rows))) for row in rows}
    assert widths == {6}


@pytest.mark.parametrize("tone", list(Tone))
def test_without_colour_there_is_no_control_code_and_with_it_the_words_are_the_same(tone: Tone) -> None:
    spans = line("state ", Span("held", tone))
    assert layout.painted([spans], colour=False) == "state held"
    coloured = layout.painted([spans], colour=True)
    assert coloured.replace(f"\x1b[{tone.value}m", "").replace("\x1b[0m", "") == "state held"
