"""What `prove_ssh.py cuts` calls a fault of a cut launch: each kind, planted."""

from __future__ import annotations

from typing import Any

import pytest
from launch_cuts import faults_of

WELL: dict[str, Any] = {
    "killed": 1, "trainers_most": 1, "attempts_ended": 0, "refused": "",
    "away": {"trainers": 1, "state": "starting", "pid": None}, "back": {"trainers": 1, "is_pid_told": True, "pid": 7},
}


@pytest.mark.parametrize(("changes", "words"), [
    ({"killed": 0}, "no connection to cut"),
    ({"trainers_most": 2}, "2 trainers at once"),
    ({"attempts_ended": 1}, "attempts ended"),
    ({"back": {"trainers": 0, "is_pid_told": False, "pid": 7}}, "0 trainers in the end"),
    ({"refused": "no answer"}, "1 trainers in the end, 0 expected"),
    ({"back": {"trainers": 1, "is_pid_told": False, "pid": 8}}, "status names pid 8"),
    ({"away": {"trainers": 1, "state": "queued", "pid": None}}, "status said queued while a trainer lived"),
    ({"away": {"trainers": 0, "state": "running", "pid": 7}}, "status said running while no trainer lived"),
])
def test_a_cut_launch_that_ended_badly_or_was_told_wrongly_is_a_fault(changes: dict[str, Any], words: str) -> None:
    assert faults_of(WELL) == []
    assert any(words in fault for fault in faults_of({**WELL, **changes}))
