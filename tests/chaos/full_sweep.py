"""Every write finds no room in turn: `python tests/chaos/full_sweep.py`, or `make full-disk`.

An undisturbed story counts the writes of a role. Then the story is told once for each of them and each way to refuse it (`full_writes`);
with `--stride 7` for each seventh, with `--together 20` for twenty stories in each of which every twentieth write finds no room.
It prints how many were swept, which kinds of write there are, which of them were never refused, and what was wrong.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

# ruff: noqa: E402 (run as a program, its neighbours are found by path)
sys.path[:0] = [str(Path(__file__).parent)]

from full_stories import Outcome, Story, coordinator_story, host_story, start_story
from full_writes import Call, Plan

MODES = ("once", "short", "full")
HALVED = ("write", "pwrite64")
ROLES = ("supervisor", "shim", "start", "coordinator", "agent")
"""`start`: the coordinator's first writes, in a story that ends once it answers."""
ON_DISK = Path("/dev/shm")
"""Where there is one, stories are told on a disk whose syncs cost nothing."""
Say = Callable[[str], None]


def writer_of(role: str) -> str:
    return "coordinator" if role == "start" else role


@dataclass(kw_only=True)
class Sweep:
    """All stories of one role and one mode together."""

    role: str
    mode: str
    wanted: Counter[str]
    told: int = 0
    reached: int = 0
    refused: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: dict[int, list[str]] = field(default_factory=dict)

    def take(self, outcome: Outcome) -> None:
        self.told += 1
        self.refused += len(outcome.refused)
        self.kinds.update(call.kind for call in outcome.refused if call.role == writer_of(self.role))
        if outcome.refused:
            self.reached += 1
        if outcome.faults:
            self.faults[outcome.plan.number] = [*(call.words for call in outcome.refused[:3]), *outcome.faults]

    def to_json(self) -> dict[str, object]:
        return {
            "role": self.role, "mode": self.mode, "writes_counted": self.wanted.total(), "stories": self.told, "reached": self.reached,
            "refused": self.refused, "kinds": len(self.wanted), "kinds_refused": dict(sorted(self.kinds.items())),
            "kinds_never_refused": sorted(set(self.wanted) - set(self.kinds)),
            "faults": sorted(self.faults),
        }


def plans_of(role: str, mode: str, mine: list[Call], asked: argparse.Namespace) -> list[Plan]:
    """Each `stride`-th write of the role alone, or so many stories together."""
    if asked.together > 1 and mode != "full":
        firsts = range(asked.start, asked.start + asked.together)[asked.first::asked.stride]
        return [Plan(role=writer_of(role), number=number, mode=mode, every=asked.together) for number in firsts]
    numbers = [call.number for call in mine if call.number >= asked.start and (mode != "short" or call.call in HALVED)]
    return [Plan(role=writer_of(role), number=number, mode=mode) for number in numbers[asked.first::asked.stride]]


def sweep(story: Story, role: str, mode: str, reference: list[Call], folder: Path, asked: argparse.Namespace, say: Say) -> Sweep:
    mine = [call for call in reference if call.role == writer_of(role)]
    found = Sweep(role=role, mode=mode, wanted=Counter(call.kind for call in mine if mode != "short" or call.call in HALVED))

    def tell(plan: Plan) -> Outcome:
        return story(folder / f"{role}-{mode}-{plan.number}", plan)

    with ThreadPoolExecutor(asked.at_once) as pool:
        for outcome in pool.map(tell, plans_of(role, mode, mine, asked)):
            found.take(outcome)
            if outcome.faults:
                say(f"{role} {mode} {outcome.plan.number}: {json.dumps(found.faults[outcome.plan.number], indent=1)}")
    say(f"{role} {mode}: {found.told} stories, {found.reached} reached their write, {found.refused} calls refused, {len(found.faults)} went wrong")
    return found


def undisturbed(story: Story, folder: Path, role: str) -> list[Call]:
    """The calls of the story when nothing is refused."""
    kept = folder / f"{role}-calls.json"
    if not kept.exists():
        outcome = story(folder / f"{role}-undisturbed", Plan())
        assert not outcome.faults, outcome.faults
        kept.write_text(json.dumps([asdict(call) for call in outcome.calls]), encoding="utf-8")
    return [Call(**call) for call in json.loads(kept.read_text(encoding="utf-8"))]


def stories_of(role: str, folder: Path) -> Story:
    """The story in which this role writes. A coordinator's campaign begins with its release on the host, so that it is not copied each time."""
    if role in ("supervisor", "shim"):
        return host_story
    if role == "start":
        return start_story
    releases = folder / "releases"
    if not releases.exists():
        kept = folder / "kept"
        outcome = coordinator_story(kept, Plan(), keep_releases=releases)
        assert not outcome.faults, outcome.faults
    return partial(coordinator_story, releases=releases)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--roles", default=",".join(ROLES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="leave out so many")
    parser.add_argument("--start", type=int, default=1, help="from this write on: a coordinator's first fifty are those of its start")
    parser.add_argument("--together", type=int, default=1, help="stories that refuse each so-many-th write")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--list", action="store_true", help="only count and list the writes")
    parser.add_argument("--folder", type=Path, help="a kept folder: its releases and its undisturbed stories need not be made again")
    asked, began = parser.parse_args(arguments), time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f}] {text}", flush=True)

    folder = asked.folder or Path(tempfile.mkdtemp(prefix="fleetd-full-", dir=ON_DISK if ON_DISK.is_dir() else None))
    folder.mkdir(exist_ok=True)
    try:
        sweeps = sweep_all(folder, asked, say)
    except SystemExit:
        if asked.folder is None:
            shutil.rmtree(folder)
        raise
    faults = sum(len(each.faults) for each in sweeps)
    print(json.dumps({
        "seconds": round(time.monotonic() - began), "stories": sum(each.told for each in sweeps), "refused": sum(each.refused for each in sweeps),
        "faults": faults, "sweeps": [each.to_json() for each in sweeps],
    }, indent=1))
    if faults or asked.folder:
        print(f"kept: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if faults else 0


def sweep_all(folder: Path, asked: argparse.Namespace, say: Say) -> list[Sweep]:
    """What was found for each role and mode that was asked for."""
    sweeps: list[Sweep] = []
    for role in asked.roles.split(","):
        story = stories_of(role, folder)
        reference = undisturbed(story, folder, role)
        counted = Counter(call.role for call in reference)
        say(f"undisturbed: {dict(counted)}")
        if asked.list:
            kinds = Counter(call.kind for call in reference if call.role == writer_of(role))
            say(json.dumps(dict(sorted(kinds.items())), indent=1))
            continue
        for mode in asked.modes.split(","):
            sweeps.append(sweep(story, role, mode, reference, folder, asked, say))
    return sweeps


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what a story started is ended with it
    sys.exit(main(sys.argv[1:]))
