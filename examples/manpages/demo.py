"""The main job on real data, as a person would do it by hand: check, launch, stop half-way, resume exactly, and read the outcome.

Everything is done through the `fleetd` command; this file only types it, waits for the half-way point and prints what it types. All that it
makes lies under `.demo/`: the coordinator's state, the host's root and the report.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLAN = Path(__file__).with_name("plan.yaml")
STATE = ROOT / ".demo" / "state"
ENVIRONMENT = {**os.environ, "FLEETD_STATE": str(STATE)}
HALFWAY = 0.4
HALFWAY_SECONDS_MAX = 600.0


def fleetd(*words: str, check: bool = True) -> int:
    """Type one command, let it print, and return its exit code."""
    print(f"\n$ fleetd {' '.join(words)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "fleetd.screens.cli", *words], env=ENVIRONMENT, cwd=ROOT, check=False).returncode
    if check and code != 0:
        sys.exit(f"`fleetd {' '.join(words)}` gave {code}")
    return code


def ask(*words: str) -> dict[str, object]:
    """The JSON document of one reader."""
    argv = [sys.executable, "-m", "fleetd.screens.cli", *words, "--json"]
    done = subprocess.run(argv, env=ENVIRONMENT, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    document: dict[str, object] = json.loads(done.stdout)
    return document


def wait_until_halfway(campaign_id: str) -> None:
    """Return when every run of the campaign has done its share of steps."""
    end = time.monotonic() + HALFWAY_SECONDS_MAX
    while time.monotonic() < end:
        runs = [run for run in ask("status")["runs"] if run["campaign_id"] == campaign_id]  # type: ignore[attr-defined]
        shares = [(run["step"]["value"] or 0) / (run["steps_planned"] or 10**9) for run in runs]
        print("  " + "   ".join(f"{run['candidate']} {share:4.0%}" for run, share in zip(runs, shares, strict=True)), flush=True)
        if shares and min(shares) >= HALFWAY:
            return
        time.sleep(5)
    sys.exit("the trainings did not get half-way: see `fleetd status`")


def main() -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    plan = str(PLAN.relative_to(ROOT))
    fleetd("check", plan)
    print(f"\n$ fleetd launch {plan}", flush=True)
    campaign_id = str(ask("launch", plan)["campaign_id"])
    print(f"launched {campaign_id}; it goes on without this terminal", flush=True)
    try:
        wait_until_halfway(campaign_id)
        fleetd("status")
        fleetd("stop", campaign_id, "--graceful")
        fleetd("wait", campaign_id, "--timeout", "5m", check=False)  # exit 6: stopped, as asked
        fleetd("status")
        fleetd("resume", campaign_id)
        fleetd("follow", campaign_id)
        fleetd("status")
        fleetd("events", campaign_id, "--tail", "12")
        fleetd("report", campaign_id)
    finally:
        end_coordinator()


def end_coordinator() -> None:
    """The demo ends what it started: its own coordinator, asked by SIGTERM. Runs would go on without it."""
    pid = ask("status")["coordinator"]["pid"]  # type: ignore[index]
    os.kill(int(pid), signal.SIGTERM)
    print(f"\nthe demo's coordinator (pid {pid}) was asked to end", flush=True)


if __name__ == "__main__":
    main()
