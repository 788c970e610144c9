"""Lines and tables as plain data: spans of text with a tone, columns that fit a width. Painting them is one function at the end.

A table never wraps a cell and never cuts an id: columns that do not fit are folded into a line of their own below each row, the least
important first. A tone only adds colour; the words carry the meaning.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

GAP = "  "
SEPARATOR = " · "


class Tone(Enum):
    """How a span is meant, and the SGR codes that show it (ECMA-48)."""

    PLAIN = ""
    STRONG = "1"
    QUIET = "2"
    GOOD = "32"
    WARN = "33"
    BAD = "1;31"


@dataclass(frozen=True, slots=True)
class Span:
    text: str
    tone: Tone = Tone.PLAIN


Line = tuple[Span, ...]
EMPTY_LINE: Line = ()


@dataclass(frozen=True, slots=True)
class Column:
    """One column. A lower `rank` stays longer when the width shrinks; `folded` says the value below the row, with `{}` for it."""

    key: str
    title: str
    rank: int
    folded: str
    right: bool = False


def line(*parts: str | Span) -> Line:
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


def quiet(text: str) -> Span:
    return Span(text, Tone.QUIET)


def text_of(spans: Line) -> str:
    return "".join(span.text for span in spans)


def width_of(text: str) -> int:
    """Terminal cells of a text: wide East Asian characters count two, combining ones none."""
    return sum(0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def fit(columns: Sequence[Column], rows: Sequence[Mapping[str, Span]], width: int) -> tuple[list[Column], list[Column]]:
    """The columns that fit `width` side by side, in order, and those to fold below."""
    kept = list(columns)
    while len(kept) > 1 and sum(_column_width(each, rows) for each in kept) + len(GAP) * (len(kept) - 1) > width:
        kept.remove(max(kept, key=lambda each: each.rank))
    return kept, [each for each in columns if each not in kept]


def header_line(columns: Sequence[Column], rows: Sequence[Mapping[str, Span]]) -> Line:
    return _joined([_padded(Span(each.title, Tone.QUIET), each, rows) for each in columns])


def row_line(columns: Sequence[Column], row: Mapping[str, Span], rows: Sequence[Mapping[str, Span]]) -> Line:
    return _joined([_padded(row[each.key], each, rows) for each in columns])


def aligned(span: Span, column: Column, rows: Sequence[Mapping[str, Span]]) -> Line:
    """A cell as wide as its column."""
    return _padded(span, column, rows)


def folded_parts(columns: Sequence[Column], row: Mapping[str, Span]) -> list[Line]:
    """`best 5.104 at 100`, `checkpoint 100 verified 20 s ago`: the values that found no column, each in its own words."""
    found: list[Line] = []
    for each in columns:
        before, after = each.folded.split("{}")
        found.append(_merged([quiet(before), row[each.key], quiet(after)]))
    return found


def packed(parts: Sequence[Line], width: int, hanging: int) -> list[Line]:
    """The parts joined by ` · `, broken between parts where the line would be wider than `width`; only a part wider than that is broken inside."""
    lines: list[Line] = []
    current: Line = ()
    for part in parts:
        if current and width_of(text_of(current)) + len(SEPARATOR) + width_of(text_of(part)) > width:
            lines.append(current)
            current = (Span(" " * hanging),)
        elif current:
            current = (*current, quiet(SEPARATOR))
        pieces = wrapped((*current, *part), width, hanging)
        lines += pieces[:-1]
        current = pieces[-1]
    return [*lines, current] if current else lines


def indented(spans: Line, by: int) -> Line:
    return (Span(" " * by), *spans)


def wrapped(spans: Line, width: int, hanging: int) -> list[Line]:
    """The line broken between words so that no piece is wider than `width`; later pieces start `hanging` cells in. A long id stays whole."""
    pieces: list[list[Span]] = [[]]
    used = 0
    for word in _words_of(spans):
        text = text_of(tuple(word))
        if used + width_of(text.rstrip()) > width and used > hanging and text.strip():
            pieces.append([Span(" " * hanging)])
            used = hanging
        pieces[-1] += word
        used += width_of(text)
    return [_merged(piece) for piece in pieces]


def painted(lines: Iterable[Line], *, colour: bool) -> str:
    """The lines as text for a terminal, or without any control code."""
    return "\n".join(_painted(spans, colour).rstrip() if not colour else _painted(spans, colour) for spans in lines)


def _painted(spans: Line, colour: bool) -> str:
    if not colour:
        return text_of(spans)
    return "".join(f"\x1b[{span.tone.value}m{span.text}\x1b[0m" if span.tone.value and span.text.strip() else span.text for span in spans)


def _column_width(column: Column, rows: Sequence[Mapping[str, Span]]) -> int:
    return max([width_of(column.title), *(width_of(row[column.key].text) for row in rows)])


def _padded(span: Span, column: Column, rows: Sequence[Mapping[str, Span]]) -> Line:
    room = Span(" " * (_column_width(column, rows) - width_of(span.text)))
    return (room, span) if column.right else (span, room)


def _joined(cells: Sequence[Line]) -> Line:
    spans: list[Span] = []
    for cell in cells:
        spans += [*cell, Span(GAP)]
    return _merged(spans[:-1])


def _merged(spans: Sequence[Span]) -> Line:
    """Neighbours of one tone become one span; empty ones go."""
    merged: list[Span] = []
    for span in spans:
        if merged and merged[-1].tone is span.tone:
            merged[-1] = Span(merged[-1].text + span.text, span.tone)
        elif span.text:
            merged.append(span)
    return tuple(merged)


def _words_of(spans: Line) -> list[list[Span]]:
    """The line's words with the spaces that follow them. A word that changes its tone half-way is one word."""
    found: list[list[Span]] = []
    for span in spans:
        for text in _words(span.text):
            if found and found[-1][-1].text and found[-1][-1].text[-1] != " " and text[0] != " ":
                found[-1].append(Span(text, span.tone))
            else:
                found.append([Span(text, span.tone)])
    return found


def _words(text: str) -> list[str]:
    """Words with the spaces that follow them; a leading space is a word of its own."""
    words: list[str] = []
    start = 0
    for index in range(1, len(text)):
        if text[index - 1] == " " and text[index] != " ":
            words.append(text[start:index])
            start = index
    return [*words, text[start:]] if text else words
