"""Real campaigns (two trainings, the choice, the freeze, the evaluation) on disks that are full now and then, beside an undisturbed twin:
`python tests/chaos/full_trainings.py`, part of `make full-disk`.

    tide     the disk of the coordinator, or of the host, is a small one that really fills up and empties again; each flood leaves another
             number of pages free, so that another write is the first to find no room
    every    each so-many-th write of one role finds no room, the next one does (`full_writes`), from another one on in each story

On a full disk of its host a trainer may end, too: then it goes on from its newest checkpoint once there is room. All else hurts none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# ruff: noqa: E402 (run as a program, its neighbours are found by path)
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "live")]

from chaos import Round, ask, cut_shards, end_coordinator, story_faults
from full_stories import ENSURE
from full_writes import Plan, Tap
from live_fleet import Fleet
from outcome import leftovers, unlike_its_twin

PAGE_BYTES = 4096
FLOODS_SECONDS_MAX = 240.0
PAGES_LEFT = (0, 0, 1, 2, 3, 5, 8, 13, 21, 34, 55)
DISKS = {"state": "96m", "host": "400m"}
START_WRITES = {"coordinator": 47}
"""A coordinator that finds no room at its start leaves, and is started again where nothing is refused: that is swept elsewhere."""
STRIDES = {"coordinator": 600, "agent": 40, "supervisor": 30, "shim": 12}
"""A coordinator copies a tree of some hundred files in one go, an agent makes a run of some thirty writes, and each begins anew after a
refusal: it must come through at least once. What goes on where it was refused has no such need."""

Say = Callable[[str], None]


@contextmanager
def own_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def flood(disk: Path, pages_left: int) -> Path:
    ballast = disk / "ballast"
    try:
        with open(ballast, "wb", buffering=0) as file:
            while (pages := os.statvfs(disk).f_bavail - pages_left) > 0:
                file.write(b"\0" * PAGE_BYTES * min(pages, 2048))
    except OSError:
        pass  # somebody else took the last page
    return ballast


def tide(fleet: Fleet, disk: Path, dice: random.Random, say: Say) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Flood and ebb until the campaign is over: its entry, and the status documents of the floods."""
    campaign_id, seen, end = Round(fleet, dice, 0, say).launch(), list[dict[str, Any]](), time.monotonic() + FLOODS_SECONDS_MAX
    while True:
        document = ask(fleet.state, "/v1/status")
        assert document is not None, "the coordinator lives"
        campaign = next(each for each in document["campaigns"] if each["campaign_id"] == campaign_id)
        if campaign["is_over"]:
            return campaign, seen
        assert time.monotonic() < end + FLOODS_SECONDS_MAX, f"not over: {json.dumps(document)[:3000]}"
        time.sleep(dice.uniform(0.2, 2.5))
        if time.monotonic() < end:
            ballast = flood(disk, dice.choice(PAGES_LEFT))
            time.sleep(dice.uniform(0.5, 3.0))
            flooded = ask(fleet.state, "/v1/status")
            assert flooded is not None, "a full disk silences nobody"
            seen.append(flooded)
            ballast.unlink(missing_ok=True)


def through_a_tide(which: str, shards: Path, twin: Fleet, seed: int, say: Say) -> list[str]:
    """What was wrong with a campaign on a disk of its own."""
    fleet = Fleet(shards)
    with own_disk(fleet.state if which == "state" else fleet.host_root, DISKS[which]) as disk:
        faults: list[str] = []
        try:
            campaign, seen = tide(fleet, disk, random.Random(seed), say)
            faults += unlike_its_twin(campaign, fleet, twin) + story_faults(ask(fleet.state, "/v1/events?limit=5000"))
            texts = [document["verdict"]["text"] for document in seen if document["verdict"]["word"] == "NEEDS YOU"]
            faults += [] if any("full" in text for text in texts) else ["status never told of the full disk"]
            attempts = {run["attempt"] for document in seen for run in document["runs"]}
            say(f"{which}: {len(seen)} floods, status told in {len(texts)}, attempts up to {max(attempts)}")
            if which == "state":
                told = any("wait in memory" in document["coordinator"]["journal"] for document in seen)
                faults += [] if told else ["status never told of the journal"]
                faults += [] if attempts <= {0, 1} else ["a trainer was started again for the coordinator's disk"]
        except AssertionError as fault:
            faults.append(str(fault))
        except BaseException:
            fleet.close()  # interrupted
            raise
        return _ended(fleet, faults)


def through_refusals(role: str, first: int, shards: Path, twin: Fleet, say: Say) -> list[str]:
    """What was wrong with a campaign in which each so-many-th write of a role found no room, from its `first` on."""
    fleet, faults = Fleet(shards), list[str]()
    tap = Tap(fleet.root, Plan(role=role, number=START_WRITES.get(role, 0) + first, every=STRIDES[role]))
    round_ = Round(fleet, random.Random(first), 0, say)
    round_.is_patient = True
    try:
        argv = [sys.executable, "-c", ENSURE, str(fleet.state)]
        if tap.run(argv, fleet.environment).returncode != 0:
            tap.run_freely(argv, fleet.environment)
        campaign = round_.run()
        faults += unlike_its_twin(campaign, fleet, twin) + story_faults(ask(fleet.state, "/v1/events?limit=5000"))
        attempts = len(list(fleet.host_root.glob("runs/*/attempts/*")))
        faults += [] if attempts == 3 else [f"{attempts} attempts for two trainings and an evaluation"]
    except AssertionError as fault:
        faults.append(str(fault))
    except BaseException:
        fleet.close()  # interrupted
        raise
    faults = _ended(fleet, faults)
    say(f"{role} from {first}: {tap.counts[role]} writes, {len(tap.refused)} refused, {len({call.name for call in tap.refused})} files")
    if not faults:
        tap.close()
    return faults + tap.faults + ([call.words for call in tap.refused] if faults else [])


def _ended(fleet: Fleet, faults: list[str]) -> list[str]:
    end_coordinator(fleet)
    faults += leftovers(fleet.root)
    if not faults:
        fleet.close()
    return faults + ([f"kept: {fleet.root}"] if faults else [])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--stories", type=int, default=1, help="of each role, each from another write on")
    parser.add_argument("--only", default="tide,every")
    parser.add_argument("--roles", default=",".join(STRIDES))
    asked, began, faults, told = parser.parse_args(arguments), time.monotonic(), dict[str, list[str]](), 0

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="fleetd-full-") as folder:
        shards = cut_shards(Path(folder))
        twin = Fleet(shards)
        try:
            say("the twin trains on a disk with room")
            Round(twin, random.Random(1), 0, say).run()
            end_coordinator(twin)
            stories: dict[str, Callable[[], list[str]]] = {}
            if "tide" in asked.only:
                stories |= {f"tide {which}": lambda which=which: through_a_tide(which, shards, twin, asked.seed, say) for which in DISKS}
            if "every" in asked.only:
                for role in asked.roles.split(","):
                    for first in range(1, STRIDES[role] + 1, max(1, STRIDES[role] // asked.stories)):
                        stories[f"{role} {first}"] = lambda role=role, first=first: through_refusals(role, first, shards, twin, say)
            for name, story in stories.items():
                told += 1
                if found := story():
                    faults[name] = found
                    say(f"{name}: {json.dumps(found, indent=1)}")
        finally:
            twin.close()
    print(json.dumps({"seconds": round(time.monotonic() - began), "stories": told, "faults": faults}, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a story started is ended with it
    sys.exit(main(sys.argv[1:]))
