"""Mutated files of every format: each is taken or refused with its place, and the fuzzer itself sees what it should."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from fuzz_formats import FAULTS_MAX, MEMORY_BYTES_MAX, Outcome, feed, fuzz, laid_out, memory_limit, mutate
from fuzz_targets import Target
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.errors import CheckpointDamaged, DataDamaged, ExplainedError
from trainer.files import JsonFault, loads
from trainer.formats.tensor_files import parse_header
from trainer.formats.zrodlo_corpus import read_description
from trainer.predictions import read_rows

SCRIPT = Path(__file__).parent / "fuzz_formats.py"


def test_a_few_thousand_mutated_inputs_of_every_format_are_taken_or_refused_by_name() -> None:
    with laid_out() as (targets, folder):
        outcome = fuzz(targets, folder, inputs=2100, seed=11)
        assert not outcome.faults, "\n".join(outcome.faults)
        assert outcome.inputs == 2100
        assert all(outcome.refused.get(name, 0) > 40 and outcome.taken.get(name, 0) > 0 for name in targets), "each was left both ways"
        for name, target in targets.items():
            assert {path.name: path.read_bytes() for path in (folder / name).iterdir() if path.is_file()} == target.files, "put back as it was"


def test_sound_files_are_taken_by_every_target() -> None:
    with laid_out() as (targets, folder):
        for name, target in targets.items():
            target.read(folder / name)
    assert len(targets) >= 15


def test_an_input_is_the_same_each_time() -> None:
    with laid_out("corpus") as (targets, _):
        inputs = [[mutate(targets["corpus"], random.Random(f"5 corpus {number}")) for number in range(30)] for _ in range(2)]
    assert inputs[0] == inputs[1] and inputs[0][0] != inputs[0][1]


def refuse_without_place(folder: Path) -> None:
    raise DataDamaged("no", where="somewhere", what="x", fix="y")


def crash(folder: Path) -> None:
    raise KeyError("shape")


def hang(folder: Path) -> None:
    time.sleep(100)


def swell(folder: Path) -> None:
    assert len(bytearray(64 * 1024**3)) < 0, "this much is never given"


@pytest.mark.parametrize(("read", "says"), [
    (refuse_without_place, "names no place"), (crash, "KeyError"), (hang, "TimeoutError"), (swell, "MemoryError"),
])
def test_the_fuzzer_sees_crashes_hangs_hunger_and_refusals_without_a_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any, says: str,
) -> None:
    if read is hang:
        monkeypatch.setattr("fuzz_formats.INPUT_SECONDS_MAX", 0.2)
    target, outcome = Target(files={"x.json": b"{}"}, read=read, mutable=("x.json",)), Outcome()
    (tmp_path / "x").mkdir()
    with memory_limit(MEMORY_BYTES_MAX):
        feed(target, "x", tmp_path / "x", seed=1, number=1, outcome=outcome)
    assert len(outcome.faults) == 1 and says in outcome.faults[0]
    if read is crash:
        many = fuzz({"x": target}, tmp_path, inputs=1000, seed=1)
        assert len(many.faults) == FAULTS_MAX and "--seed 1 --only x --number 0" in many.faults[0]


def test_the_command_reports_what_it_fed_and_leaves_nothing_behind(tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--inputs", "60", "--seed", "3", "--place", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0 and "60 inputs, seed 3, 0 faults" in done.stdout, done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_json_or_a_json_fault(data: bytes) -> None:
    with contextlib.suppress(JsonFault):
        assert loads(data) != ..., "whatever is neither a value nor a JsonFault fails this test"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4), max_leaves=12,
)
NEARLY = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 0, 0, 0, 0, 1, -1])), max_size=4)
"""Tensors of so many F32 numbers, one after another, each perhaps a byte too late or too early."""


@settings(max_examples=200, deadline=None)
@given(NEARLY, st.sampled_from([0, 0, 0, 1, -1]), st.dictionaries(st.sampled_from(["0", "1", "x"]), JSON, max_size=1))
def test_a_header_that_is_taken_covers_the_data_exactly_once(tensors: list[tuple[int, int]], tail: int, strange: dict[str, Any]) -> None:
    header, place, is_sound = {}, 0, True
    for number, (count, shift) in enumerate(tensors):
        place += shift
        header[str(number)] = {"dtype": "F32", "shape": [count], "data_offsets": [place, place + 4 * count]}
        place += 4 * count
        is_sound = is_sound and shift == 0
    is_sound = is_sound and tail == 0 and not strange
    text, data_bytes = json.dumps({**header, **strange}).encode("utf-8", "surrogatepass"), max(place + tail, 0)
    try:
        entries = parse_header(text, data_bytes, Path("x.safetensors"))
    except CheckpointDamaged:
        assert not is_sound
        return
    covered = sorted(place for entry in entries.values() for place in range(entry.begin, entry.end))
    assert covered == list(range(8 + len(text), 8 + len(text) + data_bytes))


@pytest.mark.parametrize(("data", "says"), [
    (b"", "empty"), (b'{"id":"a","family":"en","tokens":1,"nll":1.0}', "cut in its last line"), (b"{}\n", "line 1"),
    (b'{"id":"a","family":"en","tokens":1,"nll":NaN}\n', "NaN"), (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    (b'{"id":"a","family":"en","tokens":1,"nll":1e999}\n', "beyond the numbers"), (b'{"id":"a","id":"b"}\n', "twice"),
    (bytes(40) + b"\n", "not JSON"),
])
def test_damaged_predictions_are_refused_by_line(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(DataDamaged) as refusal:
        read_rows(tmp_path / "x.jsonl")
    assert says in refusal.value.what and "x.jsonl" in refusal.value.where


def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "corpus.json")
    with pytest.raises(ExplainedError):
        read_description(tmp_path / "corpus.json")
