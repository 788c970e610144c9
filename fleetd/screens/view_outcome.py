"""How a campaign ended, as lines: the verdict, the selection table, perplexity by language before and after, the report, what to type next.

Pure. `launch --follow` ends with it, and so does `fleetd wait` on a terminal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fleetd.screens import layout, views, words
from fleetd.screens.document import Document, number, runs_of
from fleetd.screens.layout import Column, Line, Span, Tone, line, quiet

SELECTION_COLUMNS = (
    Column("candidate", "CANDIDATE", 0, "{}"),
    Column("step", "STEP", 2, "step {}", right=True),
    Column("value", "NATS/TOKEN", 1, "{} nats/token", right=True),
    Column("because", "WHY", 3, "{}"),
)
RESULT_COLUMNS = (
    Column("family", "LANGUAGE", 0, "{}"),
    Column("base", "BASE", 2, "base {}", right=True),
    Column("selected", "SELECTED", 1, "selected {}", right=True),
    Column("unigram", "UNIGRAM", 3, "unigram {}", right=True),
)
TABLE_ROWS_MAX = 20


def outcome_lines(document: Document, campaign: Document, *, width: int) -> list[Line]:
    """Everything a person wants to read once a campaign is over."""
    lines = [_verdict(document, campaign)]
    selection = campaign.get("selection")
    if isinstance(selection, dict):
        lines += [layout.EMPTY_LINE, *selection_lines(selection, width=width)]
    for split, result in (campaign.get("results") or {}).items():
        lines += [layout.EMPTY_LINE, *result_lines(split, result, width=width)]
    if campaign.get("report"):
        lines += [layout.EMPTY_LINE, line(quiet("report  "), words.one_line(campaign["report"]))]
    elif campaign.get("stage") != "stopped":
        lines += [layout.EMPTY_LINE, line(quiet("report  "), Span("none was written", Tone.WARN))]
    return [*lines, layout.EMPTY_LINE, *next_lines(document, campaign)]


def selection_lines(selection: Document, *, width: int) -> list[Line]:
    """Each candidate's best checkpoint and the reason; the chosen one is marked by a star. The report has every checkpoint."""
    table = _best_rows([row for row in selection.get("table") or [] if isinstance(row, dict)], selection)
    rows = [_selection_row(row, selection) for row in table[:TABLE_ROWS_MAX]]
    if not rows:
        return [line(quiet("no candidate was judged"))]
    columns, folded = layout.fit(SELECTION_COLUMNS, rows, width)
    lines = [layout.header_line(columns, rows)]
    for row in rows:
        lines.append(layout.row_line(columns, row, rows))
        lines += [layout.indented(each, 4) for each in layout.packed(layout.folded_parts(folded, row), width - 4, hanging=0)]
    if len(table) > TABLE_ROWS_MAX:
        lines.append(line(quiet(f"and {len(table) - TABLE_ROWS_MAX} more: see the report")))
    return lines


def result_lines(split: str, result: Document, *, width: int) -> list[Line]:
    """Perplexity by language: the unchanged base, the selected model, and the unigram model counted on the same train data."""
    families = families_of(result)
    rows = [
        {"family": Span(words.one_line(family)), **{who: _perplexity(values, who) for who in ("base", "selected", "unigram")}}
        for family, values in sorted(families.items())
    ]
    heading = line(Span(f"{words.one_line(split)}: perplexity by language", Tone.STRONG))
    title = layout.packed([heading, *(line(quiet(note)) for note in _notes(result))], width, hanging=2)
    if not rows:
        return [*title, line(quiet("no figures by language in the result"))]
    columns, _ = layout.fit(RESULT_COLUMNS, rows, width)
    lines = [*title, layout.header_line(columns, rows), *(layout.row_line(columns, row, rows) for row in rows)]
    worse = [family for family, values in sorted(families.items()) if _is_worse(values)]
    if worse:
        lines.append(line(Span(f"! not below the unigram model in: {', '.join(worse)}", Tone.BAD)))
    return lines


def next_lines(document: Document, campaign: Document) -> list[Line]:
    """The commands that make sense from here, one a line."""
    name = words.one_line(campaign.get("name") or campaign["campaign_id"])
    stage = campaign.get("stage")
    failed = [run for run in runs_of(document, campaign["campaign_id"]) if run.get("state") in {"failed", "held", "stuck"}]
    commands = [f"fleetd status {name}"]
    if stage == "stopped":
        commands.insert(0, f"fleetd resume {name}")
    if stage in {"evaluated", "frozen", "finished"}:
        commands.insert(0, f"fleetd report {name} --open")
    commands += [f"fleetd logs {words.one_line(run.get('candidate', run['run_id']))}" for run in failed[:2]]
    return [line(quiet("next    " if index == 0 else "        "), command) for index, command in enumerate(commands)]


