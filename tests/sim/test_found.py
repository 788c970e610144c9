"""Faults that the simulation found, each as the small story that it came down to."""

from __future__ import annotations

from fleetd.model import StallTerms
from policies.facts import GIB, RunState, StopMode, Want
from tests.sim.bench import Bench
from tests.sim.virtual_trainer import Fate, Habits


def test_the_end_of_a_long_save_is_heard_before_the_silence_is_judged() -> None:
    bench = Bench(habits=Habits(steps=12, validate_every=1000, save_seconds=100.0, save_every=4))
    bench.play(900)
    assert bench.state is RunState.FINISHED and not bench.notices("signal")


def test_what_a_supervisor_missed_while_it_was_held_up_is_no_silence() -> None:
    terms = StallTerms(launch_seconds=60.0, floor_seconds=15.0, factor=2.0)
    bench = Bench(habits=Habits(steps=100, step_seconds=3.0, validate_every=1000, save_every=1000), stall=terms)
    bench.play(60)
    bench.run.supervisor.process.hung_until = bench.world.seconds + 25.0
    bench.play(30)
    assert bench.state is RunState.RUNNING and not bench.notices("signal")


def test_a_machine_that_slept_does_not_take_its_sleep_for_a_stall() -> None:
    bench = Bench(habits=Habits(steps=100, step_seconds=3.0, validate_every=1000, save_every=1000))
    bench.play(60)
    until = bench.world.seconds + 600.0
    for process in bench.machine.processes.values():
        process.hung_until = until
    bench.play(620)
    assert bench.state is RunState.RUNNING and not bench.notices("signal")


def test_a_log_that_a_full_disk_does_not_take_is_no_stall() -> None:
    bench = Bench(habits=Habits(steps=200, step_seconds=3.0, validate_every=1000, save_every=1000))
    bench.play(60)
    bench.machine.is_disk_full = True
    bench.play(90)
    bench.machine.is_disk_full = False
    bench.play(30)
    assert bench.state is RunState.RUNNING and not bench.notices("signal")


def test_a_trainer_that_hangs_is_still_found() -> None:
    bench = Bench(habits=Habits(steps=100, step_seconds=3.0, validate_every=1000, save_every=1000))
    bench.play(60)
    leader = bench.run.attempts[1].leader
    assert leader is not None
    leader.hung_until = bench.world.seconds + 1000.0
    bench.play(120)
    assert bench.notices("signal") and len(bench.run.attempts) == 2, "it is stopped and tried again"


def test_a_stop_whose_cause_is_gone_and_whose_memory_was_lost_goes_on() -> None:
    bench = Bench(habits=Habits(steps=100, step_seconds=3.0, validate_every=1000, save_every=1000), fate=Fate(kind="deaf"))
    bench.play(60)
    bench.machine.hog_bytes = 15 * GIB - GIB * 2 // 5
    bench.play(2)
    assert bench.state is RunState.STOPPING
    bench.machine.hog_bytes = 0
    bench.run.spool.entries, bench.run.spool.state = {}, {}
    bench.run.is_damaged = True
    bench.run.supervisor.process.leave(9)
    bench.play(120)
    assert bench.run.attempts[1].exit is not None and len(bench.run.attempts) == 2, "it is ended, and tried again"


def test_an_order_to_stop_reaches_a_stuck_run_whose_memory_was_lost() -> None:
    bench = Bench(habits=Habits(steps=100, step_seconds=3.0, validate_every=1000, save_every=1000))
    bench.play(60)
    leader = bench.run.attempts[1].leader
    assert leader is not None
    leader.unkillable_until = bench.world.seconds + 200.0
    bench.order(Want.STOP, StopMode.NOW)
    bench.play(60)
    assert bench.state is RunState.STUCK
    bench.run.spool.entries, bench.run.spool.state, bench.run.is_damaged = {}, {}, True
    bench.run.supervisor.process.leave(9)
    bench.play(200)
    assert bench.state is RunState.STOPPED


def test_a_trainer_whose_shim_died_before_it_had_written_of_the_exec_can_still_be_stopped() -> None:
    bench = Bench(habits=Habits(steps=100, step_seconds=3.0, validate_every=1000, save_every=1000))
    bench.run.shim_dies_at = "opened"
    bench.play(60)
    assert bench.state is RunState.RUNNING and len(bench.run.attempts) == 1
    bench.order(Want.STOP)
    bench.play(30)
    assert bench.state is RunState.STOPPED and bench.run.attempts[1].exit is not None and bench.run.attempts[1].exit.exit_code == 10


def test_a_host_whose_clock_is_behind_does_not_stop_its_run_late() -> None:
    bench = Bench(habits=Habits(steps=2000, step_seconds=3.0, validate_every=10_000, save_every=50), clock_seconds=-3600.0)
    bench.play(3700)
    assert bench.state is RunState.FINISHED and bench.run.attempts[1].leader is not None
    assert bench.run.attempts[1].exit is not None and bench.run.attempts[1].exit.exit_code == 10
