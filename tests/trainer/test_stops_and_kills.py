"""Signals, kills, cutoffs and full disks, with real processes and real signals: asked is answered, and nothing saved is lost."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_stage import (
    StopAfter,
    finish,
    last_step,
    log_of,
    logged_losses,
    make_run,
    make_task,
    manifest_bytes,
    prepare,
    start,
    train_here,
    wait_for_record,
)

from policies.facts import TrainerExit, format_moment
from trainer.checkpoint import newest_verified, verify, write_checkpoint
from trainer.environment import read_environment
from trainer.fingerprint import code_digest
from trainer.records import RunRecords
from trainer.state import TrainingState
from trainer.stopping import Stop

SEED = int(os.environ.get("TRAINER_KILL_SEED", int(code_digest()[:8], 16) % 10**6))
"""Every change of the trainer gets moments of its own; the same code gets the same ones everywhere."""


@pytest.fixture
def listening() -> Stop:
    """A stop that hears this process's own signals."""
    stop = Stop()
    stop.listen()
    return stop


def long_task(shards: Path, **changes: Any) -> dict[str, Any]:
    """Enough steps that a signal surely comes in the middle."""
    return make_task(shards / "train", shards / "val", **{"steps": 600, "validation": {"every_steps": 100, "batch": 4}, **changes})


class CutoffSoon(Stop):
    """Once the first step is taken, the cutoff is so near that two saves as slow as the last one just fit: a disk that takes long for the
    last save is what they are kept for."""

    cutoff_at: datetime | None = None

    def note_step(self, seconds: float) -> None:
        super().note_step(seconds)
        if self.cutoff_at is None:
            self.note_save(15.0)
            self.cutoff_at = datetime.now(timezone.utc) + timedelta(seconds=self.margin_seconds() + 1.0)
            self.set_cutoff(self.cutoff_at)


