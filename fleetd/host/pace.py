"""How long a supervisor may look away: a second, less where something is due before it. Pure."""

from __future__ import annotations

from datetime import timedelta

from fleetd.host.causes import stop_moment
from fleetd.host.history import History
from fleetd.host.sight import HostSight
from policies.facts import RunState

TICK_SECONDS = 1.0
TICK_FAST_SECONDS = 0.2
"""While something is about to happen: a launch, a stop."""
TICK_ENDING_SECONDS = 0.05
"""Between the death of a trainer and the record of its exit."""
TICK_STUCK_SECONDS = 5.0
TICK_MIN_SECONDS = 0.02
LAUNCH_FAST_SECONDS = 10.0
ENDING_FAST_SECONDS = 5.0


def pause_seconds(sight: HostSight, history: History, *, look_seconds: float, start_is_refused: bool) -> float:
    """Seconds until the next look. `look_seconds`: after so long the memory wants to be looked at again."""
    attempt, seconds = sight.attempt, TICK_SECONDS
    if history.state is RunState.STUCK:
        return TICK_STUCK_SECONDS
    if attempt is not None and not history.is_attempt_over:
        gone = history.leader_gone_seconds
        if gone is not None:
            return TICK_ENDING_SECONDS if sight.boottime_seconds - gone < ENDING_FAST_SECONDS else TICK_FAST_SECONDS
        is_launching = history.state is RunState.STARTING and attempt.age_seconds < LAUNCH_FAST_SECONDS
        seconds = TICK_FAST_SECONDS if is_launching or history.stop is not None else min(TICK_SECONDS, look_seconds)
    elif start_is_refused:
        return TICK_SECONDS
    elif history.state in (RunState.STARTING, RunState.FINISHED, RunState.FAILED, RunState.STOPPED):
        return TICK_FAST_SECONDS
    due = [moment for moment in (stop_moment(sight, history), sight.cutoff_at, history.next_attempt_at) if moment is not None]
    ahead = [(moment - sight.time.now) / timedelta(seconds=1) for moment in due]
    return max(TICK_MIN_SECONDS, min([seconds, *(wait for wait in ahead if wait > 0)]))
