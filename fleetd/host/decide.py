"""What a supervisor does next: one look at the run and the memory of it in, a list of actions with reasons out. Pure.

    an attempt is not over                         no attempt lives
      its leader is verified  → _alive               final           → Finish
      it has ended            → _ended               stop was wished → Move stopped
      it can't be verified    → nothing, an alarm    no time is left → Move finished (deadline)
                                                     due             → Move starting, StartAttempt

Every Move is a step of policies.lifecycle. Only a verified leader is asked; a tree is killed only where no stranger is near it.
"""

from __future__ import annotations

from dataclasses import replace

from fleetd.host.causes import Cause, by_order, memory_verdict, patience_of, stop_cause, stop_moment, too_late
from fleetd.host.history import Action, Alarm, Ask, AskAgain, ClearAlarm, EndAttempt, Finish, History, KillTree, Move, RecordExit, StartAttempt
from fleetd.host.sight import AttemptSight, HostSight
from fleetd.model import ExitRecord
from policies import retries
from policies.escalation import Rung, rung_at
from policies.facts import CapGrade, OnReboot, Reason, RunState, StopMode, Want
from policies.identity import Standing
from policies.lifecycle import FINAL, SETTLED
from policies.memory import Line
from policies.stalls import Phase

LEFTOVER_SECONDS = 2.0
"""How long a tree may outlive its leader before what is left of it is killed: workers need a moment to notice."""
EXIT_PATIENCE_SECONDS = 30.0
DEVICE_PATIENCE_SECONDS = 30.0
"""A driver frees the memory of an ended process late, sometimes after seconds."""
LAUNCH_PATIENCE_SECONDS = 60.0
LEAVING_SECONDS = 15.0
"""A trainer that has said its last words has saved; its libraries and its device take a while to let go. The cutoff does not wait for it."""
LAST_WORDS = ("stop", "finish")
LOCK_PATIENCE_SECONDS = 10.0
"""A shim lets go of the trainer's lock a moment after it recorded the exit."""
CLOCK_PATIENCE_SECONDS = 15.0
"""A coordinator that is there has spoken to a booted host by then."""
IDENTITY_PATIENCE_SECONDS = 10.0
"""A process between fork, exec and its record can't be verified for a moment."""
ROOM_BYTES_MIN = 256 * 1024
"""For the small records of an attempt; the size of the last save comes on top."""
LAST_WORDS_MAX = 600
"""Characters of a trainer's own explanation that go into the reason of its run."""

_WAITING = (RunState.STAGING, RunState.BACKOFF, RunState.HELD, RunState.STOPPED)


def decide(sight: HostSight, history: History) -> tuple[Action, ...]:
    """The actions of this tick, in order. The loop signals first and writes the record after; StartAttempt needs the record first."""
    lives = sight.attempt is not None and not history.is_attempt_over and history.state not in FINAL
    actions = _attempt(sight, sight.attempt, history) if lives and sight.attempt else _between(sight, history)
    return (*_alarm_changes(sight, history), *actions)


def _attempt(sight: HostSight, attempt: AttemptSight, history: History) -> tuple[Action, ...]:
    entering = _into_attempt(history)
    if attempt.standing is Standing.VERIFIED:
        return (*entering, *_alive(sight, attempt, history))
    if attempt.standing is None:
        # Without a record the lock is the only trace of a trainer: while it is held, something of this attempt lives.
        unstarted = attempt.exit is not None or (attempt.shim_is_alive is False and not sight.is_trainer_lock_held)
        return (*entering, *(_ended(sight, attempt, history) if unstarted else ()))
    if attempt.standing is Standing.GONE or _is_provably_over(sight, attempt):
        return (*entering, *_ended(sight, attempt, history))
    return entering


