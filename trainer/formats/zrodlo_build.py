"""From text to a Zrodlo corpus: files and JSON Lines through a tokenizer.json, one end-of-sequence token after every document.

A plain file is one document; of a `.jsonl` file each line is one, its text under a key. Documents keep the order in which they
are named. The tokenizer's own ideas of cutting, padding and framing a text are switched off: a corpus holds every token of it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from policies.errors import DataDamaged, RequestRefused
from trainer.files import LFS_POINTER, JsonFault, dumps, loads, read_json
from trainer.formats.new_directory import new_directory
from trainer.formats.zrodlo_corpus import CORPUS_NAME, SCHEMA, TOKENIZER_NAME, TOKENS_NAME

JSON_LINES = (".jsonl", ".ndjson")
TEXT_FILES = (".txt", ".md", *JSON_LINES)
DOCUMENT_BYTES_MAX = 256 * 1024 * 1024
BATCH_DOCUMENTS = 256
BATCH_BYTES = 4 * 1024 * 1024
KNOWN_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceText:
    """One document: where it stands, and its text."""

    file: str
    line: int | None
    text: str

    @property
    def where(self) -> str:
        return self.file if self.line is None else f"{self.file}:{self.line}"


def build_corpus(
    sources: Sequence[Path], tokenizer_path: Path, out: Path, *, end_of_sequence: str | None = None, text_key: str = "text",
) -> dict[str, Any]:
    """Write a new corpus directory and return its corpus.json. Nothing is left of it when a document can't be taken."""
    tokenizer, data = load_tokenizer(tokenizer_path)
    end, end_text = _end_token(tokenizer, tokenizer_path, end_of_sequence)
    listed: list[dict[str, Any]] = []
    digest, count = hashlib.sha256(), 0
    with new_directory(out) as folder:
        with open(folder / TOKENS_NAME, "xb") as file:
            for batch in _batches(read_sources(sources, text_key)):
                encoded = tokenizer.encode_batch([document.text for document in batch], add_special_tokens=False)
                for document, tokens in zip(batch, encoded, strict=True):
                    block = _with_end(document, tokens.ids, end, end_text)
                    file.write(block)
                    digest.update(block)
                    count += len(block) // 4
                    listed.append({"file": document.file} if document.line is None else {"file": document.file, "line": document.line})
        if not listed:
            raise RequestRefused("there is no corpus to build", where=", ".join(map(str, sources)), what="these sources hold no document",
                                 fix=f"name files, or directories of {', '.join(TEXT_FILES)}")
        described = {
            "schema": SCHEMA, "sources": listed, "tokenizer_sha256": hashlib.sha256(data).hexdigest(), "end_of_sequence": end,
            "vocabulary": _vocabulary(tokenizer), "documents": len(listed), "tokens": count, "tokens_sha256": digest.hexdigest(),
        }
        (folder / TOKENIZER_NAME).write_bytes(data)
        (folder / CORPUS_NAME).write_bytes(dumps(described))
    return described


def read_sources(sources: Iterable[Path], text_key: str) -> Iterator[SourceText]:
    """Every document of the sources, in order; of a directory, its text files by name. DataDamaged names file, line and offset."""
    for path in _files(sources):
        if path.suffix in JSON_LINES:
            yield from _json_lines(path, text_key)
        else:
            yield SourceText(file=path.as_posix(), line=None, text=_text(path, _read_bounded(path)))


