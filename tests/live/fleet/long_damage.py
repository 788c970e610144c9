"""`make damage`: issue 4, shows 4, on three hosts over real ssh: a changed byte, another version, a truncated file, a Git LFS pointer.

Each is found and named before anything starts: by `fleetd check` and by a launch, at the source and where it lies on a host already.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from live_fleet import Fleet
from small_python import small_python

from fleet.hosts import NAMES, Hosts
from fleetd.coordinator.needs import TRAINER_MODULES

ENV = "/srv/env"
MODULES = (*TRAINER_MODULES, "sentencepiece")
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"


def over_ssh(hosts: Hosts, root: str = "/srv/fleetd") -> dict[str, Any]:
    return {
        name: {"transport": "ssh", "ssh_config": str(hosts.ssh_config), "user": "root", "root": root, "agent_python": sys.executable,
               "python": f"{ENV}/bin/python", "capacity": "4GiB", "floor": "64MiB"}
        for name in NAMES
    }


def put_environment(hosts: Hosts, name: str, made: Path) -> Path:
    """A copy of an environment on a host; where its packages lie."""
    place = hosts[name].path(ENV)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(made, place, symlinks=True)
    return next(place.glob("lib/python*/site-packages"))


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("environments")
    return {version: small_python(folder / version, version, MODULES).parent.parent for version in ("1.0", "1.1")}


def refusals(fleet: Fleet, plan: Path) -> list[tuple[str, str, str]]:
    looked = json.loads(fleet("check", str(plan), "--json", expect=None).stdout)["looked"]
    assert set(looked["looks"]) == set(NAMES), looked["silent"]
    return [(each["host"], each["title"], each["what"]) for each in looked["findings"] if each["refuses"] and "one machine" not in each["title"]]


def test_a_changed_byte_and_another_version_on_one_host_are_named_by_check_and_by_launch(
    fleet: Fleet, hosts: Hosts, environments: dict[str, Path],
) -> None:
    plan = fleet.plan(hosts=over_ssh(hosts), parity="require", candidates={"one": {}})
    sites = {name: put_environment(hosts, name, environments["1.0"]) for name in NAMES}
    assert refusals(fleet, plan) == [], "equal hosts pass"

    changed = sites["spark-b"] / "torch" / "__init__.py"
    changed.write_text(changed.read_text(encoding="utf-8").replace("1.0", "1.1"), encoding="utf-8")
    found = refusals(fleet, plan)
    assert ("spark-b", "installed files are not what was installed") in [each[:2] for each in found]
    assert any("torch/__init__.py" in what for _, _, what in found)
    refused = fleet("launch", str(plan), expect=3)
    assert "torch/__init__.py" in refused.stderr and "spark-b" in refused.stderr

    put_environment(hosts, "spark-b", environments["1.1"])
    ((_, title, what),) = refusals(fleet, plan)
    assert title == "the hosts differ" and "small: 1.0 on gx10, spark-a / 1.1 on spark-b" in what
    assert not list(hosts["gx10"].path("/srv/fleetd").glob("runs/2*")), "nothing has started"


def test_a_truncated_file_and_a_pointer_are_named_at_the_source_and_on_a_host(fleet: Fleet, hosts: Hosts, tmp_path: Path) -> None:
    shards, model = tmp_path / "shards", tmp_path / "model"
    shutil.copytree(fleet.shards, shards)
    model.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1000], "data_offsets": [0, 4000]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(4000)
    (model / "model.safetensors").write_bytes(whole)

    def plan(name: str) -> Path:
        data = {"train": {"shards": str(shards), "split": "train"}, "validation": {"path": str(model)}}
        candidates = {"one": {"host": "spark-a", "command": ["true"]}}
        return fleet.plan(name, hosts=over_ssh(hosts, "/srv/damage"), candidates=candidates, data=data, after_freeze={})

    for number, (place, damage, words) in enumerate((
        (model / "model.safetensors", whole[:3000], "it is cut short"), (model / "model.safetensors", POINTER, "Git LFS pointer"),
    )):
        before = place.read_bytes()
        place.write_bytes(damage)
        ((host, _, what),) = refusals(fleet, plan(f"source-{number}"))
        assert host == "" and str(place) in what and words in what
        refused = fleet("launch", str(plan(f"source-{number}")), expect=1)
        assert str(place) in refused.stderr and words in refused.stderr
        place.write_bytes(before)

    before = (shards / "train_009.bin").read_bytes()
    (shards / "train_009.bin").write_bytes(POINTER)
    for verb in ("check", "launch"):
        assert f"{shards}/train_009.bin: it is a Git LFS pointer" in fleet(verb, str(plan("shard")), expect=2).stderr, "its size says it already"
    (shards / "train_009.bin").write_bytes(before)
    fleet("wait", fleet.launch(plan("whole")), "--timeout", "2m")
    (there,) = hosts["spark-a"].path("/srv/damage/datasets").glob("*/model.safetensors")
    (shard,) = hosts["spark-a"].path("/srv/damage/datasets").glob("*/train_009.bin")
    for number, (place, damage, words) in enumerate((
        (there, whole[:3000], "model.safetensors is cut short: 3000 of"), (there, POINTER, "model.safetensors is a Git LFS pointer"),
        (shard, POINTER, "train_009.bin is a Git LFS pointer"),
    )):
        before = place.read_bytes()
        place.write_bytes(damage)
        fleet("launch", str(plan(f"host-{number}")), expect=None)
        failed = fleet.until(lambda document: document["campaigns"][-1]["stage"] == "failed", "refused in staging")["campaigns"][-1]
        assert failed["name"] == f"host-{number}" and words in failed["detail"] and "spark-a" in failed["detail"], failed["detail"]
        assert not list(hosts["spark-a"].path("/srv/damage").glob(f"runs/*host-{number}*/attempts/*")), "nothing has started"
        place.write_bytes(before)
