"""What is said of displaced work before it is touched, and what comes next at each look."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from policies.displacement import (
    RETURN_SECONDS_MAX,
    SETTLE_SECONDS,
    START_SECONDS_MAX,
    RestoreLook,
    Step,
    StopLook,
    next_restore,
    next_stop,
    workload_findings,
)
from policies.facts import GIB, ProcessIdentity
from policies.identity import IdentityVerdict, Standing
from policies.workloads import DISPLACED_TRANSITIONS, IN_THE_WAY, TO_RESTORE, DisplacedState, FoundProcess, Restart, Workload, WorkloadSight

LLM = Workload(name="llm", pattern="serve.py", uid=1000, restart=Restart(command=("serve",)), grace_seconds=60.0)
UNIT = Workload(name="llm", unit="llm.service", grace_seconds=60.0)
IDENTITY = ProcessIdentity(boot_id="b1", pid=4711, start_ticks=7, uid=1000, argv=("python3", "serve.py", "--port", "1"))
FOUND = FoundProcess(identity=IDENTITY, started_at=datetime(2026, 9, 1, 10, tzinfo=timezone.utc), host_bytes=60 * GIB, accelerator_bytes=40 * GIB)
SIGHT = WorkloadSight(name="llm", agent_uid=0, processes=(FOUND,))
ALIVE = IdentityVerdict(standing=Standing.VERIFIED, explanation="all match")
GONE = IdentityVerdict(standing=Standing.GONE, explanation="no process has pid 4711", is_dead=True)


def said(workload: Workload = LLM, **changes: Any) -> list[tuple[bool, str]]:
    return [(each.refuses, each.title) for each in workload_findings("spark-a", workload, replace(SIGHT, **changes))]


def test_what_would_be_stopped_is_shown_with_pid_start_memory_and_command_line() -> None:
    (shown,) = workload_findings("spark-a", LLM, SIGHT)
    assert not shown.refuses and shown.title == "llm is displaced for this campaign"
    assert shown.what == "pid 4711, since 2026-09-01 10:00:00 UTC, 60.0 GiB (accelerator 40.0 GiB): python3 serve.py --port 1"


@pytest.mark.parametrize(("workload", "changes", "title"), [
    (LLM, {"processes": ()}, "llm does not run"),
    (LLM, {"processes": (FOUND, FOUND)}, "llm is not what the plan says"),
    (replace(LLM, count=2), {}, "llm is not what the plan says"),
    (LLM, {"agent_uid": 1001}, "llm can't be stopped"),
    (LLM, {"processes": (replace(FOUND, is_ours=True),)}, "llm is a run of fleetd"),
    (UNIT, {"processes": (), "fault": "systemd calls it not-found"}, "llm can't be looked at"),
])
def test_what_can_not_be_displaced_as_stated_refuses_the_launch(workload: Workload, changes: dict[str, Any], title: str) -> None:
    assert said(workload, **changes) == [(True, title)]


def test_what_may_be_absent_is_only_told_and_a_units_own_deadline_is_too() -> None:
    assert said(replace(LLM, optional=True), processes=()) == [(False, "llm does not run")]
    assert said(UNIT, killed_after_seconds=90.0) == [(False, "llm is displaced for this campaign"), (False, "llm has its own deadline")]
    assert said(UNIT, agent_uid=1001)[-1] == (False, "llm may not be ours to stop")
    assert said(processes=(replace(FOUND, unset=("HF_HOME",)),))[-1] == (False, "variables of llm are not set")


def stop(workload: Workload = LLM, **changes: Any) -> tuple[Step, DisplacedState, str]:
    found = next_stop(workload, replace(StopLook(leaders=(ALIVE,), pids=(4711,), held_bytes=60 * GIB), **changes))
    return found.step, found.progress.state, found.progress.text


def test_it_is_asked_once_waited_for_and_then_held_or_killed() -> None:
    assert stop()[:2] == (Step.ASK, DisplacedState.STOPPING)
    assert stop(asked_seconds=59.0)[:2] == (Step.NONE, DisplacedState.STOPPING)
    assert stop(asked_seconds=1.0)[2] == stop(asked_seconds=59.0)[2] == stop()[2], "the same words, so that history tells it once"
    step, state, text = stop(asked_seconds=61.0)
    assert (step, state) == (Step.NONE, DisplacedState.HELD) and "not ended within 60 s" in text and "force: true" in text
    force = replace(LLM, force=True)
    assert stop(force, asked_seconds=61.0)[:2] == (Step.KILL, DisplacedState.STOPPING)
    assert stop(force, asked_seconds=62.0, killed_seconds=1.0)[:2] == (Step.NONE, DisplacedState.STOPPING)
    assert stop(force, asked_seconds=99.0, killed_seconds=38.0)[1] is DisplacedState.HELD


@pytest.mark.parametrize("verdict", [
    IdentityVerdict(standing=Standing.UNKNOWN, explanation="argv can't be read"),
    IdentityVerdict(standing=Standing.STRANGER, explanation="runs something else"),
])
def test_what_is_not_provably_the_one_that_was_shown_gets_no_signal(verdict: IdentityVerdict) -> None:
    for workload in (LLM, replace(LLM, force=True), UNIT):
        assert stop(workload, leaders=(verdict,))[:2] == (Step.NONE, DisplacedState.HELD)
        assert stop(workload, leaders=(ALIVE, verdict), asked_seconds=99.0)[:2] == (Step.NONE, DisplacedState.HELD)


def test_newcomers_are_told_of_and_never_touched() -> None:
    assert stop(newcomers=("pid 5",))[:2] == (Step.NONE, DisplacedState.HELD)
    step, state, text = stop(leaders=(GONE,), newcomers=("pid 5",), asked_seconds=3.0)
    assert (step, state) == (Step.NONE, DisplacedState.HELD) and "came back by itself" in text and "name its unit" in text


def test_it_is_out_of_the_way_once_everything_is_gone_and_its_memory_is_back() -> None:
    gone = {"leaders": (GONE,), "asked_seconds": 5.0, "before_bytes": 10 * GIB}
    assert stop(**gone, members_left=(4712,), available_bytes=90 * GIB)[1] is DisplacedState.STOPPING
    assert stop(**gone, members_left=(4712,), available_bytes=90 * GIB, killed_seconds=None)[0] is Step.NONE
    assert stop(**gone, available_bytes=12 * GIB, gone_seconds=1.0)[1:] == (DisplacedState.STOPPING, "it ended; waiting for its memory")
    assert stop(**gone, available_bytes=12 * GIB, gone_seconds=1.0, has_returned=True)[1] is DisplacedState.DISPLACED, "others take it meanwhile"
    assert stop(**gone, available_bytes=69 * GIB, gone_seconds=1.0)[1] is DisplacedState.DISPLACED
    _, state, text = stop(**gone, available_bytes=12 * GIB, gone_seconds=RETURN_SECONDS_MAX)
    assert state is DisplacedState.DISPLACED and "only 2.0 GiB are back" in text, "admission judges by what is there"
    assert stop(**gone, available_bytes=69 * GIB, device_pids=(4711,), gone_seconds=1.0)[1] is DisplacedState.STOPPING
    assert stop(**gone, available_bytes=69 * GIB, device_pids=(4711,), gone_seconds=RETURN_SECONDS_MAX)[1] is DisplacedState.HELD
    assert stop(leaders=(GONE,))[1:] == (DisplacedState.DISPLACED, "it had ended by itself")


def back(workload: Workload = LLM, **changes: Any) -> tuple[Step, DisplacedState, str]:
    found = next_restore(workload, replace(RestoreLook(running=(), wanted=1), **changes))
    return found.step, found.progress.state, found.progress.text


def test_what_runs_is_recognised_and_what_is_missing_is_started_once() -> None:
    assert back(running=(9,))[:2] == (Step.NONE, DisplacedState.RESTORED) and "runs already" in back(running=(9,))[2]
    assert back()[:2] == (Step.START, DisplacedState.RESTORING)
    assert back(running=(9,), started_seconds=0.5)[1] is DisplacedState.RESTORING
    assert back(running=(9,), started_seconds=SETTLE_SECONDS)[1:] == (DisplacedState.RESTORED, "pid 9: started again")
    step, state, text = back(started_seconds=0.5, last_words="no model")
    assert (step, state) == (Step.NONE, DisplacedState.FAILED) and text.endswith(": no model")
    assert back(running=(4711,), is_ending=True)[:2] == (Step.NONE, DisplacedState.RESTORING), "asked to end, and not gone yet"
    assert back(running=(9,), wanted=2)[0] is Step.START


def test_a_unit_counts_as_back_once_systemd_calls_it_active() -> None:
    assert back(UNIT, unit_state="activating", started_seconds=5.0)[1] is DisplacedState.RESTORING
    assert back(UNIT, unit_state="activating", started_seconds=START_SECONDS_MAX)[1] is DisplacedState.FAILED
    assert back(UNIT, unit_state="inactive")[:2] == (Step.START, DisplacedState.RESTORING)
    assert back(UNIT, unit_state="failed", started_seconds=SETTLE_SECONDS, last_words="exit-code")[1] is DisplacedState.FAILED
    assert back(UNIT, unit_state="active", running=(9,))[1] is DisplacedState.RESTORED


def test_nothing_is_lost_between_being_asked_to_end_and_being_back() -> None:
    assert set(DISPLACED_TRANSITIONS) == set(DisplacedState)
    for state in TO_RESTORE:
        assert DisplacedState.RESTORING in DISPLACED_TRANSITIONS[state]
        assert DisplacedState.LEFT in DISPLACED_TRANSITIONS[state], "whoever does not want it back can say so"
    assert {DisplacedState.RESTORED, DisplacedState.FOUND, DisplacedState.RESTORING, DisplacedState.LEFT} == set(DisplacedState) - TO_RESTORE
    assert DisplacedState.DISPLACED not in IN_THE_WAY
