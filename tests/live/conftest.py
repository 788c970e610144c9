"""Fixtures of the live tests: small shards, and a real installation in a temporary directory that leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_fleet import EXAMPLE, Fleet
from sshd import Sshd

from fleetd.coordinator.releases import Releases
from fleetd.paths import StatePaths


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small train shard with the whole val and test shards: enough to learn something in a few seconds."""
    folder = tmp_path_factory.mktemp("shards")
    index = json.loads((EXAMPLE / "shards_index.json").read_text(encoding="utf-8"))
    index["shards"] = [shard for shard in index["shards"] if shard["name"] in {"train_009.bin", "val_000.bin", "test_000.bin"}]
    (folder / "shards_index.json").write_text(json.dumps(index), encoding="utf-8")
    shutil.copy(EXAMPLE / index["tokenizer"], folder)
    for shard in index["shards"]:
        for path in EXAMPLE.glob(f"{shard['name'].removesuffix('.bin')}.*"):
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    return Releases(StatePaths(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """A host with an sshd of its own, shared by the tests of a file."""
    host = Sshd(tmp_path_factory.mktemp("hosts") / "spark-a", "spark-a")
    yield host
    host.stop()


@pytest.fixture
def fleet(shards: Path) -> Iterator[Fleet]:
    installation = Fleet(shards)
    yield installation
    installation.close()
