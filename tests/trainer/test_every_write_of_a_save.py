"""Every system call of a save, one after another, fails, falls short, is the last one of the process, or the last one before the
power goes: the newest checkpoint that is offered is complete and verifies, always."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import faulty_disk
import pytest
from faulty_disk import Disk, Fault, Operation, crash_image, save

from policies.errors import CheckpointDamaged
from trainer.checkpoint import CHECKPOINTS, newest_verified, steps_in, sweep, verify, write_checkpoint
from trainer.files import read_json
from trainer.fingerprint import code_digest
from trainer.records import RunRecords
from trainer.resume import choose_checkpoint

POLICIES = ("nothing", "names", *("dice",) * 4)
SEED = int(os.environ.get("TRAINER_KILL_SEED", int(code_digest()[:8], 16) % 10**6))
"""Every change of the trainer gets moments of its own; the same code gets the same ones everywhere."""


@pytest.fixture(scope="module")
def digests(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What the checkpoints of these steps are, when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {step: write_checkpoint(folder, step, faulty_disk.contents_of(step)).digest for step in range(1, 5)}


@pytest.fixture(scope="module")
def two_saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with steps 1 and 2 saved, to be copied."""
    root = tmp_path_factory.mktemp("two") / "run"
    (root / CHECKPOINTS).mkdir(parents=True)
    for step in (1, 2):
        save(root, step)
    return root


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory, two_saves: Path) -> int:
    """How many system calls the third save of a run makes: it also lets the first one go."""
    disk = Disk(Path(shutil.copytree(two_saves, tmp_path_factory.mktemp("counted") / "run")))
    with disk.watching():
        save(disk.root, 3)
    return disk.calls


def newest(run_dir: Path, digests: dict[int, str]) -> int:
    """The step that is offered for resume; whatever verifies must be what was saved under that name."""
    scan = newest_verified(run_dir / CHECKPOINTS)
    assert scan.newest is not None
    for step in steps_in(run_dir / CHECKPOINTS):
        try:
            found = verify(run_dir / CHECKPOINTS / f"step-{step:09d}")
        except CheckpointDamaged:
            continue
        assert found.digest == digests[step]
    return scan.newest.step


@pytest.mark.parametrize(("kind", "error"), [
    ("error", errno.ENOSPC), ("error", errno.EIO), ("short", 0), ("short and full", 0),
], ids=["no space", "input or output error", "short write", "short write, then no space"])
def test_a_call_that_fails_costs_at_most_the_new_checkpoint_and_the_next_try_succeeds(
    tmp_path: Path, digests: dict[int, str], two_saves: Path, calls: int, kind: str, error: int,
) -> None:
    struck = set()
    for number in range(1, calls + 1):
        disk = Disk(Path(shutil.copytree(two_saves, tmp_path / str(number))), Fault(at=number, kind=kind, error=error))
        with disk.watching():
            try:
                offered = save(disk.root, 3).checkpoint.step
            except OSError:
                offered = 2
        if disk.struck is not None:
            struck.add(disk.struck)
        assert newest(disk.root, digests) in {offered, 3}, f"call {number}, {disk.struck}"
        left = [path.name for path in (disk.root / CHECKPOINTS).iterdir() if path.name.startswith(".tmp")]
        assert not left or disk.struck in ("unlink", "rmdir", "open"), f"call {number}, {disk.struck}: {left}"
        sweep(disk.root / CHECKPOINTS)
        with Disk(disk.root).watching():
            assert save(disk.root, 3).checkpoint.digest == digests[3]
        assert newest(disk.root, digests) == 3
        assert sorted(path.name for path in (disk.root / CHECKPOINTS).iterdir() if not path.name.startswith(".trash"))[-2:] == [
            "step-000000002", "step-000000003"]
    assert {"mkdir", "open", "write", "fsync", "close", "renameat2", "rename", "unlink", "rmdir", "replace"} <= struck


