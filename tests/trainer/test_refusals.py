"""Bad input: each gets three lines that name the thing and the next step, the right exit status, and hurts nothing saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_stage import GPT2, LLAMA, StopAfter, finish, log_of, make_run, make_shards, make_task, manifest_bytes, prepare, start, train_here

from policies.errors import CheckpointDamaged, DataDamaged, ExplainedError, LossNotFinite, PlanInvalid, ResumeMismatch
from policies.facts import TrainerExit
from policies.manifest import directory_digest
from trainer.__main__ import exit_status, main
from trainer.checkpoint import newest_verified, verify
from trainer.config import parse_task
from trainer.data.shards import open_corpus
from trainer.files import JsonFault, folder_entries, loads
from trainer.models.families import check_config
from trainer.state import read_state


def in_three_lines(error: ExplainedError) -> bool:
    return len(str(error).splitlines()) == 4 and all(f"  {word}:" in str(error) for word in ("where", "what", "fix"))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A role directory that a test may damage."""
    return make_shards(tmp_path / "role", split="val", shards=2, documents=8, seed=3, scored=True)


def flip_a_byte(folder: Path) -> None:
    path = folder / "val_001.bin"
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)


def cut_the_end(folder: Path) -> None:
    (folder / "val_001.bin").write_bytes((folder / "val_001.bin").read_bytes()[:-2])


def lose_the_shard(folder: Path) -> None:
    (folder / "val_001.bin").unlink()


def lose_the_side_file(folder: Path) -> None:
    (folder / "val_001.bin.json").unlink()


def contradict_the_index(folder: Path) -> None:
    side = json.loads((folder / "val_001.bin.json").read_text())
    (folder / "val_001.bin.json").write_text(json.dumps({**side, "docs": side["docs"] + 1}))


def swap_two_languages(folder: Path) -> None:
    path = folder / "val_001.langs.u8"
    path.write_bytes(bytes([path.read_bytes()[1], path.read_bytes()[0], *path.read_bytes()[2:]]))


def name_an_unknown_language(folder: Path) -> None:
    path = folder / "val_001.langs.u8"
    path.write_bytes(bytes([9, *path.read_bytes()[1:]]))


def count_languages_with_a_word(folder: Path) -> None:
    index = json.loads((folder / "shards_index.json").read_text())
    index["shards"][1]["langs"] = 7
    (folder / "shards_index.json").write_text(json.dumps(index))
    (folder / "val_001.bin.json").write_text(json.dumps(index["shards"][1]))


def write_a_key_twice(folder: Path) -> None:
    (folder / "shards_index.json").write_text('{"dtype": "uint16", "dtype": "uint16", "shards": []}')


@pytest.mark.parametrize(("damage", "names", "says"), [
    (flip_a_byte, "val_001.bin", "sha256"), (cut_the_end, "val_001.bin", "bytes"), (lose_the_shard, "val_001.bin", "missing"),
    (lose_the_side_file, "val_001.bin.json", "missing"), (contradict_the_index, "val_001.bin.json", "docs"),
    (swap_two_languages, "val_001.langs.u8", "tokens of"), (name_an_unknown_language, "val_001.langs.u8", "offset 0"),
    (write_a_key_twice, "shards_index.json", "twice"), (count_languages_with_a_word, "shards_index.json", "langs"),
])
def test_damaged_shards_are_refused_by_name(damaged: Path, damage: Callable[[Path], None], names: str, says: str) -> None:
    assert open_corpus(damaged, "val").document_count == 16
    damage(damaged)
    with pytest.raises(DataDamaged) as refusal:
        open_corpus(damaged, "val")
    assert Path(refusal.value.where).name == names and says in refusal.value.what
    assert in_three_lines(refusal.value) and exit_status(refusal.value) == TrainerExit.CONFIG


