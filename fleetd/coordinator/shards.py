"""Token shards as the coordinator sees them: which files a split has, whether they are whole, and the rows a validation must score.

Format: `shards_index.json`, `<split>_NNN.bin` (little-endian uint16, one end-of-sequence token after each document) with
`.bin.json` beside it, and for scored splits `.langs.u8` with one byte a document.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.errors import DataDamaged, ExplainedError, RequestRefused
from policies.manifest import FileEntry

INDEX_NAME = "shards_index.json"
INDEX_BYTES_MAX = 64 * 1024 * 1024
TOKEN_BYTES = 2
TOKEN_VALUES = 2**16
END_OF_SEQUENCE = 2
LANGUAGES = ("en", "de", "fr", "ja")
SIDE_FIELDS = ("name", "split", "tokens", "docs", "sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One .bin and what its side file says of it; `langs` are token totals by language."""

    name: str
    tokens: int
    docs: int
    sha256: str
    langs: dict[str, int]

    @property
    def stem(self) -> str:
        return self.name.removesuffix(".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSet:
    """The shards of one split, and every file that the split needs, relative to the folder."""

    split: str
    shards: tuple[Shard, ...]
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredRow:
    """A document that a validation must score: exactly this id, family and number of tokens."""

    id: str
    family: str
    tokens: int


def read_shard_set(folder: Path, split: str, include: tuple[str, ...], *, scored: bool) -> ShardSet:
    """The files of `split`. DataDamaged names a missing or contradicting file; RequestRefused when there is no such split."""
    index = _read_object(folder / INDEX_NAME)
    if index.get("dtype") != "uint16":
        raise _damaged(folder / INDEX_NAME, f"dtype is {index.get('dtype')!r}, uint16 is what these shards are")
    listed = index.get("shards")
    if not isinstance(listed, list) or not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in listed):
        raise _damaged(folder / INDEX_NAME, "shards is not a list of shards with names")
    names = sorted(item["name"] for item in listed if item.get("split") == split)
    if not names:
        raise RequestRefused(f"there is no split {split}", where=str(folder / INDEX_NAME), what=f"no shard of split {split!r} is listed",
                             fix=f"set shard_split to one of: {', '.join(sorted({str(item.get('split')) for item in listed}))}")
    _check_names(folder, split, names, include)
    shards = tuple(_read_shard(folder, name, next(item for item in listed if item["name"] == name)) for name in names)
    files = [INDEX_NAME, _plain_name(folder, index.get("tokenizer"))]
    for shard in shards:
        files += [shard.name, f"{shard.name}.json"]
        langs = f"{shard.stem}.langs.u8"
        if scored or os.path.exists(folder / langs):
            files.append(langs)
    return ShardSet(split=split, shards=shards, files=tuple(files))


def check_shards(folder: Path, shards: ShardSet, entries: tuple[FileEntry, ...]) -> None:
    """DataDamaged unless every .bin has the size and SHA-256 that its side file says, and every .langs.u8 one byte a document."""
    by_path = {entry.path: entry for entry in entries}
    for shard in shards.shards:
        found = by_path[shard.name]
        if found.bytes != shard.tokens * TOKEN_BYTES:
            what = f"{found.bytes} bytes, {shard.tokens} tokens need {shard.tokens * TOKEN_BYTES}: it is cut short or was written over"
            raise _damaged(folder / shard.name, what)
        if found.sha256 != shard.sha256:
            raise _damaged(folder / shard.name, f"its SHA-256 is {found.sha256}, {shard.name}.json says {shard.sha256}")
        langs = by_path.get(f"{shard.stem}.langs.u8")
        if langs is not None and langs.bytes != shard.docs:
            raise _damaged(folder / langs.path, f"{langs.bytes} bytes for {shard.docs} documents, one byte each is needed")


def check_vocabulary(folder: Path, shards: ShardSet, vocabularies: Mapping[str, int]) -> None:
    """RequestRefused unless every token id is known to every model; `vocabularies` are the vocab_size of each candidate by its name."""
    known = min(vocabularies.values(), default=TOKEN_VALUES)
    if known >= TOKEN_VALUES:
        return
    for shard in shards.shards:
        tokens = np.fromfile(folder / shard.name, dtype="<u2")
        if len(tokens) and int(tokens.max()) >= known:
            largest, offset = int(tokens.max()), int(np.argmax(tokens >= known)) * TOKEN_BYTES
            small = ", ".join(sorted(name for name, size in vocabularies.items() if size <= largest))
            raise RequestRefused(
                "the data has tokens that the model does not know", where=str(folder / shard.name),
                what=f"token {int(tokens[offset // TOKEN_BYTES])} at offset {offset} is beyond the vocabulary of {known} ({small})",
                fix=f"set vocab_size in the model's config to that of the data's tokenizer (more than {largest}), then launch again",
            )


