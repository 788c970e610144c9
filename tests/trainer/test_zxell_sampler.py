"""The order of zxell's windows: drawn as the page says, saved with the checkpoint, restored to the same stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_stage import LLAMA, StopAfter, StopAtLook, last_step, logged_losses, make_run, make_task, manifest_bytes, prepare, train_here
from zxell_reference import draw

from policies.errors import CheckpointDamaged, DataDamaged, ResumeMismatch
from policies.facts import TrainerExit
from trainer.data.shards import open_corpus
from trainer.data.zxell_sampler import ZxellSampler


def zxell_task(shards: Path, **changes: Any) -> dict[str, Any]:
    return make_task(shards / "train", shards / "val", model={"config": LLAMA}, sampler="zxell", **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """The zxell-ordered run that nobody stopped."""
    run_dir = make_run(tmp_path_factory.mktemp("zxell"), "whole", zxell_task(shards))
    train_here(run_dir)
    return run_dir


def test_the_draws_are_those_of_an_implementation_written_from_the_page(shards: Path) -> None:
    corpus = open_corpus(shards / "train", "train")
    generator, sampler = np.random.default_rng(431), ZxellSampler(corpus, length=16, seed=431)
    tokens = [np.array(shard.tokens) for shard in corpus.shards]
    for step in range(50):
        assert np.array_equal(sampler.batch(step * 8, 8), draw(generator, tokens, 8, 16))
    assert not np.array_equal(ZxellSampler(corpus, length=16, seed=432).batch(0, 8), ZxellSampler(corpus, length=16, seed=431).batch(0, 8))


def test_shards_are_drawn_by_their_tokens_and_every_start_but_the_last_two_places_occurs(shards: Path) -> None:
    corpus = open_corpus(shards / "train", "train")
    sampler, taken = ZxellSampler(corpus, length=16, seed=1), [0, 0]
    starts: list[set[int]] = [set(), set()]
    views = [np.lib.stride_tricks.sliding_window_view(shard.tokens, 17) for shard in corpus.shards]
    for window in sampler.batch(0, 6000):
        places = [np.flatnonzero((view == window).all(axis=1)) for view in views]
        number = 0 if len(places[0]) else 1
        taken[number] += 1
        starts[number].add(int(places[number][0]))
    sizes = [len(shard.tokens) for shard in corpus.shards]
    assert taken[0] / 6000 == pytest.approx(sizes[0] / sum(sizes), abs=0.03)
    for size, seen in zip(sizes, starts, strict=True):
        assert min(seen) == 0
        assert max(seen) == size - 16 - 2, "the range is half open: the very last window is never drawn"


def test_a_batch_given_up_is_drawn_again_and_its_state_is_that_of_the_boundary(shards: Path) -> None:
    corpus = open_corpus(shards / "train", "train")
    sampler, undisturbed = (ZxellSampler(corpus, length=16, seed=9) for _ in range(2))
    sampler.batch(0, 4)
    first = sampler.batch(4, 4)
    assert np.array_equal(sampler.batch(4, 4), first)
    undisturbed.batch(0, 4)
    assert sampler.state_at(4) == undisturbed.state_at(4)
    assert sampler.state_at(8) != undisturbed.state_at(4)


@pytest.mark.parametrize("stopped_after", [1, 6, 11])
def test_a_resumed_training_in_this_order_equals_the_undisturbed_one(tmp_path: Path, shards: Path, whole: Path, stopped_after: int) -> None:
    run_dir = make_run(tmp_path, "halves", zxell_task(shards))
    assert train_here(run_dir, StopAfter(stopped_after)) == TrainerExit.STOPPED
    assert last_step(run_dir) == stopped_after
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(whole, 12)
    assert logged_losses(run_dir) == logged_losses(whole)


def test_a_stop_at_any_look_ends_with_the_same_bytes(tmp_path: Path, shards: Path, whole: Path) -> None:
    for look in (2, 5, 9, 14):
        run_dir = make_run(tmp_path, f"look-{look}", zxell_task(shards))
        train_here(run_dir, StopAtLook(look))
        train_here(run_dir)
        assert manifest_bytes(run_dir, 12) == manifest_bytes(whole, 12)


def test_without_the_generators_state_the_twins_differ(tmp_path: Path, shards: Path, whole: Path) -> None:
    run_dir = make_run(tmp_path, "lost", zxell_task(shards))
    train_here(run_dir, StopAfter(6))
    training = prepare(run_dir)
    training.sampler.set_generator(np.random.default_rng(7).bit_generator.state, training.state.cursor)
    training.train()
    assert logged_losses(run_dir)[:6] == logged_losses(whole)[:6]
    assert logged_losses(run_dir)[6:] != logged_losses(whole)[6:]


def test_another_order_refuses_to_go_on(tmp_path: Path, shards: Path) -> None:
    run_dir = make_run(tmp_path, "run", zxell_task(shards))
    train_here(run_dir, StopAfter(2))
    (run_dir / "task.json").write_text(json.dumps({**zxell_task(shards), "sampler": "permutation"}))
    with pytest.raises(ResumeMismatch, match="sampler"):
        prepare(run_dir)


@pytest.mark.parametrize(("change", "named"), [
    ({"cursor": 3}, "after 8 windows"), ({"generator": None}, "generator"), ({"generator": {"bit_generator": "MT19937"}}, "state"),
    ({"generator": {"bit_generator": "PCG64", "state": "-1", "inc": "1", "has_uint32": 0, "uinteger": 0}}, "state"),
    ({"generator": {"bit_generator": "PCG64", "state": str(2**128), "inc": "1", "has_uint32": 0, "uinteger": 0}}, "state"),
    ({"generator": {"bit_generator": "PCG64", "state": "5", "inc": "1", "has_uint32": 2, "uinteger": 0}}, "has_uint32"),
])
def test_a_state_that_is_none_is_refused_by_name(shards: Path, change: dict[str, Any], named: str) -> None:
    sampler = ZxellSampler(open_corpus(shards / "train", "train"), length=16, seed=9)
    described = {**sampler.state_at(0), "cursor": 8, **change}
    with pytest.raises(CheckpointDamaged) as refused:
        sampler.restore(described, 8, where="trainer.json")
    assert named in refused.value.what


def test_a_shard_without_a_place_to_start_is_refused_by_name(shards: Path) -> None:
    with pytest.raises(DataDamaged) as refused:
        ZxellSampler(open_corpus(shards / "train", "train"), length=10_000, seed=9)
    assert "train_000.bin" in refused.value.where
