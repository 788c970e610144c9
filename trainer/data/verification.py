"""Every promise of a directory of shards checked once, shards side by side: 11 GB take what the disk or the hashing takes.

Hashing lets other threads run, so threads are enough. Nothing stays in memory but one array of article ends per shard at work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import DataDamaged
from trainer.data.shards import INDEX_NAME, TOKEN_BYTES, checked_entry, open_shard, read_index, tokenizer_file, vocabulary_of

VOCABULARY_MAX = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCount:
    """What a split holds. `is_here` is False where the index lists it and none of its shards lies in this directory."""

    shards: int
    tokens: int
    documents: int
    is_here: bool = True


def verify_splits(
    folder: Path, split: str | None, *, workers: int, on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, SplitCount]:
    """Check the shards of one split, or of all that lie here; what each holds, by name. DataDamaged names file and offset.

    `on_bytes` hears, from any thread but one at a time, how many bytes of how many are checked.
    """
    index = read_index(folder)
    tokenizer = tokenizer_file(folder, index)
    vocabulary = min(vocabulary_of(tokenizer) or VOCABULARY_MAX, VOCABULARY_MAX)
    by_split: dict[str, list[dict[str, Any]]] = {}
    for entry in index["shards"]:
        by_split.setdefault(str(entry.get("split")), []).append(entry)
    if split is not None and split not in by_split:
        raise DataDamaged("the training data can't be used", where=str(folder / INDEX_NAME), what=f"it has no shard of split {split!r}",
                          fix=f"name one of these: {', '.join(sorted(by_split)) or 'none'}")
    here = {name for name, entries in by_split.items() if name == split or any(os.path.isfile(folder / str(entry.get("name"))) for entry in entries)}
    wanted = [entry for name, entries in by_split.items() if name in here and split in (None, name) for entry in entries]
    entries = [checked_entry(folder, entry) for entry in wanted]
    total, done, lock = sum(TOKEN_BYTES * entry["tokens"] for entry in entries), 0, threading.Lock()

    def check(entry: dict[str, Any]) -> None:
        nonlocal done
        open_shard(folder, entry, vocabulary)
        with lock:
            done += TOKEN_BYTES * entry["tokens"]
            on_bytes(done, total)

    with ThreadPoolExecutor(workers, "shards") as pool:
        pending = [pool.submit(check, entry) for entry in entries]
        try:
            for each in pending:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return {name: _count(by_split[name], name in here) for name in by_split if split in (None, name)}


def _count(entries: list[dict[str, Any]], is_here: bool) -> SplitCount:
    return SplitCount(shards=len(entries), tokens=sum(entry.get("tokens", 0) for entry in entries),
                      documents=sum(entry.get("docs", 0) for entry in entries), is_here=is_here)
