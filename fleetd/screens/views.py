"""The status document as lines: the verdict, then each campaign with its runs, then the hosts. Pure; every screen shows these words.

    verdict_lines  OK, NEEDS YOU or BLIND, with the time to the deadline and to the last safe stop
    run_cells      one run as named cells: the table here, the live table and the progress lines all take them
    run_notes      what does not fit a cell: why it waits, alarms, how old the values are
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from fleetd.screens import layout, words
from fleetd.screens.document import (
    ATTENTION_STATES,
    WAITING_STATES,
    Document,
    campaigns,
    is_over,
    is_settled,
    number,
    runs_of,
    seen_age,
    sight,
)
from fleetd.screens.layout import Column, Line, Span, Tone, line, quiet
from policies.facts import parse_moment

FRESH_SECONDS_MAX = 5.0
"""Values older than this say so."""
INDENT = 2
OLDER_SHOWN_MAX = 5

RUN_COLUMNS = (
    Column("candidate", "RUN", 0, "run {}"),
    Column("state", "STATE", 1, "{}"),
    Column("host", "HOST", 6, "on {}"),
    Column("step", "STEP", 2, "step {}", right=True),
    Column("rate", "STEPS/S", 8, "{} steps/s", right=True),
    Column("loss", "LOSS", 3, "loss {}", right=True),
    Column("best", "BEST", 4, "best {}"),
    Column("memory", "MEMORY/CAP", 5, "memory {}"),
    Column("checkpoint", "CHECKPOINT", 9, "checkpoint {}"),
    Column("last_step", "LAST STEP", 10, "last step {}"),
    Column("restarts", "RESTARTS", 11, "restarts {}"),
)
_STATE_TONES = {
    "running": Tone.GOOD, "finished": Tone.GOOD, "failed": Tone.BAD, "held": Tone.BAD, "stuck": Tone.BAD, "lost": Tone.WARN, "backoff": Tone.WARN,
}
_VERDICT_TONES = {"OK": Tone.GOOD, "NEEDS YOU": Tone.BAD, "BLIND": Tone.WARN}
_GRADE_STRENGTH = {"enforced": 2, "sampled": 1, "absent": 0}


def status_lines(document: Document, *, width: int) -> list[Line]:
    """The whole status, no line wider than `width`. Campaigns that are over get one line each; the newest stays whole when none is at work."""
    lines = verdict_lines(document, width=width)
    found = sorted(campaigns(document), key=lambda each: str(each["campaign_id"]))
    whole = [each for each in found if not is_over(document, each)] or found[-1:]
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
    at_work = [campaign for campaign in campaigns(document) if not is_over(document, campaign)]
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
    now = _now(document)
    parts = [line(_stage_span(campaign), quiet(f" for {elapsed(document, campaign.get('since'))}"))]
    if not is_over(document, campaign):
        parts.append(line(f"deadline {words.moment(campaign.get('deadline_at'), now)}, {words.until(number(campaign.get('seconds_to_deadline')))}"))
        parts.append(line(f"training cutoff {words.moment(campaign.get('cutoff_at'), now)}"))
    if detail := words.one_line(campaign.get("detail") or ""):
        parts.append(line(detail))
    title = line(Span(words.one_line(campaign.get("name") or words.UNKNOWN), Tone.STRONG), quiet(f"  {campaign['campaign_id']}"))
    return [title, *(layout.indented(each, INDENT) for each in layout.packed(parts, width - INDENT, hanging=0))]


def _stage_span(campaign: Document) -> Span:
    stage = str(campaign.get("stage") or words.UNKNOWN)
    return Span(stage, Tone.BAD if stage == "failed" else Tone.GOOD if stage == "evaluated" else Tone.STRONG)


def _older_line(document: Document, campaign: Document) -> Line:
    ago = elapsed(document, campaign.get("since"))
    return line(quiet("over: "), _stage_span(campaign), quiet(f" {ago} ago  "), words.one_line(campaign["campaign_id"]))


def run_table(found: list[Document], document: Document, *, width: int) -> list[Line]:
    """One row a run; values without a column, and notes, go below their row."""
    if not found:
        return []
    rows = [run_cells(run) for run in found]
    columns, folded = layout.fit(RUN_COLUMNS, rows, width)
    lines = [layout.header_line(columns, rows)]
    for run, row in zip(found, rows, strict=True):
        lines.append(layout.row_line(columns, row, rows))
        below = layout.packed(folded_parts(folded, row), width - INDENT, hanging=0)
        for note in run_notes(run, document):
            below += layout.wrapped(note, width - INDENT, hanging=INDENT)
        lines += [layout.indented(each, INDENT) for each in below]
    return lines


def folded_parts(columns: Sequence[Column], row: Mapping[str, Span]) -> list[Line]:
    """What the folded columns say of a run; values that can't be there yet are left out."""
    return layout.folded_parts([each for each in columns if row[each.key].text != words.ABSENT], row)


