"""Each job of the byte keeper on a disk that is full at every single write in turn: it says so in a way that is tried again, what was
recorded before is still there, and once there is room it comes to the very same files.

The suite refuses each so-many-th write of the longer jobs; FULL_DISK_STRIDE=1 refuses every one, and no stride refuses fewer than the suite.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from campaign_kit import files_of
from test_crashes import checkpoint, choice, evaluation, freeze, judgement, newer_predictions, registration, staging

from fleetd.coordinator.loop import PASSING
from policies.errors import ExplainedError

WRITES_MAX = 400
STRIDE = int(os.environ.get("FULL_DISK_STRIDE", WRITES_MAX))
WRITERS = ("open", "write", "fsync", "mkdir", "rename", "replace", "link")


@contextmanager
def full_disk(first: int) -> Iterator[list[str]]:
    """From the `first`-th write on nothing finds room. The names of the calls that were refused."""
    refused: list[str] = []
    count, originals = 0, {name: getattr(os, name) for name in WRITERS}

    def watched(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            creates = name != "open" or (len(arguments) > 1 and arguments[1] & os.O_CREAT and not os.path.exists(arguments[0]))
            count += creates
            if creates and count > first:
                refused.append(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(arguments[0]))
            return originals[name](*arguments, **named)

        return call

    for name in WRITERS:
        setattr(os, name, watched(name))
    try:
        yield refused
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


@pytest.mark.parametrize(
    ("job", "stride", "refusals_min"),
    [
        (registration, 17, 3), (staging, 11, 3), (newer_predictions, 2, 5), (checkpoint, 3, 5), (choice, 1, 3), (freeze, 1, 3), (evaluation, 13, 3),
        (judgement, 4, 5),
    ],
)
def test_a_job_on_a_full_disk_is_tried_again_and_comes_to_the_same(
    quick_path: Path, job: Callable[[Path], Callable[[], object]], stride: int, refusals_min: int,
) -> None:
    reference = quick_path / "undisturbed"
    job(reference)()
    wanted, refusals = files_of(reference), 0
    for first in range(0, WRITES_MAX, min(STRIDE, stride)):
        folder = quick_path / "full"
        act = job(folder)
        before = files_of(folder)
        with full_disk(first) as refused:
            fault = _fault_of(act)
        if not refused:
            break
        refusals += 1
        assert isinstance(fault, OSError) or type(fault) in PASSING, f"refused at write {first}: {fault!r}"
        assert isinstance(fault, OSError) or (isinstance(fault, ExplainedError) and "again" in fault.fix), fault
        now = files_of(folder)
        history = {name: data for name, data in before.items() if name.endswith(("ledger.jsonl", "frozen.json"))}
        assert all(now.get(name, b"").startswith(data) for name, data in history.items()), "history stays"
        act()
        assert files_of(folder) == wanted, f"refused at write {first}"
        assert not list(folder.rglob("*.tmp"))
        shutil.rmtree(folder)
    else:
        raise AssertionError(f"the job makes over {WRITES_MAX} writes")
    assert refusals >= refusals_min


def _fault_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as fault:
        return fault
    return None
