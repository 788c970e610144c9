"""What a round of chaos says is left behind."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "live")]

from outcome import leftovers  # noqa: E402 (found by path)

pytestmark = [pytest.mark.live, pytest.mark.skipif(os.geteuid() != 0, reason="mounts two small file systems")]


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    places = tmp_path / "one", tmp_path / "other"
    for place in places:
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "none", str(place)], check=True)
    yield places
    for place in places:
        subprocess.run(["umount", str(place)], check=True)


def test_a_lock_that_somebody_holds_is_left_behind_and_its_namesake_on_another_disk_is_not(disks: tuple[Path, Path]) -> None:
    one, other = (place / "some.lock" for place in disks)
    one.touch()
    other.touch()
    assert one.stat().st_ino == other.stat().st_ino, "the first file of each"
    with one.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert leftovers(one.parent, seconds=0.0) == [f"lock on {one}"]
        assert leftovers(other.parent, seconds=0.0) == []
    assert leftovers(one.parent, seconds=0.0) == []
