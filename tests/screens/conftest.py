"""A fake coordinator per test, on a real socket in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[FakeCoordinator]:
    fake = FakeCoordinator(tmp_path / "state").start()
    yield fake
    fake.stop()
