"""The order in which a training reads its windows: a pure function of (data digest, seed, epoch, index).

A window is `length` + 1 tokens, so that `length` of them are targets; windows of a shard follow each other without a gap and
never cross into the next shard. An epoch visits each window once, in an order given by a keyed permutation (a balanced Feistel
network whose round function is BLAKE2b, cycle-walked down to the number of windows; Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"). Nothing is drawn from a generator, so there is no state to save but the number of windows taken,
and the order does not depend on any library's version.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policies.errors import DataDamaged
from trainer.data.shards import Corpus

ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Permutation:
    """A keyed bijection of range(size)."""

    size: int
    key: bytes

    def __call__(self, index: int) -> int:
        assert 0 <= index < self.size, index
        half_bits = max(1, ((self.size - 1).bit_length() + 1) // 2)
        place = self._shuffle(index, half_bits)
        while place >= self.size:  # less than four walks on average: the domain is below four times the size
            place = self._shuffle(place, half_bits)
        return place

    def _shuffle(self, value: int, half_bits: int) -> int:
        mask = (1 << half_bits) - 1
        left, right = value >> half_bits, value & mask
        for turn in range(ROUNDS):
            mixed = hashlib.blake2b(turn.to_bytes(1, "little") + right.to_bytes(8, "little"), digest_size=8, key=self.key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        return (left << half_bits) | right


class WindowSampler:
    """Batches of windows by position: `batch(cursor, count)` for the windows after the first `cursor` ones of the training."""

    def __init__(self, corpus: Corpus, *, length: int, seed: int) -> None:
        self._corpus, self._length, self._seed = corpus, length, seed
        counts = [(len(shard.tokens) - 1) // length for shard in corpus.shards]
        self._first_windows = np.cumsum([0, *counts])
        if self.window_count == 0:
            raise DataDamaged("the training data can't be used", where=str(corpus.folder),
                              what=f"no shard of split {corpus.split!r} has the {length + 1} tokens of one window",
                              fix="choose a smaller window, or give more data")
        self._permutations: dict[int, Permutation] = {}

    @property
    def window_count(self) -> int:
        """Windows in one epoch."""
        return int(self._first_windows[-1])

    def batch(self, cursor: int, count: int) -> npt.NDArray[np.int64]:
        """The windows number `cursor` to `cursor + count` of the whole training, shape (count, length + 1)."""
        return np.stack([self._window(cursor + number) for number in range(count)])

    def place(self, sample: int) -> int:
        """Which window of the corpus the training takes as its sample number `sample`."""
        epoch, index = divmod(sample, self.window_count)
        if epoch not in self._permutations:
            self._permutations = {epoch: Permutation(self.window_count, self._key(epoch))}
        return self._permutations[epoch](index)

    def _window(self, sample: int) -> npt.NDArray[np.int64]:
        place = self.place(sample)
        number = int(np.searchsorted(self._first_windows, place, side="right")) - 1
        start = (place - int(self._first_windows[number])) * self._length
        return self._corpus.shards[number].tokens[start:start + self._length + 1].astype(np.int64)

    def _key(self, epoch: int) -> bytes:
        return hashlib.blake2b(f"windows {self._corpus.digest} {self._seed} {epoch}".encode(), digest_size=32).digest()
