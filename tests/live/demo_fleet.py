"""`make demo-fleet`: the campaign of examples/manpages over real SSH on three test hosts, undisturbed and then disturbed, and both compared.

    disturbed   spark-a is cut off for a minute; spark-b loses power and comes back; the coordinator is killed and started again
    compared    the same selection, and for every candidate the same checkpoint digests, so the same weights, moments and generators

The two campaigns run one after the other on the same hosts. It exits 1 when anything differs, and prints what was seen. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "live")]

from fleet.hosts import Hosts  # noqa: E402  (the test hosts, found by their path)

EXAMPLE = ROOT / "examples" / "manpages"
PLACES = {"slow": "gx10", "middle": "spark-a", "fast": "spark-b"}
BEGUN_SHARE = 0.2
"""The disturbances begin once every training has done this share of its steps, so that there is something to lose."""
PARTITION_SECONDS = 60.0
DARK_SECONDS = 10.0
WAIT_SECONDS_MAX = 1500.0
LOOK_SECONDS = 3.0


class Campaign:
    """One coordinator with a state directory of its own, and the campaign that it is given."""

    def __init__(self, place: Path, hosts: Hosts, name: str, steps: int) -> None:
        self.place, self.name = place / name, name
        self.place.mkdir()
        self.environment = {**os.environ, "FLEETD_STATE": str(self.place / "state"), "NO_COLOR": "1"}
        self.plan = self.place / "plan.yaml"
        self.plan.write_text(yaml.safe_dump(over_ssh(hosts, name, steps), sort_keys=False), encoding="utf-8")
        self.campaign_id = ""

    def type(self, *words: str, expect: tuple[int, ...] = (0,), show: bool = True) -> str:
        """Type one command and return what it printed."""
        if show:
            print(f"\n$ fleetd {' '.join(words)}", flush=True)
        done = subprocess.run([sys.executable, "-m", "fleetd.screens.cli", *words], env=self.environment, cwd=ROOT, capture_output=True, text=True,
                              check=False)
        if show:
            print(done.stdout + done.stderr, end="", flush=True)
        if done.returncode not in expect:
            sys.exit(f"`fleetd {' '.join(words)}` gave {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.type("status", "--json", expect=(0, 8), show=False))
        return document

    def launch(self) -> None:
        self.campaign_id = json.loads(self.type("launch", str(self.plan), "--json"))["campaign_id"]

    def until(self, what: str, met: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        print(f"… until {what}", flush=True)
        end = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < end:
            document = self.status()
            if met(document):
                return document
            time.sleep(LOOK_SECONDS)
        sys.exit(f"not within {WAIT_SECONDS_MAX:.0f} s: {what}\n{self.type('status', expect=(0, 8), show=False)}")

    def finish(self) -> dict[str, Any]:
        """Wait for the end; what was chosen, and the digest of every checkpoint that each candidate left on its host."""
        self.until("the campaign is over", lambda document: bool(document["campaigns"][0]["is_over"]))
        self.type("status", expect=(0, 8))
        campaign = self.status()["campaigns"][0]
        if campaign["stage"] != "evaluated":
            sys.exit(f"it ended {campaign['stage']}: {campaign['detail']}")
        return {"selection": selection_of(campaign), "story": self.story()}

    def story(self) -> dict[str, set[str]]:
        """Of every candidate, each loss and each checkpoint's digest that its log ever named. A step done twice adds nothing when it is the same."""
        found: dict[str, set[str]] = {}
        for path in sorted((self.place / "state").glob("campaigns/*/store/runs/*/log.jsonl")):
            candidate = path.parent.name.rsplit("-", 1)[-1]
            if candidate in PLACES:
                records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("{") and line.endswith("}")]
                saves = (record for record in records if record.get("event") == "save" and "digest" in record)
                losses = {f"step {record['step']} loss {record['loss']!r}" for record in records if "loss" in record}
                found[candidate] = losses | {f"step {record['step']} checkpoint {record['digest']}" for record in saves}
        return found

    def kill_coordinator(self) -> None:
        pid = int(self.status()["coordinator"]["pid"])
        print(f"\n--- SIGKILL to the coordinator, pid {pid}", flush=True)
        os.kill(pid, signal.SIGKILL)
        time.sleep(DARK_SECONDS)
        self.type("daemon", "start")

    def close(self) -> None:
        self.type("stop", "--all", "--now", expect=(0, 1, 4, 6), show=False)
        os.kill(int(self.status()["coordinator"]["pid"]), signal.SIGTERM)