def _is_provably_over(sight: HostSight, attempt: AttemptSight) -> bool:
    """Somebody else has the recorded pid, and bears no mark of the tree. What is left of the tree is ended first; then nobody may
    hold the lock that the trainer inherited."""
    if not attempt.is_dead or attempt.is_contested or attempt.tree_count is None:
        return False
    return attempt.tree_count > 0 or not sight.is_trainer_lock_held


def _into_attempt(history: History) -> tuple[Action, ...]:
    """An attempt that a lost journal no longer knew of: the directory rules, and the run is under way."""
    return (Move(to=RunState.STARTING, reason=None, detail="found an attempt under way"),) if history.state in _WAITING else ()


def _alive(sight: HostSight, attempt: AttemptSight, history: History) -> tuple[Action, ...]:
    cause = stop_cause(sight, attempt, history)
    if history.stop is not None:
        return _climb(sight, history, cause)
    has_begun = history.progress.phase is not Phase.LAUNCH or not sight.spec.contract
    if cause is None:
        cause = _forgotten_stop(history)
    if cause is None:
        begun = history.state is RunState.STARTING and has_begun and attempt.is_executed
        return (Move(to=RunState.RUNNING, reason=None, detail=f"attempt {attempt.number} makes progress"),) if begun else ()
    is_stopping = history.state in (RunState.STOPPING, RunState.STUCK)
    moving = () if is_stopping else (Move(to=RunState.STOPPING, reason=cause.reason, detail=cause.because),)
    if cause.mode is StopMode.NOW:
        return (*moving, KillTree(reason=cause.reason, because=cause.because))
    return (*moving, Ask(reason=cause.reason, grace_seconds=patience_of(sight, history, cause), because=cause.because))


def _forgotten_stop(history: History) -> Cause | None:
    """A stop that was under way when the memory of it was lost: whatever called for it, the trainer has been asked, and is asked once more."""
    if history.state is not RunState.STOPPING or history.reason is None:
        return None
    return Cause(history.reason, StopMode.GRACEFUL, f"a stop for {history.reason} was under way when its record was lost")


def _climb(sight: HostSight, history: History, cause: Cause | None) -> tuple[Action, ...]:
    stop = history.stop
    assert stop is not None
    if cause is not None and cause.mode is StopMode.NOW and not stop.forced:
        return (KillTree(reason=cause.reason, because=cause.because),)
    waited_seconds = sight.boottime_seconds - stop.asked_seconds
    has_saved = sight.spec.contract and history.progress.last_event in LAST_WORDS and not stop.forced
    grace_seconds = stop.grace_seconds + (LEAVING_SECONDS if has_saved else 0.0)
    rung = rung_at(asked_seconds_ago=max(0.0, waited_seconds), grace_seconds=grace_seconds, mode=stop.mode)
    if rung >= Rung.KILL:
        because = f"still alive {waited_seconds:.1f} s after it was {'killed' if stop.forced else 'asked'}; its grace was {stop.grace_seconds:.1f} s"
        return (*_stuck(rung, history, stop.reason), KillTree(reason=stop.reason, because=because))
    if rung is Rung.ASK_AGAIN and not stop.asked_again:
        return (AskAgain(because=f"no answer within the grace of {stop.grace_seconds:.1f} s; SIGKILL follows"),)
    return ()


def _stuck(rung: Rung, history: History, reason: Reason) -> tuple[Action, ...]:
    if rung is not Rung.STUCK or history.state is RunState.STUCK:
        return ()
    return (Move(to=RunState.STUCK, reason=reason, detail="SIGKILL did not end the tree: a process waits in the kernel, or is not ours to kill"),)


def _ended(sight: HostSight, attempt: AttemptSight, history: History) -> tuple[Action, ...]:
    """The leader is gone (or never was). First the rest of its tree has to go, then its exit has to be known, then it is judged."""
    if attempt.tree_count:
        return _leftover(sight, attempt, history)
    if attempt.tree_count is None and attempt.standing is not None and not attempt.host_rebooted:
        return ()
    if attempt.device_left:
        return _unreleased(sight, attempt, history)
    if attempt.exit is None:
        # A living shim saw the exit and writes it down as soon as the disk lets it.
        return () if attempt.shim_is_alive else (RecordExit(because="no shim is left to record it"),)
    return _conclude(sight, attempt, history, attempt.exit)


