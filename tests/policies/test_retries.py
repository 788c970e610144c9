"""What exits mean, and which runs are tried again."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Reason, RunState
from policies.lifecycle import NEVER_RETRIED
from policies.retries import ExitFacts, NoMoreTries, RestartLimits, TryAgain, backoff_seconds, next_try, outcome_of_exit, used_restarts

NOW = datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc)
LIMITS = RestartLimits(restarts_max=5, window_seconds=3600.0, first_seconds=2.0, ceiling_seconds=300.0)
ASKED = [Reason.USER, Reason.SUPERSEDED, Reason.DEADLINE, Reason.MEMORY, Reason.HOST_MEMORY, Reason.STALLED, Reason.LAUNCH_TIMEOUT]

exits = st.one_of(
    st.builds(ExitFacts, exit_code=st.integers(0, 255), signal=st.none(), oom_kill_count=st.integers(0, 2), forced=st.booleans()),
    st.builds(ExitFacts, exit_code=st.none(), signal=st.integers(1, 64), oom_kill_count=st.integers(0, 2), forced=st.booleans()),
    st.builds(ExitFacts, exit_code=st.none(), signal=st.none(), host_rebooted=st.booleans(), forced=st.booleans()),
)


@pytest.mark.parametrize(("code", "signal", "asked", "state", "reason"), [
    (0, None, None, RunState.FINISHED, None),
    (0, None, Reason.USER, RunState.STOPPED, Reason.USER),
    (0, None, Reason.DEADLINE, RunState.FINISHED, Reason.DEADLINE),
    (0, None, Reason.MEMORY, RunState.FINISHED, None),
    (10, None, Reason.USER, RunState.STOPPED, Reason.USER),
    (10, None, Reason.DEADLINE, RunState.FINISHED, Reason.DEADLINE),
    (10, None, Reason.MEMORY, RunState.FAILED, Reason.MEMORY),
    (10, None, Reason.STALLED, RunState.BACKOFF, Reason.STALLED),
    (10, None, None, RunState.BACKOFF, Reason.EXIT_NONZERO),
    (20, None, None, RunState.BACKOFF, Reason.EXIT_NONZERO),
    (30, None, None, RunState.FAILED, Reason.CONFIG),
    (31, None, None, RunState.FAILED, Reason.NOT_FINITE),
    (31, None, Reason.USER, RunState.FAILED, Reason.NOT_FINITE),
    (32, None, None, RunState.FAILED, Reason.GATE_FAILED),
    (40, None, None, RunState.FAILED, Reason.MEMORY),
    (40, None, Reason.USER, RunState.STOPPED, Reason.USER),
    (None, 9, Reason.USER, RunState.STOPPED, Reason.USER),
    (None, 9, Reason.DEADLINE, RunState.FINISHED, Reason.DEADLINE),
    (None, 9, Reason.HOST_MEMORY, RunState.BACKOFF, Reason.HOST_MEMORY),
    (None, 9, None, RunState.BACKOFF, Reason.SIGNAL),
    (None, 11, None, RunState.BACKOFF, Reason.SIGNAL),
    (None, None, None, RunState.BACKOFF, Reason.UNOBSERVED),
])
def test_the_outcome_table(code: int | None, signal: int | None, asked: Reason | None, state: RunState, reason: Reason | None) -> None:
    outcome = outcome_of_exit(ExitFacts(exit_code=code, signal=signal), contract=True, asked=asked)
    assert (outcome.state, outcome.reason) == (state, reason)


def test_137_alone_proves_nothing_and_the_kernels_counter_does() -> None:
    assert outcome_of_exit(ExitFacts(exit_code=137, signal=None), contract=True, asked=None).reason is Reason.EXIT_NONZERO
    assert outcome_of_exit(ExitFacts(exit_code=None, signal=9), contract=True, asked=None).reason is Reason.SIGNAL
    for facts in (ExitFacts(exit_code=137, signal=None, oom_kill_count=1), ExitFacts(exit_code=None, signal=9, oom_kill_count=1)):
        assert outcome_of_exit(facts, contract=True, asked=None).reason is Reason.OOM
    assert outcome_of_exit(ExitFacts(exit_code=None, signal=11, oom_kill_count=1), contract=True, asked=None).reason is Reason.SIGNAL
    by_worker = outcome_of_exit(ExitFacts(exit_code=1, signal=None, oom_kill_count=1), contract=True, asked=None)
    assert by_worker.reason is Reason.EXIT_NONZERO and by_worker.detail == "exit 1, the kernel counted an out-of-memory kill in its tree"


def test_who_killed_a_trainer_that_had_only_been_asked_is_not_told_as_an_answer() -> None:
    def detail(**facts: int) -> str:
        return outcome_of_exit(ExitFacts(exit_code=None, signal=9, **facts), contract=True, asked=Reason.MEMORY).detail

    assert "the kernel killed it before it had answered" in detail(oom_kill_count=1)
    assert "somebody else killed it before it had answered" in detail()
    assert "force was needed" in detail(forced=True)


def test_a_plain_commands_exit_codes_have_no_meaning_of_ours() -> None:
    for code in (10, 20, 30, 31, 32, 40):
        outcome = outcome_of_exit(ExitFacts(exit_code=code, signal=None), contract=False, asked=None)
        assert (outcome.state, outcome.reason) == (RunState.BACKOFF, Reason.EXIT_NONZERO)


def test_a_reboot_explains_an_unseen_exit_and_nothing_that_was_seen_before_it() -> None:
    assert outcome_of_exit(ExitFacts(exit_code=None, signal=None, host_rebooted=True), contract=True, asked=None).reason is Reason.HOST_REBOOTED
    assert outcome_of_exit(ExitFacts(exit_code=0, signal=None, host_rebooted=True), contract=True, asked=None).state is RunState.FINISHED


def test_a_forced_stop_says_so_and_an_unseen_exit_is_never_called_zero_or_killed() -> None:
    forced = outcome_of_exit(ExitFacts(exit_code=None, signal=9, forced=True), contract=True, asked=Reason.USER)
    assert "force was needed" in forced.detail and "SIGKILL" in forced.detail
    unseen = outcome_of_exit(ExitFacts(exit_code=None, signal=None), contract=True, asked=Reason.USER)
    assert "nobody saw" in unseen.detail and "exit 0" not in unseen.detail and "SIG" not in unseen.detail


@given(facts=exits, contract=st.booleans(), asked=st.one_of(st.none(), st.sampled_from(ASKED)))
def test_every_exit_has_one_of_four_outcomes_and_a_user_is_always_obeyed(facts: ExitFacts, contract: bool, asked: Reason | None) -> None:
    outcome = outcome_of_exit(facts, contract=contract, asked=asked)
    assert outcome.state in (RunState.FINISHED, RunState.STOPPED, RunState.FAILED, RunState.BACKOFF)
    if asked is Reason.USER:
        assert outcome.state in (RunState.STOPPED, RunState.FAILED)
    if outcome.state is RunState.STOPPED:
        assert asked in (Reason.USER, Reason.SUPERSEDED), "stopped is the user's word"
    if outcome.state is RunState.BACKOFF:
        assert outcome.reason not in NEVER_RETRIED
    if facts.exit_code is None and facts.signal is None and asked is None:
        assert outcome.reason in (Reason.UNOBSERVED, Reason.HOST_REBOOTED)


@given(st.sampled_from(sorted(NEVER_RETRIED)))
def test_what_would_only_repeat_is_never_tried_again(reason: Reason) -> None:
    verdict = next_try(reason=reason, run_id="r", attempt=1, now=NOW, restarts=(), fruitless_count=0, limits=LIMITS)
    assert isinstance(verdict, NoMoreTries) and verdict.state is RunState.FAILED


@given(ages=st.lists(st.floats(0, 20_000), max_size=12), fruitless=st.integers(0, 50))
def test_the_budget_slides_with_its_window_and_then_holds_the_run(ages: list[float], fruitless: int) -> None:
    restarts = [NOW - timedelta(seconds=age) for age in ages]
    verdict = next_try(reason=Reason.SIGNAL, run_id="r", attempt=3, now=NOW, restarts=restarts, fruitless_count=fruitless, limits=LIMITS)
    recent_count = len(used_restarts(restarts, now=NOW, window_seconds=LIMITS.window_seconds))
    if recent_count >= LIMITS.restarts_max:
        assert isinstance(verdict, NoMoreTries) and verdict.state is RunState.HELD
    else:
        assert isinstance(verdict, TryAgain) and NOW < verdict.at <= NOW + timedelta(seconds=LIMITS.ceiling_seconds)


@given(run_id=st.text(max_size=20), attempt=st.integers(1, 1000), fruitless=st.integers(0, 100))
def test_a_wait_doubles_up_to_its_ceiling_and_its_jitter_comes_from_the_ids(run_id: str, attempt: int, fruitless: int) -> None:
    wait = backoff_seconds(run_id=run_id, attempt=attempt, fruitless_count=fruitless, limits=LIMITS)
    full = min(300.0, 2.0 * 2**fruitless)
    assert 0.75 * full <= wait <= full
    assert wait == backoff_seconds(run_id=run_id, attempt=attempt, fruitless_count=fruitless, limits=LIMITS)


def test_runs_that_fell_together_do_not_rise_together() -> None:
    waits = {backoff_seconds(run_id=f"run-{number}", attempt=1, fruitless_count=0, limits=LIMITS) for number in range(10)}
    assert len(waits) == 10
