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
from zoo import animals  # noqa: E402

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


@pytest.mark.parametrize(("place", "is_ours"), [("story-2", True), ("story-2/host", True), ("story-24", False), ("story-2.kept/host", False)])
def test_a_process_of_an_installation_whose_name_begins_the_same_is_a_stranger(tmp_path: Path, place: str, is_ours: bool) -> None:
    posing_as_agent = ("/release/fleetd/host/__main__.py", "agent", str(tmp_path / place))
    process = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()", *posing_as_agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"

        assert [animal.pid for animal in animals(tmp_path / "story-2")] == [process.pid] * is_ours
    finally:
        process.communicate(b"\n")
