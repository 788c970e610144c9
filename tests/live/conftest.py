"""Fixtures of the live tests: small shards, and a real installation in a temporary directory that leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_fleet import EXAMPLE, Fleet


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


@pytest.fixture
def fleet(shards: Path) -> Iterator[Fleet]:
    installation = Fleet(shards)
    yield installation
    installation.close()
