"""`prove` takes a stretch of a run again and names the part that is not what it was, and from which step on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stage import GPT2, StopAfter, finish, log_of, make_run, make_task, prepare, start, train_here

from policies.errors import PlanInvalid, ResumeMismatch
from policies.facts import TrainerExit
from policies.manifest import MANIFEST_NAME, manifest_body
from trainer import loop
from trainer.__main__ import main
from trainer.files import dumps, folder_entries
from trainer.findings import PARTS
from trainer.fingerprint import POLICIES, code_digest
from trainer.models.build import trained_weights
from trainer.prove import Proof, prove
from trainer.state import TrainingState
from trainer.stopping import Stop


def proven(run_dir: Path, start: str | None = None, steps: int | None = None) -> Proof:
    return prove(run_dir, start=start, steps=steps, stop=Stop())


def first(proof: Proof) -> tuple[str, int | None, int | None] | None:
    cause = proof.cause
    return None if cause is None else (cause.name, cause.from_step, cause.seen_step)


def files_of(run_dir: Path) -> dict[str, bytes]:
    return {path.relative_to(run_dir).as_posix(): path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}


def test_an_honest_run_is_exact_in_every_part_and_is_not_touched(undisturbed: Path) -> None:
    before = files_of(undisturbed)
    proof = proven(undisturbed, "step-000000000")
    assert {name: verdict.value for name, (verdict, _) in proof.verdicts.items()} == dict.fromkeys(PARTS, "exact")
    assert proof.compared == (6, 8, 12) and proof.verdict.value == "exact"
    assert files_of(undisturbed) == before


def test_a_run_that_was_stopped_and_resumed_is_exact_too(tmp_path: Path, task: dict[str, Any]) -> None:
    run_dir = make_run(tmp_path, "run", task)
    for steps in (3, 2, 100):
        train_here(run_dir, StopAfter(steps))
    assert proven(run_dir, "0").verdict.value == "exact"


def test_a_run_made_by_other_code_is_told_and_still_compared(tmp_path: Path, task: dict[str, Any], undisturbed: Path) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    for code, said in ((code_digest(), "the same as in every attempt"), ("0" * 64, "unknown: the run was made by 000000000000")):
        (run_dir / "lineage.jsonl").write_text(json.dumps({"event": "start", "code": code}) + "\n{torn")
        assert said in proven(run_dir).code
    train_here(run_dir)
    assert "exactness is not claimed from step 12 on" in [record["text"] for record in log_of(run_dir) if record.get("event") == "note"][-1]


def lose_random_streams(training: Any) -> None:
    torch.manual_seed(0)


def lose_one_moment(training: Any) -> None:
    weight = next(iter(trained_weights(training.state.model).values()))
    training.state.optimizer.state[weight]["exp_avg_sq"].zero_()


def lose_optimizer_steps(training: Any) -> None:
    for weight in trained_weights(training.state.model).values():
        training.state.optimizer.state[weight]["step"].zero_()


def lose_cursor(training: Any) -> None:
    training.state.cursor = 0


def lose_a_weight(training: Any) -> None:
    with torch.no_grad():
        next(iter(trained_weights(training.state.model).values()))[5, 5] += 1e-3


LOSSES: list[tuple[Callable[[Any], None], str]] = [
    (lose_random_streams, "rng"), (lose_one_moment, "moments"), (lose_optimizer_steps, "moments"), (lose_cursor, "sampler"),
    (lose_a_weight, "weights"),
]


@pytest.mark.parametrize("every", [1, 4], ids=["a checkpoint a step", "a checkpoint every four steps"])
@pytest.mark.parametrize(("lose", "part"), LOSSES)
def test_a_run_that_lost_a_part_when_it_was_resumed_is_caught_by_its_record(
    tmp_path: Path, shards: Path, lose: Callable[[Any], None], part: str, every: int,
) -> None:
    task = make_task(shards / "train", None, steps=8, checkpoint={"every_steps": every, "every_seconds": None, "keep": 99})
    run_dir = make_run(tmp_path, "run", task)
    train_here(run_dir, StopAfter(4))
    training = prepare(run_dir)
    lose(training)
    training.train()
    proof = proven(run_dir, "step-000000004")
    assert first(proof) == (part, 5, 5 if every == 1 else 8), proof.to_text()
    assert f"look at {part} first, from step 5" in proof.to_text()
    if part == "moments" and every == 1 and lose is lose_one_moment:
        assert "exp_avg_sq/transformer.wte.weight" in proof.to_text() and "more of" not in proof.parts["moments"].because
    assert proven(run_dir, "0", steps=4).verdict.value == "exact", "before the resume it was"


def test_a_run_with_another_schedule_is_caught_at_the_first_rate(tmp_path: Path, task: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, rate = make_run(tmp_path, "run", task), loop.learning_rate
    train_here(run_dir, StopAfter(6))
    monkeypatch.setattr(loop, "learning_rate", lambda step, settings, steps: rate(step - 6, settings, steps))  # counts from the resume
    train_here(run_dir)
    monkeypatch.undo()
    proof = proven(run_dir, "step-000000006")
    assert first(proof) == ("schedule", 7, 7), proof.to_text()
    (run_dir / "log.jsonl").unlink()
    without_log = proven(run_dir, "step-000000006")
    assert without_log.verdicts["schedule"][0].value == "unknown" and without_log.verdict.value == "inexact"


@pytest.mark.parametrize(("lose", "part"), LOSSES)
def test_a_trainer_that_loses_a_part_in_every_restore_is_caught_before_the_first_step(
    undisturbed: Path, monkeypatch: pytest.MonkeyPatch, lose: Callable[[Any], None], part: str,
) -> None:
    restore = TrainingState.restore

    def forgetful(state: TrainingState, folder: Path, **more: Any) -> None:
        restore(state, folder, **more)
        lose(type("Training", (), {"state": state}))

    monkeypatch.setattr(TrainingState, "restore", forgetful)
    assert first(proven(undisturbed, "step-000000006", steps=2)) == (part, 6, 6)


def test_only_one_checkpoint_leaves_the_state_unknown_and_the_logged_losses_compared(tmp_path: Path, shards: Path) -> None:
    run_dir = make_run(tmp_path, "run", make_task(shards / "train", None, checkpoint={"every_steps": None, "every_seconds": None, "keep": 1}))
    train_here(run_dir)
    shutil.rmtree(run_dir / "checkpoints/step-000000012")
    proof = proven(run_dir)
    verdicts = {name: verdict.value for name, (verdict, _) in proof.verdicts.items()}
    assert verdicts == {"losses": "exact", "schedule": "exact", "sampler": "unknown", "rng": "unknown", "moments": "unknown", "weights": "unknown"}
    assert proof.verdict.value == "unknown" and "no later record" in proof.to_text() and proof.end == 12
    assert main(["prove", str(run_dir)]) == TrainerExit.CONFIG


def rewritten(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of a checkpoint and make its manifest fit again."""
    body = json.loads((folder / name).read_text())
    change(body)
    (folder / name).write_bytes(dumps(body))
    (folder / MANIFEST_NAME).unlink()
    (folder / MANIFEST_NAME).write_bytes(dumps(manifest_body(folder_entries(folder))))


