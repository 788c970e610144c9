"""Proof that the laws bite: for each line of DESIGN section 9 a fault is planted, and some story has to catch it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.plants import PLANTS, Plant, catch


def test_every_line_has_a_plant() -> None:
    assert {plant.law for plant in PLANTS} == {str(number) for number in range(1, 13)} | {"fence", "owner", "liveness"}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_planted_fault_is_caught(plant: Plant, record_property: Callable[[str, object], None]) -> None:
    caught = catch(plant)
    assert not isinstance(caught, str), caught
    record_property("seeds", caught.seed)
