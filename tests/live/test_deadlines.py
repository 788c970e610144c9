"""The part of the deadline matrix that fits into every run of the suite: nobody is left who could help, and all meet the cutoff."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from deadline_matrix import Place, play

pytestmark = pytest.mark.live

SECONDS = 60


@pytest.fixture
def place(shards: Path) -> Iterator[Place]:
    installation = Place(shards)
    yield installation
    installation.close()


def test_with_a_dead_coordinator_every_run_meets_the_cutoff_with_its_checkpoint_whatever_else_has_died(place: Place) -> None:
    cells = play(place, "coordinator dead", ("supervisor killed", "both killed", "deaf validation"), SECONDS)

    assert not [cell for cell in cells if cell.faults]
