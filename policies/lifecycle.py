"""The states of a run and of a campaign, and every legal step between them, as data.

Every pair that is not in a table raises and changes nothing. The diagram in FLEET_RUN.md is drawn from here.
"""

from __future__ import annotations

from policies.errors import IllegalTransition
from policies.facts import CampaignStage as C
from policies.facts import Reason
from policies.facts import RunState as S

ACTIVE = frozenset({S.STARTING, S.RUNNING, S.STOPPING, S.BACKOFF, S.LOST, S.STUCK, S.HELD})
"""States in which a host may hold memory or a process for the run."""
RESTING = frozenset({S.STOPPED})
FINAL = frozenset({S.FINISHED, S.FAILED})
SETTLED = RESTING | FINAL

_OBSERVED = frozenset({S.STARTING, S.RUNNING, S.STOPPING, S.BACKOFF, S.HELD, S.STUCK, S.STOPPED, S.FINISHED, S.FAILED})

RUN_TRANSITIONS: dict[S, frozenset[S]] = {
    S.QUEUED: frozenset({S.STAGING, S.STOPPED, S.FINISHED, S.FAILED}),
    S.STAGING: frozenset({S.STARTING, S.STOPPED, S.FINISHED}),
    S.STARTING: frozenset({S.RUNNING, S.STOPPING, S.BACKOFF, S.LOST, S.HELD, S.STUCK, S.STOPPED, S.FINISHED, S.FAILED}),
    S.RUNNING: frozenset({S.STOPPING, S.BACKOFF, S.LOST, S.HELD, S.STUCK, S.STOPPED, S.FINISHED, S.FAILED}),
    S.STOPPING: frozenset({S.STOPPED, S.FINISHED, S.FAILED, S.BACKOFF, S.HELD, S.STUCK, S.LOST}),
    S.BACKOFF: frozenset({S.STARTING, S.STOPPED, S.FINISHED, S.FAILED, S.HELD, S.LOST}),
    S.LOST: _OBSERVED,
    S.HELD: frozenset({S.STARTING, S.STOPPED, S.FINISHED}),
    S.STUCK: frozenset({S.STOPPED, S.FINISHED, S.FAILED, S.HELD, S.LOST}),
    S.STOPPED: frozenset({S.QUEUED, S.STARTING, S.FINISHED}),
    S.FINISHED: frozenset(),
    S.FAILED: frozenset(),
}
"""STOPPING -> BACKOFF: a stalled attempt was ended and is tried again. STOPPED -> QUEUED or STARTING: a resume order.
STOPPED or HELD -> FINISHED: the deadline passed while it rested.

STAGING lasts as long as its tick: from STARTING on the order may have reached the host, so whatever befalls a placed run befalls it there.
A silent host takes out of sight whatever may live or come to life on it: STARTING, RUNNING, STOPPING, BACKOFF, STUCK -> LOST. HELD and
STOPPED have no process and get none without a new order: what is known of them stays true, and they are not lost."""

CAMPAIGN_TRANSITIONS: dict[C, frozenset[C]] = {
    C.PREFLIGHT: frozenset({C.STAGING, C.STOPPED, C.FAILED}),
    C.STAGING: frozenset({C.PILOT, C.TRAINING, C.STOPPED, C.FAILED}),
    C.PILOT: frozenset({C.TRAINING, C.SELECTING, C.STOPPED, C.FAILED}),
    C.TRAINING: frozenset({C.SELECTING, C.FINISHED, C.STOPPED, C.FAILED}),
    C.SELECTING: frozenset({C.FROZEN, C.FAILED}),
    C.FROZEN: frozenset({C.EVALUATED, C.FAILED}),
    C.EVALUATED: frozenset(),
    C.FINISHED: frozenset(),
    C.STOPPED: frozenset({C.PILOT, C.TRAINING, C.SELECTING, C.FINISHED, C.FAILED}),
    C.FAILED: frozenset(),
}
"""STOPPED or PILOT -> SELECTING: the deadline passed while it rested, or in the pilot; what was saved is still judged. SELECTING is not
stopped: nothing trains any more, so nothing could be resumed, and the freeze opens nothing by itself."""

NEVER_RETRIED = frozenset({
    Reason.CONFIG, Reason.NOT_FINITE, Reason.GATE_FAILED, Reason.PREFLIGHT, Reason.MEMORY, Reason.USER, Reason.DEADLINE,
    Reason.SUPERSEDED,
})
"""A second try of these would do the same again, or undo what somebody asked for."""


def check_run_step(before: S, after: S) -> None:
    """Raise IllegalTransition unless a run may go from `before` to `after` in one step."""
    if after not in RUN_TRANSITIONS[before]:
        raise IllegalTransition(f"a run can't go from {before} to {after}")


def check_campaign_step(before: C, after: C) -> None:
    """Raise IllegalTransition unless a campaign may go from `before` to `after` in one step."""
    if after not in CAMPAIGN_TRANSITIONS[before]:
        raise IllegalTransition(f"a campaign can't go from {before} to {after}")