def test_a_token_beyond_the_vocabulary_is_named_with_its_offset(damaged: Path) -> None:
    with pytest.raises(DataDamaged) as refusal:
        open_corpus(damaged, "val", vocabulary=40)
    offset = int(refusal.value.what.split("offset ")[1].split()[0])
    tokens = open_corpus(damaged, "val").shards[0].tokens
    assert int(tokens[offset // 2]) >= 40 and int(tokens[: offset // 2].max()) < 40


def test_a_directory_of_another_digest_is_refused(damaged: Path) -> None:
    right = directory_digest(folder_entries(damaged))
    assert open_corpus(damaged, "val", digest=right).digest == right
    with pytest.raises(DataDamaged, match="can't be used") as refusal:
        open_corpus(damaged, "val", digest="0" * 64)
    assert right in refusal.value.what


def test_a_staged_role_needs_only_its_own_split(damaged: Path) -> None:
    index = json.loads((damaged / "shards_index.json").read_text())
    index["shards"].insert(0, {**index["shards"][0], "name": "train_000.bin", "split": "train"})
    (damaged / "shards_index.json").write_text(json.dumps(index))
    assert open_corpus(damaged, "val").document_count == 16
    with pytest.raises(DataDamaged, match="can't be used"):
        open_corpus(damaged, "train")


def test_all_faults_of_a_task_are_told_at_once_with_suggestions(task: dict[str, Any]) -> None:
    wrong = {**task, "widnow": 16, "batch": 0, "optimizer": {"lr": -1, "warmpu": 3}, "device": "gpu"}
    with pytest.raises(PlanInvalid) as refusal:
        parse_task(wrong, where="task.json")
    for part in ("widnow: unknown key; did you mean window?", "batch: 0 is outside", "optimizer.lr", "did you mean warmup?", "device"):
        assert part in refusal.value.what
    assert in_three_lines(refusal.value)


@pytest.mark.parametrize(("changes", "says"), [
    ({"micro_batch": 3}, "does not divide"), ({"steps": 3}, "warm-up"), ({"schema": 2}, "schema"), ({"task": "language_modle"}, "language_model"),
    ({"model": {}}, "either config or path"), ({"precision": "fp16"}, "precision"), ({"seed": True}, "seed"),
])
def test_a_task_that_can_not_be_is_refused(task: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanInvalid) as refusal:
        parse_task({**task, **changes}, where="task.json")
    assert says in refusal.value.what


@pytest.mark.parametrize(("config", "says"), [
    ({"model_type": "bert"}, "only gpt2 and llama"),
    ({**LLAMA, "hidden_act": "gelu"}, "hidden_act"), ({**LLAMA, "attention_bias": True}, "attention_bias"),
    ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads"), ({**GPT2, "tie_word_embeddings": False}, "tie_word_embeddings"),
    ({**GPT2, "activation_function": "relu"}, "gelu_new"), ({**GPT2, "n_head": 5}, "n_head"), ({**GPT2, "n_layer": "2"}, "n_layer"),
])
def test_a_model_that_would_compute_something_else_is_refused_by_key(config: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanInvalid) as refusal:
        check_config(config, where="config.json")
    assert says in refusal.value.what


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": NaN}', '{"a": Infinity}', "{", '"\udcff"'])
def test_json_that_two_readers_understand_differently_is_refused(text: str) -> None:
    with pytest.raises(JsonFault):
        loads(text.encode("utf-8", "surrogateescape"))


def test_the_command_prints_three_lines_and_leaves_with_the_contracts_status(
    tmp_path: Path, task: dict[str, Any], capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = make_run(tmp_path, "run", {**task, "stepps": 4})
    assert main(["train", str(run_dir)]) == TrainerExit.CONFIG
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "stepps: unknown key; did you mean steps?" in told and "fix:" in told
    assert main(["train", str(tmp_path / "nowhere")]) == TrainerExit.CONFIG
    assert main(["shards", "verify", str(tmp_path)]) == TrainerExit.CONFIG


def truncate(folder: Path) -> None:
    path = folder / "optimizer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def flip(folder: Path) -> None:
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)


def add(folder: Path) -> None:
    (folder / "extra.bin").write_bytes(b"x")


def remove_the_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def replace_by_a_link(folder: Path) -> None:
    (folder / "rng.safetensors").rename(folder.parent / "elsewhere")
    (folder / "rng.safetensors").symlink_to(folder.parent / "elsewhere")


@pytest.mark.parametrize(("damage", "names"), [
    (truncate, "optimizer.safetensors"), (flip, "model.safetensors"), (add, "extra.bin"), (remove_the_manifest, "manifest.json"),
    (replace_by_a_link, "rng.safetensors"),
])
def test_a_damaged_checkpoint_is_passed_over_with_its_reason_and_the_end_is_the_same(
    tmp_path: Path, task: dict[str, Any], undisturbed: Path, damage: Callable[[Path], None], names: str,
) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(9))
    newest = run_dir / "checkpoints/step-000000009"
    damage(newest)
    with pytest.raises(CheckpointDamaged, match="can't be used"):
        verify(newest)
    scan = newest_verified(run_dir / "checkpoints")
    assert scan.newest is not None and scan.newest.step == 8 and scan.skipped[0][0] == newest and names in scan.skipped[0][1]
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)
    assert (run_dir / "checkpoints/refused-step-000000009-1").is_dir(), "its bytes are kept"
    assert '"event":"refuse"' in (run_dir / "lineage.jsonl").read_text()


def test_files_swapped_between_checkpoints_do_not_verify(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(9))
    shutil.copy(run_dir / "checkpoints/step-000000008/optimizer.safetensors", run_dir / "checkpoints/step-000000009/optimizer.safetensors")
    with pytest.raises(CheckpointDamaged, match="can't be used"):
        verify(run_dir / "checkpoints/step-000000009")


@pytest.mark.parametrize(("changes", "names"), [
    ({"seed": 8}, "settings.seed"), ({"optimizer": {"lr": 0.02, "warmup": 3}}, "settings.optimizer.lr"), ({"threads": 2}, "environment.threads"),
    ({"micro_batch": 4}, "settings.micro_batch"), ({"steps": 24}, "settings.steps"), ({"model": {"config": LLAMA}}, "settings.model"),
])
def test_a_resume_under_other_settings_is_refused_with_each_difference(
    tmp_path: Path, task: dict[str, Any], changes: dict[str, Any], names: str,
) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(5))
    (run_dir / "task.json").write_text(json.dumps({**task, **changes}))
    with pytest.raises(ResumeMismatch) as refusal:
        prepare(run_dir)
    assert names in refusal.value.what and in_three_lines(refusal.value) and exit_status(refusal.value) == TrainerExit.CONFIG
    (run_dir / "task.json").write_text(json.dumps(task))
    assert train_here(run_dir) == TrainerExit.FINISHED, "nothing saved was lost"


