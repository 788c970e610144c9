"""Half-written records of a killed attempt: the next one removes them, and touches nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainer.checkpoint import sweep
from trainer.files import sweep_temporaries
from trainer.records import RunRecords


def test_half_written_records_of_a_killed_attempt_are_removed_at_the_next_start(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-S", "-c", ""])
    killed.wait()
    predictions = tmp_path / "predictions" / "validation"
    predictions.mkdir(parents=True)
    left = [tmp_path / f".best.json.tmp-{killed.pid}", predictions / f".step-000000008.jsonl.tmp-{killed.pid}"]
    living = tmp_path / f".latest.json.tmp-{os.getppid()}"
    kept = [living, tmp_path / "best.json", predictions / "step-000000008.jsonl"]
    for path in (*left, *kept):
        path.touch()

    RunRecords(tmp_path).sweep()

    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)


def test_a_zombie_that_nobody_has_reaped_yet_is_dead_and_what_it_left_goes(tmp_path: Path) -> None:
    """A shim that is killed before it reaps leaves its trainer as one, and the next attempt comes first."""
    killed = subprocess.Popen([sys.executable, "-S", "-c", ""])
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    try:
        record, save = tmp_path / f".best.json.tmp-{killed.pid}", tmp_path / f".tmp-step-000000008-{killed.pid}"
        record.touch()
        save.mkdir()
        assert sweep(tmp_path) == (save.name,)
        assert sweep_temporaries(tmp_path) == (record.name,)
    finally:
        killed.wait()
