"""`launch --follow` and `follow`: a campaign's progress until it is over, then how it ended and what to type next.

On a terminal one bar a run is redrawn in place and changes scroll by above; elsewhere changes are lines and progress comes every ten
seconds. Ctrl-C only ends the looking: the campaign goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fleetd.screens import cells, layout, terminal, view_outcome, views, waiting, words
from fleetd.screens.client import Client, CoordinatorAway
from fleetd.screens.document import WAITING_STATES, Document, Target, campaigns, is_over, is_settled, moment_of, number, runs_of, sight
from fleetd.screens.layout import Column, Line, Span, Tone, line, quiet
from fleetd.screens.view_deliveries import deliveries_of, delivery_line
from policies.errors import EXIT_INTERRUPTED, EXIT_UNREACHABLE, NotFound

LOOK_SECONDS = 0.5
PLAIN_SECONDS = 10.0
AWAY_SECONDS_MAX = 600.0
BAR_WIDTH_MAX = 40
BAR_WIDTH_MIN = 10
INDENT = 2
PROGRESS_COLUMNS = (
    Column("candidate", "", 0, "{}"),
    Column("state", "", 1, "{}"),
    Column("step", "", 2, "{}", right=True),
    Column("loss", "", 3, "loss {}", right=True),
    Column("rate", "", 4, "{} steps/s", right=True),
    Column("memory", "", 5, "{}"),
)


def follow_campaign(client: Client, campaign_id: str) -> int:
    """Show one campaign until it is over; the exit code of its ending. 130 when the looking was interrupted, 8 when nobody answers any more."""
    try:
        with _board() as draw:
            ending = _watch(client, campaign_id, draw)
    except KeyboardInterrupt:
        terminal.say("\nthe campaign goes on without this screen")
        terminal.say(f"  look:   fleetd status\n  follow: fleetd follow {campaign_id}\n  stop:   fleetd stop {campaign_id}")
        return EXIT_INTERRUPTED
    if ending is None:
        terminal.say("the coordinator does not answer any more; runs on hosts go on without it\n  next: fleetd daemon, then fleetd status", talk=True)
        return EXIT_UNREACHABLE
    document, campaign = ending
    terminal.show([layout.EMPTY_LINE, *view_outcome.outcome_lines(document, campaign, width=terminal.width())])
    found = waiting.ending_of(document, Target("campaign", campaign_id, campaign))
    assert found is not None, "the campaign is over"
    return found.exit_code


Draw = Callable[[list[Line], Document, Document], None]
"""Shows change lines once, and the progress of a campaign for now."""


def _watch(client: Client, campaign_id: str, draw: Draw) -> tuple[Document, Document] | None:
    """Look until the campaign is over; the last document. None when the coordinator stayed away."""
    before: Document | None = None
    away_since: float | None = None
    while True:
        try:
            document = client.status()
        except CoordinatorAway as fault:
            if away_since is None:
                away_since = time.monotonic()
                if before is None:
                    raise
                draw([line(Span(f"BLIND: {fault.title}; runs go on without it", Tone.WARN))], before, _campaign(before, campaign_id))
            if time.monotonic() - away_since > AWAY_SECONDS_MAX:
                return None
            time.sleep(LOOK_SECONDS)
            continue
        campaign = _campaign(document, campaign_id)
        back = [line(Span("the coordinator answers again", Tone.GOOD))] if away_since is not None else []
        away_since = None
        draw(back + changes(before, document, campaign_id), document, campaign)
        before = document
        if is_over(document, campaign):
            return document, campaign
        time.sleep(LOOK_SECONDS)


def changes(before: Document | None, after: Document, campaign_id: str) -> list[Line]:
    """What is different now, one line a change: the stage, the state of each run, new alarms, a better validation, the choice, an opening.

    At the first look only what is under way is said.
    """
    lines: list[Line] = []
    now = _campaign(after, campaign_id)
    was = _campaign(before, campaign_id) if before else {}
    if now.get("stage") != was.get("stage"):
        detail = words.one_line(now.get("detail") or "")
        lines.append(line(Span(str(now.get("stage")), Tone.STRONG), quiet(f"  {detail}")))
    earlier = {run["run_id"]: run for run in runs_of(before, campaign_id)} if before else {}
    for run in runs_of(after, campaign_id):
        lines += _run_changes(earlier.get(run["run_id"], {}), run)
    if now.get("selection") and not was.get("selection"):
        lines.append(views.chosen_line(now))
    for opening in (now.get("openings") or [])[len(was.get("openings") or []):]:
        lines.append(line(f"opened: the {words.one_line((opening or {}).get('split', words.UNKNOWN))} split, for the frozen selection only"))
    return lines


def _run_changes(was: Document, run: Document) -> list[Line]:
    name = words.one_line(run.get("candidate") or run["run_id"])
    lines: list[Line] = []
    if run.get("state") != was.get("state") and (was or run.get("state") not in WAITING_STATES):
        detail = words.one_line(run.get("detail") or "")
        where = f" on {words.one_line(run['host'])}" if run.get("host") and run.get("state") in {"starting", "running"} else ""
        lines.append(line(f"{name}: ", cells.state_span(run), where, quiet(f"  {detail}" if detail else "")))
    for alarm in run.get("alarms") or []:
        if alarm not in (was.get("alarms") or []):
            lines.append(line(f"{name}: ", Span(f"! {words.one_line(alarm)}", Tone.BAD)))
    best, before = sight(run.get("best")).value, sight(was.get("best")).value
    if isinstance(best, dict) and best != before and was:
        lines.append(line(f"{name}: ", quiet("best so far "), f"{words.loss(number(best.get('value')))} at step {best.get('step')}"))
    return lines


def progress_line(run: Document, document: Document) -> Line:
    """`lr-high running 123/400 · loss 5.231 · 2.13 steps/s · 1.20/2.00 GiB E enforced`."""
    row = _progress_row(run, document)
    parts = [line(row["candidate"], "  ", row["state"], "  ", row["step"]), *(line(row[key]) for key in ("loss", "rate", "memory"))]
    return layout.packed([part for part in parts if layout.text_of(part) != words.ABSENT], width=10_000, hanging=0)[0]


def delivery_lines(document: Document, campaign: Document) -> list[Line]:
    """`spark-a: datasets 3f2a9c1b04de: 1.20/4.00 GiB · …` for each tree that is on its way while runs wait for their data."""
    return [line(quiet(f"{host}: "), *delivery_line(each)) for host, each in _awaited(document, campaign)]


def _awaited(document: Document, campaign: Document) -> list[tuple[str, Document]]:
    """The deliveries that somebody looks for: as long as a run of the campaign has not begun."""
    is_waiting = any(run.get("state") in WAITING_STATES for run in runs_of(document, campaign["campaign_id"]))
    return deliveries_of(document) if is_waiting else []


def _campaign(document: Document, campaign_id: str) -> Document:
    for each in campaigns(document):
        if each["campaign_id"] == campaign_id:
            return each
    raise NotFound(
        f"campaign {campaign_id} is gone", where="the coordinator's status", what="it was launched here, but this coordinator does not know it",
        fix="fleetd status   (shows every campaign)",
    )


def _board() -> AbstractContextManager[Draw]:
    return _Live() if terminal.is_live() else nullcontext(_plain())


def _plain() -> Draw:
    """Changes at once, progress every ten seconds, no control codes."""
    shown_at = time.monotonic()

    def draw(news: list[Line], document: Document, campaign: Document) -> None:
        nonlocal shown_at
        terminal.show(news)
        if time.monotonic() - shown_at >= PLAIN_SECONDS:
            shown_at = time.monotonic()
            terminal.show([view_outcome.header(document, campaign)])
            at_work = [run for run in runs_of(document, campaign["campaign_id"]) if not is_settled(run)]
            terminal.show(layout.indented(progress_line(run, document), INDENT) for run in at_work)
            terminal.show(layout.indented(spans, INDENT) for spans in delivery_lines(document, campaign))

    return draw


class _Live:
    """The board on a terminal: one bar a run, redrawn in place."""

    def __enter__(self) -> Draw:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.__enter__()
        return self._draw

    def __exit__(self, *failure: Any) -> None:
        self._live.__exit__(*failure)

    def _draw(self, news: list[Line], document: Document, campaign: Document) -> None:
        from fleetd.screens.styles import rich_line

        for each in news:
            self._console.print(rich_line(each), soft_wrap=True)
        self._live.update(self._bars(document, campaign), refresh=True)

    def _bars(self, document: Document, campaign: Document) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        from fleetd.screens.styles import rich_line, rich_lines

        width = self._console.width
        grid = Table.grid(padding=(0, 2, 0, 0))
        runs = runs_of(document, campaign["campaign_id"])
        rows = [_progress_row(run, document) for run in runs]
        kept, _ = layout.fit(PROGRESS_COLUMNS, rows, width - BAR_WIDTH_MIN - 3)
        used = layout.width_of(layout.text_of(layout.header_line(kept, rows))) + len(layout.GAP)
        for run, row in zip(runs, rows, strict=True):
            planned, step = number(run.get("steps_planned")), number(sight(run.get("step")).value)
            bar = ProgressBar(total=planned or 1.0, completed=min(step or 0.0, planned or 1.0), width=min(BAR_WIDTH_MAX, width - used - 1))
            grid.add_row(rich_line(layout.row_line(kept, row, rows)), bar if planned else "")
        bar_width = max(BAR_WIDTH_MIN, min(BAR_WIDTH_MAX, width - used - 1))
        for host, delivery in _awaited(document, campaign):
            total, moved = number(delivery.get("bytes_total")) or 1.0, number(delivery.get("bytes")) or 0.0
            label = layout.wrapped(line(quiet(f"{host}: "), *delivery_line(delivery)), used, hanging=INDENT)
            grid.add_row(rich_lines(label), ProgressBar(total=total, completed=min(moved, total), width=bar_width))
        head = [view_outcome.header(document, campaign), *(views.verdict_lines(document, width=width) if _is_alarming(document) else [])]
        return Group("", rich_lines(head), grid)


def _progress_row(run: Document, document: Document) -> dict[str, Span]:
    """The cells of a run with their units, since a board has no header."""
    row = cells.run_cells(run, moment_of(document))
    for each in PROGRESS_COLUMNS:
        if row[each.key].text != words.ABSENT:
            row[each.key] = Span(each.folded.replace("{}", row[each.key].text), row[each.key].tone)
    return row


def _is_alarming(document: Document) -> bool:
    return (document.get("verdict") or {}).get("word") != "OK"
