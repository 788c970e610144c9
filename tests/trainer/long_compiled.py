"""What compiling takes the suite too long for (`make prove` runs it): a compiled run equals itself over stops, a broken compiler is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from test_compiled import compiled_task
from trainer_stage import StopAfter, finish, last_step, log_of, logged_losses, make_run, manifest_bytes, prepare, start, train_here

from policies.errors import ResumeMismatch
from policies.facts import TrainerExit
from trainer.prove import prove
from trainer.stopping import Stop

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own, when its compiler is imported


def test_a_compiled_run_that_is_stopped_equals_its_twin_keeps_plain_names_and_proves_exact(tmp_path: Path, shards: Path) -> None:
    whole, run_dir = (make_run(tmp_path, name, compiled_task(shards)) for name in ("whole", "run"))
    written = make_run(tmp_path, "written", {**compiled_task(shards), "compile": False})
    for each in (whole, written):
        assert train_here(each) == TrainerExit.FINISHED
    assert train_here(run_dir, StopAfter(3)) == TrainerExit.STOPPED and last_step(run_dir) == 3
    assert train_here(run_dir) == TrainerExit.FINISHED
    assert manifest_bytes(run_dir, 6) == manifest_bytes(whole, 6)
    assert prove(run_dir, start="0", steps=None, stop=Stop()).verdict == "exact"
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert load_file(whole / "checkpoints/step-000000006" / file).keys() == load_file(written / "checkpoints/step-000000006" / file).keys()
    assert logged_losses(run_dir) == pytest.approx(logged_losses(written), rel=1e-5) and logged_losses(run_dir) != logged_losses(written)
    rows = "predictions/validation/step-000000000.jsonl"
    assert (whole / rows).read_bytes() == (written / rows).read_bytes(), "scoring is as written"
    assert [record["phase"] for record in log_of(whole) if record.get("event") == "compile"] == ["begin", "end"]

    (run_dir / "task.json").write_text(json.dumps({**compiled_task(shards), "compile": False}))
    with pytest.raises(ResumeMismatch, match=r"environment\.compile") as refused:
        prepare(run_dir)
    assert "absent" in refused.value.what


def test_a_compiler_that_fails_is_a_refusal_with_its_words(tmp_path: Path, shards: Path) -> None:
    broken, run_dir = tmp_path / "broken", make_run(tmp_path, "run", compiled_task(shards))
    broken.write_text('#!/bin/sh\ncase "$*" in *--version*) echo "broken 1.0";; *) echo "no such header" >&2; exit 1;; esac\n')
    broken.chmod(0o755)
    status, output = finish(start(run_dir, CXX=str(broken), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache")))
    assert status == TrainerExit.CONFIG and "Traceback" not in output, output
    assert "the model can't be compiled here" in output and "leave compile out of the plan" in output
    assert [record["event"] for record in log_of(run_dir)] == ["compile", "failed"]
