"""The add-one unigram model: what any trained model has to beat. Counted on the train shards, scored on the same rows."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from policies.token_nll import ScoredRow
from trainer.data.shards import Corpus, Document


def unigram_nll(corpus: Corpus, vocabulary: int) -> npt.NDArray[np.float64]:
    """Nats of each token id: -log((count + 1) / (tokens + vocabulary))."""
    counts = np.zeros(vocabulary, dtype=np.int64)
    for shard in corpus.shards:
        counts += np.bincount(shard.tokens, minlength=vocabulary)
    return np.asarray(np.log(corpus.token_count + vocabulary) - np.log(counts + 1.0))


def score_by_unigram(nll: npt.NDArray[np.float64], scored: Iterable[Document]) -> list[ScoredRow]:
    return [
        ScoredRow(id=each.id, family=each.family, tokens=len(each.tokens), nll=float(nll[each.tokens].sum()))
        for each in scored
    ]
