"""Displaced work with real processes from end to end: a hog makes room for a campaign of a command, agent and coordinator die on the way."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_coordinator import WAIT_SECONDS_MAX, Coordinator

from fleetd.coordinator.daemon import answering_pid
from fleetd.wire import encode
from policies.workloads import Restart, Workload

HOG = Path(__file__).resolve().parents[1] / "host" / "hog.py"


class Hog:
    """Somebody's process, which tells of itself in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.argv = (sys.executable, "-S", str(HOG), str(folder), "hog", "64")
        self._first = subprocess.Popen(self.argv, cwd=folder, env={**os.environ, "HOG_SAYS": "hello"}, start_new_session=True)
        while not (folder / "hog.json").exists():
            assert self._first.poll() is None
            time.sleep(0.02)
        self.pid = self._first.pid

    @property
    def workload(self) -> Workload:
        restart = Restart(command=self.argv, environment=("HOG_SAYS",))
        return Workload(name="hog", pattern=f"{HOG} {self.folder}", uid=os.getuid(), restart=restart, grace_seconds=120.0)

    def living(self) -> list[int]:
        self._first.poll()
        words = list(self.argv)
        return [each.pid for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == words]

    def end(self) -> None:
        for pid in self.living():
            psutil.Process(pid).kill()
        self._first.wait()


class Story:
    def __init__(self, folder: Path) -> None:
        self.coordinator, self.hog = Coordinator(folder), Hog(folder)

    def launch(self) -> str:
        plan = self.coordinator.plan()
        plan = replace(plan, hosts=(replace(plan.hosts[0], displace=(self.hog.workload,)),))
        answer = self.coordinator.call("POST", "launch", json={"plan": encode(plan), "plan_text": "name: commands", "actor": "user:test"})
        assert answer.status_code == 200, answer.text
        assert any("hog is displaced for this campaign" in each and f"pid {self.hog.pid}" in each for each in answer.json()["warnings"])
        return str(answer.json()["campaign_id"])

    def book(self) -> dict[str, Any]:
        (path,) = self.coordinator.paths.campaigns.glob("*/displaced.json")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["displaced"][0]
        return found

    def until(self, met: Any) -> None:
        """As the coordinator's own, and whoever has died is started again."""
        def comes() -> bool:
            if answering_pid(self.coordinator.paths) is None:
                self.coordinator.start()
            try:
                return bool(met())
            except httpx.TransportError:
                return False  # it died just now
        self.coordinator.until(comes)

    def item(self) -> dict[str, Any]:
        found: dict[str, Any] = self.coordinator.status()["campaigns"][0]["displaced"][0]
        return found

    def restore(self, campaign: str) -> Any:
        return self.coordinator.call("POST", "restore", json={"target": campaign, "actor": "user:test"})


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    found = Story(tmp_path)
    yield found
    monkeypatch.delenv("FLEETD_FAULT", raising=False)
    found.coordinator.end()
    found.hog.end()


def test_a_hog_makes_room_and_comes_back_once_though_agent_and_coordinator_die_on_the_way(
    story: Story, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = ("agent:displacement recorded", "coordinator:displace answered", "agent:workload started")
    purses = [tmp_path / f"purse-{number}" for number in range(len(points))]
    for purse in purses:
        purse.mkdir()
        (purse / "coin-0").touch()  # each dies once
    monkeypatch.setenv("FLEETD_FAULT", ",".join(f"{point}:kill:{purse}" for point, purse in zip(points, purses, strict=True)))
    story.coordinator.start()
    campaign = story.launch()

    story.until(lambda: story.coordinator.run()["state"] == "running")
    assert story.hog.living() == [] and story.item()["state"] == "displaced"
    refused = story.restore(campaign)
    assert refused.status_code == 422 and "runs still need the room" in refused.text
    story.coordinator.finish.touch()
    story.until(lambda: "displaced work not yet restored on here: hog" in story.coordinator.status()["verdict"]["text"])

    with contextlib.suppress(httpx.TransportError):  # the coordinator dies over it
        story.restore(campaign)
    story.until(lambda: story.item()["state"] == "restored" and story.book()["state"] == "restored")
    (pid,) = story.hog.living()
    assert pid != story.hog.pid and json.loads((tmp_path / "hog.json").read_text())["seen"] == "hello"
    assert story.restore(campaign).json()["displaced"][0]["state"] == "restored" and story.hog.living() == [pid]
    died = [next(purse.iterdir()).name.split("-", 2)[::2] for purse in purses]
    assert died == [point.split(":") for point in points], "each of them did"
    first = psutil.Process(pid)
    first.kill()
    psutil.wait_procs([first], timeout=WAIT_SECONDS_MAX)
    (tmp_path / "hog.json").unlink()
    (line,) = story.book()["restore"]
    subprocess.run(["sh", "-c", line], check=True)  # as a person types it
    story.until((tmp_path / "hog.json").exists)
    assert json.loads((tmp_path / "hog.json").read_text())["seen"] == "hello" and len(story.hog.living()) == 1
    audit = next((story.coordinator.root / "displaced").glob("*/audit.jsonl")).read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["pid"] for line in audit} == {story.hog.pid}
