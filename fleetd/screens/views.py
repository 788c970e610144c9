"""The status document as lines: the verdict, then each campaign with its runs, then the hosts. Pure; every screen shows these words.

    verdict_lines  OK, NEEDS YOU or BLIND, with the time to the deadline and to the last safe stop
    run_table      one row a run; its cells come from `cells`
    run_notes      what does not fit a cell: why it waits, alarms, how old the values are
"""

from __future__ import annotations

from typing import Any

from fleetd.screens import cells, layout, words
from fleetd.screens.document import (
    ATTENTION_STATES,
    Document,
    campaigns,
    is_closed,
    is_settled,
    moment_of,
    number,
    runs_of,
    seconds_between,
    seen_age,
    sight,
)
from fleetd.screens.layout import Line, Span, Tone, line, quiet
from fleetd.screens.view_deliveries import delivery_line
from policies.facts import parse_moment

INDENT = 2
OLDER_SHOWN_MAX = 5
SKEW_SECONDS_SHOWN = 10.0

_VERDICT_TONES = {"OK": Tone.GOOD, "NEEDS YOU": Tone.BAD, "BLIND": Tone.WARN}


def status_lines(document: Document, *, width: int) -> list[Line]:
    """The whole status, no line wider than `width`. Campaigns that are over get one line each, but for the newest."""
    lines = verdict_lines(document, width=width)
    found = sorted(campaigns(document), key=lambda each: str(each["campaign_id"]))
    whole = shown_whole(document)
    for campaign in whole:
        lines += [layout.EMPTY_LINE, *campaign_lines(document, campaign, width=width)]
    if not found:
        lines += [layout.EMPTY_LINE, line(quiet("no campaign yet: "), "fleetd launch PLAN")]
    older = [each for each in reversed(found) if each not in whole]
    if older:
        lines += [layout.EMPTY_LINE, *(_older_line(document, each) for each in older[:OLDER_SHOWN_MAX])]
        if len(older) > OLDER_SHOWN_MAX:
            lines.append(line(quiet(f"and {len(older) - OLDER_SHOWN_MAX} older: fleetd status CAMPAIGN shows one, --json all")))
    hosts = host_lines(document, width=width)
    return lines + ([layout.EMPTY_LINE, *hosts] if hosts else [])


def shown_whole(document: Document) -> list[Document]:
    """The campaigns at work or stopped, and the newest one even if it is over."""
    found = sorted(campaigns(document), key=lambda each: str(each["campaign_id"]))
    return [each for each in found if each is found[-1] or not is_closed(document, each)]


def verdict_lines(document: Document, *, width: int) -> list[Line]:
    """`OK · 3 runs training · deadline in 1 h 12 min · last safe stop in 58 min`; `NEEDS YOU: what, where, for how long · …`."""
    return layout.packed(verdict_parts(document), width, hanging=INDENT)


def verdict_parts(document: Document) -> list[Line]:
    verdict = document.get("verdict") or {}
    word = str(verdict.get("word") or words.UNKNOWN)
    text = words.one_line(verdict.get("text") or "")
    first = Span(word, _VERDICT_TONES.get(word, Tone.WARN))
    if word == "OK":
        parts = [line(first), line(text)] if text else [line(first)]
    else:
        since = f", for {elapsed(document, verdict['since'])}" if verdict.get("since") else ""
        parts = [line(first, Span(f": {text or words.UNKNOWN}", Tone.STRONG), since)]
    at_work = [campaign for campaign in campaigns(document) if not is_closed(document, campaign)]
    for key, name in (("seconds_to_deadline", "deadline"), ("seconds_to_last_safe_stop", "last safe stop")):
        times = [seconds for campaign in at_work if (seconds := number(campaign.get(key))) is not None]
        if times:
            parts.append(line(Span(f"{name} {words.until(min(times))}", Tone.WARN if min(times) < 0 else Tone.PLAIN)))
    return parts


def campaign_lines(document: Document, campaign: Document, *, width: int) -> list[Line]:
    """The campaign's header, its runs as a table with their notes, and what was chosen, frozen, opened and reported."""
    inside = width - INDENT
    lines = campaign_header(document, campaign, width=width)
    lines += [layout.indented(each, INDENT) for each in run_table(runs_of(document, campaign["campaign_id"]), document, width=inside)]
    for spans in outcome_notes(campaign):
        lines += [layout.indented(each, INDENT) for each in layout.wrapped(spans, inside, hanging=INDENT)]
    return lines


def campaign_header(document: Document, campaign: Document, *, width: int) -> list[Line]:
    """Name and id; stage and since when; deadline and cutoff."""
    now = moment_of(document)
    parts = [line(_stage_span(campaign), quiet(f" for {elapsed(document, campaign.get('since'))}"))]
    if not is_closed(document, campaign):
        parts.append(line(f"deadline {words.moment(campaign.get('deadline_at'), now)}, {words.until(number(campaign.get('seconds_to_deadline')))}"))
        parts.append(line(f"training cutoff {words.moment(campaign.get('cutoff_at'), now)}"))
    if detail := words.one_line(campaign.get("detail") or ""):
        parts.append(line(detail))
    title = line(Span(words.one_line(campaign.get("name") or words.UNKNOWN), Tone.STRONG), quiet(f"  {campaign['campaign_id']}"))
    return [title, *(layout.indented(each, INDENT) for each in layout.packed(parts, width - INDENT, hanging=0))]


