"""A zxell run through the command line: in, on, proved, out, and text from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.__main__ import main
from trainer.formats.zxell_checkpoint import ZxellCheckpoint, read_checkpoint, write_weights
from trainer.formats.zxell_weights import fresh_tensors, parse_model
from trainer.shards_build import BuildSettings, build_shards

SAMPLES = Path(__file__).parent.parent / "data/zxell"
RUN, SHARDS = SAMPLES / "run", SAMPLES / "shards"
BUG = 70


def test_a_zxell_run_comes_in_goes_on_is_proved_and_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "out"
    assert main(["zxell", "import", str(RUN), run, "--shards", str(SHARDS), "--device", "cpu"]) == 0
    assert "step 20" in capsys.readouterr().out
    assert main(["train", run]) == 0
    assert main(["prove", run]) == 0
    assert "exact: every bit is the same" in capsys.readouterr().out
    assert main(["zxell", "export", run, str(out)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["ckpt_final.pt", "ckpt_last.pt", "config.json", "log.jsonl"]
    assert read_checkpoint(out / "ckpt_final.pt").step == 40
    assert main(["zxell", "export", run, str(out)]) == 30
    assert "nothing is ever overwritten" in capsys.readouterr().err


def test_weights_go_to_a_model_directory_and_back(tmp_path: Path) -> None:
    assert main(["zxell", "to-model", str(RUN / "ckpt_last.pt"), str(tmp_path / "model")]) == 0
    assert main(["zxell", "weights", str(tmp_path / "model"), str(tmp_path / "half.pt"), "--bf16"]) == 0
    assert main(["zxell", "weights", str(tmp_path / "model"), str(tmp_path / "half.pt")]) == 30
    then, now = read_checkpoint(RUN / "ckpt_last.pt").tensors, read_checkpoint(tmp_path / "half.pt").tensors
    assert all(torch.equal(then[name].bfloat16().float(), now[name]) for name in then)


def test_a_fresh_model_has_the_size_of_its_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zxell", "init", str(tmp_path / "model"), "--preset", "tiny", "--vocabulary", "48"]) == 0
    assert "is a fresh model of 0.1 M parameters" in capsys.readouterr().out
    assert main(["zxell", "weights", str(tmp_path / "model"), str(tmp_path / "fresh.pt")]) == 0
    found = read_checkpoint(tmp_path / "fresh.pt")
    wanted = fresh_tensors(parse_model({"n_layer": 2, "d_model": 64, "n_head": 2, "ctx": 128, "vocab_size": 48}, where=""), seed=0)
    assert all(torch.equal(found.tensors[name], wanted[name]) for name in wanted)
    assert main(["zxell", "init", str(tmp_path / "other"), "--preset", "XXL"]) == 30


def test_text_comes_out_of_a_model_and_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import sentencepiece

    (tmp_path / "all.txt").write_text("\n".join(" ".join(row) for row in np.random.default_rng(1).choice(["red", "fox", "dog", "blue"], (80, 12))))
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "all.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=30,
                                             num_threads=1, minloglevel=2, hard_vocab_limit=False)
    build_shards([f"en={tmp_path}/all.txt"], tmp_path / "shards", BuildSettings(tokenizer=tmp_path / "tokenizer.model"))
    vocabulary = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model")).get_piece_size()
    model = parse_model({"n_layer": 1, "d_model": 16, "n_head": 2, "ctx": 8, "vocab_size": vocabulary}, where="")
    write_weights(tmp_path / "shards/model.pt", ZxellCheckpoint(model=model, tensors=fresh_tensors(model, seed=1), step=0, args={}), half=False)
    told = []
    for seed in ("1", "1", "2"):
        assert main(["sample", str(tmp_path / "shards/model.pt"), "--prompt", "red fox", "--tokens", "12", "--temperature", "1", "--seed", seed]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1] != told[2]
    assert all(text.startswith("red fox") for text in told)


def test_equal_words_give_equal_bytes_whether_or_not_they_are_one_object(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(RUN / "ckpt_last.pt")
    one = "".join(["c", "pu!"])
    for name, args in (("same.pt", {"device": one, "out": one}), ("equal.pt", {"device": "".join(["c", "pu!"]), "out": "".join(["cp", "u!"])})):
        write_weights(tmp_path / name, ZxellCheckpoint(model=checkpoint.model, tensors=checkpoint.tensors, step=1, args=args), half=False)
    assert (tmp_path / "same.pt").read_bytes() == (tmp_path / "equal.pt").read_bytes()


@pytest.mark.parametrize("damage", [b"", b"{}", b"\0" * 50, b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_damaged_run_is_told_in_words_and_never_as_a_bug(tmp_path: Path, damage: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "ckpt_last.pt"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        for each in ("config.json", "ckpt_last.pt", "log.jsonl"):
            (folder / each).write_bytes(damage if each == name else (RUN / each).read_bytes())
        assert main(["zxell", "import", str(folder), str(tmp_path / "run"), "--shards", str(SHARDS)]) not in (0, BUG)
        assert name in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
