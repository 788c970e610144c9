"""zxell's perplexity, and text from a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from zxell_reference import Zxell, perplexities

from policies.errors import DataDamaged, PlanInvalid
from trainer.__main__ import main
from trainer.data.shards import open_corpus
from trainer.formats.zxell_evaluation import evaluate_shard
from trainer.formats.zxell_models import load_any
from trainer.sample import SampleSettings, load_pieces, sample_tokens

SAMPLES = Path(__file__).parent.parent / "data/zxell"
CHECKPOINT, SHARDS = SAMPLES / "run/ckpt_last.pt", SAMPLES / "shards"


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("split", ["val", "test"])
def test_perplexities_are_those_of_code_written_from_the_page(split: str, batch: int) -> None:
    torch.set_num_threads(1)
    model, window, _ = load_any(CHECKPOINT)
    reference = Zxell(json.loads((SAMPLES / "run/config.json").read_text())["model"])
    reference.load_state_dict(torch.load(CHECKPOINT, weights_only=True)["model"])
    tokens, codes = np.fromfile(SHARDS / f"{split}_000.bin", dtype="<u2"), (SHARDS / f"{split}_000.langs.u8").read_bytes()
    wanted = perplexities(reference, tokens, codes, window)
    found = evaluate_shard(model, open_corpus(SHARDS, split), window=window, batch=batch)
    assert {"all": found.all, **found.by_language} == pytest.approx(wanted, rel=1e-5)
    assert found.targets == len(tokens) // (window + 1) * window


def test_the_sample_run_logged_what_we_measure_on_its_checkpoint() -> None:
    logged = json.loads((SAMPLES / "run/log.jsonl").read_text().splitlines()[-1])
    model, window, step = load_any(CHECKPOINT)
    found = evaluate_shard(model, open_corpus(SHARDS, "val"), window=window)
    record = found.record(step, "val")
    assert (record.pop("step"), record.pop("eval")) == (logged.pop("step"), logged.pop("eval"))
    assert record == pytest.approx(logged, rel=1e-5)


def test_a_part_of_the_shard_is_taken_from_its_head_and_a_language_without_targets_has_no_figure() -> None:
    model, window, _ = load_any(CHECKPOINT)
    corpus = open_corpus(SHARDS, "val")
    first = int(corpus.shards[0].document_ends[0])
    head = evaluate_shard(model, corpus, window=window, tokens_max=first // 17 * 17)
    assert head.by_language["en"] == pytest.approx(head.all)
    assert head.by_language["ja"] is None
    with pytest.raises(DataDamaged):
        evaluate_shard(model, corpus, window=window, tokens_max=16)


def test_the_language_of_a_target_is_that_of_its_own_article() -> None:
    model, window, _ = load_any(CHECKPOINT)
    corpus = open_corpus(SHARDS, "val")
    shard = corpus.shards[0]
    assert shard.families is not None
    swapped = dataclasses.replace(corpus, shards=(dataclasses.replace(shard, families=3 - shard.families),))
    one, other = (evaluate_shard(model, each, window=window) for each in (corpus, swapped))
    assert one.by_language["en"] == other.by_language["ja"] != other.by_language["en"]
    assert one.all == pytest.approx(other.all)


def test_an_evaluation_draws_from_no_stream_and_leaves_the_model_in_its_mode() -> None:
    model, window, _ = load_any(CHECKPOINT)
    model.train()
    before = torch.get_rng_state()
    evaluate_shard(model, open_corpus(SHARDS, "val"), window=window)
    assert model.training and torch.equal(before, torch.get_rng_state())


def test_the_command_prints_the_line_that_zxell_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zxell", "evaluate", str(CHECKPOINT), "--shards", str(SHARDS)]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["eval"], set(record)) == (20, "val_full", {"step", "eval", "all", "en", "de", "fr", "ja"})
    assert main(["zxell", "inspect", str(SAMPLES / "run")]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["checkpoint"]["parameters"] == sum(tensor.numel() for name, tensor in torch.load(
        CHECKPOINT, weights_only=True)["model"].items() if name != "lm_head.weight")


def test_a_sample_depends_on_its_seed_alone() -> None:
    model, window, _ = load_any(CHECKPOINT)
    settings = SampleSettings(tokens_max=40, seed=3, stops_at_end=False)
    one = sample_tokens(model, [5, 6], settings, window=window)
    torch.rand(5)
    assert sample_tokens(model, [5, 6], settings, window=window) == one
    assert sample_tokens(model, [5, 6], dataclasses.replace(settings, seed=4), window=window) != one
    assert len(one) == 40


def test_without_temperature_the_likeliest_token_is_taken_and_top_one_is_the_same() -> None:
    model, window, _ = load_any(CHECKPOINT)
    greedy = sample_tokens(model, [5], SampleSettings(tokens_max=30, temperature=0, stops_at_end=False), window=window)
    assert greedy == sample_tokens(model, [5], SampleSettings(tokens_max=30, top=1, stops_at_end=False), window=window)
    with torch.no_grad():
        assert greedy[0] == int(model(input_ids=torch.tensor([[2, 5]])).logits[0, -1].argmax())


def test_a_sample_ends_with_its_article() -> None:
    model, window, _ = load_any(CHECKPOINT)
    found = sample_tokens(model, [], SampleSettings(tokens_max=2000, seed=1), window=window)
    assert found[-1] == 2 and 2 not in found[:-1] and len(found) < 2000


def test_a_tokenizer_that_is_none_is_refused() -> None:
    with pytest.raises(PlanInvalid, match="tokenizer"):
        load_pieces(SAMPLES / "run/config.json")
    assert main(["sample", str(CHECKPOINT)]) == 30
