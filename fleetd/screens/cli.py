"""The command line: `fleetd VERB`. The verbs live by topic in `commands_*.py`; here they get one entry and one way to fail.

    commands_plan.py    check plan-schema launch follow
    commands_watch.py   status logs events wait report
    commands_act.py     stop resume evaluate daemon version
    commands_hosts.py   drain undrain fence clear takeover restore
    commands_service.py service install, status, uninstall

Every expected failure is three lines on stderr and its exit code; anything else is our bug: traceback into a file, one line, exit 70.
Heavy libraries are imported inside the verbs that need them, so that `fleetd status` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetd.screens import commands_act, commands_hosts, commands_plan, commands_service, commands_watch, terminal
from policies.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, ExplainedError, PlanInvalid

app = typer.Typer(
    name="fleetd", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Runs training campaigns on a handful of machines: launches, caps, stops in time, resumes exactly, chooses one checkpoint.",
    epilog="A TARGET is an id, a campaign's name, a candidate's name, campaign/candidate, or the start of an id. "
    "Exit codes: 0 ok, 1 error, 2 usage or invalid plan, 3 refused, 4 not found, 5 run failed, 6 stopped, 7 not finished in time, "
    "8 coordinator or hosts unreachable, 9 refused by the freeze, 70 our bug, 130 interrupted.",
)


class UsageWrong(PlanInvalid):
    """The command line can't be understood: exit 2, like a plan that can't."""


@app.callback()
def _options(
    state: Annotated[Path | None, typer.Option("--state", metavar="DIR", help="The coordinator's state directory. [default: $FLEETD_STATE]")] = None,
) -> None:
    if state is not None:
        os.environ["FLEETD_STATE"] = str(state.absolute())


for _commands in (commands_plan, commands_watch, commands_act, commands_hosts, commands_service):
    _commands.add_to(app)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit code."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: Sequence[str]) -> int:
    """The exit code of one command. Nothing but SystemExit leaves here."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    as_json = "--json" in arguments
    try:
        code = typer.main.get_command(app).main(args=list(arguments), prog_name="fleetd", standalone_mode=False)
        return code if isinstance(code, int) else EXIT_OK
    except ExplainedError as fault:
        terminal.complain(fault, as_json=as_json)
        return fault.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except Exception as fault:
        if wrong := _usage_wrong(fault):
            terminal.complain(wrong, as_json=as_json)
            return wrong.exit_code
        print(_our_bug(fault), file=sys.stderr)
        return EXIT_BUG


def _usage_wrong(fault: Exception) -> UsageWrong | None:
    """The command-line library's own complaint in our shape. It is known by its method, since its class moved between releases."""
    spoken = getattr(fault, "format_message", None)
    if not callable(spoken):
        return None
    context: Any = getattr(fault, "ctx", None)
    command = context.command_path if context is not None else "fleetd"
    message = " ".join(str(spoken()).split()).rstrip(".") or "no command was given"
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ") if context is not None else command
    return UsageWrong("the command line can't be understood", where=usage, what=message[0].lower() + message[1:], fix=f"{command} --help")


def _our_bug(fault: Exception) -> str:
    """Write the traceback into the state directory's command log; the one line that says so."""
    said = f"error: fleetd met a bug of its own: {type(fault).__name__}: {' '.join(str(fault).split())[:200]}"
    log = terminal.paths().command_log
    try:
        from fleetd import logs

        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        logs.to_file(log)
        logs.logger.exception("event=bug command=%r", sys.argv[1:])
        return f"{said} (traceback in {log})"
    except OSError as unwritable:
        return f"{said} (no traceback: {log} can't be written: {unwritable.strerror})"


if __name__ == "__main__":
    main()
