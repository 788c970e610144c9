"""Shards out of text: what the page asks of them, the same bytes from the same input, and every kind of damage named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from zxell_reference import LANGUAGES, check_shards

from policies.errors import DataDamaged, ExplainedError, PlanInvalid, RequestRefused
from trainer.__main__ import main
from trainer.data.shards import documents, open_corpus
from trainer.data.verification import verify_splits
from trainer.files import folder_entries
from trainer.shards_build import BuildSettings, build_shards, shuffled

SAMPLES = Path(__file__).parent.parent / "data/zxell/shards"
WORDS = {"en": "the quick brown fox jumps over lazy dogs and runs away", "de": "der schnelle braune fuchs springt über faule hunde hinweg",
         "fr": "le renard brun saute par dessus des chiens très paresseux", "ja": "素早い茶色の狐が怠けた犬の上を飛び越える 走る"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Articles of four languages: en and ja as JSON Lines, de as a folder of files, fr as JSON Lines that name it, and a tokenizer."""
    import sentencepiece

    root, draws = tmp_path_factory.mktemp("texts"), np.random.default_rng(3)
    articles = {language: [" ".join(draws.choice(words.split(), 30)) + f" {number}" for number in range(20)] for language, words in WORDS.items()}
    for language in ("en", "fr", "ja"):
        lines = [{"text": text, "date": f"2026-01-{number + 1:02d}", "lang": language} for number, text in enumerate(articles[language])]
        (root / f"{language}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "", "lang": language}]))
    (root / "de").mkdir()
    for number, text in enumerate(articles["de"]):
        (root / f"de/{number:03d}.txt").write_text(text)
    (root / "all.txt").write_text("\n".join(text for listed in articles.values() for text in listed))
    sentencepiece.SentencePieceTrainer.train(input=str(root / "all.txt"), model_prefix=str(root / "tokenizer"), vocab_size=150, num_threads=1,
                                             character_coverage=1.0, minloglevel=2, hard_vocab_limit=False)
    return root


def sources(texts: Path) -> list[str]:
    return [f"{texts}/en.jsonl", f"de={texts}/de", f"{texts}/fr.jsonl", f"ja={texts}/ja.jsonl"]


def settings(texts: Path, **changes: Any) -> BuildSettings:
    given = {"shard_tokens": 900, "seed": 7, "validation_articles": 2, "test_articles": 3, **changes}
    return BuildSettings(tokenizer=texts / "tokenizer.model", **given)


@pytest.fixture(scope="module")
def built(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "shards"
    build_shards(sources(texts), folder, settings(texts))
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in folder_entries(folder)}


def texts_of(folder: Path, split: str) -> list[tuple[str, str]]:
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return [(each.family, pieces.decode(each.tokens[:-1].tolist())) for each in documents(open_corpus(folder, split))]


def test_what_is_built_is_what_the_page_asks_for(built: Path, texts: Path) -> None:
    index = check_shards(built, vocabulary=150)
    trained = [entry for entry in index["shards"] if entry["split"] == "train"]
    assert len(trained) > 2 and sum(entry["docs"] for entry in trained) == 4 * 15
    assert [entry["docs"] for entry in index["shards"] if entry["split"] != "train"] == [8, 12]
    assert index["boundaries"]["langs"]["en"] == {"docs": 20, "max_pub_date": "2026-01-20", "test_start": "2026-01-18", "val_start": "2026-01-16",
                                                  "test_docs_actual": 3, "val_docs_actual": 2}
    assert index["boundaries"]["_meta"]["empty_articles_left_out"] == 3
    assert verify_splits(built, None, workers=2)["train"].documents == 60


def test_val_and_test_keep_scan_order_and_train_does_not(built: Path, texts: Path) -> None:
    lines = [json.loads(line)["text"] for line in (texts / "en.jsonl").read_text().splitlines()]
    assert [text for family, text in texts_of(built, "test") if family == "en"] == lines[17:20]
    assert [text for family, text in texts_of(built, "val") if family == "en"] == lines[15:17]
    trained = [text for _, text in texts_of(built, "train")]
    assert [family for family, _ in texts_of(built, "val")] == [language for language in LANGUAGES for _ in range(2)]
    found = [text for text in trained if text in lines]
    assert sorted(found) == sorted(lines[:15]) and found != lines[:15]


def test_the_same_input_gives_the_same_bytes_and_another_seed_another_order(texts: Path, built: Path, tmp_path: Path) -> None:
    build_shards(sources(texts), tmp_path / "again", settings(texts, threads=3))
    build_shards(sources(texts), tmp_path / "other", settings(texts, seed=8))
    assert digests(tmp_path / "again") == digests(built)
    assert digests(tmp_path / "other")["val_000.bin"] == digests(built)["val_000.bin"]
    assert digests(tmp_path / "other")["train_000.bin"] != digests(built)["train_000.bin"]
    assert sorted(texts_of(tmp_path / "other", "train")) == sorted(texts_of(built, "train"))


def test_the_order_is_a_shuffle_that_no_library_can_change() -> None:
    assert shuffled(list(range(8)), 431) == [1, 5, 7, 0, 2, 4, 6, 3]
    assert sorted(shuffled(list(range(1000)), 1)) == list(range(1000))


def test_the_command_builds_and_then_verifies(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["shards", "build", str(tmp_path / "out"), *sources(texts), "--tokenizer", str(texts / "tokenizer.model"), "--val", "2",
        "--threads", "1"]
    assert main(arguments) == 0
    assert "all as the index says" in capsys.readouterr().out
    assert main(["shards", "verify", str(tmp_path / "out"), "--workers", "2"]) == 0
    assert main(["shards", "verify", str(tmp_path / "out"), "--split", "nonsense"]) == 30
    assert "nonsense" in capsys.readouterr().err
    assert main(arguments) == 30
    assert "nothing is ever overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(("lines", "named", "told"), [
    (b'{"text": "x", "lang": "xx"}\n', ":1", "'xx'"), (b'{"text": "x", "lang": "en"}\n{"text": 5, "lang": "en"}\n', ":2", "text"),
    (b'{"text": "x"\n', ":1", "not JSON"), (b"\xff\xfe\n", ":1", "not JSON"), (b'{"text": "\\ud800", "lang": "en"}\n', ":1", "UTF-8"),
    (b"[]\n", ":1", "text"),
    (b"", "bad.jsonl", "no article"), (b'{"text": "' + b"fox " * 600 + b'", "lang": "en"}\n', ":1", "tokens, a shard holds at most"),
])
def test_an_article_that_can_not_be_used_is_named_by_file_and_line(texts: Path, tmp_path: Path, lines: bytes, named: str, told: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(lines)
    with pytest.raises(ExplainedError) as refused:
        build_shards([str(tmp_path / "bad.jsonl")], tmp_path / "out", settings(texts, shard_tokens=200, validation_articles=0, test_articles=0))
    assert refused.value.where.endswith(named)
    assert told in refused.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


@pytest.mark.parametrize(("source", "told"), [("xx=a.txt", "'xx'"), ("en=missing.txt", "no such file")])
def test_a_source_that_is_none_is_refused(texts: Path, tmp_path: Path, source: str, told: str) -> None:
    with pytest.raises(PlanInvalid) as refused:
        build_shards([source], tmp_path / "out", settings(texts))
    assert told in refused.value.what


def test_more_kept_back_than_there_is_and_a_tokenizer_that_is_none_are_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanInvalid, match="can't be built") as refused:
        build_shards(sources(texts), tmp_path / "out", settings(texts, test_articles=18))
    assert "20 articles, 20 are to be kept" in refused.value.what
    with pytest.raises(PlanInvalid) as refused:
        build_shards(sources(texts), tmp_path / "out", BuildSettings(tokenizer=texts / "all.txt"))
    assert "no SentencePiece model" in refused.value.what
    (tmp_path / "out").mkdir()
    with pytest.raises(RequestRefused):
        build_shards(sources(texts), tmp_path / "out", settings(texts))


