"""Pieces of the live status: the table of runs, the question before a stop, the help, and the log of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen
from textual.widgets import DataTable, Footer, RichLog, Static

from fleetd.paths import StatePaths
from fleetd.screens import cells, layout, streams, words
from fleetd.screens.client import LOG_CHUNK_BYTES, Client
from fleetd.screens.document import Document, moment_of
from fleetd.screens.layout import Column, Span, Tone
from fleetd.screens.styles import rich_line
from policies.errors import ExplainedError, NotFound

LOG_LINES_MAX = 2000
LOG_TAIL = 400
LOG_LOOK_SECONDS = 1.0
CAMPAIGN_COLUMN = Column("campaign", "CAMPAIGN", 1, "of {}")

HELP = """\
 j, k or arrows   choose a run
 enter            its details: attempts, memory, checkpoints, events
                  (page up, page down)
 l                its log (tab: output, steps, supervisor)
 s                save and stop it, after a question
 r                resume it
 esc              back
 q                leave; everything goes on without this screen

 ?  unknown     —  not there yet     ~  older than the last look
 E enforced by kernel or allocator   S sampled   A absent"""


class RunTable(DataTable[object]):
    """The runs, one a row. Columns that do not fit are left to the pane below. The cursor stays on its run when rows come and go."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "Details"),
        Binding("j", "cursor_down", "Down", show=False),
        Binding("k", "cursor_up", "Up", show=False),
    ]

    def __init__(self) -> None:
        super().__init__(id="runs", cursor_type="row", zebra_stripes=False, cell_padding=1)
        self.folded: list[Column] = []
        self._shown: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    def show_runs(self, document: Document, runs: Sequence[Document], campaign_names: dict[str, str], width: int) -> None:
        """Make the table show these runs; cells change in place where the rows are the same."""
        rows = {run["run_id"]: cells.run_cells(run, moment_of(document)) for run in runs}
        columns: tuple[Column, ...] = cells.RUN_COLUMNS
        if len(campaign_names) > 1:
            columns = (CAMPAIGN_COLUMN, *columns)
            for run in runs:
                rows[run["run_id"]]["campaign"] = Span(words.one_line(campaign_names.get(run["campaign_id"], "")), Tone.QUIET)
        kept, self.folded = layout.fit(columns, list(rows.values()), width)
        shape = (tuple(each.key for each in kept), tuple(rows))
        if shape != self._shown:
            self._rebuild(kept, rows)
            self._shown = shape
            return
        for run_id, row in rows.items():
            for each in kept:
                self.update_cell(run_id, each.key, _cell(row[each.key], each, rows), update_width=True)

    def chosen(self) -> str | None:
        """The run under the cursor."""
        if not self.row_count or not self.is_valid_row_index(self.cursor_row):
            return None
        return self.coordinate_to_cell_key(self.cursor_coordinate).row_key.value

    def _rebuild(self, columns: Sequence[Column], rows: dict[str, dict[str, Span]]) -> None:
        chosen = self.chosen()
        self.clear(columns=True)
        for each in columns:
            self.add_column(rich_line(layout.aligned(Span(each.title), each, list(rows.values()))), key=each.key)
        for run_id, row in rows.items():
            self.add_row(*(_cell(row[each.key], each, rows) for each in columns), key=run_id)
        if chosen in rows:
            self.move_cursor(row=list(rows).index(chosen))

    def action_page_up(self) -> None:
        self.screen.query_one("#pane").scroll_page_up(animate=False)

    def action_page_down(self) -> None:
        self.screen.query_one("#pane").scroll_page_down(animate=False)


def _cell(span: Span, column: Column, rows: dict[str, dict[str, Span]]) -> Text:
    return rich_line(layout.aligned(span, column, list(rows.values())))


class Ask(ModalScreen[bool]):
    """A yes-or-no question; nothing happens but on `y`."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self._question}\n\n y  yes      n  no", id="question", markup=False)
        yield Footer()

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


class Help(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "app.pop_screen", "Back")]

    def compose(self) -> ComposeResult:
        yield Static(HELP, id="question", markup=False)
        yield Footer()


class RunLog(Screen[None]):
    """What one run writes, as it writes it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l", "app.pop_screen", "Back"),
        Binding("tab", "next_stream", "Next stream", priority=True),
    ]

    def __init__(self, paths: StatePaths, run: Document) -> None:
        super().__init__()
        self._run = run
        self._client = Client(paths, answer_seconds=2.0)
        self._stream = 0
        self._offset: int | None = None
        self._looking = False

    def compose(self) -> ComposeResult:
        yield Static(id="log-title", markup=False)
        yield RichLog(id="log", max_lines=LOG_LINES_MAX, wrap=True, markup=False, highlight=False)
        yield Footer()

    def on_mount(self) -> None:
        self.set_interval(LOG_LOOK_SECONDS, self._look)
        self._look()

    def on_unmount(self) -> None:
        self._client.close()

    def action_next_stream(self) -> None:
        self._stream = (self._stream + 1) % len(STREAMS)
        self._offset = None
        self.query_one(RichLog).clear()
        self._look()

    def _look(self) -> None:
        if not self._looking:
            self._looking = True
            self.run_worker(self._fetch, thread=True, exit_on_error=False)

    def _fetch(self) -> None:
        stream, offset = self._stream, self._offset
        said, text = "", ""
        try:
            text, offset = _read(self._client, self._run, STREAMS[stream], offset)
        except NotFound:
            said = "nothing written yet"
        except ExplainedError as fault:
            said = fault.title
        self.app.call_from_thread(self._show, stream, text, offset, said)

    def _show(self, stream: int, text: str, offset: int | None, said: str) -> None:
        self._looking = False
        if stream != self._stream or not self.is_attached:
            return
        self._offset = offset
        name = words.one_line(self._run.get("candidate") or self._run["run_id"])
        self.query_one("#log-title", Static).update(f"{name} · {STREAMS[stream]}" + (f" · {said}" if said else ""))
        log = self.query_one(RichLog)
        for each in streams.safe(text).replace("\r", "\n").splitlines():
            log.write(each)


STREAMS = ("stdout", "log", "supervisor")


def _read(client: Client, run: Document, stream: str, offset: int | None) -> tuple[str, int]:
    """The text after `offset` and the new offset; the tail when nothing was read yet."""
    if offset is None:
        page = client.logs(run["run_id"], stream=stream, attempt=run.get("attempt") or None, offset=-LOG_CHUNK_BYTES)
        lines = page["data"].splitlines(keepends=True)[-LOG_TAIL:]
        return "".join(lines), int(page["next"])
    page = client.logs(run["run_id"], stream=stream, attempt=run.get("attempt") or None, offset=offset)
    return page["data"], int(page["next"])
