"""What a killed coordinator left half-made in its state directory, removed by the next one before it begins anything.

It holds the lock of the directory and has no worker yet, so whatever carries the name of a temporary is nobody's any more.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from fleetd import logs
from fleetd.campaign import Plan
from fleetd.coordinator.trees import TEMPORARY_PREFIX
from fleetd.files import read_record, sweep_temporaries
from fleetd.fleet import Fleet
from fleetd.paths import CampaignPaths, StatePaths
from fleetd.wire import WireError, decode

_TREES = ("vault", "store/checkpoints", "store/runs/*/predictions/*")
"""Where whole directories are made under a temporary name, below a campaign."""
_RECORDS = (".", "results")


def tidy_state(paths: StatePaths) -> tuple[str, ...]:
    """Remove temporaries of the last life. Returns their names. What can't be removed stays for the next."""
    removed = [*sweep_temporaries(paths.root), *sweep_temporaries(paths.wheelhouses)]
    removed += [_remove(folder) for folder in sorted(paths.wheelhouses.glob(f"{TEMPORARY_PREFIX}*"))]
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


def forgotten_campaigns(paths: StatePaths) -> Callable[[Fleet], dict[str, Plan]]:
    """The campaigns that the journal has lost, by the directories that were put aside: runs of theirs may still go on."""

    def find(fleet: Fleet) -> dict[str, Plan]:
        found: dict[str, Plan] = {}
        for folder in sorted(paths.set_aside.glob("*/")):
            resolved = CampaignPaths(folder).resolved
            if folder.name not in fleet.campaigns and resolved.exists():
                try:
                    found[folder.name] = decode(Plan, read_record(resolved), str(resolved))
                except (OSError, WireError) as fault:
                    logs.failed("campaign_unreadable", campaign=folder.name, because=str(fault).replace("\n", " "))
        return found

    return find