def flip(folder: Path, name: str, place: int) -> None:
    data = bytearray((folder / name).read_bytes())
    data[place] ^= 1
    (folder / name).write_bytes(bytes(data))


def lose(folder: Path, name: str, _: int) -> None:
    (folder / name).unlink()


def cut(folder: Path, name: str, bytes_left: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:bytes_left])


@pytest.mark.parametrize(("damage", "name", "place", "told"), [
    (flip, "train_001.bin", 40, "sha256"), (lose, "train_001.bin", 0, "missing"), (cut, "val_000.bin", 601, "601 bytes"),
    (lose, "train_000.bin.json", 0, "missing"),
    (flip, "val_000.langs.u8", 3, "tokens of"), (cut, "test_000.langs.u8", 5, "5 bytes"), (cut, "val_000.bin.json", 20, "JSON"),
])
def test_damage_is_named_by_file_however_many_look(tmp_path: Path, damage: Any, name: str, place: int, told: str) -> None:
    shutil.copytree(SAMPLES, tmp_path / "shards")
    assert {split: count.documents for split, count in verify_splits(tmp_path / "shards", None, workers=2).items()} == {"train": 23, "val": 8,
    "test": 8}
    damage(tmp_path / "shards", name, place)
    for workers in (1, 4):
        with pytest.raises(DataDamaged) as refused:
            verify_splits(tmp_path / "shards", None, workers=workers)
        assert name in refused.value.where
        assert told in refused.value.what


def test_a_split_that_lies_elsewhere_is_said_not_to_be_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(SAMPLES, tmp_path / "shards")
    (tmp_path / "shards/test_000.bin").unlink()
    assert main(["shards", "verify", str(tmp_path / "shards")]) == 0
    assert "none of them in this directory" in capsys.readouterr().out
    with pytest.raises(DataDamaged, match="can't be used"):
        verify_splits(tmp_path / "shards", "test", workers=1)


def test_progress_counts_every_byte_once() -> None:
    told: list[tuple[int, int]] = []
    verify_splits(SAMPLES, None, workers=3, on_bytes=lambda done, total: told.append((done, total)))
    total = sum(path.stat().st_size for path in SAMPLES.glob("*.bin"))
    assert [whole for _, whole in told] == [total] * 4
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1] == (total, total)
