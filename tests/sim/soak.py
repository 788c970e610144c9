"""New stories for as long as asked: `python -m tests.sim.soak --seconds 300`, or one again: `--seed 17 --trace`.

Prints what was reached and how fast; a seed that breaks a law is printed with its last lines and the command that plays it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).absolute().parent.parent.parent))

from tests.sim.coverage import Coverage
from tests.sim.story import Told, tell

FAULTS_SHOWN_MAX = 5


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description="Simulated campaigns with faults.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=None, help="play this one story (with --seconds: begin with it)")
    parser.add_argument("--stories", type=int, default=None, help="so many stories at most")
    parser.add_argument("--trace", action="store_true", help="print a story as it happens")
    given = parser.parse_args(arguments)
    if given.seed is not None and "--seconds" not in arguments and given.stories is None:
        return _one(given.seed, echo=given.trace)
    return _soak(given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000_000), given.seconds, given.stories)


def _one(seed: int, *, echo: bool) -> int:
    told = tell(seed, echo=echo)
    if told.fault is not None:
        print(words(told))
    print(f"seed {seed}: {told.campaigns} campaigns, {told.state_events} state events, {told.seconds:.0f} virtual seconds, "
          f"{'every law held' if told.fault is None else 'broken'}")
    return 0 if told.fault is None else 1


def _soak(first: int, seconds: float, stories_max: int | None) -> int:
    coverage, began = Coverage(), time.monotonic()
    campaigns = events = stories = 0
    virtual_seconds = 0.0
    broken: list[Told] = []
    while time.monotonic() - began < seconds and (stories_max is None or stories < stories_max):
        told = tell(first + stories, coverage)
        stories, campaigns, events = stories + 1, campaigns + told.campaigns, events + told.state_events
        virtual_seconds += told.seconds
        if told.fault is not None:
            broken.append(told)
            if len(broken) <= FAULTS_SHOWN_MAX:
                print(f"{words(told)}\n", flush=True)
    elapsed = time.monotonic() - began
    print(coverage.table())
    print(f"\n{stories} stories from seed {first}, {campaigns} campaigns, {events} state events in {elapsed:.0f} s "
          f"({stories / elapsed:.1f} stories, {campaigns / elapsed:.1f} campaigns, {events / elapsed:.0f} state events a second; "
          f"{virtual_seconds / 3600:.0f} virtual hours)")
    never = coverage.never()
    print(f"never reached: {', '.join(never) or 'none'}")
    print(f"{len(broken)} stories broke a law{': ' + ', '.join(str(told.seed) for told in broken[:40]) if broken else ''}")
    return 1 if broken else 0


def words(told: Told) -> str:
    """A broken story: its last lines, what broke, and how to play it again."""
    fault = told.fault
    assert fault is not None
    trace = "".join(traceback.format_exception(fault)[-8:]) if isinstance(fault, Exception) else ""
    broke = f"seed {told.seed} at {told.seconds:.1f}: {type(fault).__name__}: {fault}"
    return "\n".join((*told.lines, f"{trace}{broke}", f"  again: python -m tests.sim.soak --seed {told.seed} --trace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
