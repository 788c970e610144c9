"""The data of a plan, looked at without reading it: do the files exist, are they whole in size, and are the reserved ones apart.

Digests are taken when data is staged; this is the quick look that turns a typing error into a line number.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleetd.contents import content_fault
from fleetd.plan_model import DataSection
from fleetd.plan_resolve import Resolution, data_role, listed_files, read_index
from policies.facts import RESERVED_SPLITS, Split

BYTES_PER_TOKEN, CORPUS_TOKEN_BYTES = 2, 4
FILES_MAX = 100_000


def check_data(resolution: Resolution) -> None:
    files: dict[Split, set[tuple[int, int]]] = {}
    for name, section in resolution.file.data.items():
        split = Split(name)
        if _check_keys(resolution, split, section):
            check = _check_shards if section.shards is not None else _check_corpus if section.corpus is not None else _check_files
            found = check(resolution, split, section)
            files[split] = {(stat.st_dev, stat.st_ino) for path in found if (stat := path.stat())}
    _check_apart(resolution, files)


def _check_keys(resolution: Resolution, split: Split, section: DataSection) -> bool:
    """Whether the keys of a role fit together."""
    tree, path = resolution.tree, ("data", split.value)
    raw = tree.value["data"].get(split.value) or {}
    known = len(tree.faults)
    given = [f"`{key}`" for key in ("shards", "corpus", "path") if key in raw]
    if len(given) > 1:
        what = f"{'both ' if len(given) == 2 else ''}{' and '.join(given)} are set"
        tree.fault(path, what, "keep one: `shards` for token shards, `corpus` for a Zrodlo corpus, `path` for other files")
    elif not given:
        tree.fault(path, "neither `shards` nor `path` is set", "add `shards: DIRECTORY` and `split:`, or `corpus: DIRECTORY`, or `path: DIRECTORY`")
    elif "shards" in raw and "split" not in raw:
        tree.fault(path, "`split` is missing", "add the split of shards_index.json: train, val or test")
    for key, only in (("split", "shards"), ("include", "path")):
        if key in raw and only not in raw:
            tree.fault((*path, key), f"`{key}` needs `{only}`", f"remove it, or use `{only}`")
    if split is Split.TRAIN and "tokens_per_document_max" in raw:
        tree.fault((*path, "tokens_per_document_max"), "training reads whole documents", "remove it: it limits what is scored")
    complete = section.path is not None or section.corpus is not None or (section.shards is not None and section.split is not None)
    return complete and len(tree.faults) == known


def _check_shards(resolution: Resolution, split: Split, section: DataSection) -> list[Path]:
    """The shards of one split, and faults for an index or shard that is missing or has not the size of its tokens."""
    tree, path = resolution.tree, ("data", split.value)
    assert section.shards is not None and section.split is not None
    folder = resolution.absolute(section.shards)
    try:
        index = read_index(folder)
    except (OSError, ValueError, RecursionError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        tree.fault(
            (*path, "shards"), f"{folder / 'shards_index.json'} can't be read: {reason}", "name a directory of token shards, relative to the plan"
        )
        return []
    shards = [shard for shard in index["shards"] if shard.get("split") == section.split]
    if not shards:
        known = ", ".join(sorted({str(shard.get("split")) for shard in index["shards"]}))
        tree.fault(
            (*path, "split"), f"shards_index.json has no split {section.split!r}", f"use one of {known}" if known else "build the shards again"
        )
    found = []
    for name, fault_text in ((str(shard.get("name")), _shard_fault(folder, shard)) for shard in shards):
        if fault_text:
            tree.fault((*path, "shards"), f"{folder / name}: {fault_text}", "copy the shards again, or build them anew")
        else:
            found.append(folder / name)
    return found


def _shard_fault(folder: Path, shard: dict[str, Any]) -> str | None:
    name, tokens = shard.get("name"), shard.get("tokens")
    if not isinstance(name, str) or "/" in name or not isinstance(tokens, int):
        return "the index does not say its name and tokens"
    try:
        size = (folder / name).stat().st_size
        if size == tokens * BYTES_PER_TOKEN:
            return None
        return content_fault(folder / name) or f"{size} bytes, but {tokens} tokens are {tokens * BYTES_PER_TOKEN} bytes"
    except OSError as fault:
        return str(fault.strerror)


def _check_corpus(resolution: Resolution, split: Split, section: DataSection) -> list[Path]:
    """The token file of a Zrodlo corpus (its tokenizer may serve several roles), and faults when it has not the size that corpus.json says."""
    tree, path = resolution.tree, ("data", split.value, "corpus")
    folder = resolution.absolute(section.corpus or "")
    try:
        described = json.loads((folder / "corpus.json").read_bytes())
        tokens = described["tokens"] if isinstance(described, dict) else None
        size, pointer = (folder / "tokens.bin").stat().st_size, content_fault(folder / "tokens.bin")
    except (OSError, ValueError, KeyError, RecursionError) as fault:
        reason = getattr(fault, "strerror", None) or (f"no {fault}" if isinstance(fault, KeyError) else str(fault))
        named = getattr(fault, "filename", None) or folder / "corpus.json"
        tree.fault(path, f"{named} can't be read: {reason}", "name a directory that `fleetd-trainer corpus build` has made, relative to the plan")
        return []
    if not isinstance(tokens, int) or size != tokens * CORPUS_TOKEN_BYTES:
        told = pointer or f"{size} bytes, but corpus.json says {tokens} tokens of {CORPUS_TOKEN_BYTES} bytes"
        tree.fault(path, f"{folder / 'tokens.bin'}: {told}",
                   "copy the corpus again, or build it anew")
        return []
    return [folder / "tokens.bin"]


def _check_files(resolution: Resolution, split: Split, section: DataSection) -> list[Path]:
    tree, path = resolution.tree, ("data", split.value)
    folder = resolution.absolute(section.path or "")
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        tree.fault((*path, "path"), f"{folder} {what}", "name an existing directory, relative to the plan; `include` picks files in it")
        return []
    found = listed_files(data_role(resolution, split, section))
    if not found:
        tree.fault(
            (*path, "include") if section.include else (*path, "path"), f"no file below {folder} matches {section.include or ['*']}",
            "check the patterns, such as ['*.jsonl']"
        )
    if len(found) > FILES_MAX:
        tree.fault((*path, "path"), f"{len(found)} files are over the limit of {FILES_MAX}", "pack them into fewer, larger files")
    return found


def _check_apart(resolution: Resolution, files: dict[Split, set[tuple[int, int]]]) -> None:
    """No file serves two roles: neither by its path nor by a link to it."""
    splits = list(files)
    for index, first in enumerate(splits):
        for second in splits[index + 1:]:
            if not files[first] & files[second]:
                continue
            reserved = next((split for split in (second, first) if split in RESERVED_SPLITS), None)
            other = first if reserved is second else second
            if reserved is None:
                what = f"{second} reads the same files as {first}: a model would be judged on what it was trained with"
                resolution.tree.fault(("data", second.value), what, "give each role its own files")
            else:
                what = f"{reserved} is reserved until the freeze, but {other} reads the same files"
                resolution.tree.fault(("data", reserved.value), what, "give each role its own files")
