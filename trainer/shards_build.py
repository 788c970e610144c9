"""Token shards out of text, as `trainer.data.shards` reads them: `fleetd-trainer shards build`.

    sources    LANG=PATH: a file of text (one article), JSON Lines (an article a line: text, lang, date), or a folder of both
    scan       in the order of the sources and of the names in them; of each language the last articles are kept for test and val
    spool      every article is encoded once into one file; nothing but offsets stays in memory
    shards     train in a shuffled order (a keyed hash of seed and article number: no library's generator is trusted with it),
               cut at article boundaries; val and test in scan order, one shard each

The same sources, tokenizer and settings give the same bytes. No clock: `created` is told, or it is SOURCE_DATE_EPOCH, or 1970.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from policies.errors import DataDamaged, PlanInvalid
from policies.facts import format_moment
from trainer.data.shards import END_OF_SEQUENCE, FAMILIES, INDEX_NAME, TOKEN_BYTES
from trainer.files import JsonFault, dumps, loads
from trainer.formats.new_directory import new_directory

SHARD_TOKENS = 50_000_000
ARTICLE_BYTES_MAX = 256 * 1024 * 1024
BATCH_ARTICLES = 256
BATCH_CHARACTERS_MAX = 16 * 1024 * 1024
SPOOL_NAME = "spool.tmp"
JSON_LINES = (".jsonl", ".ndjson")
TRAIN, VALIDATION, TEST = "train", "val", "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """`validation_articles` and `test_articles` count for each language. `created` is written into the index as it is."""

    tokenizer: Path
    shard_tokens: int = SHARD_TOKENS
    seed: int = 0
    validation_articles: int = 0
    test_articles: int = 0
    created: str | None = None
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """`where` names it in an error: its file, or file and line."""

    where: str
    language: str
    text: str
    date: str | None


@dataclass(slots=True, kw_only=True)
class _Spool:
    """All articles encoded, in scan order. Article i is `lengths[i]` tokens, its end of sequence included."""

    lengths: list[int] = field(default_factory=list)
    languages: list[int] = field(default_factory=list)
    dates: list[str | None] = field(default_factory=list)
    empty: int = 0


def build_shards(
    sources: list[str], target: Path, settings: BuildSettings, *, on_articles: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Write `target` (new) as a directory of shards; returns its index. DataDamaged names the article that can't be encoded."""
    pieces, name = _pieces(settings.tokenizer), settings.tokenizer.name
    for key, value, least in (("shard-tokens", settings.shard_tokens, 2), ("val", settings.validation_articles, 0),
                              ("test", settings.test_articles, 0), ("seed", settings.seed, 0), ("threads", settings.threads, 1)):
        if value < least:
            raise _refused(f"--{key}", f"{value} is less than {least}")
    with new_directory(target) as folder:
        with open(folder / SPOOL_NAME, "xb") as file:
            spool = _encode(read_sources(sources), pieces, file, settings, on_articles)
        if not spool.lengths:
            raise _refused(", ".join(sources), "no article in them has any text")
        splits = _split(spool, settings)
        tokens = np.memmap(folder / SPOOL_NAME, dtype="<u2", mode="r").view(np.ndarray)
        entries = [entry for split, numbers in splits.items() for entry in _write_split(folder, split, numbers, spool, tokens, settings)]
        del tokens
        (folder / SPOOL_NAME).unlink()
        shutil.copyfile(settings.tokenizer, folder / name)
        index = {
            "tokenizer": name, "dtype": "uint16", "shard_tokens": settings.shard_tokens, "seed": settings.seed, "created": _created(settings),
            "boundaries": _boundaries(spool, splits, settings), "shards": entries,
        }
        (folder / INDEX_NAME).write_bytes(dumps(index))
    return index


def read_sources(sources: list[str]) -> Iterator[Article]:
    """Every article of `LANG=PATH` sources, in their order; files of a folder by name."""
    for source in sources:
        language, separator, place = source.partition("=")
        if not separator:
            language, place = "", source
        if language and language not in FAMILIES:
            raise _refused(source, f"language {language!r} is none of {', '.join(FAMILIES)}")
        path = Path(place)
        if not path.exists():
            raise _refused(place, "there is no such file or folder")
        paths = sorted((each for each in path.rglob("*") if each.is_file()), key=lambda each: each.as_posix()) if path.is_dir() else [path]
        for each in paths:
            yield from _json_lines(each, language) if each.suffix in JSON_LINES else [_whole_file(each, language)]


