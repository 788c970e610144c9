"""What `fleetd check` shows of a plan, and what it finds on this machine before anything is launched."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import psutil
import pytest

from fleetd.model import CapPart
from fleetd.plan import LoadedPlan, load_plan
from fleetd.screens import layout
from fleetd.screens.plan_view import cap_faults, check_document, local_caps, local_preflight, render_check
from fleetd.screens.preflight import weight_count
from policies.facts import GIB, CapGrade

ROOT = Path(__file__).resolve().parents[2]
MANPAGES = ROOT / "examples" / "manpages" / "plan.yaml"
NOW = datetime(2026, 11, 30, 9, 0, tzinfo=timezone.utc)
NOBODY = 65534


def shown(loaded: LoadedPlan, width: int = 120) -> str:
    return layout.painted(render_check(loaded, NOW, width=width), colour=False)


def plan_of(folder: Path, *, host: str = "root: host", candidate: str = "command: [echo]", extra: str = "") -> LoadedPlan:
    path = folder / "plan.yaml"
    path.write_text(f"name: p\ndeadline: 3h\nhosts:\n  box: {{{host}}}\n{extra}candidates:\n  one: {{{candidate}}}\n", encoding="utf-8")
    return load_plan(path, now=NOW)


def test_the_check_says_when_training_would_end_and_how_the_caps_add_up() -> None:
    text = shown(load_plan(MANPAGES, now=NOW))
    assert "2026-11-30 09:27:00 UTC" in text and "2026-11-30 09:30:00 UTC" in text
    assert "6 GiB − 1 GiB floor = 5 GiB for runs; slow 1.5 GiB + middle 1.5 GiB + fast 1.5 GiB = 4.5 GiB: all run at once" in " ".join(text.split())
    assert "10 shards, 2,381 documents, 4,739,410 tokens" in text
    assert "sealed until the freeze" in text


def test_each_value_stands_beside_the_line_it_came_from_and_what_differs_comes_by_itself() -> None:
    lines = shown(load_plan(MANPAGES, now=NOW)).split("\n")
    source = MANPAGES.read_text(encoding="utf-8").split("\n")
    line_of_slow = next(number for number, text in enumerate(source, 1) if text.strip().startswith("slow:"))
    differs = next(text for text in lines if text.strip().startswith("training.optimizer.lr"))
    assert f"slow 0.002  (line {line_of_slow})" in differs and "fast 0.012" in differs
    assert any(text.split() == ["training.log_every", "1", "·", "(default)"] for text in lines)


def test_the_check_shows_each_mechanism_of_a_cap_on_this_machine_and_refuses_a_demand_that_none_can_keep(tmp_path: Path) -> None:
    strict = plan_of(tmp_path, candidate="command: [echo], memory_cap: {host: 64MiB, demand: enforced}", host="root: host, floor: 64MiB")
    found = local_caps(strict)
    assert set(found["box"]) == {"cgroup", "sampler", "allocator", "floor"} and not (tmp_path / "host").exists(), "a look creates nothing"
    assert cap_faults(strict, found) == [] or found["box"]["cgroup"].grade is not CapGrade.ENFORCED

    bare = {"box": {**found["box"], "cgroup": CapPart(grade=CapGrade.ABSENT, means="no cgroup is mounted")}}
    text = layout.painted(render_check(strict, NOW, caps=bare), colour=False)
    assert "cgroup: A absent  no cgroup is mounted" in text and "sampler: S sampled" in text
    assert check_document(strict, NOW, bare)["hosts"][0]["caps"]["cgroup"] == {"grade": "absent", "means": "no cgroup is mounted"}
    (fault,) = cap_faults(strict, bare)
    assert fault.exit_code == 3 and "no cgroup is mounted" in fault.what
    assert cap_faults(plan_of(tmp_path), bare) == []


def test_the_check_says_what_an_environment_holds_and_whether_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text("six==1.17.0\nidna==3.20\n", encoding="utf-8")
    extra = "  spark-a: {transport: ssh, root: /srv/fleetd, environment: {wheels: registry}}\nenvironment: {lock: requirements.lock}\n"
    loaded = plan_of(tmp_path, candidate="command: [python, x]", extra=extra)
    (box, spark) = (each["environment"] for each in check_document(loaded, NOW)["hosts"])
    assert (box["packages"], box["built"], box["wheels"], spark["wheels"]) == (2, [], "auto", "registry")
    text = " ".join(shown(loaded, width=400).split())
    assert f"environment of requirements.lock: 2 packages, lock {box['lock_sha256'][:12]} · wheels brought from here · to be built · (line 6)" in text
    assert "wheels fetched by the host · built there, if it is not yet" in text

    place = tmp_path / "host" / "environments" / box["lock_sha256"] / "cpython-3.12.3-x86_64-registry"
    place.mkdir(parents=True)
    assert check_document(loaded, NOW)["hosts"][0]["environment"]["built"] == [], "half of one is none"
    (place / "fleetd.json").touch()
    assert "built here: cpython-3.12.3-x86_64-registry" in " ".join(shown(loaded, width=400).split())
    assert [fault.title for fault in local_preflight(loaded) if "python" in fault.title or "program" in fault.title] == []


def test_the_check_fits_a_narrow_terminal() -> None:
    loaded = load_plan(MANPAGES, now=NOW)
    longest_word = max(len(word) for word in shown(loaded).split())
    assert max(layout.width_of(text) for text in shown(loaded, width=80).split("\n")) <= max(80, longest_word + 20)


def test_candidates_that_do_not_fit_together_are_counted(tmp_path: Path) -> None:
    loaded = plan_of(tmp_path, host="root: host, capacity: 4GiB, floor: 1GiB", candidate="command: [echo], memory_cap: 2GiB", extra="")
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text() + "  two: {command: [echo], memory_cap: 2GiB}\n")
    loaded = load_plan(path, now=NOW)
    assert "= 4 GiB: 1 of 2 run at once, the others wait" in " ".join(shown(loaded).split())


def test_the_document_holds_every_value_with_its_source() -> None:
    loaded = load_plan(MANPAGES, now=NOW)
    document = check_document(loaded, NOW)
    assert document["if_launched_now"]["cutoff_at"] == "2026-11-30T09:27:00.000000Z"
    assert document["values"].keys() == loaded.values.keys()
    key = "candidates.slow.memory_cap.host"
    assert document["values"][key] == {"value": 1536 * 1024**2, "source": str(loaded.sources[key])}
    assert [role["split"] for role in document["data"]] == ["train", "validation", "test"]


def test_a_good_plan_passes_the_look_at_this_machine_and_nothing_is_created(tmp_path: Path) -> None:
    assert local_preflight(plan_of(tmp_path, candidate="command: [echo], memory_cap: 64MiB", host="root: a/b/host, floor: 64MiB")) == []
    assert not (tmp_path / "a").exists()


def test_a_root_below_a_file_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (fault,) = local_preflight(plan_of(tmp_path, host="root: file/host, floor: 64MiB", candidate="command: [echo], memory_cap: 64MiB"))
    assert fault.title == "the host's root can't be made" and str(tmp_path / "file") in fault.what


@contextmanager
def as_an_ordinary_user() -> Iterator[None]:
    """Root meets no permissions: for the block this process is nobody, with root kept as the saved user to come back to."""
    if os.getuid() != 0:
        yield
        return
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def test_a_root_that_is_not_writable_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        place.chmod(0o755)
        (place / "locked").mkdir(mode=0o555)
        loaded = plan_of(place, host="root: locked/host, floor: 64MiB", candidate="command: [echo], memory_cap: 64MiB")
        with as_an_ordinary_user():
            faults = local_preflight(loaded)
    (fault,) = [fault for fault in faults if "root" in fault.title]
    assert "not writable" in fault.what


def test_more_capacity_than_the_machine_has_is_refused(tmp_path: Path) -> None:
    total_gib = psutil.virtual_memory().total // GIB
    faults = local_preflight(plan_of(tmp_path, host=f"root: host, capacity: {total_gib + 10}GiB", candidate="command: [echo], memory_cap: 64MiB"))
    assert any(f"capacity is {total_gib + 10} GiB" in fault.what for fault in faults)


def test_a_cap_beyond_the_machine_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    total_gib = psutil.virtual_memory().total // GIB
    (fault,) = local_preflight(plan_of(tmp_path, candidate=f"command: [echo], host: box, memory_cap: {total_gib + 5}GiB"))
    assert fault.title == "one can never start here"
    assert f"asks {total_gib + 5}.0 GiB" in fault.what and "floor" in fault.what


@pytest.mark.parametrize(("program", "expected"), [
    ("/nowhere/python", "No such file"),
    ("/bin/false", "exit 1"),
])
def test_a_python_that_does_not_run_is_named(tmp_path: Path, program: str, expected: str) -> None:
    host = f"root: host, floor: 64MiB, agent_python: {program}"
    (fault,) = local_preflight(plan_of(tmp_path, host=host, candidate="command: [echo], memory_cap: 64MiB"))
    assert fault.title == "agent_python can't be used" and program in fault.what and expected in fault.what
    assert sys.executable in fault.fix


def test_a_program_or_directory_that_is_missing_is_found_before_the_launch(tmp_path: Path) -> None:
    small, host = "memory_cap: 64MiB", "root: host, floor: 64MiB"
    (fault,) = local_preflight(plan_of(tmp_path, host=host, candidate=f"command: [no-such-program], {small}"))
    assert "'no-such-program' is not found" in fault.what
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    (fault,) = local_preflight(plan_of(tmp_path, host=host, candidate=f"command: [{tmp_path}/train.sh], {small}"))
    assert f"{tmp_path}/train.sh is not executable" in fault.what and f"chmod +x {tmp_path}/train.sh" in fault.fix
    (fault,) = local_preflight(plan_of(tmp_path, host=host, candidate=f"command: [echo], working_directory: nowhere, {small}"))
    assert str(tmp_path / "nowhere") in fault.what


def test_the_size_of_a_model_is_estimated_from_its_config() -> None:
    """124 M weights of GPT-2 small, 1.24 B of Llama 3.2 1B (both as published)."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_positions": 1024}
    assert weight_count(gpt2) == pytest.approx(124e6, rel=0.01)
    llama = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }
    assert weight_count(llama) == pytest.approx(1.236e9, rel=0.01)
