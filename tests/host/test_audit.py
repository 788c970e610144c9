"""No signal goes unrecorded: its intent is written before it, and whoever comes next tells of what its sender could not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from host_runs import WAIT_SECONDS, HostRun, spec_for, wait_for

from fleetd.clock import Moment
from fleetd.host import audit, rundir
from fleetd.host.audit import FILE_BYTES_MAX, Audit, told_of, untold
from fleetd.host.processes import identity_of
from fleetd.model import CutoffOrder
from policies.facts import StopMode, Want

NOW = Moment(now=datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc), boottime_seconds=100.0)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., HostRun]]:
    runs: list[HostRun] = []

    def begin(*arguments: str) -> HostRun:
        run = HostRun(tmp_path / "root", spec_for(*arguments)).create()
        runs.append(run)
        run.supervise()
        return run

    yield begin
    for run in runs:
        run.clean()


def test_a_signal_whose_sender_is_killed_right_after_it_is_told_of_by_the_next(tmp_path: Path) -> None:
    sender = """
import os, signal, sys
from datetime import datetime, timezone
from pathlib import Path
from fleetd.clock import Moment
from fleetd.host import audit
from fleetd.host.audit import Audit
from fleetd.host.processes import identity_of
audit.WRITE_SECONDS_MAX = 20.0  # the order counts here, not how busy the machine is
moment = Moment(now=datetime.now(timezone.utc), boottime_seconds=1.0)
Audit(Path(sys.argv[1]), "supervisor").intend(moment, "ask: a test", identity_of(int(sys.argv[2])), "verified")
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "audit.jsonl"
    done = subprocess.run([sys.executable, "-c", sender, str(path), str(os.getpid())], check=False)
    assert done.returncode == -signal.SIGKILL
    lines, offset = untold(path, 0)
    told = told_of(lines[0])
    assert (told["pid"], told["purpose"], told["delivered"]) == (os.getpid(), "ask: a test", None) and "verified" in told["verdict"]
    assert untold(path, offset) == ([], offset), "told once"


def test_own_lines_are_not_told_twice_torn_ones_wait_and_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "WRITE_SECONDS_MAX", 20.0)
    path, pen = tmp_path / "audit.jsonl", Audit(tmp_path / "audit.jsonl", "supervisor")
    pen.intend(NOW, "ask: mine", identity_of(os.getpid()), "verified")
    own, offset = untold(path, 0, own_pid=os.getpid())
    assert own == [] and offset == path.stat().st_size
    with open(path, "ab") as file:
        file.write(b'{"by_pid": 1, "pur')
    assert untold(path, offset) == ([], offset)
    path.write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    pen.intend(NOW, "kill: mine", None, "verified")
    assert path.stat().st_size < 1000 and len(untold(path, offset)[0]) == 1


def test_a_disk_that_takes_nothing_keeps_no_signal_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "audit.jsonl")  # to open it for writing waits for a reader that never comes
    pen = Audit(tmp_path / "audit.jsonl", "supervisor")
    for _ in range(3):
        pen.intend(NOW, "kill: the cutoff", None, "verified")  # a pen that waited for the disk would never come back
    with open(tmp_path / "audit.jsonl", "rb") as reader:
        assert b"kill: the cutoff" in reader.readline(), "what it could not write yet is written as soon as it can"


def test_what_the_shim_does_at_the_cutoff_while_the_supervisor_is_held_up_is_told_with_the_end(start: Callable[..., HostRun]) -> None:
    run = start("4000", "0.05", "every=5")
    seen = run.wait_step(2)
    assert seen.pid is not None and seen.supervisor_pid is not None
    os.kill(seen.supervisor_pid, signal.SIGSTOP)
    cutoff = CutoffOrder(sequence=2, cutoff_at=datetime.now(timezone.utc) + timedelta(seconds=0.5), because="test")
    assert rundir.apply_cutoff(run.paths, cutoff)[0]
    wait_for(run.paths.attempt(1).exit.exists, WAIT_SECONDS, run.log_text)
    os.kill(seen.supervisor_pid, signal.SIGCONT)
    run.settle()
    told = [(notice["kind"], notice["body"].get("purpose")) for notice in run.notices() if notice["kind"] in ("signal", "attempt_ended")]
    assert told == [("signal", "kill: the cutoff is reached"), ("attempt_ended", None)]


def test_history_has_one_audit_line_for_each_signal_with_the_identity_that_was_checked(start: Callable[..., HostRun]) -> None:
    run = start("4000", "0.05", "every=5")
    pid = run.wait_step(8).pid
    run.order(2, Want.STOP, StopMode.GRACEFUL)
    run.settle()
    intents, _ = untold(run.paths.audit, 0)
    assert [(line["by"], line["pid"]) for line in intents] == [("supervisor", pid)] and intents[0]["purpose"].startswith("ask: stop ordered")
    told = [notice["body"] for notice in run.notices("signal")]
    assert {body["signal"] for body in told} == {signal.SIGTERM, signal.SIGCONT} and all("start time" in body["verdict"] for body in told)
