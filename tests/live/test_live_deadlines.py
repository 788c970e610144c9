"""The part of the deadline matrix that fits into every run of the suite: nobody is left who could help, and all meet the cutoff."""

from __future__ import annotations

from pathlib import Path

import pytest
from deadline_matrix import meet_deadline

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

SECONDS = 60


def test_with_a_dead_coordinator_every_run_meets_the_cutoff_with_its_checkpoint_whatever_else_has_died(shards: Path) -> None:
    cells = meet_deadline(shards, "coordinator dead", ("supervisor killed", "both killed", "deaf validation"), SECONDS)

    assert not [cell for cell in cells if cell.faults]
