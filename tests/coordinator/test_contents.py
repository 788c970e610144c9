"""A model file that was cut short, a Git LFS pointer in place of weights or of a shard: named before anything starts, here and on a host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign_kit import SmallCampaign, small_campaign, write_checkpoint

from fleetd.campaign import DataRole
from fleetd.contents import LFS_POINTER, content_fault
from fleetd.coordinator.couriers import TreeKind
from fleetd.coordinator.replication import stored_checkpoint_fault
from fleetd.coordinator.staging import collect_role, stage_data
from fleetd.coordinator.trees import read_manifest
from fleetd.host.porter import wrong_with
from policies.errors import DataDamaged
from policies.facts import Split

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 12345\n"


def weights(values: int = 16) -> bytes:
    """A safetensors file of one tensor."""
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * values)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def point(path: Path) -> None:
    path.write_bytes(POINTER)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model among the plain files of a role, as somebody cloned it."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(weights())
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    return folder


def collected(folder: Path) -> object:
    return collect_role(str(folder.parent), DataRole(split=Split.TRAIN, path=folder.name))


DAMAGE: list[tuple[Callable[[Path], None], str]] = [(point, "Git LFS pointer"), (cut, "cut short")]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damaged_weights_are_named_at_their_source_though_nobody_recorded_a_digest(model: Path, damage: Callable[[Path], None], words: str) -> None:
    assert collected(model)
    damage(model / "model.safetensors")
    with pytest.raises(DataDamaged) as caught:
        collected(model)
    assert caught.value.where == str(model / "model.safetensors") and words in caught.value.what


@pytest.mark.parametrize("name", ["train_000.bin", "shards_index.json", "train_000.bin.json", "tokenizer.model"])
def test_a_pointer_in_place_of_any_file_of_token_shards_is_called_one(tmp_path: Path, name: str) -> None:
    campaign = small_campaign(tmp_path)
    point(tmp_path / "data" / name)
    with pytest.raises(DataDamaged) as caught:
        collect_role(campaign.plan.directory, campaign.plan.data[0])
    assert (caught.value.where, caught.value.what) == (str(tmp_path / "data" / name), LFS_POINTER)


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_shard_that_lies_on_a_host_is_named_and_not_written_over(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    campaign = small_campaign(tmp_path)
    stage_data(campaign.plan, campaign.digests, campaign.courier)
    path = tmp_path / "root" / "datasets" / campaign.digests["train"] / "train_000.bin"
    damage(path)
    before = path.read_bytes()
    with pytest.raises(DataDamaged) as caught:
        stage_data(campaign.plan, campaign.digests, campaign.courier)
    assert caught.value.where == str(path) and words in caught.value.what and "rm -r" in caught.value.fix
    assert path.read_bytes() == before


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_a_damaged_model_on_a_host_or_in_the_store_is_named_before_a_run_begins_with_it(
    tmp_path: Path, damage: Callable[[Path], None], words: str,
) -> None:
    campaign = small_campaign(tmp_path)
    stored, digest = store_model(campaign)
    assert campaign.courier.put_tree(TreeKind.MODELS, digest, stored, read_manifest(stored))
    there = tmp_path / "root" / "models" / digest / "model.safetensors"
    damage(there)
    with pytest.raises(DataDamaged) as caught:
        campaign.courier.put_tree(TreeKind.MODELS, digest, stored, read_manifest(stored))
    assert caught.value.where == str(there) and words in caught.value.what
    damage(stored / "model.safetensors")
    assert words in (stored_checkpoint_fault(campaign.paths, digest) or "")


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_the_porter_of_a_host_says_the_same(tmp_path: Path, damage: Callable[[Path], None], words: str) -> None:
    stored, _ = store_model(small_campaign(tmp_path))
    files = [[entry.path, entry.bytes, entry.sha256] for entry in read_manifest(stored)]
    assert wrong_with(str(stored), files) is None
    damage(stored / "model.safetensors")
    fault = wrong_with(str(stored), files) or ""
    assert fault.startswith("model.safetensors is") and words in fault


def store_model(campaign: SmallCampaign) -> tuple[Path, str]:
    folder = campaign.paths.store_checkpoints / "new"
    digest = write_checkpoint(folder, weights(64))
    return folder.rename(campaign.paths.store_checkpoints / digest), digest


@pytest.mark.parametrize(("data", "words"), [
    (weights(), None), (weights(0), None), (weights() + b"x", "stand behind"), (b"\1\2", "not even"), (b"\xff" * 8, "no safetensors"),
    ((40).to_bytes(8, "little") + b"{}", "its header alone"), ((2).to_bytes(8, "little") + b"[]", "can't be read"),
    ((17).to_bytes(8, "little") + b'{"w":{"dtype":1}}', "can't be read"), (POINTER, "Git LFS"),
    (weights()[:-64], "cut short"),
])
def test_a_safetensors_file_is_as_long_as_its_header_says(tmp_path: Path, data: bytes, words: str | None) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    found = content_fault(path)
    assert found is None if words is None else words in (found or "")


def test_a_text_about_git_lfs_is_no_pointer(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(POINTER + b"\n" * 2000)
    assert content_fault(path) is None
