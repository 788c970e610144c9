"""The lines of a memory cap and the sums of admission, with the arithmetic that a person reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.facts import GIB, MIB, Reason
from policies.memory import CONTEXT_ALLOWANCE_BYTES, Line, admit, gib, judge, look_again_seconds

CAPS = {"host_cap_bytes": 16 * GIB, "accelerator_cap_bytes": 16 * GIB, "floor_bytes": GIB, "soft_fraction": 0.95}
CALM = {"host_bytes": 4 * GIB, "accelerator_bytes": 4 * GIB, "available_bytes": 40 * GIB}


def verdict(**changed):
    return judge(**{**CAPS, **CALM, **changed})


def test_below_every_line_nothing_is_tripped_and_the_figures_are_shown():
    found = verdict()

    assert found.line is Line.NONE
    assert found.reason is None
    assert "host 4.0 GiB of 16.0 GiB" in found.text


def test_the_soft_line_lies_at_its_fraction_of_the_host_cap_and_the_hard_line_at_the_cap():
    assert verdict(host_bytes=int(16 * GIB * 0.95) - 1).line is Line.NONE
    assert verdict(host_bytes=int(16 * GIB * 0.95)).line is Line.SOFT
    assert verdict(host_bytes=16 * GIB - 1).line is Line.SOFT
    hard = verdict(host_bytes=16 * GIB)

    assert (hard.line, hard.reason, hard.part) == (Line.HARD, Reason.MEMORY, "host")
    assert hard.text == "host 16.0 GiB ≥ hard line 16.0 GiB"


@pytest.mark.parametrize("context_bytes", [0, 600 * MIB, 1200 * MIB, CONTEXT_ALLOWANCE_BYTES - 1])
def test_a_process_that_fills_its_allocator_under_the_cap_is_not_stopped_for_its_context(context_bytes):
    assert verdict(accelerator_bytes=int(15.624 * GIB) + context_bytes).line is Line.NONE
    assert verdict(accelerator_bytes=16 * GIB + context_bytes).line is Line.NONE


@given(cap=st.integers(0, 200 * GIB), fraction=st.floats(0.01, 1.0), context=st.integers(0, CONTEXT_ALLOWANCE_BYTES - 1))
def test_the_accelerators_lines_are_never_below_the_allocators_limit_and_a_context(cap, fraction, context):
    assert verdict(accelerator_cap_bytes=cap, soft_fraction=fraction, host_bytes=0, accelerator_bytes=cap + context).line is Line.NONE


def test_beyond_the_allowance_the_accelerators_use_is_asked_to_end_and_further_beyond_is_ended():
    soft_bytes = 16 * GIB + CONTEXT_ALLOWANCE_BYTES
    soft, hard = verdict(accelerator_bytes=soft_bytes), verdict(accelerator_bytes=int(soft_bytes / 0.95))

    assert (soft.line, soft.reason, soft.part) == (Line.SOFT, Reason.MEMORY, "accelerator")
    assert (hard.line, hard.part) == (Line.HARD, "accelerator")


def test_the_next_look_comes_sooner_the_nearer_and_the_faster_and_within_its_bounds():
    def wait(used, growth):
        return look_again_seconds(used_bytes=used, line_bytes=1000, growth_bytes_per_second=growth, calm_seconds=1.0, quick_seconds=0.05)

    assert wait(990, 0.0) == wait(None, 9e9) == wait(100, 1.0) == 1.0
    assert wait(600, 400.0) == 0.5
    assert wait(900, 400.0) == 0.125
    assert wait(1200, 400.0) == wait(999, 1e9) == 0.05


@given(used=st.integers(0, 10**12), line=st.integers(1, 10**12), growth=st.floats(0, 1e12))
def test_a_look_that_waits_comes_before_steady_growth_reaches_the_line(used, line, growth):
    wait = look_again_seconds(used_bytes=used, line_bytes=line, growth_bytes_per_second=growth, calm_seconds=1.0, quick_seconds=0.05)

    assert 0.05 <= wait <= 1.0
    assert wait == 0.05 or growth == 0 or used + growth * wait <= line


def test_a_host_below_its_floor_asks_for_a_save_and_below_half_of_it_for_an_end():
    soft, hard = verdict(available_bytes=GIB - 1), verdict(available_bytes=GIB // 2 - 1)

    assert (soft.line, soft.reason, soft.part) == (Line.SOFT, Reason.HOST_MEMORY, "floor")
    assert (hard.line, hard.reason) == (Line.HARD, Reason.HOST_MEMORY)
    assert verdict(available_bytes=GIB).line is Line.NONE


def test_the_harder_line_rules_and_of_equal_ones_the_runs_own_cap():
    assert verdict(host_bytes=int(15.5 * GIB), available_bytes=0).reason is Reason.HOST_MEMORY
    assert verdict(host_bytes=17 * GIB, available_bytes=0).reason is Reason.MEMORY


@pytest.mark.parametrize("name", ["host_bytes", "accelerator_bytes", "available_bytes"])
def test_an_unknown_measurement_never_trips_a_line_and_is_never_shown_as_zero(name):
    found = verdict(**{name: None})

    assert found.line is Line.NONE
    assert "unknown" in found.text


def test_what_fits_is_admitted_and_the_sum_is_said():
    found = admit(capacity_bytes=8 * GIB, floor_bytes=GIB, available_bytes=7 * GIB, committed=(("a", GIB), ("b", 3 * GIB)), asked_bytes=3 * GIB)

    assert found.admitted
    assert found.text == "asks 3.0 GiB; 8.0 GiB capacity − 1.0 GiB floor − 4.0 GiB held by a, b = 3.0 GiB"


def test_what_does_not_fit_now_waits_for_what_others_hold():
    found = admit(capacity_bytes=8 * GIB, floor_bytes=GIB, available_bytes=None, committed=(("a", GIB), ("b", 3 * GIB)), asked_bytes=6 * GIB)

    assert not found.admitted
    assert found.possible
    assert found.text == "asks 6.0 GiB; 8.0 GiB capacity − 1.0 GiB floor − 4.0 GiB held by a, b = 3.0 GiB"


def test_what_can_never_fit_is_impossible_not_waiting():
    found = admit(capacity_bytes=8 * GIB, floor_bytes=GIB, available_bytes=None, committed=(), asked_bytes=7 * GIB + 1)

    assert not found.admitted
    assert not found.possible
    assert "even with no other run" in found.text


def test_memory_that_strangers_use_keeps_a_run_waiting():
    found = admit(capacity_bytes=32 * GIB, floor_bytes=GIB, available_bytes=5 * GIB, committed=(), asked_bytes=6 * GIB)

    assert (found.admitted, found.possible) == (False, True)
    assert found.text == "asks 6.0 GiB; 5.0 GiB available now − 1.0 GiB floor = 4.0 GiB"


@given(
    capacity=st.integers(0, 64), floor=st.integers(0, 8), held=st.lists(st.integers(0, 32), max_size=5), asked=st.integers(0, 64),
    available=st.none() | st.integers(0, 64),
)
def test_the_promises_of_admitted_runs_and_the_floor_always_fit_the_host(capacity, floor, held, asked, available):
    committed = tuple((f"r{index}", amount * GIB) for index, amount in enumerate(held))
    found = admit(
        capacity_bytes=capacity * GIB, floor_bytes=floor * GIB, committed=committed, asked_bytes=asked * GIB,
        available_bytes=None if available is None else available * GIB,
    )

    assert not found.admitted or sum(held) + asked + floor <= capacity
    assert found.possible == (asked + floor <= capacity)


def test_small_amounts_never_read_as_zero():
    assert gib(12 * MIB) == "12.0 MiB"
    assert gib(6 * GIB) == "6.0 GiB"
