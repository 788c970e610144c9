"""Data on its way to a host: verified before anything starts, copied once, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from campaign_kit import NOW, SmallCampaign, flip_byte, make_plan, write_shards

from fleetd.campaign import CandidatePlan, DataRole
from fleetd.coordinator.couriers import LocalCourier, TreeKind
from fleetd.coordinator.deliveries import Deliveries, Delivery
from fleetd.coordinator.ledger import Act
from fleetd.coordinator.registration import read_registered_validation, register_campaign, register_rows
from fleetd.coordinator.staging import check_disjoint, collect_role, stage_data, stage_role
from fleetd.coordinator.trees import tree_fault
from fleetd.paths import CampaignPaths
from policies.errors import DataDamaged, RequestRefused
from policies.facts import Split

MANPAGES = Path(__file__).parents[2] / "examples" / "manpages"
VALIDATION = DataRole(split=Split.VALIDATION, path="data", shard_split="val", tokens_per_document_max=512)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_shards(tmp_path / "data", {"train": 8, "val": 12, "test": 6}, shards=2)
    return tmp_path / "data"


def role(split: Split, name: str | None, **changed: object) -> DataRole:
    return DataRole(split=split, path="data", shard_split=name, **changed)  # type: ignore[arg-type]


def test_a_role_of_shards_is_its_index_its_tokenizer_and_its_own_shards() -> None:
    collected = collect_role(str(MANPAGES), VALIDATION)
    assert sorted(entry.path for entry in collected.entries) == [
        "shards_index.json", "tokenizer.model", "val_000.bin", "val_000.bin.json", "val_000.langs.u8",
    ]
    assert [entry.path for entry in collected.content] == ["val_000.bin"]


def test_the_registered_rows_are_the_documents_of_the_real_corpus() -> None:
    registered = register_rows(collect_role(str(MANPAGES), VALIDATION))
    assert len(registered.rows) == 114
    assert (registered.rows[0].id, registered.rows[-1].id) == ("val_000:0", "val_000:113")
    assert {row.family for row in registered.rows} == {"en", "de", "fr", "ja"}
    assert max(row.tokens for row in registered.rows) == 512
    whole = register_rows(collect_role(str(MANPAGES), role(Split.VALIDATION, "val")))
    assert sum(row.tokens for row in whole.rows) == 225648
    assert sum(row.tokens for row in whole.rows if row.family == "ja") == 51679


def test_a_second_staging_copies_nothing(campaign: SmallCampaign) -> None:
    stage_data(campaign.plan, campaign.digests, campaign.courier)
    digest = campaign.digests["train"]
    folder = campaign.base / "root" / "datasets" / digest
    assert tree_fault(folder, digest) is None
    before = {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in folder.rglob("*")}
    shutil.rmtree(campaign.base / "data")  # not even the source is needed any more
    assert not stage_role(campaign.plan, Split.TRAIN, digest, campaign.courier)
    assert {path: (path.stat().st_ino, path.stat().st_ctime_ns) for path in folder.rglob("*")} == before


def test_what_is_copied_on_this_machine_is_a_delivery_too(campaign: SmallCampaign, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at when all is copied and nothing has its name yet."""
    deliveries, shown = Deliveries(), list[dict[str, Any]]()
    monkeypatch.setattr(Delivery, "settles", lambda delivery: shown.append(delivery.shown()))
    courier = LocalCourier("here", campaign.base / "other", deliveries=deliveries)
    source = collect_role(str(campaign.base), role(Split.TRAIN, "train"))
    assert courier.put_tree(TreeKind.DATASETS, source.digest, source.source, source.entries)

    total = sum(entry.bytes for entry in source.entries)
    assert [(each["road"], each["bytes"], each["bytes_total"]) for each in shown] == [("copy", total, total)]
    assert not courier.put_tree(TreeKind.DATASETS, source.digest, source.source, source.entries)
    assert len(shown) == 1 and deliveries.shown() == {}