def families_of(result: Document) -> dict[str, dict[str, float]]:
    """`{language: {base, selected, unigram}}` in nats per token, from the headline figures of one split."""
    found: dict[str, dict[str, float]] = {}
    for who, figures in (result.get("models") or {}).items():
        for family, scored in ((figures or {}).get("families") or {}).items():
            if (nats := number((scored or {}).get("nll"))) is not None:
                found.setdefault(family, {})[who] = nats
    return found


def _verdict(document: Document, campaign: Document) -> Line:
    stage = str(campaign.get("stage") or words.UNKNOWN)
    tone = Tone.GOOD if stage in {"evaluated", "frozen", "finished"} else Tone.BAD if stage == "failed" else Tone.WARN
    parts = [Span(f"{words.one_line(campaign.get('name') or words.UNKNOWN)} is {stage}", tone)]
    selection = campaign.get("selection") or {}
    if selection.get("checkpoint_digest"):
        digest = str(selection.get("checkpoint_digest") or words.UNKNOWN)[:12]
        parts.append(Span(f": {words.one_line(selection.get('candidate'))} at step {selection.get('step', words.UNKNOWN)} was chosen"))
        parts.append(quiet(f" (checkpoint {digest})"))
    elif campaign.get("detail"):
        parts.append(Span(f": {words.one_line(campaign['detail'])}"))
    return tuple(parts)


def _best_rows(table: list[Document], selection: Document) -> list[Document]:
    """One row a run: the chosen one, else its lowest eligible value, else the first reason against it. Best first."""
    best: dict[str, Document] = {}
    for row in table:
        key = str(row.get("run_id"))
        if key not in best or _row_rank(row, selection) < _row_rank(best[key], selection):
            best[key] = row
    return sorted(best.values(), key=lambda row: _row_rank(row, selection))


def _row_rank(row: Document, selection: Document) -> tuple[bool, bool, float]:
    value = number(row.get("value"))
    return not _is_chosen(row, selection), not row.get("eligible"), math.inf if value is None or math.isnan(value) else value


def _is_chosen(row: Document, selection: Document) -> bool:
    return selection.get("run_id") is not None and (row.get("run_id"), row.get("step")) == (selection.get("run_id"), selection.get("step"))


def _selection_row(row: Document, selection: Document) -> Mapping[str, Span]:
    chosen = _is_chosen(row, selection)
    tone = Tone.GOOD if chosen else Tone.PLAIN if row.get("eligible") else Tone.QUIET
    step = words.ABSENT if row.get("step") is None else str(row["step"])
    value = words.ABSENT if number(row.get("value")) is None else words.loss(number(row["value"]))
    why = words.one_line(row.get("because") or "")
    return {
        "candidate": Span(f"{'*' if chosen else ' '} {words.one_line(row.get('candidate', words.UNKNOWN))}", tone), "step": Span(step, tone),
        "value": Span(value, tone), "because": Span(why if row.get("eligible") else f"not eligible: {why}", tone),
    }


def _perplexity(values: Mapping[str, float], who: str) -> Span:
    if who not in values:
        return Span(words.ABSENT, Tone.QUIET)
    return Span(words.perplexity(values[who]), Tone.STRONG if who == "selected" else Tone.PLAIN)


def _is_worse(values: Mapping[str, float]) -> bool:
    return "selected" in values and "unigram" in values and not values["selected"] < values["unigram"]


def _notes(result: Document) -> list[str]:
    rows, nats = number(result.get("rows")), number(((result.get("models") or {}).get("selected") or {}).get("nll"))
    parts = [f"{rows:.0f} documents"] if rows is not None else []
    if nats is not None and math.isfinite(nats):
        parts.append(f"{words.loss(nats)} nats per token, mean of languages")
    if result.get("exploratory"):
        parts.append("exploratory: not the first look")
    return parts


def header(document: Document, campaign: Document) -> Line:
    """`manpages: training · deadline in 1 h 12 min`: one line for a follower."""
    left = number(campaign.get("seconds_to_deadline"))
    return line(
        Span(words.one_line(campaign.get("name") or words.UNKNOWN), Tone.STRONG), quiet(": "), str(campaign.get("stage") or words.UNKNOWN),
        quiet(f" for {views.elapsed(document, campaign.get('since'))} · deadline {words.until(left)}"),
    )
