"""Copies of a run's work: verified before they get their name, the same after any number of tries."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from campaign_kit import ACT, CAMPAIGN, SmallCampaign, flip_byte

from fleetd.coordinator.pipeline import freeze_campaign
from fleetd.coordinator.replication import (
    prune_checkpoints,
    replicate_checkpoint,
    replicate_logs,
    replicate_predictions,
    stored_checkpoint_fault,
)
from fleetd.paths import RunPaths
from policies.errors import CheckpointDamaged, DataDamaged, NotFound, RequestRefused


@pytest.fixture
def run(campaign: SmallCampaign) -> RunPaths:
    return campaign.run_paths(campaign.add_run("a", [9.0, 6.0]))


def test_predictions_arrive_as_they_are_and_say_what_the_trainer_claims(campaign: SmallCampaign, run: RunPaths) -> None:
    copy = replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    stored = campaign.paths.store_run(run.root.name) / "predictions" / "validation"
    assert sorted(os.listdir(stored)) == ["step-000000100.jsonl", "step-000000100.meta.json"]
    for name in os.listdir(stored):
        assert (stored / name).read_bytes() == (run.predictions("validation") / name).read_bytes()
    assert (copy.step, copy.sha256, copy.checkpoint_digest) == (100, campaign.runs[0].validated[1].sha256, campaign.runs[0].saved[1].digest)
    assert copy.value == pytest.approx(6.0)


def test_a_copy_that_is_there_is_not_fetched_again_and_needs_no_host(campaign: SmallCampaign, run: RunPaths) -> None:
    first = replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    os.rename(run.root, run.root.with_name("gone"))
    assert replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100) == first
    with pytest.raises(NotFound):
        replicate_predictions(campaign.courier, campaign.paths, run.root.name, 0)


def test_a_crash_between_rows_and_meta_is_made_good_by_the_next_try(campaign: SmallCampaign, run: RunPaths) -> None:
    first = replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    stored = campaign.paths.store_run(run.root.name) / "predictions" / "validation"
    (stored / "step-000000100.meta.json").unlink()
    (stored / "step-000000100.jsonl").write_bytes(b"half a ro")
    (stored / ".tmp-step-000000100").mkdir()
    assert replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100) == first
    assert sorted(os.listdir(stored)) == ["step-000000100.jsonl", "step-000000100.meta.json"]


def test_a_validation_that_was_repeated_replaces_the_older_copy(campaign: SmallCampaign, run: RunPaths) -> None:
    replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    newer = campaign.write_validation(run.root.name, 100, campaign.runs[0].saved[1].digest, 5.5)
    copy = replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100, newer)
    assert (copy.sha256, copy.value) == (newer, pytest.approx(5.5))


@pytest.mark.parametrize("name", ["step-000000100.jsonl", "step-000000100.meta.json"])
def test_rows_that_do_not_verify_are_not_stored(campaign: SmallCampaign, run: RunPaths, name: str) -> None:
    path = run.predictions("validation") / name
    flip_byte(path, path.read_bytes().index(b"sha256") + 12 if name.endswith("meta.json") else None)
    with pytest.raises(DataDamaged) as caught:
        replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    assert "step-000000100" in caught.value.where
    assert not list((campaign.paths.store_run(run.root.name) / "predictions" / "validation").iterdir())


def test_rows_other_than_the_host_told_of_are_refused_with_both_digests(campaign: SmallCampaign, run: RunPaths) -> None:
    told = campaign.runs[0].validated[1].sha256
    other = campaign.write_validation(run.root.name, 100, campaign.runs[0].saved[1].digest, 5.5)
    with pytest.raises(DataDamaged) as caught:
        replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100, told)
    assert told in caught.value.what
    assert other in caught.value.what


def test_a_changed_copy_in_the_store_is_damage_and_not_fetched_over(campaign: SmallCampaign, run: RunPaths) -> None:
    replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    stored = campaign.paths.store_run(run.root.name) / "predictions" / "validation" / "step-000000100.jsonl"
    flip_byte(stored)
    changed = stored.read_bytes()
    with pytest.raises(DataDamaged) as caught:
        replicate_predictions(campaign.courier, campaign.paths, run.root.name, 100)
    assert caught.value.where == str(stored)
    assert stored.read_bytes() == changed


def test_a_checkpoint_arrives_byte_for_byte_under_its_digest(campaign: SmallCampaign, run: RunPaths) -> None:
    saved = campaign.runs[0].saved[1]
    copy = replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100, saved.digest)
    assert copy.folder == campaign.paths.store_checkpoints / saved.digest
    source = run.checkpoints / "step-000000100"
    assert {path.name: path.read_bytes() for path in copy.folder.iterdir()} == {path.name: path.read_bytes() for path in source.iterdir()}
    assert replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100) == copy
    assert os.listdir(campaign.paths.store_checkpoints) == [saved.digest]


def test_a_checkpoint_cut_short_is_refused_by_name_and_not_stored(campaign: SmallCampaign, run: RunPaths) -> None:
    os.truncate(run.checkpoints / "step-000000100" / "model.safetensors", 3)
    with pytest.raises(CheckpointDamaged) as caught:
        replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100)
    assert "model.safetensors" in caught.value.where
    assert os.listdir(campaign.paths.store_checkpoints) == []


def test_a_checkpoint_whose_manifest_lies_or_is_missing_is_refused(campaign: SmallCampaign, run: RunPaths) -> None:
    manifest = run.checkpoints / "step-000000100" / "manifest.json"
    body = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**body, "digest": "0" * 64}))
    with pytest.raises(CheckpointDamaged):
        replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100)
    manifest.write_text(json.dumps({**body, "files": {"../../escape": body["files"]["config.json"]}}))
    with pytest.raises(CheckpointDamaged):
        replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100)
    manifest.unlink()
    with pytest.raises(NotFound):
        replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100)


def test_another_checkpoint_than_the_host_told_of_is_refused(campaign: SmallCampaign, run: RunPaths) -> None:
    with pytest.raises(CheckpointDamaged) as caught:
        replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100, "0" * 64)
    assert "0" * 64 in caught.value.what


def test_a_copy_that_was_changed_in_the_store_is_never_called_verified(campaign: SmallCampaign, run: RunPaths) -> None:
    copy = replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100)
    flip_byte(copy.folder / "model.safetensors")
    assert "model.safetensors" in str(stored_checkpoint_fault(campaign.paths, copy.digest))
    with pytest.raises(CheckpointDamaged):
        replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 100, copy.digest)


def test_growing_records_are_brought_up_to_date_and_never_twice(campaign: SmallCampaign, run: RunPaths) -> None:
    run.log.write_text('{"step":1}\n{"st')
    replicate_logs(campaign.courier, campaign.paths, run.root.name)
    with open(run.log, "a") as file:
        file.write('ep":2}\n')
    run.lineage.write_text('{"event":"start"}\n')
    for _ in range(2):
        replicate_logs(campaign.courier, campaign.paths, run.root.name)
    stored = campaign.paths.store_run(run.root.name)
    assert (stored / "log.jsonl").read_text() == '{"step":1}\n{"step":2}\n'
    assert (stored / "lineage.jsonl").read_text() == '{"event":"start"}\n'
    assert (stored / "trace.jsonl").read_text() == ""


def test_pruning_keeps_what_is_named_and_everything_once_the_choice_is_frozen(campaign: SmallCampaign, run: RunPaths) -> None:
    base, best = (replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, step).digest for step in (0, 100))
    old = campaign.write_checkpoint(run.root.name, 50)
    replicate_checkpoint(campaign.courier, campaign.paths, run.root.name, 50)
    assert prune_checkpoints(campaign.paths, {base, best}) == (old,)
    assert sorted(os.listdir(campaign.paths.store_checkpoints)) == sorted([base, best])
    campaign.select()
    freeze_campaign(campaign.paths, CAMPAIGN, ACT)
    assert prune_checkpoints(campaign.paths, set()) == ()
    assert stored_checkpoint_fault(campaign.paths, best) is None


def test_a_full_disk_is_told_and_the_copy_made_once_there_is_room(campaign: SmallCampaign, small_disk: Path) -> None:
    from fleetd.paths import CampaignPaths

    run_id = campaign.add_run("big", [9.0]).run_id
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * 900_000)
    place = campaign.run_paths(campaign.runs[0]).checkpoints / "step-000000100"
    from campaign_kit import write_checkpoint

    digest = write_checkpoint(place, os.urandom(400_000))
    paths = CampaignPaths(small_disk)
    with pytest.raises(RequestRefused, match="can't keep a copy"):
        replicate_checkpoint(campaign.courier, paths, run_id, 100)
    assert os.listdir(paths.store_checkpoints) == []
    filler.unlink()
    assert replicate_checkpoint(campaign.courier, paths, run_id, 100).digest == digest
