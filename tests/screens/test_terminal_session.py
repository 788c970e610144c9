"""The live status in a real terminal (tmux), from the first picture to `q`: what a person sees at 80 and 120 columns."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import canned
import pytest
from fake_coordinator import FakeCoordinator
from screen_tools import argv, environment

pytestmark = [pytest.mark.live, pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")]
SEEN_SECONDS_MAX = 90.0


class Session:
    """One tmux server of our own, with one window that runs one command."""

    def __init__(self, state: Path) -> None:
        self._state, self._socket = state, f"fleetd-test-{os.getpid()}"

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self._socket, "-f", "/dev/null", *words]
        return subprocess.run(command, env=environment(self._state), capture_output=True, text=True, check=False, timeout=60).stdout

    def start(self, columns: int, lines: int, *words: str) -> None:
        then_say = ["sh", "-c", '"$@"; echo "exit code $?"', "sh"]
        self.tmux("new-session", "-d", "-s", "t", "-x", str(columns), "-y", str(lines), *then_say, *argv(*words))
        self.tmux("set-option", "-t", "t", "remain-on-exit", "on")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "t", *keys)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "t")

    def until(self, *texts: str) -> str:
        """The screen once all of this stands on it: a terminal may be looked at in the middle of a drawing."""
        end = time.monotonic() + SEEN_SECONDS_MAX
        while any(text not in (seen := self.screen()) for text in texts):
            assert time.monotonic() < end, f"no {texts!r} on the screen:\n{seen}"
            time.sleep(0.05)
        return seen


@pytest.fixture
def session(coordinator: FakeCoordinator) -> Iterator[Session]:
    found = Session(coordinator.root)
    yield found
    found.tmux("kill-server")


def test_a_person_looks_asks_and_leaves(coordinator: FakeCoordinator, session: Session) -> None:
    coordinator.status = canned.training()
    session.start(80, 24, "status")
    first = session.until("lr-low", "deadline in 1 h 1", "Details", "Quit")  # the footer shows the keys
    assert first.splitlines()[0].strip().startswith("OK · 3 runs at work · deadline in 1 h 1")
    assert max(map(len, first.splitlines())) <= 80
    session.keys("j", "Enter")
    session.until("identity verified")
    session.keys("s")
    session.until("Ask lr-mid to save a checkpoint and stop?")
    session.keys("n")
    session.tmux("resize-window", "-t", "t", "-x", "120", "-y", "30")
    session.until("MEMORY/CAP")
    session.keys("q")
    session.until("exit code 0")
    assert coordinator.asked == [], "nothing was stopped by a question answered with no"
