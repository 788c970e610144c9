"""Stalls are judged by the run's own pace; a validation or a save is not one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.facts import Reason
from policies.stalls import Phase, StallLimits, judge, limit_seconds

LIMITS = StallLimits(launch_seconds=100.0, floor_seconds=60.0, factor=20.0)


def test_a_slow_model_is_not_taken_for_a_hung_one() -> None:
    assert judge(phase=Phase.TRAINING, silent_seconds=900.0, limits=LIMITS, recent_step_seconds=(50.0, 46.0)) is None
    stall = judge(phase=Phase.TRAINING, silent_seconds=900.0, limits=LIMITS, recent_step_seconds=(0.5,))
    assert stall is not None and stall.reason is Reason.STALLED and "900 s" in stall.because


def test_a_long_validation_or_save_is_no_stall_but_an_endless_one_is() -> None:
    for phase in (Phase.VALIDATION, Phase.SAVE):
        assert judge(phase=phase, silent_seconds=300.0, limits=LIMITS, recent_step_seconds=(0.5,)) is None
        assert judge(phase=phase, silent_seconds=500.0, limits=LIMITS, recent_step_seconds=(0.5,)) is not None
        assert judge(phase=phase, silent_seconds=500.0, limits=LIMITS, recent_phase_seconds=(100.0,)) is None


def test_before_the_first_step_the_launch_limit_rules_with_its_own_reason() -> None:
    assert judge(phase=Phase.LAUNCH, silent_seconds=99.0, limits=LIMITS) is None
    stall = judge(phase=Phase.LAUNCH, silent_seconds=101.0, limits=LIMITS)
    assert stall is not None and stall.reason is Reason.LAUNCH_TIMEOUT


@given(phase=st.sampled_from(list(Phase)), step=st.floats(0, 1e4), slower=st.floats(0, 1e4))
def test_slower_steps_never_shorten_the_patience(phase: Phase, step: float, slower: float) -> None:
    before = limit_seconds(phase=phase, limits=LIMITS, recent_step_seconds=(step,), recent_phase_seconds=())
    assert limit_seconds(phase=phase, limits=LIMITS, recent_step_seconds=(step, step + slower), recent_phase_seconds=()) >= before
