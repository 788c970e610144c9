"""Runs that a host tells of and this history does not know: their campaign was lost with a damaged or an older journal. Pure.

They keep their caps and deadlines by themselves. Here they are shown, counted where memory is handed out, and stopped when asked;
they are never judged, copied or chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.coordinator.sight import HostSight, Sight
from fleetd.fleet import Fleet
from fleetd.model import RunReport
from policies.lifecycle import SETTLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Stranger:
    host: str
    report: RunReport

    @property
    def run_id(self) -> str:
        return self.report.run_id

    @property
    def state(self) -> str:
        look = self.report.observation
        return "in a state that nobody has seen" if look is None else look.state.value

    @property
    def pid(self) -> int | None:
        return self.report.observation.pid if self.report.observation is not None else None

    @property
    def words(self) -> str:
        alive = "its supervisor lives" if self.report.supervisor == "alive" else f"supervisor {self.report.supervisor}"
        return f"{self.host} has a run that nobody here knows: {self.run_id}, pid {self.pid or 'unknown'}, {self.state}, {alive}"


def strangers(fleet: Fleet, sight: Sight) -> tuple[Stranger, ...]:
    """All of them, as each host last told, by host and id."""
    return tuple(each for name in sorted(sight.hosts) for each in strangers_on(fleet, name, sight.hosts[name]))


def strangers_on(fleet: Fleet, name: str, host: HostSight | None) -> tuple[Stranger, ...]:
    if host is None or host.reports is None:
        return ()
    told = (report for report in host.reports if not _is_known(fleet, name, report.run_id) and not _is_over(report))
    return tuple(Stranger(host=name, report=report) for report in told)


def memory_bytes(stranger: Stranger, *, has_accelerator: bool) -> int:
    """What its order lets it use; where that can't be read, what it was seen to use."""
    spec, look = stranger.report.spec, stranger.report.observation
    if spec is not None:
        return spec.caps.host_bytes + (spec.caps.accelerator_bytes if has_accelerator else 0)
    seen = look.memory if look is not None else None
    return (seen.host_bytes or 0) + (seen.accelerator_bytes or 0) if seen is not None else 0


def _is_known(fleet: Fleet, host: str, run_id: str) -> bool:
    run, place = fleet.runs.get(run_id), fleet.hosts.get(host)
    is_ended = place is not None and run_id in place.superseded  # a fence has given up whatever is left of it there
    return is_ended or (run is not None and run.host == host)


def _is_over(report: RunReport) -> bool:
    return report.observation is not None and report.observation.state in SETTLED and report.supervisor == "gone"
