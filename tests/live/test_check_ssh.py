"""`fleetd check` over a real sshd: a host far away shows what a near one does, one that is away keeps its error, by a child and by the daemon."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_fleet import Fleet
from sshd import Sshd

pytestmark = pytest.mark.live


@pytest.fixture
def spark(tmp_path: Path) -> Iterator[Sshd]:
    found = Sshd(tmp_path / "sshd", "spark-a")
    yield found
    found.stop()


def test_check_shows_hosts_alike_wherever_they_are_and_whoever_looks(fleet: Fleet, spark: Sshd) -> None:
    there = {"transport": "ssh", "ssh_config": str(spark.ssh_config), "root": str(spark.root), "agent_python": sys.executable, "capacity": "1GiB"}
    hosts = {
        "box": {"root": str(fleet.host_root), "capacity": "1GiB", "floor": "64MiB"}, "spark-a": {**there, "floor": "64MiB"},
        "spark-b": {**there, "floor": "64MiB", "address": "127.0.0.1", "port": 1},
    }
    plan = fleet.plan(hosts=hosts, candidates={"one": {"command": ["true"], "memory_cap": "64MiB"}}, after_freeze={}, data={})
    by_child = fleet("check", str(plan), "--json", expect=8)
    looked = json.loads(by_child.stdout)["looked"]

    assert set(looked["looks"]) == {"box", "spark-a"} and set(looked["silent"]) == {"spark-b"}
    box, spark_a = looked["looks"]["box"], looked["looks"]["spark-a"]
    assert box["survey"]["machine"] == spark_a["survey"]["machine"] and box["caps"] == spark_a["caps"] and box["programs"] == spark_a["programs"]
    assert box["skew_seconds"] is None and abs(spark_a["skew_seconds"]) < 600
    assert [each["host"] for each in looked["findings"] if each["refuses"]] == ["spark-b"]
    assert any("one machine" in each["title"] for each in looked["findings"])
    assert by_child.stderr.count("error:") == 1 and "127.0.0.1" in by_child.stderr
    assert not fleet.host_root.exists() and not fleet.state.exists(), "nothing is made for a look"
    left = {path.name for path in spark.root.iterdir()}
    assert left <= {"releases", "caps.json", "caps.lock"}, "no owner, no agent, no log: only what the next launch needs anyway"

    fleet("daemon", "start")
    by_daemon = json.loads(fleet("check", str(plan), "--json", expect=8).stdout)["looked"]
    assert set(by_daemon["looks"]) == set(looked["looks"]) and by_daemon["silent"] == looked["silent"]
    assert fleet.status()["campaigns"] == [], "nothing of a look is history"
