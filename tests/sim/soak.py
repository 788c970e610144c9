"""New stories for as long as asked: `python -m tests.sim.soak --seconds 300`, or one again: `--seed 17 --trace`.

Prints what was reached and how fast; a seed that breaks a law is printed with its last lines and the command that plays it again.
A full soak (300 s and more) fails as well when it has not reached every transition of the tables, or not tried enough campaigns.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).absolute().parent.parent.parent))

from tests.sim.coverage import Coverage
from tests.sim.story import EDITION, Told, tell

FAULTS_SHOWN_MAX = 5
FULL_SECONDS, FULL_CAMPAIGNS = 300.0, 1000
"""What a soak has to be, before what it never reached counts against it; and how many campaigns it then must have given trouble."""
BATCH_STORIES = 2
BATCHES_AHEAD = 2
"""For each process: it never waits, and at the end little is thrown away."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.soak", description="Simulated campaigns with faults.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to go on")
    parser.add_argument("--seed", type=int, default=None, help="play this one story (with --seconds: begin with it)")
    parser.add_argument("--edition", type=int, default=EDITION, help="of this one story: what could happen when it was found")
    parser.add_argument("--stories", type=int, default=None, help="so many stories at most")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that tell stories")
    parser.add_argument("--trace", action="store_true", help="print a story as it happens")
    parser.add_argument("--planted", action="store_true", help="plant a fault for each line of DESIGN section 9, and see it caught")
    given = parser.parse_args(arguments)
    if given.planted:
        from tests.sim.plants import show

        return show()
    if given.seed is not None and "--seconds" not in arguments and given.stories is None:
        return _one(given.seed, echo=given.trace, edition=given.edition)
    first = given.seed if given.seed is not None else random.SystemRandom().randrange(1_000_000_000)
    return _soak(first, given.seconds, given.stories, max(1, given.jobs))


def _one(seed: int, *, echo: bool, edition: int) -> int:
    told = tell(seed, echo=echo, edition=edition)
    if told.fault is not None:
        print(words(told))
    print(f"seed {seed}: {told.campaigns} campaigns, {told.state_events} state events, {told.seconds:.0f} virtual seconds, "
          f"{'every law held' if told.fault is None else 'broken'}")
    return 0 if told.fault is None else 1


@dataclass
class Sum:
    """What some stories add up to."""

    stories: int = 0
    campaigns: int = 0
    troubled: int = 0
    events: int = 0
    virtual_seconds: float = 0.0
    processor_seconds: float = 0.0
    """What they took of a processor, whatever else the machine had to do."""
    coverage: Coverage = field(default_factory=Coverage)
    broken: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Sum) -> None:
        self.stories, self.campaigns, self.troubled = self.stories + other.stories, self.campaigns + other.campaigns, self.troubled + other.troubled
        self.events, self.virtual_seconds = self.events + other.events, self.virtual_seconds + other.virtual_seconds
        self.processor_seconds += other.processor_seconds
        self.coverage.add(other.coverage)
        self.broken += other.broken


def tell_some(seeds: range) -> Sum:
    """The stories of these seeds. A broken one comes back in words: its exception would not travel between processes."""
    found, began = Sum(), time.process_time()
    for seed in seeds:
        told = tell(seed, found.coverage)
        broken = [(seed, words(told))] if told.fault is not None else []
        found.add(Sum(1, told.campaigns, told.troubled, told.state_events, told.seconds, broken=broken))
    found.processor_seconds = time.process_time() - began
    return found


def _soak(first: int, seconds: float, stories_max: int | None, jobs: int) -> int:
    began, total = time.monotonic(), Sum()
    for some in _told(first, began + seconds, stories_max, jobs):
        for _, told in some.broken[:max(0, FAULTS_SHOWN_MAX - len(total.broken))]:
            print(f"{told}\n", flush=True)
        total.add(some)
    elapsed = time.monotonic() - began
    print(total.coverage.table())
    print(f"\n{total.stories} stories from seed {first} in {elapsed:.0f} s with {jobs} processes, {total.virtual_seconds / 3600:.0f} virtual hours")
    print(f"{total.campaigns} campaigns, {total.troubled} of them with faults in their life; {total.events} state events")
    print(f"a second: {total.stories / elapsed:.1f} stories, {total.campaigns / elapsed:.1f} campaigns, {total.events / elapsed:.0f} state events")
    print(f"{total.processor_seconds:.0f} s of a processor: {total.events / max(1.0, total.processor_seconds):.0f} state events for each of them")
    never, seeds = total.coverage.never(), [str(seed) for seed, _ in total.broken]
    print(f"never reached: {', '.join(never) or 'none'}")
    print(f"{len(seeds)} stories broke a law{': ' + ', '.join(seeds[:40]) if seeds else ''}")
    is_full = seconds >= FULL_SECONDS and stories_max is None
    if is_full and (never or total.troubled < FULL_CAMPAIGNS):
        print(f"a full soak reaches every transition and gives trouble to {FULL_CAMPAIGNS} campaigns at least: this one did not")
        return 1
    return 1 if total.broken else 0


def _told(first: int, ends_at: float, stories_max: int | None, jobs: int) -> Iterator[Sum]:
    """Batches of stories as they are finished, told by several processes until the time is up."""
    starts = count(first, BATCH_STORIES)
    last = None if stories_max is None else first + stories_max
    with ProcessPoolExecutor(jobs) as pool:
        under_way: set[Future[Sum]] = set()
        while True:
            while time.monotonic() < ends_at and len(under_way) < jobs * BATCHES_AHEAD:
                start = next(starts)
                if last is not None and start >= last:
                    break
                under_way.add(pool.submit(tell_some, range(start, start + BATCH_STORIES if last is None else min(last, start + BATCH_STORIES))))
            if not under_way:
                return
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)


def words(told: Told) -> str:
    """A broken story: its last lines, what broke, and how to play it again."""
    fault = told.fault
    assert fault is not None
    trace = "".join(traceback.format_exception(fault)[-8:]) if isinstance(fault, Exception) else ""
    broke = f"seed {told.seed} at {told.seconds:.1f}: {type(fault).__name__}: {fault}"
    return "\n".join((*told.lines, f"{trace}{broke}", f"  again: python -m tests.sim.soak --seed {told.seed} --trace"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
