"""Predictions: every token once, rows that stand for themselves, claims that recompute; and the evaluation that writes three of them."""

from __future__ import annotations

import json
import math
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from trainer_stage import StopAtLook, finish, log_of, make_run, make_shards, prepare, start

from policies.errors import DataDamaged, PlanInvalid
from policies.facts import TrainerExit
from policies.selection import better_than_incumbent
from policies.token_nll import CRITERION, parse_row, token_nll
from trainer.__main__ import main
from trainer.baseline import score_by_unigram, unigram_nll
from trainer.checkpoint import verify
from trainer.config import EvaluateTask, read_task
from trainer.data.shards import documents, open_corpus
from trainer.evaluate import evaluate
from trainer.loop import incumbent
from trainer.predictions import read_rows
from trainer.records import RunRecords
from trainer.scoring import score_documents

MANPAGES = Path(__file__).parents[2] / "examples/manpages/data"


@pytest.fixture(scope="module")
def model(undisturbed: Path) -> torch.nn.Module:
    found: torch.nn.Module = prepare(undisturbed).state.model
    return found


def test_every_token_is_a_target_once_whatever_the_window(model: torch.nn.Module, shards: Path) -> None:
    scored = list(documents(open_corpus(shards / "val", "val")))
    for window in (8, 16, 64):
        rows = score_documents(model, scored, window=window, batch=4, precision="fp32")
        assert [(row.id, row.family, row.tokens) for row in rows] == [(each.id, each.family, len(each.tokens)) for each in scored]


def test_a_row_is_the_sum_that_the_definition_gives(model: torch.nn.Module, shards: Path) -> None:
    document = max(documents(open_corpus(shards / "val", "val")), key=lambda each: len(each.tokens))
    row = score_documents(model, [document], window=16, batch=4, precision="fp32")[0]
    total, tokens = 0.0, [2, *document.tokens.tolist()]
    model.eval()
    for begin in range(0, len(tokens) - 1, 16):
        window = torch.tensor([tokens[begin:begin + 17]])
        with torch.no_grad():
            logs = torch.log_softmax(model(input_ids=window[:, :-1]).logits.double(), dim=-1)[0]
        total -= sum(float(logs[place, target]) for place, target in enumerate(window[0, 1:].tolist()))
    assert row.nll == pytest.approx(total, rel=1e-6) and row.tokens == len(document.tokens)


def test_the_bits_of_a_row_do_not_depend_on_its_neighbours(model: torch.nn.Module, shards: Path) -> None:
    scored = list(documents(open_corpus(shards / "val", "val")))
    together = {row.id: row.nll for row in score_documents(model, scored, window=16, batch=4, precision="fp32")}
    backwards = {row.id: row.nll for row in score_documents(model, scored[::-1], window=16, batch=4, precision="fp32")}
    alone = {row.id: row.nll for each in scored for row in score_documents(model, [each], window=16, batch=4, precision="fp32")}
    assert together == backwards == alone


def test_a_claim_recomputes_from_its_rows_and_names_its_checkpoint(undisturbed: Path, shards: Path) -> None:
    folder = undisturbed / "predictions/validation"
    for step in (0, 6, 12):
        meta = json.loads((folder / f"step-{step:09d}.meta.json").read_text())
        score = token_nll([parse_row(row, "rows") for row in read_rows(folder / f"step-{step:09d}.jsonl")])
        assert (meta["criterion"], meta["claim"]["value"], meta["rows"], meta["step"]) == (CRITERION, score.value, score.rows, step)
        assert meta["claim"]["families"] == {family: each.nll_per_token for family, each in score.families.items()}
        assert meta["dataset_digest"] == open_corpus(shards / "val", "val").digest
    assert meta["checkpoint_digest"] == verify(undisturbed / "checkpoints/step-000000012").digest
    logged = [record for record in log_of(undisturbed) if record.get("event") == "validation" and record["phase"] == "end"]
    assert logged[-1]["value"] == score.value and logged[-1]["sha256"] == meta["sha256"]


def test_best_json_follows_the_rule_of_the_selection() -> None:
    scores = [{"step": step, "value": value} for step, value in ((0, 1.0), (1, 0.9995), (2, 0.999), (3, 0.9985), (4, 0.998))]
    best = incumbent(scores, 0.001)
    assert best is not None and best["step"] == 4 and better_than_incumbent(0.999, 1.0, 0.001)
    assert incumbent(scores[:2], 0.001) == scores[0] and incumbent([], 0.001) is None


def test_the_add_one_unigram_model_by_hand(tmp_path: Path) -> None:
    corpus = open_corpus(make_shards(tmp_path / "role", split="train", shards=1, documents=6, seed=5, scored=True), "train", vocabulary=48)
    nll = unigram_nll(corpus, 48)
    tokens = corpus.shards[0].tokens
    assert np.exp(-nll).sum() == pytest.approx(1.0)
    assert nll[2] == pytest.approx(-math.log((6 + 1) / (len(tokens) + 48)))
    rows = score_by_unigram(nll, documents(corpus))
    assert math.fsum(row.nll for row in rows) == pytest.approx(float(nll[tokens].sum()))


