"""`fleetd check`: the look that a launch would take at every host of a plan, without a launch. Asked of the running coordinator, whose keys
and user count; where none runs, `python -m fleetd.coordinator.check` is the same for one plan on standard input.

    local   the release lies in a temporary folder: nothing is made in the host's root but the look's own file, which goes again
    ssh     the host's own release folder, as the session that a launch begins with would make it; no owner is recorded, no agent started
"""

from __future__ import annotations

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from fleetd import clock
from fleetd.campaign import HostPlan, Plan
from fleetd.coordinator.couriers import LocalCourier
from fleetd.coordinator.preflight import HOSTS_AT_ONCE_MAX, HostLook, Preflight, judge, look_at, parity_of
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.ssh_courier import SshCourier
from fleetd.coordinator.ssh_road import SshRoad
from fleetd.coordinator.staging import source_faults
from fleetd.files import read_record
from fleetd.model import Owner
from fleetd.paths import StatePaths, state_root
from fleetd.wire import LINE_BYTES_MAX, WireError, decode, dumps, loads
from policies.errors import ExplainedError, RequestRefused
from policies.surveys import Finding

CONNECT_SECONDS_MAX = 30.0
NOBODY = Owner(coordinator_id="check", generation=0)
"""Never told to a host: a look needs no owner."""


def check_hosts(plan: Plan, *, own_python: str, releases: Releases, coordinator_id: str | None) -> Preflight:
    """Every host side by side; one that can't be looked at is a finding, and the others are looked at all the same."""
    def look(host: HostPlan) -> HostLook | ExplainedError:
        try:
            return (_look_here if host.is_local else _look_there)(plan, host, own_python, releases)
        except ExplainedError as fault:
            return fault
        except OSError as fault:
            return RequestRefused(f"host {host.name} can't be looked at", where=host.place, what=str(fault), fix="mend that, then check again")

    with ThreadPoolExecutor(HOSTS_AT_ONCE_MAX, thread_name_prefix="check") as workers:
        found = dict(zip((host.name for host in plan.hosts), workers.map(look, plan.hosts), strict=True))
    looks = {name: each for name, each in found.items() if isinstance(each, HostLook)}
    faults = {name: each for name, each in found.items() if isinstance(each, ExplainedError)}
    data = tuple(Finding(host="", refuses=True, title=each.title, what=f"{each.where}: {each.what}", fix=each.fix) for each in source_faults(plan))
    unseen = tuple(Finding(host=name, refuses=True, title=each.title, what=each.what, fix=each.fix) for name, each in faults.items())
    silent = {name: each.to_json() for name, each in faults.items()}
    judged = judge(plan, looks, coordinator_id)
    return Preflight(at=clock.read().now, parity=parity_of(plan), looks=looks, findings=(*data, *unseen, *judged), silent=silent)


def _look_here(plan: Plan, host: HostPlan, own_python: str, releases: Releases) -> HostLook:
    return look_at(plan, host, LocalCourier(host.name, Path(host.root), host.agent_python), releases.placed_here(), own_python)


def _look_there(plan: Plan, host: HostPlan, own_python: str, releases: Releases) -> HostLook:
    """Over a connection of its own, which ends with the look."""
    road, until_seconds = SshRoad(host, NOBODY), time.monotonic() + CONNECT_SECONDS_MAX
    courier = SshCourier(road)
    try:
        road.connect(until_seconds)
        with closing(road.porter(until_seconds)):  # it says what machine it is, which decides what it is brought
            release = releases.placed_on(courier)
        return look_at(plan, host, courier, release, own_python)
    finally:
        courier.close()
        road.drop()


def own_id(paths: StatePaths) -> str | None:
    """As hosts know the coordinator of this state directory: empty before its first start, None where that can't be read here. A coordinator
    whose identity was moved away finds it again in its journal, which is its own to open."""
    try:
        return str(read_record(paths.identity)["coordinator_id"])
    except FileNotFoundError:
        return None if paths.journal.exists() else ""
    except (OSError, WireError, KeyError, TypeError):
        return None


def main() -> int:
    """A plan as JSON on standard input, a Preflight on standard output. What can't be understood is our own mistake."""
    try:
        plan = decode(Plan, loads(sys.stdin.buffer.read(LINE_BYTES_MAX)))
    except WireError as fault:
        print(f"no plan: {fault}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="fleetd-check-") as folder:
        releases = Releases(StatePaths(Path(folder)), wheels=StatePaths(state_root()).wheels)
        print(dumps(check_hosts(plan, own_python=sys.executable, releases=releases, coordinator_id=own_id(StatePaths(state_root())))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
