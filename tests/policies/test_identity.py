"""Only an exact match of everything recorded may be signalled; what cannot be read proves nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.facts import ProcessIdentity
from policies.identity import ProcessSight, Standing, classify

RECORDED = ProcessIdentity(boot_id="boot-1", pid=4242, start_ticks=1000, uid=1500, argv=("python", "-m", "trainer"), pidfd_inode=77)
SEEN = ProcessSight(
    boot_id="boot-1", pid=4242, exists=True, state="S", start_ticks=1000, uid=1500, argv=("python", "-m", "trainer"), pidfd_inode=77
)


def test_a_process_that_matches_in_every_field_is_verified():
    verdict = classify(RECORDED, SEEN)

    assert verdict.standing is Standing.VERIFIED
    assert verdict.is_verified
    assert not verdict.is_dead


def test_after_another_boot_the_recorded_process_is_gone_even_if_all_else_matches():
    verdict = classify(RECORDED, replace(SEEN, boot_id="boot-2"))

    assert verdict.standing is Standing.GONE
    assert verdict.is_dead


def test_a_pid_that_nobody_has_is_gone():
    assert classify(RECORDED, ProcessSight(boot_id="boot-1", pid=4242, exists=False)).standing is Standing.GONE


@pytest.mark.parametrize("state", ["Z", "X", "x"])
def test_a_zombie_is_gone(state):
    verdict = classify(RECORDED, replace(SEEN, state=state, argv=None))

    assert verdict.standing is Standing.GONE
    assert verdict.is_dead


def test_a_zombie_whose_other_threads_live_is_neither_gone_nor_ours_to_signal():
    verdict = classify(RECORDED, replace(SEEN, state="Z", argv=None, unreadable=("state", "argv")))

    assert verdict.standing is Standing.UNKNOWN
    assert not verdict.is_dead


@pytest.mark.parametrize(
    ("changed", "found", "is_dead"),
    [
        ({"start_ticks": 1001}, "tick 1001", True),
        ({"pidfd_inode": 78}, "inode 78", True),
        ({"uid": 0}, "uid 0", False),
        ({"argv": ("sleep", "60")}, "sleep 60", False),
    ],
)
def test_a_stranger_is_named_with_what_was_found(changed, found, is_dead):
    verdict = classify(RECORDED, replace(SEEN, **changed))

    assert verdict.standing is Standing.STRANGER
    assert found in verdict.explanation
    assert str(verdict).startswith("stranger: pid 4242")
    assert verdict.is_dead is is_dead


@pytest.mark.parametrize(
    "hidden",
    [{"start_ticks": None}, {"uid": None}, {"argv": None}, {"unreadable": ("pidfd",)}, {"unreadable": ("uid",), "uid": None}],
)
def test_anything_unreadable_means_cannot_verify(hidden):
    verdict = classify(RECORDED, replace(SEEN, **hidden))

    assert verdict.standing is Standing.UNKNOWN
    assert str(verdict).startswith("cannot verify: ")
    assert not verdict.is_dead


def test_another_start_time_proves_a_stranger_whatever_else_is_unreadable():
    hidden = replace(SEEN, start_ticks=5, uid=None, argv=None, unreadable=("pidfd", "uid", "argv"))

    assert classify(RECORDED, hidden).standing is Standing.STRANGER


def test_kernels_without_pidfd_inodes_are_judged_by_the_other_fields():
    assert classify(replace(RECORDED, pidfd_inode=None), SEEN).standing is Standing.VERIFIED
    assert classify(RECORDED, replace(SEEN, pidfd_inode=None)).standing is Standing.VERIFIED


def test_a_very_long_command_line_is_shortened_in_the_explanation():
    verdict = classify(RECORDED, replace(SEEN, argv=("x" * 10_000,)))

    assert len(verdict.explanation) < 500