def _leftover(sight: HostSight, attempt: AttemptSight, history: History) -> tuple[Action, ...]:
    if history.leader_gone_seconds is None or sight.boottime_seconds - history.leader_gone_seconds < LEFTOVER_SECONDS:
        return ()
    stop = history.stop
    reason = stop.reason if stop is not None else Reason.USER if by_order(sight) else Reason.EXIT_NONZERO
    rung = Rung.KILL
    if stop is not None and stop.forced:
        rung = rung_at(asked_seconds_ago=max(0.0, sight.boottime_seconds - stop.asked_seconds), grace_seconds=0.0, mode=StopMode.NOW)
    because = f"{attempt.tree_count} of its processes outlived the trainer"
    return (*_stuck(rung, history, reason), KillTree(reason=reason, because=because))


def _unreleased(sight: HostSight, attempt: AttemptSight, history: History) -> tuple[Action, ...]:
    """A stop is done when the tree's accelerator memory is free as well; a driver needs a moment for it, and not for ever."""
    gone_seconds = history.leader_gone_seconds
    if history.state is RunState.STUCK or gone_seconds is None or sight.boottime_seconds - gone_seconds < DEVICE_PATIENCE_SECONDS:
        return ()
    reason = history.stop.reason if history.stop is not None else Reason.EXIT_NONZERO
    return (Move(to=RunState.STUCK, reason=reason, detail=f"its processes have ended, but {attempt.device_left}"),)


def _conclude(sight: HostSight, attempt: AttemptSight, history: History, record: ExitRecord) -> tuple[Action, ...]:
    facts = retries.ExitFacts(
        exit_code=record.exit_code, signal=record.signal, oom_kill_count=attempt.oom_kill_count, host_rebooted=attempt.host_rebooted,
        forced=(history.stop is not None and history.stop.forced) or "killed_at" in record.evidence,
    )
    outcome = _never_ran(record) or retries.outcome_of_exit(facts, contract=sight.spec.contract, asked=_asked(sight, attempt, history, record))
    if outcome.state is RunState.FAILED and sight.spec.contract and history.progress.last_event == "failed":
        # What the trainer itself said is worth more to a person than the meaning of an exit status.
        outcome = replace(outcome, detail=f"{outcome.detail}: {history.progress.last_because[:LAST_WORDS_MAX]}")
    ending = EndAttempt(reason=outcome.reason, detail=outcome.detail)
    if outcome.state is RunState.BACKOFF:
        return (ending, _try_again(sight, attempt, history, outcome))
    return (ending, Move(to=outcome.state, reason=outcome.reason, detail=outcome.detail, evidence=_evidence(record)))


def _never_ran(record: ExitRecord) -> retries.Outcome | None:
    """What the shim says of a trainer that it could not start at all; None when one ran, or when the deadline was the reason."""
    text, reason = record.evidence.get("start"), record.evidence.get("reason")
    if text is None or reason not in (Reason.CONFIG, Reason.PREFLIGHT, Reason.LAUNCH_TIMEOUT):
        return None
    state = RunState.BACKOFF if reason == Reason.LAUNCH_TIMEOUT else RunState.FAILED
    return retries.Outcome(state=state, reason=Reason(reason), detail=f"it could not be started: {text}")


