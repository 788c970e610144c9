"""A fake coordinator per test, on a real socket in a directory of its own."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    fake = FakeCoordinator(tmp_path / "state").start()
    yield fake
    fake.stop()


@pytest.fixture(autouse=True)
def nothing_is_left_to_the_garbage_collector() -> Iterator[None]:
    """The HTTP library leaves the socket of a refused connection to it; collected here, it fails no later test of another folder."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