def _stage_span(campaign: Document) -> Span:
    stage = str(campaign.get("stage") or words.UNKNOWN)
    return Span(stage, Tone.BAD if stage == "failed" else Tone.GOOD if stage in {"evaluated", "finished"} else Tone.STRONG)


def _older_line(document: Document, campaign: Document) -> Line:
    ago = elapsed(document, campaign.get("since"))
    return line(quiet("over: "), _stage_span(campaign), quiet(f" {ago} ago  "), words.one_line(campaign["campaign_id"]))


def run_table(found: list[Document], document: Document, *, width: int) -> list[Line]:
    """One row a run; values without a column, and notes, go below their row."""
    if not found:
        return []
    rows = [cells.run_cells(run, moment_of(document)) for run in found]
    columns, folded = layout.fit(cells.RUN_COLUMNS, rows, width)
    lines = [layout.header_line(columns, rows)]
    for run, row in zip(found, rows, strict=True):
        lines.append(layout.row_line(columns, row, rows))
        below = layout.packed(cells.folded_parts(folded, row), width - INDENT, hanging=0)
        for note in run_notes(run, document):
            below += layout.wrapped(note, width - INDENT, hanging=INDENT)
        lines += [layout.indented(each, INDENT) for each in below]
    return lines


def run_notes(run: Document, document: Document, *, selectable: bool = True) -> list[Line]:
    """What a person must know beyond the cells: why, alarms, what could not be verified, how old the values are."""
    notes: list[Line] = []
    attention = run.get("state") in ATTENTION_STATES and not run.get("successor")
    detail = words.one_line(run.get("detail") or "")
    if detail and not _goes_without_saying(run):
        notes.append(line(Span(f"! {detail}", Tone.BAD) if attention else Span(detail, Tone.QUIET)))
    if isinstance(run.get("continues"), dict):
        begun = run["continues"].get("step")
        start = "anew: no verified copy was there" if begun is None else f"from step {begun}"
        notes.append(line(quiet(f"goes on with {words.one_line(run['continues'].get('run_id'))} {start}")))
    if isinstance(run.get("cleared"), dict):
        who = words.one_line(run["cleared"].get("by") or words.UNKNOWN)
        notes.append(line(quiet(f"cleared by {who}: its host takes new runs beside it")))
    notes += [line(Span(f"! {words.one_line(alarm)}", Tone.BAD)) for alarm in run.get("alarms") or []]
    identity = sight(run.get("identity")).value
    if identity is not None and not is_settled(run) and str(identity).startswith("cannot verify"):
        notes.append(line(Span(f"! {words.one_line(identity)}", Tone.BAD)))
    seen = seen_age(run)
    if seen is not None and seen > cells.FRESH_SECONDS_MAX and not is_settled(run):
        notes.append(line(Span(f"~ last look {words.age(seen)}: the values marked ~ are that old", Tone.WARN)))
    if run.get("state") == "backoff" and run.get("next_attempt_at"):
        notes.append(line(f"next attempt {words.until(_seconds_until(document, run['next_attempt_at']))}"))
    if selectable and isinstance(run.get("selectable"), str) and is_settled(run) and run.get("kind", "train") == "train":
        notes.append(line(quiet(f"not selectable: {words.one_line(run['selectable'])}")))
    return notes


def outcome_notes(campaign: Document) -> list[Line]:
    """What was chosen, frozen, opened and written, one line each."""
    notes: list[Line] = []
    if isinstance(campaign.get("selection"), dict):
        notes.append(chosen_line(campaign))
    for opening in campaign.get("openings") or []:
        if isinstance(opening, dict):
            notes.append(line(quiet("opened: "), words.one_line(opening.get("split", words.UNKNOWN))))
    notes += displaced_notes(campaign)
    if campaign.get("report"):
        notes.append(line(quiet("report: "), words.one_line(campaign["report"])))
    return notes


def displaced_notes(campaign: Document) -> list[Line]:
    """What of others' work makes room for this campaign, and how far each is."""
    tones = {"held": Tone.BAD, "failed": Tone.BAD, "returned": Tone.WARN, "displaced": Tone.WARN}
    notes = []
    for each in campaign.get("displaced") or []:
        state = str(each.get("state") or words.UNKNOWN)
        name = f"{words.one_line(each.get('name'))} on {words.one_line(each.get('host'))} "
        detail = words.one_line(each.get("detail") or "")
        notes.append(line(quiet("displaced work: "), name, Span(state, tones.get(state, Tone.PLAIN)), quiet(f"  {detail}")))
    return notes


def _goes_without_saying(run: Document) -> bool:
    """A run that goes on, or finished without a reason, has nothing to explain."""
    return run.get("state") in {"running", "finished"} and not run.get("reason")


