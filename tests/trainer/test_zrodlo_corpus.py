"""Zrodlo corpora: built from real text with a real tokenizer, every promise checked, trained on like shards."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stage import GPT2, StopAfter, make_run, make_task, manifest_bytes, prepare, train_here
from zrodlo_stage import END, TEXTS, make_corpus, make_sources, make_tokenizer

from policies.errors import DataDamaged, ExplainedError, PlanInvalid, RequestRefused
from policies.facts import TrainerExit
from trainer.__main__ import main
from trainer.config import parse_task
from trainer.data.shards import documents, open_corpus
from trainer.formats.zrodlo_build import build_corpus
from trainer.formats.zrodlo_corpus import open_zrodlo_corpus
from trainer.scoring import score_documents, window_nll


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return make_corpus(tmp_path)


def test_a_corpus_holds_every_token_and_one_end_after_every_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    framed = {"truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
    path = make_tokenizer(tmp_path / "tokenizer.json", **framed)
    described = build_corpus(make_sources(tmp_path / "sources"), path, tmp_path / "corpus")
    opened = open_zrodlo_corpus(tmp_path / "corpus")
    plain = Tokenizer.from_file(str(make_tokenizer(tmp_path / "plain.json")))
    end = plain.token_to_id(END)
    expected = [token for text in TEXTS for token in [*plain.encode(text, add_special_tokens=False).ids, end]]
    assert opened.tokens.tolist() == expected, "the tokenizer's own cut at 3 tokens is switched off"
    data = (tmp_path / "corpus/tokens.bin").read_bytes()
    assert data == np.array(expected, dtype="<u4").tobytes() and described["tokens_sha256"] == hashlib.sha256(data).hexdigest()
    assert described["documents"] == len(TEXTS) == len(opened.document_ends)
    assert described["tokenizer_sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert [Path(source["file"]).name for source in described["sources"][:3]] == ["a.txt", "b.txt", "c.jsonl"]
    assert described["sources"][-1]["line"] == len(TEXTS) - 2


def test_the_same_sources_give_the_same_bytes_and_nothing_is_overwritten(tmp_path: Path, corpus: Path) -> None:
    build_corpus(make_sources(tmp_path / "sources"), tmp_path / "tokenizer.json", tmp_path / "again")
    assert all((corpus / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in ("tokens.bin", "corpus.json", "tokenizer.json"))
    before = (corpus / "tokens.bin").stat().st_mtime_ns
    with pytest.raises(RequestRefused, match="there already"):
        build_corpus([tmp_path / "sources/a.txt"], tmp_path / "tokenizer.json", corpus)
    assert (corpus / "tokens.bin").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "corpus", "sources", "tokenizer.json"], "no temporary is left"


def test_the_commands_build_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sources(tmp_path / "sources")
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    words = ["corpus", "build", str(tmp_path / "sources"), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    built = json.loads(capsys.readouterr().out)
    assert main(["corpus", "inspect", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out) == built and built["documents"] == len(TEXTS) and built["source_files"] == 3
    assert main(words) == TrainerExit.CONFIG
    assert "nothing is ever overwritten" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "data", "says"), [
    ("x.txt", b"good \xff bad", "byte 255 at offset 5"), ("x.txt", f"one {END} two".encode(), "two documents"),
    ("x.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    ("x.jsonl", b'{"text": "fine"}\n{"text": "cut', "not JSON"), ("x.jsonl", b'{"body": "x"}\n', "no text under 'text'"),
    ("x.jsonl", b'{"text": "a", "text": "b"}\n', "stands twice"), ("x.jsonl", b'{"text": "\\ud800"}\n', "surrogate"),
    ("x.jsonl", b'{"text": 3}\n', "no text under"),
])
def test_a_document_that_cannot_be_taken_is_named_and_leaves_nothing(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(data)
    tokenizer = make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataDamaged) as refusal:
        build_corpus([tmp_path / name], tokenizer, tmp_path / "out")
    assert says in refusal.value.what and name in refusal.value.where
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", name]


@pytest.mark.parametrize(("text", "says"), [
    ("{", "not JSON"), ("[]", "no model"), ('{"model": {"type": "Sorcery"}}', "does not read it"), ('{"model": {}, "model": {}}', "stands twice"),
])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataDamaged) as refusal:
        build_corpus(make_sources(tmp_path / "sources"), tmp_path / "tokenizer.json", tmp_path / "out")
    assert says in refusal.value.what


def test_what_ends_a_document_is_asked_where_it_is_not_clear(tmp_path: Path) -> None:
    sources, tokenizer = make_sources(tmp_path / "sources"), make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(RequestRefused) as refusal:
        build_corpus(sources, tokenizer, tmp_path / "out", end_of_sequence="<stop>")
    assert "no token '<stop>'" in refusal.value.what and "--eos" in refusal.value.fix
    assert build_corpus(sources, tokenizer, tmp_path / "out", end_of_sequence="<pad>")["end_of_sequence"] == 1
    (tmp_path / "empty").mkdir()
    with pytest.raises(RequestRefused, match="no corpus to build"):
        build_corpus([tmp_path / "empty"], tokenizer, tmp_path / "nothing")


def describe(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        body = json.loads((folder / "corpus.json").read_text())
        (folder / "corpus.json").write_text(json.dumps({**body, **changes}))

    return damage


def rewrite(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return damage


def flip(data: bytes) -> bytes:
    return data[:4] + bytes([data[4] ^ 1]) + data[5:]


@pytest.mark.parametrize(("damage", "names", "says"), [
    (rewrite("tokens.bin", flip), "tokens.bin", "sha256"), (rewrite("tokens.bin", lambda data: data[:-4]), "tokens.bin", "bytes"),
    (rewrite("tokens.bin", lambda data: data + bytes(64)), "tokens.bin", "bytes"), (rewrite("tokens.bin", lambda data: b""), "tokens.bin", "0 bytes"),
    (rewrite("tokens.bin", lambda data: b"\xff" * len(data)), "tokens.bin", "at offset 0 is beyond the vocabulary"),
    (rewrite("tokens.bin", lambda data: b"version https://git-lfs.github.com/spec/v1\n"), "tokens.bin", "Git LFS pointer"),
    (lambda folder: (folder / "tokens.bin").unlink(), "tokens.bin", "missing"),
    (rewrite("tokenizer.json", lambda data: data + b" "), "tokenizer.json", "sha256"),
    (lambda folder: (folder / "corpus.json").unlink(), "corpus.json", "missing"),
    (rewrite("corpus.json", lambda data: data[:-9]), "corpus.json", "not JSON"), (describe(schema=2), "corpus.json", "this version reads 1"),
    (describe(tokens=3), "tokens.bin", "tokens need 12"), (describe(documents=3), "corpus.json", "14 sources for 3 documents"),
    (describe(documents=3, sources=[{"file": "a"}] * 3), "tokens.bin", "14 end-of-sequence tokens"),
    (describe(end_of_sequence=3), "tokens.bin", "its last token"), (describe(vocabulary=-1), "corpus.json", "vocabulary"),
    (describe(tokens_sha256="0" * 64), "tokens.bin", "sha256"), (describe(sources=[{"file": 3}] * 14), "corpus.json", "source 0"),
    (describe(tokens=True), "corpus.json", "tokens is"),
])
def test_a_damaged_corpus_is_refused_by_name(corpus: Path, damage: Callable[[Path], None], names: str, says: str) -> None:
    assert open_zrodlo_corpus(corpus).described["documents"] == 14
    damage(corpus)
    with pytest.raises(DataDamaged) as refusal:
        open_zrodlo_corpus(corpus)
    assert Path(refusal.value.where).name == names and says in refusal.value.what


def test_unknown_keys_and_a_missing_tokenizer_are_no_fault(corpus: Path) -> None:
    describe(made_by="somebody")(corpus)
    (corpus / "tokenizer.json").unlink()
    opened = open_zrodlo_corpus(corpus)
    assert opened.described["made_by"] == "somebody" and opened.tokenizer is None


def test_a_byte_flipped_anywhere_is_noticed(corpus: Path) -> None:
    draw, data = random.Random(3), (corpus / "tokens.bin").read_bytes()
    for _ in range(40):
        place = draw.randrange(len(data))
        (corpus / "tokens.bin").write_bytes(data[:place] + bytes([data[place] ^ (1 << draw.randrange(8))]) + data[place + 1:])
        with pytest.raises(DataDamaged):
            open_zrodlo_corpus(corpus)


def zrodlo_task(corpus: Path, **changes: Any) -> dict[str, Any]:
    task = make_task(corpus, corpus, **changes)
    task["data"]["train"] = {"path": str(corpus), "split": "all", "format": "zrodlo"}
    task["data"]["validation"] = {"path": str(corpus), "split": "all", "format": "zrodlo"}
    return task


def test_a_training_on_a_corpus_resumes_exactly_and_keeps_the_tokenizer(tmp_path: Path, corpus: Path) -> None:
    task = zrodlo_task(corpus, window=8)
    straight, stopped = make_run(tmp_path, "straight", task), make_run(tmp_path, "stopped", task)
    assert train_here(straight) == TrainerExit.FINISHED
    assert train_here(stopped, StopAfter(5)) == TrainerExit.STOPPED
    assert train_here(stopped) == TrainerExit.FINISHED
    assert manifest_bytes(straight, 12) == manifest_bytes(stopped, 12)
    assert (straight / "checkpoints/step-000000012/tokenizer.json").read_bytes() == (corpus / "tokenizer.json").read_bytes()
    rows = (straight / "predictions/validation/step-000000012.jsonl").read_text().splitlines()
    assert len(rows) == len(TEXTS)


def test_scoring_begins_after_the_corpus_own_end_token(tmp_path: Path, corpus: Path) -> None:
    training = prepare(make_run(tmp_path, "run", zrodlo_task(corpus, window=8)))
    end = open_zrodlo_corpus(corpus).end_of_sequence
    assert end != 2 and {document.end_of_sequence for document in training.scored} == {end}
    document, model = training.scored[0], training.state.model.eval()
    assert 1 < len(document.tokens) <= 8, "one window"
    row = score_documents(model, [document], window=8, batch=1, precision="fp32")[0]
    tokens = torch.tensor([[end, *document.tokens.tolist()]])
    with torch.no_grad():
        by_hand = float(window_nll(model, tokens[:, :-1], tokens[:, 1:], precision="fp32").double().sum())
    assert row.nll == pytest.approx(by_hand, rel=1e-5)


def test_a_format_that_the_directory_is_not_is_refused(tmp_path: Path, corpus: Path, shards: Path) -> None:
    with pytest.raises(DataDamaged) as refusal:
        open_corpus(shards / "train", "train", data_format="zrodlo")
    assert "looks like zxell" in refusal.value.what
    with pytest.raises(DataDamaged):
        open_corpus(corpus, "all", data_format="zxell")
    assert [document.id for document in documents(open_corpus(corpus, "all"))][:2] == ["tokens:0", "tokens:1"]
    wrong = zrodlo_task(corpus)
    wrong["data"]["train"]["format"] = "parquet"
    with pytest.raises(PlanInvalid) as invalid:
        parse_task(wrong, where="task.json")
    assert "none of zxell, zrodlo" in invalid.value.what


def test_a_model_that_knows_fewer_tokens_than_the_corpus_uses_is_refused(tmp_path: Path, corpus: Path) -> None:
    run_dir = make_run(tmp_path, "run", zrodlo_task(corpus, model={"config": {**GPT2, "vocab_size": 12}}))
    assert main(["train", str(run_dir)]) == TrainerExit.CONFIG
    with pytest.raises(ExplainedError, match="corpus can't be used"):
        open_corpus(corpus, "all", vocabulary=12)
    shutil.rmtree(run_dir)