def run_cells(run: Document) -> dict[str, Span]:
    """One run as named cells. `?` is unknown, `—` is not there yet, `~` marks a value that is older than the host's last look."""
    return {
        "candidate": Span(words.one_line(run.get("candidate") or run["run_id"]), Tone.STRONG),
        "state": state_span(run),
        "host": Span(words.one_line(run.get("host") or words.ABSENT)),
        "step": step_span(run),
        "rate": _measured(run, "steps_per_second", words.rate) if not is_settled(run) else Span(words.ABSENT, Tone.QUIET),
        "loss": _measured(run, "loss", words.loss),
        "best": best_span(run),
        "memory": memory_span(run),
        "checkpoint": checkpoint_span(run),
        "last_step": last_step_span(run),
        "restarts": restarts_span(run),
    }


def state_span(run: Document) -> Span:
    """`running`, `failed (oom)`, `running, stop asked`."""
    state = str(run.get("state") or words.UNKNOWN)
    tone = _STATE_TONES.get(state, Tone.PLAIN)
    reason = f" ({run['reason']})" if run.get("reason") else ""
    asked = ", stop asked" if run.get("want") == "stop" and state in {"running", "starting", "backoff", "lost"} else ""
    return Span(words.one_line(f"{state}{reason}{asked}"), tone)


def step_span(run: Document) -> Span:
    """`123/400`; `—/400` before the first step is possible, `?/400` when it should be known and is not."""
    planned = number(run.get("steps_planned"))
    found = _measured(run, "step", lambda value: f"{value:.0f}")
    return Span(f"{found.text}/{planned:.0f}", found.tone) if planned is not None else found


def best_span(run: Document) -> Span:
    """`5.104 at 100, 2 min ago`: the lowest validation value so far, its step, and when."""
    best = sight(run.get("best"))
    if not isinstance(best.value, dict):
        return Span(words.ABSENT, Tone.QUIET)
    return Span(f"{words.loss(number(best.value.get('value')))} at {best.value.get('step', words.UNKNOWN)}{_when(best.age_seconds)}")


def memory_span(run: Document) -> Span:
    """`1.20/2.00 GiB E enforced`: host memory of the tree against its cap, and how strongly the strongest mechanism holds it."""
    memory = run.get("memory") or {}
    if run.get("state") in WAITING_STATES:
        return Span(f"{words.ABSENT} of {words.size(number(memory.get('host_cap_bytes')))}", Tone.QUIET)
    used = sight(memory.get("host_bytes"))
    count = None if is_settled(run) else number(used.value)
    cap = number(memory.get("host_cap_bytes"))
    if is_settled(run):
        peak = number(sight(memory.get("host_peak_bytes")).value)
        return Span(f"peak {words.share(peak, cap)}", Tone.QUIET)
    near = count is not None and cap is not None and count > 0.9 * cap
    return Span(f"{_mark(run, used.age_seconds)}{words.share(count, cap)} {grade(memory)}", Tone.WARN if near else Tone.PLAIN)


def grade(memory: Document) -> str:
    """`E enforced`, `S sampled`, `A absent`: the strongest of the mechanisms that hold the host part; `?` when none is reported."""
    parts = memory.get("parts") or {}
    found = [str(part.get("grade")) for name, part in parts.items() if name in {"cgroup", "sampler"} and isinstance(part, dict)]
    if not found:
        return f"{words.UNKNOWN} grade unknown"
    best = max(found, key=lambda each: _GRADE_STRENGTH.get(each, -1))
    return f"{best[:1].upper()} {best}"


def checkpoint_span(run: Document) -> Span:
    """`100 verified 20 s ago`: the newest copy that the coordinator verified."""
    found = run.get("checkpoint")
    if isinstance(found, dict) and found.get("step") is not None:
        return Span(f"{found['step']} verified {words.age(number(found.get('age_seconds')))}")
    none_due = run.get("state") in WAITING_STATES or run.get("kind", "train") != "train"
    return Span(words.ABSENT if none_due else "none verified", Tone.QUIET)


def last_step_span(run: Document) -> Span:
    if run.get("state") in WAITING_STATES:
        return Span(words.ABSENT, Tone.QUIET)
    last = sight(run.get("last_step_at"))
    if last.value is None:
        return Span(words.UNKNOWN if run.get("state") == "running" else words.ABSENT, Tone.QUIET)
    return Span(words.age(last.age_seconds), Tone.QUIET if is_settled(run) else Tone.PLAIN)


def restarts_span(run: Document) -> Span:
    used = number(run.get("restarts_used"))
    if used is None:
        return Span(words.ABSENT if run.get("state") in WAITING_STATES else words.UNKNOWN, Tone.QUIET)
    return Span(f"{int(used)} of {run.get('restarts_max', words.UNKNOWN)}", Tone.WARN if used else Tone.QUIET)


