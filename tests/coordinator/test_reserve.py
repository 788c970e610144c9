"""The reserve is measured again with every validation: a slower one moves the cutoff earlier, on the hosts too, and none moves it later."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_fleet import VirtualCoordinator, plan

from fleetd.coordinator.decide_campaigns import MODELS_EVALUATED
from policies.facts import CampaignStage, parse_moment


def training() -> VirtualCoordinator:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    return fleet


def validate(fleet: VirtualCoordinator, name: str, step: int, seconds_per_row: float) -> None:
    body = {"step": step, "value": 8.0, "rows": 10, "seconds": 10 * seconds_per_row, "sha256": f"{name}@{step}"}
    fleet.hosts["gx10"].tell(fleet.run(name).run_id, "validation", fleet.now, **body)
    fleet.round(work=False)
    fleet.round(work=False)  # the order is on its way, and answered


def test_a_slower_validation_moves_the_cutoff_earlier_by_what_the_evaluation_needs_and_every_host_is_told() -> None:
    fleet = training()
    given_at = fleet.campaign().cutoff_at
    rows = MODELS_EVALUATED * fleet.campaign().reserved_rows["test"]
    assert given_at == fleet.campaign().final_at - timedelta(seconds=600)
    slow = 1000.0 / rows

    validate(fleet, "low", 50, slow)

    moved_at = fleet.campaign().cutoff_at
    assert moved_at == fleet.campaign().final_at - timedelta(seconds=1.3 * 1000.0 + 60.0)
    told = {run_id: parse_moment(text) for run_id, text in fleet.hosts["gx10"].cutoffs.items()}
    assert told == dict.fromkeys((fleet.run("low").run_id, fleet.run("high").run_id), moved_at), "the other training gives its time as well"
    assert f"{rows} rows" in fleet.events("cutoff_moved")[0].because

    validate(fleet, "low", 60, slow / 100)

    assert fleet.campaign().cutoff_at == moved_at, "a quick one gives nothing back"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("low", "high")), st.floats(0.0, 20.0)), min_size=1, max_size=6))
def test_whatever_the_validations_measure_the_cutoff_only_moves_earlier(measured: list[tuple[str, float]]) -> None:
    fleet = training()
    before = fleet.campaign().cutoff_at
    for step, (name, seconds_per_row) in enumerate(measured):
        validate(fleet, name, 50 + step, seconds_per_row)
        after = fleet.campaign().cutoff_at
        assert after <= before
        before = after
    assert {parse_moment(text) for text in fleet.hosts["gx10"].cutoffs.values()} <= {before}, "what a host holds is the last that was decided"