def over_ssh(hosts: Hosts, name: str, steps: int) -> dict[str, Any]:
    """The example's plan with its three candidates on three hosts, for so many steps."""
    plan: dict[str, Any] = yaml.safe_load((EXAMPLE / "plan.yaml").read_text(encoding="utf-8"))
    plan["name"] = f"manpages-{name}"
    plan["deadline"] = "60m"
    plan["defaults"]["training"]["steps"] = steps
    plan["defaults"]["training"]["optimizer"]["warmup"] = steps // 10
    for cadence in ("checkpoint", "validation"):
        plan["defaults"][cadence]["every_steps"] = max(1, steps // 3)
    plan["hosts"] = {
        host: {"transport": "ssh", "ssh_config": str(hosts.ssh_config), "root": f"/srv/fleetd-{name}", "python": sys.executable,
               "capacity": "4GiB", "floor": "256MiB"}
        for host in PLACES.values()
    }
    for role in plan["data"].values():
        role["shards"] = str(EXAMPLE / "data")
    for candidate, host in PLACES.items():
        plan["candidates"][candidate]["host"] = host
    return plan


def selection_of(campaign: dict[str, Any]) -> dict[str, Any]:
    selection = campaign["selection"]
    rows = [{key: row[key] for key in ("candidate", "step", "value", "eligible")} for row in selection["table"]]
    return {"candidate": selection["candidate"], "step": selection["step"], "checkpoint": selection["checkpoint_digest"], "value": selection["value"],
            "table": rows}


def disturb(campaign: Campaign, hosts: Hosts) -> None:
    """Partition, power loss and a killed coordinator, overlapping as they do when it is night."""
    print(f"\n--- spark-a is cut off for {PARTITION_SECONDS:.0f} s; boot {hosts['spark-b'].boot_id[:8]} of spark-b ends", flush=True)
    hosts["spark-a"].cut()
    healer = threading.Timer(PARTITION_SECONDS, hosts["spark-a"].heal)
    healer.start()
    hosts["spark-b"].power_off()
    time.sleep(DARK_SECONDS)
    campaign.type("status", expect=(0, 8))
    campaign.kill_coordinator()
    hosts["spark-b"].power_on()
    print(f"\n--- spark-b is on again, boot {hosts['spark-b'].boot_id[:8]}", flush=True)
    healer.join()
    print("\n--- spark-a is reached again", flush=True)
    campaign.until("no host is silent", lambda document: all(host["reachable"] for host in document["hosts"]))
    campaign.type("status", expect=(0, 8))


def main(steps: int) -> int:
    begun_step = max(1, round(steps * BEGUN_SHARE))
    with tempfile.TemporaryDirectory(prefix="fleetd-demo-") as folder, Hosts() as hosts:
        for host in hosts:
            host.run("install", "-d", "-o", "fleet", "-g", "fleet", "/srv")
        outcomes = {}
        for name in ("undisturbed", "disturbed"):
            campaign = Campaign(Path(folder), hosts, name, steps)
            campaign.type("check", str(campaign.plan))
            campaign.launch()
            try:
                if name == "disturbed":
                    campaign.until(f"every training is past step {begun_step}",
                                   lambda document: min((run["step"]["value"] or 0) for run in document["runs"]) >= begun_step)
                    disturb(campaign, hosts)
                outcomes[name] = campaign.finish()
                attempts = {run["candidate"]: run["attempt"] for run in campaign.status()["runs"]}
                print(f"\n{name}: attempts {attempts}", flush=True)
            finally:
                campaign.close()
        return compare(outcomes["undisturbed"], outcomes["disturbed"])


def compare(undisturbed: dict[str, Any], disturbed: dict[str, Any]) -> int:
    same_choice = undisturbed["selection"] == disturbed["selection"]
    stories = undisturbed["story"], disturbed["story"]
    # A checkpoint more, made at another step on the way out, is no difference; another loss or digest for the same step is one.
    missing = {candidate: sorted(facts - stories[1].get(candidate, set()))[:3] for candidate, facts in stories[0].items()}
    more = {candidate: facts - stories[0].get(candidate, set()) for candidate, facts in stories[1].items()}
    other = {candidate: sorted(fact for fact in facts if " loss " in fact)[:3] for candidate, facts in more.items()}
    same_story = not any(missing.values()) and not any(other.values()) and set(stories[0]) == set(PLACES)
    counts = {candidate: len(facts) for candidate, facts in stories[0].items()}
    print(f"\nchosen: {undisturbed['selection']['candidate']} at step {undisturbed['selection']['step']}, checkpoint "
          f"{undisturbed['selection']['checkpoint'][:12]}; disturbed: {disturbed['selection']['candidate']} at step "
          f"{disturbed['selection']['step']}, checkpoint {disturbed['selection']['checkpoint'][:12]}")
    print(f"selection: {'equal' if same_choice else 'DIFFERENT'}")
    print(f"losses and checkpoint digests {counts}: {'equal' if same_story else f'DIFFERENT: missing {missing}, other {other}'}")
    return 0 if same_choice and same_story else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The example's campaign over SSH, undisturbed and disturbed.")
    parser.add_argument("--steps", type=int, default=300, help="Of each training; the example itself has 300.")
    sys.exit(main(parser.parse_args().steps))