def test_another_environment_makes_a_difference_unknown_and_equal_bits_stay_equal(tmp_path: Path, undisturbed: Path) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    rewritten(run_dir / "checkpoints/step-000000006", "trainer.json", lambda body: body["environment"].update(torch="1.0.0"))
    proof = proven(run_dir, "step-000000006")
    assert proof.verdict.value == "exact" and "torch: '1.0.0'" in proof.other_environment
    rewritten(run_dir / "checkpoints/step-000000012", "trainer.json", lambda body: body["losses"].__setitem__(8, 1.5))
    other = proven(run_dir, "step-000000006")
    assert other.verdicts["losses"][0].value == "unknown" and "so does the environment: torch" in other.verdicts["losses"][1]


def test_a_loss_that_was_written_down_wrong_is_named_with_its_step(tmp_path: Path, undisturbed: Path) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    folder, loss = run_dir / "checkpoints/step-000000012", proven(run_dir).parts["losses"]
    assert loss.seen_step is None
    rewritten(folder, "trainer.json", lambda body: body["losses"].__setitem__(8, float(np.nextafter(body["losses"][8], 9))))
    assert first(proven(run_dir, "step-000000006")) == ("losses", 9, 9)


def test_other_settings_other_data_and_damaged_or_absent_checkpoints_are_refused(tmp_path: Path, undisturbed: Path, task: dict[str, Any]) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    (run_dir / "task.json").write_text(json.dumps({**task, "seed": 8}))
    with pytest.raises(ResumeMismatch, match="seed: 7 in the checkpoint, 8 now"):
        proven(run_dir)
    (run_dir / "task.json").write_text(json.dumps({**task, "data": {**task["data"], "train": task["data"]["validation"] | {"split": "val"}}}))
    with pytest.raises((ResumeMismatch, PlanInvalid)):
        proven(run_dir)
    (run_dir / "task.json").write_text(json.dumps(task))
    (run_dir / "checkpoints/step-000000008/model.safetensors").write_bytes(b"")
    with pytest.raises(PlanInvalid, match="it has 0 bytes"):
        proven(run_dir, "step-000000008")
    assert proven(run_dir).start.step == 6
    with pytest.raises(PlanInvalid, match="no checkpoint of that name"):
        proven(run_dir, "step-000000007")
    with pytest.raises(PlanInvalid, match="holds nothing after"):
        proven(run_dir, "step-000000012")


def test_the_command_says_it_as_text_as_json_as_evidence_and_as_exit_status(tmp_path: Path, shards: Path, undisturbed: Path) -> None:
    run_dir = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    status, output = finish(start(run_dir, "prove", str(run_dir), "--json", "--record", "--steps", "5"))
    said = json.loads(output[output.index("{\n"):])
    assert status == TrainerExit.FINISHED and said["verdict"] == "exact" and said["from"]["step"] == 8 and said["to_step"] == 12
    kept = json.loads((run_dir / "evidence/exactness.json").read_text())
    assert {key: value for key, value in kept.items() if key != "at"} == said

    lossy = make_run(tmp_path, "lossy", make_task(shards / "train", None, model={"config": GPT2}, steps=8))
    train_here(lossy, StopAfter(5))
    training = prepare(lossy)
    lose_cursor(training)
    training.train()
    status, output = finish(start(lossy, "prove", str(lossy), "--from", "step-000000005"))
    assert status == TrainerExit.GATE_FAILED and "inexact: look at sampler first, from step 6 (seen at step 8" in output, output


def test_the_code_that_is_told_is_what_the_trainer_imports_and_no_more() -> None:
    root = Path(__file__).parent.parent.parent
    seen: set[str] = set()
    waiting = [*(root / "trainer").rglob("*.py")]
    while waiting:
        found = set(re.findall(r"^ *from policies\.(\w+) import", waiting.pop().read_text(), re.MULTILINE)) - seen
        seen |= found
        waiting += [root / f"policies/{name}.py" for name in found]
    assert sorted(seen) == sorted(POLICIES)
