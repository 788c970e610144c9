"""How many processes the kernel has killed at a limit, also where the group that counts them vanishes with its last process."""

from __future__ import annotations

import os
import select
from collections.abc import Sequence

from fleetd.clock import boottime_seconds
from fleetd.host import cgroups


class KillCounter:
    """The kernel's count of out-of-memory kills in a group that may vanish as soon as it is empty, as a scope does: told by an event
    (`fileno`, exceptional condition) while the victim still gives its memory back, and remembered."""

    def __init__(self, group: cgroups.Group) -> None:
        self._group = group
        self._seen: int | None = None
        self._descriptor = -1
        try:
            self._descriptor = os.open(f"{group.memory}/memory.events", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            pass  # v1: its count is read at the end, since its folder is ours to remove

    def fileno(self) -> int:
        """-1 where there is nothing to wait for."""
        return self._descriptor

    def read(self) -> int | None:
        counted = cgroups.oom_kills(self._group)
        if counted is not None:
            self._seen = max(counted, self._seen or 0)
        if self._descriptor >= 0:
            try:
                os.pread(self._descriptor, 4096, 0)  # only a read of the file that is waited on makes it wait for the next event
            except OSError:
                self.close()  # the group is gone
        return self._seen

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def wait_for_kills(readable: Sequence[int], counter: KillCounter, seconds: float) -> bool:
    """Sleep until one of these can be read (True), or the time is up; kills that are told meanwhile are counted at once."""
    until_seconds = boottime_seconds() + seconds
    while True:
        events = [counter.fileno()] if counter.fileno() >= 0 else []
        ready, _, told = select.select(readable, [], events, max(0.0, until_seconds - boottime_seconds()))
        if told:
            counter.read()
        if ready or boottime_seconds() >= until_seconds:
            return bool(ready)