def load_tokenizer(path: Path) -> tuple[Any, bytes]:
    """The tokenizer of a tokenizer.json, and the bytes of the file. DataDamaged when it is none."""
    try:
        body = read_json(path)  # strict first: a key twice or a pointer is told better here than by the library
        data = path.read_bytes()
    except (OSError, JsonFault) as fault:
        raise _bad_tokenizer(path, str(fault)) from fault
    if not isinstance(body, dict) or not isinstance(body.get("model"), dict):
        raise _bad_tokenizer(path, "it has no model, so it is no tokenizer.json")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(data.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    except Exception as fault:  # the library raises nothing more precise
        raise _bad_tokenizer(path, f"the tokenizers library does not read it: {fault}") from fault
    return tokenizer, data


def _end_token(tokenizer: Any, path: Path, asked: str | None) -> tuple[int, str]:
    """Id and text of the end-of-sequence token: the one asked for, else the only one of the usual names."""
    found = {text: tokenizer.token_to_id(text) for text in ([asked] if asked is not None else KNOWN_ENDS)}
    known = {text: number for text, number in found.items() if number is not None}
    if len(known) == 1:
        text, number = next(iter(known.items()))
        return int(number), text
    told = f"it has no token {asked!r}" if asked is not None else f"of the usual end-of-sequence tokens it has {', '.join(known) or 'none'}"
    raise RequestRefused("the end of a document is not known", where=str(path), what=told, fix="say which token ends a document: --eos TOKEN")


def _with_end(document: SourceText, tokens: list[int], end: int, end_text: str) -> bytes:
    if end in tokens:
        raise DataDamaged("the document can't be taken", where=document.where,
                          what=f"its token {tokens.index(end)} is the end-of-sequence token {end_text!r}, so the text would be two documents",
                          fix=f"remove {end_text!r} from the text, or choose another token with --eos")
    return np.array([*tokens, end], dtype="<u4").tobytes()


def _vocabulary(tokenizer: Any) -> int:
    return 1 + max(int(number) for number in tokenizer.get_vocab(with_added_tokens=True).values())


def _batches(documents: Iterator[SourceText]) -> Iterator[list[SourceText]]:
    """Groups that keep the library's threads busy and memory small."""
    while group := list(islice(_until_bytes(documents), BATCH_DOCUMENTS)):
        yield group


def _until_bytes(documents: Iterator[SourceText]) -> Iterator[SourceText]:
    held = 0
    for document in documents:
        yield document
        held += len(document.text)
        if held > BATCH_BYTES:
            return


def _files(sources: Iterable[Path]) -> Iterator[Path]:
    for source in sources:
        if source.is_dir():
            yield from sorted(path for path in source.rglob("*") if path.suffix in TEXT_FILES and path.is_file())
        else:
            yield source


def _json_lines(path: Path, text_key: str) -> Iterator[SourceText]:
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(DOCUMENT_BYTES_MAX + 1):
                number += 1
                if len(line) > DOCUMENT_BYTES_MAX:
                    raise _bad_source(f"{path}:{number}", f"the line is over {DOCUMENT_BYTES_MAX} bytes")
                if line.strip():
                    yield SourceText(file=path.as_posix(), line=number, text=_line_text(f"{path}:{number}", line, text_key))
    except OSError as fault:
        raise _bad_source(str(path), str(fault)) from fault


def _line_text(where: str, line: bytes, text_key: str) -> str:
    try:
        body = loads(line)
    except JsonFault as fault:
        raise _bad_source(where, str(fault)) from fault
    text = body.get(text_key) if isinstance(body, dict) else None
    if not isinstance(text, str):
        raise _bad_source(where, f"it has no text under {text_key!r}")
    if not _is_encodable(text):
        raise _bad_source(where, "its text holds half of a surrogate pair, which is no character")
    return text


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_bounded(path: Path) -> bytes:
    try:
        if os.stat(path).st_size > DOCUMENT_BYTES_MAX:
            raise _bad_source(str(path), f"it is over {DOCUMENT_BYTES_MAX} bytes, and a file is one document")
        return path.read_bytes()
    except OSError as fault:
        raise _bad_source(str(path), str(fault)) from fault


def _text(path: Path, data: bytes) -> str:
    if data.startswith(LFS_POINTER):
        raise _bad_source(str(path), "it is a Git LFS pointer, not the file itself: git lfs pull")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise _bad_source(str(path), f"byte {data[fault.start]} at offset {fault.start} is no UTF-8") from fault


def _bad_source(where: str, what: str) -> DataDamaged:
    return DataDamaged("the document can't be taken", where=where, what=what, fix="correct it, or leave it out of the sources")


def _bad_tokenizer(path: Path, what: str) -> DataDamaged:
    return DataDamaged("the tokenizer can't be used", where=str(path), what=what, fix="name a tokenizer.json as transformers saves it")
