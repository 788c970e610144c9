"""A zxell run goes on as ours and ours as one of zxell, against an implementation that was written from the page alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stage import StopAfter, last_step, log_of, manifest_bytes, prepare, train_here
from zxell_reference import Training, Zxell, check_run, rate, train_shards

from policies.errors import ExplainedError, PlanInvalid, RequestRefused
from policies.facts import TrainerExit
from trainer.checkpoint import verify
from trainer.files import folder_entries
from trainer.formats.zxell_checkpoint import read_checkpoint
from trainer.formats.zxell_continue import export_run, import_run
from trainer.formats.zxell_models import load_any, write_model_directory, write_weights_of
from trainer.state import read_state

SAMPLES = Path(__file__).parent.parent / "data/zxell"
RUN, SHARDS = SAMPLES / "run", SAMPLES / "shards"


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample run, gone on from its step 20 to its end at 40 without a stop."""
    folder = tmp_path_factory.mktemp("continued") / "run"
    import_run(RUN, folder, SHARDS)
    assert train_here(folder) == TrainerExit.FINISHED
    return folder


def files_of(folder: Path) -> dict[str, str]:
    return {entry.path: entry.sha256 for entry in folder_entries(folder)}


def test_an_imported_run_stands_where_zxell_stood(tmp_path: Path) -> None:
    first = import_run(RUN, tmp_path / "run", SHARDS)
    assert (first.step, first.path) == (20, tmp_path / "run/checkpoints/step-000000020")
    assert verify(first.path).digest == first.digest
    described = read_state(first.path)
    assert described["losses"][9] == json.loads((RUN / "log.jsonl").read_text().splitlines()[1])["loss"]
    assert described["losses"][10] is None, "what zxell did not log stays unknown"
    assert (tmp_path / "run/zxell/config.json").read_bytes() == (RUN / "config.json").read_bytes()


