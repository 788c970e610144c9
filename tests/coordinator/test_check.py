"""`fleetd check` looks at real hosts as a launch would: and leaves nothing behind; over SSH: tests/live/test_check_ssh.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from virtual_fleet import START, candidate, plan

from fleetd.campaign import DataRole, EnvironmentPlan, HostPlan, Plan
from fleetd.contents import LFS_POINTER
from fleetd.coordinator.check import check_hosts, own_id
from fleetd.coordinator.needs import trainer_modules, weight_count
from fleetd.coordinator.preflight import Preflight
from fleetd.coordinator.releases import Releases
from fleetd.environments import MARK, EnvironmentMark
from fleetd.files import write_record
from fleetd.host import ownership
from fleetd.journal import Journal
from fleetd.model import Owner
from fleetd.paths import HostPaths, StatePaths
from fleetd.screens import layout
from fleetd.screens.host_checks import host_rows
from fleetd.wire import decode, dumps, encode
from policies.facts import GIB, MIB, Split
from policies.surveys import Finding
from policies.workloads import Restart, Workload


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    return Releases(StatePaths(tmp_path_factory.mktemp("state")))


def local(folder: Path, **changes: object) -> HostPlan:
    return replace(HostPlan(name="box", root=str(folder / "a" / "root"), floor_bytes=64 * MIB), **changes)  # type: ignore[arg-type]


def asked(*hosts: HostPlan, command: tuple[str, ...] = ("echo",), **changes: object) -> Plan:
    one = replace(candidate("one", task=None, command=command, host="any", memory_host_bytes=64 * MIB, memory_accelerator_bytes=0), **changes)
    return replace(plan(one, hosts=hosts, data=(), parity="off"), after_freeze=replace(plan().after_freeze, evaluate=()))


def looked(releases: Releases, what: Plan, own_id: str = "k1") -> Preflight:
    return check_hosts(what, own_python=sys.executable, releases=releases, coordinator_id=own_id)


def refused(releases: Releases, what: Plan) -> Finding:
    (found,) = looked(releases, what).refusals
    return found


def test_a_good_plan_passes_the_look_at_this_machine_and_nothing_is_created(releases: Releases, tmp_path: Path) -> None:
    seen = looked(releases, asked(local(tmp_path)))
    assert seen.refusals == () and seen.silent == {} and list(tmp_path.iterdir()) == []
    assert set(seen.looks["box"].caps) == {"cgroup", "sampler", "allocator", "floor"}
    assert decode(Preflight, json.loads(dumps(seen))) == seen


@pytest.mark.parametrize(("host", "change", "title", "what"), [
    ({"capacity_bytes": 1 << 60}, {}, "the plan hands out more memory than there is", "but the machine has"),
    ({}, {"memory_host_bytes": psutil.virtual_memory().total + GIB}, "one can never start here", "floor"),
    ({"agent_python": "/nowhere/python"}, {}, "agent_python can't be used", "No such file"),
    ({"agent_python": "/bin/false"}, {}, "the host can't be surveyed", "/bin/false: exit status 1"),
    ({}, {"command": ("no-such-program",)}, "the command of one can't be run", "'no-such-program' is not found"),
    ({}, {"working_directory": "/no/such/place"}, "the command of one can't be run", "/no/such/place is no directory"),
])
def test_what_would_keep_a_host_from_it_is_named(
    releases: Releases, tmp_path: Path, host: dict[str, object], change: dict[str, object], title: str, what: str,
) -> None:
    found = refused(releases, asked(local(tmp_path, **host), **change))  # type: ignore[arg-type]
    assert found.title == title and what in found.what


def test_a_host_that_obeys_another_coordinator_is_named_before_a_launch_runs_into_it(releases: Releases, tmp_path: Path) -> None:
    host = local(tmp_path)
    ownership.claim(HostPaths(Path(host.root)), Owner(coordinator_id="k1", generation=3))
    assert looked(releases, asked(host), own_id="k1").refusals == ()
    for other in ("k2", ""):
        (found,) = looked(releases, asked(host), own_id=other).refusals
        assert found.title == "this host belongs to another coordinator" and "obeys k1" in found.what and "fleetd takeover box" in found.fix
    HostPaths(Path(host.root)).owner.write_text("{", encoding="utf-8")
    assert refused(releases, asked(host)).title == "the record of this host's owner can't be read"


def test_a_coordinator_knows_itself_as_hosts_do_before_and_after_its_first_start(tmp_path: Path) -> None:
    paths = StatePaths(tmp_path)
    before = own_id(paths)
    write_record(paths.identity, {"schema": 1, "coordinator_id": "k1", "generation": 1})
    assert (before, own_id(paths)) == ("", "k1")


def test_who_has_lost_its_identity_beside_its_journal_is_not_taken_for_a_stranger(tmp_path: Path) -> None:
    """The journal knows the id too, and a start finds it there: a takeover would be the wrong advice."""
    paths = StatePaths(tmp_path)
    Journal.open(paths.journal).close()
    assert own_id(paths) is None
    paths.identity.write_text("damaged")
    assert own_id(paths) is None


def test_a_file_in_the_way_and_a_program_that_is_not_executable_are_named(releases: Releases, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refused(releases, asked(local(tmp_path, root=str(tmp_path / "file" / "root")))).what == f"{tmp_path}/file is a file"
    (tmp_path / "train.sh").write_text("#!/bin/sh\n")
    found = refused(releases, asked(local(tmp_path), command=(f"{tmp_path}/train.sh",)))
    assert found.what == f"{tmp_path}/train.sh is not executable" and f"chmod +x {tmp_path}/train.sh" in found.fix


def test_of_an_environment_the_python_that_it_is_built_from_is_looked_at_and_no_wheel_is_fetched(releases: Releases, tmp_path: Path) -> None:
    lock = EnvironmentPlan(lock=str(tmp_path / "no.lock"), lock_sha256="ab" * 32, python="/bin/false")
    found = refused(releases, asked(local(tmp_path, environment=lock), command=("python3", "train.py")))
    assert found.title == "environment.python can't be used" and "/bin/false" in found.what
    seen = looked(releases, asked(local(tmp_path, environment=replace(lock, python=sys.executable)), command=("python3", "train.py")))
    source = seen.looks["box"].source
    assert seen.refusals == () and source is not None and source.program == sys.executable and seen.looks["box"].programs == ()
    assert seen.looks["box"].built == () and said(seen) == ["environment to be built", f"{sys.executable} is Python {source.version}"]

    place = HostPaths(tmp_path / "a" / "root").environments / lock.lock_sha256
    (place / "half-made").mkdir(parents=True)
    mark = EnvironmentMark(
        name=f"{lock.lock_sha256}/whole", lock_sha256=lock.lock_sha256, wheels="registry", version="3.12.3", implementation="cpython",
        machine="aarch64", built_at=START, seconds=1.0, bytes=2048, packages={"six": ("1.17.0", "aa"), "idna": ("3.20", "bb")},
    )
    (place / "whole").mkdir()
    write_record(place / "whole" / MARK, mark)
    seen = looked(releases, asked(local(tmp_path, environment=replace(lock, python=sys.executable)), command=("python3", "train.py")))
    assert said(seen)[:3] == ["environment built from Python 3.12.3", "2 packages", "2 KiB"]


def said(seen: Preflight) -> list[str]:
    """What the screen says of the environment of the one host."""
    rows = [[layout.text_of(part) for part in parts] for _, parts in host_rows(encode(seen), "box")]
    return next(row for row in rows if row[0].startswith("environment"))


def test_work_that_would_make_room_is_shown_and_left_alone(releases: Releases, tmp_path: Path) -> None:
    wrong = Workload(name="llm", pattern="no such work anywhere", uid=0, restart=Restart(command=("true",)))
    assert refused(releases, asked(local(tmp_path, displace=(wrong,)))).title == "llm does not run"


def test_a_pointer_among_the_plans_data_is_found_by_a_check_already(releases: Releases, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    role = DataRole(split=Split.TRAIN, path="data")
    found = refused(releases, replace(asked(local(tmp_path)), directory=str(tmp_path), data=(role,)))
    assert found.title == "the train data can't be used" and found.what == f"{tmp_path}/data/model.safetensors: {LFS_POINTER}"


def test_the_size_of_a_model_is_estimated_from_its_config() -> None:
    """124 M weights of GPT-2 small, 1.24 B of Llama 3.2 1B (both as published)."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_positions": 1024}
    assert weight_count(gpt2) == pytest.approx(124e6, rel=0.01)
    llama = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True,
    }
    assert weight_count(llama) == pytest.approx(1.236e9, rel=0.01)


def test_a_sentencepiece_tokenizer_asks_for_the_module_that_reads_it() -> None:
    shards = plan()
    pieces = replace(shards, data=(replace(shards.data[0], include=("shards_index.json", "tokenizer.model")), *shards.data[1:]))
    assert "sentencepiece" in trainer_modules(pieces) and "sentencepiece" not in trainer_modules(shards)
