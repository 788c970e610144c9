"""A lock in the plan, wheels made by hand, a host over real SSH: its environment is built there, and the command runs in it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_fleet import Fleet
from small_wheels import lock_of, small_wheel
from sshd import Sshd

pytestmark = pytest.mark.live

PROGRAM = "import sys, os, alpha, beta; print('ran', alpha.version, beta.version, sys.executable == os.environ['FLEETD_PYTHON'], len(sys.path))"


@pytest.fixture
def spark(tmp_path: Path) -> Iterator[Sshd]:
    host = Sshd(tmp_path / "spark-a", "spark-a")
    yield host
    host.stop()


def test_a_command_runs_in_the_environment_that_its_lock_describes_built_on_a_host_over_ssh(fleet: Fleet, spark: Sshd) -> None:
    wheels = fleet.root / "wheels"
    alpha, beta = small_wheel(wheels, "alpha"), small_wheel(wheels, "beta", "2.0", requires=("alpha",))
    lock_of(fleet.root / "requirements.lock", alpha, beta, hashed=True)
    plan = fleet.plan(
        hosts={"spark-a": {"transport": "ssh", "ssh_config": str(spark.ssh_config), "root": str(fleet.host_root), "capacity": "6GiB"}},
        environment={"lock": "requirements.lock", "wheels": "wheels"}, parity="require", data={}, after_freeze={"report": False},
        defaults={"memory_cap": "1GiB"}, candidates={"one": {"command": ["python", "-c", PROGRAM]}},
    )
    before = json.loads(fleet("check", str(plan), "--json").stdout)["hosts"][0]["environment"]

    campaign_id = fleet.launch(plan)
    fleet("wait", campaign_id, "--timeout", "10m")

    (run,) = fleet.status()["runs"]
    assert (run["state"], fleet("logs", run["run_id"]).stdout.split()[:4]) == ("finished", ["ran", "1.0", "2.0", "True"])
    order = json.loads((fleet.run_dir(run) / "run.json").read_text(encoding="utf-8"))
    name = order["digests"]["environment"]
    assert order["argv"][0] == f"{fleet.host_root}/environments/{name}/bin/python" and name.split("/")[0] == before["lock_sha256"]
    seen = json.loads((fleet.state / "campaigns" / campaign_id / "preflight.json").read_text(encoding="utf-8"))["looks"]["spark-a"]
    assert (seen["environment"]["name"], seen["environment"]["is_built"]) == (name, False)
    assert {package: each["version"] for package, each in seen["python"]["packages"].items()} == {"alpha": "1.0", "beta": "2.0"}
    built = json.loads((fleet.state / "campaigns" / campaign_id / "environments" / "spark-a.json").read_text(encoding="utf-8"))
    assert built["python"]["are_files_read"] and set(built["mark"]["packages"]) == {"alpha", "beta"}
    assert list((fleet.host_root / "wheelhouses").glob("[!.]*")) == [], "wheels that are installed take no room on the host"