def shuffled(numbers: list[int], seed: int) -> list[int]:
    """The numbers in an order that depends on them and the seed alone."""
    def key(number: int) -> bytes:
        return hashlib.blake2b(f"article {seed} {number}".encode(), digest_size=16).digest()

    return sorted(numbers, key=key)


def _whole_file(path: Path, language: str) -> Article:
    if not language:
        raise _refused(str(path), "its language is not told", fix=f"name it: en={path} (one of {', '.join(FAMILIES)})")
    if path.stat().st_size > ARTICLE_BYTES_MAX:
        raise _damaged(str(path), f"over the limit of {ARTICLE_BYTES_MAX} bytes for one article")
    return Article(where=str(path), language=language, text=_text(path.read_bytes(), str(path)), date=None)


def _json_lines(path: Path, language: str) -> Iterator[Article]:
    with open(path, "rb") as file:
        for number in itertools.count(1):
            line, where = file.readline(ARTICLE_BYTES_MAX + 1), f"{path}:{number}"
            if not line:
                return
            if len(line) > ARTICLE_BYTES_MAX:
                raise _damaged(where, f"over the limit of {ARTICLE_BYTES_MAX} bytes for one article")
            if not line.strip():
                continue
            try:
                body = loads(line)
            except JsonFault as fault:
                raise _damaged(where, str(fault)) from fault
            told = body.get("lang", language) if isinstance(body, dict) else None
            if not isinstance(body, dict) or not isinstance(body.get("text"), str):
                raise _damaged(where, "an object with a text is needed")
            if told not in FAMILIES:
                raise _damaged(where, f"lang is {told!r:.100}, one of {', '.join(FAMILIES)} is needed")
            date = body.get("date")
            yield Article(where=where, language=told, text=_text(body["text"].encode("utf-8", "surrogatepass"), where),
                          date=date if isinstance(date, str) else None)


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise _damaged(where, f"it is no UTF-8 text: {fault}") from fault


def _pieces(tokenizer: Path) -> Any:
    import sentencepiece

    try:
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
    except (OSError, RuntimeError) as fault:
        raise _refused(str(tokenizer), f"it is no SentencePiece model: {fault!s:.200}") from fault
    if pieces.eos_id() != END_OF_SEQUENCE:
        raise _refused(str(tokenizer), f"its end of sequence is id {pieces.eos_id()}, shards need {END_OF_SEQUENCE}")
    if pieces.get_piece_size() > 2 ** (8 * TOKEN_BYTES):
        raise _refused(str(tokenizer), f"its {pieces.get_piece_size()} pieces do not fit into {TOKEN_BYTES} bytes a token")
    return pieces


def _encode(articles: Iterator[Article], pieces: Any, file: BinaryIO, settings: BuildSettings, on_articles: Callable[[int], None]) -> _Spool:
    spool = _Spool()
    for group in _groups(articles):
        for article, ids in zip(group, pieces.encode([each.text for each in group], num_threads=settings.threads), strict=True):
            if not ids:
                spool.empty += 1
                continue
            if END_OF_SEQUENCE in ids:
                raise _damaged(article.where, "its text holds an end-of-sequence token, which would cut the article in two")
            if len(ids) + 1 > settings.shard_tokens:
                raise _damaged(article.where, f"it has {len(ids) + 1} tokens, a shard holds at most {settings.shard_tokens}",
                               fix="give --shard-tokens a greater number, or cut the article")
            file.write(np.array([*ids, END_OF_SEQUENCE], dtype="<u2").tobytes())
            spool.lengths.append(len(ids) + 1)
            spool.languages.append(FAMILIES.index(article.language))
            spool.dates.append(article.date)
        on_articles(len(spool.lengths))
    return spool


def _groups(articles: Iterator[Article]) -> Iterator[list[Article]]:
    """Articles in groups small enough to be encoded at once: bounded in number and in characters."""
    group: list[Article] = []
    for article in articles:
        group.append(article)
        if len(group) == BATCH_ARTICLES or sum(len(each.text) for each in group) > BATCH_CHARACTERS_MAX:
            yield group
            group = []
    if group:
        yield group


