"""The order in which zxell reads its windows: drawn one row after another from one NumPy generator (PCG64).

    row     a shard, with probability proportional to its tokens; then a start in [0, tokens - length - 1); length + 1 tokens

Unlike our own order this one has a state. It belongs to the boundary between two steps: beside the state after the newest batch
those before it and before the last one are kept, so that a step given up half-way is saved, and taken again, as if it had never
drawn, even when the batch behind it was drawn already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from policies.errors import CheckpointDamaged, DataDamaged
from trainer.data.shards import Corpus

GENERATOR = "PCG64"
WORD_MAX = 2**128


class ZxellSampler:
    """Batches of windows as zxell draws them; `batch` takes the same arguments as that of `WindowSampler`."""

    def __init__(self, corpus: Corpus, *, length: int, seed: int) -> None:
        self._corpus, self._length = corpus, length
        for shard in corpus.shards:
            if len(shard.tokens) - length - 1 < 1:
                raise DataDamaged("the training data can't be used", where=str(corpus.folder / shard.name),
                                  what=f"its {len(shard.tokens)} tokens leave no place to start a window of {length + 1} as zxell draws them",
                                  fix="choose a smaller window, or leave this shard out")
        sizes = np.array([len(shard.tokens) for shard in corpus.shards], dtype=np.float64)
        self._chances = sizes / sizes.sum()
        self._generator = np.random.default_rng(seed)
        self._states = {0: self._state()}

    def batch(self, cursor: int, count: int) -> npt.NDArray[np.int64]:
        """The `count` windows that follow the first `cursor` ones, shape (count, length + 1). The same cursor may be asked for
        again, an earlier one may not: its state is gone."""
        assert cursor in self._states, f"windows are drawn in order: {cursor} was asked for, known are {sorted(self._states)}"
        before = self._states[cursor]
        self._generator.bit_generator.state = before
        windows_BT = np.stack([self._window() for _ in range(count)])
        kept = {place: state for place, state in self._states.items() if cursor - count <= place <= cursor}
        self._states = {**kept, cursor + count: self._state()}  # whole at any moment: the step loop may ask while the next batch is drawn
        return windows_BT

    def state_at(self, cursor: int) -> dict[str, Any]:
        """The generator's state after `cursor` windows, as JSON: words of 128 bits are written as text."""
        return {"sampler": "zxell", "cursor": cursor, "generator": generator_to_json(self._states[cursor])}

    def restore(self, described: Any, cursor: int, *, where: str) -> None:
        """Go on from what `state_at` described. CheckpointDamaged when it is no such state."""
        if not isinstance(described, dict) or described.get("sampler") != "zxell" or described.get("cursor") != cursor:
            raise _damaged(where, f"sampler: the state of a zxell sampler after {cursor} windows is needed, not {described!r:.200}")
        self.set_generator(generator_from_json(described.get("generator"), where=where), cursor)

    def set_generator(self, state: dict[str, Any], cursor: int) -> None:
        self._generator.bit_generator.state = state
        self._states = {cursor: self._state()}

    def _state(self) -> dict[str, Any]:
        return dict(self._generator.bit_generator.state)

    def _window(self) -> npt.NDArray[np.int64]:
        number = int(self._generator.choice(len(self._chances), p=self._chances))
        tokens = self._corpus.shards[number].tokens
        start = int(self._generator.integers(0, len(tokens) - self._length - 1))
        return tokens[start:start + self._length + 1].astype(np.int64)


def generator_to_json(state: dict[str, Any]) -> dict[str, Any]:
    """A PCG64 state of NumPy with its two 128-bit words as decimal text, because few readers of JSON keep such numbers whole."""
    words = state["state"]
    return {"bit_generator": state["bit_generator"], "state": str(words["state"]), "inc": str(words["inc"]),
            "has_uint32": int(state["has_uint32"]), "uinteger": int(state["uinteger"])}


def generator_from_json(described: Any, *, where: str) -> dict[str, Any]:
    """The other way. CheckpointDamaged names the key that is wrong."""
    if not isinstance(described, dict):
        raise _damaged(where, f"sampler.generator: an object is needed, not {described!r:.200}")
    words = {key: described.get(key) for key in ("state", "inc")}
    for key, word in words.items():
        if not isinstance(word, str) or not word.isascii() or not word.isdigit() or len(word) > len(str(WORD_MAX)):
            raise _damaged(where, f"sampler.generator.{key}: a decimal number in quotes is needed, not {word!r:.200}")
    return checked_generator({**described, "state": {key: int(str(word)) for key, word in words.items()}}, where=where)


def checked_generator(state: Any, *, where: str) -> dict[str, Any]:
    """`state` as NumPy gives and takes it. CheckpointDamaged names the key that is wrong."""
    words = state.get("state") if isinstance(state, dict) else None
    if not isinstance(words, dict) or state.get("bit_generator") != GENERATOR:
        raise _damaged(where, f"the state of a {GENERATOR} generator is needed, not {state!r:.200}")
    for key, value, least_beyond in (("state", words.get("state"), WORD_MAX), ("inc", words.get("inc"), WORD_MAX),
                                     ("has_uint32", state.get("has_uint32"), 2), ("uinteger", state.get("uinteger"), 2**32)):
        if type(value) is not int or not 0 <= value < least_beyond:
            raise _damaged(where, f"{key} of the sampler's generator is {value!r:.100}")
    return {"bit_generator": GENERATOR, "state": {"state": words["state"], "inc": words["inc"]},
            "has_uint32": state["has_uint32"], "uinteger": state["uinteger"]}


def _damaged(where: str, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("the sampler can't go on", where=where, what=what, fix="resume from an older checkpoint")
