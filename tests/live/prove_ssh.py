"""`make prove-ssh`: what cuts, silence and slow lines do to launches and to `status`, on real sshd. Minutes long, so no part of `make test`.

    orders     every connection of a host is killed at a random moment between the first packet of a new connection and the running trainer,
               CUTS times from SEED, while the start is ordered again until it is acknowledged: exactly one trainer afterwards
    cuts       the same during launches by the whole coordinator, before, during and after the start order (launch_cuts.py)
    silence    one of three hosts is cut off: how long `status` takes, what it says, and that nothing was started again when it is back
    slow       300 ms and 5 % loss towards a host: a launch and a stop
Each line it prints is measured in this run; it exits 1 when a promise is broken.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import psutil

from fleetd.campaign import HostPlan
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.ssh_session import SshSession
from fleetd.model import Caps, DeadlineTerms, Owner, RunSpec, WantOrder
from fleetd.paths import StatePaths
from fleetd.wire import PROTOCOL, encode
from policies.errors import HostUnreachable
from policies.facts import RunKind, StopMode, Want

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "live")]

from fleet.hosts import Hosts  # noqa: E402
from launch_cuts import run_cuts  # noqa: E402
from live_fleet import Fleet, words_of  # noqa: E402  (the live tests' own installation, found by its path)
from sshd import Sshd  # noqa: E402

RUNNING_SECONDS_MAX = 120.0
LOOKS = 20
FAILURES: list[str] = []
OWNER = Owner(coordinator_id="proof", generation=1)


def check(is_so: bool, what: str) -> None:
    print(f"{'ok   ' if is_so else 'WRONG'} {what}", flush=True)
    if not is_so:
        FAILURES.append(what)


def plan_of(fleet: Fleet, name: str, hosts: dict[str, Any], candidates: dict[str, Any]) -> Path:
    defaults = {"memory_cap": "64MiB", "restarts": {"max": 0, "window": "1h", "first": "1s", "ceiling": "2s"},
                "stop": {"grace_floor": "1s", "grace_ceiling": "5s"}}
    return fleet.plan(name, hosts=hosts, candidates=candidates, defaults=defaults, data={}, after_freeze={"evaluate": [], "report": False})


def prove_cuts(count: int, seed: int, into: Path | None) -> None:
    """One cut in each of so many launches, before, during and after the start order in turns."""
    faults = run_cuts(count, seed, into)
    check(not faults, f"{count} launches cut once each: {'; '.join(faults) or 'never two trainers, and status said which; nobody helped'}")


def prove_orders(count: int, seed: int) -> None:
    """The part of a launch that a cut can hurt, without the rest: connect, bring the agent, order the start, until it is acknowledged."""
    dice, folder = random.Random(seed), Path(tempfile.mkdtemp(prefix="fleetd-orders-"))
    host = Sshd(folder / "spark-a", "spark-a")
    plan = HostPlan(name="spark-a", transport="ssh", ssh_config=str(host.ssh_config), root=str(host.root))
    session = SshSession(plan, OWNER, stage=Releases(StatePaths(folder / "state")).stage)
    window_seconds, counts, failed_calls, cut_connections, after = 0.0, [0, 0, 0], 0, 0, {}
    try:
        session.call("hello", {"protocol": PROTOCOL}, 60.0)
        for number in range(-1, count):  # the first one is left alone: it says how long it takes here, and so when to cut the others
            session.close()
            spec, killed = order_for(f"r{number}", f"{80000 + number}"), []
            timer = threading.Timer(dice.uniform(0.0, window_seconds), lambda killed=killed: killed.append(host.cut()))
            started_seconds = time.monotonic()
            if number >= 0:
                timer.start()
            want = WantOrder(sequence=1, want=Want.RUN, actor="test", at=spec.created_at)
            failed_calls += insist(session, "start", {"spec": encode(spec), "task": None, "want": encode(want)})
            if number >= 0:
                timer.join()
            after[spec.run_id] = 0
            while not is_running(session, after, spec.run_id):
                time.sleep(0.05)
            window_seconds = window_seconds or time.monotonic() - started_seconds
            alive = len([process for process in psutil.process_iter() if words_of(process) == f"sleep {80000 + number}"])
            counts[min(alive, 2)] += number >= 0
            cut_connections += sum(killed)
            check(alive == 1, f"order {number}: {alive} trainers") if alive != 1 else None
            stop = replace(want, sequence=2, want=Want.STOP, mode=StopMode.NOW)
            insist(session, "want", {"run_id": spec.run_id, "want": encode(stop)})
    finally:
        time.sleep(5.0)  # the last trainer was told to stop just now
        session.close()
        host.stop()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"      seed {seed}: from no connection to a running trainer takes {window_seconds:.1f} s undisturbed; {cut_connections} connections "
          f"killed, {failed_calls} orders failed and were given again")
    check(counts == [0, count, 0], f"{count} starts cut at random moments: {counts[1]} times one trainer, {counts[0]} times none, "
          f"{counts[2]} times two")


def order_for(run_id: str, marker: str) -> RunSpec:
    now = datetime.now(timezone.utc)
    return RunSpec(
        run_id=run_id, campaign_id="c", candidate="a", kind=RunKind.TRAIN, owner=OWNER, created_at=now, argv=("sleep", marker), environment={},
        contract=False, release_digest="", caps=Caps(host_bytes=2**28, accelerator_bytes=0, floor_bytes=0),
        deadline=DeadlineTerms(final_at=now + timedelta(hours=2), cutoff_at=now + timedelta(hours=1)),
    )


def insist(session: SshSession, order: str, body: dict[str, Any]) -> int:
    """Order it until it is acknowledged, as the coordinator does; how often the call failed."""
    failed = 0
    while True:
        try:
            session.call(order, body, 20.0)
        except HostUnreachable:
            failed += 1
        else:
            return failed


def is_running(session: SshSession, after: dict[str, int], run_id: str) -> bool:
    try:
        runs = session.call("poll", {"after": {run_id: after[run_id]}, "wait_seconds": 0.2}, 20.0)["runs"]
    except HostUnreachable:
        return False
    found = next((run for run in runs if run["run_id"] == run_id), None)
    return found is not None and found["observation"] is not None and found["observation"]["state"] == "running"


def wait_for(fleet: Fleet, campaign_id: str, state: str) -> dict[str, Any]:
    document = fleet.until(
        lambda document: [run for run in document["runs"] if run["campaign_id"] == campaign_id and run["state"] == state], state, RUNNING_SECONDS_MAX,
    )
    return next(run for run in document["runs"] if run["campaign_id"] == campaign_id)


def status_seconds(fleet: Fleet) -> list[float]:
    """How long the coordinator takes to answer, without the start of a Python for each question."""
    import httpx

    found = []
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(fleet.state / "api.sock")), base_url="http://fleetd", trust_env=False) as client:
        for _ in range(LOOKS):
            before = time.monotonic()
            client.get("/v1/status", timeout=30.0).raise_for_status()
            found.append(time.monotonic() - before)
            time.sleep(0.1)
    return found


def told(seconds: list[float]) -> str:
    return f"status answers in {statistics.median(seconds) * 1000:.0f} ms (median of {len(seconds)}), longest {max(seconds) * 1000:.0f} ms"


def prove_hosts() -> None:
    fleet = Fleet(ROOT)
    with Hosts() as hosts, contextlib.closing(fleet):
        bodies = {
            host.name: {"transport": "ssh", "ssh_config": str(hosts.ssh_config), "user": "fleet", "root": "/srv/fleetd-host", "capacity": "1GiB",
                        "floor": "16MiB"}
            for host in hosts
        }
        for host in hosts:
            host.run("install", "-d", "-o", "fleet", "/srv/fleetd-host")
        candidates = {f"on-{name}": {"host": name, "command": ["sleep", "7654321"]} for name in bodies}
        before = time.monotonic()
        campaign_id = fleet.launch(plan_of(fleet, "three", bodies, candidates))
        fleet.until(lambda document: [run["state"] for run in document["runs"]] == ["running"] * 3, "all three run")
        print(f"      three hosts from nothing to running in {time.monotonic() - before:.1f} s")
        pids = {run["candidate"]: run["pid"]["value"] for run in fleet.status()["runs"]}
        check(max(seconds := status_seconds(fleet)) < 0.5, f"all reachable: {told(seconds)}")
        prove_silence(fleet, hosts, pids)
        prove_slow(fleet, hosts, bodies)
        fleet("stop", campaign_id, "--now")
        fleet("wait", campaign_id, "--timeout", "2m", expect=None)


def prove_silence(fleet: Fleet, hosts: Hosts, pids: dict[str, int]) -> None:
    hosts["spark-b"].cut()
    cut_seconds = time.monotonic()
    check(max(seconds := status_seconds(fleet)) < 0.5, f"spark-b just cut off: {told(seconds)}")
    document = fleet.until(lambda document: document["verdict"]["word"] == "BLIND", "BLIND")
    print(f"      BLIND after {time.monotonic() - cut_seconds:.0f} s: {document['verdict']['text']}")
    check({run["candidate"]: run["state"] for run in document["runs"]}["on-spark-b"] == "lost", "its run is lost, not failed")
    check(max(seconds := status_seconds(fleet)) < 0.5, f"spark-b black-holed: {told(seconds)}")
    hosts["spark-b"].heal()
    heal_seconds = time.monotonic()
    document = fleet.until(lambda document: [run["state"] for run in document["runs"]] == ["running"] * 3, "all run again")
    print(f"      running again {time.monotonic() - heal_seconds:.0f} s after the cable was healed, silent for {heal_seconds - cut_seconds:.0f} s")
    check({run["candidate"]: run["pid"]["value"] for run in document["runs"]} == pids, "the same three processes run: nothing was started again")


def prove_slow(fleet: Fleet, hosts: Hosts, bodies: dict[str, Any]) -> None:
    hosts["spark-a"].slow(0.15, loss=0.05)
    try:
        before = time.monotonic()
        campaign_id = fleet.launch(plan_of(fleet, "slow", {"spark-a": bodies["spark-a"]}, {"one": {"command": ["sleep", "7654322"]}}))
        wait_for(fleet, campaign_id, "running")
        print(f"      300 ms there and back, 5 % loss: running {time.monotonic() - before:.1f} s after the launch")
        check(max(seconds := status_seconds(fleet)) < 0.5, f"with the slow host: {told(seconds)}")
        before = time.monotonic()
        fleet("stop", campaign_id, "--now")
        wait_for(fleet, campaign_id, "stopped")
        check(True, f"300 ms, 5 % loss: stopped {time.monotonic() - before:.1f} s after the order")
    finally:
        hosts["spark-a"].heal()


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("parts", nargs="*", default=["hosts", "orders", "cuts"])
    asked.add_argument("--cuts", type=int, default=100)
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--into", type=Path, help="a file that collects the cut launches of several runs")
    words = asked.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that hosts, daemons and trainers go with us
    print(subprocess.run(["ssh", "-V"], capture_output=True, text=True, check=False).stderr.strip())
    if "hosts" in words.parts:
        prove_hosts()
    if "orders" in words.parts:
        prove_orders(words.cuts, words.seed)
    if "cuts" in words.parts:
        prove_cuts(words.cuts, words.seed, words.into)
    print(f"{len(FAILURES)} promises broken")
    return 1 if FAILURES else 0


if __name__ == "__main__":
    sys.exit(main())
