"""How work of others is moved out of the way and brought back: what preflight says of it, and what comes next at each look.

    stop      ask once (SIGTERM, or the unit's stop) → wait the grace → hold and say so, or kill where the plan says `force`
              → everything that was shown is gone, and its memory is back                                       displaced
    restore   what runs already is recognised → start what is missing, at most once for each asking → it lives    restored

Nothing is signalled that was not shown in the preflight of the same launch: another process under the same name or number is told of.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.facts import MIB, Word
from policies.identity import IdentityVerdict, Standing
from policies.memory import gib
from policies.surveys import Finding
from policies.workloads import DisplacedState, FoundProcess, Progress, Workload, WorkloadSight

RETURN_SECONDS_MAX = 30.0
"""So long memory may take to come back once everything is gone. After that it is told, and admission judges by what is there."""
RETURN_FRACTION = 0.5
RETURN_NOISE_BYTES = 128 * MIB
"""Others allocate meanwhile: with this part of it back, less so much, the memory counts as returned."""
KILL_SECONDS_MAX = 10.0
SETTLE_SECONDS = 2.0
"""A process that has lived so long after its start counts as running."""
START_SECONDS_MAX = 120.0
"""A unit may take so long until systemd calls it active."""
WORDS_MAX = 160
NAMES_SHOWN_MAX = 4


class Step(Word):
    """What the host does after a look."""

    NONE = "none"
    ASK = "ask"
    KILL = "kill"
    START = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    step: Step
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class StopLook:
    """One look at a workload that is to go. Seconds are None before the moment that they count from."""

    leaders: tuple[IdentityVerdict, ...]
    """Of every process that preflight showed, compared with what is there now."""
    pids: tuple[int, ...]
    members_left: tuple[int, ...] = ()
    """Processes below them that preflight showed too, and that live on."""
    newcomers: tuple[str, ...] = ()
    """What fits the workload's description now and was not shown, in words."""
    asked_seconds: float | None = None
    killed_seconds: float | None = None
    gone_seconds: float | None = None
    held_bytes: int = 0
    before_bytes: int | None = None
    """Available memory before it was asked to go."""
    available_bytes: int | None = None
    device_pids: tuple[int, ...] = ()
    """Of those processes, the ones that an accelerator still lists."""
    has_returned: bool = False
    """Its memory was seen to be back, or given up: what others take after that is not its memory any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreLook:
    running: tuple[int, ...]
    """Processes that are the workload: found by its description, by our own record of a start, or that never ended."""
    wanted: int
    is_ending: bool = False
    """It was asked to end and is still within its grace."""
    unit_state: str = ""
    started_seconds: float | None = None
    """Since this asking has started it. None: it has not."""
    last_words: str = ""


def workload_findings(host: str, workload: Workload, sight: WorkloadSight) -> tuple[Finding, ...]:
    """What a launch is told of one workload before anything is touched: first whether it can be displaced at all, then what would be."""
    refusal = _refusal(host, workload, sight)
    if refusal is not None:
        return (refusal,)
    title = f"{workload.name} is displaced for this campaign" if sight.processes else f"{workload.name} does not run"
    if not sight.processes:
        return (Finding(host=host, refuses=False, title=title, what=f"{description(workload)}: nothing to displace", fix="nothing"),)
    found = [Finding(
        host=host, refuses=False, title=title, what="; ".join(process_words(each) for each in sight.processes),
        fix=f"leave {workload.name} out of displace to let it run",
    )]
    if sight.killed_after_seconds is not None:
        what = f"systemd itself kills what has not ended {sight.killed_after_seconds:.0f} s after the stop, as the unit says (TimeoutStopSec)"
        found.append(Finding(host=host, refuses=False, title=f"{workload.name} has its own deadline", what=what, fix="SendSIGKILL=no in the unit"))
    if workload.unit is not None and not workload.is_user_unit and sight.agent_uid != 0:
        what = f"the agent runs as uid {sight.agent_uid}, and systemd may not let it stop a unit of the machine"
        found.append(Finding(host=host, refuses=False, title=f"{workload.name} may not be ours to stop", what=what, fix="a rule for polkit, or root"))
    unset = sorted({name for each in sight.processes for name in each.unset})
    if unset:
        what, fix = f"it does not have {', '.join(unset)}, so its restart will not either", "correct restart.environment"
        found.append(Finding(host=host, refuses=False, title=f"variables of {workload.name} are not set", what=what, fix=fix))
    return tuple(found)


def _refusal(host: str, workload: Workload, sight: WorkloadSight) -> Finding | None:
    said, count = description(workload), len(sight.processes)
    shown = "; ".join(process_words(each) for each in sight.processes[:NAMES_SHOWN_MAX])
    correct = f"correct displace.{workload.name} of {host} in the plan"
    if sight.fault is not None:
        return _refuse(host, f"{workload.name} can't be looked at", f"{said}: {sight.fault}", correct)
    if not count and not workload.optional:
        fix = f"{correct}; if it may be absent, or is displaced already: optional: true"
        state = f" (systemd calls it {sight.unit_state})" if sight.unit_state else ""
        return _refuse(host, f"{workload.name} does not run", f"{said}: nothing matches{state}", fix)
    if count > workload.count or 0 < count < workload.count:
        fix = f"write a narrower pattern, or count: {count} if all of these are meant"
        return _refuse(host, f"{workload.name} is not what the plan says", f"{said}: {workload.count} stated, {count} found: {shown}", fix)
    if any(each.is_ours for each in sight.processes):
        return _refuse(host, f"{workload.name} is a run of fleetd", f"{said}: {shown}", "fleetd stop RUN, and leave it out of displace")
    foreign = next((each for each in sight.processes if sight.agent_uid not in (0, each.identity.uid)), None)
    if foreign is not None and (workload.unit is None or workload.is_user_unit):
        what = f"{process_words(foreign)} belongs to uid {foreign.identity.uid}, the agent runs as uid {sight.agent_uid}"
        return _refuse(host, f"{workload.name} can't be stopped", what, f"name that user, or root, as user of {host} in the plan")
    return None


def _refuse(host: str, title: str, what: str, fix: str) -> Finding:
    return Finding(host=host, refuses=True, title=title, what=what, fix=fix)


def description(workload: Workload) -> str:
    if workload.unit is not None:
        return f"{'user ' if workload.is_user_unit else ''}unit {workload.unit}"
    return f"processes of uid {workload.uid} that match {workload.pattern!r}"


def process_words(found: FoundProcess) -> str:
    """`pid 4711, since 2026-09-01 10:00:00 UTC, 60.0 GiB (accelerator 40.0 GiB) in 5 processes: python3 serve.py`"""
    argv = " ".join(found.identity.argv)
    argv = argv if len(argv) <= WORDS_MAX else f"{argv[:WORDS_MAX]}…"
    memory = "memory unknown" if found.host_bytes is None else gib(found.host_bytes)
    memory += f" (accelerator {gib(found.accelerator_bytes)})" if found.accelerator_bytes else ""
    several = f" in {len(found.members) + 1} processes" if found.members else ""
    return f"pid {found.identity.pid}, since {found.started_at:%Y-%m-%d %H:%M:%S} UTC, {memory}{several}: {argv}"


def next_stop(workload: Workload, look: StopLook) -> Verdict:
    """What to do about a workload that is to make room."""
    unknown = next((each for each in look.leaders if each.standing is Standing.UNKNOWN), None)
    changed = next((each for each in look.leaders if each.standing is Standing.STRANGER and not each.is_dead), None)
    if unknown is not None or changed is not None:
        found = unknown or changed
        assert found is not None
        return _hold(look, f"it is not provably what preflight showed, so it is not touched: {found.explanation}")
    if look.newcomers and look.asked_seconds is None:
        return _hold(look, f"not touched: what runs now was not shown in preflight: {_some(look.newcomers)}; stop it by hand, or launch again")
    if any(each.is_verified for each in look.leaders):
        return _still_there(workload, look, look.pids)
    if look.newcomers:
        words = f"it ended, and came back by itself, which is not touched: {_some(look.newcomers)}"
        return _hold(look, f"{words}; whatever starts it has to be stopped: name its unit in displace")
    if look.members_left:
        return _still_there(workload, look, look.members_left)
    return _gone(look)


def _still_there(workload: Workload, look: StopLook, pids: tuple[int, ...]) -> Verdict:
    how = "its unit was told to stop" if workload.unit is not None else "asked to end (SIGTERM)"
    who = f"pid {', '.join(str(pid) for pid in pids[:NAMES_SHOWN_MAX])}"
    if look.asked_seconds is None:
        return Verdict(step=Step.ASK, progress=_progress(look, DisplacedState.STOPPING, f"{who}: {how}, grace {workload.grace_seconds:.0f} s"))
    if look.asked_seconds < workload.grace_seconds:
        return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.STOPPING, f"{who}: {how}, grace {workload.grace_seconds:.0f} s"))
    if workload.force and look.killed_seconds is None:
        return Verdict(step=Step.KILL, progress=_progress(look, DisplacedState.STOPPING, f"{who}: did not end in its grace, killed (force)"))
    if workload.force and look.killed_seconds is not None and look.killed_seconds < KILL_SECONDS_MAX:
        return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.STOPPING, f"{who}: did not end in its grace, killed (force)"))
    what = "not even SIGKILL ended it" if workload.force else "it is not killed (the plan does not say force: true)"
    return _hold(look, f"{who}: {how}, and has not ended within {workload.grace_seconds:.0f} s; {what}")


def _gone(look: StopLook) -> Verdict:
    """Everything that was shown has ended: is its memory back?"""
    by_itself = look.asked_seconds is None
    is_late = (look.gone_seconds or 0.0) >= RETURN_SECONDS_MAX
    if look.device_pids:
        text = f"it ended, and an accelerator still lists its memory (pid {', '.join(map(str, look.device_pids[:NAMES_SHOWN_MAX]))})"
        return _hold(look, text) if is_late else Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.STOPPING, text))
    if look.has_returned:
        return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.DISPLACED, "it ended, and its memory was waited for"))
    if by_itself or look.before_bytes is None or look.available_bytes is None:
        words = "it had ended by itself" if by_itself else "it ended"
        return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.DISPLACED, words))
    back_bytes, needed_bytes = look.available_bytes - look.before_bytes, int(look.held_bytes * RETURN_FRACTION) - RETURN_NOISE_BYTES
    if back_bytes >= needed_bytes:
        text = f"it ended; it held {gib(look.held_bytes)}, and {gib(max(0, back_bytes))} more are available than before"
        return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.DISPLACED, text))
    if is_late:
        text = f"it ended, but of the {gib(look.held_bytes)} that it held only {gib(max(0, back_bytes))} are back: others took it, or hold it still"
        return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.DISPLACED, text))
    return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.STOPPING, "it ended; waiting for its memory"))


def next_restore(workload: Workload, look: RestoreLook) -> Verdict:
    """What to do about a workload that is to run again."""
    who = f"pid {', '.join(str(pid) for pid in look.running[:NAMES_SHOWN_MAX])}"

    def said(state: DisplacedState, text: str, step: Step = Step.NONE) -> Verdict:
        return Verdict(step=step, progress=Progress(state=state, text=text, pids=look.running))

    if look.is_ending:
        return said(DisplacedState.RESTORING, f"{who}: it is still ending; it is started again after that")
    if workload.unit is not None and look.unit_state in ("activating", "deactivating", "reloading"):
        late = look.started_seconds is not None and look.started_seconds >= START_SECONDS_MAX
        text = f"systemd calls it {look.unit_state}"
        return said(DisplacedState.FAILED, f"{text} after {START_SECONDS_MAX:.0f} s") if late else said(DisplacedState.RESTORING, text)
    if len(look.running) >= look.wanted:
        how = "started again" if look.started_seconds is not None else "it runs already"
        if look.started_seconds is not None and look.started_seconds < SETTLE_SECONDS:
            return said(DisplacedState.RESTORING, f"{who}: started")
        return said(DisplacedState.RESTORED, f"{who}: {how}")
    if look.started_seconds is None:
        return said(DisplacedState.RESTORING, "it is being started", Step.START)
    if look.started_seconds < SETTLE_SECONDS and workload.unit is not None:
        return said(DisplacedState.RESTORING, "it is being started")
    words = f": {look.last_words}" if look.last_words else ""
    return said(DisplacedState.FAILED, f"it was started and did not stay{words}")


def _hold(look: StopLook, text: str) -> Verdict:
    return Verdict(step=Step.NONE, progress=_progress(look, DisplacedState.HELD, text))


def _progress(look: StopLook, state: DisplacedState, text: str) -> Progress:
    return Progress(state=state, text=text, pids=look.pids, available_bytes=look.available_bytes)


def _some(words: tuple[str, ...]) -> str:
    more = f" and {len(words) - NAMES_SHOWN_MAX} more" if len(words) > NAMES_SHOWN_MAX else ""
    return ", ".join(words[:NAMES_SHOWN_MAX]) + more
