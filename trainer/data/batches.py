"""The batches of a training as tensors, the next one made while the step works on this one.

    step loop     take(cursor, count) .... forward, backward, update .... take(cursor + count, count)
    this thread         makes the batch at cursor + count, one and no more

A sampler's batch is a function of its place in the training, and its random numbers, where it has some, are its own: made
early it is the same batch, and no stream of the training is touched. What is saved is the place of the last *consumed* batch
(`ZxellSampler` keeps the state of the boundaries before it and after it), so a batch in hand at a stop was never drawn.
"""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


class Sampler(Protocol):
    def batch(self, cursor: int, count: int) -> npt.NDArray[np.int64]: ...


class Batches:
    """`is_pinned`: in memory from which an accelerator copies while it computes."""

    def __init__(self, sampler: Sampler, *, is_pinned: bool) -> None:
        self._sampler, self._is_pinned = sampler, is_pinned
        self._thread = ThreadPoolExecutor(1, "next batch", initializer=_leave_signals_to_the_main_thread)
        self._ahead: tuple[tuple[int, int], Future[torch.Tensor]] | None = None

    def take(self, cursor: int, count: int) -> torch.Tensor:
        """The `count` windows that follow the first `cursor` ones, shape (count, window + 1)."""
        asked, ahead = (cursor, count), self._ahead
        if ahead is not None and ahead[0] == asked:
            windows_BT = ahead[1].result()
        else:
            if ahead is not None:
                wait([ahead[1]])  # one at a time in the sampler, whatever becomes of a batch that nobody wants
            windows_BT = self._make(cursor, count)
        self._ahead = ((cursor + count, count), self._thread.submit(self._make, cursor + count, count))
        return windows_BT

    def _make(self, cursor: int, count: int) -> torch.Tensor:
        windows_BT = torch.from_numpy(self._sampler.batch(cursor, count))
        return windows_BT.pin_memory() if self._is_pinned else windows_BT


def _leave_signals_to_the_main_thread() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