def test_what_a_killed_stager_left_behind_is_cleared_and_never_taken_for_data(campaign: SmallCampaign) -> None:
    digest = campaign.digests["validation"]
    leftover = campaign.base / "root" / "datasets" / f".tmp-{digest}"
    leftover.mkdir(parents=True)
    (leftover / "val_000.bin").write_bytes(b"half")
    assert not campaign.courier.has_tree(TreeKind.DATASETS, digest)
    assert stage_role(campaign.plan, Split.VALIDATION, digest, campaign.courier)
    assert sorted(path.name for path in leftover.parent.iterdir()) == [".lock", digest]


def test_a_damaged_copy_on_the_host_is_named_and_not_written_over(campaign: SmallCampaign) -> None:
    stage_data(campaign.plan, campaign.digests, campaign.courier)
    damaged = campaign.base / "root" / "datasets" / campaign.digests["train"] / "train_000.bin"
    flip_byte(damaged)
    bytes_before = damaged.read_bytes()
    with pytest.raises(DataDamaged) as caught:
        stage_data(campaign.plan, campaign.digests, campaign.courier)
    assert caught.value.where == str(damaged)
    assert damaged.read_bytes() == bytes_before


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / "train_001.bin").unlink()
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(shards.parent), role(Split.TRAIN, "train"))
    assert caught.value.where == str(shards / "train_001.bin")
    assert len(str(caught.value).splitlines()) == 4  # the title and three lines


def test_a_truncated_shard_is_named_with_both_sizes(shards: Path) -> None:
    path = shards / "train_000.bin"
    size = path.stat().st_size
    os.truncate(path, size - 2)
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(shards.parent), role(Split.TRAIN, "train"))
    assert caught.value.where == str(path)
    assert str(size) in caught.value.what
    assert str(size - 2) in caught.value.what


def test_one_changed_byte_in_a_shard_is_named_with_both_digests(shards: Path) -> None:
    path = shards / "val_001.bin"
    good = hashlib.sha256(path.read_bytes()).hexdigest()
    flip_byte(path)
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(shards.parent), role(Split.VALIDATION, "val"))
    assert caught.value.where == str(path)
    assert good in caught.value.what
    assert hashlib.sha256(path.read_bytes()).hexdigest() in caught.value.what


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("shards_index.json", b"{", "can't be read"), ("shards_index.json", b"[]", "not a JSON object"),
        ("shards_index.json", b'{"dtype": "uint32"}', "dtype"), ("val_000.bin.json", b'{"name": "val_000.bin"}', "says"),
        ("val_000.langs.u8", b"\0", "one byte each"), ("val_000.langs.u8", None, "No such file"),
        ("shards_index.json", None, "not there"), ("tokenizer.model", None, "No such file"), ("val_000.bin.json", None, "not there"),
    ],
)
def test_a_damaged_or_missing_file_beside_the_shards_is_named(shards: Path, name: str, content: bytes | None, word: str) -> None:
    (shards / name).unlink()
    if content is not None:
        (shards / name).write_bytes(content)
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(shards.parent), role(Split.VALIDATION, "val"))
    assert caught.value.where == str(shards / name)
    assert word in caught.value.what


def test_a_language_code_that_is_unknown_stops_the_registration(shards: Path) -> None:
    langs = shards / "val_000.langs.u8"
    langs.write_bytes(b"\x09" + langs.read_bytes()[1:])
    with pytest.raises(DataDamaged, match="can't be used"):
        register_rows(collect_role(str(shards.parent), role(Split.VALIDATION, "val")))


def test_languages_that_contradict_the_totals_stop_the_registration(shards: Path) -> None:
    langs = shards / "val_000.langs.u8"
    codes = bytearray(langs.read_bytes())
    codes[0] = 1
    langs.write_bytes(codes)
    with pytest.raises(DataDamaged) as caught:
        register_rows(collect_role(str(shards.parent), role(Split.VALIDATION, "val")))
    assert "tokens by language" in caught.value.what


