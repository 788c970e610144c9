"""A save costs the step loop a copy and nothing else, one at a time, and its bytes are those of a save that everybody waited for."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save as library_save_arrays
from safetensors.torch import save as library_save
from trainer_stage import StopAfter, last_step, log_of, make_run, make_task, manifest_bytes, prepare, train_here

from policies.errors import PlanInvalid
from policies.facts import TrainerExit
from trainer import checkpoint, memory
from trainer.checkpoint import newest_verified, verify
from trainer.tensors import FORMAT, file_pieces


def test_our_safetensors_are_byte_for_byte_those_of_the_library() -> None:
    draw = torch.Generator().manual_seed(3)
    kinds = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    tensors = {f"{name}.{kind}": (torch.rand(3, 5, generator=draw) * 9).to(kind) for kind in kinds for name in ("b", "a", 'é"\\\n')}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "turned": torch.rand(4, 6, generator=draw).T}
    expected = library_save({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata=FORMAT)
    assert b"".join(bytes(piece) for piece in file_pieces(tensors)) == expected
    arrays = {"place": np.array([1, 2], dtype=np.int64), "none": np.array([]), "words": np.arange(7, dtype=np.uint32),
              "bytes": np.arange(9, dtype=np.uint8)}
    assert b"".join(bytes(piece) for piece in file_pieces(arrays)) == library_save_arrays(arrays, metadata=FORMAT)


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writing `optimizer.safetensors` waits for this event."""
    opened, write = threading.Event(), checkpoint.write_synced

    def waiting(path: Path, *pieces: Any) -> None:
        if path.name == "optimizer.safetensors":
            opened.wait(60)
        write(path, *pieces)

    monkeypatch.setattr(checkpoint, "write_synced", waiting)
    return opened


def test_steps_go_on_while_a_save_is_written_and_change_no_byte_of_it(
    tmp_path: Path, shards: Path, slow_disk: threading.Event,
) -> None:
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", None))
    training = prepare(run_dir)
    training._save()  # step 0, under way
    for _ in range(3):
        training._take_step()
        training._settle(wait=False)
    assert training.state.step == 3 and training.saved is None and newest_verified(training.checkpoints).newest is None
    slow_disk.set()
    training._settle(wait=True)
    assert training.saved is not None and training.saved.step == 0

    waited = prepare(make_run(tmp_path, "waited", make_task(shards / "train", None)))
    waited._save()
    waited._settle(wait=True)
    assert manifest_bytes(tmp_path / "run", 0) == manifest_bytes(tmp_path / "waited", 0)


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path, shards: Path, slow_disk: threading.Event) -> None:
    training = prepare(make_run(tmp_path, "run", make_task(shards / "train", None)))
    training._save()
    training._take_step()

    def open_once_it_is_waited_for() -> None:
        until = time.monotonic() + 20.0
        while "wait" not in [record.get("phase") for record in log_of(training.run_dir)] and time.monotonic() < until:
            time.sleep(0.01)
        slow_disk.set()

    threading.Thread(target=open_once_it_is_waited_for).start()
    training._save()
    assert training.saved is not None and training.saved.step == 0, "the former one is settled before the copy is made"
    assert ("wait", 1) in [(record.get("phase"), record["step"]) for record in log_of(training.run_dir)]
    training._settle(wait=True)
    assert training.saved.step == 1 and verify(training.saved.path).digest == training.saved.digest


def test_a_save_that_fails_is_told_at_a_step_and_the_run_goes_on_exactly_later(
    tmp_path: Path, task: dict[str, Any], undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:
    run_dir, write = make_run(tmp_path, "run", task), checkpoint.write_synced

    def refusing(path: Path, *pieces: Any) -> None:
        if "000000004" in path.parent.name and path.name == "rng.safetensors":
            raise OSError(28, "No space left on device")
        write(path, *pieces)

    monkeypatch.setattr(checkpoint, "write_synced", refusing)
    assert train_here(run_dir) == TrainerExit.RETRY
    assert last_step(run_dir) == 0 and "step 4 could not be saved" in capfd.readouterr().err
    assert log_of(run_dir)[-1]["event"] == "failed" and "No space left" in log_of(run_dir)[-1]["because"]
    monkeypatch.undo()
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_the_log_says_what_a_save_and_its_verification_cost_and_what_memory_is_planned(undisturbed: Path) -> None:
    start, saves = log_of(undisturbed)[0], [record for record in log_of(undisturbed) if record.get("event") == "save" and record["phase"] == "end"]
    weights = sum(weight.numel() for weight in prepare(undisturbed).state.model.parameters())
    assert start["snapshot_bytes"] >= 12 * weights and start["planned_bytes"] > 16 * weights
    assert [record["step"] for record in saves] == [0, 4, 6, 8, 12]
    assert all(0 <= record["blocked_seconds"] <= record["seconds"] and 0 <= record["verify_seconds"] <= record["seconds"] for record in saves)


def test_a_save_on_the_way_out_is_not_read_back(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", task)
    assert train_here(run_dir, StopAfter(5)) == TrainerExit.STOPPED
    saves = [record for record in log_of(run_dir) if record.get("event") == "save" and record["phase"] == "end"]
    assert (saves[-1]["step"], saves[-1]["verify_seconds"]) == (5, None) and saves[0]["verify_seconds"] is not None


def test_a_cap_that_can_not_hold_the_copy_is_refused_at_once(tmp_path: Path, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make_run(tmp_path, "run", task)
    state = prepare(run_dir).state
    need = memory.planned_bytes(state.model, prepare(run_dir).task) + state.snapshot_bytes()
    monkeypatch.setattr(memory, "host_limit_bytes", lambda: need)
    prepare(run_dir)
    monkeypatch.setattr(memory, "host_limit_bytes", lambda: need - 1)
    with pytest.raises(PlanInvalid, match=f"{state.snapshot_bytes()} of them for the copy"):
        prepare(run_dir)
