"""One run in full: everything the table folds away, then memory, attempts and the last events. Pure; the details pane and `status RUN`."""

from __future__ import annotations

import signal as signals
from datetime import datetime
from typing import Any

from fleetd.screens import layout, views, words
from fleetd.screens.document import Document, is_settled, number, sight
from fleetd.screens.layout import Line, Span, Tone, line, quiet
from policies.facts import parse_moment

DIGEST_SHOWN = 12
ATTEMPTS_SHOWN_MAX = 6
LABEL_WIDTH = 12


def run_details(document: Document, run: Document, *, width: int) -> list[Line]:
    """Identity, progress, checkpoints, memory part by part, times, attempts and alarms of one run."""
    cells = views.run_cells(run)
    lines = [line(cells["candidate"], quiet(f"  {run['run_id']}"))]
    fields = [
        ("state", line(cells["state"], quiet(f" for {views.elapsed(document, run.get('since'))}"), *_kind(run))),
        ("host", line(cells["host"], quiet(" · "), *_process(run))),
        ("progress", line(*_progress(cells))),
        ("best", line(cells["best"])),
        ("checkpoint", line(*_checkpoint(run))),
        ("memory", line(cells["memory"], *_memory(run))),
        *(("", line(quiet(f"{name}: "), f"{part.get('grade', words.UNKNOWN)}", quiet(f"  {words.one_line(part.get('means', ''))}")))
          for name, part in ((run.get("memory") or {}).get("parts") or {}).items() if isinstance(part, dict)),
        ("times", line(*_times(document, run))),
        ("restarts", line(cells["restarts"])),
        *(("attempt" if index == 0 else "", each) for index, each in enumerate(_attempts(run))),
        ("selectable", line(*_selectable(run))),
    ]
    for label, spans in fields:
        labelled = (quiet(f"{label:<{LABEL_WIDTH}}"), *spans)
        lines += [layout.indented(each, views.INDENT) for each in layout.wrapped(labelled, width - views.INDENT, hanging=LABEL_WIDTH)]
    for note in views.run_notes(run, document, selectable=False):
        lines += [layout.indented(each, views.INDENT) for each in layout.wrapped(note, width - views.INDENT, hanging=views.INDENT)]
    return lines


def event_line(event: Document, now: datetime | None = None) -> Line:
    """`11:59:40 UTC  run_moved  lr-high  spark-a  by coordinator: because …`."""
    parts = [quiet(words.moment(event.get("at"), now)), Span(f"  {words.one_line(event.get('kind', words.UNKNOWN))}", Tone.STRONG)]
    about = event.get("run_id") or event.get("campaign_id") or event.get("host")
    if about:
        parts.append(Span(f"  {words.one_line(about)}"))
    said = _event_words(event)
    if said:
        parts.append(Span(f"  {said}"))
    because = words.one_line(event.get("because") or "")
    if because:
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


def _event_words(event: Document) -> str:
    """The part of an event's body that a person wants beside its kind."""
    body = event.get("body") or {}
    if not isinstance(body, dict):
        return ""
    if event.get("kind") == "noticed":
        inner = body.get("body") if isinstance(body.get("body"), dict) else {}
        assert isinstance(inner, dict)
        return words.one_line(f"{body.get('kind', '')} {_notice_words(str(body.get('kind')), inner)}").strip()
    if body.get("to"):
        return words.one_line(f"to {body['to']}" + (f" ({body['reason']})" if body.get("reason") else ""))
    shown = {key: body[key] for key in ("candidate", "split", "step", "value", "cutoff_at", "reachable") if body.get(key) is not None}
    return words.one_line(", ".join(f"{key} {value}" for key, value in shown.items()))


def _notice_words(kind: str, inner: Document) -> str:
    if kind == "attempt_ended":
        return f"{inner.get('attempt', words.UNKNOWN)}: {exit_words(inner)}"
    if kind == "alarm":
        return str(inner.get("text", ""))
    shown = [key for key in ("attempt", "step", "value", "signal", "purpose", "verdict", "pid") if inner.get(key) is not None]
    return ", ".join(f"{key} {inner[key]}" for key in shown)


def _kind(run: Document) -> list[Span]:
    kind = [quiet(f" · {words.one_line(run.get('kind', 'train'))}")]
    return [*kind, quiet(f" · wanted: {words.one_line(run['want'])}")] if run.get("want") and not is_settled(run) else kind


def _progress(cells: dict[str, Span]) -> list[Span]:
    spans = [cells["step"], quiet(" steps")]
    for key, before, after in (("rate", "", " steps/s"), ("loss", "loss ", ""), ("last_step", "last step ", "")):
        if cells[key].text != words.ABSENT:
            spans += [quiet(f" · {before}"), cells[key], quiet(after)]
    return spans


def _process(run: Document) -> list[Span]:
    pid, identity = sight(run.get("pid")), sight(run.get("identity"))
    if pid.value is None:
        return [quiet("no process")]
    age = f", {words.age(pid.age_seconds)}" if (pid.age_seconds or 0) > views.FRESH_SECONDS_MAX else ""
    found = words.one_line(identity.value if identity.value is not None else words.UNKNOWN)
    return [Span(f"pid {pid.value}{age}"), Span(f", identity {found}", Tone.PLAIN if found == "verified" else Tone.WARN)]


def _checkpoint(run: Document) -> list[Span]:
    spans = [views.checkpoint_span(run)]
    verified = run.get("checkpoint")
    if isinstance(verified, dict) and verified.get("digest"):
        spans.append(quiet(f" ({str(verified['digest'])[:DIGEST_SHOWN]})"))
    there = sight(run.get("checkpoint_on_host"))
    if isinstance(there.value, dict):
        spans.append(quiet(f" · on the host {there.value.get('step', words.UNKNOWN)}, {words.age(there.age_seconds)}"))
    return spans


def _memory(run: Document) -> list[Span]:
    memory = run.get("memory") or {}
    spans: list[Span] = []
    peak = number(sight(memory.get("host_peak_bytes")).value)
    if peak is not None and not is_settled(run):
        spans.append(quiet(f" · peak {words.size(peak)}"))
    accelerator = number(sight(memory.get("accelerator_bytes")).value)
    cap = number(memory.get("accelerator_cap_bytes"))
    spans.append(quiet(f" · accelerator {words.share(accelerator, cap)}" if accelerator is not None else " · accelerator: nothing measured"))
    return spans


def _times(document: Document, run: Document) -> list[Span]:
    if is_settled(run):
        return [quiet(words.ABSENT)]
    spans = [Span(f"stops by {_moment(document, run.get('stop_at'))}"), quiet(f" · cutoff {_moment(document, run.get('cutoff_at'))}")]
    left = number(run.get("time_left_seconds"))
    return [*spans, quiet(f" · {words.duration(left)} left")] if left is not None else spans


def _moment(document: Document, text: Any) -> str:
    return words.moment(text, parse_moment(document["at"]) if document.get("at") else None)


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


def _selectable(run: Document) -> list[Span]:
    found = run.get("selectable")
    return [Span("yes")] if found is True else [quiet(words.one_line(found) if found else words.UNKNOWN)]