@pytest.mark.skipif(not MANPAGES.is_dir(), reason="the example's data is not here")
def test_the_unigram_perplexities_of_the_manual_pages_are_the_published_ones() -> None:
    train, test = open_corpus(MANPAGES, "train"), open_corpus(MANPAGES, "test")
    score = token_nll(score_by_unigram(unigram_nll(train, train.vocabulary), documents(test)))
    assert {family: round(math.exp(each.nll_per_token)) for family, each in score.families.items()} == {"en": 1055, "de": 888, "fr": 1319, "ja": 1909}


@pytest.fixture
def evaluation(tmp_path: Path, undisturbed: Path, shards: Path) -> Path:
    models = {}
    for name, step in (("selected", 12), ("base", 0)):
        folder = shutil.copytree(undisturbed / f"checkpoints/step-{step:09d}", tmp_path / name)
        models[name] = {"path": str(folder), "digest": verify(undisturbed / f"checkpoints/step-{step:09d}").digest}
    test = make_shards(tmp_path / "test", split="test", shards=1, documents=30, seed=4, scored=True)
    return make_run(tmp_path, "run", {
        "schema": 1, "task": "evaluate_language_model", "split": "test", "models": models, "window": 16, "batch": 4, "threads": 1,
        "data": {"train": {"path": str(shards / "train"), "split": "train"}, "test": {"path": str(test), "split": "test"}},
    })


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((run_dir / "predictions/test").iterdir())}


def test_an_evaluation_writes_two_models_and_the_baseline_on_the_same_rows(evaluation: Path) -> None:
    status, output = finish(start(evaluation, "evaluate"))
    assert status == TrainerExit.FINISHED, output
    folder = evaluation / "predictions/test"
    rows = {name: [parse_row(row, name) for row in read_rows(folder / f"{name}.jsonl")] for name in ("selected", "base", "unigram")}
    assert len({tuple((row.id, row.family, row.tokens) for row in each) for each in rows.values()}) == 1
    assert token_nll(rows["selected"]).value < token_nll(rows["base"]).value
    assert json.loads((folder / "selected.meta.json").read_text())["step"] == 12
    assert log_of(evaluation)[-1]["event"] == "finish"


def test_an_evaluation_that_is_run_again_keeps_what_verifies_and_repairs_the_rest(evaluation: Path) -> None:
    assert main(["evaluate", str(evaluation)]) == TrainerExit.FINISHED
    before, folder = files_of(evaluation), evaluation / "predictions/test"
    kept = (folder / "base.jsonl").stat().st_mtime_ns
    (folder / "selected.jsonl").write_bytes(before["selected.jsonl"].replace(b"nll", b"nil", 1))
    assert main(["evaluate", str(evaluation)]) == TrainerExit.FINISHED
    assert files_of(evaluation) == before
    assert (folder / "base.jsonl").stat().st_mtime_ns == kept


def test_an_evaluation_can_be_stopped_at_any_batch_and_goes_on(evaluation: Path) -> None:
    assert main(["evaluate", str(evaluation)]) == TrainerExit.FINISHED
    whole = files_of(evaluation)
    shutil.rmtree(evaluation / "predictions")
    task = read_task(evaluation)
    assert isinstance(task, EvaluateTask)
    corpora = [open_corpus(Path(role.path), role.split) for role in (task.train, task.scored)]
    for look in (1, 5, 9, 40):
        status = evaluate(evaluation, task, corpora[0], corpora[1], StopAtLook(look), RunRecords(evaluation))
        if status == TrainerExit.STOPPED:
            assert log_of(evaluation)[-1]["event"] == "stop"
    assert main(["evaluate", str(evaluation)]) == TrainerExit.FINISHED
    assert files_of(evaluation) == whole


def test_a_sigterm_before_an_evaluation_begins_is_heard(evaluation: Path) -> None:
    process = start(evaluation, "evaluate", blocked=frozenset({signal.SIGTERM}))
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == TrainerExit.STOPPED
    assert log_of(evaluation)[-1]["skipped"] == ["selected", "base", "unigram"]


def test_an_evaluation_of_another_model_than_the_frozen_one_is_refused(evaluation: Path, tmp_path: Path) -> None:
    weights = tmp_path / "selected/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    task = read_task(evaluation)
    assert isinstance(task, EvaluateTask)
    corpora = [open_corpus(Path(role.path), role.split) for role in (task.train, task.scored)]
    with pytest.raises(DataDamaged) as refusal:
        evaluate(evaluation, task, corpora[0], corpora[1], StopAtLook(10**9), RunRecords(evaluation))
    assert "digest" in refusal.value.what and str(tmp_path / "selected") in refusal.value.where


def test_a_window_beyond_the_model_is_refused(evaluation: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = json.loads((evaluation / "task.json").read_text())
    (evaluation / "task.json").write_text(json.dumps({**task, "window": 65}))
    assert main(["evaluate", str(evaluation)]) == TrainerExit.CONFIG
    assert "n_positions 64" in capsys.readouterr().err
    with pytest.raises(PlanInvalid):
        read_task(evaluation / "nowhere")


def test_shards_are_verified_and_inspected_from_the_command_line(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "verify", str(shards / "val")]) == 0
    assert "val: 1 shards" in capsys.readouterr().out
    assert main(["shards", "inspect", str(shards / "val"), "--split", "val"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["val"]["documents"] == 12 and sum(described["val"]["tokens_by_family"].values()) == described["val"]["tokens"]
