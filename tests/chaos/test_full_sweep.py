"""A sample of the sweep in which each write finds no room in turn; `make full-disk` tells a story for every one of them. And its own eyes."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import full_writes
from full_stories import Outcome, Story, coordinator_story, host_story, start_story
from full_trainings import STRIDES
from full_writes import Plan, Tap
from host_runs import HostRun, spec_for, want

from fleetd.wire import encode
from policies.facts import Want

SAMPLE: list[tuple[Story, Plan]] = [
    (coordinator_story, Plan(role="coordinator", number=50, mode="full")), (start_story, Plan(role="coordinator", number=33)),
    *((host_story, Plan(role="supervisor", number=number)) for number in (4, 40, 75)),
    *((host_story, Plan(role="supervisor", number=number, mode="full")) for number in (9, 58, 85)),
    (host_story, Plan(role="supervisor", number=64, mode="short")),
    *((host_story, Plan(role="shim", number=number, mode=mode)) for number, mode in ((2, "once"), (16, "short"), (19, "once"), (19, "full"))),
]
WRITER = """
import os, sys
for number in range(4):
    try:
        print(os.write(os.open(f"file-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), b"x" * 4000), end=" ")
        print(os.pwrite(os.open(f"file-{number}", os.O_WRONLY), b"y" * 3000, 0), end=" ")
    except OSError as fault:
        print(fault.errno, end=" ")
print(os.pwrite(os.open("file-0", os.O_WRONLY), b"z" * 100, 0))
"""


MAKE_RUN = """
import json, sys
from pathlib import Path
from fleetd.host import rundir
from fleetd.model import RunSpec, WantOrder
from fleetd.paths import RunPaths
from fleetd.wire import decode
spec, want = (decode(kind, value, "") for kind, value in zip((RunSpec, WantOrder), json.loads(sys.argv[3])))
rundir.create_run(RunPaths(Path(sys.argv[4])), spec, {"schema": 1}, want)
"""


@pytest.mark.timeout(900)
def test_one_write_or_another_finds_no_room_and_no_run_is_the_worse_for_it(tmp_path: Path) -> None:
    def tell(each: tuple[Story, Plan]) -> Outcome:
        story, plan = each
        return story(tmp_path / f"{plan.role}-{plan.mode}-{plan.number}", plan)

    with ThreadPoolExecutor(len(SAMPLE)) as pool:
        outcomes = list(pool.map(tell, SAMPLE))

    assert {str(outcome.plan): [*(call.words for call in outcome.refused), *outcome.faults] for outcome in outcomes if outcome.faults} == {}
    assert all(outcome.refused for outcome in outcomes), "each came to its write"


@pytest.mark.parametrize(("plan", "said"), [
    (Plan(), "4000 3000 4000 3000 4000 3000 4000 3000 100"),
    (Plan(role="shim", number=4), "4000 3000 28 4000 3000 4000 3000 100"),
    (Plan(role="shim", number=5, mode="short"), "4000 3000 2000 3000 28 28 100"),
    (Plan(role="shim", number=3, mode="full"), "4000 28 28 28 28 100"),
    (Plan(role="shim", number=3, every=3), "4000 28 4000 28 4000 28 4000 28 100"),
    (Plan(role="supervisor", number=4), "4000 3000 4000 3000 4000 3000 4000 3000 100"),
])
def test_the_tap_refuses_the_write_that_it_was_told_to_and_no_other(
    tmp_path: Path, plan: Plan, said: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SHORT_SECONDS", "FULL_SECONDS"):
        monkeypatch.setattr(full_writes, name, 600.0)  # however long the writer needs
    tap, posing_as_shim = Tap(tmp_path, plan), ("/release/fleetd/host/__main__.py", "shim")

    done = tap.run([sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r})\n{WRITER}", *posing_as_shim], dict(os.environ))
    tap.close()

    assert done.stdout.decode().split() == said.split(), done.stderr
    assert tap.faults == []


def test_what_an_agent_begins_anew_after_a_refusal_comes_through_between_two_of_them(tmp_path: Path) -> None:
    run, posing_as_agent = HostRun(tmp_path, spec_for()), ("/release/fleetd/host/__main__.py", "agent")
    tap, order = Tap(tmp_path, Plan()), json.dumps([encode(run.spec), encode(want(1, Want.RUN))])

    done = tap.run([sys.executable, "-c", MAKE_RUN, *posing_as_agent, order, str(run.paths.root)], dict(os.environ))
    tap.close()

    assert run.paths.want.exists(), done.stderr
    assert 20 < tap.counts["agent"] < STRIDES["agent"] - 5, "some lines of its log and its clock come between"
