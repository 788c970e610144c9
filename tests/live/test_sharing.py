"""Several campaigns on one host, commands that are no trainers of ours, and requests that must be refused with their arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from holds import Holds
from live_fleet import Fleet, step_of

pytestmark = pytest.mark.live


def test_the_second_campaign_waits_for_memory_and_says_for_what(fleet: Fleet) -> None:
    holds = Holds(fleet.root / "holds", 15)
    one = {"training": {"steps": 60}, "environment": holds.environment}
    first = fleet.launch(fleet.plan("first", capacity="3GiB", candidates={"one": one}))
    fleet.until(lambda document: step_of(document["runs"][0]) > 5, "the first trains")

    second = fleet.launch(fleet.plan("second", capacity="3GiB", candidates={"two": {"training": {"steps": 10}}}))

    def explained(document: dict[str, Any]) -> bool:
        return any(run["campaign_id"] == second and "GiB" in run["detail"] for run in document["runs"])

    waiting = fleet.until(explained, "the wait is explained")
    holds.let_go(15)
    run = next(run for run in waiting["runs"] if run["campaign_id"] == second)
    assert run["state"] == "queued"
    assert first in run["detail"] or "one" in run["detail"]
    fleet("wait", second, "--timeout", "10m")
    assert fleet.campaign(first)["stage"] in ("evaluated", "frozen", "selecting")


def test_a_cap_larger_than_the_stated_capacity_is_a_fault_of_the_plan_with_its_arithmetic(fleet: Fleet) -> None:
    refused = fleet("launch", str(fleet.plan(capacity="1GiB")), expect=2)
    assert "2GiB" in refused.stderr.replace(" ", "")
    assert "1GiB" in refused.stderr.replace(" ", "")
    assert "256MiB" in refused.stderr.replace(" ", "")
    assert "fix:" in refused.stderr


def test_a_cap_larger_than_the_machine_is_refused_by_what_the_host_measured(fleet: Fleet) -> None:
    hosts = {"workstation": {"transport": "local", "root": str(fleet.host_root), "floor": "256MiB"}}
    defaults = {"memory_cap": "10TiB"}
    refused = fleet("launch", str(fleet.plan(hosts=hosts, defaults=defaults, candidates={"one": {"command": ["sleep", "1"]}})), expect=3)
    assert "10240.00 GiB" in refused.stderr or "10240.0 GiB" in refused.stderr
    assert "fix:" in refused.stderr


def test_a_second_launch_of_a_running_plan_is_refused(fleet: Fleet) -> None:
    plan = fleet.plan(candidates={"one": {"command": ["sleep", "60"]}})
    campaign_id = fleet.launch(plan)
    refused = fleet("launch", str(plan), expect=3)
    assert campaign_id in refused.stderr
    assert len(refused.stderr.strip().splitlines()) >= 4


def test_a_command_of_the_user_is_supervised_stopped_and_reported_as_not_selectable(fleet: Fleet) -> None:
    script = fleet.root / "prints.py"
    script.write_text("import time\nfor i in range(6000):\n    print('line', i, flush=True)\n    time.sleep(0.1)\n", encoding="utf-8")
    campaign_id = fleet.launch(fleet.plan(capacity="12GiB", candidates={
        "shell": {"command": ["sh", "-c", "trap 'echo asked; exit 0' TERM; while true; do sleep 0.2; done"], "signal": "group"},
        "prints": {"command": ["python3", str(script)]},
        "short": {"command": ["sh", "-c", "echo done"]},
        "ours": {"training": {"steps": 40}},
    }))
    others = {"shell": "running", "prints": "running", "short": "finished", "ours": "finished"}
    fleet.until(lambda document: {run["candidate"]: run["state"] for run in document["runs"]} == others, "the short ones end")
    measured = fleet.until(lambda document: any(run["candidate"] == "prints" and run["memory"]["host_bytes"]["value"] for run in document["runs"]),
                           "its memory was measured")
    runs = {run["candidate"]: run for run in measured["runs"]}
    assert runs["shell"]["state"] == runs["prints"]["state"] == "running"
    assert "line 1" in fleet("logs", runs["prints"]["run_id"], "--tail", "5000").stdout
    assert isinstance(runs["shell"]["selectable"], str)
    assert runs["prints"]["memory"]["host_bytes"]["value"] > 0

    fleet("stop", campaign_id, "--graceful")
    fleet("wait", campaign_id, "--timeout", "10m", expect=6)

    after = fleet.runs()
    assert after["shell"]["state"] == after["prints"]["state"] == "stopped"
    assert "asked" in fleet("logs", after["shell"]["run_id"], "--tail", "20").stdout
    assert after["prints"]["attempts_ended"][-1]["exit"]["signal"] == 15, f"{after['prints']}\n{fleet.logs()}"


def test_a_damaged_shard_is_found_before_anything_starts(fleet: Fleet, tmp_path: Path) -> None:
    copy = tmp_path / "shards"
    copy.mkdir()
    for path in fleet.shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / "train_009.bin").read_bytes())
    data[1000] ^= 1
    (copy / "train_009.bin").write_bytes(bytes(data))
    roles = {"train": {"shards": str(copy), "split": "train"}, "validation": {"shards": str(copy), "split": "val", "tokens_per_document_max": 32}}

    done = fleet("launch", str(fleet.plan(data=roles, after_freeze={"evaluate": []})), expect=None)

    if done.returncode == 0:
        document = fleet.until(lambda document: document["campaigns"][0]["stage"] == "failed", "refused in staging")
        assert "train_009.bin" in document["campaigns"][0]["detail"]
    else:
        assert "train_009.bin" in done.stderr
    assert not list(fleet.host_root.glob("runs/*/attempts/*"))
