"""The words of the command line that make and check token shards: `fleetd-trainer shards build|verify`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from policies.facts import TrainerExit
from trainer.data.verification import verify_splits
from trainer.shards_build import SHARD_TOKENS, BuildSettings, build_shards

TELL_SECONDS = 1.0


def add_build(shards: Any) -> None:
    """Hang `build` into the parser of `shards`."""
    command = shards.add_parser("build", help="make shards from text with a SentencePiece model")
    command.add_argument("out", type=Path, metavar="DIR", help="a directory that does not exist yet")
    command.add_argument("sources", nargs="+", metavar="LANG=PATH", help="a text file, JSON Lines (text, lang, date), or a folder of them")
    command.add_argument("--tokenizer", type=Path, required=True, metavar="FILE", help="the SentencePiece model")
    command.add_argument("--shard-tokens", type=int, default=SHARD_TOKENS, help="most tokens in a train shard")
    command.add_argument("--seed", type=int, default=0, help="of the order of the train articles")
    command.add_argument("--val", type=int, default=0, metavar="N", help="articles of each language kept for val")
    command.add_argument("--test", type=int, default=0, metavar="N", help="articles of each language kept for test")
    command.add_argument("--created", help="moment for the index; default: SOURCE_DATE_EPOCH or 1970: equal input gives equal bytes")
    command.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    command.set_defaults(act=run_build)


def add_workers(command: Any) -> None:
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="shards looked at side by side")


def run_build(asked: argparse.Namespace) -> TrainerExit:
    """Build, then verify what was built as anybody else would."""
    settings = BuildSettings(tokenizer=asked.tokenizer, shard_tokens=asked.shard_tokens, seed=asked.seed, validation_articles=asked.val,
                             test_articles=asked.test, created=asked.created, threads=asked.threads)
    build_shards(asked.sources, asked.out, settings, on_articles=lambda done: _say(f"{done} articles encoded"))
    return verify_and_tell(asked.out, None, workers=asked.threads)


def run_verify(asked: argparse.Namespace) -> TrainerExit:
    return verify_and_tell(Path(asked.directory), asked.split, workers=asked.workers)


def verify_and_tell(folder: Path, split: str | None, *, workers: int) -> TrainerExit:
    """Check every promise of the index; progress goes to stderr, one line a split to stdout."""
    began = told_at = time.monotonic()

    def on_bytes(done: int, total: int) -> None:
        nonlocal told_at
        now = time.monotonic()
        if now - told_at >= TELL_SECONDS:
            told_at = now
            _say(f"{done / 1e6:.0f} of {total / 1e6:.0f} MB, {done / 1e6 / (now - began):.0f} MB/s")

    for name, count in verify_splits(folder, split, workers=max(workers, 1), on_bytes=on_bytes).items():
        verdict = "all as the index says" if count.is_here else "listed by the index, none of them in this directory"
        print(f"{name}: {count.shards} shards, {count.tokens} tokens, {count.documents} documents, {verdict}")
    return TrainerExit.FINISHED


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