def chosen_line(campaign: Document) -> Line:
    """`chosen: lr-high at step 400, 4.812 nats per token · frozen`; or why nothing was."""
    selection = campaign.get("selection") or {}
    if not selection.get("checkpoint_digest"):
        return line(Span("chosen: nothing", Tone.WARN), quiet(f"  {words.one_line(campaign.get('detail') or '')}"))
    value = words.loss(number(selection.get("value")))
    chosen = f"chosen: {words.one_line(selection.get('candidate'))} at step {selection.get('step', words.UNKNOWN)}, {value} nats per token"
    return line(Span(chosen, Tone.STRONG), quiet(" · frozen" if campaign.get("frozen") else " · not frozen yet"))


def host_lines(document: Document, *, width: int) -> list[Line]:
    """One line a host: reachable or for how long not, memory free and handed out, disk free, how strongly a cap can hold there; below it
    what the host is being brought."""
    lines: list[Line] = []
    for host in document.get("hosts") or []:
        free, disk = sight(host.get("memory_available_bytes")), sight(host.get("disk_free_bytes"))
        parts = [
            line(Span(f"{words.one_line(host.get('name', words.UNKNOWN))}  ", Tone.STRONG), *_host_state(host, document)),
            line(f"{words.size(number(free.value))} memory free{cells.when(free.age_seconds)}"),
        ]
        if host.get("capacity_bytes"):
            parts.append(line(f"{words.share(number(host.get('committed_bytes')), number(host.get('capacity_bytes')))} handed out"))
        parts.append(line(f"{words.size(number(disk.value))} disk free{cells.when(disk.age_seconds)}"))
        if means := (host.get("facts") or {}).get("cap_means"):
            parts.append(line(f"caps {cells.grade({'parts': means})}"))
        lines += layout.packed(parts, width, hanging=INDENT)
        for delivery in host.get("deliveries") or []:
            lines += [layout.indented(each, INDENT) for each in layout.wrapped(delivery_line(delivery), width - INDENT, hanging=INDENT)]
        for mark in _host_marks(host, document):
            lines += [layout.indented(each, INDENT) for each in layout.wrapped(mark, width - INDENT, hanging=INDENT)]
        for run in host.get("unknown_runs") or []:
            note = layout.wrapped(line(Span(f"! {_unknown_run_words(run)}", Tone.BAD)), width - INDENT, hanging=INDENT)
            lines += [layout.indented(each, INDENT) for each in note]
    return lines


def _unknown_run_words(run: Document) -> str:
    """A run that its host tells of and history does not know. Only its whole id names it."""
    name, state = words.one_line(run.get("run_id", words.UNKNOWN)), words.one_line(run.get("state") or words.UNKNOWN)
    asked = "it was asked to stop" if run.get("want") == "stop" else f"fleetd stop {name}"
    return f"a run that nobody here knows: {name}, pid {run.get('pid') or words.UNKNOWN}, {state} ({asked})"


def _host_marks(host: Document, document: Document) -> list[Line]:
    """What an operator has said of a host, with who and since when."""
    notes = []
    for key, word in (("fenced", "FENCED"), ("drained", "DRAINED")):
        mark = host.get(key)
        if isinstance(mark, dict):
            because = f": {words.one_line(mark['because'])}" if mark.get("because") else ""
            said = f"{word} for {elapsed(document, mark.get('since'))} by {words.one_line(mark.get('by') or words.UNKNOWN)}{because}"
            undo = f" (fleetd undrain {words.one_line(host.get('name'))})" if key == "drained" else ""
            notes.append(line(Span(said, Tone.WARN), quiet(undo)))
    skew = number(sight(host.get("clock_skew_seconds")).value)
    if skew is not None and abs(skew) > SKEW_SECONDS_SHOWN:
        side = "ahead of" if skew > 0 else "behind"
        notes.append(line(Span(f"! its clock is {words.duration(abs(skew))} {side} the coordinator's", Tone.BAD)))
    left = [words.one_line(run) for run in host.get("left_behind") or []]
    if left and host.get("reachable"):
        notes.append(line(Span(f"! it answers again: what was left behind is being ended: {', '.join(left)}", Tone.WARN)))
    return notes


def _host_state(host: Document, document: Document) -> list[Span]:
    if host.get("reachable"):
        return [Span("reachable", Tone.GOOD)]
    detail = words.one_line(host.get("detail") or "")
    return [Span(f"UNREACHABLE for {elapsed(document, host.get('since'))}", Tone.WARN), Span(f" ({detail})" if detail else "")]


def elapsed(document: Document, since: Any) -> str:
    """How long ago a moment of the document was, by the document's own clock."""
    seconds = seconds_between(since, moment_of(document))
    return words.UNKNOWN if seconds is None else words.duration(seconds)


def _seconds_until(document: Document, moment: Any) -> float | None:
    now = moment_of(document)
    try:
        return None if now is None else (parse_moment(moment) - now).total_seconds()
    except (ValueError, TypeError, AttributeError):
        return None
