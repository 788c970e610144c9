"""Typing a command as a person or a program would, and comparing what is shown with what was agreed."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

SNAPSHOTS = Path(__file__).with_name("snapshots")
COMMAND_SECONDS_MAX = 120
"""Nobody waits so long but for a command that hangs, or on a machine that stood still."""
CONTROL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def environment(state: Path, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "VIRTUAL_ENV") if name in os.environ}
    return {**kept, "FLEETD_STATE": str(state), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **more}


def argv(*words: str) -> list[str]:
    return [sys.executable, "-m", "fleetd.screens.cli", *words]


def fleetd(state: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command whose output is a pipe, as in a script."""
    return subprocess.run(
        argv(*words),
        env=environment(state, **more),
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS_MAX,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def start(state: Path, *words: str, **more: str) -> subprocess.Popen[str]:
    """The same, still running."""
    return subprocess.Popen(
        argv(*words), env=environment(state, **more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )


def on_terminal(state: Path, *words: str, interrupt_at: str | None = None, **more: str) -> tuple[int, str]:
    """Exit code and everything a terminal of 100 columns received; Ctrl-C is typed once `interrupt_at` was seen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.clear()
        os.environ.update(environment(state, COLUMNS="100", LINES="30", **more))
        os.execv(sys.executable, argv(*words))
    seen = b""
    end = time.monotonic() + COMMAND_SECONDS_MAX
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                break
            if not piece:
                break
            seen += piece
        if interrupt_at is not None and interrupt_at.encode() in seen:
            os.write(terminal, b"\x03")
            interrupt_at = None
    else:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), seen.decode(errors="replace").replace("\r\n", "\n")


def assert_snapshot(name: str, text: str) -> None:
    """The text is what was agreed in snapshots/NAME.txt. UPDATE_SNAPSHOTS=1 agrees to what is shown now; look at the difference."""
    path = SNAPSHOTS / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    assert text + "\n" == path.read_text(encoding="utf-8")


def assert_error_shape(stderr: str) -> None:
    """`error: …` and its three lines, nothing else, no colour."""
    lines = stderr.rstrip("\n").split("\n")
    assert len(lines) == 4, stderr
    assert lines[0].startswith("error: ")
    assert [each[:9] for each in lines[1:]] == ["  where: ", "  what:  ", "  fix:   "]
    assert all(each[9:].strip() for each in lines[1:])
    assert not CONTROL_CODES.search(stderr.replace("\n", ""))
