"""Zrodlo corpora as the coordinator sees them: is the token file what corpus.json says, and which rows must a validation score?

Format: `tokens.bin` (little-endian uint32, one end-of-sequence token after each document and nowhere else), `corpus.json` beside it.
Documents have no language: their family is `all`, their ids are counted as the trainer counts them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleetd.coordinator.shards import RegisteredRow
from policies.errors import DataDamaged, RequestRefused
from policies.manifest import FileEntry

CORPUS_NAME, TOKENS_NAME = "corpus.json", "tokens.bin"
DESCRIPTION_BYTES_MAX = 512 * 1024 * 1024
TOKEN_BYTES = 4
FAMILY = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """What corpus.json says of its token file."""

    tokens: int
    documents: int
    end_of_sequence: int
    tokens_sha256: str


def read_corpus(folder: Path) -> CorpusFacts:
    """DataDamaged names the field of corpus.json that is missing or no count."""
    path = folder / CORPUS_NAME
    try:
        with open(path, "rb") as file:
            body = json.loads(file.read(DESCRIPTION_BYTES_MAX))
    except (OSError, ValueError, RecursionError) as fault:
        raise _damaged(path, f"it can't be read: {fault}") from fault
    for key, kind in (("tokens", int), ("documents", int), ("end_of_sequence", int), ("tokens_sha256", str)):
        if not isinstance(body, dict) or type(body.get(key)) is not kind:
            raise _damaged(path, f"{key} is missing, or no {kind.__name__}")
    return CorpusFacts(tokens=body["tokens"], documents=body["documents"], end_of_sequence=body["end_of_sequence"],
                       tokens_sha256=body["tokens_sha256"])


def check_corpus(folder: Path, corpus: CorpusFacts, entries: tuple[FileEntry, ...]) -> None:
    """DataDamaged unless the token file has the size and SHA-256 of corpus.json."""
    found = next((entry for entry in entries if entry.path == TOKENS_NAME), None)
    if found is None:
        raise _damaged(folder / TOKENS_NAME, "it is not there")
    if found.bytes != corpus.tokens * TOKEN_BYTES:
        raise _damaged(folder / TOKENS_NAME, f"{found.bytes} bytes, {corpus.tokens} tokens need {corpus.tokens * TOKEN_BYTES}")
    if found.sha256 != corpus.tokens_sha256:
        raise _damaged(folder / TOKENS_NAME, f"its SHA-256 is {found.sha256}, {CORPUS_NAME} says {corpus.tokens_sha256}")


def check_corpus_vocabulary(folder: Path, vocabularies: Mapping[str, int]) -> None:
    """RequestRefused unless every token id is known to every model; `vocabularies` are the vocab_size of each candidate by its name."""
    tokens = np.fromfile(folder / TOKENS_NAME, dtype="<u4")
    largest = int(tokens.max()) if len(tokens) else 0
    small = ", ".join(sorted(name for name, size in vocabularies.items() if size <= largest))
    if small:
        raise RequestRefused(
            "the data has tokens that the model does not know", where=str(folder / TOKENS_NAME),
            what=f"token {largest} at offset {int(tokens.argmax()) * TOKEN_BYTES} is beyond the vocabulary of {small}",
            fix=f"set vocab_size in the model's config to that of the data's tokenizer (more than {largest}), then launch again",
        )


def corpus_rows(folder: Path, corpus: CorpusFacts, tokens_per_document_max: int | None) -> tuple[RegisteredRow, ...]:
    """Every document in order. DataDamaged when ends and documents do not agree."""
    tokens = np.fromfile(folder / TOKENS_NAME, dtype="<u4")
    ends = np.flatnonzero(tokens == corpus.end_of_sequence)
    if len(ends) != corpus.documents or not len(ends) or ends[-1] != len(tokens) - 1:
        raise _damaged(folder / TOKENS_NAME, f"{len(ends)} end-of-sequence tokens for {corpus.documents} documents, each must end with one")
    lengths = np.diff(ends, prepend=-1).tolist()
    limit = tokens_per_document_max or max(lengths)
    return tuple(RegisteredRow(id=f"tokens:{number}", family=FAMILY, tokens=min(length, limit)) for number, length in enumerate(lengths))


def _damaged(path: Path, what: str) -> DataDamaged:
    return DataDamaged("the corpus can't be used", where=str(path), what=what,
                       fix=f"restore the file from its source, or build the corpus again: fleetd-trainer corpus inspect {path.parent}")
