"""plan.yaml to a frozen Plan: what a valid plan resolves to, and where each of its values came from."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from fleetd.campaign import Plan
from fleetd.plan import LoadedPlan, load_plan, plan_schema
from fleetd.wire import decode, encode
from policies.errors import PlanInvalid
from policies.facts import GIB, MIB, CapGrade, SignalTarget, Split
from trainer.config import TrainTask, parse_task

ROOT = Path(__file__).resolve().parent.parent
MANPAGES = ROOT / "examples" / "manpages" / "plan.yaml"
COMMANDS = ROOT / "examples" / "commands" / "plan.yaml"
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=timezone.utc)

SMALL = """\
name: small
deadline: 2h
reserve: {minimum: 10m, margin: 30s}
hosts:
  box: {root: host}
candidates:
  printer:
    command: [python3, -c, "print(1)"]
"""


def written(folder: Path, text: str) -> LoadedPlan:
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    return load_plan(path, now=NOW)


def test_the_manpages_example_is_a_plan_for_our_trainer() -> None:
    plan = load_plan(MANPAGES, now=NOW).plan
    assert [candidate.name for candidate in plan.candidates] == ["slow", "middle", "fast"]
    assert len({candidate.task["optimizer"]["lr"] for candidate in plan.candidates if candidate.task}) == 3
    task = plan.candidates[0].task
    assert task is not None and "data" not in task
    assert task["task"] == "language_model" and task["model"]["config"]["vocab_size"] == 8000
    wanted = "window batch micro_batch steps seed optimizer checkpoint validation threads device precision log_every"
    assert set(wanted.split()) <= set(task)
    assert task["checkpoint"].keys() == {"every_steps", "every_seconds", "keep"}
    assert plan.after_freeze.evaluate == (Split.TEST,)


def test_both_parts_of_the_cap_of_an_evaluation_and_its_demand_reach_the_plan(tmp_path: Path) -> None:
    def terms(cap: str) -> tuple[int, int, CapGrade]:
        found = written(tmp_path, SMALL + f"after_freeze: {{memory_cap: {cap}}}\n").plan.after_freeze
        return found.memory_host_bytes, found.memory_accelerator_bytes, found.memory_demand

    assert terms("{host: 3GiB, accelerator: 5GiB, demand: enforced}") == (3 * GIB, 5 * GIB, CapGrade.ENFORCED)
    assert terms("4GiB") == (4 * GIB, 4 * GIB, CapGrade.SAMPLED)


def test_the_commands_example_is_a_plan_of_ordinary_programs() -> None:
    plan = load_plan(COMMANDS, now=NOW).plan
    assert all(candidate.task is None and candidate.command for candidate in plan.candidates)
    assert {candidate.signal for candidate in plan.candidates} == {SignalTarget.GROUP}
    assert plan.candidates[0].working_directory == str(COMMANDS.parent)
    assert plan.data == ()


@pytest.mark.parametrize("path", [MANPAGES, COMMANDS], ids=["manpages", "commands"])
def test_a_plan_crosses_a_wire_unchanged(path: Path) -> None:
    plan = load_plan(path, now=NOW).plan
    assert decode(Plan, json.loads(json.dumps(encode(plan)))) == plan


def test_defaults_reach_every_candidate_and_a_candidate_overrides_single_keys_of_them(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALL + """\
  other:
    command: [sh, -c, "exit 0"]
    restarts: {max: 1}
    memory_cap: {host: 2GiB}
defaults:
  memory_cap: 4GiB
  restarts: {max: 3, first: 5s}
