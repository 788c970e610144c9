"""A model that is to be compiled: refused in time where that can't be done. What a compiled run is equal to: long_compiled.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trainer_stage import LLAMA, log_of, make_run, make_task

from policies.errors import PlanInvalid
from policies.facts import TrainerExit
from trainer import __main__ as command
from trainer.config import parse_task


def compiled_task(shards: Path, **changes: Any) -> dict[str, Any]:
    """One layer: compiling is what this costs."""
    small = {**LLAMA, "num_hidden_layers": 1}
    return make_task(shards / "train", shards / "val", **{"model": {"config": small}, "steps": 6, "compile": True, **changes})


def test_a_host_without_a_compiler_refuses_at_the_start_and_says_what_to_do(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = make_run(tmp_path, "run", compiled_task(shards))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    assert command.main(["train", str(run_dir)]) == TrainerExit.CONFIG
    told = capsys.readouterr().err
    assert "there is no C++ compiler" in told and "leave compile out of the plan" in told and "Traceback" not in told
    assert "can't be compiled here" in log_of(run_dir)[-1]["because"], "the supervisor tells it as the run's reason"
    assert not list((run_dir / "checkpoints").iterdir())


def test_compile_is_true_or_false(shards: Path) -> None:
    with pytest.raises(PlanInvalid, match="compile: true or false is needed, not 'max-autotune'"):
        parse_task(compiled_task(shards, compile="max-autotune"), where="here")