def _split(spool: _Spool, settings: BuildSettings) -> dict[str, list[int]]:
    """Article numbers by split. Of each language the last ones are test, those before them val."""
    splits: dict[str, list[int]] = {TRAIN: [], VALIDATION: [], TEST: []}
    for code, language in enumerate(FAMILIES):
        numbers = [number for number, each in enumerate(spool.languages) if each == code]
        kept = settings.validation_articles + settings.test_articles
        if numbers and len(numbers) <= kept:
            raise _refused("--val, --test", f"{language} has {len(numbers)} articles, {kept} are to be kept for val and test")
        first_test, first_val = len(numbers) - settings.test_articles, len(numbers) - kept
        splits[TRAIN] += numbers[:first_val]
        splits[VALIDATION] += numbers[first_val:first_test]
        splits[TEST] += numbers[first_test:]
    return {TRAIN: shuffled(splits[TRAIN], settings.seed), VALIDATION: sorted(splits[VALIDATION]), TEST: sorted(splits[TEST])}


def _write_split(
    folder: Path, split: str, numbers: list[int], spool: _Spool, tokens: npt.NDArray[np.uint16], settings: BuildSettings,
) -> Iterator[dict[str, Any]]:
    """Write the shards of one split with their side files; one entry of the index each."""
    ends = np.cumsum(spool.lengths)
    for order, shard in enumerate(_cut(numbers, spool, settings.shard_tokens if split == TRAIN else 2**62)):
        name, digest, totals = f"{split}_{order:03d}.bin", hashlib.sha256(), dict.fromkeys(FAMILIES, 0)
        with open(folder / name, "xb") as file:
            for number in shard:
                data = tokens[ends[number] - spool.lengths[number]:ends[number]].tobytes()
                file.write(data)
                digest.update(data)
                totals[FAMILIES[spool.languages[number]]] += spool.lengths[number]
        entry = {"name": name, "split": split, "tokens": sum(totals.values()), "docs": len(shard), "sha256": digest.hexdigest(), "langs": totals}
        (folder / f"{name}.json").write_bytes(dumps(entry))
        if split != TRAIN:
            (folder / f"{split}_{order:03d}.langs.u8").write_bytes(bytes(spool.languages[number] for number in shard))
        yield entry


def _cut(numbers: list[int], spool: _Spool, tokens_max: int) -> Iterator[list[int]]:
    shard: list[int] = []
    total = 0
    for number in numbers:
        if shard and total + spool.lengths[number] > tokens_max:
            yield shard
            shard, total = [], 0
        shard.append(number)
        total += spool.lengths[number]
    if shard:
        yield shard


def _boundaries(spool: _Spool, splits: dict[str, list[int]], settings: BuildSettings) -> dict[str, Any]:
    """What the index says of the splits: counts as they came out, dates where the sources told them."""
    languages = {}
    for code, language in enumerate(FAMILIES):
        numbers = {split: [number for number in listed if spool.languages[number] == code] for split, listed in splits.items()}
        dates = [date for number in itertools.chain(*numbers.values()) if (date := spool.dates[number]) is not None]
        languages[language] = {
            "docs": sum(len(listed) for listed in numbers.values()), "max_pub_date": max(dates, default=None),
            "test_start": spool.dates[numbers[TEST][0]] if numbers[TEST] else None,
            "val_start": spool.dates[numbers[VALIDATION][0]] if numbers[VALIDATION] else None,
            "test_docs_actual": len(numbers[TEST]), "val_docs_actual": len(numbers[VALIDATION]),
        }
    return {
        "mode": "count", "test_docs": settings.test_articles, "val_docs": settings.validation_articles, "computed_at": _created(settings),
        "snapshot": None, "langs": languages, "_meta": {"builder": "fleetd-trainer shards build", "empty_articles_left_out": spool.empty},
    }


def _created(settings: BuildSettings) -> str:
    if settings.created is not None:
        return settings.created
    return format_moment(datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH") or 0), timezone.utc))


def _refused(where: str, what: str, *, fix: str = "correct it, then build again") -> PlanInvalid:
    return PlanInvalid("the shards can't be built", where=where, what=what, fix=fix)


def _damaged(where: str, what: str, *, fix: str = "correct or remove this article, then build again") -> DataDamaged:
    return DataDamaged("the shards can't be built", where=where, what=what, fix=fix)