""")
    printer, other = loaded.plan.candidates
    assert (printer.restarts.restarts_max, printer.restarts.first_seconds) == (3, 5.0)
    assert (other.restarts.restarts_max, other.restarts.first_seconds, other.restarts.ceiling_seconds) == (1, 5.0, 300.0)
    assert (printer.memory_host_bytes, printer.memory_accelerator_bytes) == (4 * GIB, 4 * GIB)
    assert (other.memory_host_bytes, other.memory_accelerator_bytes) == (2 * GIB, 4 * GIB)


def test_every_value_knows_the_line_that_decided_it(tmp_path: Path) -> None:
    loaded = written(tmp_path, SMALL + "    stop: {grace_ceiling: 1m}\ndefaults:\n  memory_cap: 4GiB\n")
    sources = {path: str(source) for path, source in loaded.sources.items()}
    assert sources["name"] == "line 1"
    assert sources["reserve.minimum"] == "line 3" and sources["reserve.factor"] == "default"
    assert sources["candidates.printer.stop.grace_ceiling"] == "line 9"
    assert sources["candidates.printer.stop.grace_floor"] == "default"
    assert sources["candidates.printer.memory_cap.host"] == "defaults: line 11"
    assert sources["candidates.printer.memory_cap.demand"] == "default"
    assert sources.keys() == loaded.values.keys()


def test_a_command_takes_no_training_from_the_defaults(tmp_path: Path) -> None:
    text = MANPAGES.read_text(encoding="utf-8").replace("shards: data", f"shards: {MANPAGES.parent / 'data'}")
    loaded = written(tmp_path, text.replace("candidates:\n", "candidates:\n  echo: {command: [echo, hello]}\n"))
    echo, slow = loaded.plan.candidates[:2]
    assert (echo.task, echo.command, echo.signal) == (None, ("echo", "hello"), SignalTarget.GROUP)
    assert slow.command is None and slow.task and slow.signal is SignalTarget.LEADER
    assert not any(path.startswith(("candidates.echo.training", "candidates.echo.checkpoint")) for path in loaded.values)


def test_a_deadline_is_a_duration_from_launch_or_a_moment_in_any_zone(tmp_path: Path) -> None:
    assert written(tmp_path, SMALL).plan.deadline_seconds == 7200.0
    plan = written(tmp_path, SMALL.replace("2h", "2026-12-01T06:00:00+01:00")).plan
    assert plan.deadline_seconds is None
    assert plan.deadline_at == datetime(2026, 12, 1, 5, 0, tzinfo=timezone.utc)


def test_paths_start_at_the_plan_and_only_the_tilde_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("PLACE", "elsewhere")
    expected = {"host": f"{tmp_path}/host", "~/host": "/home/someone/host", "$PLACE/host": f"{tmp_path}/$PLACE/host", "/abs": "/abs"}
    assert {text: written(tmp_path, SMALL.replace("root: host", f"root: {text}")).plan.hosts[0].root for text in expected} == expected


def test_a_role_of_shards_names_only_the_files_of_its_own_split() -> None:
    roles = {role.split: role for role in load_plan(MANPAGES, now=NOW).plan.data}
    assert "train_003.bin" in roles[Split.TRAIN].include
    assert not any("val_" in name or "test_" in name for name in roles[Split.TRAIN].include)
    assert roles[Split.VALIDATION].include == ("shards_index.json", "tokenizer.model", "val_000.bin", "val_000.bin.json", "val_000.langs.u8")
    assert roles[Split.VALIDATION].tokens_per_document_max == 512


def test_other_files_are_a_role_by_path_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("{}\n")
    role = written(tmp_path, SMALL + "data: {train: {path: rows, include: ['*.jsonl']}}\n").plan.data[0]
    assert (role.path, role.include, role.shard_split) == (str(tmp_path / "rows"), ("*.jsonl",), None)


def test_a_model_config_may_lie_in_a_file_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(json.dumps({"model_type": "gpt2", "n_positions": 64}))
    data = MANPAGES.parent / "data"
    loaded = written(tmp_path, f"""\
name: tiny
deadline: 1d
hosts: {{box: {{root: host}}}}
data: {{train: {{shards: {data}, split: train}}, validation: {{shards: {data}, split: val}}}}
candidates:
  one: {{training: {{model: {{config: tiny.json}}, window: 64, batch: 8, steps: 10, optimizer: {{lr: 1e-3}}}}}}
