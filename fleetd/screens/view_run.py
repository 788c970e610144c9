"""One run in full: everything the table folds away, then memory, attempts and the last events. Pure; the details pane and `status RUN`."""

from __future__ import annotations

import signal as signals
from datetime import datetime
from typing import Any

from fleetd.screens import cells, layout, views, words
from fleetd.screens.document import Document, is_settled, moment_of, number, sight
from fleetd.screens.layout import Line, Span, Tone, line, quiet

DIGEST_SHOWN = 12
ATTEMPTS_SHOWN_MAX = 6
LABEL_WIDTH = 12
KIND_WIDTH = 22


def run_details(document: Document, run: Document, *, width: int) -> list[Line]:
    """Identity, progress, checkpoints, memory part by part, times, attempts and alarms of one run."""
    row = cells.run_cells(run, moment_of(document))
    lines = [line(row["candidate"], quiet(f"  {run['run_id']}"))]
    parts_by_label: list[tuple[str, list[Line]]] = [
        ("state", [line(row["state"], quiet(f" for {views.elapsed(document, run.get('since'))}")), *_kind(run)]),
        ("host", [line(row["host"]), *_process(run)]),
        ("progress", _progress(row)),
        ("best", [line(row["best"])]),
        ("checkpoint", _checkpoint(run)),
        ("memory", [line(row["memory"]), *_memory(run)]),
        *(("", [each]) for each in _mechanisms(run)),
        ("times", _times(document, run)),
        ("restarts", [line(row["restarts"])]),
        *(("attempt" if index == 0 else "", [each]) for index, each in enumerate(_attempts(run))),
        *([("exactness", [_exactness(proof)])] if isinstance(proof := run.get("exactness"), dict) else []),
        ("selectable", [_selectable(run)]),
    ]
    for label, parts in parts_by_label:
        packed = layout.packed(parts, width - views.INDENT - LABEL_WIDTH, hanging=0)
        for index, each in enumerate(packed):
            lines.append(layout.indented((quiet(f"{label if index == 0 else '':<{LABEL_WIDTH}}"), *each), views.INDENT))
    for note in views.run_notes(run, document, selectable=False):
        lines += [layout.indented(each, views.INDENT) for each in layout.wrapped(note, width - views.INDENT, hanging=views.INDENT)]
    return lines


def event_line(event: Document, now: datetime | None = None, *, short: bool = False) -> Line:
    """`11:59:40 UTC  run_moved  lr-high  to running: first step seen`. `short` leaves out what a reader of one campaign knows."""
    body = event.get("body") if isinstance(event.get("body"), dict) else {}
    assert isinstance(body, dict)
    kind = words.one_line(body.get("kind") if event.get("kind") == "noticed" else event.get("kind", words.UNKNOWN))
    parts = [quiet(words.moment(event.get("at"), now)), Span(f"  {kind:<{KIND_WIDTH}}", Tone.STRONG)]
    about = str(event.get("run_id") or event.get("campaign_id") or event.get("host") or "")
    if short and event.get("campaign_id"):
        about = about.removeprefix(str(event["campaign_id"])).removeprefix("-")
    if about:
        parts.append(Span(f"  {words.one_line(about)}"))
    said = _event_words(event, body)
    if said:
        parts.append(Span(f"  {said}"))
    because = words.one_line(event.get("because") or "")
    if because and because != kind and because not in said:
        parts.append(quiet(f": {because}"))
    if event.get("actor") not in (None, "", "coordinator"):
        parts.append(quiet(f" (by {words.one_line(event['actor'])})"))
    return tuple(parts)


def exit_words(ended: Document) -> str:
    """`exit 0`, `killed by SIGKILL`, `unobserved`: how one attempt ended, from its exit record."""
    record = ended.get("exit") if isinstance(ended.get("exit"), dict) else ended
    assert isinstance(record, dict)
    if record.get("signal"):
        try:
            said = f"killed by {signals.Signals(int(record['signal'])).name}"
        except ValueError:
            said = f"killed by signal {record['signal']}"
    elif record.get("exit_code") is not None:
        said = f"exit {record['exit_code']}"
    else:
        said = "nobody saw how it ended"
    seen_by = record.get("observed_by")
    return f"{said} (seen by {words.one_line(seen_by)})" if seen_by and seen_by != "nobody" else said


def _event_words(event: Document, body: Document) -> str:
    """The part of an event's body that a person wants beside its kind."""
    if event.get("kind") == "noticed":
        inner = body.get("body") if isinstance(body.get("body"), dict) else {}
        assert isinstance(inner, dict)
        return words.one_line(_notice_words(str(body.get("kind")), inner))
    if body.get("to"):
        return words.one_line(f"to {body['to']}" + (f" ({body['reason']})" if body.get("reason") else ""))
    shown = {key: body[key] for key in ("title", "candidate", "split", "step", "value", "cutoff_at", "reachable") if body.get(key) is not None}
    return words.one_line(", ".join(f"{key} {value}" for key, value in shown.items()))


