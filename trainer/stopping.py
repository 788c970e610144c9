"""Being asked to stop: signals and the training cutoff become one question, `because()`.

    SIGTERM   save and leave. Asking again changes nothing, so it can't destroy a save.
    SIGINT    leave now, without saving.
    cutoff    leave by ourselves, so early that step and save still fit before it.

The handlers only write a word down; whoever works asks between two pieces of work. The cutoff is counted on the clock that
runs since boot: a step of the wall clock makes it neither late nor early, before the start only where our host has told us.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from datetime import datetime, timezone
from types import FrameType

RECENT = 50
SAVE_SECONDS_FIRST = 2.0
"""What a save is taken to need before one was measured."""
MARGIN_FLOOR_SECONDS = 1.0


class Stop:
    """The wish to stop, if there is one."""

    def __init__(self, cutoff_at: datetime | None = None) -> None:
        self._asked: str | None = None
        self.gives_up_save = False
        self._steps: deque[float] = deque([0.0], maxlen=RECENT)
        self._saves: deque[float] = deque(maxlen=RECENT)
        self._deadline_seconds: float | None = None
        if cutoff_at is not None:
            self.set_cutoff(cutoff_at)

    def listen(self) -> None:
        """Take SIGTERM and SIGINT from here on. Whoever started us may have blocked them, so that none was lost before."""
        signal.signal(signal.SIGTERM, self._hear)
        signal.signal(signal.SIGINT, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})

    def ignore(self) -> None:
        """The work is over: what still comes changes nothing. Python leaves ignored signals ignored while it shuts down."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def set_cutoff(self, cutoff_at: datetime, boottime_seconds: float | None = None) -> None:
        """`boottime_seconds`: the same moment on the clock that runs since boot, by whoever has watched the wall clock before us."""
        left = (cutoff_at - datetime.now(timezone.utc)).total_seconds()
        self._deadline_seconds = _boot_seconds() + left if boottime_seconds is None else boottime_seconds

    def ask(self, because: str) -> None:
        if self._asked is None:
            self._asked = because

    def because(self) -> str | None:
        """Why to stop, in a word; None to go on."""
        if self._asked is None and self._deadline_seconds is not None and _boot_seconds() + self.margin_seconds() >= self._deadline_seconds:
            self._asked = "cutoff"
        return self._asked

    def margin_seconds(self) -> float:
        """How long before the cutoff the last step may begin: it, a save, and as much again for a slow disk."""
        return max(self._steps) + 2 * max(self._saves, default=SAVE_SECONDS_FIRST) + MARGIN_FLOOR_SECONDS

    def has_time_for(self, seconds: float) -> bool:
        """Whether work of so many seconds can begin now and end in good time before the cutoff."""
        return self._deadline_seconds is None or _boot_seconds() + self.margin_seconds() + seconds < self._deadline_seconds

    def step_seconds(self) -> float:
        """The longest of the recent steps, 0 where none was taken."""
        return max(self._steps)

    def note_step(self, seconds: float) -> None:
        self._steps.append(seconds)

    def note_save(self, seconds: float) -> None:
        self._saves.append(seconds)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.gives_up_save = True
        self.ask(signal.Signals(number).name)


def _boot_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
