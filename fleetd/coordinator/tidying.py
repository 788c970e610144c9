"""What a killed coordinator left half-made in its state directory, removed by the next one before it begins anything.

It holds the lock of the directory and has no worker yet, so whatever carries the name of a temporary is nobody's any more.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fleetd import logs
from fleetd.coordinator.trees import TEMPORARY_PREFIX
from fleetd.files import sweep_temporaries
from fleetd.paths import StatePaths

_TREES = ("vault", "store/checkpoints", "store/runs/*/predictions/*")
"""Where whole directories are made under a temporary name, below a campaign."""
_RECORDS = (".", "results")


def tidy_state(paths: StatePaths) -> tuple[str, ...]:
    """Remove temporaries of the last life. Returns their names. What can't be removed stays for the next."""
    removed = list(sweep_temporaries(paths.root))
    for campaign in sorted(paths.campaigns.glob("*/")):
        for place in _RECORDS:
            removed += sweep_temporaries(campaign / place)
        for pattern in _TREES:
            removed += [_remove(folder) for folder in sorted(campaign.glob(f"{pattern}/{TEMPORARY_PREFIX}*"))]
    if removed:
        logs.changed("state_tidied", removed=len(removed), first=removed[0])
    return tuple(removed)


def _remove(folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    return folder.name
