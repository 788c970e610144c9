"""`make fence`: a host that is away, fenced while its trainer lives on, and what happens when it comes back. Real agents and trainers.

Not in the suite: a host counts as silent only after half a minute.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_fleet import Fleet, step_of, trainer_pid, words_of

pytestmark = pytest.mark.live

STEPS = 6000


def two_hosts(fleet: Fleet) -> dict[str, Any]:
    """Two roots on this machine. The agent of `spark-a` can't be started while the file `away` is there, as if the host were off."""
    wrapper = fleet.root / "agent-python"
    wrapper.write_text(f'#!/bin/sh\n[ -e {fleet.root}/away ] && exit 7\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    common = {"transport": "local", "capacity": "6GiB", "floor": "256MiB"}
    return {
        "spark-a": {**common, "root": str(fleet.root / "host"), "agent_python": str(wrapper)},
        "spark-b": {**common, "root": str(fleet.root / "other")},
    }


def goes_away(fleet: Fleet) -> None:
    (fleet.root / "away").touch()
    for process in fleet.processes():
        words = words_of(process)
        if f"{fleet.root}/host" in words and " agent " in words:
            process.kill()


def by_id(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["run_id"]: run for run in document["runs"]}


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines() if line.endswith("}")]


def test_a_fenced_run_goes_on_elsewhere_and_its_old_trainer_is_ended_when_the_host_returns(fleet: Fleet) -> None:
    plan = fleet.plan(hosts=two_hosts(fleet), candidates={"one": {"host": "spark-a", "training": {"steps": STEPS}}}, cadence=200)
    fleet.launch(plan)
    document = fleet.until(lambda document: any(run["checkpoint"] and run["checkpoint"]["step"] >= 200 for run in document["runs"]), "a copy")
    old = document["runs"][0]
    trainer = psutil.Process(int(trainer_pid(old) or 0))
    refused = fleet("fence", "spark-a", "--yes", expect=3)
    assert "not known to be silent" in refused.stderr, "a host that answers is not fenced"

    goes_away(fleet)
    fleet.until(lambda document: document["runs"][0]["state"] == "lost", "lost")
    asked = fleet("fence", "spark-a", expect=2)
    assert "goes on as a new run from step" in asked.stderr and "--yes" in asked.stderr
    told = json.loads(fleet("fence", "spark-a", "--yes", "--because", "a test", "--json").stdout)["runs"][0]
    new_id, step = told["successor"], told["from_step"]
    assert step >= 200 and step % 200 == 0
    fleet.until(lambda document: step_of(by_id(document)[new_id]) > step, "the new run goes on")
    assert trainer.is_running() and trainer.pid != trainer_pid(by_id(fleet.status())[new_id]), "the host was not off at all: two runs, a trainer each"
    began = log_of(fleet.root / "other" / "runs" / new_id)[0]
    assert (began["event"], began["step"]) == ("start", step)

    (fleet.root / "away").unlink()
    document = fleet.until(lambda document: all(host["reachable"] and not host["fenced"] for host in document["hosts"]), "the fence falls")
    assert not trainer.is_running(), "nothing of the old run lives when the fence falls"
    want = json.loads((fleet.root / "host" / "runs" / old["run_id"] / "orders" / "want.json").read_text(encoding="utf-8"))
    assert (want["want"], want["reason"], want["is_final"]) == ("stop", "superseded", True)
    runs = by_id(document)
    assert (runs[old["run_id"]]["state"], runs[old["run_id"]]["reason"], runs[old["run_id"]]["successor"]) == ("failed", "superseded", new_id)
    assert runs[old["run_id"]]["attempt"] == 1 and runs[new_id]["attempt"] == 1
    kinds = [event["kind"] for event in json.loads(fleet("events", "--json").stdout)["events"]]
    assert kinds.index("host_lost") < kinds.index("host_fenced") < kinds.index("host_unfenced")

    twin = log_of(fleet.root / "host" / "runs" / old["run_id"])
    losses = {line["step"]: line["loss"] for line in twin if "loss" in line}
    again = {line["step"]: line["loss"] for line in log_of(fleet.root / "other" / "runs" / new_id) if "loss" in line}
    both = sorted(set(losses) & set(again))
    assert both and [losses[each] for each in both] == [again[each] for each in both], "the new run repeats the old one bit for bit"