def test_a_shard_that_the_index_does_not_list_is_refused(shards: Path) -> None:
    (shards / "train_009.bin").write_bytes(b"\2\0")
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(shards.parent), role(Split.TRAIN, "train"))
    assert caught.value.where == str(shards / "train_009.bin")


def test_a_split_that_does_not_exist_names_those_that_do(shards: Path) -> None:
    with pytest.raises(RequestRefused) as caught:
        collect_role(str(shards.parent), role(Split.TEST, "tset"))
    assert "test, train, val" in caught.value.fix


def test_a_link_in_the_source_is_refused(shards: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes((shards / "val_000.bin").read_bytes())
    (shards / "val_000.bin").unlink()
    (shards / "val_000.bin").symlink_to(secret)
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(shards.parent), role(Split.VALIDATION, "val"))
    assert "link" in caught.value.what
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.txt").write_text("a")
    (plain / "b").symlink_to(tmp_path)
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(tmp_path), DataRole(split=Split.TRAIN, path="plain"))
    assert "link" in caught.value.what


def test_a_pipe_in_the_source_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "pipe")
    with pytest.raises(DataDamaged):
        collect_role(str(tmp_path), role(Split.TRAIN, None))


def test_a_source_that_changed_after_it_was_registered_is_refused(campaign: SmallCampaign) -> None:
    (campaign.base / "data" / "tokenizer.model").write_bytes(b"a tokenizer, but another")
    with pytest.raises(DataDamaged) as caught:
        stage_data(campaign.plan, campaign.digests, campaign.courier)
    assert "registered" in caught.value.title


def test_a_source_that_changes_between_reading_and_copying_is_refused(campaign: SmallCampaign) -> None:
    collected = collect_role(campaign.plan.directory, campaign.plan.data[0])
    flip_byte(campaign.base / "data" / "train_000.bin")
    with pytest.raises(DataDamaged) as caught:
        campaign.courier.put_tree(TreeKind.DATASETS, collected.digest, collected.source, collected.entries)
    assert caught.value.where.endswith("train_000.bin")
    assert [path.name for path in (campaign.base / "root" / "datasets").iterdir()] == [".lock"]


