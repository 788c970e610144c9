"""After a boot of the host a supervisor that remembers nothing does not believe the wall clock by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_runs import spec_for

from fleetd import clock
from fleetd.host import rundir
from fleetd.host.supervisor import Supervisor
from fleetd.model import WantOrder
from fleetd.paths import HostPaths
from policies.facts import Want


@pytest.mark.parametrize(("boot", "is_trusted"), [("this", True), ("unknown", True), ("another", False)])
def test_a_new_run_whose_host_was_booted_since_its_order_came_waits_for_somebody_who_knows_the_time(
    tmp_path: Path, boot: str, is_trusted: bool,
) -> None:
    spec = spec_for()
    paths = HostPaths(tmp_path).run(spec.run_id)
    rundir.create_run(paths, spec, None, WantOrder(sequence=1, want=Want.RUN, actor="user:test", at=spec.created_at))
    if boot == "unknown":  # made by an older release
        paths.boot.unlink()
    elif boot == "another":
        paths.boot.write_text('{"boot_id": "the one before"}')
    supervisor = Supervisor(paths, spec)
    supervisor._resume(clock.read())
    anchor = supervisor.history.anchor
    assert anchor is not None and anchor.is_trusted is is_trusted
    assert anchor.least_now == (None if is_trusted else spec.created_at), "by its order alone"
    supervisor.spool.journal.close()
