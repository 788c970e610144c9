"""Steps of a build: what becomes of them when their builder dies, and what is kept of what they say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fleetd.host.steps import StepFailed, Steps

ROOT = Path(__file__).resolve().parents[2]
BUILDER = """
import os, sys, time
from pathlib import Path
from fleetd.host.steps import Steps
lock = os.open(sys.argv[1] + "/.lock", os.O_RDWR | os.O_CREAT)
steps = Steps(log=Path(sys.argv[1], "log"), lock=lock, environment=dict(os.environ), until_seconds=time.monotonic() + 600)
steps.run("sleep", "500")
"""


def named(link: str) -> str:
    """Where it leads; empty when it is closed by now: a program that was just executed still opens and closes its libraries."""
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def test_a_step_holds_the_lock_of_its_builder_and_is_killed_with_it(tmp_path: Path) -> None:
    builder = subprocess.Popen([sys.executable, "-c", BUILDER, str(tmp_path)], cwd=ROOT)
    end = time.monotonic() + 100
    step: psutil.Process | None = None
    while step is None and time.monotonic() < end:
        step = next((each for each in psutil.Process(builder.pid).children() if each.name() == "sleep"), None)
        time.sleep(0.02)
    assert step is not None
    held = [place for number in os.listdir(f"/proc/{step.pid}/fd") if (place := named(f"/proc/{step.pid}/fd/{number}"))]
    builder.kill()
    builder.wait()

    assert str(tmp_path / ".lock") in held
    assert psutil.wait_procs([step], timeout=100)[1] == [], "of 500 seconds it has lived a few"


def test_what_a_step_says_is_kept_without_secrets_and_quoted_when_it_fails(tmp_path: Path) -> None:
    lock, until_seconds = os.open(tmp_path, os.O_RDONLY), time.monotonic() + 250
    steps = Steps(log=tmp_path / "log", lock=lock, environment={"PATH": os.environ["PATH"]}, until_seconds=until_seconds)
    steps.begin("a build")
    try:
        with pytest.raises(StepFailed) as caught:
            steps.run("sh", "-c", "echo from https://me:s3cret@host/x?token=s3cret; printf last >&2; exit 3")
        steps.run("sh", "-c", 'test -z "$FLEETD_RUN_DIR"')
        with pytest.raises(StepFailed, match="exit status 4 and no words"):
            steps.run("sh", "-c", "exit 4")
    finally:
        os.close(steps.lock)
    assert caught.value.output == "from https://host/x\nlast"
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert "s3cret" not in log and log.startswith("a build\n$ sh -c") and "from https://host/x\nlast\n" in log
