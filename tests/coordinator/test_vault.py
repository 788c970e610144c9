"""Reserved data stays in the vault until a selection is frozen, and every opening stands in the ledger before it happens."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from campaign_kit import ACT, CAMPAIGN, SmallCampaign, flip_byte, later, small_campaign

from fleetd.coordinator.ledger import enter, read_ledger
from fleetd.coordinator.pipeline import freeze_campaign
from fleetd.coordinator.registration import register_campaign
from fleetd.coordinator.staging import stage_data
from fleetd.coordinator.vault import open_split, read_frozen
from policies.errors import EXIT_FREEZE, DataDamaged, FreezeRefused, LedgerDamaged, NotFound, RequestRefused
from policies.facts import Split
from policies.freeze import JUDGED, OPENED, FrozenSelection, canonical, frozen_record, order_faults


def freeze(campaign: SmallCampaign) -> FrozenSelection:
    campaign.add_run("a", [9.0, 6.0])
    campaign.select()
    return freeze_campaign(campaign.paths, CAMPAIGN, ACT)


def openings(campaign: SmallCampaign) -> list[dict]:
    return [entry.body for entry in read_ledger(campaign.paths.ledger).entries if entry.kind == OPENED]


def test_reserved_splits_lie_in_the_vault_for_this_user_alone_and_on_no_host(campaign: SmallCampaign) -> None:
    stage_data(campaign.plan, campaign.digests, campaign.courier)
    vault = campaign.paths.vault
    assert sorted(os.listdir(vault)) == ["holdout", "test"]
    for place in [vault, *vault.rglob("*")]:
        assert place.stat().st_mode & 0o077 == 0, place
    staged = {path.name for path in (campaign.base / "root").rglob("*")}
    assert "val_000.bin" in staged
    assert not any(name.startswith(("test_", "hold_")) for name in staged)


def test_the_ledger_begins_with_what_was_registered_and_how_it_is_sealed(campaign: SmallCampaign) -> None:
    entry = read_ledger(campaign.paths.ledger).entries[0]
    assert entry.kind == "registered"
    assert entry.body["splits"]["test"] == {"digest": campaign.digests["test"], "files": 5, "sealed": "held back"}
    assert entry.body["digests"]["registered_validation"]


@pytest.mark.parametrize("proof", [None, {"checkpoint_digest": "d"}, "frozen", 1])
def test_without_a_frozen_selection_in_hand_nothing_opens(campaign: SmallCampaign, proof: object) -> None:
    with pytest.raises(FreezeRefused) as caught:
        open_split(campaign.paths, Split.TEST, proof, ACT)  # type: ignore[arg-type]
    assert caught.value.exit_code == EXIT_FREEZE
    assert openings(campaign) == []


def test_a_selection_that_somebody_made_up_opens_nothing(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    for forged in (replace(frozen, checkpoint_digest="0" * 64), replace(frozen, value=0.1)):
        with pytest.raises(FreezeRefused, match="test stays closed"):
            open_split(campaign.paths, Split.TEST, forged, ACT)
    assert openings(campaign) == []


def test_a_proof_without_a_freeze_in_the_ledger_opens_nothing(campaign: SmallCampaign) -> None:
    proof = freeze(small_campaign(campaign.base / "other"))
    with pytest.raises(FreezeRefused) as caught:
        open_split(campaign.paths, Split.TEST, proof, ACT)
    assert "no freeze" in caught.value.what


def test_one_changed_byte_in_frozen_json_closes_everything(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    text = campaign.paths.frozen.read_text()
    for changed in (text.replace('"step": 100', '"step": 101'), text.replace("held", "hold") + "x", "", text[:-20]):
        os.chmod(campaign.paths.frozen, 0o600)
        campaign.paths.frozen.write_text(changed)
        with pytest.raises(FreezeRefused, match="frozen selection was changed"):
            open_split(campaign.paths, Split.TEST, frozen, ACT)
    campaign.paths.frozen.unlink()
    with pytest.raises(FreezeRefused):
        open_split(campaign.paths, Split.TEST, frozen, ACT)
    assert openings(campaign) == []


def test_a_ledger_whose_end_was_cut_off_says_so_instead_of_asking_for_a_freeze(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    lines = campaign.paths.ledger.read_text().splitlines(keepends=True)
    campaign.paths.ledger.write_text("".join(lines[:1]))
    with pytest.raises(FreezeRefused) as caught:
        open_split(campaign.paths, Split.TEST, frozen, ACT)
    assert "gone from the ledger" in caught.value.what and "restore ledger.jsonl" in caught.value.fix
    campaign.paths.ledger.write_text("".join(lines))
    other = replace(frozen, value=0.1)
    os.chmod(campaign.paths.frozen, 0o600)
    campaign.paths.frozen.write_bytes(canonical(frozen_record(other)))
    with pytest.raises(FreezeRefused, match="frozen selection was changed") as caught:
        open_split(campaign.paths, Split.TEST, other, ACT)
    assert caught.value.where == str(campaign.paths.frozen) and "restore frozen.json" in caught.value.fix


def test_an_opening_stands_in_the_ledger_and_gives_the_data(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    opened = open_split(campaign.paths, Split.TEST, frozen, ACT)
    assert (opened.number, opened.shared, opened.digest) == (1, False, campaign.digests["test"])
    assert (opened.folder / "test_000.bin").read_bytes() == (campaign.base / "data" / "test_000.bin").read_bytes()
    assert openings(campaign) == [{
        "split": "test", "number": 1, "dataset_digest": opened.digest, "because": "", "actor": "user:tester", "sealed": "held back",
        "frozen_sha256": read_ledger(campaign.paths.ledger).first("frozen").body["frozen_sha256"],
    }]
    assert order_faults(read_ledger(campaign.paths.ledger).events) == ()


def test_opening_again_before_it_was_judged_adds_no_look(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    open_split(campaign.paths, Split.TEST, frozen, ACT)
    before = campaign.paths.ledger.read_bytes()
    again = open_split(campaign.paths, Split.TEST, frozen, later(60), "the host lost power")
    assert (again.number, again.shared) == (1, True)
    assert campaign.paths.ledger.read_bytes() == before


def test_after_the_judgement_a_second_look_needs_a_written_reason(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    open_split(campaign.paths, Split.TEST, frozen, ACT)
    enter(campaign.paths.ledger, JUDGED, {"split": "test", "number": 1, "results_sha256": "r"}, ACT)
    with pytest.raises(FreezeRefused) as caught:
        open_split(campaign.paths, Split.TEST, frozen, later(60), "   ")
    assert "written reason" in caught.value.what
    again = open_split(campaign.paths, Split.TEST, frozen, later(60), "wrong precision on the first host")
    assert again.number == 2
    assert [body["because"] for body in openings(campaign)] == ["", "wrong precision on the first host"]
    assert open_split(campaign.paths, Split.HOLDOUT, frozen, later(90)).number == 1


def test_a_split_that_the_plan_lacks_is_not_found(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    with pytest.raises(NotFound) as caught:
        open_split(campaign.paths, Split.CALIBRATION, frozen, ACT)
    assert "holdout, test" in caught.value.what


def test_a_changed_byte_in_the_vault_is_found_before_the_look_is_spent(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    flip_byte(campaign.paths.vault / "test" / "test_000.bin")
    with pytest.raises(DataDamaged) as caught:
        open_split(campaign.paths, Split.TEST, frozen, ACT)
    assert caught.value.where.endswith("vault/test/test_000.bin")
    assert openings(campaign) == []


def test_a_damaged_ledger_opens_nothing(campaign: SmallCampaign) -> None:
    frozen = freeze(campaign)
    flip_byte(campaign.paths.ledger)
    with pytest.raises(LedgerDamaged):
        open_split(campaign.paths, Split.TEST, frozen, ACT)


def test_registering_again_changes_nothing_and_changed_data_is_refused(campaign: SmallCampaign) -> None:
    before = campaign.paths.ledger.read_bytes()
    assert register_campaign(campaign.paths, campaign.plan, later(10)) == campaign.digests
    assert campaign.paths.ledger.read_bytes() == before
    (campaign.base / "data" / "tokenizer.model").write_bytes(b"another tokenizer")
    with pytest.raises((DataDamaged, RequestRefused)):
        register_campaign(campaign.paths, campaign.plan, later(20))
    assert campaign.paths.ledger.read_bytes() == before


def test_before_the_freeze_there_is_no_frozen_selection(campaign: SmallCampaign, tmp_path: Path) -> None:
    assert read_frozen(campaign.paths) is None
    frozen = freeze(campaign)
    assert read_frozen(campaign.paths) == frozen
    assert json.loads(campaign.paths.frozen.read_text())["checkpoint_digest"] == frozen.checkpoint_digest
