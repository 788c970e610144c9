"""A pair of clocks on disk: whoever starts after a step of the wall clock still knows what time it is."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetd import clock as clocks
from fleetd.clock import Moment
from fleetd.files import write_record
from fleetd.kept_clock import KEEP_SECONDS, KeptClock, KeptPair, anchor_for, confirmed_pair, counted
from policies.deadlines import ClockPair

START = datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc)
HOUR = 3600.0


def reading(elapsed: float, *, step: float = 0.0) -> ClockPair:
    return ClockPair(now=START + timedelta(seconds=elapsed + step), boottime_seconds=1000.0 + elapsed)


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_step_while_nobody_ran_is_seen_by_the_next_process(tmp_path: Path, step: float) -> None:
    KeptClock(tmp_path / "clock.json").judge(reading(0.0))

    later = KeptClock(tmp_path / "clock.json").judge(reading(90.0, step=step))

    assert later.now == START + timedelta(seconds=90)
    assert later.alarm is not None and later.step_seconds == step


@pytest.mark.parametrize("step", [HOUR, -HOUR])
def test_a_step_is_remembered_through_any_number_of_processes_until_a_person_removes_the_file(tmp_path: Path, step: float) -> None:
    path = tmp_path / "clock.json"
    for elapsed in (0.0, 100.0, 200.0, 300.0):
        time = KeptClock(path).judge(reading(elapsed, step=step if elapsed else 0.0))
    assert time.now == START + timedelta(seconds=300)

    path.unlink()

    assert KeptClock(path).judge(reading(400.0, step=step)).now == START + timedelta(seconds=400 + step)


def test_a_clock_that_only_drifts_is_followed(tmp_path: Path) -> None:
    clock = KeptClock(tmp_path / "clock.json")
    for minute in range(30):
        time = clock.judge(reading(60.0 * minute, step=0.5 * minute))
        assert time.alarm is None
    assert time.now == START + timedelta(seconds=60 * 29 + 14.5), "far beyond the tolerance by now, in small steps"
    assert KeptClock(tmp_path / "clock.json").judge(reading(60.0 * 30, step=15.0)).alarm is None


def test_after_a_reboot_the_wall_clock_is_believed_but_time_never_runs_back(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    write_record(path, KeptPair(boot_id="an earlier boot", now=START, boottime_seconds=5000.0))

    assert anchor_for(path, reading(HOUR)) == reading(HOUR)
    assert anchor_for(path, reading(-HOUR)).now == START


def test_what_was_kept_is_renewed_once_a_minute_and_a_damaged_record_is_none(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    clock = KeptClock(path)
    clock.judge(reading(0.0))
    first = path.read_bytes()
    clock.judge(reading(KEEP_SECONDS - 1))
    assert path.read_bytes() == first
    clock.judge(reading(KEEP_SECONDS))
    assert path.read_bytes() != first

    path.write_text("{ torn")

    assert anchor_for(path, reading(70.0, step=HOUR)) == reading(70.0, step=HOUR)


def test_a_disk_that_takes_no_record_changes_no_time(tmp_path: Path) -> None:
    clock = KeptClock(tmp_path / "no such folder" / "clock.json")
    clock.judge(reading(0.0))
    assert clock.judge(reading(10.0, step=HOUR)).now == START + timedelta(seconds=10)


def test_a_process_that_starts_after_the_step_counts_from_what_its_machine_has_counted(tmp_path: Path) -> None:
    KeptClock(tmp_path / "clock.json").judge(reading(0.0))
    stepped = reading(30.0, step=-HOUR)

    moment = counted(tmp_path / "clock.json", Moment(now=stepped.now, boottime_seconds=stepped.boottime_seconds))

    assert moment == Moment(now=START + timedelta(seconds=30), boottime_seconds=1030.0)


@pytest.mark.parametrize("wrong", [-2 * HOUR, 3 * HOUR])
def test_a_coordinator_corrects_a_clock_that_is_wrong_since_the_boot_once_and_the_next_process_knows(tmp_path: Path, wrong: float) -> None:
    path = tmp_path / "clock.json"
    agent = KeptClock(path)
    agent.judge(reading(0.0, step=wrong))
    assert confirmed_pair(path) is None

    agent.confirm(reading(5.0), reading(6.0, step=wrong))

    told = confirmed_pair(path)
    assert told is not None and told == reading(6.0)
    assert counted(path, Moment(now=reading(60.0, step=wrong).now, boottime_seconds=1060.0)).now == START + timedelta(seconds=60)
    later = KeptClock(path)
    later.confirm(reading(70.0, step=HOUR), reading(70.0, step=wrong))
    assert later.judge(reading(80.0, step=wrong)).now == START + timedelta(seconds=80), "said once a boot"


def test_a_coordinator_that_agrees_changes_nothing_but_that_it_has_said_so(tmp_path: Path) -> None:
    agent = KeptClock(tmp_path / "clock.json")
    agent.confirm(reading(5.0, step=2.0), reading(5.0))
    assert agent.trusted == reading(5.0) and confirmed_pair(tmp_path / "clock.json") == reading(5.0)


def test_what_a_coordinator_said_in_an_earlier_boot_confirms_nothing_in_this_one(tmp_path: Path) -> None:
    path = tmp_path / "clock.json"
    write_record(path, KeptPair(boot_id="an earlier boot", now=START, boottime_seconds=5000.0, is_confirmed=True))
    assert confirmed_pair(path) is None and not KeptClock(path).is_confirmed


def test_who_was_held_up_between_the_two_clocks_looks_again_and_sees_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
    looks, walls = iter((100.0, 130.0, 130.0, 130.0)), iter((wall, wall + timedelta(seconds=30)))
    monkeypatch.setattr(clocks, "boottime_seconds", lambda: next(looks))
    monkeypatch.setattr(clocks, "datetime", SimpleNamespace(now=lambda zone: next(walls)))

    moment = clocks.read()

    assert (moment.now, moment.boottime_seconds) == (wall + timedelta(seconds=30), 130.0), "both of one moment"


def test_a_machine_on_which_nobody_ever_sees_both_clocks_together_still_has_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter(range(0, 1000, 7))
    monkeypatch.setattr(clocks, "boottime_seconds", lambda: float(next(looks)))
    assert clocks.read().boottime_seconds % 7 == 0