def test_other_data_is_refused_on_resume_and_other_cadences_are_not(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(5))
    other = make_shards(tmp_path / "other", split="train", shards=2, documents=10, seed=99)
    (run_dir / "task.json").write_text(json.dumps({**task, "data": {**task["data"], "train": {"path": str(other), "split": "train"}}}))
    with pytest.raises(ResumeMismatch) as refusal:
        prepare(run_dir)
    assert "data.train.digest" in refusal.value.what
    (run_dir / "task.json").write_text(json.dumps({**task, "checkpoint": {"every_steps": 5, "keep": 9}, "log_every": 3}))
    train_here(run_dir)
    assert manifest_bytes(run_dir, 12) == manifest_bytes(undisturbed, 12)


def test_a_loss_that_is_no_number_ends_with_31_and_step_and_value(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", {**task, "optimizer": {"lr": 1e30, "warmup": 0, "clip": None, "weight_decay": 0.0}})
    with pytest.raises(LossNotFinite) as broke:
        train_here(run_dir)
    assert exit_status(broke.value) == TrainerExit.NOT_FINITE and in_three_lines(broke.value)
    failed = log_of(run_dir)[-1]
    assert failed["event"] == "failed" and failed["value"] in ("nan", "inf") and failed["value"] in failed["because"]
    steps = [record["step"] for record in log_of(run_dir) if "loss" in record]
    assert failed["step"] == len(steps) + 1
    assert newest_verified(run_dir / "checkpoints").newest is not None, "the last good checkpoint is untouched"


def test_a_value_that_breaks_the_weights_never_becomes_a_step(tmp_path: Path, task: dict[str, Any]) -> None:
    process = start(make_run(tmp_path, "run", {**task, "optimizer": {"lr": 1e30, "warmup": 0, "clip": None, "weight_decay": 0.0}}))
    status, output = finish(process)
    assert status == TrainerExit.NOT_FINITE
    assert "error: the numbers broke" in output and "fix:" in output and "Traceback" not in output


def test_weights_that_left_the_range_are_never_saved(tmp_path: Path, task: dict[str, Any]) -> None:
    breaking = {"lr": 1e39, "warmup": 0, "clip": None, "weight_decay": 0.0}
    run_dir = make_run(tmp_path, "run", {**task, "optimizer": breaking, "checkpoint": {"every_steps": 1, "keep": 2}})
    with pytest.raises(LossNotFinite) as broke:
        train_here(run_dir)
    assert "nan or inf" in broke.value.what and log_of(run_dir)[-1]["step"] == 1
    found = newest_verified(run_dir / "checkpoints")
    assert found.newest is not None and found.newest.step == 0 and not found.skipped


def test_a_model_directory_with_other_weights_is_refused_by_tensor(tmp_path: Path, shards: Path, undisturbed: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(undisturbed / "checkpoints/step-000000012/model.safetensors", model)
    (model / "config.json").write_text(json.dumps({**GPT2, "n_inner": 32}))
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", None, model={"path": str(model)}))
    with pytest.raises(CheckpointDamaged) as refusal:
        prepare(run_dir)
    assert "shape" in refusal.value.what and "mlp" in refusal.value.what
    (model / "config.json").write_text(json.dumps(GPT2))
    assert train_here(run_dir, StopAfter(1)) == TrainerExit.STOPPED


def test_a_refusal_stands_in_the_log_where_the_supervisor_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task.json").write_text('{"schema": 1, "task": "language_modle"}')
    monkeypatch.setenv("FLEETD_RUN_DIR", str(tmp_path))
    assert main(["train"]) == TrainerExit.CONFIG
    (record,) = log_of(tmp_path)
    assert (record["event"], record["step"]) == ("failed", None)
    assert "language_modle" in record["because"] and str(tmp_path / "task.json") in record["because"]


@pytest.mark.parametrize(("changes", "says"), [
    ({"losses": [1.0, "2"]}, "the loss of step 2"), ({"cursor": -1}, "cursor is -1"), ({"scores": [3]}, "score 1"),
    ({"scores": [{"step": 0, "value": None, "families": {}, "checkpoint_digest": "0"}]}, "score 1"), ({"schema": 2}, "schema 1"),
])
def test_a_state_that_means_nothing_is_refused_by_key(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    sound = {"schema": 1, "task": "language_model", "step": 2, "cursor": 8, "losses": [None, 1.5], "scores": [], "validation_due": False}
    (tmp_path / "trainer.json").write_text(json.dumps(sound))
    assert read_state(tmp_path)["step"] == 2
    (tmp_path / "trainer.json").write_text(json.dumps({**sound, **changes}))
    with pytest.raises(CheckpointDamaged) as refusal:
        read_state(tmp_path)
    assert says in refusal.value.what and refusal.value.where.endswith("trainer.json")


@pytest.mark.parametrize("key", ["tokenizer", "name"])
def test_a_name_longer_than_any_file_may_have_is_a_file_that_is_not_there(damaged: Path, key: str) -> None:
    index = json.loads((damaged / "shards_index.json").read_text())
    if key == "tokenizer":
        index["tokenizer"] = "a" * 5000
        (damaged / "shards_index.json").write_text(json.dumps(index))
        assert open_corpus(damaged, "val").tokenizer is None
        return
    index["shards"][0]["name"] = f"val_{'0' * 5000}.bin"
    (damaged / "shards_index.json").write_text(json.dumps(index))
    with pytest.raises(DataDamaged) as caught:
        open_corpus(damaged, "val")
    assert in_three_lines(caught.value)
