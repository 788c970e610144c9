"""The stop ladder: what is done to a process tree that has to end, by how long ago it was asked.

    graceful   ASK ── WAIT ────────────── ASK_AGAIN ──── KILL ── VERIFY_EMPTY ── STUCK
               SIGTERM, SIGCONT           with a notice  SIGKILL, whole tree     a person is needed
    now        KILL ── VERIFY_EMPTY ── STUCK

A longer wait never lowers a rung.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from policies.facts import StopMode


class Rung(IntEnum):
    ASK = 0
    WAIT = 1
    ASK_AGAIN = 2
    KILL = 3
    VERIFY_EMPTY = 4
    STUCK = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A rung and when it is reached: `grace_share` of the grace plus `plus_seconds` after the first ask."""

    rung: Rung
    grace_share: float
    plus_seconds: float


GRACEFUL_LADDER = (
    Step(rung=Rung.WAIT, grace_share=0.0, plus_seconds=0.0),
    Step(rung=Rung.ASK_AGAIN, grace_share=1.0, plus_seconds=0.0),
    Step(rung=Rung.KILL, grace_share=1.25, plus_seconds=1.0),
    Step(rung=Rung.VERIFY_EMPTY, grace_share=1.25, plus_seconds=2.0),
    Step(rung=Rung.STUCK, grace_share=1.25, plus_seconds=31.0),
)
NOW_LADDER = (
    Step(rung=Rung.KILL, grace_share=0.0, plus_seconds=0.0),
    Step(rung=Rung.VERIFY_EMPTY, grace_share=0.0, plus_seconds=1.0),
    Step(rung=Rung.STUCK, grace_share=0.0, plus_seconds=30.0),
)
"""A killed process that waits for a device or a network disk dies late; after 30 s somebody has to look."""

LADDERS = {StopMode.GRACEFUL: GRACEFUL_LADDER, StopMode.NOW: NOW_LADDER}


def rung_at(*, asked_seconds_ago: float | None, grace_seconds: float, mode: StopMode) -> Rung:
    """The rung that is due. `asked_seconds_ago` is None when nothing was done yet."""
    assert grace_seconds >= 0
    ladder = LADDERS[mode]
    if asked_seconds_ago is None:
        return Rung.ASK if mode is StopMode.GRACEFUL else ladder[0].rung
    assert asked_seconds_ago >= 0
    reached = [step.rung for step in ladder if asked_seconds_ago >= step.grace_share * grace_seconds + step.plus_seconds]
    return max(reached)


KILL_SECONDS = next(step.plus_seconds for step in NOW_LADDER if step.rung is Rung.VERIFY_EMPTY)
"""From SIGKILL to the moment by which the tree should be gone."""


def seconds_until_empty(grace_seconds: float) -> float:
    """From the first ask to the moment by which even a killed tree should be gone: what a deadline has to leave."""
    last = next(step for step in GRACEFUL_LADDER if step.rung is Rung.VERIFY_EMPTY)
    return last.grace_share * grace_seconds + last.plus_seconds
