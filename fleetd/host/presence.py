"""Whether a run directory is still there. Where somebody has removed it, nobody can be told of its run any more."""

from __future__ import annotations

import os
from pathlib import Path

REMOVED_SECONDS = 60.0
"""What has been away for so long was removed, and is no disk that will come back."""


class Presence:
    def __init__(self, root: Path, boottime_seconds: float) -> None:
        self.root, self.was_removed = root, False
        self._seen_seconds = boottime_seconds

    def look(self, boottime_seconds: float) -> None:
        """Only a plain \"there is no such directory\" counts: a disk that fails says nothing of what lies on it."""
        try:
            os.stat(self.root)
        except FileNotFoundError:
            self.was_removed = boottime_seconds - self._seen_seconds >= REMOVED_SECONDS
            return
        except OSError:
            pass
        self.was_removed, self._seen_seconds = False, boottime_seconds