def _asked(sight: HostSight, attempt: AttemptSight, history: History, record: ExitRecord) -> Reason | None:
    """Why the attempt was asked to end. Past the last safe moment the shim, or our trainer's own cutoff, may have done it."""
    if history.stop is not None and history.stop.reason is not Reason.EXIT_NONZERO:
        return history.stop.reason
    stop_at = stop_moment(sight, history)
    by_itself = sight.spec.contract and history.progress.last_event == "stop" and "cutoff" in history.progress.last_because
    by_shim = "asked_at" in record.evidence or "killed_at" in record.evidence
    # What a reboot ended is recorded when somebody looks at it after the boot: that moment says nothing of its end.
    by_time = stop_at is not None and record.at >= stop_at and not attempt.host_rebooted
    late = stop_at is not None and (by_time or by_itself or by_shim)
    return Reason.DEADLINE if late else None


def _try_again(sight: HostSight, attempt: AttemptSight, history: History, outcome: retries.Outcome) -> Move:
    reason, detail = outcome.reason, outcome.detail
    assert reason is not None, "what is tried again has a reason"
    want = by_order(sight)
    if want is not None:
        return _settle(want, f"{detail}; {want.because}")
    if (late := too_late(sight, history)) is not None and sight.clock_doubted_seconds is None:
        return Move(to=RunState.FINISHED, reason=Reason.DEADLINE, detail=f"{detail}; {late}")
    if history.state is RunState.STUCK:
        return Move(to=RunState.HELD, reason=reason, detail=f"{detail}; it had been stuck, so a person decides")
    if attempt.host_rebooted and sight.spec.on_reboot is OnReboot.HOLD:
        return Move(to=RunState.HELD, reason=Reason.HOST_REBOOTED, detail=f"{detail}; on_reboot is hold")
    terms = sight.spec.restarts
    newest = max((seen.step for seen in history.checkpoints), default=-1)
    limits = retries.RestartLimits(
        restarts_max=terms.restarts_max, window_seconds=terms.window_seconds, first_seconds=terms.first_seconds,
        ceiling_seconds=terms.ceiling_seconds,
    )
    verdict = retries.next_try(
        reason=reason, run_id=sight.spec.run_id, attempt=attempt.number, now=sight.time.now, restarts=history.restarts,
        fruitless_count=0 if newest > history.step_at_start else history.fruitless_count,
        limits=limits,
    )
    if isinstance(verdict, retries.TryAgain):
        return Move(to=RunState.BACKOFF, reason=reason, detail=f"{detail}; {verdict.because}", next_attempt_at=verdict.at)
    return Move(to=verdict.state, reason=reason, detail=f"{detail}; {verdict.because}")


def _evidence(record: ExitRecord) -> dict[str, object]:
    return {"observed_by": record.observed_by, "wait_status": record.wait_status, **record.evidence}


def _between(sight: HostSight, history: History) -> tuple[Action, ...]:
    """No attempt lives. What the run waits for, and whether that has come."""
    state, want = history.state, sight.want
    if state in FINAL:
        return (Finish(because=f"the run is {state}"),)
    order = by_order(sight)
    if order is not None and state is not RunState.STOPPED:
        return (_settle(order, order.because),)
    is_woken = want is not None and want.want is Want.RUN and want.sequence > history.rest_sequence
    if state is RunState.STOPPED and not is_woken:
        return (Finish(because="the run is stopped"),)
    if state is RunState.BACKOFF and history.was_rebooted and sight.spec.on_reboot is OnReboot.HOLD:
        detail = "the host was rebooted while it waited for its next attempt; on_reboot is hold"
        return (Move(to=RunState.HELD, reason=Reason.HOST_REBOOTED, detail=detail),)
    if sight.clock_doubted_seconds is not None:
        return ()  # with no known time a deadline means nothing: neither that it has passed, nor that it has not
    if (late := too_late(sight, history)) is not None:
        return (Move(to=RunState.FINISHED, reason=Reason.DEADLINE, detail=late),)
    if state is RunState.HELD and not is_woken:
        return ()
    if state is RunState.BACKOFF and history.next_attempt_at is not None and sight.time.now < history.next_attempt_at:
        return ()
    if sight.is_trainer_lock_held or not sight.is_durable or memory_verdict(sight).line is not Line.NONE or _no_room(sight, history):
        return ()  # an alarm, or the journal's health, says what it waits for
    because = "first start" if history.attempt == 0 else f"attempt {history.attempt + 1}"
    moving = () if state is RunState.STARTING else (Move(to=RunState.STARTING, reason=None, detail=because),)
    return (*moving, StartAttempt(because=because))


