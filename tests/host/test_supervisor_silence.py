"""What a supervisor counts as its trainer's silence: only time in which it could have heard something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from host_runs import spec_for, want

from fleetd import clock
from fleetd.host import rundir
from fleetd.host.supervisor import UNWATCHED_SECONDS, Supervisor
from fleetd.paths import HostPaths
from policies.facts import Want


def test_while_every_look_fails_a_trainer_is_not_silent(tmp_path: Path) -> None:
    spec = spec_for()
    paths = HostPaths(tmp_path).run(spec.run_id)
    rundir.create_run(paths, spec, None, want(1, Want.RUN))
    supervisor, moment = Supervisor(paths, spec), clock.read()

    def after(seconds: float) -> clock.Moment:
        return replace(moment, boottime_seconds=moment.boottime_seconds + seconds)

    supervisor._silent_seconds(moment)
    for second in range(1, int(2 * UNWATCHED_SECONDS)):
        supervisor._note_gap(after(second))  # as far as a look comes that then fails
    assert supervisor._silent_seconds(after(2 * UNWATCHED_SECONDS)) < 1.0
    assert supervisor._silent_seconds(after(2 * UNWATCHED_SECONDS + 3.0)) > 2.0, "and what it could have heard counts"
    supervisor.spool.journal.close()