def collect_until(seconds: float, place: str) -> None:
    """Again and again: a writer that was held up during all of a reading has changed nothing in it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        collect_role(place, role(Split.TRAIN, None))


def test_a_source_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "growing.txt"
    path.write_bytes(b"x" * 40_000_000)
    stop = threading.Event()

    def grow() -> None:
        with open(path, "ab", buffering=0) as file:
            while not stop.is_set():
                file.write(b"y")

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        with pytest.raises(DataDamaged) as caught:
            collect_until(60.0, str(tmp_path))
    finally:
        stop.set()
        writer.join()
    assert caught.value.where == str(path)
    assert "changed while it was read" in caught.value.what


def test_a_full_disk_is_told_in_three_lines_and_leaves_nothing_behind(shards: Path, small_disk: Path) -> None:
    (shards / "tokenizer.model").write_bytes(os.urandom(3_000_000))
    collected = collect_role(str(shards.parent), role(Split.TRAIN, "train"))
    courier = LocalCourier("gx10", small_disk)
    with pytest.raises(RequestRefused) as caught:
        courier.put_tree(TreeKind.DATASETS, collected.digest, collected.source, collected.entries)
    assert "no room" in caught.value.title
    assert "free" in caught.value.what
    assert len(str(caught.value).splitlines()) == 4
    assert [path.name for path in (small_disk / "datasets").iterdir()] == [".lock"]


def test_the_same_shard_for_training_and_for_the_judgement_is_refused(shards: Path) -> None:
    train, test = (collect_role(str(shards.parent), role(split, "train")) for split in (Split.TRAIN, Split.TEST))
    with pytest.raises(RequestRefused) as caught:
        check_disjoint((train, test))
    assert "train and test share a file" in caught.value.title
    validation = collect_role(str(shards.parent), role(Split.VALIDATION, "val"))
    check_disjoint((train, validation, collect_role(str(shards.parent), role(Split.TEST, "test"))))


def test_a_copy_under_another_name_is_found_among_plain_files(tmp_path: Path) -> None:
    for name, text in (("open/a.jsonl", "rows"), ("closed/b.jsonl", "rows"), ("closed/empty", ""), ("open/empty", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    roles = (DataRole(split=Split.TRAIN, path="open"), DataRole(split=Split.HOLDOUT, path="closed"))
    with pytest.raises(RequestRefused) as caught:
        check_disjoint(tuple(collect_role(str(tmp_path), each) for each in roles))
    assert caught.value.where.endswith("closed/b.jsonl")


def test_plain_files_are_chosen_by_their_patterns(tmp_path: Path) -> None:
    for name in ("data/a.jsonl", "data/deep/b.jsonl", "data/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    collected = collect_role(str(tmp_path), role(Split.TRAIN, None, include=("*.jsonl",)))
    assert sorted(entry.path for entry in collected.entries) == ["a.jsonl", "deep/b.jsonl"]
    with pytest.raises(RequestRefused, match="can't be staged"):
        collect_role(str(tmp_path), role(Split.TRAIN, None, include=("*.parquet",)))


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataDamaged) as caught:
        collect_role(str(tmp_path), role(Split.TRAIN, "train"))
    assert caught.value.where == str(tmp_path / "data")


def test_changed_registered_rows_are_found_by_the_ledger(campaign: SmallCampaign) -> None:
    path = campaign.paths.registered_validation
    body = json.loads(path.read_text())
    body["rows"][0][2] += 1
    path.write_text(json.dumps(body))
    with pytest.raises(DataDamaged) as caught:
        read_registered_validation(campaign.paths)
    assert caught.value.where == str(path)


def test_a_plan_without_token_shards_registers_no_rows(tmp_path: Path) -> None:
    from campaign_kit import ACT

    from fleetd.coordinator.registration import register_campaign
    from fleetd.paths import CampaignPaths

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("a")
    paths = CampaignPaths(tmp_path / "c")
    paths.root.mkdir()
    plan = make_plan(tmp_path, roles=(DataRole(split=Split.TRAIN, path="data"),))
    assert set(register_campaign(paths, plan, ACT)) == {"train"}
    assert read_registered_validation(paths) is None


def test_a_model_that_does_not_know_a_token_of_the_data_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shards = tmp_path / "data"
    write_shards(shards, {"train": 8, "val": 12, "test": 6, "hold": 5}, shards=2)
    plan = make_plan(tmp_path)
    largest = max(int(np.fromfile(path, dtype="<u2").max()) for path in shards.glob("train_*.bin"))
    enough = CandidatePlan(name="wide", host="any", memory_host_bytes=1, memory_accelerator_bytes=1, task=_task(largest + 1))
    small = replace(enough, name="narrow", task=_task(largest))
    act = Act(actor="user:tester", at=NOW, code_digest="c0de")

    with pytest.raises(RequestRefused) as caught:
        register_campaign(CampaignPaths(tmp_path / "refused"), replace(plan, candidates=(enough, small)), act)
    assert f"token {largest} at offset" in caught.value.what and "(narrow)" in caught.value.what and "vocab_size" in caught.value.fix
    assert Path(caught.value.where).parent == shards
    assert not (tmp_path / "refused").exists()
    tokens = np.fromfile(caught.value.where, dtype="<u2")
    assert tokens[int(caught.value.what.split("offset ")[1].split()[0]) // 2] == largest


def _task(vocabulary: int) -> dict[str, object]:
    return {"model": {"config": {"vocab_size": vocabulary}}}
