"""Zrodlo corpora, read in place: one token file mapped from disk, and a description that has to be true.

    tokens.bin       headerless little-endian uint32; one end-of-sequence token after every document, and nowhere else
    corpus.json      schema, sources (a document each: file, or file and line), tokenizer_sha256, end_of_sequence, vocabulary,
                     documents, tokens, tokens_sha256; the names are our reading (docs/formats.md), unknown keys are kept
    tokenizer.json   optional: the tokenizer, so that a checkpoint trained on this can be a whole model directory

To a training it is a `Corpus` like any other, with one shard.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from policies.errors import DataDamaged
from trainer.files import LFS_POINTER, JsonFault, read_json

TOKENS_NAME, CORPUS_NAME, TOKENIZER_NAME = "tokens.bin", "corpus.json", "tokenizer.json"
SCHEMA = 1
TOKEN_BYTES = 4
CHUNK_TOKENS = 4 * 1024 * 1024
VOCABULARY_MAX = 2**24
COUNTS = ("documents", "tokens")
DIGESTS = ("tokens_sha256", "tokenizer_sha256")
HEX = frozenset("0123456789abcdef")

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZrodloCorpus:
    """A verified corpus. `tokens` is mapped, `document_ends` are the places of the end-of-sequence tokens."""

    folder: Path
    described: dict[str, Any]
    tokens: Tokens
    document_ends: npt.NDArray[np.int64]
    tokenizer: Path | None

    @property
    def end_of_sequence(self) -> int:
        return int(self.described["end_of_sequence"])

    @property
    def vocabulary(self) -> int:
        return int(self.described["vocabulary"])


def is_zrodlo_corpus(folder: Path) -> bool:
    return os.path.lexists(folder / CORPUS_NAME)


def open_zrodlo_corpus(folder: Path, *, vocabulary: int | None = None) -> ZrodloCorpus:
    """The corpus of a directory, every promise of corpus.json checked. DataDamaged names the file, and the offset where there is one.

    `vocabulary` is the number of token ids that the model knows; the corpus may know fewer or more, but use no more.
    """
    described = read_description(folder / CORPUS_NAME)
    known = min(described["vocabulary"], vocabulary if vocabulary is not None else VOCABULARY_MAX)
    tokens, ends = _open_tokens(folder / TOKENS_NAME, described, known)
    return ZrodloCorpus(folder=folder, described=described, tokens=tokens, document_ends=ends, tokenizer=_tokenizer(folder, described))


def read_description(path: Path) -> dict[str, Any]:
    """corpus.json, its fields checked one by one and against each other; what we do not know is kept."""
    try:
        body = read_json(path)
    except FileNotFoundError as fault:
        raise _damaged(path, "the file is missing, so this is no Zrodlo corpus") from fault
    except (OSError, JsonFault) as fault:
        raise _damaged(path, str(fault)) from fault
    if not isinstance(body, dict) or body.get("schema") != SCHEMA or type(body["schema"]) is not int:
        told = body.get("schema") if isinstance(body, dict) else type(body).__name__
        raise _damaged(path, f"its schema is {str(told)[:40]!r}, this version reads {SCHEMA}")
    for key in COUNTS:
        if type(body.get(key)) is not int or not 0 < body[key] < 2**48:
            raise _damaged(path, f"{key} is {str(body.get(key))[:40]!r}, a count above 0 is needed")
    for key in DIGESTS:
        if not isinstance(body.get(key), str) or len(body[key]) != 64 or not set(body[key]) <= HEX:
            raise _damaged(path, f"{key} is {str(body.get(key))[:80]!r}, 64 lower-case hexadecimal digits are needed")
    if type(body.get("vocabulary")) is not int or not 0 < body["vocabulary"] <= VOCABULARY_MAX:
        raise _damaged(path, f"vocabulary is {str(body.get('vocabulary'))[:40]!r}, a count of 1 to {VOCABULARY_MAX} is needed")
    if type(body.get("end_of_sequence")) is not int or not 0 <= body["end_of_sequence"] < body["vocabulary"]:
        raise _damaged(path, f"end_of_sequence is {str(body.get('end_of_sequence'))[:40]!r}, a token below {body['vocabulary']} is needed")
    _check_sources(path, body)
    return body


def _check_sources(path: Path, body: dict[str, Any]) -> None:
    sources = body.get("sources")
    if not isinstance(sources, list):
        raise _damaged(path, "sources is no list of documents")
    for number, source in enumerate(sources):
        line = source.get("line", 1) if isinstance(source, dict) else None
        if not isinstance(source, dict) or not isinstance(source.get("file"), str) or type(line) is not int or line < 1:
            raise _damaged(path, f"source {number} is {str(source)[:80]}, a file, or a file and a line from 1 on, is needed")
    if len(sources) != body["documents"]:
        raise _damaged(path, f"it names {len(sources)} sources for {body['documents']} documents")


def _open_tokens(path: Path, described: dict[str, Any], vocabulary: int) -> tuple[Tokens, npt.NDArray[np.int64]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            size, start = os.fstat(descriptor).st_size, file.read(len(LFS_POINTER))
            if start == LFS_POINTER:
                raise _damaged(path, "it is a Git LFS pointer, not the file itself: git lfs pull")
            if size != TOKEN_BYTES * described["tokens"]:
                raise _damaged(path, f"it has {size} bytes, {described['tokens']} tokens need {TOKEN_BYTES * described['tokens']}")
            tokens = np.memmap(file, dtype="<u4", mode="r").view(np.ndarray)
    except OSError as fault:
        raise _damaged(path, "the file is missing" if isinstance(fault, FileNotFoundError) else str(fault)) from fault
    sha256, ends = _scan(path, tokens, described["end_of_sequence"], vocabulary)
    if sha256 != described["tokens_sha256"]:
        raise _damaged(path, f"its sha256 is {sha256}, {CORPUS_NAME} says {described['tokens_sha256']}")
    if int(tokens[-1]) != described["end_of_sequence"]:
        raise _damaged(path, f"its last token, at offset {size - TOKEN_BYTES}, is {int(tokens[-1])}; {described['end_of_sequence']} ends a document")
    if len(ends) != described["documents"]:
        raise _damaged(path, f"it holds {len(ends)} end-of-sequence tokens, {CORPUS_NAME} says {described['documents']} documents")
    return tokens, ends


def _scan(path: Path, tokens: Tokens, end_of_sequence: int, vocabulary: int) -> tuple[str, npt.NDArray[np.int64]]:
    """SHA-256 and the places of all end-of-sequence tokens, in one pass over the file."""
    digest, ends = hashlib.sha256(), []
    for start in range(0, len(tokens), CHUNK_TOKENS):
        chunk = tokens[start:start + CHUNK_TOKENS]
        digest.update(chunk.data)
        if int(chunk.max()) >= vocabulary:
            place = start + int(np.argmax(chunk >= vocabulary))
            raise _damaged(path, f"token {int(tokens[place])} at offset {place * TOKEN_BYTES} is beyond the vocabulary of {vocabulary}")
        ends.append(np.flatnonzero(chunk == end_of_sequence).astype(np.int64) + start)
    return digest.hexdigest(), np.concatenate(ends)


def _tokenizer(folder: Path, described: dict[str, Any]) -> Path | None:
    """The tokenizer beside the tokens, None when there is none. Another one than the corpus was made with is refused."""
    path = folder / TOKENIZER_NAME
    if not os.path.lexists(path):
        return None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise _damaged(path, str(fault)) from fault
    if found != described["tokenizer_sha256"]:
        raise _damaged(path, f"its sha256 is {found}, {CORPUS_NAME} says {described['tokenizer_sha256']}")
    return path


def _damaged(path: Path, what: str) -> DataDamaged:
    return DataDamaged("the corpus can't be used", where=str(path), what=what,
                       fix=f"restore the file from its source, or build the corpus again, then: fleetd-trainer corpus inspect {path.parent}")
