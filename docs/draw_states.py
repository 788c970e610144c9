"""Draws the states of runs and campaigns from `policies/lifecycle.py`, as text that any terminal shows, for FLEET_RUN.md.

    python docs/draw_states.py            prints both drawings
    python docs/draw_states.py --write    puts them into FLEET_RUN.md

`tests/test_runbook.py` fails while the run book holds anything else.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from policies.facts import CampaignStage as C
from policies.facts import RunState as S
from policies.facts import Word
from policies.lifecycle import CAMPAIGN_TRANSITIONS, RUN_TRANSITIONS, check_campaign_step, check_run_step

W = TypeVar("W", bound=Word)

RUN_BOOK = Path(__file__).resolve().parents[1] / "FLEET_RUN.md"
BEGIN, END = "<!-- drawn by docs/draw_states.py: begin -->", "<!-- drawn by docs/draw_states.py: end -->"

RUN_WAYS = {
    "as it should be": (S.QUEUED, S.STAGING, S.STARTING, S.RUNNING, S.FINISHED),
    "died, tried again": (S.RUNNING, S.BACKOFF, S.STARTING, S.RUNNING),
    "stopped and resumed": (S.RUNNING, S.STOPPING, S.STOPPED, S.QUEUED),
    "host silent, then back": (S.RUNNING, S.LOST, S.RUNNING),
    "tried too often, resumed": (S.RUNNING, S.HELD, S.STARTING),
    "would not die, then did": (S.STOPPING, S.STUCK, S.STOPPED),
}
CAMPAIGN_WAYS = {
    "as it should be": (C.PREFLIGHT, C.STAGING, C.TRAINING, C.SELECTING, C.FROZEN, C.EVALUATED),
    "with a pilot": (C.PREFLIGHT, C.STAGING, C.PILOT, C.TRAINING, C.SELECTING),
    "commands alone": (C.PREFLIGHT, C.STAGING, C.TRAINING, C.FINISHED),
    "stopped and resumed": (C.TRAINING, C.STOPPED, C.TRAINING),
    "stopped until the cutoff": (C.TRAINING, C.STOPPED, C.SELECTING),
}


def drawing() -> str:
    """Both drawings as one Markdown block. IllegalTransition when one of the usual ways is no way any more."""
    runs = (*_ways(RUN_WAYS, check_run_step), "", *_table(RUN_TRANSITIONS))
    campaigns = (*_ways(CAMPAIGN_WAYS, check_campaign_step), "", *_table(CAMPAIGN_TRANSITIONS))
    return "\n".join(("A run:", "", "```text", *runs, "```", "", "A campaign:", "", "```text", *campaigns, "```"))


def drawn_in(text: str) -> str:
    """What a run book holds between the two marks."""
    _, found, rest = text.partition(BEGIN)
    drawn, ended, _ = rest.partition(END)
    assert found and ended, f"{BEGIN} and {END} mark where the drawings go"
    return drawn.strip()


def with_drawing(text: str) -> str:
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n\n{drawing()}\n\n{END}{after}"


def _ways(ways: Mapping[str, tuple[W, ...]], check: Callable[[W, W], None]) -> list[str]:
    for way in ways.values():
        for before, after in pairwise(way):
            check(before, after)
    width = max(map(len, ways))
    return [f"{name:{width}}  {' → '.join(way)}" for name, way in ways.items()]


def _table(transitions: Mapping[W, frozenset[W]]) -> list[str]:
    """A row for each state: `x` under every state that may come next. A row without one is final."""
    names = list(transitions)
    width = max(map(len, names))
    header = f"{'from ╲ to':{width}}  {' '.join(names)}"
    rows = [f"{before:{width}}  " + " ".join(f"{'x' if after in transitions[before] else '·':^{len(after)}}" for after in names) for before in names]
    return [header, *(row.rstrip() for row in rows)]


def main() -> None:
    if sys.argv[1:] == ["--write"]:
        RUN_BOOK.write_text(with_drawing(RUN_BOOK.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(drawing())


if __name__ == "__main__":
    main()
