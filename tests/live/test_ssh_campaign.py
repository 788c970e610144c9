"""A campaign on a host that is reached over SSH: the same commands, the same ending, through a login shell that talks too much."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from holds import Holds
from live_fleet import Fleet
from sshd import Sshd, fingerprint

pytestmark = pytest.mark.live


@pytest.fixture
def spark(tmp_path: Path) -> Iterator[Sshd]:
    host = Sshd(tmp_path / "spark-a", "spark-a")
    yield host
    host.stop()


def over_ssh(fleet: Fleet, host: Sshd, **changes: Any) -> dict[str, Any]:
    body = {
        "transport": "ssh", "ssh_config": str(host.ssh_config), "root": str(fleet.host_root), "capacity": "6GiB", "floor": "256MiB",
        "python": sys.executable, **changes,
    }
    return {host.name: body}


def test_a_training_over_ssh_is_supervised_copied_chosen_and_judged_though_its_connection_is_cut(fleet: Fleet, spark: Sshd) -> None:
    holds = Holds(fleet.root / "holds", 25)
    one = {"training": {"steps": 40}, "environment": holds.environment}
    campaign_id = fleet.launch(fleet.plan(hosts=over_ssh(fleet, spark), candidates={"one": one}))
    # There is a connection to cut but for a moment, after one was lost to a machine that stood still.
    fleet.until(lambda document: document["runs"] and document["runs"][0]["state"] == "running" and spark.cut() > 0, "training over there, then cut")
    holds.let_go(25)

    fleet("wait", campaign_id, "--timeout", "10m")

    document = fleet.status()
    assert document["campaigns"][0]["stage"] == "evaluated"
    assert [run["state"] for run in document["runs"]] == ["finished"] * 2
    assert [len(run["attempts_ended"]) for run in document["runs"]] == [1, 1], "a cut connection starts nothing again"
    assert "step" in fleet("logs", document["runs"][0]["run_id"], "--stream", "log").stdout
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in fleet.host_root.glob("runs/*/supervisor.json")]
    assert all(run["identity"]["argv"][:2][1] == "-I" and "/releases/" in run["identity"]["argv"][2] for run in runs)


def test_a_launch_on_a_host_whose_key_is_unknown_is_refused_in_three_lines_and_nothing_is_history(fleet: Fleet, spark: Sshd) -> None:
    spark.know()
    refused = fleet("launch", str(fleet.plan(hosts=over_ssh(fleet, spark), candidates={"one": {"command": ["true"]}})), expect=8)

    lines = refused.stderr.strip().splitlines()
    assert lines[0] == "error: the host key of spark-a is not known"
    assert [line.split()[0] for line in lines[1:]] == ["where:", "what:", "fix:"]
    assert fingerprint(spark.folder / "hostkey") in lines[2] and "StrictHostKeyChecking=ask" in lines[3]
    assert fleet.status()["campaigns"] == [] and not fleet.host_root.exists()
