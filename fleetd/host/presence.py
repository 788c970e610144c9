"""Whether a run directory is still there. Where somebody has removed it, nobody can be told of its run any more."""

from __future__ import annotations

import os
from pathlib import Path

REMOVED_SECONDS = 60.0
"""What has been away for so long was removed, and is no disk that will come back."""
LOOK_COUNTS_SECONDS_MAX = 10.0
"""Longer than any pause between two looks. A machine that slept comes back before its disks do: its sleep is no time in which one was away."""


class Presence:
    def __init__(self, root: Path, boottime_seconds: float) -> None:
        self.root, self.was_removed = root, False
        self._looked_seconds, self._away_seconds = boottime_seconds, 0.0

    def look(self, boottime_seconds: float) -> None:
        """Only a plain \"there is no such directory\" counts: a disk that fails says nothing of what lies on it."""
        gap_seconds, self._looked_seconds = boottime_seconds - self._looked_seconds, boottime_seconds
        try:
            os.stat(self.root)
        except FileNotFoundError:
            self._away_seconds += min(gap_seconds, LOOK_COUNTS_SECONDS_MAX)
            self.was_removed = self._away_seconds >= REMOVED_SECONDS
            return
        except OSError:
            pass
        self.was_removed, self._away_seconds = False, 0.0
