"""Text that goes on: a run's log from its tail, and events as they happen. Bounded reads, and an end when the run has one.

A new attempt writes a new file: following goes over to it, and says so on stderr.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from typing import Any

from fleetd.screens import layout, terminal, view_run
from fleetd.screens.client import LOG_CHUNK_BYTES, Client, CoordinatorAway
from fleetd.screens.document import Document, is_settled
from policies.errors import EXIT_OK, EXIT_UNREACHABLE, NotFound

LOOK_SECONDS = 0.5
TAIL_BYTES_MAX = 16 * LOG_CHUNK_BYTES
AWAY_SECONDS_MAX = 60.0
"""A follower outlives a restart of the coordinator, not its absence."""

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""ECMA-48 control sequences, operating system commands, and control characters but tab, newline and carriage return."""


def last(items: Iterable[Any], count: int) -> list[Any]:
    """The last `count` items; all of them for 0."""
    return list(items) if count == 0 else list(deque(items, maxlen=count))


def tail_of_log(client: Client, run: Document, stream: str, attempt: int | None, lines: int) -> Iterator[str]:
    """The end of a log in pieces: its last `lines` lines, at most TAIL_BYTES_MAX of them; everything for 0."""
    yield from (text for text, _ in _tail(client, run, stream, attempt, lines))


def show_log(client: Client, run: Document, stream: str, *, attempt: int | None, tail: int, follow: bool) -> int:
    """Print the tail of a log, and with `follow` what comes after it, until the run is settled and everything is printed."""
    pinned = attempt or run.get("attempt") or None
    offset = 0
    try:
        for text, following in _tail(client, run, stream, pinned, tail):
            _write(text)
            offset = following
    except NotFound:
        if not follow:
            raise
    if not follow:
        return EXIT_OK
    return _follow_log(client, run, stream, pinned, offset, is_pinned=attempt is not None)


def _follow_log(client: Client, run: Document, stream: str, attempt: int | None, offset: int, *, is_pinned: bool) -> int:
    away_since: float | None = None
    while True:
        try:
            found = next((each for each in client.status().get("runs") or [] if each.get("run_id") == run["run_id"]), None)
            over = found is None or is_settled(found)
            offset = _drain(client, run, stream, attempt, offset)
            away_since = None
        except CoordinatorAway:
            away_since = away_since or time.monotonic()
            if time.monotonic() - away_since > AWAY_SECONDS_MAX:
                terminal.say("the coordinator does not answer any more; the run goes on without it", talk=True)
                return EXIT_UNREACHABLE
            time.sleep(LOOK_SECONDS)
            continue
        newest = (found or {}).get("attempt")
        if newest and newest != attempt and not is_pinned and stream == "stdout":
            terminal.say(f"-- attempt {newest} of {run.get('candidate')} --", talk=True)
            attempt, offset = newest, 0
        elif over:
            return EXIT_OK
        time.sleep(LOOK_SECONDS)


def _drain(client: Client, run: Document, stream: str, attempt: int | None, offset: int) -> int:
    """Print everything after `offset`; the new offset. A file that is not there yet has nothing to print."""
    while True:
        try:
            page = client.logs(run["run_id"], stream=stream, attempt=attempt, offset=offset)
        except NotFound:
            return offset
        if not page["data"]:
            return int(page["next"])
        _write(page["data"])
        offset = int(page["next"])


def _tail(client: Client, run: Document, stream: str, attempt: int | None, lines: int) -> Iterator[tuple[str, int]]:
    """Pieces of text with the offset after each."""
    offset = 0
    if lines:
        want, data = LOG_CHUNK_BYTES, ""
        while True:
            page = client.logs(run["run_id"], stream=stream, attempt=attempt, offset=-want, bytes_max=want)
            data, offset, size = page["data"], int(page["next"]), int(page["size"])
            if data.count("\n") > lines or want >= size or want >= TAIL_BYTES_MAX:
                break
            want = min(want * 4, TAIL_BYTES_MAX)
        yield "".join(data.splitlines(keepends=True)[-lines:]), offset
        return
    while True:
        page = client.logs(run["run_id"], stream=stream, attempt=attempt, offset=offset)
        if not page["data"]:
            return
        offset = int(page["next"])
        yield page["data"], offset


def follow_events(client: Client, history: list[Document], query: dict[str, Any], *, as_json: bool) -> int:
    """Print the history, then every event as it happens; one JSON object a line for a program. Ends by an interrupt only."""
    after = int(history[-1]["sequence"]) if history else 0
    _show_events(history, as_json=as_json, short=bool(query))
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            fresh = client.events(after=after, **query)
        except CoordinatorAway:
            continue
        _show_events(fresh, as_json=as_json, short=bool(query))
        after = int(fresh[-1]["sequence"]) if fresh else after


def _show_events(events: list[Document], *, as_json: bool, short: bool) -> None:
    now = datetime.now(timezone.utc)
    for event in events:
        spans = view_run.event_line(event, now, short=short)
        text = json.dumps(event, ensure_ascii=False) if as_json else layout.painted([spans], colour=terminal.colour())
        print(text, flush=True)


def safe(text: str) -> str:
    """The text without what could steer a terminal; a progress bar's carriage returns stay."""
    return _ESCAPES.sub("", text)


def _write(text: str) -> None:
    sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
