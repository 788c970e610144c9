"""Plans that can't be launched: each fault says its line, the key, what is wrong and what would be right."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetd.plan import load_plan
from fleetd.plan_units import DURATION_SECONDS_MAX, parse_duration, parse_size, write_duration, write_size
from policies.errors import EXIT_USAGE, PlanInvalid

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "manpages" / "data"
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=timezone.utc)

BASE = f"""\
name: small
deadline: 2h
reserve: {{minimum: 10m, margin: 30s}}
hosts:
  box: {{root: host, capacity: 8GiB, floor: 1GiB}}
data:
  train: {{shards: {DATA}, split: train}}
  validation: {{shards: {DATA}, split: val}}
  test: {{shards: {DATA}, split: test}}
defaults:
  memory_cap: 2GiB
  training: {{model: {{config: {{model_type: llama}}}}, window: 64, batch: 8, steps: 10, optimizer: {{lr: 0.001}}}}
candidates:
  one: {{}}
"""


def faults(folder: Path, text: str) -> list[str]:
    """The faults of a plan, one line each; empty when it is valid."""
    path = folder / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load_plan(path, now=NOW)
    except PlanInvalid as invalid:
        refused = invalid
    else:
        return []
    assert refused.exit_code == EXIT_USAGE
    assert str(path) in refused.where and refused.fix
    return [line.strip() for line in refused.what.split("\n")]


def test_the_plan_that_these_tests_change_is_valid(tmp_path: Path) -> None:
    assert faults(tmp_path, BASE) == []


@pytest.mark.parametrize(("old", "new", "expected"), [
    ("deadline: 2h", "deadline: 2026-12-01T06:00:00", ("plan.yaml:2: deadline:", "names no time zone", "2026-12-01T06:00:00Z")),
    ("deadline: 2h", "deadline: 2026-12-01", ("plan.yaml:2: deadline:", "2026-12-01T06:00:00+01:00")),
    ("deadline: 2h", "deadline: 2026-11-30T08:00:00Z", ("plan.yaml:2: deadline:", "2026-11-30 08:00:00 UTC is 1 h ago")),
    ("deadline: 2h", "deadline: 90", ("plan.yaml:2: deadline:", "has no unit", "90s")),
    ("deadline: 2h", "deadline: 5m", ("plan.yaml:3: reserve:", "5 min ahead − reserve 10 min = −5 min")),
    ("name: small", "name: Small Plan", ("plan.yaml:1: name:", "'Small Plan' is no name")),
    ("  one: {}", "  all: {}", ("plan.yaml:14: candidates.all:", "already means something")),
    ("  one: {}", "  one: {}\n  one: {host: box}", ("plan.yaml:15: candidates.one:", "lines 14 and 15")),
    ("  one: {}", "  one: {host: bix}", ("plan.yaml:14: candidates.one.host:", "no host 'bix'", "did you mean 'box'")),
    ("  one: {}", "  one: {command: [true]}", ("candidates.one.command:", "no word of a command")),
    ("  one: {}", "  one: {command: python3 train.py}", ("candidates.one.command:", "[python3, train.py]")),
    ("  one: {}", "  one: {command: [x], training: {steps: 3}}", ("candidates.one:", "both `training` and `command`")),
    ("  one: {}", "  one: {command: [x], checkpoint: {keep: 2}}", ("candidates.one.checkpoint:", "candidate is a command")),
    ("  one: {}", "  one: {steps: 3}", ("candidates.one.steps:", "unknown key", "did you mean training.steps")),
    ("  one: {}", "  one: {training: {learning_rate: 3}}", ("candidates.one.training.learning_rate:", "training.optimizer.lr")),
    ("  one: {}", "  one: {environment: {HF_TOKEN: abc}}", ("candidates.one.environment:", "looks like a secret")),
    ("  one: {}", "  one: {environment: {FLEETD_RUN_DIR: x}}", ("candidates.one.environment:", "belongs to fleetd")),
    ("steps: 10", "steps: 0", ("plan.yaml:12: defaults.training.steps:", "0 is out of range", "greater than 0")),
    ("steps: 10", "steps: ten", ("defaults.training.steps:", "expected a whole number, found text 'ten'")),
    ("steps: 10", "steps: 10, micro_batch: 3", ("defaults.training.micro_batch:", "3 does not divide batch 8")),
    ("lr: 0.001", "lr: .nan", ("defaults.training.optimizer.lr:", "nan is")),
    ("lr: 0.001", "lr: 0.001, warmup: 10", ("defaults.training.optimizer.warmup:", "10 leaves none of 10 steps")),
    (", optimizer: {lr: 0.001}", "", ("candidates.one:", "training needs optimizer.lr")),
    ("config: {model_type: llama}", "config: nowhere.json", ("defaults.training.model.config:", "nowhere.json", "No such file")),
    ("model_type: llama", "model_type: bert", ("defaults.training.model.config:", "model_type is 'bert'")),
    ("model_type: llama", "model_type: llama, max_position_embeddings: 32", ("defaults.training.window:", "model's 32 positions")),
    ("memory_cap: 2GiB", "memory_cap: 8GiB", ("plan.yaml:11: defaults.memory_cap:", "cap 8GiB + floor 1GiB = 9GiB, 1GiB more than box has")),
    ("memory_cap: 2GiB", "memory_cap: 16G", ("defaults.memory_cap:", "could mean 1000 or 1024", "16GiB")),
    ("memory_cap: 2GiB", "memory_cap: 2GiB\n  checkpoint: {every_steps: -5}", ("plan.yaml:12: defaults.checkpoint.every_steps:", "-5 is out")),
    ("floor: 1GiB", "flor: 1GiB", ("plan.yaml:5: hosts.box.flor:", "did you mean floor?")),
    ("floor: 1GiB", "floor: 9GiB", ("hosts.box.floor:", "leaves nothing")),
    ("root: host, ", "", ("hosts.box:", "root is missing")),
    ("hosts:\n  box: {root: host, capacity: 8GiB, floor: 1GiB}\n", "", ("hosts is missing",)),
    ("candidates:\n  one: {}\n", "candidates: {}\n", ("plan.yaml:13: candidates:", "candidates is missing")),
    ("split: val", "split: dev", ("plan.yaml:8: data.validation.split:", "no split 'dev'", "test, train, val")),
    ("split: test", "split: train", ("plan.yaml:9: data.test:", "reserved until the freeze, but train reads the same files")),
    ("split: val", "split: train", ("data.validation:", "judged on what it was trained with")),
    ("  test: {", "  tset: {", ("data.tset:", "unknown role", "did you mean test?")),
    ("candidates:", "after_freeze: {evaluate: [holdout]}\ncandidates:", ("plan.yaml:13: after_freeze.evaluate:", "`data` has no holdout")),
    ("candidates:", "after_freeze: {evaluate: [validation]}\ncandidates:", ("after_freeze.evaluate[0]:", "one of calibration, test, holdout")),
    ("candidates:", "selection: {criterion: loss}\ncandidates:", ("selection.criterion:", "token_nll_v1")),
    ("candidates:", "notify: [{on: [failed]}]\ncandidates:", ("notify[0].command:", "is missing")),
    ("candidates:", "max_duration: 3h\ncandidates:", ("plan.yaml:13: max_duration:", "did you mean deadline?")),
    ("name: small", "name: small\ndefaults: !!python/object/apply:os.system [x]", ("plan.yaml:2: defaults:", "is not read")),
    ("  one: {}", "  one: [", ("not YAML",)),
])
def test_a_fault_names_its_line_its_key_and_the_way_out(tmp_path: Path, old: str, new: str, expected: tuple[str, ...]) -> None:
    assert old in BASE
    found = faults(tmp_path, BASE.replace(old, new, 1))
    assert any(all(part in line for part in expected) and " — " in line for line in found), found


def test_all_faults_of_a_plan_are_reported_at_once(tmp_path: Path) -> None:
    text = BASE.replace("2h", "soon").replace("capacity: 8GiB", "capacity: 8Gi").replace("split: val", "split: dev")
    text = text.replace("one: {}", "One: {host: x}")
    found = faults(tmp_path, text)
    assert [int(line.split(":")[1]) for line in found] == [2, 5, 8, 14, 14]


def test_one_fault_in_the_defaults_is_reported_once_for_all_candidates(tmp_path: Path) -> None:
    found = faults(tmp_path, BASE.replace("steps: 10", "steps: 10, micro_batch: 3").replace("  one: {}", "  one: {}\n  two: {}\n  three: {}"))
    assert len(found) == 1


def shards(folder: Path, index: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "shards_index.json").write_text(json.dumps(index))
    (folder / "train_000.bin").write_bytes(bytes(20))
    return folder


@pytest.mark.parametrize(("tokens", "name", "expected"), [
    (10, "train_000.bin", None),
    (11, "train_000.bin", "20 bytes, but 11 tokens are 22 bytes"),
    (10, "train_001.bin", "No such file"),
    (10, "../train_000.bin", "does not say its name"),
])
def test_a_shard_that_is_missing_or_cut_short_is_named(tmp_path: Path, tokens: int, name: str, expected: str | None) -> None:
    folder = shards(tmp_path / "shards", {"shards": [{"name": name, "split": "train", "tokens": tokens}]})
    found = faults(tmp_path, BASE.replace(f"train: {{shards: {DATA}", f"train: {{shards: {folder}"))
    assert [("data.train.shards" in line, expected in line) for line in found if expected] == ([(True, True)] if expected else [])
    assert bool(found) == bool(expected)


def test_a_link_to_reserved_data_is_the_reserved_data(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "sealed").mkdir()
    (tmp_path / "sealed" / "other.jsonl").symlink_to(tmp_path / "open" / "rows.jsonl")
    text = "name: a\ndeadline: 3h\nhosts: {box: {root: r}}\ncandidates: {c: {command: [x]}}\ndata: {train: {path: open}, test: {path: sealed}}"
    assert any("train reads the same files" in line for line in faults(tmp_path, text))


@pytest.mark.parametrize("text", ["", "[]", "just words", "name: [", "\t", "a: &a [*a]", "name: 'x", "? {a: b}\n: c", "a: " + "[" * 500, "\x00"])
def test_what_is_no_plan_is_refused_in_words(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, text)


def test_an_alias_bomb_ends_at_the_bound(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    assert any("more than" in line for line in faults(tmp_path, "\n".join(lines)))


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanInvalid, match="can't be read") as missing:
        load_plan(tmp_path / "none.yaml")
    assert "No such file" in missing.value.what
    (tmp_path / "plan.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(PlanInvalid) as binary:
        load_plan(tmp_path / "plan.yaml")
    assert "UTF-8" in binary.value.what
    with pytest.raises(PlanInvalid) as folder:
        load_plan(tmp_path)
    assert "plan.yaml" in folder.value.fix


TEXTS = st.sampled_from(["16GiB", "15m", "box", "train", "any", "x", "", "2026-12-01T06:00:00"])
NAMES = st.sampled_from(["host", "path", "steps", "optimizer", "a", "lr", "max"])
WORDS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-10, 10**7), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=6,
)
KEYS = ["name", "deadline", "reserve", "hosts", "data", "defaults", "candidates", "selection", "after_freeze", "notify", "other"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(KEYS), WORDS, max_size=5), st.sampled_from(["hosts", "data", "candidates"]), WORDS)
def test_whatever_stands_in_a_plan_the_answer_is_a_list_of_faults(tmp_path: Path, values: dict[str, Any], inside: str, value: Any) -> None:
    """No value of a wrong shape gets through, and none ends in a traceback."""
    assert faults(tmp_path, json.dumps({**values, inside: {"box": value, "train": value}}))


@given(st.integers(0, 2**60))
def test_a_size_survives_being_written_and_read(count: int) -> None:
    assert parse_size(write_size(count)) == count


@given(st.integers(0, int(DURATION_SECONDS_MAX * 1000)))
def test_a_duration_survives_being_written_and_read(milliseconds: int) -> None:
    assert parse_duration(write_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, abs=1e-6)


SPARKS = """\
  spark-a: {transport: ssh, root: /srv/fleetd}
  spark-b: {transport: ssh, root: /srv/fleetd, data_from: FROM}