def _no_room(sight: HostSight, history: History) -> str | None:
    """Why a trainer could not save what it does: it would only use up the restarts that are meant for other troubles."""
    needed_bytes = ROOM_BYTES_MIN + (history.progress.save_bytes or 0)
    if sight.disk_free_bytes is None or sight.disk_free_bytes >= needed_bytes:
        return None
    return f"{sight.disk_free_bytes} bytes are free on the disk of this run, {needed_bytes} are needed for its next checkpoint"


def _settle(order: Cause, detail: str) -> Move:
    state = RunState.FINISHED if order.reason is Reason.DEADLINE else RunState.STOPPED
    return Move(to=state, reason=order.reason, detail=detail)


def _alarm_changes(sight: HostSight, history: History) -> tuple[Action, ...]:
    due = _alarms_due(sight, history) if history.state not in SETTLED else {}
    raised = [Alarm(key=key, text=text) for key, text in due.items() if key not in history.alarms]
    cleared = [ClearAlarm(key=key) for key in history.alarms if key not in due]
    return (*raised, *cleared)


def _alarms_due(sight: HostSight, history: History) -> dict[str, str]:
    due: dict[str, str] = {}
    if sight.time.alarm is not None:
        due[f"clock {sight.time.step_seconds / 60:.0f} min"] = sight.time.alarm
    if history.stop is not None and history.stop.asked_again:
        due["stop"] = "the trainer did not end within its grace; it was asked again and is killed next"
    attempt = sight.attempt
    if attempt is None or history.is_attempt_over:
        if sight.clock_doubted_seconds is not None and sight.clock_doubted_seconds >= CLOCK_PATIENCE_SECONDS:
            due["time"] = "nothing is started: the host was booted again, its clock is not synchronised, and no coordinator has told it the time"
        elif sight.lock_held_seconds >= LOCK_PATIENCE_SECONDS:
            due["lock"] = "nothing is started: somebody still holds trainer.lock although no trainer is recorded as alive"
        elif (verdict := memory_verdict(sight)).line is not Line.NONE:
            due["memory"] = f"nothing is started: {verdict.text}"
        elif (why := _no_room(sight, history)) is not None:
            due["room"] = f"nothing is started: {why}"
        return due
    is_foreign = attempt.standing in (Standing.STRANGER, Standing.UNKNOWN) and not _is_provably_over(sight, attempt)
    if is_foreign and attempt.unverified_seconds >= (0.0 if attempt.is_dead else IDENTITY_PATIENCE_SECONDS):
        wish = " although a stop was ordered" if by_order(sight) else ""
        due["identity"] = f"cannot verify the trainer: {attempt.standing_text}; nothing is signalled{wish}"
    if attempt.cap_fault and sight.spec.caps.demand is CapGrade.ENFORCED:
        due["cap"] = f"the plan demands an enforced cap, and this one no longer is: {attempt.cap_fault}"
    if attempt.standing is None and attempt.age_seconds >= LAUNCH_PATIENCE_SECONDS:
        due["launch"] = f"the shim has started no trainer for {LAUNCH_PATIENCE_SECONDS:.0f} s"
    waits = history.leader_gone_seconds is not None and sight.boottime_seconds - history.leader_gone_seconds >= EXIT_PATIENCE_SECONDS
    if waits and attempt.exit is None:
        due["exit"] = f"the trainer has ended, but its exit is not recorded after {EXIT_PATIENCE_SECONDS:.0f} s"
    return due
