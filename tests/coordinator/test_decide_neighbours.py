"""Who is brought its data when: a host that takes it from a neighbour waits for that one, and for nobody who can't give it."""

from __future__ import annotations

from virtual_fleet import VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import DataFrom, HostPlan
from policies.errors import HostUnreachable
from policies.facts import GIB, CampaignStage

HOSTS = (
    HostPlan(name="a", root="/a", capacity_bytes=8 * GIB),
    HostPlan(name="b", root="/b", capacity_bytes=8 * GIB, data_from=DataFrom(host="a")),
    HostPlan(name="c", root="/c", capacity_bytes=8 * GIB, data_from=DataFrom(host="b")),
)


def launched(*names: str) -> VirtualCoordinator:
    fleet = VirtualCoordinator(*(VirtualHost(name) for name in "abc"))
    fleet.launch(plan(*(candidate(f"on-{name}", host=name) for name in names), hosts=HOSTS))
    return fleet


def staged_order(fleet: VirtualCoordinator) -> list[str | None]:
    return [job.host for job in fleet.done_jobs if job.kind == "stage"]


def test_each_waits_for_the_one_before_it_and_trains_as_soon_as_its_own_data_is_there() -> None:
    fleet = launched("a", "b", "c")
    fleet.until(CampaignStage.TRAINING)
    assert staged_order(fleet) == ["a"], "the first host trains while the others are brought their data"
    fleet.until(CampaignStage.EVALUATED)

    assert staged_order(fleet) == ["a", "b", "c"]


def test_a_neighbour_that_is_not_brought_anything_is_not_waited_for() -> None:
    fleet = launched("b", "c")
    fleet.until(CampaignStage.EVALUATED)

    assert staged_order(fleet) == ["b", "c"], "a is in the plan, and no candidate of it"


def test_a_neighbour_that_falls_silent_or_is_in_trouble_is_not_waited_for() -> None:
    fleet = launched("a", "b")
    fleet.failing["stage"] = HostUnreachable("no", where="a", what="its disk is full", fix="wait").to_json()
    for _ in range(600):
        fleet.round()
        if "b" in staged_order(fleet):
            break
    assert staged_order(fleet)[:4] == ["a", "a", "a", "b"], "b is tried although a has nothing"