def _notice_words(kind: str, inner: Document) -> str:
    if kind == "attempt_ended":
        return f"{inner.get('attempt', words.UNKNOWN)}: {exit_words(inner)}"
    if kind == "alarm":
        return str(inner.get("text", ""))
    if inner.get("to"):
        return f"to {inner['to']}" + (f" ({inner['reason']})" if inner.get("reason") else "")
    shown = [key for key in ("attempt", "step", "value", "signal", "purpose", "verdict", "pid") if inner.get(key) is not None]
    return ", ".join(f"{key} {inner[key]}" for key in shown)


def _kind(run: Document) -> list[Line]:
    kind = [line(quiet(words.one_line(run.get("kind", "train"))))]
    return [*kind, line(quiet(f"wanted: {words.one_line(run['want'])}"))] if run.get("want") and not is_settled(run) else kind


def _process(run: Document) -> list[Line]:
    pid, identity = sight(run.get("pid")), sight(run.get("identity"))
    if pid.value is None:
        return [line(quiet("no process"))]
    found = words.one_line(identity.value if identity.value is not None else words.UNKNOWN)
    return [line(f"pid {pid.value}{cells.when(pid.age_seconds)}"), line(Span(f"identity {found}", Tone.PLAIN if found == "verified" else Tone.WARN))]


def _progress(row: dict[str, Span]) -> list[Line]:
    parts = [line(row["step"], quiet(" steps"))]
    for key, before, after in (("rate", "", " steps/s"), ("loss", "loss ", ""), ("last_step", "last step ", "")):
        if row[key].text != words.ABSENT:
            parts.append(line(quiet(before), row[key], quiet(after)))
    return parts


def _checkpoint(run: Document) -> list[Line]:
    verified, there = run.get("checkpoint"), sight(run.get("checkpoint_on_host"))
    digest = f" ({str(verified['digest'])[:DIGEST_SHOWN]})" if isinstance(verified, dict) and verified.get("digest") else ""
    parts = [line(cells.checkpoint_span(run), quiet(digest))]
    if isinstance(there.value, dict):
        parts.append(line(quiet(f"on the host {there.value.get('step', words.UNKNOWN)}, {words.age(there.age_seconds)}")))
    return parts


def _memory(run: Document) -> list[Line]:
    memory = run.get("memory") or {}
    peak = number(sight(memory.get("host_peak_bytes")).value)
    parts = [line(quiet(f"peak {words.size(peak)}"))] if peak is not None and not is_settled(run) else []
    used, cap = number(sight(memory.get("accelerator_bytes")).value), number(memory.get("accelerator_cap_bytes"))
    return [*parts, line(quiet(f"accelerator {words.share(used, cap)}" if used is not None else "accelerator: nothing measured"))]


def _mechanisms(run: Document) -> list[Line]:
    """Each mechanism of the cap: how strongly it holds, and by what means."""
    found = ((run.get("memory") or {}).get("parts") or {}).items()
    told = [(words.one_line(name), part) for name, part in found if isinstance(part, dict)]
    return [line(quiet(f"{name}: "), cells.grade_words(part), quiet("  " + words.one_line(part.get("means", "")))) for name, part in told]


def _times(document: Document, run: Document) -> list[Line]:
    if is_settled(run):
        return [line(quiet(words.ABSENT))]
    parts = [line(f"stops by {_moment(document, run.get('stop_at'))}"), line(quiet(f"cutoff {_moment(document, run.get('cutoff_at'))}"))]
    left = number(run.get("time_left_seconds"))
    return [*parts, line(quiet(f"{words.duration(left)} left"))] if left is not None else parts


def _moment(document: Document, text: Any) -> str:
    return words.moment(text, moment_of(document))


def _attempts(run: Document) -> list[Line]:
    ended = [each for each in run.get("attempts_ended") or [] if isinstance(each, dict)]
    hidden = len(ended) - ATTEMPTS_SHOWN_MAX
    lines = [line(quiet(f"{hidden} earlier ones: fleetd events {run['run_id']}"))] if hidden > 0 else []
    for each in ended[-ATTEMPTS_SHOWN_MAX:]:
        reason = f", {words.one_line(each['reason'])}" if each.get("reason") else ""
        lines.append(line(f"{each.get('attempt', words.UNKNOWN)} ended: {exit_words(each)}{reason}"))
    if run.get("attempt") and not is_settled(run) and int(run["attempt"]) > len(ended):
        lines.append(line(f"{run['attempt']} goes on"))
    return lines or [line(quiet("none yet"))]


def _exactness(proof: Document) -> Line:
    verdict = words.one_line(proof.get("verdict") or words.UNKNOWN)
    return line(Span(verdict, Tone.WARN if verdict == "inexact" else Tone.PLAIN), quiet(f": {words.one_line(proof.get('because') or '')}"))


def _selectable(run: Document) -> Line:
    found = run.get("selectable")
    return line("yes") if found is True else line(quiet(words.one_line(found) if found else words.UNKNOWN))
