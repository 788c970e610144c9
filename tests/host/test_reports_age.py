"""How old a look is, whatever the wall clock does meanwhile."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from fleetd.clock import Moment
from fleetd.host.reports import look_age_seconds
from fleetd.model import Observation
from policies.facts import RunState

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
SEEN = Observation(
    run_id="r", at=NOON, state=RunState.RUNNING, reason=None, detail="", attempt=1, pid=1, identity="verified", boot_id="a", boottime_seconds=1000.0,
)


def test_a_step_of_the_wall_clock_makes_no_look_newer_or_older() -> None:
    for stepped_hours in (-1, 0, 1):
        moment = Moment(now=NOON + timedelta(seconds=90, hours=stepped_hours), boottime_seconds=1090.0)
        assert look_age_seconds(SEEN, "a", moment) == 90.0


def test_a_look_from_before_the_boot_is_at_least_as_old_as_the_boot() -> None:
    assert look_age_seconds(SEEN, "b", Moment(now=NOON - timedelta(hours=1), boottime_seconds=40.0)) == 40.0
    assert look_age_seconds(SEEN, "b", Moment(now=NOON + timedelta(seconds=300), boottime_seconds=40.0)) == 300.0