def test_sigterm_twice_and_sigkill_at_random_moments_end_like_a_run_that_nobody_touched(tmp_path: Path, shards: Path) -> None:
    dice, task = random.Random(SEED), long_task(shards, steps=400)
    whole, run_dir = make_run(tmp_path, "whole", task), make_run(tmp_path, "run", task)
    undisturbed = start(whole)
    ends = []
    for send in (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM):
        begun = len(log_of(run_dir))
        process = start(run_dir)
        while len(log_of(run_dir)) < begun + 3 and process.poll() is None:
            time.sleep(0.005)
        time.sleep(dice.uniform(0, 0.4))
        process.send_signal(send)
        if send == signal.SIGTERM:
            process.send_signal(send)
        ends.append(finish(process)[0])
        if send == signal.SIGTERM and ends[-1] == TrainerExit.STOPPED:
            assert log_of(run_dir)[-1]["event"] == "stop" and log_of(run_dir)[-1]["step"] == last_step(run_dir)
    assert ends[0] in (TrainerExit.STOPPED, TrainerExit.FINISHED) and ends[1] in (-signal.SIGKILL, TrainerExit.FINISHED), f"seed {SEED}"
    assert finish(start(run_dir))[0] == TrainerExit.FINISHED
    assert finish(undisturbed)[0] == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 400) == manifest_bytes(whole, 400), f"TRAINER_KILL_SEED={SEED}"
    assert logged_losses(run_dir) == logged_losses(whole)
    assert not [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")], "nothing half-written is left"


def test_a_sigterm_before_the_imports_is_heard_and_the_base_is_saved(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", task)
    process = start(run_dir, blocked=frozenset({signal.SIGTERM}))
    process.send_signal(signal.SIGTERM)  # waits, blocked, until the trainer can hear it
    status, output = finish(process)
    assert status == TrainerExit.STOPPED, output
    assert last_step(run_dir) == 0 and log_of(run_dir)[-1]["skipped"] == ["validation"]

    process = start(run_dir, blocked=frozenset({signal.SIGTERM}))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == TrainerExit.STOPPED
    assert log_of(run_dir)[-1]["skipped"] == ["start"], "with a checkpoint there, torch is not even imported"


def test_a_sigterm_in_a_validation_leaves_it_due_and_the_resume_repeats_it_first(
    tmp_path: Path, shards: Path, listening: Stop, monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = make_run(tmp_path, "run", long_task(shards, steps=40, window=2, validation={"every_steps": 20, "batch": 1}))
    log = RunRecords.log

    def signalled(records: RunRecords, **record: Any) -> None:
        log(records, **record)
        if (record.get("event"), record.get("phase"), record.get("step")) == ("validation", "begin", 20):
            for _ in range(2):  # from here on it is in the middle of it, however slow whoever sends signals is
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunRecords, "log", signalled)
        assert train_here(run_dir, listening) == TrainerExit.STOPPED
    stopped = log_of(run_dir)[-1]
    assert (stopped["event"], stopped["step"], stopped["skipped"]) == ("stop", 20, ["validation"])
    assert not (run_dir / "predictions/validation/step-000000020.jsonl").exists()
    assert train_here(run_dir) == TrainerExit.FINISHED
    resumed = [record for record in log_of(run_dir)[log_of(run_dir).index(stopped) + 1:] if record.get("event") != "save"]
    assert [resumed[0]["event"], resumed[1].get("phase"), resumed[1]["step"]] == ["start", "begin", 20]


def test_a_validation_that_was_complete_before_the_kill_is_not_repeated(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(6))  # step 6 is saved, its validation due
    training = prepare(run_dir)
    training._validate()
    rows = run_dir / "predictions/validation/step-000000006.jsonl"
    written = rows.stat().st_mtime_ns
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert rows.stat().st_mtime_ns == written
    ends = [record for record in log_of(run_dir) if record.get("phase") == "end" and record["event"] == "validation" and record["step"] == 6]
    assert len(ends) == 2 and ends[1]["seconds"] is None and ends[0]["value"] == ends[1]["value"]
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_signals_in_the_middle_of_a_save_do_not_destroy_it(
    tmp_path: Path, task: dict[str, Any], undisturbed: Path, listening: Stop, monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_dir = make_run(tmp_path, "run", task)
    contents = TrainingState.contents

    def signalled(state: TrainingState) -> Any:
        files = contents(state)

        def write(path: Path) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            files["model.safetensors"](path)  # type: ignore[operator]
            os.kill(os.getpid(), signal.SIGTERM)

        return {**files, "model.safetensors": write} if state.step == 4 else files

    monkeypatch.setattr(TrainingState, "contents", signalled)
    assert train_here(run_dir, listening) == TrainerExit.STOPPED
    assert verify(run_dir / "checkpoints/step-000000004") and last_step(run_dir) == log_of(run_dir)[-1]["step"] >= 4
    monkeypatch.undo()
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_sigint_gives_up_the_save_and_says_whether_something_is_lost(tmp_path: Path, shards: Path) -> None:
    rarely = {"checkpoint": {"every_steps": None, "keep": 2}, "validation": {"every_steps": None}}
    run_dir = make_run(tmp_path, "run", long_task(shards, steps=100_000, **rarely))
    process = start(run_dir)
    wait_for_record(run_dir, process, step=3, tokens=64)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == TrainerExit.RETRY
    stopped = log_of(run_dir)[-1]
    assert (stopped["event"], stopped["because"], stopped["skipped"]) == ("stop", "SIGINT", ["save"])
    assert last_step(run_dir) == 0


def test_sigint_with_a_current_checkpoint_loses_nothing(tmp_path: Path, task: dict[str, Any], listening: Stop) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(5))
    os.kill(os.getpid(), signal.SIGINT)
    assert train_here(run_dir, listening) == TrainerExit.STOPPED
    assert last_step(run_dir) == 5


def test_the_trainer_stops_itself_before_its_cutoff_with_everything_saved(tmp_path: Path, shards: Path) -> None:
    rarely = {"checkpoint": {"every_steps": None, "keep": 2}, "validation": {"every_steps": None}}
    run_dir = make_run(tmp_path, "run", long_task(shards, steps=100_000, **rarely))
    stop = CutoffSoon()
    assert train_here(run_dir, stop) == TrainerExit.STOPPED
    assert stop.cutoff_at is not None and datetime.now(timezone.utc) < stop.cutoff_at
    assert log_of(run_dir)[-1]["because"] == "cutoff" and 0 < log_of(run_dir)[-1]["step"] == last_step(run_dir)


def test_the_command_reads_the_cutoff_from_its_environment(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", task)
    status, output = finish(start(run_dir, FLEETD_TRAIN_CUTOFF=format_moment(datetime.now(timezone.utc))))
    assert status == TrainerExit.STOPPED, output
    assert log_of(run_dir)[-1]["because"] == "cutoff" and last_step(run_dir) == 0


@pytest.mark.parametrize("step_seconds", [3600.0, -3600.0])
def test_a_wall_clock_that_was_stepped_before_the_start_moves_no_cutoff_that_the_host_has_counted(tmp_path: Path, step_seconds: float) -> None:
    wall = format_moment(datetime.now(timezone.utc) + timedelta(seconds=step_seconds + 60))
    for left_seconds, because in ((-1.0, "cutoff"), (60.0, None)):
        counted = time.clock_gettime(time.CLOCK_BOOTTIME) + left_seconds
        given = read_environment({"FLEETD_TRAIN_CUTOFF": wall, "FLEETD_TRAIN_CUTOFF_BOOTTIME": f"{counted:.3f}"}, str(tmp_path))
        stop = Stop()
        assert given.cutoff_at is not None
        stop.set_cutoff(given.cutoff_at, given.cutoff_boottime_seconds)
        assert stop.because() == because


def test_a_named_checkpoint_of_another_run_begins_a_new_line_from_its_step(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    run_dir = make_run(tmp_path, "run", task)
    parent = undisturbed / "checkpoints/step-000000008"
    assert train_here(run_dir, FLEETD_RESUME=str(parent)) == TrainerExit.FINISHED
    assert log_of(run_dir)[0]["resumed_from"] == verify(parent).digest
    assert manifest_bytes(run_dir, 8) == (parent / "manifest.json").read_bytes()
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_disk_keeps_the_old_checkpoint_and_the_training_goes_on_when_there_is_room(
    small_disk: Path, task: dict[str, Any], undisturbed: Path, capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir = make_run(small_disk, "run", task)
    assert train_here(run_dir, StopAfter(5)) == TrainerExit.STOPPED
    ballast = small_disk / "ballast"
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    ballast.write_bytes(b"x" * (free - 100_000))
    assert train_here(run_dir) == TrainerExit.RETRY
    told = capfd.readouterr().err
    assert "No space left" in told and "step-000000005 is kept" in told
    assert last_step(run_dir) == 5 and not [path.name for path in (run_dir / "checkpoints").iterdir() if path.name.startswith(".")]
    assert "No space left" in log_of(run_dir)[-1]["because"] or "can't write log.jsonl" in told
    ballast.unlink()
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_running_out_of_memory_saves_the_last_whole_step_and_names_planned_and_peak(
    tmp_path: Path, task: dict[str, Any], undisturbed: Path, capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir = make_run(tmp_path, "run", task)
    training = prepare(run_dir, FLEETD_MEMORY_CAP_BYTES="123456789")

    def greedy(*_: Any) -> None:
        if training.state.step == 7:  # dropout has drawn for this step when the allocator refuses
            torch.empty(2**50, dtype=torch.uint8)

    training.state.model.base_model.register_forward_hook(greedy)
    assert training.train() == TrainerExit.MEMORY
    assert last_step(run_dir) == 7
    said = log_of(run_dir)[-1]["because"]
    assert "planned" in said and "peak" in said and "123456789" in said and said in capfd.readouterr().out
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_a_checkpoint_never_replaces_another_one(tmp_path: Path) -> None:
    first = write_checkpoint(tmp_path, 3, {"a": b"one"})
    assert write_checkpoint(tmp_path, 3, {"a": b"one"}) == first
    with pytest.raises(Exception, match="different checkpoint"):
        write_checkpoint(tmp_path, 3, {"a": b"two"})
    assert verify(first.path).digest == first.digest and [path.name for path in tmp_path.iterdir()] == ["step-000000003"]


def test_what_a_dead_process_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", task)
    folder = run_dir / "checkpoints"
    gone = subprocess.Popen(["true"])
    gone.wait()
    for name in (f".tmp-step-000000004-{gone.pid}", ".trash-step-000000002", f".tmp-step-000000004-{os.getppid()}"):
        (folder / name).mkdir(parents=True)
    train_here(run_dir, StopAfter(1))
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(".")) == [f".tmp-step-000000004-{os.getppid()}"]


def test_patience_ends_a_training_that_no_longer_improves_and_a_resume_agrees(tmp_path: Path, shards: Path) -> None:
    settings = {"every_steps": 2, "patience": 2, "batch": 4, "minimum_improvement": 5.0}
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", shards / "val", steps=50, validation=settings))
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert (log_of(run_dir)[-1]["because"], log_of(run_dir)[-1]["step"]) == ("patience", 4)
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert newest_verified(run_dir / "checkpoints").newest is not None and last_step(run_dir) == 4


def test_peak_memory_is_measured() -> None:
    from trainer.memory import peak_bytes

    # The kernel counts both a little late, and not at the same moment; only the first begins anew at an exec.
    assert 0 < peak_bytes(torch.device("cpu")) <= 1.1 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
