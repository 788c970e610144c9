"""Verbs that look and change nothing: `status logs events wait report`. Each answers `--json` with one document."""

from __future__ import annotations

import webbrowser
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetd.screens import layout, streams, terminal, view_run, views, waiting, words
from fleetd.screens.client import Client, CoordinatorAway
from fleetd.screens.commands_act import check_target
from fleetd.screens.document import Target, campaigns, find, find_campaign, find_run, is_over, narrow
from policies.errors import EXIT_OK, EXIT_UNREACHABLE, ExplainedError, PlanInvalid

EVENTS_TAIL = 50
LOG_TAIL = 100

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


class Stream(str, Enum):
    """Which of a run's logs."""

    STDOUT = "stdout"
    LOG = "log"
    SUPERVISOR = "supervisor"


def add_to(app: typer.Typer) -> None:
    app.command()(status)
    app.command()(logs)
    app.command()(events)
    app.command()(wait)
    app.command()(report)


def status(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="One run or campaign; else the whole fleet.")] = None,
    as_json: AsJson = False,
    watch: Annotated[bool | None, typer.Option("--watch/--once", help="Live, or one table. [default: live on a terminal]")] = None,
) -> int:
    """Show campaigns, runs and hosts. One verdict first; exit 8 when a host does not answer (the rest is still shown)."""
    if watch and not terminal.is_live():
        fix = "fleetd status --once, or --json"
        raise PlanInvalid("--watch needs a terminal", where="fleetd status --watch", what="this output is not one", fix=fix)
    with terminal.connect() as client:
        if not as_json and (watch or (watch is None and terminal.is_live())):
            from fleetd.screens.tui import watch_fleet

            client.status()
            return watch_fleet(client.paths, target)
        try:
            document = client.status()
        except CoordinatorAway as fault:
            if not as_json:
                raise
            return _nobody(fault, client)
    chosen = find(document, target) if target else None
    shown = narrow(document, chosen) if chosen else document
    if as_json:
        terminal.emit(shown)
    elif chosen and chosen.kind == "run":
        verdict = views.verdict_lines(document, width=terminal.width())
        terminal.show([*verdict, layout.EMPTY_LINE, *view_run.run_details(document, chosen.body, width=terminal.width())])
    else:
        terminal.show(views.status_lines(shown, width=terminal.width()))
    silent = any(not host.get("reachable") and not host.get("fenced") for host in shown.get("hosts") or [])
    return EXIT_UNREACHABLE if silent else EXIT_OK


def _nobody(fault: CoordinatorAway, client: Client) -> int:
    """The JSON document of a fleet that nobody coordinates."""
    terminal.complain(fault, as_json=False)
    nobody = {"schema": 1, "coordinator": None, "state_dir": str(client.paths.root)}
    terminal.emit({**nobody, "error": fault.to_json(), "exit_code": fault.exit_code})
    return fault.exit_code


def logs(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    stream: Annotated[Stream, typer.Option(help="Its output, its log of steps, or its supervisor's words.")] = Stream.STDOUT,
    tail: Annotated[int, typer.Option(min=0, help="Lines from the end; 0 shows everything.")] = LOG_TAIL,
    attempt: Annotated[int | None, typer.Option(min=1, help="Output of an earlier attempt. [default: the newest]")] = None,
    as_json: AsJson = False,
) -> int:
    """Show what a run wrote."""
    if follow and as_json:
        raise PlanInvalid("--json is one document and -f has no end", where="fleetd logs", what="both were given", fix=f"fleetd logs {run} -f")
    with terminal.connect() as client:
        found = find_run(client.status(), run)
        if as_json:
            text = "".join(streams.tail_of_log(client, found, stream.value, attempt, tail))
            number = attempt or found.get("attempt")
            terminal.emit({"run_id": found["run_id"], "stream": stream.value, "attempt": number, "lines": text.splitlines()})
            return EXIT_OK
        return streams.show_log(client, found, stream.value, attempt=attempt, tail=tail, follow=follow)


def events(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="Only of one run or campaign.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what happens from now; with --json one object a line.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, help=f"How many of the last; 0 shows all. [default: {EVENTS_TAIL}, all with --json]")] = None,
    as_json: AsJson = False,
) -> int:
    """Show what happened, who caused it and why."""
    with terminal.connect() as client:
        query: dict[str, Any] = {}
        if target:
            found = find(client.status(), target)
            query = {found.kind: found.id}
        shown_max = tail if tail is not None else 0 if as_json else EVENTS_TAIL
        history = streams.last(client.all_events(**query), shown_max)
        if follow:
            return streams.follow_events(client, history, query, as_json=as_json)
        if as_json:
            terminal.emit({"events": history})
        else:
            terminal.show(view_run.event_line(event, datetime.now(timezone.utc), short=target is not None) for event in history)
    return EXIT_OK


def wait(
    target: Annotated[str | None, typer.Argument(metavar="TARGET")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every campaign that is under way now.")] = False,
    timeout: Annotated[str | None, typer.Option(metavar="DURATION", help="Give up after this long, e.g. 90, 15m, 1h30m; exit 7.")] = None,
    as_json: AsJson = False,
) -> int:
    """Wait until a run or campaign is over. Exit 0 finished or evaluated, 5 failed, 6 stopped, 7 not finished in time."""
    check_target(target, everything, "wait for")
    seconds = _seconds(timeout) if timeout else None
    if target is None:
        return _wait_for_all(seconds, as_json=as_json)
    with terminal.connect() as client:
        chosen = find(client.status(), target)
        ending = waiting.wait_for(client, chosen, seconds)
    if as_json:
        terminal.emit(ending.to_json())
    else:
        terminal.say(ending.text)
    return ending.exit_code


def _wait_for_all(seconds: float | None, *, as_json: bool) -> int:
    with terminal.connect() as client:
        document = client.status()
        targets = tuple(Target("campaign", str(each["campaign_id"]), each) for each in campaigns(document) if not is_over(document, each))
        endings = waiting.wait_for_all(client, targets, seconds) if targets else ()
    if as_json:
        terminal.emit({"endings": [ending.to_json() for ending in endings], "exit_code": waiting.worst(endings)})
    else:
        terminal.say("\n".join(ending.text for ending in endings) or "nothing is under way")
    return waiting.worst(endings)


def report(
    campaign: Annotated[str, typer.Argument(metavar="CAMPAIGN")],
    open_it: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    path_only: Annotated[bool, typer.Option("--path", help="Print nothing but the path of report.html.")] = False,
    as_json: AsJson = False,
) -> int:
    """Write a campaign's report anew, say where."""
    with terminal.connect() as client:
        found = find_campaign(client.status(), campaign)
        written = client.report(found["campaign_id"])
    if as_json:
        terminal.emit({"campaign_id": found["campaign_id"], **written})
    elif path_only:
        terminal.say(written["html"])
    else:
        terminal.say(f"report of {words.one_line(found.get('name'))}\n  page  {written['html']}\n  data  {written['json']}")
    if open_it and not webbrowser.open(Path(written["html"]).absolute().as_uri()):
        fix = "copy the file to a machine with a browser"
        raise ExplainedError("no browser opened", where=written["html"], what="this machine offers none", fix=fix)
    return EXIT_OK


def _seconds(text: str) -> float:
    try:
        return words.duration_seconds(text)
    except ValueError as fault:
        fix = "fleetd wait TARGET --timeout 15m"
        raise PlanInvalid("--timeout can't be understood", where="fleetd wait --timeout", what=str(fault), fix=fix) from fault
