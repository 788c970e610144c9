"""Verbs that ask the coordinator for something, or are it: `stop resume evaluate daemon version`."""

from __future__ import annotations

import platform
from enum import Enum
from importlib import metadata
from typing import Annotated, Any

import typer

from fleetd.screens import terminal, words
from fleetd.screens.document import find, find_campaign, runs, unknown_runs
from policies.errors import EXIT_OK, PlanInvalid
from policies.facts import RESERVED_SPLITS, StopMode

NAMES_SHOWN_MAX = 8

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def add_to(app: typer.Typer) -> None:
    app.command()(stop)
    app.command()(resume)
    app.command()(evaluate)
    app.command()(daemon)
    app.command()(version)


def stop(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="A run or a campaign.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run of every campaign.")] = False,
    now: Annotated[bool, typer.Option("--now/--graceful", help="Graceful (the default) saves a checkpoint first; now does not.")] = False,
    as_json: AsJson = False,
) -> int:
    """Stop runs, after a save. `fleetd resume` continues them exactly where they saved."""
    check_target(target, everything, "stop")
    mode = StopMode.NOW if now else StopMode.GRACEFUL
    with terminal.connect() as client:
        document = client.status()
        chosen = "all" if target is None else target if target in unknown_runs(document) else find(document, target).id
        answer = client.stop(chosen, mode.value, terminal.actor())
    if as_json:
        terminal.emit(answer)
        return EXIT_OK
    names = _names(document, answer.get("runs") or [])
    if not names:
        terminal.say("nothing to stop: no run of it is at work")
        return EXIT_OK
    act = "save and stop" if mode is StopMode.GRACEFUL else "stop at once, without a save"
    if target in unknown_runs(document):
        terminal.say(f"asked {names} to {act}\n  see it end: fleetd status   (it leaves the lines of its host when it is over)")
        return EXIT_OK
    if target is None:
        terminal.say(f"asked {names} to {act}\n  see it end: fleetd wait --all\n  go on:      fleetd resume --all")
    else:
        terminal.say(f"asked {names} to {act}\n  see it end: fleetd wait {target}\n  go on:      fleetd resume {target}")
    return EXIT_OK


def resume(
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help="A stopped or held run, or a campaign of them.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every stopped or held run of every campaign that is not over.")] = False,
    as_json: AsJson = False,
) -> int:
    """Continue stopped or held runs. They go on from their last complete checkpoint; the deadline does not move."""
    check_target(target, everything, "resume")
    with terminal.connect() as client:
        document = client.status()
        answer = client.resume("all" if target is None else find(document, target).id, terminal.actor())
    if as_json:
        terminal.emit(answer)
        return EXIT_OK
    names = _names(document, answer.get("runs") or [])
    terminal.say(f"resuming {names}\n  watch it: fleetd status" if names else "nothing to resume: no run of it is stopped or held")
    return EXIT_OK


def evaluate(
    campaign: Annotated[str, typer.Argument(metavar="CAMPAIGN")],
    split: Annotated[str, typer.Option(help="The reserved split to open: calibration, test or holdout.")],
    because: Annotated[str, typer.Option(metavar="TEXT", help="Why, for the ledger. A split is opened and judged once.")] = "",
    as_json: AsJson = False,
) -> int:
    """Judge the frozen selection on a split. Opens a reserved split, once; refused with exit 9 before the freeze."""
    reserved = [each.value for each in RESERVED_SPLITS]
    if split not in reserved:
        what = f"{split!r} is not one of {', '.join(reserved)}"
        fix = f"fleetd evaluate {campaign} --split test"
        raise PlanInvalid("there is no such reserved split", where="fleetd evaluate --split", what=what, fix=fix)
    with terminal.connect() as client:
        found = find_campaign(client.status(), campaign)
        answer = client.open_split(found["campaign_id"], split, terminal.actor(), because)
    if as_json:
        terminal.emit(answer)
    else:
        name = words.one_line(found.get("name"))
        terminal.say(f"the {split} split of {name} is being opened for its frozen selection\n  see the result: fleetd follow {name}")
    return EXIT_OK


def check_target(target: str | None, everything: bool, verb: str) -> None:
    """PlanInvalid unless exactly one of a target and --all was given. `verb` as it is said: `stop`, `wait for`."""
    if everything == (target is not None):
        what = "both a target and --all were given" if everything else "neither a target nor --all was given"
        command = f"fleetd {verb.split()[0]}"
        raise PlanInvalid(f"say what to {verb}", where=command, what=what, fix=f"{command} TARGET, or {command} --all")


class Act(str, Enum):
    """What to do with the coordinator of this state directory."""

    RUN = "run"
    START = "start"
    STOP = "stop"


def daemon(
    act: Annotated[Act, typer.Argument(help="run: in the foreground; start: detached from this terminal; stop: end it.")] = Act.RUN,
    socket_group: Annotated[str | None, typer.Option(metavar="GROUP", help="A group that may use the socket too, beside this user.")] = None,
    as_json: AsJson = False,
) -> int:
    """Be, start or stop the coordinator. Whatever becomes of it, runs on hosts go on."""
    from fleetd.coordinator.daemon import ensure_running, run_foreground, stop_running

    root = terminal.paths().root
    if act is Act.RUN:
        code: Any = run_foreground(root, socket_group=socket_group)
        return code if isinstance(code, int) else EXIT_OK
    if act is Act.START:
        pid, started = ensure_running(root)
        text = f"{'started the' if started else 'there is a'} coordinator, pid {pid}, state {root}"
        return _told({"pid": pid, "started": started, "state_dir": str(root)}, text, as_json)
    pid_before = stop_running(root)
    ended = f"the coordinator, pid {pid_before}, has ended; runs on hosts go on without it\n  start it again: fleetd daemon start"
    text = f"no coordinator is running in {root}" if pid_before is None else ended
    return _told({"pid": pid_before, "stopped": pid_before is not None, "state_dir": str(root)}, text, as_json)


def _told(document: dict[str, Any], text: str, as_json: bool) -> int:
    if as_json:
        terminal.emit(document)
    else:
        terminal.say(text)
    return EXIT_OK


def version(as_json: AsJson = False) -> int:
    """Say which fleetd this is."""
    found = {"fleetd": metadata.version("fleetd"), "python": platform.python_version(), "machine": platform.machine()}
    if as_json:
        terminal.emit(found)
    else:
        terminal.say(f"fleetd {found['fleetd']} (Python {found['python']}, {found['machine']})")
    return EXIT_OK


def _names(document: dict[str, Any], run_ids: list[str]) -> str:
    """`lr-high, lr-mid and 3 more`: candidates of these runs, as far as the document knows them."""
    candidate = {run["run_id"]: str(run.get("candidate") or run["run_id"]) for run in runs(document)}
    names = [words.one_line(candidate.get(run_id, run_id)) for run_id in run_ids]
    more = len(names) - NAMES_SHOWN_MAX
    return ", ".join(names[:NAMES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
