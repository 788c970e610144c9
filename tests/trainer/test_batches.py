"""The batch that is made ahead: the same one, at most one, and after a stop as if it had never been drawn."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_stage import LLAMA, last_step, make_run, make_task, manifest_bytes, prepare, train_here

from policies.facts import TrainerExit
from trainer.data.batches import Batches
from trainer.data.sampler import WindowSampler
from trainer.data.shards import open_corpus
from trainer.data.zxell_sampler import ZxellSampler
from trainer.stopping import Stop

DRAWN_SECONDS_MAX = 100.0


class Watched:
    """A sampler that remembers which batches were made, and where."""

    def __init__(self, sampler: Any) -> None:
        self._sampler, self.made, self.threads = sampler, [], []

    def batch(self, cursor: int, count: int) -> Any:
        made = self._sampler.batch(cursor, count)
        self.made.append(cursor)
        self.threads.append(threading.current_thread())
        return made

    def wait_for(self, cursor: int) -> None:
        until = time.monotonic() + DRAWN_SECONDS_MAX
        while cursor not in self.made:
            assert time.monotonic() < until, f"the batch at {cursor} was never made"
            time.sleep(0.001)


@pytest.mark.parametrize("kind", [WindowSampler, ZxellSampler])
def test_batches_made_ahead_are_those_that_are_asked_for_and_never_more_than_one(shards: Path, kind: Any) -> None:
    corpus = open_corpus(shards / "train", "train")
    plain, watched = kind(corpus, length=16, seed=5), Watched(kind(corpus, length=16, seed=5))
    batches = Batches(watched, is_pinned=False)
    for step in range(6):
        assert np.array_equal(batches.take(step * 4, 4).numpy(), plain.batch(step * 4, 4))
        watched.wait_for(step * 4 + 4)
        assert watched.made == [4 * number for number in range(step + 2)], "one batch in hand, no more"
    assert {thread is threading.main_thread() for thread in watched.threads[1:]} == {False}, "only the first one was waited for"


def test_a_step_that_is_taken_again_gets_its_batch_again_although_the_next_one_was_drawn(shards: Path) -> None:
    corpus = open_corpus(shards / "train", "train")
    sampler, plain = (ZxellSampler(corpus, length=16, seed=5) for _ in range(2))
    batches = Batches(watched := Watched(sampler), is_pinned=False)
    for cursor in (0, 4):
        batches.take(cursor, 4)
    watched.wait_for(8)
    first, second = plain.batch(0, 4), plain.batch(4, 4)
    assert len(first) and sampler.state_at(4) == plain.state_at(4), "what a save writes when the step from 4 on was given up"
    assert np.array_equal(batches.take(4, 4).numpy(), second)
    assert np.array_equal(batches.take(8, 4).numpy(), plain.batch(8, 4))


def test_a_sigterm_with_a_batch_in_hand_saves_the_place_of_the_last_one_consumed(tmp_path: Path, shards: Path) -> None:
    task = make_task(shards / "train", shards / "val", model={"config": LLAMA}, sampler="zxell")
    whole, run_dir = make_run(tmp_path, "whole", task), make_run(tmp_path, "run", task)
    assert train_here(whole) == TrainerExit.FINISHED
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = Stop()
    stop.listen()
    try:
        training = prepare(run_dir, stop)
        watched = Watched(training.sampler)
        training.batches = Batches(watched, is_pinned=False)
        take_step = training._take_step

        def take_step_then_signal() -> bool:
            done = take_step()
            if training.state.step == 5:
                watched.wait_for(training.state.cursor)
                os.kill(os.getpid(), signal.SIGTERM)
            return bool(done)

        training._take_step = take_step_then_signal
        assert training.train() == TrainerExit.STOPPED
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])
    assert last_step(run_dir) == 5 and watched.made[-1] == training.state.cursor, "the batch of step 6 was in hand"
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(whole, 12)
