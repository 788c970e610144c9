"""`make demo-fleet`: the campaign of examples/manpages over real SSH on three test hosts, undisturbed and then disturbed, and both compared.

    undisturbed   slow on gx10, middle on spark-a, fast on spark-b; one is chosen, frozen and judged
    disturbed     spark-a is cut off for a minute; meanwhile spark-b loses power and comes back, and the coordinator is killed and started again
    compared      the choice, every loss and every checkpoint digest, the chosen weights byte by byte, the figures on the test split;
                  who was started again and who was not

The campaigns run one after the other on the same hosts, each with a coordinator and roots of its own. It exits 1 when anything differs. Needs root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "live")]

from demo_campaign import PLACES, Campaign  # noqa: E402  (beside this file, found by its path)
from demo_compare import Outcome, compare, outcome_of  # noqa: E402
from fleet.hosts import Hosts  # noqa: E402  (the test hosts)

NAMES = ("undisturbed", "disturbed")
BEGUN_SHARE = 0.2
"""The disturbances begin once every training has done this share of its steps, so that there is something to lose."""
STARTS = {"slow": 1, "middle": 1, "fast": 2}
"""How often each has to be started in the disturbed campaign: only the power loss ends a trainer."""
PARTITION_SECONDS = 60.0
POWER_OFF_SECONDS = 1.0
"""After the cut. The coordinator is killed once it has called spark-a lost; spark-b is switched on after that."""
DARK_SECONDS = 3.0
LOST_SECONDS_MAX = 45.0
WAIT_SECONDS_MAX = 1500.0
LOOK_SECONDS = 1.0
SHOW_SECONDS = 8.0


class Show:
    """What the person sees: one line a moment, by the clock of the demo."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown, self._shown_at, self._word = "", 0.0, ""

    def title(self, text: str) -> None:
        print(f"\n── {text} {'─' * max(0, 76 - len(text))}", flush=True)

    def say(self, text: str, because: str = "") -> None:
        seconds = time.monotonic() - self._began
        print(f"{int(seconds) // 60:3}:{int(seconds) % 60:02}  {text:<46}{'  ' if because else ''}{because}".rstrip(), flush=True)

    def look(self, document: dict[str, Any], campaign_id: str) -> None:
        """One line of progress, each few seconds, and the verdict whenever its word changes."""
        verdict, campaign = document["verdict"], next(each for each in document["campaigns"] if each["campaign_id"] == campaign_id)
        if verdict["word"] != self._word:
            self._word = verdict["word"]
            self.say(f"status says {verdict['word']}: {verdict['text']}")
        line = f"{campaign['stage']:<11}" + "".join(f"{progress(run):<28}" for run in document["runs"] if not self._is_old(run))
        if line != self._shown and time.monotonic() - self._shown_at >= SHOW_SECONDS:
            self._shown, self._shown_at = line, time.monotonic()
            self.say(line)

    def _is_old(self, run: dict[str, Any]) -> bool:
        return bool(run["kind"] == "train" and run["state"] == "finished" and self._shown.startswith(("frozen", "evaluated")))


def progress(run: dict[str, Any]) -> str:
    step, last = run["step"]["value"], run["last_step_at"]["age_seconds"]
    state = "" if run["state"] == "running" else f" {run['state']}"
    age = f" {last:.0f} s ago" if run["state"] in ("running", "lost") and last is not None and last > SHOW_SECONDS else ""
    return f"{run['candidate']} {'?' if step is None else step}/{run['steps_planned'] or '?'}{state}{age}"


def follow(show: Show, campaign: Campaign, met: Callable[[dict[str, Any]], bool], seconds_max: float = WAIT_SECONDS_MAX) -> dict[str, Any]:
    """Watch until `met`; the document in which it was. SystemExit when it takes too long, with what status says."""
    end = time.monotonic() + seconds_max
    while True:
        document = campaign.status()
        show.look(document, campaign.campaign_id)
        if met(document):
            return document
        if time.monotonic() > end:
            sys.exit(f"not within {seconds_max:.0f} s\n{campaign.type('status', expect=(0, 8))}")
        time.sleep(LOOK_SECONDS)