""")
    task = loaded.plan.candidates[0].task
    assert task is not None
    assert task["model"]["config"] == {"model_type": "gpt2", "n_positions": 64}
    assert (task["micro_batch"], task["optimizer"]["lr"], task["checkpoint"]["every_seconds"]) == (8, 0.001, 900.0)


def test_words_that_older_yaml_takes_for_something_else_stay_words(tmp_path: Path) -> None:
    text = SMALL + "    environment: {ANSWER: no, SINCE: 2026-01-01, CLOCK: 12:30}\nnotify: [{command: [cat], on: [failed]}]\n"
    plan = written(tmp_path, text).plan
    assert plan.candidates[0].environment == {"ANSWER": "no", "SINCE": "2026-01-01", "CLOCK": "12:30"}
    assert plan.notify[0].on == ("failed",)


def test_sizes_are_exact_bytes(tmp_path: Path) -> None:
    def cap(text: str) -> int:
        return written(tmp_path, SMALL + f"    memory_cap: {text}\n").plan.candidates[0].memory_host_bytes
    assert [cap("16GiB"), cap("500MB"), cap("1048576"), cap("1.5 GiB")] == [16 * GIB, 500_000_000, MIB, 3 * GIB // 2]


def test_a_plan_that_is_too_late_by_a_second_was_valid_before(tmp_path: Path) -> None:
    moment = NOW + timedelta(minutes=10, seconds=31)
    text = SMALL.replace("2h", moment.isoformat())
    assert written(tmp_path, text).plan.deadline_at == moment


def test_the_schema_for_editors_is_current_and_describes_its_keys() -> None:
    kept = json.loads((ROOT / "fleetd" / "plan.schema.json").read_text(encoding="utf-8"))
    assert kept == json.loads(json.dumps(plan_schema())), "run: fleetd plan-schema > fleetd/plan.schema.json"
    assert kept["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    candidate = kept["$defs"]["CandidateSection"]["properties"]
    assert {"memory_cap", "training", "command", "restarts"} <= candidate.keys()
    reserve = kept["$defs"]["ReserveSection"]["properties"]
    assert reserve["minimum"]["default"] == "2h" and "Never less" in reserve["minimum"]["description"]
    assert kept["additionalProperties"] is False


@pytest.mark.parametrize("name", ["slow", "middle", "fast"])
def test_our_trainer_accepts_the_tasks_that_the_example_resolves_to(name: str) -> None:
    """The plan and the trainer check the same settings, each for itself: they must not drift apart."""
    (task,) = [candidate.task for candidate in load_plan(MANPAGES, now=NOW).plan.candidates if candidate.name == name]
    assert task is not None
    data = {role: {"path": "/data", "digest": "0" * 64, "split": role} for role in ("train", "validation")}
    parsed = parse_task({**task, "data": data}, where="here")
    assert isinstance(parsed, TrainTask)
    assert (parsed.steps, parsed.optimizer.lr, parsed.checkpoint.every_seconds) == (task["steps"], task["optimizer"]["lr"], 300.0)
    assert parsed.validation.minimum_improvement == 0.001


def test_a_corpus_of_zrodlo_the_sampler_of_zxell_a_pilot_a_proof_and_compile_have_their_keys(tmp_path: Path) -> None:
    data = MANPAGES.parent / "data"
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "tokens.bin").write_bytes(bytes(40))
    (tmp_path / "words" / "corpus.json").write_text(json.dumps({"tokens": 10}))
    text = f"""\
name: tiny
deadline: 1d
hosts: {{box: {{root: host}}}}
data: {{train: {{shards: {data}, split: train}}, validation: {{corpus: words}}}}
candidates:
  one:
    pilot: {{steps: 3}}
    proof: {{steps: 4, required: true}}
    training: {{model: {{config: {{model_type: llama}}}}, window: 64, batch: 8, steps: 10, sampler: zxell, compile: true, optimizer: {{lr: 1e-3}}}}
"""
    plan = written(tmp_path, text).plan
    task, role = plan.candidates[0].task, plan.data[1]
    assert task is not None and (task["sampler"], task["pilot"]) == ("zxell", {"steps": 3})
    assert task["compile"] is True and task["proof"] == {"steps": 4, "required": True}
    assert role.is_corpus and role.shard_split is None and role.include == ("corpus.json", "tokens.bin", "tokenizer.json")
    too_many = text.replace("steps: 3", "steps: 10").replace("steps: 4", "steps: 10")
    with pytest.raises(PlanInvalid) as caught:
        written(tmp_path, too_many.replace(f"shards: {data}, split: train", "corpus: words"))
    assert "a pilot of 10 steps leaves none of 10 steps" in caught.value.what and "a proof of 10 steps" in caught.value.what
    assert "sampler zxell draws from token shards" in caught.value.what
    (tmp_path / "words" / "tokens.bin").write_bytes(bytes(39))
    with pytest.raises(PlanInvalid, match=r"39 bytes, but corpus\.json says 10 tokens of 4 bytes"):
        written(tmp_path, text)
