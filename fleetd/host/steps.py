"""Programs that build something: run one after the other under one deadline, their output kept in a log and quoted when one fails.

A step never outlives its builder: it gets SIGKILL when the builder dies (prctl(2), PR_SET_PDEATHSIG), and holds the builder's lock as
long as it lives, so that whoever builds next finds nobody writing below its hands.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from fleetd.pip_words import without_secrets

LOG_BYTES_MAX = 4 * 1024 * 1024
TAIL_LINES_MAX = 400
READ_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1


class StepFailed(Exception):
    """A step that did not end with status 0: what it said, or that it took too long."""

    def __init__(self, output: str, *, is_late: bool = False) -> None:
        super().__init__(output)
        self.output, self.is_late = output, is_late


@dataclass(kw_only=True)
class Steps:
    """`lock` is inherited by each step; `until_seconds` is the deadline of all of them, by the monotonic clock."""

    log: Path
    lock: int
    environment: dict[str, str]
    until_seconds: float

    def begin(self, words: str) -> None:
        """A new log in place of the last build's."""
        self.log.write_text(f"{words}\n", encoding="utf-8")

    def run(self, *argv: str) -> str:
        """The last lines that the program said. StepFailed, or OSError when it can't be executed."""
        self._note(without_secrets(f"$ {' '.join(argv)}\n"))
        parent = os.getpid()
        library = ctypes.CDLL(None)  # loaded before the fork

        def become() -> None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(127)  # the builder died before it could be said

        step = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=self.environment, pass_fds=(self.lock,),
            start_new_session=True, preexec_fn=become, cwd="/",
        )
        try:
            lines = self._follow(step)
            status = step.wait(max(0.0, self.until_seconds - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            os.killpg(step.pid, signal.SIGKILL)  # our own child, not waited for yet: its number can't be anybody else's
            step.wait()
            self._note("killed: out of time\n")
            raise StepFailed("", is_late=True) from None
        finally:
            if step.stdout is not None:
                step.stdout.close()
        if status != 0:
            raise StepFailed("\n".join(lines) or f"exit status {status} and no words")
        return "\n".join(lines)

    def _follow(self, step: subprocess.Popen[bytes]) -> deque[str]:
        """Take its output until it ends. TimeoutError at the deadline."""
        assert step.stdout is not None
        tail: deque[str] = deque(maxlen=TAIL_LINES_MAX)
        rest, descriptor = b"", step.stdout.fileno()
        while True:
            left_seconds = self.until_seconds - time.monotonic()
            if left_seconds <= 0 or not select.select([descriptor], [], [], left_seconds)[0]:
                raise TimeoutError
            data = os.read(descriptor, READ_BYTES)
            *whole, rest = (rest + data).split(b"\n") if data else ((rest, b"") if rest else (b"",))
            for line in whole:
                words = without_secrets(line.decode(errors="replace").rstrip())
                tail.append(words)
                self._note(f"{words}\n")
            if not data:
                return tail

    def _note(self, text: str) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            if log.tell() < LOG_BYTES_MAX:
                log.write(text)
