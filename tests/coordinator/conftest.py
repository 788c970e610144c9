"""Fixtures of the coordinator's byte keeping: a small registered campaign, and a disk that is quickly full."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from campaign_kit import SmallCampaign, small_campaign

SMALL_DISK_BYTES = 1_000_000
RAM_DISK = Path("/dev/shm")
RAM_BYTES_MIN = 256 * 1024 * 1024


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory whose syncs cost nothing, where the machine has one: these tests write and sync hundreds of small files."""
    if not os.access(RAM_DISK, os.W_OK) or shutil.disk_usage(RAM_DISK).free < RAM_BYTES_MIN:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="fleetd-test-", dir=RAM_DISK) as folder:
        yield Path(folder)


@pytest.fixture
def campaign(quick_path: Path) -> SmallCampaign:
    return small_campaign(quick_path)


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
