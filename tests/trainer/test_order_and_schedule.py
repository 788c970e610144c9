"""The order of the data and the learning rate are functions of the step: they can be asked for any step, in any order."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import DataDamaged
from trainer.config import OptimizerSettings
from trainer.data.sampler import Permutation, WindowSampler
from trainer.data.shards import Corpus, documents, open_corpus
from trainer.schedule import learning_rate


@pytest.fixture(scope="module")
def corpus(shards: Path) -> Corpus:
    return open_corpus(shards / "train", "train")


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), key=st.binary(min_size=1, max_size=32))
def test_a_permutation_takes_every_place_once(size: int, key: bytes) -> None:
    shuffle = Permutation(size, key)
    assert sorted(shuffle(index) for index in range(size)) == list(range(size))


def test_an_epoch_visits_every_window_once_and_the_next_in_another_order(corpus: Corpus) -> None:
    sampler = WindowSampler(corpus, length=16, seed=7)
    count = sampler.window_count
    first, second = [[sampler.place(sample) for sample in range(epoch * count, (epoch + 1) * count)] for epoch in (0, 1)]
    assert sorted(first) == sorted(second) == list(range(count))
    assert first != second != sorted(second)


def test_the_order_depends_on_seed_and_data_and_on_nothing_else(corpus: Corpus, shards: Path) -> None:
    def order(of: Corpus, seed: int) -> list[int]:
        return [WindowSampler(of, length=16, seed=seed).place(sample) for sample in range(20)]

    assert order(corpus, 7) == order(open_corpus(shards / "train", "train"), 7)
    assert order(corpus, 7) != order(corpus, 8)
    assert Permutation(1000, b"a key that never changes")(431) == 847, "the order is part of the format: old runs must resume"


def test_a_batch_is_the_same_however_it_is_asked_for(corpus: Corpus) -> None:
    sampler = WindowSampler(corpus, length=16, seed=7)
    whole = sampler.batch(5, 8)
    assert whole.shape == (8, 17)
    assert (WindowSampler(corpus, length=16, seed=7).batch(9, 4) == whole[4:]).all()


def test_windows_follow_each_other_without_gap_and_stay_in_their_shard(corpus: Corpus) -> None:
    sampler, length = WindowSampler(corpus, length=16, seed=7), 16
    seen = {sampler.place(sample): window for sample, window in enumerate(sampler.batch(0, sampler.window_count))}
    first_shard = corpus.shards[0].tokens
    in_first = (len(first_shard) - 1) // length
    for place in range(in_first):
        assert seen[place].tolist() == first_shard[place * length:place * length + length + 1].tolist()
    assert seen[in_first].tolist() == corpus.shards[1].tokens[:length + 1].tolist()


def test_a_window_longer_than_the_data_is_refused(corpus: Corpus) -> None:
    with pytest.raises(DataDamaged) as refusal:
        WindowSampler(corpus, length=10**6, seed=7)
    assert "smaller window" in refusal.value.fix


def test_documents_cover_every_token_once_and_are_cut_where_asked(corpus: Corpus) -> None:
    whole = list(documents(corpus))
    assert sum(len(document.tokens) for document in whole) == corpus.token_count
    assert all(document.tokens[-1] == 2 and (document.tokens[:-1] != 2).all() for document in whole)
    assert [len(document.tokens) for document in documents(corpus, 9)] == [min(9, len(document.tokens)) for document in whole]


def test_the_rate_warms_up_linearly_and_ends_on_the_cosine() -> None:
    terms = OptimizerSettings(lr=0.4, min_lr_ratio=0.1, warmup=4)
    assert [learning_rate(step, terms, 24) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert learning_rate(4, terms, 24) == pytest.approx(0.4)
    assert learning_rate(14, terms, 24) == pytest.approx(0.04 + 0.36 / 2)
    assert learning_rate(23, terms, 24) == pytest.approx(0.04 + 0.18 * (1 + math.cos(math.pi * 19 / 20)))
    assert learning_rate(0, OptimizerSettings(lr=0.4, warmup=0), 24) == pytest.approx(0.4)
