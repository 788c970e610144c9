"""A pid that was ours and is a stranger's now: forced through ns_last_pid, on every path that would signal it. The stranger lives.

FLEETD_PID_REUSE_ROUNDS=100 runs every story a hundred times; CI runs a few of each. A single signal takes milliseconds, a story with a
whole supervisor two to five seconds: a hundred of all of them last half an hour (`-k "tree or worker"` picks some).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ASKED = os.environ.get("FLEETD_PID_REUSE_ROUNDS")
ROUNDS, SUPERVISED_ROUNDS = (int(ASKED), int(ASKED)) if ASKED else (4, 1)
SUPERVISED = ("graceful", "now", "deadline", "memory", "sweep", "worker", "asleep")
DRIVER = Path(__file__).with_name("reused_pids.py")
SECONDS_MAX = 240.0 + 15.0 * ROUNDS
"""Of one story. What does not happen fails after 60 s by itself, so that a slow machine is all that can reach this."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="choosing the next pid of a namespace needs root"),
    pytest.mark.skipif(not os.path.exists("/proc/sys/kernel/ns_last_pid"), reason="this kernel does not let anybody choose the next pid"),
    pytest.mark.timeout(SECONDS_MAX + 30.0),
]


def rounds_of(story: str, rounds: int, folder: Path, *words: str) -> list[dict[str, object]]:
    done = subprocess.run(
        ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, str(DRIVER), str(folder), story, str(rounds), *words),
        capture_output=True, text=True, timeout=SECONDS_MAX, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("story", ["record", "tree", "list", "tick", "silence"])
def test_a_signal_meant_for_a_dead_process_never_reaches_the_stranger_under_its_pid(story: str, tmp_path: Path) -> None:
    found = rounds_of(story, ROUNDS, tmp_path)

    assert [each["lives"] for each in found] == [True] * ROUNDS, found


@pytest.mark.parametrize("story", SUPERVISED)
def test_a_supervisor_spares_the_stranger_under_its_trainers_pid_and_the_run_goes_on(story: str, tmp_path: Path) -> None:
    found = rounds_of(story, SUPERVISED_ROUNDS, tmp_path)

    assert [each["lives"] for each in found] == [True] * SUPERVISED_ROUNDS, found


def test_a_signal_by_bare_pid_would_have_been_seen(tmp_path: Path) -> None:
    assert [each["lives"] for each in rounds_of("record", 2, tmp_path, "--fault")] == [False, False]
