"""`decide` on a virtual host: whatever happens in whatever order, its moves are legal and its promises hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetd.host.causes import stop_moment
from fleetd.host.decide import decide
from fleetd.host.history import (
    Action,
    Alarm,
    Anchor,
    Ask,
    AskAgain,
    EndAttempt,
    Finish,
    History,
    KillTree,
    Move,
    RecordExit,
    SeenCheckpoint,
    StartAttempt,
    Stop,
    after_action,
    after_gap,
    attempt_started,
    time_is_known,
)
from fleetd.host.notices import _essence
from fleetd.host.pace import TICK_STUCK_SECONDS
from fleetd.host.progress import Progress, after_record
from fleetd.host.sight import AttemptSight, HostSight, MemoryLook
from fleetd.model import Caps, DeadlineTerms, ExitRecord, Owner, RestartTerms, RunSpec, StallTerms, StopTerms, WantOrder
from fleetd.wire import decode, dumps, encode, loads
from policies.deadlines import ClockPair, EffectiveTime
from policies.facts import GIB, CapGrade, OnReboot, Reason, RunKind, RunState, StopMode, Want, format_moment
from policies.identity import Standing
from policies.lifecycle import FINAL, SETTLED
from policies.stalls import Phase

START = datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc)
CUTOFF_SECONDS = 600.0


def spec(**changes: Any) -> RunSpec:
    base = RunSpec(
        run_id="r", campaign_id="c", candidate="a", kind=RunKind.TRAIN, owner=Owner(coordinator_id="o", generation=1), created_at=START,
        argv=("trainer",), environment={}, release_digest="", caps=Caps(host_bytes=GIB, accelerator_bytes=GIB, floor_bytes=GIB // 10),
        deadline=DeadlineTerms(final_at=START + timedelta(seconds=CUTOFF_SECONDS + 60), cutoff_at=START + timedelta(seconds=CUTOFF_SECONDS)),
        stop=StopTerms(grace_floor_seconds=5.0, grace_ceiling_seconds=60.0), restarts=RestartTerms(restarts_max=2, first_seconds=2.0),
        stall=StallTerms(launch_seconds=100.0, floor_seconds=50.0),
    )
    return replace(base, **changes)


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def wish(sequence: int, want: Want, mode: StopMode = StopMode.GRACEFUL) -> WantOrder:
    return WantOrder(sequence=sequence, want=want, mode=mode, actor="user:test", at=START)


def sight(
    seconds: float = 10.0, *, attempt: AttemptSight | None = None, want: WantOrder | None = None, of: RunSpec | None = None, **changes: Any
) -> HostSight:
    order = of or spec()
    base = HostSight(
        time=EffectiveTime(now=START + timedelta(seconds=seconds), alarm=None), boottime_seconds=1000.0 + seconds, spec=order,
        want=want or wish(1, Want.RUN), cutoff_at=order.deadline.cutoff_at if order.deadline else None, attempt=attempt,
        memory=MemoryLook(available_bytes=GIB),
    )
    return replace(base, **changes)


def alive(**changes: Any) -> AttemptSight:
    return replace(AttemptSight(number=1, standing=Standing.VERIFIED, tree_count=0, shim_is_alive=True), **changes)


def ended(code: int | None = 0, signal: int | None = None, **changes: Any) -> AttemptSight:
    seen = code is not None or signal is not None
    record = ExitRecord(
        attempt=1, at=START + timedelta(seconds=10), wait_status=0 if seen else None, exit_code=code, signal=signal,
        observed_by="shim" if seen else "nobody",
    )
    base = AttemptSight(number=1, standing=Standing.GONE, is_dead=True, tree_count=0, shim_is_alive=False, exit=record)
    return replace(base, **changes)


RUNNING = attempt_started(replace(History(), state=RunState.RUNNING), 1)
RUNNING = replace(RUNNING, progress=Progress(phase=Phase.TRAINING, step=5, step_seconds=(1.0,), save_seconds=(2.0,)))


def kinds(actions: tuple[Action, ...]) -> list[type]:
    return [type(action) for action in actions]


def moves(actions: tuple[Action, ...]) -> list[RunState]:
    return [action.to for action in actions if isinstance(action, Move)]


def test_a_new_run_is_started_once_the_record_is_durable() -> None:
    assert decide(sight(is_durable=False), History()) == ()
    assert kinds(decide(sight(), History())) == [Move, StartAttempt]


def test_nothing_is_started_while_somebody_holds_the_trainers_lock_or_the_host_is_below_its_floor() -> None:
    held = decide(sight(is_trainer_lock_held=True, lock_held_seconds=60.0), History())
    assert kinds(held) == [Alarm]
    low = decide(sight(memory=MemoryLook(available_bytes=GIB // 20)), History())
    assert kinds(low) == [Alarm] and "floor" in str(low[0])


def test_nothing_is_started_where_the_next_checkpoint_would_find_no_room() -> None:
    saved = after_record(Progress(), {"event": "save", "phase": "end", "step": 8, "bytes": GIB, "seconds": 1.0}, read_at=START)

    full = decide(sight(disk_free_bytes=GIB), History(progress=saved))

    assert kinds(full) == [Alarm] and "bytes are free" in str(full[0])
    assert kinds(decide(sight(disk_free_bytes=2 * GIB), History(progress=saved))) == [Move, StartAttempt]
    assert kinds(decide(sight(disk_free_bytes=GIB), History())) == [Move, StartAttempt], "nothing is known of its checkpoints yet"
    assert moves(decide(sight(CUTOFF_SECONDS, disk_free_bytes=0), History())) == [RunState.FINISHED], "it does not wait beyond its deadline"


@pytest.mark.parametrize("standing", [Standing.STRANGER, Standing.UNKNOWN])
def test_whatever_is_wished_or_due_a_process_that_is_not_provably_ours_is_never_signalled(standing: Standing) -> None:
    stranger = alive(
        standing=standing, is_dead=standing is Standing.STRANGER, tree_count=3, is_contested=standing is Standing.STRANGER,
        unverified_seconds=60.0, standing_text="other argv",
    )
    for case in (sight(want=wish(2, Want.STOP, StopMode.NOW)), sight(CUTOFF_SECONDS + 1), sight(memory=MemoryLook(host_bytes=9 * GIB))):
        actions = decide(replace(case, attempt=stranger, is_trainer_lock_held=True), RUNNING)
        assert kinds(actions) == [Alarm] and "cannot verify" in str(actions[0])


def test_a_dead_leader_under_a_reused_pid_is_over_once_its_tree_is_empty_and_its_lock_free() -> None:
    stranger = ended(None, standing=Standing.STRANGER, exit=None)
    assert kinds(decide(sight(attempt=stranger), RUNNING)) == [RecordExit]
    assert kinds(decide(sight(attempt=stranger, is_trainer_lock_held=True), RUNNING)) == [Alarm]


def test_a_stranger_under_the_leaders_pid_does_not_protect_what_is_left_of_the_tree() -> None:
    left = replace(RUNNING, leader_gone_seconds=1000.0)
    stranger = ended(None, standing=Standing.STRANGER, exit=None, tree_count=2)
    assert kinds(decide(sight(5.0, attempt=stranger, is_trainer_lock_held=True), left)) == [KillTree]
    assert kinds(decide(sight(5.0, attempt=replace(stranger, is_contested=True), is_trainer_lock_held=True), left)) == [Alarm]


def test_a_stop_asks_with_the_measured_grace_and_now_kills() -> None:
    graceful = decide(sight(attempt=alive(), want=wish(2, Want.STOP)), RUNNING)
    assert kinds(graceful) == [Move, Ask] and isinstance(graceful[1], Ask) and graceful[1].grace_seconds == 1 + 2 * 2 + 5
    assert kinds(decide(sight(attempt=alive(), want=wish(2, Want.STOP, StopMode.NOW)), RUNNING)) == [Move, KillTree]


def test_an_order_waits_the_whole_ceiling_for_a_trainer_that_is_still_starting() -> None:
    """Even when earlier attempts measured quick steps: a SIGTERM during the imports is answered only after them."""
    starting = replace(RUNNING, progress=replace(RUNNING.progress, phase=Phase.LAUNCH))
    ordered = decide(sight(attempt=alive(), want=wish(2, Want.STOP)), starting)
    assert isinstance(ordered[-1], Ask)
    assert ordered[-1].grace_seconds == 60.0
    late = stop_moment(sight(), starting)
    assert late == stop_moment(sight(), RUNNING), "the deadline does not wait for a trainer that has nothing to save"


def test_a_slow_batch_of_a_validation_is_part_of_the_measured_grace() -> None:
    progress = RUNNING.progress
    for second, phase in ((0, "begin"), (7, "progress"), (9, "progress")):
        record = {"event": "validation", "phase": phase, "step": 1, "at": format_moment(START + timedelta(seconds=second))}
        progress = after_record(progress, record, read_at=START)
    assert progress.batch_seconds == (7.0, 2.0)
    ordered = decide(sight(attempt=alive(), want=wish(2, Want.STOP)), replace(RUNNING, progress=progress))
    assert isinstance(ordered[-1], Ask)
    assert ordered[-1].grace_seconds == 7 + 2 * 2 + 5


def test_an_evaluation_may_use_every_second_before_its_deadline() -> None:
    judging = spec(kind=RunKind.EVALUATE)
    late = sight(CUTOFF_SECONDS - 1, attempt=alive(), of=judging)
    assert decide(late, RUNNING) == ()
    assert kinds(decide(replace(late, attempt=None), replace(RUNNING, state=RunState.STAGING, attempt=0))) == [Move, StartAttempt]
    assert kinds(decide(sight(CUTOFF_SECONDS, attempt=alive(), of=judging), RUNNING)) == [Move, KillTree]


def test_the_soft_line_asks_and_the_hard_line_kills() -> None:
    soft = decide(sight(attempt=alive(), memory=MemoryLook(host_bytes=int(0.97 * GIB))), RUNNING)
    hard = decide(sight(attempt=alive(), memory=MemoryLook(host_bytes=GIB)), RUNNING)
    assert kinds(soft) == [Move, Ask] and kinds(hard) == [Move, KillTree]
    assert all(isinstance(action, Move) and action.reason is Reason.MEMORY for action in (soft[0], hard[0]))


def test_what_a_tree_holds_of_a_device_at_the_very_least_counts_where_the_whole_is_unknown() -> None:
    unknown = MemoryLook(accelerator_bytes=None, accelerator_least_bytes=0)
    assert decide(sight(attempt=alive(), memory=unknown), RUNNING) == ()
    assert kinds(decide(sight(attempt=alive(), memory=replace(unknown, accelerator_least_bytes=9 * GIB)), RUNNING)) == [Move, KillTree]


def test_a_tree_of_which_the_kernel_took_a_member_is_asked_to_save_with_whose_want_it_was() -> None:
    own = decide(sight(attempt=alive(oom_kill_count=1)), RUNNING)
    machine = decide(sight(attempt=alive(oom_kill_count=2, is_limit_hit=False)), RUNNING)
    assert kinds(own) == kinds(machine) == [Move, Ask]
    assert isinstance(own[0], Move) and own[0].reason is Reason.MEMORY and "killed 1 of its processes" in own[0].detail
    assert isinstance(machine[0], Move) and machine[0].reason is Reason.HOST_MEMORY and "the machine had none left" in machine[0].detail


def test_a_cap_that_is_no_longer_enforced_raises_an_alarm_where_the_plan_demands_it() -> None:
    loose = alive(cap_fault="pid 7 of the tree lives outside of it")
    strict = spec(caps=replace(spec().caps, demand=CapGrade.ENFORCED))
    assert decide(sight(attempt=loose), RUNNING) == ()
    (alarm,) = decide(sight(attempt=loose, of=strict), RUNNING)
    assert isinstance(alarm, Alarm) and "pid 7" in alarm.text


def test_the_deadline_asks_a_whole_ladder_early_and_kills_at_the_cutoff() -> None:
    stop_at = stop_moment(sight(), RUNNING)
    assert stop_at is not None
    due = (stop_at - START).total_seconds()
    assert due == CUTOFF_SECONDS - (1.25 * 10 + 2)
    assert decide(sight(due - 0.1, attempt=alive()), RUNNING) == ()
    assert kinds(decide(sight(due, attempt=alive()), RUNNING)) == [Move, Ask]
    assert kinds(decide(sight(CUTOFF_SECONDS, attempt=alive()), RUNNING)) == [Move, KillTree]


def test_a_training_that_is_ended_by_its_deadline_is_finished_and_by_its_user_stopped() -> None:
    for want, at, state in ((wish(1, Want.RUN), 590.0, RunState.FINISHED), (wish(2, Want.STOP), 100.0, RunState.STOPPED)):
        history = after(RUNNING, decide(sight(at, attempt=alive(), want=want), RUNNING), at)
        assert moves(decide(sight(at + 3, attempt=ended(10), want=want), history)) == [state]


def test_a_silent_trainer_is_asked_to_stop_but_a_long_validation_is_not() -> None:
    assert kinds(decide(sight(attempt=alive(), silent_seconds=60.0), RUNNING)) == [Move, Ask]
    validating = replace(RUNNING, progress=replace(RUNNING.progress, phase=Phase.VALIDATION))
    assert decide(sight(attempt=alive(), silent_seconds=60.0), validating) == ()


def test_an_unseen_exit_waits_for_a_living_shim_and_is_recorded_by_nobody_else() -> None:
    assert decide(sight(attempt=ended(None, exit=None, shim_is_alive=True)), RUNNING) == ()
    assert kinds(decide(sight(attempt=ended(None, exit=None)), RUNNING)) == [RecordExit]


def test_what_outlives_its_leader_is_killed_before_anything_is_concluded() -> None:
    left = replace(RUNNING, leader_gone_seconds=1000.0)
    assert decide(sight(1.0, attempt=ended(tree_count=2)), left) == ()
    assert kinds(decide(sight(5.0, attempt=ended(tree_count=2)), left)) == [KillTree]


def test_device_memory_that_stays_held_makes_the_run_stuck_and_its_release_concludes_it() -> None:
    gone = replace(RUNNING, state=RunState.STOPPING, leader_gone_seconds=1000.0)
    held = ended(10, device_left="the device still holds memory of pid 5 (3.0 GiB)")
    assert decide(sight(29.0, attempt=held), gone) == (), "a driver may take its time"
    stuck = decide(sight(30.0, attempt=held), gone)
    assert moves(stuck) == [RunState.STUCK] and "pid 5 (3.0 GiB)" in str(stuck)
    history = after(gone, stuck, 30.0)
    assert decide(sight(31.0, attempt=held), history) == (), "stuck is said once, and nobody is signalled for it"
    assert moves(decide(sight(40.0, attempt=replace(held, device_left="")), history)) == [RunState.HELD]


def test_a_reboot_resumes_or_holds_as_the_plan_says() -> None:
    gone = ended(None, host_rebooted=True, tree_count=None)
    assert moves(decide(sight(attempt=gone), RUNNING)) == [RunState.BACKOFF]
    assert moves(decide(sight(attempt=gone, of=spec(on_reboot=OnReboot.HOLD)), RUNNING)) == [RunState.HELD]


def test_a_reboot_while_a_run_waits_for_its_next_attempt_is_a_reboot_too() -> None:
    waiting = replace(RUNNING, state=RunState.BACKOFF, is_attempt_over=True, next_attempt_at=START, was_rebooted=True)
    held = decide(sight(of=spec(on_reboot=OnReboot.HOLD)), waiting)
    assert moves(held) == [RunState.HELD] and after(waiting, held, 10.0).reason is Reason.HOST_REBOOTED
    assert not after(waiting, held, 10.0).was_rebooted, "a resume starts it"
    assert kinds(decide(sight(of=spec(on_reboot=OnReboot.RESUME)), waiting)) == [Move, StartAttempt]


def test_after_a_reboot_nothing_starts_before_somebody_knows_the_time_and_a_late_clock_is_told_of() -> None:
    waiting = History(state=RunState.BACKOFF, attempt=1)
    assert decide(sight(clock_doubted_seconds=1.0), waiting) == ()
    late = decide(sight(clock_doubted_seconds=20.0), waiting)
    assert kinds(late) == [Alarm] and "nothing is started" in str(late)
    assert moves(decide(sight(), waiting)) == [RunState.STARTING]
    assert kinds(decide(sight(CUTOFF_SECONDS, clock_doubted_seconds=20.0), waiting)) == [Alarm], "nor is a run over because of such a clock"
    assert moves(decide(sight(CUTOFF_SECONDS), waiting)) == [RunState.FINISHED], "too late is too late, once the time is known"


def test_what_a_reboot_ended_was_not_ended_by_a_deadline_that_came_before_anybody_looked() -> None:
    gone = ended(None, host_rebooted=True, tree_count=None)
    assert gone.exit is not None
    gone = replace(gone, exit=replace(gone.exit, at=at(CUTOFF_SECONDS)))
    assert moves(decide(sight(CUTOFF_SECONDS, attempt=gone, clock_doubted_seconds=1.0), RUNNING)) == [RunState.BACKOFF]
    assert moves(decide(sight(CUTOFF_SECONDS, attempt=gone), RUNNING)) == [RunState.FINISHED]


@pytest.mark.parametrize(("known_seconds", "counted_seconds"), [(-3600.0, 160.0), (-20.0, 160.0), (500.0, 500.0)])
def test_once_the_time_is_known_it_is_counted_from_there_but_not_from_before_what_was_recorded(known_seconds: float, counted_seconds: float) -> None:
    """The last boot recorded 100 s; this one has gone on for 60 s, with a clock that is an hour ahead."""
    anchor = Anchor(boot_id="b2", now=at(3700.0), boottime_seconds=5.0, is_trusted=False, least_now=at(100.0))
    doubted = replace(RUNNING, state=RunState.BACKOFF, anchor=anchor, next_attempt_at=at(3770.0), restarts=(at(50.0), at(3705.0)))
    known = time_is_known(doubted, ClockPair(now=at(known_seconds), boottime_seconds=65.0))
    assert known.anchor == Anchor(boot_id="b2", now=at(counted_seconds), boottime_seconds=65.0)
    assert known.next_attempt_at == at(counted_seconds + 10.0), "it was to come ten seconds from now"
    assert known.restarts == (at(50.0), at(counted_seconds))


def test_an_order_that_came_meanwhile_says_what_time_it_is_at_least() -> None:
    anchor = Anchor(boot_id="b2", now=at(3700.0), boottime_seconds=5.0, is_trusted=False, least_now=at(100.0))
    doubted, known = replace(RUNNING, anchor=anchor), ClockPair(now=at(200.0), boottime_seconds=65.0)
    assert [time_is_known(doubted, known, told).anchor.now for told in (None, at(150.0), at(203.0))] == [at(200.0), at(200.0), at(203.0)]  # type: ignore[union-attr]


def test_progress_brings_the_backoff_back_to_its_first_wait() -> None:
    tired = replace(RUNNING, fruitless_count=5, step_at_start=10)
    fruitless = decide(sight(attempt=ended(1)), tired)[-1]
    fruitful = decide(sight(attempt=ended(1)), replace(tired, checkpoints=(SeenCheckpoint(step=20, digest="d", at=START),)))[-1]
    assert isinstance(fruitless, Move) and isinstance(fruitful, Move)
    assert fruitless.next_attempt_at is not None and fruitful.next_attempt_at is not None
    assert fruitful.next_attempt_at < START + timedelta(seconds=13) < fruitless.next_attempt_at


def test_a_trainer_that_could_not_be_executed_is_not_tried_again() -> None:
    record = ExitRecord(
        attempt=1, at=START, wait_status=127 << 8, exit_code=127, signal=None, observed_by="shim",
        evidence={"reason": "config", "start": "x: no such file"},
    )
    last = decide(sight(attempt=ended(exit=record)), RUNNING)[-1]
    assert isinstance(last, Move) and (last.to, last.reason) == (RunState.FAILED, Reason.CONFIG) and "no such file" in last.detail


def test_a_trainer_that_refuses_is_quoted_in_the_reason_of_its_run() -> None:
    record = {"event": "failed", "step": None, "because": "token 5950 is unknown"}
    said = replace(RUNNING, progress=after_record(RUNNING.progress, record, read_at=START))
    last = decide(sight(attempt=ended(30)), said)[-1]
    assert isinstance(last, Move) and (last.to, last.reason) == (RunState.FAILED, Reason.CONFIG)
    assert last.detail == "exit 30: never try again: token 5950 is unknown"
    silent = decide(sight(attempt=ended(30)), RUNNING)[-1]
    assert isinstance(silent, Move) and silent.detail == "exit 30: never try again"


def test_the_memory_of_a_supervisor_crosses_the_journal_unchanged() -> None:
    history = after(RUNNING, decide(sight(attempt=alive(), want=wish(2, Want.STOP)), RUNNING), 10.0)
    assert decode(History, loads(dumps(encode(history)))) == history


def after(history: History, actions: tuple[Action, ...], seconds: float, want_sequence: int = 1) -> History:
    for action in actions:
        history = after_action(
            history, action, now=START + timedelta(seconds=seconds), boottime_seconds=1000.0 + seconds, want_sequence=want_sequence
        )
    return history


@dataclass
class VirtualHost:
    """A host on which anything may happen, driven by drawn events; it obeys the actions as the real loop does."""

    order: RunSpec
    seconds: float = 0.0
    history: History = field(default_factory=History)
    attempt: AttemptSight | None = None
    want: WantOrder = field(default_factory=lambda: wish(1, Want.RUN))
    memory: MemoryLook = field(default_factory=lambda: MemoryLook(available_bytes=GIB))
    started: int = 0

    def tick(self, rush: float) -> tuple[Action, ...]:
        self.seconds += rush
        seen = sight(self.seconds, attempt=self.attempt, want=self.want, of=self.order, memory=self.memory, silent_seconds=rush)
        if self.attempt is not None and self.attempt.is_dead and self.history.leader_gone_seconds is None and not self.history.is_attempt_over:
            self.history = replace(self.history, leader_gone_seconds=seen.boottime_seconds)
        actions = decide(seen, self.history)
        self._check(seen, actions)
        for action in actions:
            self._obey(action)
            self.history = after(self.history, (action,), self.seconds, self.want.sequence)
            if isinstance(action, StartAttempt):
                self.history = attempt_started(self.history, self.attempt.number if self.attempt else 0)
        return actions

    def _obey(self, action: Action) -> None:
        if isinstance(action, StartAttempt):
            self.started += 1
            self.attempt = AttemptSight(number=self.started, standing=Standing.VERIFIED, tree_count=0, shim_is_alive=True)
        elif isinstance(action, KillTree):
            assert self.attempt is not None
            self.end(None, 9) if self.attempt.standing is Standing.VERIFIED else None
            self.attempt = replace(self.attempt, tree_count=0)
        elif isinstance(action, RecordExit):
            assert self.attempt is not None
            self.attempt = replace(self.attempt, exit=ended(None).exit)

    def end(self, code: int | None, signal: int | None, *, seen: bool = True) -> None:
        if self.attempt is not None and self.attempt.standing is Standing.VERIFIED:
            at = START + timedelta(seconds=self.seconds)
            record = replace(ended(code, signal).exit, at=at) if seen else None  # type: ignore[type-var]
            self.attempt = replace(self.attempt, standing=Standing.GONE, is_dead=True, exit=record, shim_is_alive=False)

    def _check(self, seen: HostSight, actions: tuple[Action, ...]) -> None:
        attempt = self.attempt
        is_provable = attempt is not None and (
            attempt.standing in (Standing.VERIFIED, Standing.GONE) or (attempt.is_dead and not attempt.is_contested)
        )
        may_signal = is_provable and not self.history.is_attempt_over
        for action in actions:
            if isinstance(action, Ask | AskAgain | KillTree):
                assert may_signal, "only what is provably ours is signalled, or what a dead leader has left"
            if isinstance(action, Ask | AskAgain):
                assert attempt is not None and attempt.standing is Standing.VERIFIED
            if isinstance(action, StartAttempt):
                assert attempt is None or self.history.is_attempt_over, "never two trainers on one run"
                assert seen.cutoff_at is None or seen.time.now < seen.cutoff_at, "nothing is started after the cutoff"
                assert self.want.want is Want.RUN, "nothing is started against a wish"
            if isinstance(action, EndAttempt):
                assert attempt is not None and attempt.exit is not None, "an attempt ends by a recorded exit"
        if self.history.state in FINAL:
            assert all(isinstance(action, Finish) or not isinstance(action, Move) for action in actions), "final states absorb"


events = st.one_of(
    st.tuples(st.just("tick"), st.sampled_from([0.1, 1.0, 5.0, 60.0])),
    st.tuples(st.just("exit"), st.sampled_from([0, 1, 10, 20, 30, 31, 32, 40, 137])),
    st.tuples(st.just("signal"), st.sampled_from([9, 11, 15])),
    st.tuples(st.just("unseen"), st.just(0)),
    st.tuples(st.just("want"), st.sampled_from([(Want.RUN, StopMode.GRACEFUL), (Want.STOP, StopMode.GRACEFUL), (Want.STOP, StopMode.NOW)])),
    st.tuples(st.just("memory"), st.sampled_from([GIB // 2, int(GIB * 0.96), 2 * GIB])),
    st.tuples(st.just("stranger"), st.booleans()),
    st.tuples(st.just("children"), st.integers(0, 2)),
    st.tuples(st.just("reboot"), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 100)),
)


@settings(max_examples=300, deadline=None)
@given(story=st.lists(events, max_size=40), contract=st.booleans(), deadline=st.booleans())
def test_whatever_happens_every_move_is_legal_and_every_promise_holds(story: list[tuple[str, Any]], contract: bool, deadline: bool) -> None:
    order = spec(contract=contract) if deadline else spec(contract=contract, deadline=None, kind=RunKind.SERVE)
    host = VirtualHost(order)
    host.tick(0.1)
    for kind, value in story:
        happen(host, kind, value)
        host.tick(value if kind == "tick" else 0.5)


@settings(max_examples=200, deadline=None)
@given(story=st.lists(events, max_size=20))
def test_a_run_with_a_deadline_always_comes_to_rest(story: list[tuple[str, Any]]) -> None:
    host = VirtualHost(spec())
    for kind, value in story:
        happen(host, kind, value)
        host.tick(0.5)
    if host.attempt is not None:
        # What can't be verified for ever, and a shim that never records, wait for a person: here both come to an end.
        host.attempt = replace(host.attempt, shim_is_alive=False)
        if host.attempt.standing in (Standing.STRANGER, Standing.UNKNOWN):
            host.attempt = replace(host.attempt, standing=Standing.GONE, is_dead=True, tree_count=0)
    host.memory = MemoryLook(available_bytes=GIB)
    for _ in range(60):
        host.tick(30.0)
    assert host.history.state in SETTLED, host.history


def happen(host: VirtualHost, kind: str, value: Any) -> None:
    attempt = host.attempt
    if kind == "exit":
        host.end(value, None)
    elif kind == "signal":
        host.end(None, value)
    elif kind == "unseen":
        host.end(None, None, seen=False)
    elif kind == "want":
        host.want = wish(host.want.sequence + 1, *value)
    elif kind == "memory":
        host.memory = MemoryLook(host_bytes=value, available_bytes=GIB)
    elif kind == "stranger" and attempt is not None and not host.history.is_attempt_over:
        host.attempt = replace(attempt, standing=Standing.STRANGER if value else Standing.UNKNOWN, unverified_seconds=60.0)
    elif kind == "children" and attempt is not None:
        host.attempt = replace(attempt, tree_count=value)
    elif kind == "reboot" and attempt is not None:
        host.attempt = replace(attempt, standing=Standing.GONE, is_dead=True, tree_count=0, host_rebooted=True, shim_is_alive=False)
    elif kind == "step":
        host.history = replace(host.history, progress=replace(host.history.progress, phase=Phase.TRAINING, step=value))


def test_a_tree_that_survives_its_kill_is_stuck_after_half_a_minute_and_concluded_once_it_is_empty() -> None:
    stop = wish(2, Want.STOP, StopMode.NOW)
    history, stuck_at = RUNNING, None
    for seconds in range(10, 60):
        actions = decide(sight(float(seconds), attempt=alive(), want=stop), history)
        assert KillTree in kinds(actions), "it is killed again at every look"
        history = after(history, actions, float(seconds))
        if RunState.STUCK in moves(actions):
            assert stuck_at is None, "stuck is said once"
            stuck_at = seconds
    assert stuck_at == 40 and history.state is RunState.STUCK
    assert moves(decide(sight(60.0, attempt=ended(None, 9), want=stop), history)) == [RunState.STOPPED]
    assert history.stop is not None
    stalled = replace(history, stop=replace(history.stop, reason=Reason.STALLED))
    assert moves(decide(sight(60.0, attempt=ended(None, 9)), stalled)) == [RunState.HELD]


def test_a_save_that_ends_beside_later_steps_moves_no_step_back() -> None:
    progress = Progress()
    for record in ({"event": "start", "step": 0, "steps": 9}, {"step": 5}, {"event": "save", "phase": "end", "step": 4, "seconds": 1.0}):
        progress = after_record(progress, record, read_at=START)
    assert progress.step == 5
    assert after_record(progress, {"event": "start", "step": 4, "steps": 9}, read_at=START).step == 4


def test_a_trainer_that_has_saved_and_said_so_gets_the_time_to_leave() -> None:
    stopping = after(RUNNING, decide(sight(100.0, attempt=alive(), want=wish(2, Want.STOP)), RUNNING), 100.0)
    said = replace(stopping, progress=after_record(stopping.progress, {"event": "stop", "step": 7, "because": "SIGTERM"}, read_at=START))
    late = sight(115.0, attempt=alive(), want=wish(2, Want.STOP))
    assert KillTree in kinds(decide(late, stopping))
    assert KillTree not in kinds(decide(late, said))
    assert KillTree in kinds(decide(sight(140.0, attempt=alive(), want=wish(2, Want.STOP)), said)), "but not for ever"


def test_a_machine_that_stood_still_has_used_up_no_patience_and_one_that_always_looks_late_kills_all_the_same() -> None:
    order = replace(spec(), stop=StopTerms(grace_floor_seconds=1.0, grace_ceiling_seconds=1.0))
    stop = wish(2, Want.STOP)
    asked = after(RUNNING, decide(sight(100.0, attempt=alive(), want=stop, of=order), RUNNING), 100.0)
    late = sight(106.0, attempt=alive(), want=stop, of=order)
    assert KillTree in kinds(decide(late, asked)), "whoever watched all the time has waited enough"
    assert kinds(decide(late, after_gap(asked, 6.0))) == [AskAgain], "6 s in which nobody looked are one pause: it is asked again before it is killed"
    gone = replace(asked, leader_gone_seconds=1100.0)
    left = replace(late, attempt=alive(standing=Standing.GONE, is_dead=True, tree_count=1))
    assert KillTree in kinds(decide(left, gone)) and KillTree not in kinds(decide(left, after_gap(gone, 6.0))), "nor have the workers of a leader"

    assert _essence(after_gap(asked, 6.0)) == _essence(asked) != _essence(RUNNING), "the stop is worth a write, not how much of it counts"

    history, killed_at = asked, None
    for seconds in range(110, 200, 10):
        history = after_gap(history, 10.0)
        actions = decide(sight(float(seconds), attempt=alive(), want=stop, of=order), history)
        killed_at = killed_at or (seconds if KillTree in kinds(actions) else None)
        history = after(history, actions, float(seconds))
    assert killed_at == 120, "each look counts as 1.5 s: asked again at the first, killed at the second"


def test_the_looks_at_a_stuck_run_are_further_apart_and_its_time_is_told_whole() -> None:
    stop = Stop(reason=Reason.USER, mode=StopMode.NOW, asked_seconds=100.0, grace_seconds=0.0, forced=True)
    stuck = replace(RUNNING, state=RunState.STUCK, stop=stop, leader_gone_seconds=101.0)

    assert after_gap(stuck, TICK_STUCK_SECONDS) == stuck
