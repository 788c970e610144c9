"""A reserved split is judged once, from rows that are exactly its own, with the frozen checkpoint and no other."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from campaign_kit import ACT, CAMPAIGN, SmallCampaign, flip_byte, later, scored_rows

from fleetd.coordinator.evaluation import MODELS, PreparedEvaluation, collect_evaluation, judge, prepare_evaluation
from fleetd.coordinator.ledger import read_ledger
from fleetd.coordinator.pipeline import freeze_campaign
from fleetd.coordinator.registration import register_rows
from fleetd.coordinator.staging import collect_role, role_of
from fleetd.coordinator.trees import tree_fault
from fleetd.paths import HostPaths
from policies.errors import CheckpointDamaged, DataDamaged, FreezeRefused, NotFound, RequestRefused
from policies.facts import Split
from policies.freeze import FrozenSelection, order_faults
from trainer.predictions import write_predictions

RUN = f"{CAMPAIGN}-evaluate-test"
VALUES = {"selected": 2.0, "base": 3.0, "unigram": 7.0}


@pytest.fixture
def frozen(campaign: SmallCampaign) -> FrozenSelection:
    campaign.add_run("best", [9.0, 6.0])
    campaign.select()
    return freeze_campaign(campaign.paths, CAMPAIGN, ACT)


def prepare(campaign: SmallCampaign, frozen: FrozenSelection, because: str = "", at: float = 0) -> PreparedEvaluation:
    digests = campaign.digests
    return prepare_evaluation(campaign.paths, campaign.plan, digests, Split.TEST, frozen, campaign.courier, later(at), because)


def evaluate(campaign: SmallCampaign, frozen: FrozenSelection, run_id: str = RUN, **changed: object) -> Path:
    """What a finished evaluation leaves in its run directory, written by the trainer's writer."""
    role = role_of(campaign.plan, Split.TEST)
    assert role is not None
    rows = register_rows(collect_role(campaign.plan.directory, role)).rows
    folder = HostPaths(campaign.base / "root").run(run_id).predictions("test")
    for name in MODELS:
        checkpoint = {"selected": frozen.checkpoint_digest, "base": frozen.base_checkpoint_digest, "unigram": None}[name]
        described = {
            "split": "test", "step": None, "dataset_digest": campaign.digests["test"], "checkpoint_digest": checkpoint,
            "numeric_mode": "fp32 cpu", **changed,
        }
        write_predictions(folder, name, scored_rows(rows, VALUES[name]), **described)
    return folder


def judged(campaign: SmallCampaign, frozen: FrozenSelection, run_id: str = RUN, at: float = 0) -> dict:
    collect_evaluation(campaign.courier, campaign.paths, Split.TEST, run_id)
    return judge(campaign.paths, campaign.plan, Split.TEST, frozen, run_id, later(at))


def kinds(campaign: SmallCampaign) -> list[str]:
    return [entry.kind for entry in read_ledger(campaign.paths.ledger).entries]


