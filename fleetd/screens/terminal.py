"""This command's own terminal: what goes to stdout and stderr, how wide, with colour or without. The only file of the commands that prints.

Results go to stdout, talk and errors to stderr. With `--json` stdout holds exactly one JSON document.
"""

from __future__ import annotations

import getpass
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from fleetd.paths import StatePaths, state_root
from fleetd.screens import layout
from fleetd.screens.client import Client
from fleetd.screens.finding import Found, find
from fleetd.screens.layout import Line
from policies.errors import ExplainedError

WIDTH_FALLBACK = 100
WIDTH_MIN = 40


def is_live() -> bool:
    """Whether a person can type and see: both ends are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def colour(stream: Any = None) -> bool:
    """Colours only on a terminal that can, and never against NO_COLOR (no-color.org: set and not empty)."""
    found = stream or sys.stdout
    return bool(found.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Columns of the terminal, `COLUMNS`, or 100 when the output is no terminal."""
    return max(WIDTH_MIN, shutil.get_terminal_size((WIDTH_FALLBACK, 24)).columns)


def show(lines: Iterable[Line]) -> None:
    """Print lines on stdout."""
    text = layout.painted(lines, colour=colour())
    if text:
        print(text, flush=True)


def say(text: str, *, talk: bool = False) -> None:
    """One plain line: on stdout, or on stderr when it is talk beside a result that a program reads."""
    print(text, file=sys.stderr if talk else sys.stdout, flush=True)


def emit(document: Any) -> None:
    """The one JSON document of a `--json` command."""
    print(json.dumps(_finite(document), indent=2, ensure_ascii=False, allow_nan=False), flush=True)


def complain(fault: ExplainedError, *, as_json: bool) -> None:
    """An expected failure: three lines on stderr, and on stdout the same as JSON where a program reads."""
    red, off = ("\x1b[1;31m", "\x1b[0m") if colour(sys.stderr) else ("", "")
    print(f"{red}error:{off} {fault}", file=sys.stderr, flush=True)
    if as_json:
        emit({"error": fault.to_json(), "exit_code": fault.exit_code})


def complain_of(faults: Iterable[ExplainedError]) -> None:
    """Several failures, each in three lines on stderr."""
    for fault in faults:
        complain(fault, as_json=False)


def paths() -> StatePaths:
    """This user's own directory, for what this command itself writes."""
    return StatePaths(state_root())


def coordinator() -> Found:
    """The coordinator that this command talks to. Which one is said on stderr, where it could be another."""
    found = find()
    if found.note:
        say(found.note, talk=True)
    return found


def connect() -> Client:
    return Client(coordinator().paths)


def actor() -> str:
    """Who asks, for the journal: `user:ada`."""
    try:
        return f"user:{getpass.getuser()}"
    except (KeyError, OSError):
        return f"user:{os.getuid()}"


def _finite(value: Any) -> Any:
    """The value with `nan` and infinities as text, which JSON has no numbers for."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