def test_the_continuation_draws_the_same_windows_and_follows_the_same_schedule_as_zxell(continued: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    reference = Training.load(RUN, train_shards(SHARDS))
    reference.go(20)
    import_run(RUN, tmp_path / "run", SHARDS)
    sampler = prepare(tmp_path / "run").sampler
    ours = np.concatenate([sampler.batch(cursor, 4) for cursor in range(80, 160, 4)])
    assert np.array_equal(ours, np.concatenate(reference.drawn))
    steps = [record for record in log_of(continued) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(21, 41))
    assert [record["lr"] for record in steps] == [pytest.approx(rate(reference.args, record["step"] - 1), rel=1e-12) for record in steps]
    # Another order of the same sums (fused against split projections) costs the last bits, and no more.
    assert [record["loss"] for record in steps] == pytest.approx(reference.losses, rel=2e-4)
    assert reference.losses[-1] < reference.losses[0]


def test_a_continuation_that_is_stopped_equals_the_one_that_is_not(continued: Path, tmp_path: Path) -> None:
    import_run(RUN, tmp_path / "run", SHARDS)
    for steps in (3, 10):
        assert train_here(tmp_path / "run", StopAfter(steps)) == TrainerExit.STOPPED
    assert train_here(tmp_path / "run") == TrainerExit.FINISHED
    assert manifest_bytes(tmp_path / "run", 40) == manifest_bytes(continued, 40)


def test_an_export_is_read_and_continued_by_code_written_from_the_page(continued: Path, tmp_path: Path) -> None:
    assert export_run(continued, tmp_path / "out") == 40
    body = check_run(tmp_path / "out")
    assert body["step"] == 40
    assert (tmp_path / "out/ckpt_final.pt").read_bytes() == (tmp_path / "out/ckpt_last.pt").read_bytes()
    records = [json.loads(line) for line in (tmp_path / "out/log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 10, 20, 30, 40]
    assert any(record.get("eval") == "val" for record in records), "the log of the zxell run is kept"
    training = Training.load(tmp_path / "out", train_shards(SHARDS))
    training.args = {**training.args, "steps": 60}
    training.go(2)
    ours, _, step = load_any(continued / "checkpoints/step-000000040")
    theirs = Zxell(body["config"])
    theirs.load_state_dict(body["model"])
    tokens = torch.arange(3, 19).view(1, -1)
    with torch.no_grad():
        assert torch.allclose(theirs(tokens), ours(input_ids=tokens).logits, atol=1e-4)
    assert step == 40


def test_zxell_goes_on_from_our_export_as_we_would(tmp_path: Path) -> None:
    import_run(RUN, tmp_path / "run", SHARDS)
    train_here(tmp_path / "run", StopAfter(5))
    export_run(tmp_path / "run", tmp_path / "out")
    theirs = Training.load(tmp_path / "out", train_shards(SHARDS))
    theirs.go(15)
    train_here(tmp_path / "run")
    ours = [record["loss"] for record in log_of(tmp_path / "run") if record.get("step", 0) > 25 and "loss" in record]
    assert theirs.losses == pytest.approx(ours, rel=2e-4)


def test_export_import_export_is_byte_stable(tmp_path: Path) -> None:
    import_run(RUN, tmp_path / "run", SHARDS)
    train_here(tmp_path / "run", StopAfter(5))
    export_run(tmp_path / "run", tmp_path / "first")
    import_run(tmp_path / "first", tmp_path / "again", SHARDS)
    export_run(tmp_path / "again", tmp_path / "second")
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")
    assert set(files_of(tmp_path / "first")) == {"config.json", "log.jsonl", "ckpt_last.pt"}


def test_import_and_export_lose_no_bit_of_the_state(tmp_path: Path) -> None:
    import_run(RUN, tmp_path / "run", SHARDS)
    export_run(tmp_path / "run", tmp_path / "out")
    theirs, ours = (torch.load(folder / "ckpt_last.pt", weights_only=True) for folder in (RUN, tmp_path / "out"))
    assert list(theirs["model"]) == list(ours["model"])
    assert all(torch.equal(theirs["model"][name], ours["model"][name]) for name in theirs["model"])
    assert theirs["sampler"] == ours["sampler"]
    assert (theirs["step"], theirs["config"], theirs["args"]) == (ours["step"], ours["config"], ours["args"])
    assert set(theirs["optimizer"]["state"]) == set(ours["optimizer"]["state"])
    for number, entry in theirs["optimizer"]["state"].items():
        assert all(torch.equal(value, ours["optimizer"]["state"][number][key]) for key, value in entry.items())
    for one, other in zip(theirs["optimizer"]["param_groups"], ours["optimizer"]["param_groups"], strict=True):
        assert {**one, "lr": 0} == {**other, "lr": 0}
        assert one["lr"] == pytest.approx(other["lr"], rel=1e-12)


def test_weights_alone_leave_in_fp32_with_the_head_and_in_bf16_without_it(continued: Path, tmp_path: Path) -> None:
    checkpoint = continued / "checkpoints/step-000000040"
    write_weights_of(checkpoint, tmp_path / "full.pt", half=False)
    write_weights_of(checkpoint, tmp_path / "half.pt", half=True)
    full, half = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("full.pt", "half.pt"))
    assert set(full) - set(half) == {"lm_head.weight"}
    assert {tensor.dtype for tensor in full.values()} == {torch.float32} and {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    assert all(torch.equal(full[name].bfloat16(), half[name]) for name in half)
    write_model_directory(tmp_path / "full.pt", tmp_path / "model")
    write_weights_of(tmp_path / "model", tmp_path / "again.pt", half=False)
    again = read_checkpoint(tmp_path / "again.pt")
    assert all(torch.equal(again.tensors[name], full[name]) for name in again.tensors)
    assert read_checkpoint(tmp_path / "half.pt").optimizer is None


def test_a_model_directory_of_a_pt_is_read_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_model_directory(RUN / "ckpt_last.pt", tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True, use_safetensors=True).eval()
    ours, window, _ = load_any(RUN / "ckpt_last.pt")
    tokens = torch.arange(3, 19).view(1, -1)
    with torch.no_grad():
        assert torch.equal(read(input_ids=tokens).logits, ours(input_ids=tokens).logits)
    assert window == 16


def broken_run(tmp_path: Path, **args: Any) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(RUN, folder)
    described = json.loads((folder / "config.json").read_text())
    described["args"] |= args
    (folder / "config.json").write_text(json.dumps(described))
    return folder


@pytest.mark.parametrize(("args", "named"), [({"seed": 5}, "args.seed"), ({"wd": 0.2}, "args.wd"), ({"steps": 10, "warmup": 1}, "args.steps")])
def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_left(tmp_path: Path, args: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanInvalid) as refused:
        import_run(broken_run(tmp_path, **args), tmp_path / "run", SHARDS)
    assert named in refused.value.what
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


def test_other_shards_than_the_runs_own_are_refused(tmp_path: Path) -> None:
    folder = broken_run(tmp_path)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "train_shards": ["train_000.bin"]}))
    with pytest.raises(PlanInvalid) as refused:
        import_run(folder, tmp_path / "run", SHARDS)
    assert "trained on 1 shards" in refused.value.what


def test_nothing_is_overwritten_and_what_zxell_can_not_go_on_from_is_not_exported(tmp_path: Path, undisturbed: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(RequestRefused):
        import_run(RUN, tmp_path / "there", SHARDS)
    with pytest.raises(PlanInvalid) as refused:
        export_run(undisturbed, tmp_path / "out")
    assert "zxell" in refused.value.what
    assert list((tmp_path / "there").iterdir()) == [] and not (tmp_path / "out").exists()


def test_weights_alone_can_not_be_continued(tmp_path: Path) -> None:
    write_model_directory(RUN / "ckpt_last.pt", tmp_path / "model")
    folder = broken_run(tmp_path)
    (folder / "ckpt_last.pt").unlink()
    write_weights_of(tmp_path / "model", folder / "ckpt_last.pt", half=False)
    with pytest.raises(ExplainedError, match="can't go on") as refused:
        import_run(folder, tmp_path / "run", SHARDS)
    assert "weights only" in refused.value.what


def test_the_last_checkpoint_before_the_import_is_the_first_of_the_run(continued: Path) -> None:
    assert last_step(continued) == 40
    assert any(record.get("event") == "start" and record["step"] == 20 for record in log_of(continued))
