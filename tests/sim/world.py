"""One virtual world: its time, its queue of things to come, its dice, and the story it tells.

No threads and no sleeping: the next thing happens when everything before it has happened, so a seed is one story, always the same.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

EPOCH = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
"""True time zero. A machine's own clock may say something else."""
LINES_KEPT_MAX = 400
HAPPENINGS_MAX = 200_000
"""A story has some thousands; one with so many turns in a circle."""


class Broken(BaseException):
    """A law does not hold. No `Exception`: the code under test catches those, and must not catch this one."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"law {law}: {text}")
        self.law, self.text = law, text


class Appointment:
    """Something that will happen unless it is called off."""

    __slots__ = ("act", "arguments", "is_off")

    def __init__(self, act: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.act, self.arguments, self.is_off = act, arguments, False

    def call_off(self) -> None:
        self.is_off = True


class World:
    def __init__(self, seed: int, *, echo: bool = False) -> None:
        self.seed, self.echo = seed, echo
        self.random = random.Random(seed)
        self.seconds = 0.0
        self.happened = 0
        self.said = 0
        self.faults_at: list[float] = []
        """When something went wrong that was planned to: not what could have, only what did."""
        self.lines: deque[tuple[float, str, str]] = deque(maxlen=LINES_KEPT_MAX)
        self._queue: list[tuple[float, int, Appointment]] = []
        self._count = 0

    def after(self, seconds: float, act: Callable[..., object], *arguments: object) -> Appointment:
        """Let `act` happen in so many seconds, after whatever was appointed for the same moment before it."""
        assert seconds >= 0
        appointment = Appointment(act, arguments)
        self._count += 1
        heapq.heappush(self._queue, (self.seconds + seconds, self._count, appointment))
        return appointment

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Everything up to `until`, or until the story is over."""
        while self._queue and self._queue[0][0] <= until:
            self.seconds, _, appointment = heapq.heappop(self._queue)
            if appointment.is_off:
                continue
            self.happened += 1
            if self.happened > HAPPENINGS_MAX:
                raise Broken("liveness", f"{HAPPENINGS_MAX} things have happened, and no end is in sight")
            appointment.act(*appointment.arguments)
            if is_over():
                return
        self.seconds = max(self.seconds, until)

    def fault(self) -> None:
        self.faults_at.append(self.seconds)

    def say(self, who: str, text: str) -> None:
        self.said += 1
        self.lines.append((self.seconds, who, text))
        if self.echo:
            print(f"{self.seconds:9.2f} {who:>12}  {text}", flush=True)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def between(self, low: float, high: float) -> float:
        return self.random.uniform(low, high)


def true_seconds(moment: datetime) -> float:
    """The world's seconds at which a clock without a step shows `moment`."""
    return (moment - EPOCH) / timedelta(seconds=1)