def test_everything_an_evaluation_needs_lies_on_the_host_and_the_opening_in_the_ledger(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepared = prepare(campaign, frozen)
    host = HostPaths(campaign.base / "root")
    for kind, name in (("datasets", "test"), ("datasets", "train"), ("models", "selected"), ("models", "base")):
        digest = prepared.digests[name]
        assert tree_fault(host.root / kind / digest, digest) is None
    source = campaign.run_paths(campaign.runs[0]).checkpoints / "step-000000100"
    model = host.models / frozen.checkpoint_digest
    assert {path.name: path.read_bytes() for path in model.iterdir()} == {path.name: path.read_bytes() for path in source.iterdir()}
    assert kinds(campaign) == ["registered", "frozen", "opened"]


def test_a_restarted_evaluation_shares_the_opening(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    first = prepare(campaign, frozen)
    again = prepare(campaign, frozen, at=60)
    assert (first.opened.shared, again.opened.shared, again.opened.number) == (False, True, 1)
    assert kinds(campaign).count("opened") == 1


def test_without_a_freeze_nothing_reaches_the_host(campaign: SmallCampaign) -> None:
    campaign.add_run("best", [9.0, 6.0])
    campaign.select()
    with pytest.raises(FreezeRefused):
        prepare(campaign, None)  # type: ignore[arg-type]
    assert kinds(campaign) == ["registered"]
    assert not (campaign.base / "root" / "models").exists()


def test_a_made_up_selection_brings_nothing_to_the_host(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    with pytest.raises(FreezeRefused):
        prepare(campaign, replace(frozen, checkpoint_digest=frozen.base_checkpoint_digest))
    assert not (campaign.base / "root" / "models").exists()


def test_a_frozen_checkpoint_that_does_not_verify_stops_before_the_opening(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    flip_byte(campaign.paths.store_checkpoints / frozen.checkpoint_digest / "model.safetensors")
    with pytest.raises(CheckpointDamaged):
        prepare(campaign, frozen)
    assert kinds(campaign) == ["registered", "frozen"]


def test_the_result_gives_every_language_for_all_three_models(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    result = judged(campaign, frozen)
    assert (result["split"], result["look"], result["exploratory"], result["rows"]) == ("test", 1, False, 6)
    assert set(result["models"]) == {"selected", "base", "unigram"}
    german = result["models"]["selected"]["families"]["de"]
    assert german["nll"] == pytest.approx(1.9)
    assert german["perplexity"] == pytest.approx(math.exp(1.9))
    assert german["rows"] == 2
    assert result["models"]["unigram"]["nll"] == pytest.approx(7.0)
    assert json.loads(campaign.paths.result("test").read_text()) == result
    assert kinds(campaign) == ["registered", "frozen", "opened", "judged"]
    assert order_faults(read_ledger(campaign.paths.ledger).events) == ()


def test_judging_again_gives_the_stored_result_and_adds_no_look(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    first = judged(campaign, frozen)
    before = campaign.paths.result("test").read_bytes(), campaign.paths.ledger.read_bytes()
    assert judged(campaign, frozen, at=60) == first
    assert (campaign.paths.result("test").read_bytes(), campaign.paths.ledger.read_bytes()) == before


def test_a_crash_between_the_result_and_the_ledger_is_made_good(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    ledger_before = campaign.paths.ledger.read_bytes()
    first = judged(campaign, frozen)
    campaign.paths.ledger.write_bytes(ledger_before)
    assert judged(campaign, frozen, at=60) == first
    assert kinds(campaign).count("judged") == 1


def test_a_second_look_needs_a_reason_and_its_numbers_are_marked_exploratory(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    first = judged(campaign, frozen)
    with pytest.raises(FreezeRefused):
        prepare(campaign, frozen, at=60)
    prepare(campaign, frozen, because="the first host computed in another precision", at=60)
    second_run = f"{RUN}-2"
    evaluate(campaign, frozen, second_run, numeric_mode="bf16 cuda")
    second = judged(campaign, frozen, second_run, at=90)
    assert (second["look"], second["exploratory"], second["because"]) == (2, True, "the first host computed in another precision")
    assert json.loads(campaign.paths.result("test").read_text()) == first
    assert json.loads(campaign.paths.result("test", 2).read_text()) == second


def test_other_predictions_for_a_judged_look_are_refused(campaign: SmallCampaign, frozen: FrozenSelection, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    judged(campaign, frozen)
    monkeypatch.setitem(VALUES, "selected", 1.0)
    evaluate(campaign, frozen, f"{RUN}-2")
    before = campaign.paths.result("test").read_bytes()
    with pytest.raises(RequestRefused, match="judged already"):
        judged(campaign, frozen, f"{RUN}-2", at=60)
    assert campaign.paths.result("test").read_bytes() == before


def test_nothing_is_judged_without_an_opening(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    evaluate(campaign, frozen)
    with pytest.raises(FreezeRefused, match="never opened"):
        judged(campaign, frozen)


def test_an_unfinished_evaluation_is_not_judged(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    folder = evaluate(campaign, frozen)
    (folder / "base.meta.json").unlink()
    with pytest.raises(NotFound):
        judged(campaign, frozen)
    assert not campaign.paths.result("test").exists()
    assert kinds(campaign)[-1] == "opened"


@pytest.mark.parametrize("changed", [{"checkpoint_digest": "0" * 64}, {"dataset_digest": "0" * 64}, {"split": "validation"}])
def test_predictions_of_another_model_or_other_data_are_not_judged(
    campaign: SmallCampaign, frozen: FrozenSelection, changed: dict[str, object],
) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen, **changed)
    with pytest.raises(DataDamaged) as caught:
        judged(campaign, frozen)
    assert caught.value.where.endswith("selected.jsonl")
    assert not campaign.paths.result("test").exists()


def test_a_changed_byte_in_the_stores_copy_is_not_judged(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    collect_evaluation(campaign.courier, campaign.paths, Split.TEST, RUN)
    path = campaign.paths.store_run(RUN) / "predictions" / "test" / "base.jsonl"
    flip_byte(path, path.read_bytes().index(b'"source_group":"') + 18)  # a byte that no figure depends on
    with pytest.raises(DataDamaged) as caught:
        judge(campaign.paths, campaign.plan, Split.TEST, frozen, RUN, ACT)
    assert "base.jsonl" in caught.value.where


def test_a_host_that_lost_the_source_data_still_evaluates_from_what_was_staged(campaign: SmallCampaign, frozen: FrozenSelection) -> None:
    prepare(campaign, frozen)
    evaluate(campaign, frozen)
    shutil.rmtree(campaign.base / "data")
    assert prepare(campaign, frozen, at=60).opened.shared
    assert judged(campaign, frozen)["rows"] == 6
    assert os.path.exists(campaign.paths.result("test"))
