"""Saving beside the training: the step loop pays for one copy in memory, everything else happens on a thread of its own.

    step loop    copy the state, begin ........... step ... step ... at a boundary: settled? then tell of it, raise what went wrong
    this thread  write and hash, sync, rename, read back, let older ones go

At most one save is under way; the next one, a validation (its predictions carry the digest) and the end wait for it. Signals
stay with the main thread. A save that fails leaves the older checkpoints as they were.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint import Checkpoint, Content, prune, read_back, write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save that is done. `seconds` counts from the copy on, `verify_seconds` is None when reading back was skipped in a hurry."""

    checkpoint: Checkpoint
    seconds: float
    blocked_seconds: float
    verify_seconds: float | None
    pruned: tuple[int, ...]
    prune_fault: str | None


class Saver:
    """Writes the checkpoints of one run, one after another."""

    def __init__(self, folder: Path, *, keep: int, abandon: Callable[[], bool]) -> None:
        self._folder, self._keep, self._abandon = folder, keep, abandon
        self._thread: threading.Thread | None = None
        self._outcome: Saved | BaseException | None = None
        self.step = 0
        """Of the newest save that was begun."""
        self.is_hurried = False
        """True once the process is to leave: what is written is synced, and verified by whoever resumes from it."""

    def begin(self, step: int, contents: Mapping[str, Content], *, protected: frozenset[int], began_seconds: float) -> None:
        """Start to save `contents`. Nothing of a former save may be left to settle."""
        assert not self.is_under_way, "one save at a time"
        self.step, blocked_seconds = step, time.monotonic() - began_seconds

        def work() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            try:
                self._outcome = self._save(step, contents, protected, began_seconds, blocked_seconds)
            except BaseException as fault:  # raised again in the step loop
                self._outcome = fault

        self._thread = threading.Thread(target=work, name=f"save {step}")
        self._thread.start()

    @property
    def is_under_way(self) -> bool:
        return self._thread is not None

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def settle(self, *, wait: bool) -> Saved | None:
        """What became of the save, told once; None while there is nothing to tell. Raises what the save raised."""
        if self._thread is None or (self.is_writing and not wait):
            return None
        self._thread.join()
        outcome, self._thread, self._outcome = self._outcome, None, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def join(self) -> None:
        """Wait for the thread, whatever came of it."""
        if self._thread is not None:
            self._thread.join()

    def _save(
        self, step: int, contents: Mapping[str, Content], protected: frozenset[int], began_seconds: float, blocked_seconds: float,
    ) -> Saved:
        saved = write_checkpoint(self._folder, step, contents, abandon=self._abandon)
        verify_seconds, written_seconds = None, time.monotonic()
        if not self.is_hurried:
            read_back(saved)
            verify_seconds = time.monotonic() - written_seconds
        pruned: tuple[int, ...] = ()
        prune_fault = None
        try:
            pruned = prune(self._folder, keep=self._keep, protected=protected)
        except OSError as fault:
            prune_fault = str(fault)  # an old checkpoint too many hurts nobody
        return Saved(checkpoint=saved, seconds=time.monotonic() - began_seconds, blocked_seconds=blocked_seconds, verify_seconds=verify_seconds,
                     pruned=pruned, prune_fault=prune_fault)
