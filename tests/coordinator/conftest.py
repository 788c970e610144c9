"""Fixtures of the coordinator's byte keeping: a small registered campaign, and a disk that is quickly full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign_kit import SmallCampaign, small_campaign

SMALL_DISK_BYTES = 1_000_000


@pytest.fixture
def campaign(tmp_path: Path) -> SmallCampaign:
    return small_campaign(tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte. Needs root; elsewhere the test is left out, and says so."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)
