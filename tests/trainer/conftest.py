"""Shards and reference runs that several stories of the trainer share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_stage import make_run, make_shards, make_task, train_here


@pytest.fixture(scope="session", autouse=True)
def _environment_comes_back() -> Iterator[None]:
    """The trainer sets variables of the maths libraries; other tests must not notice."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    """The command leaves signals ignored when it is done; this process wants its own again."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Role directories train/ and val/."""
    root = tmp_path_factory.mktemp("shards")
    make_shards(root / "train", split="train", shards=2, documents=10, seed=1)
    make_shards(root / "val", split="val", shards=1, documents=12, seed=2, scored=True)
    return root


@pytest.fixture(scope="session")
def task(shards: Path) -> dict[str, Any]:
    """GPT-2 with dropout, accumulation, and more steps than one epoch has."""
    return make_task(shards / "train", shards / "val")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, task: dict[str, Any]) -> Path:
    """The run of `task` that nobody ever stopped."""
    run_dir = make_run(tmp_path_factory.mktemp("undisturbed"), "run", task)
    train_here(run_dir)
    return run_dir