def disturb(show: Show, campaign: Campaign, hosts: Hosts) -> None:
    """A partition, and in it a power loss and the coordinator's death: what a bad night brings at once."""
    hosts["spark-a"].cut()
    cut_seconds = time.monotonic()
    show.say(f"spark-a is cut off for {PARTITION_SECONDS:.0f} s", "its training goes on alone; nobody may start it elsewhere")
    document = follow(show, campaign, lambda document: time.monotonic() > cut_seconds + POWER_OFF_SECONDS)
    if state_of(document, "fast") != "running":
        sys.exit("this machine is too quick for so short a training, nothing would be lost with the power: give more --steps")
    before = hosts["spark-b"].boot_id
    hosts["spark-b"].power_off()
    show.say("spark-b loses power", "its trainer is gone; only its complete checkpoints are left")
    follow(show, campaign, lambda document: state_of(document, "middle") == "lost", LOST_SECONDS_MAX)
    show.say("spark-a is called lost, not dead", "silence proves nothing: nothing was started again")
    killed = campaign.kill_coordinator()
    show.say(f"the coordinator is killed, pid {killed}", "SIGKILL; no host notices")
    time.sleep(DARK_SECONDS)
    campaign.type("daemon", "start")
    began = campaign.coordinator()
    show.say(f"the coordinator is started again, pid {began['pid']}", f"it replays its journal; to hosts it is generation {began['generation']}")
    hosts["spark-b"].power_on()
    show.say(f"spark-b is switched on, boot {before[:8]} is now {hosts['spark-b'].boot_id[:8]}", "another boot proves that its trainer is dead")
    follow(show, campaign, lambda document: time.monotonic() > cut_seconds + PARTITION_SECONDS)
    hosts["spark-a"].heal()
    show.say("spark-a is reached again", "what it did meanwhile is told now, in order")
    follow(show, campaign, lambda document: all(host["reachable"] for host in document["hosts"]))


def state_of(document: dict[str, Any], candidate: str) -> str:
    return next(str(run["state"]) for run in document["runs"] if run["candidate"] == candidate)


def run_campaign(show: Show, campaign: Campaign, steps: int, hosts: Hosts | None) -> Outcome:
    """From the launch to the end; `hosts` are disturbed on the way where they are given."""
    campaign.launch()
    show.say("launched: " + ", ".join(f"{candidate} on {host}" for candidate, host in PLACES.items()), campaign.campaign_id)
    begun = max(1, round(steps * BEGUN_SHARE))
    follow(show, campaign, lambda document: min((run["step"]["value"] or 0) for run in document["runs"]) >= begun)
    if hosts is not None:
        disturb(show, campaign, hosts)
    document = follow(show, campaign, lambda document: bool(campaign_of(document, campaign)["is_over"]))
    ended = campaign_of(document, campaign)
    if ended["stage"] != "evaluated":
        sys.exit(f"it ended {ended['stage']}: {ended['detail']}\n{campaign.type('status', expect=(0, 8))}")
    found = outcome_of(campaign, ended)
    show.say(f"evaluated: {found.candidate} at step {found.step} was chosen", f"{found.value:.4f} nats a token, checkpoint {found.checkpoint[:12]}")
    return found


def campaign_of(document: dict[str, Any], campaign: Campaign) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in document["campaigns"] if each["campaign_id"] == campaign.campaign_id)
    return found


def main(steps: int, names: tuple[str, ...], kept: Path | None) -> int:
    show = Show()
    folder = Path(tempfile.mkdtemp(prefix="fleetd-demo-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts and coordinators go with us
    try:
        with Hosts() as hosts:
            show.title("three test hosts")
            for host in hosts:
                host.run("install", "-d", "-o", "fleet", "-g", "fleet", "/srv")
                show.say(f"{host.name} at {host.address}", f"its own network, processes and sshd; boot {host.boot_id[:8]}")
            for name in names:
                show.title(f"{name}, {steps} steps for each candidate")
                campaign = Campaign(folder, hosts.ssh_config, name, steps)
                try:
                    run_campaign(show, campaign, steps, hosts if name == "disturbed" else None).keep((kept or folder) / f"{name}.json")
                finally:
                    campaign.close()
        outcomes = [(kept or folder) / f"{name}.json" for name in NAMES]
        if not all(path.exists() for path in outcomes):
            return 0
        show.title("compared")
        return compare(Outcome.kept(outcomes[0]), Outcome.kept(outcomes[1]), STARTS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The example's campaign over SSH, undisturbed and disturbed.")
    parser.add_argument("--steps", type=int, default=300, help="Of each training; the example itself has 300.")
    parser.add_argument("--only", choices=NAMES, help="One of the two now, and the other one another time, with the same --keep.")
    parser.add_argument("--keep", type=Path, help="A folder for what each of the two left; they are compared once both are there.")
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("the test hosts are made of namespaces and bridges: this needs root")
    sys.exit(main(given.steps, (given.only,) if given.only else NAMES, given.keep))
