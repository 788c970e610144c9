"""The live status on a terminal. It looks once a second in a thread of its own, so keys answer at once even when the coordinator does not.

    verdict      one line, as everywhere; BLIND with the age of the last document while nobody answers
    campaigns    stage, deadline, cutoff
    runs         the table; j/k choose
    pane         the chosen run: what found no column, its alarms; `enter` shows everything
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from fleetd.paths import StatePaths
from fleetd.screens import cells, layout, terminal, view_run, views, words
from fleetd.screens.client import Client
from fleetd.screens.document import Document, aged, find, moment_of, narrow, runs_of
from fleetd.screens.layout import Line, Span, line, quiet
from fleetd.screens.styles import rich_lines
from fleetd.screens.tui_parts import Ask, Help, RunLog, RunTable
from policies.errors import ExplainedError
from policies.facts import StopMode

LOOK_SECONDS = 1.0
ANSWER_SECONDS_MAX = 3.0
EVENTS_SHOWN = 8
BLIND_AFTER_SECONDS = 4.0
"""A document older than this is said to be old even if no error came yet."""


def watch_fleet(paths: StatePaths, target: str | None) -> int:
    """Run the live status until the person leaves."""
    return FleetApp(paths, target).run() or 0


class FleetApp(App[int]):
    CSS_PATH = "tui.tcss"
    TITLE = "fleetd"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, paths: StatePaths, target: str | None = None) -> None:
        super().__init__()
        self._first = FleetScreen(paths, target)

    def on_mount(self) -> None:
        self.push_screen(self._first)


class FleetScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "log", "Log"),
        Binding("s", "stop", "Stop"),
        Binding("r", "resume", "Resume"),
        Binding("question_mark", "help", "Help"),
        Binding("q", "app.quit", "Quit"),
        Binding("escape", "compact", "Back", show=False),
    ]

    def __init__(self, paths: StatePaths, target: str | None) -> None:
        super().__init__()
        self._paths, self._target = paths, target
        self._client = Client(paths, answer_seconds=ANSWER_SECONDS_MAX)
        self._document: Document | None = None
        self._received_at = 0.0
        self._fault: ExplainedError | None = None
        self._looking = False
        self._in_full = False
        self._events: dict[str, deque[Document]] = {}

    def compose(self) -> ComposeResult:
        yield Static(id="verdict", markup=False)
        yield Static(id="campaigns", markup=False)
        yield RunTable()
        with VerticalScroll(id="pane", can_focus=False):
            yield Static(id="about", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(LOOK_SECONDS, self._tick)
        self.query_one(RunTable).focus()
        self._tick()

    def on_unmount(self) -> None:
        self._client.close()

    def on_resize(self) -> None:
        self._redraw()

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        self.query_one("#pane").scroll_home(animate=False)
        self._redraw_pane()

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        self.action_details()

    def _tick(self) -> None:
        self._redraw()
        if not self._looking:
            self._looking = True
            self.run_worker(self._fetch, thread=True, exit_on_error=False)

    def _fetch(self) -> None:
        """In a thread: one look at the fleet, and at the events of the run whose details are open."""
        document: Document | None = None
        fault: ExplainedError | None = None
        run_id = self._chosen_id if self._in_full else None
        fresh: list[Document] = []
        try:
            document = self._client.status()
            if self._target:
                document = narrow(document, find(document, self._target))
            if run_id:
                known = self._events.get(run_id)
                fresh = list(self._client.all_events(run=run_id, after=int(known[-1]["sequence"]) if known else 0))
        except ExplainedError as found:
            fault = found
        self.app.call_from_thread(self._received, document, fault, run_id, fresh)

    def _received(self, document: Document | None, fault: ExplainedError | None, run_id: str | None, fresh: list[Document]) -> None:
        self._looking = False
        self._fault = fault
        if document is not None:
            self._document, self._received_at = document, time.monotonic()
        if run_id:
            self._events.setdefault(run_id, deque(maxlen=EVENTS_SHOWN)).extend(fresh)
        self._redraw()

    @property
    def _now(self) -> Document | None:
        """The last document, aged to this moment; BLIND when it is too old to be called the present."""
        if self._document is None:
            return None
        age = time.monotonic() - self._received_at
        document = aged(self._document, age)
        if self._fault is not None or age > BLIND_AFTER_SECONDS:
            why = self._fault.title if self._fault is not None else "the coordinator has not answered"
            text = f"{why}; what you see is {words.duration(age)} old, runs go on"
            document["verdict"] = {"word": "BLIND", "text": text, "since": None}
        return document

    @property
    def _chosen_id(self) -> str | None:
        return self.query_one(RunTable).chosen()

    def _chosen_run(self) -> Document | None:
        run_id = self._chosen_id
        return next((run for run in (self._document or {}).get("runs") or [] if run["run_id"] == run_id), None)

    def _redraw(self) -> None:
        document = self._now
        if not self.is_running or not self.query("#verdict"):
            return
        width = max(terminal.WIDTH_MIN, self.size.width - 2)
        if document is None:
            said = self._fault.title if self._fault else "asking the coordinator …"
            self._put("#verdict", [line(quiet(said))])
            return
        whole = views.shown_whole(document)
        self._put("#verdict", views.verdict_lines(document, width=width))
        headers = [spans for campaign in whole for spans in views.campaign_header(document, campaign, width=width)]
        notes = [spans for campaign in whole for spans in views.outcome_notes(campaign)]
        self._put("#campaigns", headers + notes or [line(quiet("no campaign yet: "), "fleetd launch PLAN")])
        runs = [run for campaign in whole for run in runs_of(document, campaign["campaign_id"])]
        self.query_one(RunTable).show_runs(document, runs, {each["campaign_id"]: str(each.get("name")) for each in whole}, width)
        self._redraw_pane()

    def _redraw_pane(self) -> None:
        document, run_id = self._now, self._chosen_id
        run = next((each for each in (document or {}).get("runs") or [] if each["run_id"] == run_id), None)
        if document is None or run is None:
            self._put("#about", [])
            return
        width = max(terminal.WIDTH_MIN, self.size.width - 4)
        self._put("#about", self._full(document, run, width) if self._in_full else self._compact(document, run, width))

    def _compact(self, document: Document, run: Document, width: int) -> list[Line]:
        row: dict[str, Span] = cells.run_cells(run, moment_of(document))
        folded = [each for each in self.query_one(RunTable).folded if each.key in row]
        lines = layout.packed([line(row["candidate"]), *cells.folded_parts(folded, row)], width, hanging=2)
        for note in views.run_notes(run, document):
            lines += [layout.indented(each, 2) for each in layout.wrapped(note, width - 2, hanging=2)]
        return [*lines, layout.EMPTY_LINE, *views.host_lines(document, width=width)]

    def _full(self, document: Document, run: Document, width: int) -> list[Line]:
        lines = view_run.run_details(document, run, width=width)
        events = self._events.get(run["run_id"])
        if events:
            lines += [layout.EMPTY_LINE, line(quiet("last events"))]
            for event in events:
                spans = view_run.event_line(event, moment_of(document), short=True)
                lines += [layout.indented(each, 2) for each in layout.wrapped(spans, width - 2, hanging=2)]
        return lines

    def _put(self, selector: str, lines: list[Line]) -> None:
        self.query_one(selector, Static).update(rich_lines(lines))

    def action_details(self) -> None:
        self._in_full = not self._in_full
        self._redraw_pane()

    def action_compact(self) -> None:
        self._in_full = False
        self._redraw_pane()

    def action_help(self) -> None:
        self.app.push_screen(Help())

    def action_log(self) -> None:
        if run := self._chosen_run():
            self.app.push_screen(RunLog(self._paths, run))

    def action_stop(self) -> None:
        run = self._chosen_run()
        if run is None:
            return
        name, run_id = words.one_line(run.get("candidate") or run["run_id"]), run["run_id"]

        def answered(yes: bool | None) -> None:
            if yes:
                self._ask_coordinator(f"asked {name} to save and stop", lambda: self._client.stop(run_id, StopMode.GRACEFUL.value, terminal.actor()))

        self.app.push_screen(Ask(f"Ask {name} to save a checkpoint and stop?\n`r` resumes it exactly; the deadline does not move."), answered)

    def action_resume(self) -> None:
        if run := self._chosen_run():
            name, run_id = words.one_line(run.get("candidate") or run["run_id"]), run["run_id"]
            self._ask_coordinator(f"resuming {name}", lambda: self._client.resume(run_id, terminal.actor()))

    def _ask_coordinator(self, done: str, ask: Any) -> None:
        """Ask in a thread and say how it went."""

        def work() -> None:
            try:
                answer = ask()
                said, severity = (done, "information") if answer.get("runs") else ("nothing to do: it is not in a state for that", "warning")
            except ExplainedError as fault:
                said, severity = f"{fault.title}: {fault.what}\nfix: {fault.fix}", "error"
            self.app.call_from_thread(self.notify, said, severity=severity, markup=False)

        self.run_worker(work, thread=True, exit_on_error=False)


