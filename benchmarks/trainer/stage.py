"""The common ground of the contenders: one model, one set of token shards, one list of windows, and what a step costs in arithmetic."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, INNER = 6, 384, 6, 1024
TOKENS_A_STEP = 2048
STEPS_PLANNED = 1000
SEED = 431
OPTIMIZER = {"lr": 0.001, "min_lr_ratio": 1.0, "warmup": 0, "weight_decay": 0.1, "betas": [0.9, 0.95], "eps": 1e-8, "clip": 1.0}
"""A constant rate, because every contender has one."""
TRAIN_TOKENS, DOCUMENT_TOKENS = 2_000_000, 1000
END_OF_SEQUENCE = 2


@dataclass(frozen=True, kw_only=True)
class Cell:
    vocabulary: int
    window: int
    threads: int
    tokens: int = TOKENS_A_STEP
    """In one step."""

    @property
    def batch(self) -> int:
        return self.tokens // self.window

    @property
    def name(self) -> str:
        return f"{self.vocabulary:,} words, context {self.window}"

    def flops_a_token(self) -> float:
        """Multiplications and additions of the matrix products, forward and backward; attention counted as the causal half."""
        weights = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) + self.vocabulary * WIDTH
        return 6.0 * weights + 6.0 * LAYERS * WIDTH * self.window

    def to_json(self) -> dict[str, int]:
        return asdict(self)


def model_config(cell: Cell) -> dict[str, Any]:
    return {
        "model_type": "llama", "vocab_size": cell.vocabulary, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "initializer_range": 0.02, "hidden_act": "silu", "tie_word_embeddings": True,
    }


def task(cell: Cell, shards: Path, **changes: Any) -> dict[str, Any]:
    """task.json of our trainer."""
    return {
        "schema": 1, "task": "language_model", "model": {"config": model_config(cell)}, "data": {"train": {"path": str(shards), "split": "train"}},
        "window": cell.window, "batch": cell.batch, "micro_batch": cell.batch, "steps": STEPS_PLANNED, "seed": SEED, "optimizer": OPTIMIZER,
        "checkpoint": {"every_steps": None, "every_seconds": None, "keep": 1}, "threads": cell.threads, "device": "cpu", **changes,
    }


def make_shards(folder: Path, vocabulary: int) -> Path:
    """Token shards whose words are as uneven as those of a language: drawn with probability 1 / rank."""
    folder.mkdir(parents=True)
    draw, ranks = np.random.default_rng(SEED), np.arange(1, vocabulary - 2, dtype=np.float64)
    tokens = draw.choice(vocabulary - 3, TRAIN_TOKENS, p=1 / ranks / (1 / ranks).sum()).astype("<u2") + np.uint16(3)
    tokens[DOCUMENT_TOKENS - 1::DOCUMENT_TOKENS] = END_OF_SEQUENCE
    data, documents = tokens.tobytes(), TRAIN_TOKENS // DOCUMENT_TOKENS
    entry = {"name": "train_000.bin", "split": "train", "tokens": TRAIN_TOKENS, "docs": documents, "sha256": hashlib.sha256(data).hexdigest(),
             "langs": {"en": TRAIN_TOKENS, "de": 0, "fr": 0, "ja": 0}}
    (folder / "train_000.bin").write_bytes(data)
    (folder / "train_000.bin.json").write_text(json.dumps(entry))
    (folder / "shards_index.json").write_text(json.dumps({"dtype": "uint16", "shard_tokens": TRAIN_TOKENS, "seed": SEED, "shards": [entry]}))
    return folder
