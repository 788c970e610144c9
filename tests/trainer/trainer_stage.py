"""What the trainer's tests stand on: small synthetic shards, small tasks, and trainings in this process or in one of their own."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from policies.facts import TrainerExit
from trainer.checkpoint import newest_verified
from trainer.config import TrainTask, parse_task
from trainer.data.shards import open_role
from trainer.environment import read_environment
from trainer.models.families import model_config
from trainer.records import RunRecords
from trainer.resume import choose_checkpoint
from trainer.stopping import Stop

VOCABULARY = 48
STORY_SECONDS_MAX = 250.0
LLAMA = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "initializer_range": 0.02,
    "hidden_act": "silu", "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 64,
    "layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1,
}


def make_shards(folder: Path, *, split: str, shards: int, documents: int, seed: int, scored: bool = False) -> Path:
    """One role directory of synthetic shards: Markov-like documents in four families, each with its own favourite tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    draw, entries = np.random.default_rng(seed), []
    for number in range(shards):
        families = draw.integers(0, 4, documents)
        families[:4] = range(4)
        pieces = [np.append((np.cumsum(draw.integers(0, 3, draw.integers(5, 70))) + 10 * family) % (VOCABULARY - 3) + 3, 2) for family in families]
        tokens = np.concatenate(pieces).astype("<u2")
        totals = {language: sum(len(piece) for piece, family in zip(pieces, families, strict=True) if family == code)
                  for code, language in enumerate(("en", "de", "fr", "ja"))}
        name, sha256 = f"{split}_{number:03d}.bin", hashlib.sha256(tokens.tobytes()).hexdigest()
        entry = {"name": name, "split": split, "tokens": len(tokens), "docs": documents, "sha256": sha256, "langs": totals}
        (folder / name).write_bytes(tokens.tobytes())
        (folder / f"{name}.json").write_text(json.dumps(entry))
        if scored:
            (folder / f"{split}_{number:03d}.langs.u8").write_bytes(families.astype(np.uint8).tobytes())
        entries.append(entry)
    index = {"tokenizer": "tokenizer.model", "dtype": "uint16", "shard_tokens": 4096, "seed": seed, "shards": entries}
    (folder / "shards_index.json").write_text(json.dumps(index))
    return folder


def make_task(train: Path, scored: Path | None, **changes: Any) -> dict[str, Any]:
    """A task of twelve steps that crosses an epoch boundary, in two micro-batches a step."""
    data: dict[str, Any] = {"train": {"path": str(train), "split": "train"}}
    if scored is not None:
        data["validation"] = {"path": str(scored), "split": "val", "tokens_per_document_max": 40}
    return {
        "schema": 1, "task": "language_model", "model": {"config": GPT2}, "data": data, "window": 16, "batch": 4, "micro_batch": 2, "steps": 12,
        "seed": 7, "optimizer": {"lr": 0.01, "warmup": 3}, "checkpoint": {"every_steps": 4, "every_seconds": None, "keep": 2},
        "validation": {"every_steps": 6, "batch": 4}, "threads": 1, **changes,
    }


def make_run(root: Path, name: str, task: dict[str, Any]) -> Path:
    run_dir = root / name
    run_dir.mkdir()
    (run_dir / "task.json").write_text(json.dumps(task))
    return run_dir


class StopAfter(Stop):
    """A stop that is asked for once so many optimizer steps were taken in this attempt."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def note_step(self, seconds: float) -> None:
        self._left -= 1
        if self._left == 0:
            self.ask("SIGTERM")


class StopAtLook(Stop):
    """A stop that comes just before the trainer looks for the n-th time: between steps, and between the batches of a validation."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self.looks, self._look = 0, look

    def because(self) -> str | None:
        self.looks += 1
        if self.looks == self._look:
            self.ask("SIGTERM")
        return super().because()


def prepare(run_dir: Path, stop: Stop | None = None, **environment: str) -> Any:
    """The training of a run directory, ready for its next step."""
    from trainer.prepare import prepare_training

    given, task = read_environment(environment, str(run_dir)), parse_task(json.loads((run_dir / "task.json").read_text()), where=str(run_dir))
    assert isinstance(task, TrainTask)
    config, records = model_config(task.model, window=task.window, where=str(run_dir)), RunRecords(run_dir)
    train = open_role(task.train, vocabulary=config["vocab_size"])
    validation = open_role(task.validation_data, vocabulary=config["vocab_size"]) if task.validation_data else None
    chosen = choose_checkpoint(run_dir / "checkpoints", given.resume, records)
    return prepare_training(given, task, config, train, validation, chosen, stop or Stop(), records)


def train_here(run_dir: Path, stop: Stop | None = None, **environment: str) -> TrainerExit:
    """One attempt in this process, through everything but the command line."""
    return prepare(run_dir, stop, **environment).train()


def start(run_dir: Path, *words: str, blocked: frozenset[int] = frozenset(), **environment: str) -> subprocess.Popen[str]:
    """An attempt in a process of its own, as the host starts it."""
    def block() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)

    variables = {**os.environ, "FLEETD_RUN_DIR": str(run_dir), "PYTHONUNBUFFERED": "1", **environment}
    return subprocess.Popen([sys.executable, "-m", "trainer", *(words or ("train",))], env=variables, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, preexec_fn=block if blocked else None)


def finish(process: subprocess.Popen[str], seconds: float = STORY_SECONDS_MAX) -> tuple[int, str]:
    """Exit status and output; a process that does not end in time is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, output


def wait_for_record(run_dir: Path, process: subprocess.Popen[str], **wanted: Any) -> None:
    """Until log.jsonl holds a record with these fields."""
    until = time.monotonic() + STORY_SECONDS_MAX
    while not any(all(record.get(key) == value for key, value in wanted.items()) for record in log_of(run_dir)):
        assert process.poll() is None, f"the trainer ended early: {process.communicate()[0]}"
        assert time.monotonic() < until, f"no record {wanted}"
        time.sleep(0.005)


def log_of(run_dir: Path) -> list[dict[str, Any]]:
    path, records = run_dir / "log.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # being written
    return records


def manifest_bytes(run_dir: Path, step: int) -> bytes:
    return (run_dir / "checkpoints" / f"step-{step:09d}" / "manifest.json").read_bytes()


def last_step(run_dir: Path) -> int:
    newest = newest_verified(run_dir / "checkpoints").newest
    assert newest is not None
    return newest.step


def logged_losses(run_dir: Path) -> list[float]:
    """The loss of each step in order, the last word where a step was repeated."""
    return [loss for _, loss in sorted({record["step"]: record["loss"] for record in log_of(run_dir) if "loss" in record}.items())]
