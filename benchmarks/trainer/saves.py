"""What a save costs: how long the step loop stands still, and how fast the bytes get to the disk, beside torch.save and a plain write.

    python benchmarks/trainer/saves.py [--rounds N] [--folder DIR] [--write]

The model is that of the speed benchmark with 48,000 words: 29 million parameters, with both moments some 350 MB. A round saves
the same state in each way, one after another, into the same folder; every way ends with its bytes synced.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stage
from page import PAGE, write_part

ROUNDS = 5
PIECE_BYTES = 4 << 20
CELL = stage.Cell(vocabulary=48_000, window=256, threads=1)
TINY_STEP = {"window": 16, "batch": 1, "micro_batch": 1, "checkpoint": {"every_steps": None, "every_seconds": None, "keep": 1}}


def prepare(work: Path) -> Any:
    """A training as the command makes it, its steps tiny: what is saved does not depend on them."""
    from trainer.environment import fix_arithmetic, keep_big_blocks, read_environment

    fix_arithmetic(CELL.threads)
    keep_big_blocks()
    from trainer.config import TrainTask, parse_task
    from trainer.data.shards import open_corpus
    from trainer.models.families import model_config
    from trainer.prepare import prepare_training
    from trainer.records import RunRecords
    from trainer.stopping import Stop

    shards = stage.make_shards(work / "shards", CELL.vocabulary)
    run_dir = work / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    task = parse_task(stage.task(CELL, shards, **TINY_STEP), where="task")
    assert isinstance(task, TrainTask)
    config, corpus = model_config(task.model, window=task.window, where="task"), open_corpus(shards, "train", vocabulary=CELL.vocabulary)
    return prepare_training(read_environment({}, str(run_dir)), task, config, corpus, None, None, Stop(), RunRecords(run_dir))


def save_ours(training: Any) -> dict[str, float]:
    training._take_step()
    training._save()
    training._settle(wait=True)
    lines = (training.run_dir / "log.jsonl").read_text().splitlines()
    told = next(record for line in reversed(lines) if (record := json.loads(line)).get("phase") == "end")
    durable = told["seconds"] - told["verify_seconds"]
    return {"blocked": told["blocked_seconds"], "durable": durable, "verified": told["seconds"], "bytes": told["bytes"]}


def save_by_torch(training: Any, path: Path) -> dict[str, float]:
    """Weights and optimizer by torch.save, then synced."""
    import torch

    began = time.monotonic()
    torch.save({"model": training.state.model.state_dict(), "optimizer": training.state.optimizer.state_dict()}, path)
    blocked = time.monotonic() - began
    synced(path)
    return {"blocked": blocked, "durable": time.monotonic() - began, "bytes": path.stat().st_size}


def write_plainly(data: memoryview, path: Path) -> dict[str, float]:
    """The bytes of a checkpoint, written from memory and synced: the limit of this disk now."""
    began = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        for start in range(0, len(data), PIECE_BYTES):
            file.write(data[start:start + PIECE_BYTES])
        os.fsync(file.fileno())
    return {"blocked": time.monotonic() - began, "durable": time.monotonic() - began, "bytes": len(data)}


def synced(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def table(found: dict[str, list[dict[str, float]]]) -> str:
    head = ("a save of 29 M parameters", "step loop blocked", "until it is durable", "MB/s until durable", "of the plain write")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    speeds = {way: [each["bytes"] / each["durable"] / 1e6 for each in rounds] for way, rounds in found.items()}
    for way, rounds in found.items():
        shares = [mine / limit for mine, limit in zip(speeds[way], speeds["plain write and sync"], strict=True)]
        rows.append(f"| {way} | {spread([each['blocked'] for each in rounds], ' s')} | {spread([each['durable'] for each in rounds], ' s')} | "
                    f"{spread(speeds[way], '', 0)} | {spread(shares, '')} |")
    verified = [each["verified"] for each in found["ours"]]
    return "\n".join(rows) + f"\n\nOurs is written, synced, renamed, read back and compared after {spread(verified, ' s')}."


def spread(values: list[float], unit: str, places: int = 2) -> str:
    return f"{statistics.median(values):.{places}f}{unit} ({min(values):.{places}f} to {max(values):.{places}f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--folder", help="where to write, for another disk")
    parser.add_argument("--write", action="store_true", help="write docs/training.md")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleetd-saves-", dir=given.folder) as folder:
        work = Path(folder)
        training = prepare(work)
        save_ours(training)  # the first one takes its memory
        plain = memoryview(b"".join(path.read_bytes() for path in sorted(training.saved.path.iterdir())))
        ways: dict[str, Callable[[], dict[str, float]]] = {
            "ours": lambda: save_ours(training), "torch.save, then synced": lambda: save_by_torch(training, work / "torch.pt"),
            "plain write and sync": lambda: write_plainly(plain, work / "plain.bin"),
        }
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for _ in range(given.rounds):
            for way, save in ways.items():
                for left in (work / "torch.pt", work / "plain.bin"):
                    left.unlink(missing_ok=True)
                os.sync()
                found[way].append(save())
    print(table(found))
    if given.write:
        write_part(PAGE, "saves", table(found))
    blocked = [statistics.median(each["blocked"] for each in found[way]) for way in ("ours", "torch.save, then synced")]
    return 0 if blocked[0] < blocked[1] else 1


if __name__ == "__main__":
    sys.exit(main())