@pytest.mark.parametrize("kind", ["before", "after"])
def test_a_process_killed_at_any_call_leaves_a_run_that_goes_on(
    tmp_path: Path, digests: dict[int, str], two_saves: Path, calls: int, kind: str,
) -> None:
    here = Path(__file__).parent
    for number in range(1, calls + 1):
        shutil.copytree(two_saves, tmp_path / f"{kind}-{number}")
    program = subprocess.run(
        [sys.executable, str(here / "faulty_disk.py"), str(tmp_path), "1", str(calls), kind], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": f"{here}:{here.parent.parent}"},
    )
    deaths = dict(line.split() for line in program.stdout.splitlines())
    assert set(deaths.values()) == {"-9"} and len(deaths) == calls, program.stderr
    offered = []
    for number in range(1, calls + 1):
        run_dir = tmp_path / f"{kind}-{number}"
        offered.append(newest(run_dir, digests))
        chosen = choose_checkpoint(run_dir / CHECKPOINTS, None, RunRecords(run_dir))
        assert chosen is not None and chosen.step == offered[-1]
        assert not [path.name for path in (run_dir / CHECKPOINTS).iterdir() if path.name.startswith(".")]
        with Disk(run_dir).watching():
            assert save(run_dir, 3).checkpoint.digest == digests[3]
    assert offered == sorted(offered) and set(offered) == {2, 3}, "once the new one is offered, it stays"


def acknowledged_at(operations: list[Operation]) -> int:
    """How many operations had happened when the third checkpoint was durable: the first sync of the folder after its rename."""
    acts = [(operation.name, operation.target or operation.path) for operation in operations]
    return acts.index(("fsync", CHECKPOINTS), acts.index(("rename", f"{CHECKPOINTS}/step-000000003"))) + 1


def recorded(root: Path) -> list[Operation]:
    """Every operation of three saves, from an empty folder on."""
    disk = Disk(root)
    with disk.watching():
        os.mkdir(root / CHECKPOINTS)
        descriptor = os.open(root, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        for step in (1, 2, 3):
            save(root, step)
    return disk.operations


def test_after_a_power_cut_at_any_moment_the_newest_durable_checkpoint_is_there(tmp_path: Path, digests: dict[int, str]) -> None:
    (tmp_path / "run").mkdir()
    operations = recorded(tmp_path / "run")
    begin = next(place for place, operation in enumerate(operations) if operation.path.startswith(f"{CHECKPOINTS}/.tmp-step-000000003"))
    durable, dice, seen = acknowledged_at(operations), random.Random(SEED), set()
    for count in range(begin, len(operations) + 1):
        for turn, policy in enumerate(POLICIES):
            image = tmp_path / f"image-{count}-{turn}"
            crash_image(operations[:count], image, policy=policy, dice=dice)
            step = newest(image, digests)
            assert step == 3 if count >= durable else step in (2, 3), f"TRAINER_KILL_SEED={SEED}: {policy} after {operations[count - 1]}"
            seen.add(step)
            if (image / "latest.json").exists() and (image / "latest.json").stat().st_size:
                assert read_json(image / "latest.json")["digest"] in digests.values()
            sweep(image / CHECKPOINTS)
            assert newest(image, digests) == step
    assert seen == {2, 3}


@pytest.mark.parametrize("forgotten", ["model.safetensors", "manifest.json", "temporary", "folder"])
def test_the_power_cut_test_sees_a_sync_that_is_missing(tmp_path: Path, digests: dict[int, str], forgotten: str) -> None:
    (tmp_path / "run").mkdir()
    kept, dropped = [], 0
    for operation in recorded(tmp_path / "run"):
        name = Path(operation.path).name
        is_forgotten = {"temporary": name.startswith(".tmp-"), "folder": operation.path == CHECKPOINTS}.get(forgotten, name == forgotten)
        if operation.name == "fsync" and is_forgotten:
            dropped += 1
            continue
        kept.append(operation)
    crash_image(kept, tmp_path / "image", policy="names" if forgotten.endswith((".safetensors", ".json")) else "nothing", dice=random.Random(SEED))
    scan = newest_verified(tmp_path / "image" / CHECKPOINTS)
    assert dropped >= 3 and (scan.newest is None or scan.newest.step != 3)


def test_a_checkpoint_that_does_not_read_back_is_set_aside_and_told(tmp_path: Path, two_saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = Path(shutil.copytree(two_saves, tmp_path / "run"))
    from trainer import checkpoint

    def rot(path: Path) -> None:
        if path.name == "model.safetensors" and "000000003" in path.parent.name:
            data = bytearray(path.read_bytes())
            data[17] ^= 1
            path.write_bytes(data)

    monkeypatch.setattr(checkpoint, "forget_cached", rot)
    with pytest.raises(OSError, match=r"does not read back .*sha256.* refused-step-000000003-1"):
        save(run_dir, 3)
    scan = newest_verified(run_dir / CHECKPOINTS)
    assert scan.newest is not None and scan.newest.step == 2 and scan.skipped == ()
    assert steps_in(run_dir / CHECKPOINTS) == [1, 2], "nothing is let go for a checkpoint that is none"
