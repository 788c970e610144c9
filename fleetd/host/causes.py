"""Why an attempt has to stop: an order, the deadline, memory, a stall. Pure; `decide` asks, and the most urgent cause answers.

    urgent (SIGKILL at once)    stop --now · the cutoff has come · hard line of the cap · half of the host's floor
    with the ladder             stop --graceful · the last safe moment · soft line · the host's floor · a member killed by the kernel · a stall
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from fleetd.host.history import History
from fleetd.host.sight import AttemptSight, HostSight
from policies import deadlines, memory, stalls
from policies.escalation import KILL_SECONDS, seconds_until_empty
from policies.facts import Reason, RunKind, StopMode, Want

PLAIN_GRACE_SHARE = 0.1
"""A plain command tells nothing about its steps: its grace is at most this share of its whole time, and the plan's ceiling."""


@dataclass(frozen=True, slots=True)
class Cause:
    reason: Reason
    mode: StopMode
    because: str


def stop_cause(sight: HostSight, attempt: AttemptSight, history: History) -> Cause | None:
    """Why the attempt has to stop, the most urgent first; None when it may go on."""
    asked = (by_order(sight), _by_deadline(sight, history), _by_memory(sight), _by_kernel(attempt), _by_stall(sight, attempt, history))
    found = [cause for cause in asked if cause is not None]
    urgent = [cause for cause in found if cause.mode is StopMode.NOW]
    return next(iter((*urgent, *found)), None)


def by_order(sight: HostSight) -> Cause | None:
    want = sight.want
    if want is None or want.want is not Want.STOP:
        return None
    reason = want.reason if want.reason in (Reason.USER, Reason.SUPERSEDED, Reason.DEADLINE) else Reason.USER
    return Cause(reason, want.mode, f"stop ordered by {want.actor} (order {want.sequence}, {want.mode})")


def _by_deadline(sight: HostSight, history: History) -> Cause | None:
    stop_at = stop_moment(sight, history)
    if sight.cutoff_at is None or stop_at is None or sight.time.now < stop_at:
        return None
    # A killed tree needs a moment to be gone, and by the cutoff it has to be. Whoever has not saved by now was to be killed at this moment anyway.
    lead_seconds = 0.0 if sight.spec.kind is RunKind.EVALUATE else KILL_SECONDS
    if sight.time.now >= sight.cutoff_at - timedelta(seconds=lead_seconds):
        return Cause(Reason.DEADLINE, StopMode.NOW, f"the cutoff at {sight.cutoff_at:%H:%M:%S} UTC has come")
    return Cause(Reason.DEADLINE, StopMode.GRACEFUL, f"the last safe moment before the cutoff at {sight.cutoff_at:%H:%M:%S} UTC")


def memory_verdict(sight: HostSight) -> memory.MemoryVerdict:
    """The hardest line reached, of the run's cap or, where nothing of it lives, of the host's floor alone."""
    caps, look = sight.spec.caps, sight.memory
    return memory.judge(
        host_cap_bytes=caps.host_bytes, accelerator_cap_bytes=caps.accelerator_bytes, floor_bytes=caps.floor_bytes, soft_fraction=caps.soft_fraction,
        host_bytes=look.host_bytes, available_bytes=look.available_bytes,
        accelerator_bytes=look.accelerator_least_bytes if look.accelerator_bytes is None else look.accelerator_bytes,
    )


def _by_memory(sight: HostSight) -> Cause | None:
    verdict = memory_verdict(sight)
    if verdict.line is memory.Line.NONE:
        return None
    assert verdict.reason is not None
    return Cause(verdict.reason, StopMode.NOW if verdict.line is memory.Line.HARD else StopMode.GRACEFUL, verdict.text)


def _by_kernel(attempt: AttemptSight) -> Cause | None:
    """The kernel took a member and left the leader: where it can't end a group as a whole (cgroup v1), or for the machine's sake. What is
    left of the tree has room to save, and nobody knows what it is worth without the one that is gone."""
    if attempt.oom_kill_count == 0:
        return None
    what = f"the kernel has killed {attempt.oom_kill_count} of its processes for memory"
    if attempt.is_limit_hit:
        return Cause(Reason.MEMORY, StopMode.GRACEFUL, f"{what}, at the limit of the cap")
    return Cause(Reason.HOST_MEMORY, StopMode.GRACEFUL, f"{what}; the machine had none left")


def _by_stall(sight: HostSight, attempt: AttemptSight, history: History) -> Cause | None:
    """Only a trainer that keeps the contract tells enough to be judged; an evaluation tells nothing before its first record."""
    progress, terms = history.progress, sight.spec.stall
    if not sight.spec.contract or (sight.spec.kind is not RunKind.TRAIN and progress.phase is stalls.Phase.LAUNCH):
        return None
    limits = stalls.StallLimits(launch_seconds=terms.launch_seconds, floor_seconds=terms.floor_seconds, factor=terms.factor)
    stall = stalls.judge(
        phase=progress.phase, silent_seconds=max(0.0, sight.silent_seconds), limits=limits, recent_step_seconds=progress.step_seconds,
        recent_phase_seconds=progress.phase_seconds,
    )
    return None if stall is None else Cause(stall.reason, StopMode.GRACEFUL, f"attempt {attempt.number}: {stall.because}")


def patience_of(sight: HostSight, history: History, cause: Cause) -> float:
    """Seconds from the first ask to the second. A trainer that is still starting answers an order once its libraries are loaded, which
    nobody has measured: it gets the whole ceiling. For the deadline it does not: it has nothing to save yet."""
    is_starting = sight.spec.contract and history.progress.phase is stalls.Phase.LAUNCH
    if is_starting and cause.reason in (Reason.USER, Reason.SUPERSEDED):
        return sight.spec.stop.grace_ceiling_seconds
    return grace_of(sight, history)


def grace_of(sight: HostSight, history: History) -> float:
    """Seconds that a stop may take, as far as this run has been measured. A batch of a validation counts like a step: both are finished first."""
    terms = sight.spec.stop
    if sight.spec.contract:
        progress = history.progress
        units = (*progress.step_seconds, *progress.batch_seconds)
        return deadlines.grace_seconds(units, progress.save_seconds, terms.grace_floor_seconds, terms.grace_ceiling_seconds)
    if sight.cutoff_at is None:
        return terms.grace_ceiling_seconds
    window_seconds = max(0.0, (sight.cutoff_at - sight.spec.created_at).total_seconds())
    return min(terms.grace_ceiling_seconds, max(terms.grace_floor_seconds, PLAIN_GRACE_SHARE * window_seconds))


def stop_moment(sight: HostSight, history: History) -> datetime | None:
    """The last safe moment to ask: a whole ladder before the hard deadline. An evaluation has nothing to save: it may use every second."""
    if sight.spec.kind is RunKind.EVALUATE:
        return sight.cutoff_at
    return None if sight.cutoff_at is None else deadlines.stop_at(sight.cutoff_at, seconds_until_empty(grace_of(sight, history)))


def too_late(sight: HostSight, history: History) -> str | None:
    stop_at = stop_moment(sight, history)
    return "no time is left before the cutoff" if stop_at is not None and sight.time.now >= stop_at else None
