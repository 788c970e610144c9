"""Trainings that wait for their test at some of their steps. So a test that is held up finds them under way, however quick they are."""

from __future__ import annotations

from pathlib import Path

TRAINER = Path(__file__).with_name("held_trainer")


class Holds:
    """Steps at which a training waits once it has done them until it is let go, or asked to stop: each is a file in a folder. An attempt that
    begins behind one waits after its first step."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self._folder = folder
        folder.mkdir()
        for step in steps:
            (folder / str(step)).touch()

    @property
    def environment(self) -> dict[str, str]:
        """Of the candidate in its plan."""
        return {"PYTHONPATH": str(TRAINER), "HOLDS": str(self._folder)}

    def let_go(self, step: int) -> None:
        (self._folder / str(step)).unlink()