data:
"""


@pytest.mark.parametrize(("given", "expected"), [
    ("spark-a", None), ("{host: spark-a, address: 10.0.0.1, user: trainer, port: 2222, identity_file: ~/.ssh/link}", None),
    ("spark-c", ("hosts.spark-b.data_from:", "no host 'spark-c'", "did you mean 'spark-a'")),
    ("{address: 10.0.0.1}", ("hosts.spark-b.data_from:", "`host` is missing")),
    ("box", ("hosts.spark-b.data_from:", "box is this machine")),
    ("spark-b", ("hosts.spark-b.data_from:", "wait for each other: spark-b → spark-b")),
    ("{host: spark-a, identity_file: link}", ("hosts.spark-b.data_from.identity_file:", "is a file on spark-b")),
    ("{host: spark-a, address: -oProxyCommand=x}", ("hosts.spark-b.data_from.address:", "write a name")),
])
def test_a_neighbour_is_another_host_of_the_plan_that_is_reached_over_ssh(tmp_path: Path, given: str, expected: tuple[str, ...] | None) -> None:
    found = faults(tmp_path, BASE.replace("data:\n", SPARKS.replace("FROM", given), 1))

    assert found == [] if expected is None else len(found) == 1 and all(word in found[0] for word in expected), found


def test_hosts_that_wait_for_each_other_are_each_told_so(tmp_path: Path) -> None:
    found = faults(tmp_path, BASE.replace("data:\n", SPARKS.replace("FROM", "spark-a").replace("fleetd}", "fleetd, data_from: spark-b}"), 1))

    assert len(found) == 2 and "spark-a → spark-b → spark-a" in found[0] and "spark-b → spark-a → spark-b" in found[1]
