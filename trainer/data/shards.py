"""zxell token shards: uint16 tokens mapped from disk, every promise of their index checked before the first step.

    shards_index.json   tokenizer, dtype, shards: name split tokens docs sha256 langs{family: tokens}
    train_000.bin       headerless little-endian uint16; token 2 ends each document; no other separator
    train_000.bin.json  the shard's entry of the index once more
    val_000.langs.u8    one byte a document: its family (0 en, 1 de, 2 fr, 3 ja); with scored splits only

A directory may hold the files of one split only (a role, as it is staged): what is asked for is verified, nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.errors import DataDamaged
from policies.manifest import FileEntry, directory_digest
from trainer.config import DataSettings
from trainer.files import JsonFault, folder_entries, read_json
from trainer.formats.zrodlo_corpus import is_zrodlo_corpus, open_zrodlo_corpus

INDEX_NAME = "shards_index.json"
FORMAT_ZXELL, FORMAT_ZRODLO = "zxell", "zrodlo"
END_OF_SEQUENCE = 2
FAMILIES = ("en", "de", "fr", "ja")
FAMILY_UNKNOWN = "all"
TOKEN_BYTES = 2
SHARDS_MAX = 100_000
CHUNK_TOKENS = 256 * 1024
"""A piece that stays in the cache while it is hashed, bounded and searched."""

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One verified shard. `families` holds one index into FAMILIES a document, None where the split has no such file."""

    name: str
    tokens: Tokens
    sha256: str
    document_ends: npt.NDArray[np.int64]
    families: npt.NDArray[np.uint8] | None

    @property
    def stem(self) -> str:
        return self.name.removesuffix(".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """All shards of one split, in the order of their names. `digest` names the whole directory, as staged."""

    folder: Path
    split: str
    digest: str
    vocabulary: int
    tokenizer: Path | None
    shards: tuple[Shard, ...]
    end_of_sequence: int = END_OF_SEQUENCE

    @property
    def token_count(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    @property
    def document_count(self) -> int:
        return sum(len(shard.document_ends) for shard in self.shards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document, its end-of-sequence token included. `tokens` is a view of the mapped shard."""

    id: str
    family: str
    tokens: Tokens
    end_of_sequence: int = END_OF_SEQUENCE


def open_corpus(
    folder: Path, split: str, *, digest: str | None = None, vocabulary: int | None = None, data_format: str | None = None,
) -> Corpus:
    """The verified shards of one split. DataDamaged names the file, and the offset where there is one.

    `digest` is what the directory has to be; `vocabulary` the number of token ids that the model knows (the tokenizer beside
    the shards may know fewer: the smaller one counts). A Zrodlo corpus is one split of any name; `data_format` insists on one.
    """
    found = FORMAT_ZRODLO if is_zrodlo_corpus(folder) and not (folder / INDEX_NAME).exists() else FORMAT_ZXELL
    if data_format not in (None, found):
        raise _damaged(folder, f"the task says format {data_format}, it looks like {found}", fix="correct `format` of this data in the task")
    if found == FORMAT_ZRODLO:
        return _open_zrodlo(folder, split, digest, vocabulary)
    index = read_index(folder)
    entries = sorted((entry for entry in index["shards"] if entry.get("split") == split), key=lambda entry: str(entry.get("name")))
    if not entries:
        splits = ", ".join(sorted({str(entry.get("split")) for entry in index["shards"]})) or "none"
        raise _damaged(folder / INDEX_NAME, f"it has no shard of split {split!r}, only: {splits}", fix="name one of these splits in the plan")
    tokenizer = tokenizer_file(folder, index)
    known = min(size for size in (vocabulary, vocabulary_of(tokenizer), 2**16) if size is not None)
    shards = tuple(open_shard(folder, checked_entry(folder, entry), known) for entry in entries)
    return Corpus(folder=folder, split=split, digest=_measure(folder, digest, shards), vocabulary=known, tokenizer=tokenizer, shards=shards)


def open_role(role: DataSettings, *, vocabulary: int | None = None) -> Corpus:
    """The corpus that a task names for one of its roles, as `open_corpus`."""
    return open_corpus(Path(role.path), role.split, digest=role.digest, vocabulary=vocabulary, data_format=role.format)


def documents(corpus: Corpus, tokens_max: int | None = None) -> Iterator[Document]:
    """Every document in order, cut to its first `tokens_max` tokens."""
    for shard in corpus.shards:
        start = 0
        for number, end in enumerate(shard.document_ends.tolist()):
            family = FAMILY_UNKNOWN if shard.families is None else FAMILIES[shard.families[number]]
            length = end + 1 - start if tokens_max is None else min(end + 1 - start, tokens_max)
            yield Document(id=f"{shard.stem}:{number}", family=family, tokens=shard.tokens[start:start + length],
                           end_of_sequence=corpus.end_of_sequence)
            start = end + 1


def splits_in(folder: Path) -> tuple[str, ...]:
    """The splits of the index whose shards lie here, in order of first appearance."""
    entries = read_index(folder)["shards"]
    return tuple(dict.fromkeys(str(entry.get("split")) for entry in entries if os.path.isfile(folder / str(entry.get("name")))))


def read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_NAME
    try:
        index = read_json(path)
    except FileNotFoundError as fault:
        raise _damaged(path, "the file is missing, so this is no directory of token shards") from fault
    except (OSError, JsonFault) as fault:
        raise _damaged(path, str(fault)) from fault
    if not isinstance(index, dict) or not isinstance(index.get("shards"), list) or not all(isinstance(entry, dict) for entry in index["shards"]):
        raise _damaged(path, "it holds no list of shards")
    if index.get("dtype") != "uint16":
        raise _damaged(path, f"dtype is {index.get('dtype')!r}, only uint16 shards can be read")
    if len(index["shards"]) > SHARDS_MAX:
        raise _damaged(path, f"{len(index['shards'])} shards are over the limit of {SHARDS_MAX}")
    return index


def checked_entry(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """The shard's entry, once its side file says the same."""
    name = entry.get("name")
    if not isinstance(name, str) or not name.endswith(".bin") or "/" in name or name.startswith("."):
        raise _damaged(folder / INDEX_NAME, f"a shard is named {name!r}, which is no name of a shard file")
    for key in ("tokens", "docs"):
        if type(entry.get(key)) is not int or entry[key] < 0:
            raise _damaged(folder / INDEX_NAME, f"{name} has {key} {entry.get(key)!r}, a count is needed")
    if entry.get("langs") is not None and not isinstance(entry["langs"], dict):
        raise _damaged(folder / INDEX_NAME, f"{name} has langs {str(entry['langs'])[:40]!r}, token counts by language are needed")
    side_path = folder / f"{name}.json"
    try:
        side = read_json(side_path)
    except FileNotFoundError as fault:
        raise _damaged(side_path, "the file is missing") from fault
    except (OSError, JsonFault) as fault:
        raise _damaged(side_path, str(fault)) from fault
    for key in ("name", "split", "tokens", "docs", "sha256", "langs"):
        if not isinstance(side, dict) or side.get(key) != entry.get(key):
            found = side.get(key) if isinstance(side, dict) else side
            raise _damaged(side_path, f"its {key} is {found!r}, {INDEX_NAME} says {entry.get(key)!r}")
    return entry


def open_shard(folder: Path, entry: dict[str, Any], vocabulary: int) -> Shard:
    path = folder / str(entry["name"])
    try:
        size, is_link = os.stat(path, follow_symlinks=False).st_size, path.is_symlink()
    except FileNotFoundError as fault:
        raise _damaged(path, f"the file is missing; {INDEX_NAME} lists it") from fault
    if is_link or size != TOKEN_BYTES * entry["tokens"]:
        raise _damaged(path, "it is a link" if is_link else f"it has {size} bytes, {entry['tokens']} tokens need {TOKEN_BYTES * entry['tokens']}")
    if size == 0:
        raise _damaged(path, "it holds no token")
    tokens = np.memmap(path, dtype="<u2", mode="r").view(np.ndarray)
    sha256, ends = _scan(path, tokens, vocabulary)
    if sha256 != entry.get("sha256"):
        raise _damaged(path, f"its sha256 is {sha256}, {INDEX_NAME} says {entry.get('sha256')}")
    if tokens[-1] != END_OF_SEQUENCE:
        raise _damaged(path, f"its last token, at offset {size - TOKEN_BYTES}, is {int(tokens[-1])}; {END_OF_SEQUENCE} ends every document")
    if len(ends) != entry["docs"]:
        raise _damaged(path, f"it holds {len(ends)} end-of-sequence tokens, {INDEX_NAME} says {entry['docs']} documents")
    families = _families(folder, entry, ends)
    return Shard(name=str(entry["name"]), tokens=tokens, sha256=sha256, document_ends=ends, families=families)


def _scan(path: Path, tokens: Tokens, vocabulary: int) -> tuple[str, npt.NDArray[np.int64]]:
    """SHA-256 and the places of all end-of-sequence tokens, in one pass over the file."""
    digest, ends = hashlib.sha256(), []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start:start + CHUNK_TOKENS]
        digest.update(chunk.data)
        if int(chunk.max()) >= vocabulary:
            place = start + int(np.argmax(chunk >= vocabulary))
            raise _damaged(path, f"token {int(tokens[place])} at offset {place * TOKEN_BYTES} is beyond the vocabulary of {vocabulary}")
        ends.append(np.flatnonzero(chunk == END_OF_SEQUENCE).astype(np.int64) + start)
    return digest.hexdigest(), np.concatenate(ends)


def _families(folder: Path, entry: dict[str, Any], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8] | None:
    """One byte a document, checked against the token counts by family that the index gives."""
    path = folder / f"{str(entry['name']).removesuffix('.bin')}.langs.u8"
    if not os.path.isfile(path):
        return None
    families = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if len(families) != len(ends):
        raise _damaged(path, f"it has {len(families)} bytes, one for each of {len(ends)} documents is needed")
    if len(families) and int(families.max()) >= len(FAMILIES):
        place = int(np.argmax(families >= len(FAMILIES)))
        raise _damaged(path, f"byte {int(families[place])} at offset {place} names no language; 0 to {len(FAMILIES) - 1} are known")
    lengths = np.diff(ends, prepend=-1)
    told = entry.get("langs") or {}
    for number, family in enumerate(FAMILIES):
        counted = int(lengths[families == number].sum())
        if family in told and told[family] != counted:
            raise _damaged(path, f"its documents give {counted} tokens of {family}, {INDEX_NAME} says {told[family]}")
    return families


def tokenizer_file(folder: Path, index: dict[str, Any]) -> Path | None:
    name = index.get("tokenizer")
    if not isinstance(name, str) or "/" in name or name in ("", ".", ".."):
        return None
    path = folder / name
    return path if os.path.isfile(path) and not os.path.islink(path) else None  # a name may be longer than any file's


def vocabulary_of(tokenizer: Path | None) -> int | None:
    """The size of the vocabulary of a SentencePiece model, None when there is no such file."""
    if tokenizer is None or tokenizer.suffix != ".model":
        return None
    import sentencepiece

    try:
        return int(sentencepiece.SentencePieceProcessor(model_file=str(tokenizer)).get_piece_size())
    except (OSError, RuntimeError) as fault:
        raise _damaged(tokenizer, f"it is no SentencePiece model: {fault}") from fault


def _measure(folder: Path, expected: str | None, shards: tuple[Shard, ...]) -> str:
    """The digest of the whole directory; `shards` were hashed when they were opened. DataDamaged unless it is the expected one."""
    hashed = {shard.name: FileEntry(path=shard.name, bytes=shard.tokens.nbytes, sha256=shard.sha256) for shard in shards}
    try:
        measured = directory_digest(folder_entries(folder, hashed))
    except OSError as fault:
        raise _damaged(folder, str(fault)) from fault
    if expected is not None and measured != expected:
        raise _damaged(folder, f"its digest is {measured}, the task says {expected}")
    return measured


def _open_zrodlo(folder: Path, split: str, digest: str | None, vocabulary: int | None) -> Corpus:
    """A Zrodlo corpus as a corpus of one shard. Its documents have no language."""
    found = open_zrodlo_corpus(folder, vocabulary=vocabulary)
    shard = Shard(name="tokens.bin", tokens=found.tokens, sha256=found.described["tokens_sha256"], document_ends=found.document_ends, families=None)
    known = found.vocabulary if vocabulary is None else min(found.vocabulary, vocabulary)
    return Corpus(folder=folder, split=split, digest=_measure(folder, digest, (shard,)), vocabulary=known, tokenizer=found.tokenizer, shards=(shard,),
                  end_of_sequence=found.end_of_sequence)


def _damaged(path: Path, what: str, *, fix: str = "") -> DataDamaged:
    folder = path if os.path.isdir(path) else path.parent
    return DataDamaged("the training data can't be used", where=str(path), what=what,
                       fix=fix or f"restore the file from its source, then: fleetd-trainer shards verify {folder}")
