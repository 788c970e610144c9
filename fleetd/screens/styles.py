"""Our lines as rich text, for the two live screens. The tones become styles; the words are those of every other screen."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from fleetd.screens.layout import Line, Tone

STYLES = {Tone.PLAIN: "", Tone.STRONG: "bold", Tone.QUIET: "dim", Tone.GOOD: "green", Tone.WARN: "yellow", Tone.BAD: "bold red"}


def rich_line(spans: Line) -> Text:
    """One line; never wrapped or cropped by rich, since the layout did that."""
    return Text.assemble(*((span.text, STYLES[span.tone]) for span in spans), no_wrap=True, overflow="ignore")


def rich_lines(lines: Iterable[Line]) -> Text:
    return Text("\n", no_wrap=True, overflow="ignore").join(rich_line(spans) for spans in lines)
