"""Trees on their way to hosts now: how far, how quick, by which road and why. For whoever looks; nothing is decided by it.

Worker threads tell, the API reads. A delivery that is over is gone from here; the log keeps one line of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fleetd import logs

RATE_SECONDS = 10.0
"""Over so much of the past is a rate taken."""
SAMPLE_SECONDS = 0.25
SAMPLES_MAX = 64


class Delivery:
    """One tree on its way to one host. Told by the thread that brings it."""

    def __init__(self, host: str, kind: str, digest: str, bytes_total: int, monotonic: Callable[[], float]) -> None:
        self.host, self.kind, self.digest, self.bytes_total = host, kind, digest, bytes_total
        self.road, self.because, self.phase = "", "", "looking"
        self.bytes_there, self.bytes_sent, self.bytes_read = 0, 0, 0
        """Found on the host from an earlier try; sent since; read over there, to see what it has."""
        self._monotonic, self._began_at = monotonic, monotonic()
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)

    def goes_by(self, road: str, because: str) -> None:
        if (self.road, self.because) != (road, because):
            self.road, self.because = road, because
            logs.changed("delivery_road", host=self.host, kind=self.kind, digest=self.digest[:12], road=road, because=because)

    def begins(self, bytes_there: int) -> None:
        """What is there already is known, and the rest begins to move."""
        self.bytes_there, self.bytes_sent, self.phase = bytes_there, 0, "sending"
        self._samples.clear()
        self._samples.append((self._monotonic(), 0))

    def sent(self, count: int) -> None:
        self.moved_to(self.bytes_sent + count)

    def moved_to(self, count: int) -> None:
        """So much has been sent in all."""
        self.bytes_sent, now = count, self._monotonic()
        if now - self._samples[-1][0] >= SAMPLE_SECONDS:
            self._samples.append((now, count))

    def reads(self, count: int) -> None:
        self.bytes_read = count

    def settles(self, _: int = 0) -> None:
        """All is sent; the host makes it durable and gives it its name."""
        self.phase = "settling"

    @property
    def seconds(self) -> float:
        return self._monotonic() - self._began_at

    def shown(self) -> dict[str, Any]:
        """As it stands in the status document."""
        rate = self._bytes_per_second()
        left = self.bytes_total - self.bytes_there - self.bytes_sent
        return {
            "kind": self.kind, "digest": self.digest, "phase": self.phase, "road": self.road, "because": self.because,
            "bytes": self.bytes_there + self.bytes_sent, "bytes_total": self.bytes_total, "bytes_there_before": self.bytes_there,
            "bytes_read": self.bytes_read, "bytes_per_second": rate, "seconds": self.seconds,
            "seconds_left": left / rate if rate and self.phase == "sending" else None,
        }

    def _bytes_per_second(self) -> float | None:
        """Over the last seconds, up to this moment: a line that stands still shows it."""
        samples, now = list(self._samples), self._monotonic()
        recent = [each for each in samples if now - each[0] <= RATE_SECONDS] or samples[-1:]
        if not recent or now - recent[0][0] < SAMPLE_SECONDS:
            return None
        return (self.bytes_sent - recent[0][1]) / (now - recent[0][0])


class Deliveries:
    """All that are under way. Safe to use from many threads."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._guard = threading.Lock()
        self._under_way: list[Delivery] = []

    @contextmanager
    def under_way(self, host: str, kind: str, digest: str, bytes_total: int) -> Iterator[Delivery]:
        delivery = Delivery(host, kind, digest, bytes_total, self._monotonic)
        with self._guard:
            self._under_way.append(delivery)
        try:
            yield delivery
        finally:
            with self._guard:
                self._under_way.remove(delivery)
            logs.changed(
                "delivery_over", host=host, kind=kind, digest=digest[:12], road=delivery.road, sent_bytes=delivery.bytes_sent,
                there_before_bytes=delivery.bytes_there, total_bytes=bytes_total, seconds=round(delivery.seconds, 3), phase=delivery.phase,
            )

    def shown(self) -> dict[str, list[dict[str, Any]]]:
        """Of every host that is being brought something, what, in the order in which it began."""
        with self._guard:
            found = list(self._under_way)
        shown: dict[str, list[dict[str, Any]]] = {}
        for delivery in found:
            shown.setdefault(delivery.host, []).append(delivery.shown())
        return shown
