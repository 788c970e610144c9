"""Preflight over real hosts of this machine: their own tools look, and what is wrong is named before anything is staged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from small_python import site_of, small_python
from virtual_fleet import candidate, plan

from fleetd.campaign import AfterFreeze, HostPlan, Plan
from fleetd.coordinator.couriers import Courier, LocalCourier
from fleetd.coordinator.needs import TRAINER_MODULES
from fleetd.coordinator.preflight import Preflight, preflight, refusal
from fleetd.coordinator.releases import Releases
from fleetd.paths import StatePaths
from fleetd.wire import decode, dumps
from policies.facts import GIB

HOSTS = ("gx10", "spark-a", "spark-b")


class ThreeHosts:
    """Three roots on this machine, each with an interpreter of its own, all alike."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.pythons = {name: small_python(place / name / "env", modules=TRAINER_MODULES) for name in HOSTS}
        self.releases = Releases(StatePaths(place / "state"))

    def plan(self, parity: str | None = "require") -> Plan:
        hosts = tuple(HostPlan(name=name, root=str(self.place / name / "root"), python=str(self.pythons[name]), capacity_bytes=GIB, floor_bytes=1)
                      for name in HOSTS)
        own = candidate("own", task={"task": "language_model"}, command=None, host="any", memory_host_bytes=1, memory_accelerator_bytes=1)
        return plan(own, hosts=hosts, parity=parity, after_freeze=AfterFreeze())

    def look(self, parity: str | None = "require") -> Preflight:
        asked = self.plan(parity)
        couriers: dict[str, Courier] = {host.name: LocalCourier(host.name, Path(host.root)) for host in asked.hosts}
        return preflight(asked, couriers, own_python="python3", stage=self.releases.stage)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> ThreeHosts:
    return ThreeHosts(tmp_path_factory.mktemp("hosts"))


@pytest.fixture
def hosts(prepared: ThreeHosts) -> ThreeHosts:
    """The three hosts as they were made; what a test changes of an installed file it changes in `spark-b`, and it is put back here."""
    for name in TRAINER_MODULES:
        (site_of(prepared.place / "spark-b" / "env") / name / "__init__.py").write_text("version = '1.0'\n", encoding="utf-8")
    return prepared


def test_equal_hosts_pass_and_the_record_reads_back(hosts: ThreeHosts) -> None:
    seen = hosts.look()
    assert seen.refusals == () and set(seen.looks) == set(HOSTS)
    assert [title for title in seen.warnings if "one machine" in title], "three names of one machine, whose capacities fit it together"
    assert decode(Preflight, json.loads(dumps(seen))) == seen


def test_one_changed_byte_in_one_installed_file_of_one_host_is_named_and_refused(hosts: ThreeHosts) -> None:
    changed = site_of(hosts.place / "spark-b" / "env") / "torch" / "__init__.py"
    changed.write_text(changed.read_text(encoding="utf-8").replace("1.0", "1.1"), encoding="utf-8")

    seen = hosts.look("report")

    titles = {(each.host, each.title) for each in seen.refusals}
    assert titles == {("spark-b", "installed files are not what was installed")}
    error = refusal(seen.refusals)
    assert error.where == "host spark-b" and "torch/__init__.py" in error.what and error.exit_code == 3
    assert any("files of small 1.0" in warning and "spark-b" in warning for warning in seen.warnings)


def test_one_package_at_another_version_refuses_where_parity_is_required(hosts: ThreeHosts, tmp_path: Path) -> None:
    usual = hosts.pythons["spark-a"]
    hosts.pythons["spark-a"] = small_python(tmp_path / "other", "1.1", TRAINER_MODULES)
    try:
        (found,) = hosts.look("require").refusals
        reported = hosts.look(None)
    finally:
        hosts.pythons["spark-a"] = usual
    assert found.title == "the hosts differ" and "small: 1.0 on gx10, spark-b / 1.1 on spark-a" in found.what
    assert reported.refusals == () and any("the hosts differ" in warning for warning in reported.warnings)


def test_an_interpreter_without_the_trainers_packages_is_refused_with_the_command_that_helps(hosts: ThreeHosts, tmp_path: Path) -> None:
    usual = hosts.pythons["gx10"]
    hosts.pythons["gx10"] = small_python(tmp_path / "bare", modules=("numpy",))
    try:
        seen = hosts.look("off")
    finally:
        hosts.pythons["gx10"] = usual
    error = refusal(seen.refusals)
    assert error.where == "host gx10" and "safetensors, torch, transformers" in error.what
    assert error.fix == f"{tmp_path}/bare/bin/python -m pip install safetensors torch transformers"
