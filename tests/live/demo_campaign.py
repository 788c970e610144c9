"""One coordinator with a state directory of its own, and the campaign that the fleet demo gives it: the example's plan on three hosts over SSH."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from fleetd.paths import StatePaths
from fleetd.screens.client import Client, CoordinatorAway

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "manpages"
PLACES = {"slow": "gx10", "middle": "spark-a", "fast": "spark-b"}
AWAY_SECONDS_MAX = 20.0
END_SECONDS_MAX = 30.0


class Campaign:
    def __init__(self, folder: Path, ssh_config: Path, name: str, steps: int) -> None:
        self.name, self.state = name, StatePaths(folder / name / "state")
        (folder / name).mkdir()
        self.environment = {**os.environ, "FLEETD_STATE": str(self.state.root), "NO_COLOR": "1", "COLUMNS": "150"}
        self.plan = folder / name / "plan.yaml"
        self.plan.write_text(yaml.safe_dump(over_ssh(ssh_config, name, steps), sort_keys=False), encoding="utf-8")
        self.campaign_id = ""

    def type(self, *words: str, expect: tuple[int, ...] = (0,)) -> str:
        """Type one command; what it printed. SystemExit with its words when it did not end as expected."""
        argv = [sys.executable, "-m", "fleetd.screens.cli", *words]
        done = subprocess.run(argv, env=self.environment, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode not in expect:
            sys.exit(f"`fleetd {' '.join(words)}` gave {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def launch(self) -> None:
        self.campaign_id = str(json.loads(self.type("launch", str(self.plan), "--json"))["campaign_id"])

    def status(self) -> dict[str, Any]:
        """The status document, asked for as any screen does. A coordinator that was just started is given a moment."""
        end = time.monotonic() + AWAY_SECONDS_MAX
        while True:
            try:
                with Client(self.state) as client:
                    return client.status()
            except CoordinatorAway:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def coordinator(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["coordinator"]
        return found

    def kill_coordinator(self) -> int:
        """SIGKILL to the one whose pid its own status named just now."""
        pid = int(self.coordinator()["pid"])
        os.kill(pid, signal.SIGKILL)
        return pid

    def close(self) -> None:
        """Stop what still runs, and the coordinator."""
        if not self.state.socket.exists():
            return
        with contextlib.suppress(CoordinatorAway):
            self.type("stop", "--all", "--now", expect=(0, 1, 4, 6, 8))
        self.type("daemon", "stop", expect=(0, 1, 4))

    def events(self) -> list[dict[str, Any]]:
        with Client(self.state) as client:
            return list(client.all_events(campaign=self.campaign_id))


def over_ssh(ssh_config: Path, name: str, steps: int) -> dict[str, Any]:
    """The example's plan with its three candidates on three hosts, for so many steps."""
    plan: dict[str, Any] = yaml.safe_load((EXAMPLE / "plan.yaml").read_text(encoding="utf-8"))
    plan["name"] = f"manpages-{name}"
    plan["deadline"] = "60m"
    plan["defaults"]["training"]["steps"] = steps
    plan["defaults"]["training"]["optimizer"]["warmup"] = steps // 10
    for cadence in ("checkpoint", "validation"):
        plan["defaults"][cadence]["every_steps"] = max(1, steps // 3)
    plan["hosts"] = {
        host: {"transport": "ssh", "ssh_config": str(ssh_config), "root": f"/srv/fleetd-{name}", "python": sys.executable,
               "capacity": "4GiB", "floor": "256MiB"}
        for host in PLACES.values()
    }
    for role in plan["data"].values():
        role["shards"] = str(EXAMPLE / "data")
    for candidate, host in PLACES.items():
        plan["candidates"][candidate]["host"] = host
    return plan