def run_notes(run: Document, document: Document, *, selectable: bool = True) -> list[Line]:
    """What a person must know beyond the cells: why, alarms, what could not be verified, how old the values are."""
    notes: list[Line] = []
    attention = run.get("state") in ATTENTION_STATES
    detail = words.one_line(run.get("detail") or "")
    if detail:
        notes.append(line(Span(f"! {detail}", Tone.BAD) if attention else Span(detail, Tone.QUIET)))
    notes += [line(Span(f"! {words.one_line(alarm)}", Tone.BAD)) for alarm in run.get("alarms") or []]
    identity = sight(run.get("identity")).value
    if identity is not None and not is_settled(run) and str(identity).startswith("cannot verify"):
        notes.append(line(Span(f"! {words.one_line(identity)}", Tone.BAD)))
    seen = seen_age(run)
    if seen is not None and seen > FRESH_SECONDS_MAX and not is_settled(run):
        notes.append(line(Span(f"~ last look {words.age(seen)}: the values marked ~ are that old", Tone.WARN)))
    if run.get("state") == "backoff" and run.get("next_attempt_at"):
        ago = _seconds_since(document, run["next_attempt_at"])
        notes.append(line(f"next attempt {words.until(None if ago is None else -ago)}"))
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
    if campaign.get("report"):
        notes.append(line(quiet("report: "), words.one_line(campaign["report"])))
    return notes


def chosen_line(campaign: Document) -> Line:
    """`chosen: lr-high at step 400, 4.812 nats per token · frozen`; or why nothing was."""
    selection = campaign.get("selection") or {}
    if not selection.get("checkpoint_digest"):
        return line(Span("chosen: nothing", Tone.WARN), quiet(f"  {words.one_line(campaign.get('detail') or '')}"))
    value = words.loss(number(selection.get("value")))
    chosen = f"chosen: {words.one_line(selection.get('candidate'))} at step {selection.get('step', words.UNKNOWN)}, {value} nats per token"
    return line(Span(chosen, Tone.STRONG), quiet(" · frozen" if campaign.get("frozen") else " · not frozen yet"))


def host_lines(document: Document, *, width: int) -> list[Line]:
    """One line a host: reachable or for how long not, memory free and handed out, disk free."""
    lines: list[Line] = []
    for host in document.get("hosts") or []:
        free, disk = sight(host.get("memory_available_bytes")), sight(host.get("disk_free_bytes"))
        parts = [
            line(Span(f"{words.one_line(host.get('name', words.UNKNOWN))}  ", Tone.STRONG), *_host_state(host, document)),
            line(f"{words.size(number(free.value))} memory free{_when(free.age_seconds)}"),
        ]
        if host.get("capacity_bytes"):
            parts.append(line(f"{words.share(number(host.get('committed_bytes')), number(host.get('capacity_bytes')))} handed out"))
        parts.append(line(f"{words.size(number(disk.value))} disk free{_when(disk.age_seconds)}"))
        lines += layout.packed(parts, width, hanging=INDENT)
    return lines


def _host_state(host: Document, document: Document) -> list[Span]:
    if host.get("reachable"):
        return [Span("reachable", Tone.GOOD)]
    detail = words.one_line(host.get("detail") or "")
    return [Span(f"UNREACHABLE for {elapsed(document, host.get('since'))}", Tone.WARN), Span(f" ({detail})" if detail else "")]


def elapsed(document: Document, since: Any) -> str:
    """How long ago a moment of the document was, by the document's own clock."""
    seconds = _seconds_since(document, since)
    return words.UNKNOWN if seconds is None else words.duration(seconds)


def _measured(run: Document, key: str, spoken: Callable[[float], str]) -> Span:
    """A measured number with its mark when it is old; `—` while nothing can be known, `?` where it should be."""
    found = sight(run.get(key))
    value = number(found.value)
    if value is None:
        unknown = run.get("state") == "running" and not (key == "steps_per_second" and sight(run.get("step")).value is None)
        return Span(words.UNKNOWN if unknown else words.ABSENT, Tone.QUIET)
    return Span(f"{_mark(run, found.age_seconds)}{spoken(value)}")


def _mark(run: Document, age_seconds: float | None) -> str:
    """`~` before a value of a live run that is older than a few seconds and older than its last step, whose age has its own column."""
    if age_seconds is None or age_seconds <= FRESH_SECONDS_MAX or is_settled(run):
        return ""
    look, last_step = seen_age(run), sight(run.get("last_step_at")).age_seconds
    stale_look = look is None or look > FRESH_SECONDS_MAX
    return "~" if stale_look or last_step is None or age_seconds > last_step + FRESH_SECONDS_MAX else ""


def _when(age_seconds: float | None) -> str:
    return f", {words.age(age_seconds)}" if age_seconds is not None and age_seconds > FRESH_SECONDS_MAX else ""


def _now(document: Document) -> datetime | None:
    try:
        return parse_moment(document["at"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def _seconds_since(document: Document, moment: Any) -> float | None:
    now = _now(document)
    try:
        return None if now is None else (now - parse_moment(moment)).total_seconds()
    except (ValueError, TypeError, AttributeError):
        return None
