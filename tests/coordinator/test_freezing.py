"""Freezing makes the choice final: written once, entered into the ledger, the same after a crash at any point."""

from __future__ import annotations

import json
import shutil

import pytest
from campaign_kit import ACT, CAMPAIGN, SmallCampaign, flip_byte, later

from fleetd.campaign import SelectionTerms
from fleetd.coordinator.ledger import read_ledger
from fleetd.coordinator.pipeline import freeze_campaign, select_campaign
from policies.errors import CheckpointDamaged, DataDamaged, ExplainedError, FreezeRefused, LedgerDamaged, RequestRefused
from policies.freeze import FROZEN, frozen_digest


@pytest.fixture
def selected(campaign: SmallCampaign) -> SmallCampaign:
    campaign.add_run("best", [9.0, 6.0])
    campaign.add_run("second", [9.1, 7.0, 9.9])
    campaign.add_run("command", [], contract=False)
    campaign.select()
    return campaign


def freezes(campaign: SmallCampaign) -> list[dict]:
    return [entry.body for entry in read_ledger(campaign.paths.ledger).entries if entry.kind == FROZEN]


def test_the_frozen_selection_holds_the_choice_its_inputs_and_what_was_left_out(selected: SmallCampaign) -> None:
    frozen = freeze_campaign(selected.paths, CAMPAIGN, ACT)
    best = selected.runs[0]
    assert (frozen.candidate, frozen.step, frozen.checkpoint_digest) == ("best", 100, best.saved[1].digest)
    assert (frozen.base_checkpoint_digest, frozen.frozen_at, frozen.code_digest) == (best.saved[0].digest, ACT.at, "c0de")
    assert {row.candidate for row in frozen.exclusions} == {"command"}
    assert len(frozen.candidates) == 5
    assert frozen.inputs[f"predictions/{best.run_id}/100"] == best.validated[1].sha256
    assert frozen.inputs["dataset/validation"] == selected.digests["validation"]
    assert freezes(selected) == [{"frozen_sha256": frozen_digest(frozen), "checkpoint_digest": frozen.checkpoint_digest, "actor": "user:tester"}]


def test_freezing_again_changes_neither_the_file_nor_the_ledger(selected: SmallCampaign) -> None:
    first = freeze_campaign(selected.paths, CAMPAIGN, ACT)
    before = selected.paths.frozen.read_bytes(), selected.paths.ledger.read_bytes()
    assert freeze_campaign(selected.paths, CAMPAIGN, later(60)) == first
    assert (selected.paths.frozen.read_bytes(), selected.paths.ledger.read_bytes()) == before


def test_a_crash_between_the_file_and_the_ledger_is_made_good(selected: SmallCampaign) -> None:
    ledger_before = selected.paths.ledger.read_bytes()
    first = freeze_campaign(selected.paths, CAMPAIGN, ACT)
    selected.paths.ledger.write_bytes(ledger_before)
    assert freezes(selected) == []
    assert freeze_campaign(selected.paths, CAMPAIGN, later(60)) == first
    assert [body["frozen_sha256"] for body in freezes(selected)] == [frozen_digest(first)]


def test_the_choice_cannot_be_made_again_after_the_freeze(selected: SmallCampaign) -> None:
    before = selected.select()
    freeze_campaign(selected.paths, CAMPAIGN, ACT)
    selected.add_run("late", [9.0, 0.5])
    assert selected.select() == before
    assert json.loads(selected.paths.selection.read_text()) == before


def test_another_frozen_selection_beside_the_ledgers_is_refused(selected: SmallCampaign) -> None:
    frozen = freeze_campaign(selected.paths, CAMPAIGN, ACT)
    record = json.loads(selected.paths.frozen.read_text())
    selected.paths.frozen.unlink()
    selected.paths.frozen.write_text(json.dumps({**record, "step": 200}))
    with pytest.raises(FreezeRefused) as caught:
        freeze_campaign(selected.paths, CAMPAIGN, later(60))
    assert frozen_digest(frozen) in caught.value.what
    assert len(freezes(selected)) == 1


def test_a_lost_frozen_file_is_not_replaced_by_a_newer_choice(selected: SmallCampaign) -> None:
    freeze_campaign(selected.paths, CAMPAIGN, ACT)
    selected.paths.frozen.unlink()
    with pytest.raises(FreezeRefused):
        freeze_campaign(selected.paths, CAMPAIGN, later(60))


@pytest.mark.parametrize("values", [[9.0, 9.0], [9.0, 9.5]])
def test_without_an_improvement_nothing_is_frozen(campaign: SmallCampaign, values: list[float]) -> None:
    campaign.add_run("a", values)
    record = campaign.select()
    assert (record["outcome"], record["checkpoint_digest"], record["step"]) == ("no_improvement", None, None)
    with pytest.raises(FreezeRefused) as caught:
        freeze_campaign(campaign.paths, CAMPAIGN, ACT)
    assert "no_improvement" in caught.value.what
    assert not campaign.paths.frozen.exists()
    assert freezes(campaign) == []


def test_nothing_is_frozen_before_anything_is_selected(campaign: SmallCampaign) -> None:
    with pytest.raises(FreezeRefused, match="nothing is selected"):
        freeze_campaign(campaign.paths, CAMPAIGN, ACT)


@pytest.mark.parametrize("step", [0, 1])
def test_a_checkpoint_that_changed_after_the_choice_is_not_frozen(selected: SmallCampaign, step: int) -> None:
    flip_byte(selected.paths.store_checkpoints / selected.runs[0].saved[step].digest / "model.safetensors")
    with pytest.raises(CheckpointDamaged):
        freeze_campaign(selected.paths, CAMPAIGN, ACT)
    assert not selected.paths.frozen.exists()


def test_evidence_that_changed_after_the_choice_is_not_frozen(selected: SmallCampaign) -> None:
    path = selected.paths.store_run(selected.runs[1].run_id) / "predictions" / "validation" / "step-000000200.meta.json"
    flip_byte(path)
    with pytest.raises(DataDamaged) as caught:
        freeze_campaign(selected.paths, CAMPAIGN, ACT)
    assert caught.value.where == str(path)


def test_a_damaged_ledger_stops_the_choice_and_the_freeze(selected: SmallCampaign) -> None:
    flip_byte(selected.paths.ledger)
    for act in (lambda: selected.select(), lambda: freeze_campaign(selected.paths, CAMPAIGN, ACT)):
        with pytest.raises(LedgerDamaged):
            act()


def test_an_unknown_criterion_is_refused(campaign: SmallCampaign) -> None:
    with pytest.raises(RequestRefused):
        select_campaign(campaign.paths, CAMPAIGN, SelectionTerms(criterion="accuracy"), (), {}, ACT)


def test_a_store_that_was_wiped_is_filled_again_from_the_hosts(selected: SmallCampaign) -> None:
    before = selected.select()
    shutil.rmtree(selected.paths.store)
    assert selected.select() == before
    try:
        freeze_campaign(selected.paths, CAMPAIGN, ACT)
    except ExplainedError as fault:
        pytest.fail(str(fault))