def registered_rows(folder: Path, shards: ShardSet, tokens_per_document_max: int | None) -> tuple[RegisteredRow, ...]:
    """Every document of the split in order. DataDamaged when ends, documents, languages and totals do not agree."""
    rows: list[RegisteredRow] = []
    for shard in shards.shards:
        lengths = _document_lengths(folder / shard.name, shard.docs)
        families = _families(folder / f"{shard.stem}.langs.u8", shard.docs)
        _check_totals(folder / shard.name, shard, lengths, families)
        for number, (length, family) in enumerate(zip(lengths.tolist(), families, strict=True)):
            tokens = length if tokens_per_document_max is None else min(length, tokens_per_document_max)
            rows.append(RegisteredRow(id=f"{shard.stem}:{number}", family=family, tokens=tokens))
    return tuple(rows)


def _document_lengths(path: Path, docs: int) -> NDArray[np.int64]:
    """Tokens of each document, its end-of-sequence token counted."""
    tokens = np.fromfile(path, dtype="<u2")
    ends = np.flatnonzero(tokens == END_OF_SEQUENCE)
    if len(ends) != docs or not docs or ends[-1] != len(tokens) - 1:
        raise _damaged(path, f"{len(ends)} end-of-sequence tokens for {docs} documents, each must end with one")
    return np.diff(ends, prepend=-1)


def _families(path: Path, docs: int) -> list[str]:
    codes = np.fromfile(path, dtype=np.uint8)
    if len(codes) != docs or (docs and int(codes.max()) >= len(LANGUAGES)):
        raise _damaged(path, f"{len(codes)} bytes for {docs} documents, codes 0 to {len(LANGUAGES) - 1} are known")
    return [LANGUAGES[code] for code in codes.tolist()]


def _check_totals(path: Path, shard: Shard, lengths: NDArray[np.int64], families: list[str]) -> None:
    totals: dict[str, int] = {}
    for length, family in zip(lengths.tolist(), families, strict=True):
        totals[family] = totals.get(family, 0) + length
    said = {language: count for language, count in shard.langs.items() if count}
    if totals != said:
        raise _damaged(path, f"tokens by language are {totals}, {shard.name}.json says {said}")


def _check_names(folder: Path, split: str, names: list[str], include: tuple[str, ...]) -> None:
    """The index, the folder and `include` must mean the same shards: what is scored or trained on is never a silent subset."""
    for name in names:
        if "/" in name or not name.startswith(f"{split}_") or not name.endswith(".bin"):
            raise _damaged(folder / INDEX_NAME, f"shard {name!r} of split {split} is not named {split}_NNN.bin")
        if not any(fnmatchcase(name, pattern) for pattern in include):
            raise RequestRefused(f"include leaves out {name}", where=str(folder), what="a split is staged whole, as its index lists it",
                                 fix=f"remove include from this role, or take {name} out of {INDEX_NAME}")
    extra = sorted({path.name for path in folder.glob(f"{split}_*.bin")} - set(names))
    if extra:
        raise _damaged(folder / extra[0], f"{INDEX_NAME} does not list it")


def _read_shard(folder: Path, name: str, listed: Mapping[str, Any]) -> Shard:
    path = folder / f"{name}.json"
    if not os.path.exists(folder / name):  # False too for a name longer than any file's
        raise _damaged(folder / name, f"{INDEX_NAME} lists it, but it is not there")
    side = _read_object(path)
    for field in SIDE_FIELDS:
        if side.get(field) != listed.get(field):
            raise _damaged(path, f"{field} is {side.get(field)!r}, {INDEX_NAME} says {listed.get(field)!r}")
    tokens, docs, sha256, langs = side.get("tokens"), side.get("docs"), side.get("sha256"), side.get("langs", {})
    if not isinstance(tokens, int) or not isinstance(docs, int) or not isinstance(sha256, str) or not isinstance(langs, dict):
        raise _damaged(path, "tokens, docs, sha256 and langs are needed")
    return Shard(name=name, tokens=tokens, docs=docs, sha256=sha256, langs=langs)


def _plain_name(folder: Path, name: object) -> str:
    if not isinstance(name, str) or not name or "/" in name or name.startswith("."):
        raise _damaged(folder / INDEX_NAME, f"tokenizer is {name!r}, the name of a file beside the index is needed")
    return name


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read(INDEX_BYTES_MAX))
    except FileNotFoundError as fault:
        raise _damaged(path, "it is not there") from fault
    except (OSError, ValueError, RecursionError) as fault:
        raise _damaged(path, f"it can't be read: {fault}") from fault
    if not isinstance(value, dict):
        raise _damaged(path, "it is not a JSON object")
    return value


def _damaged(path: Path, what: str) -> ExplainedError:
    fix = f"restore {path.name} from where the data came from, then launch again"
    return DataDamaged("the data can't be used", where=str(path), what=what, fix=fix)
