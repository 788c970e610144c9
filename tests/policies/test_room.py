"""What fits a host: memory, caps that the kernel has to hold, and disk."""

from __future__ import annotations

from dataclasses import replace

from policies.facts import GIB, CapGrade
from policies.room import Offer, Wanted, room_findings

SPARK = Offer(
    host="spark-a", capacity_bytes=None, floor_bytes=4 * GIB, total_bytes=128 * GIB, available_bytes=100 * GIB, cap_grade="enforced",
    cap_means="cgroup v2", disk_free_bytes=500 * GIB, root="/srv/fleetd",
)
SMALL = replace(SPARK, host="spark-b", total_bytes=32 * GIB, available_bytes=30 * GIB)
RUN = Wanted(name="low", host="any", host_bytes=40 * GIB, accelerator_bytes=40 * GIB)


def said(*offers: Offer, wanted: tuple[Wanted, ...] = (RUN,)) -> list[tuple[str, bool, str]]:
    return [(each.host, each.refuses, each.title) for each in room_findings(wanted, offers)]


def test_what_fits_is_left_in_peace() -> None:
    assert said(SPARK) == []
    assert said(SPARK, SMALL) == [], "one that it fits is enough"


def test_what_fits_nowhere_is_refused_with_the_arithmetic() -> None:
    assert said(SMALL) == [("spark-b", True, "low can never start here")]
    assert said(SMALL, replace(SMALL, host="spark-c")) == [("spark-b", True, "low fits no host")]
    (found,) = room_findings((replace(RUN, host="spark-b"),), (SPARK, SMALL))
    assert found.title == "low can never start here" and "asks 40.0 GiB; 32.0 GiB capacity − 4.0 GiB floor = 28.0 GiB" in found.what


def test_the_accelerators_part_counts_where_there_is_one() -> None:
    shared = replace(SPARK, has_accelerator=True, total_bytes=64 * GIB, available_bytes=64 * GIB)
    assert said(shared) == [("spark-a", True, "low can never start here")]
    assert said(replace(shared, has_accelerator=False)) == []


def test_a_demand_for_an_enforced_cap_is_refused_where_none_can_hold_it() -> None:
    strict = replace(RUN, demand=CapGrade.ENFORCED)
    bare = replace(SPARK, cap_grade="absent", cap_means="no cgroup is mounted")
    (found,) = room_findings((strict,), (bare,))
    assert found.refuses and "here it is absent: no cgroup is mounted" in found.what
    assert said(bare, SPARK, wanted=(strict,)) == [] and said(bare) == []


def test_a_capacity_beyond_the_machine_is_refused() -> None:
    assert said(replace(SPARK, capacity_bytes=200 * GIB)) == [("spark-a", True, "the plan hands out more memory than there is")]


def test_memory_that_others_hold_now_is_told_and_what_displaced_work_gives_back_counts() -> None:
    full = replace(SPARK, available_bytes=10 * GIB)
    assert said(full) == [("spark-a", False, "nothing of this plan can start here now")]
    assert said(replace(full, freed_bytes=60 * GIB)) == []
    assert said(replace(full, available_bytes=None)) == [], "unknown is not full"


def test_a_disk_too_small_for_data_and_checkpoints_says_the_sum() -> None:
    (found,) = room_findings((), (replace(SPARK, disk_free_bytes=11 * GIB, data_bytes=2 * GIB, checkpoint_bytes=9 * GIB),))
    assert found.refuses and found.what == (
        "data 2.0 GiB + checkpoints about 9.0 GiB + slack 0.2 GiB = 11.2 GiB, but 11.0 GiB are free under /srv/fleetd"
    )
    (built,) = room_findings((), (replace(SPARK, disk_free_bytes=3 * GIB, data_bytes=2 * GIB, environment_bytes=6 * GIB),))
    assert built.what.startswith("data 2.0 GiB + environment 6.0 GiB + checkpoints about 0.0 GiB")
