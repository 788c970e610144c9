"""An interrupted and resumed training equals the undisturbed one bit for bit; and when one part of the state is lost, it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stage import (
    GPT2,
    LLAMA,
    StopAfter,
    StopAtLook,
    last_step,
    log_of,
    logged_losses,
    make_run,
    make_task,
    manifest_bytes,
    prepare,
    train_here,
)

from policies.facts import TrainerExit
from trainer.checkpoint import verify
from trainer.models.build import trained_weights


def weights_of(run_dir: Path, step: int) -> bytes:
    return (run_dir / "checkpoints" / f"step-{step:09d}" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("stopped_after", [1, 5, 6, 9, 11])
def test_a_resumed_training_equals_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, task: dict[str, Any], undisturbed: Path, stopped_after: int,
) -> None:
    run_dir = make_run(tmp_path, "run", task)
    assert train_here(run_dir, StopAfter(stopped_after)) == TrainerExit.STOPPED
    assert last_step(run_dir) == stopped_after
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)
    assert logged_losses(run_dir) == logged_losses(undisturbed)
    assert (run_dir / "predictions/validation/step-000000012.jsonl").read_bytes() == (
        undisturbed / "predictions/validation/step-000000012.jsonl").read_bytes()


def test_the_reference_crosses_an_epoch_so_that_the_twins_prove_something_about_it(undisturbed: Path) -> None:
    training = prepare(undisturbed)
    assert training.state.cursor == 48
    assert training.sampler.window_count < 48


@pytest.mark.parametrize("config", [LLAMA, {**GPT2, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}], ids=["llama", "gpt2 without dropout"])
@pytest.mark.parametrize("micro_batch", [4, 1])
def test_both_families_resume_exactly_with_and_without_accumulation(tmp_path: Path, shards: Path, config: dict[str, Any], micro_batch: int) -> None:
    task = make_task(shards / "train", shards / "val", model={"config": config}, micro_batch=micro_batch)
    whole, halves = make_run(tmp_path, "whole", task), make_run(tmp_path, "halves", task)
    train_here(whole)
    train_here(halves, StopAfter(6))
    train_here(halves)
    assert manifest_bytes(halves, 12) == manifest_bytes(whole, 12)


def test_a_training_stopped_after_every_step_equals_the_undisturbed_one(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    run_dir, attempts = make_run(tmp_path, "run", task), 0
    while train_here(run_dir, StopAfter(1)) == TrainerExit.STOPPED:
        attempts += 1
        assert attempts < 20
    assert attempts >= 11
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_a_stop_at_any_look_leaves_a_complete_checkpoint_and_the_same_end(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    counting = make_run(tmp_path, "counting", task)
    stop = StopAtLook(10**9)
    assert train_here(counting, stop) == TrainerExit.FINISHED
    skipped: list[str] = []
    for look in range(1, stop.looks + 1, 3):
        run_dir = make_run(tmp_path, f"look-{look}", task)
        assert train_here(run_dir, StopAtLook(look)) == TrainerExit.STOPPED
        record = log_of(run_dir)[-1]
        assert (record["event"], record["because"], record["step"]) == ("stop", "SIGTERM", last_step(run_dir))
        skipped += record["skipped"]
        assert train_here(run_dir) == TrainerExit.FINISHED
        assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)
    assert "validation" in skipped, "some of the looks have to fall into a validation"


def test_validation_changes_no_weight(tmp_path: Path, shards: Path, undisturbed: Path) -> None:
    without = make_run(tmp_path, "without", make_task(shards / "train", None))
    often = make_run(tmp_path, "often", make_task(shards / "train", shards / "val", validation={"every_steps": 1, "batch": 3}))
    train_here(without)
    train_here(often)
    assert weights_of(without, 12) == weights_of(undisturbed, 12) == weights_of(often, 12)


def test_foreign_draws_before_a_resume_change_nothing(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(5))
    torch.rand(1000)
    np.random.rand(7)
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def lose_random_streams(training: Any) -> None:
    torch.manual_seed(0)


def lose_one_moment(training: Any) -> None:
    weight = next(iter(trained_weights(training.state.model).values()))
    training.state.optimizer.state[weight]["exp_avg_sq"].zero_()


def lose_optimizer_steps(training: Any) -> None:
    for weight in trained_weights(training.state.model).values():
        training.state.optimizer.state[weight]["step"].zero_()


def lose_cursor(training: Any) -> None:
    training.state.cursor = 0


def lose_nothing(training: Any) -> None:
    pass


@pytest.mark.parametrize(("lose", "is_equal"), [
    (lose_nothing, True), (lose_random_streams, False), (lose_one_moment, False), (lose_optimizer_steps, False), (lose_cursor, False),
])
def test_without_any_one_part_of_the_state_the_twins_differ(
    tmp_path: Path, task: dict[str, Any], undisturbed: Path, lose: Callable[[Any], None], is_equal: bool,
) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(6))
    training = prepare(run_dir)
    lose(training)
    training.train()
    assert (weights_of(run_dir, 12) == weights_of(undisturbed, 12)) is is_equal


def test_a_checkpoint_is_a_model_directory_that_transformers_reads_and_scores_alike(undisturbed: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = undisturbed / "checkpoints/step-000000012"
    read = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True).eval()
    ours = prepare(undisturbed).state.model.eval()
    tokens = torch.arange(3, 35).view(1, -1)
    with torch.no_grad():
        assert torch.equal(read(input_ids=tokens).logits, ours(input_ids=tokens).logits)


def test_retention_keeps_the_base_the_best_and_the_newest_and_says_what_went(undisturbed: Path) -> None:
    names = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    # When step 12 was saved, step 6 was the best one so far, and 8 and 12 the newest two; step 4 had to go.
    assert names == ["step-000000000", "step-000000006", "step-000000008", "step-000000012"]
    assert all(verify(undisturbed / "checkpoints" / name) for name in names)
    lineage = (undisturbed / "lineage.jsonl").read_text()
    assert '"event":"prune"' in lineage and '"event":"finish"' in lineage
