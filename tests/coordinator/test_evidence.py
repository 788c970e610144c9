"""The choice rests on files that are read again and compared: one changed byte refuses the candidate, and the others go on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from campaign_kit import HOST, SmallCampaign, flip_byte

from fleetd.coordinator.couriers import LocalCourier
from fleetd.coordinator.replication import replicate_predictions
from fleetd.fleet import Run
from policies.errors import HostUnreachable
from policies.manifest import FileEntry
from trainer.files import dumps

STEP = "step-000000100"


class SilentCourier(LocalCourier):
    """The courier of a host that has stopped answering."""

    def look(self, run_id: str, path: str) -> tuple[FileEntry, ...]:
        raise HostUnreachable("no answer", where=self.host, what="timed out", fix="wait")

    def fetch_tree(self, run_id: str, path: str, destination: Path, entries: tuple[FileEntry, ...]) -> None:
        raise HostUnreachable("no answer", where=self.host, what="timed out", fix="wait")


@pytest.fixture
def pair(campaign: SmallCampaign) -> tuple[Run, Run]:
    """Two candidates, the first one better; every prediction file is copied."""
    runs = campaign.add_run("best", [9.0, 6.0, 6.0]), campaign.add_run("second", [9.1, 7.0])
    for run in runs:
        for claim in run.validated:
            replicate_predictions(campaign.courier, campaign.paths, run.run_id, claim.step)
    return runs


def because(record: dict, candidate: str, step: int | None = 100) -> str:
    return next(row["because"] for row in record["table"] if row["candidate"] == candidate and row["step"] == step)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def places(campaign: SmallCampaign, run: Run) -> tuple[Path, Path]:
    return campaign.paths.store_run(run.run_id) / "predictions" / "validation", campaign.run_paths(run).predictions("validation")


def rewrite(folder: Path, change: Callable[[list[bytes]], list[bytes]], **meta_changes: object) -> None:
    """Change the rows of one file and make its meta agree again: what a careful forger would do."""
    rows = change((folder / f"{STEP}.jsonl").read_bytes().splitlines(keepends=True))
    (folder / f"{STEP}.jsonl").write_bytes(b"".join(rows))
    meta = json.loads((folder / f"{STEP}.meta.json").read_text())
    meta |= {"sha256": sha256(folder / f"{STEP}.jsonl"), "rows": len(rows), **meta_changes}
    (folder / f"{STEP}.meta.json").write_bytes(dumps(meta))


def forge(campaign: SmallCampaign, run: Run, change: Callable[[list[bytes]], list[bytes]], **meta_changes: object) -> None:
    """Rewrite both copies alike, and let the host have reported the forged rows: only their content can give them away."""
    for folder in places(campaign, run):
        rewrite(folder, change, **meta_changes)
    digest = sha256(places(campaign, run)[0] / f"{STEP}.jsonl")
    told = tuple(replace(each, sha256=digest) if each.step == 100 else each for each in run.validated)
    campaign.runs[campaign.runs.index(run)] = replace(run, validated=told)


def test_untouched_evidence_chooses_the_better_candidate(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    record = campaign.select()
    assert (record["outcome"], record["candidate"], record["step"]) == ("selected", "best", 100)
    assert record["value"] == pytest.approx(6.0)
    assert record["base_checkpoint_digest"] == pair[0].saved[0].digest
    assert record["compared_with_host"] == {run.run_id: True for run in pair}
    assert len(record["table"]) == 5
    assert all(row["eligible"] for row in record["table"])
    assert json.loads(campaign.paths.selection.read_text()) == record


@pytest.mark.parametrize("where", ["store", "host"])
@pytest.mark.parametrize("file", [f"{STEP}.jsonl", f"{STEP}.meta.json", "step-000000200.jsonl"])
def test_one_changed_byte_in_either_copy_refuses_the_candidate_and_names_file_and_digests(
    campaign: SmallCampaign, pair: tuple[Run, Run], where: str, file: str,
) -> None:
    store, host = places(campaign, pair[0])
    good = sha256(store / file)
    changed = (store if where == "store" else host) / file
    flip_byte(changed)
    record = campaign.select()
    assert record["candidate"] == "second"
    for step in (0, 100, 200):
        assert "the whole candidate is refused" in because(record, "best", step)
        assert file in because(record, "best", step)
        assert sha256(changed) in because(record, "best", step)
    assert good in because(record, "best")
    assert not any(row["eligible"] for row in record["table"] if row["candidate"] == "best")


def test_every_changed_byte_of_a_prediction_file_is_found(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    store, _ = places(campaign, pair[0])
    path = store / f"{STEP}.jsonl"
    size = path.stat().st_size
    chosen = set()
    for place in range(0, size, max(1, size // 40)):
        flip_byte(path, place)
        chosen.add(campaign.select()["candidate"])
        flip_byte(path, place)
    assert chosen == {"second"}
    assert campaign.select()["candidate"] == "best"


def test_a_forger_who_changes_both_copies_is_given_away_by_what_the_host_reported(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    told = pair[1].validated[1].sha256
    for folder in places(campaign, pair[1]):
        rewrite(folder, lambda rows: [row.replace(b'"nll":', b'"nll":0.0') for row in rows])
    record = campaign.select()
    assert record["candidate"] == "best"
    assert told in because(record, "second")


def test_a_forged_copy_of_a_silent_host_is_given_away_by_what_the_host_reported(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    campaign.select()  # brings the checkpoints
    told = pair[0].validated[1].sha256
    rewrite(places(campaign, pair[0])[0], lambda rows: [row.replace(b'"label":null', b'"label":0') for row in rows])
    record = campaign.select({})
    assert record["candidate"] is None  # of the second candidate's checkpoints no copy was ever made
    assert told in because(record, "best")


def test_a_claim_that_differs_from_its_rows_refuses_the_candidate(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    meta = json.loads((places(campaign, pair[0])[0] / f"{STEP}.meta.json").read_text())
    forge(campaign, pair[0], lambda rows: rows, claim={**meta["claim"], "value": meta["claim"]["value"] * (1 - 1e-6)})
    record = campaign.select()
    assert record["candidate"] == "second"
    assert "the whole candidate is refused" in because(record, "best")
    assert "it claims" in because(record, "best")


def test_a_claim_for_one_family_is_compared_as_well(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    meta = json.loads((places(campaign, pair[0])[0] / f"{STEP}.meta.json").read_text())
    families = {**meta["claim"]["families"], "de": 1.0}
    forge(campaign, pair[0], lambda rows: rows, claim={**meta["claim"], "families": families})
    assert "for de" in because(campaign.select(), "best")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda rows: rows[:-1], "missing: val_000:11"),
        (lambda rows: [*rows, rows[-1].replace(b"val_000:11", b"val_000:12")], "not registered: val_000:12"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "stands where val_000:0"),
        (lambda rows: [rows[0].replace(b'"tokens":16', b'"tokens":15'), *rows[1:]], "15 tokens"),
        (lambda rows: [rows[0].replace(b'"family":"en"', b'"family":"fr"'), *rows[1:]], "is registered"),
        (lambda rows: [rows[0], rows[0], *rows[2:]], "occurs twice"),
        (lambda rows: [rows[0].replace(b'"nll":', b'"nll":-'), *rows[1:]], "finite number of nats"),
        (lambda rows: [b'{"id":"val_000:0","family":"en","tokens":16,"nll":NaN}\n', *rows[1:]], "nan"),
        (lambda rows: [b"not json\n", *rows[1:]], "line 1: not JSON"),
        (lambda rows: [*rows[:-1], rows[-1][:-1]], "middle of a line"),
    ],
)
def test_rows_that_are_not_the_registered_ones_refuse_their_checkpoint(
    campaign: SmallCampaign, pair: tuple[Run, Run], change: Callable[[list[bytes]], list[bytes]], word: str,
) -> None:
    before = (places(campaign, pair[0])[0] / f"{STEP}.jsonl").read_bytes()
    forge(campaign, pair[0], change)
    assert (places(campaign, pair[0])[0] / f"{STEP}.jsonl").read_bytes() != before
    record = campaign.select()
    assert word in because(record, "best")
    assert (record["candidate"], record["step"]) == ("best", 200)  # the untouched later checkpoint still stands


@pytest.mark.parametrize(
    ("meta", "word"),
    [
        ({"dataset_digest": "0" * 64}, "made from dataset 0000000000000000"),
        ({"checkpoint_digest": "f" * 64}, "made from checkpoint ffffffffffffffff"),
        ({"split": "test"}, "it is of split test"), ({"step": 200}, "its meta says step 200"),
    ],
)
def test_predictions_of_other_data_or_of_another_checkpoint_refuse_their_checkpoint(
    campaign: SmallCampaign, pair: tuple[Run, Run], meta: dict[str, object], word: str,
) -> None:
    forge(campaign, pair[0], lambda rows: rows, **meta)
    record = campaign.select()
    assert word in because(record, "best")
    assert (record["candidate"], record["step"]) == ("best", 200)


@pytest.mark.parametrize("meta", [{"criterion": "accuracy"}, {"schema": 2}, {"sha256": 7}, {"claim": None}, {"rows": "12"}])
def test_a_meta_that_is_not_one_refuses_the_candidate(campaign: SmallCampaign, pair: tuple[Run, Run], meta: dict[str, object]) -> None:
    forge(campaign, pair[0], lambda rows: rows, **meta)
    record = campaign.select()
    assert record["candidate"] == "second"
    assert f"{STEP}.meta.json: " in because(record, "best")


def test_evidence_that_was_removed_from_one_copy_refuses_the_candidate(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    (places(campaign, pair[0])[1] / f"{STEP}.jsonl").unlink()
    record = campaign.select()
    assert record["candidate"] == "second"
    assert "no such file" in because(record, "best")


def test_a_silent_host_is_judged_from_verified_copies_and_the_record_says_so(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    campaign.select()  # brings the checkpoints
    campaign.paths.selection.unlink()
    for couriers in ({}, {HOST: SilentCourier(HOST, campaign.base / "root")}):
        record = campaign.select(couriers)
        assert (record["candidate"], record["step"]) == ("best", 100)
        assert record["compared_with_host"] == {run.run_id: False for run in pair}


def test_what_a_silent_host_never_sent_is_left_out_by_name(campaign: SmallCampaign) -> None:
    campaign.add_run("best", [9.0, 6.0])
    record = campaign.select({})
    assert record["outcome"] == "nothing_eligible"
    assert "host gx10 does not answer" in because(record, "best")


def test_a_choice_whose_checkpoint_cannot_be_had_falls_to_the_next_one(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    flip_byte(campaign.run_paths(pair[0]).checkpoints / STEP / "model.safetensors")
    record = campaign.select()
    assert (record["candidate"], record["step"]) == ("best", 200)
    assert "no verified copy of its checkpoint" in because(record, "best")


def test_a_candidate_whose_unchanged_base_cannot_be_had_takes_no_part(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    for name in os.listdir(campaign.run_paths(pair[0]).checkpoints / "step-000000000"):
        (campaign.run_paths(pair[0]).checkpoints / "step-000000000" / name).unlink()
    record = campaign.select()
    assert record["candidate"] == "second"
    assert "unchanged base" in because(record, "best")


def test_predictions_that_were_not_copied_yet_are_fetched_for_the_choice(campaign: SmallCampaign) -> None:
    campaign.add_run("only", [9.0, 8.0])
    assert campaign.select()["step"] == 100


def test_a_checkpoint_that_only_the_log_reported_is_known(campaign: SmallCampaign) -> None:
    run = campaign.add_run("a", [9.0, 6.0])
    log = campaign.paths.store_run(run.run_id) / "log.jsonl"
    campaign.runs[0] = replace(run, saved=run.saved[:1])
    assert "the run reported none there" in because(campaign.select(), "a")
    log.write_text(json.dumps({"event": "save", "phase": "end", "step": 100, "digest": run.saved[1].digest}) + '\n{"event":"save","st')
    assert campaign.select()["step"] == 100


def test_a_command_of_its_own_is_listed_with_the_reason(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    campaign.add_run("command", [], contract=False)
    record = campaign.select()
    assert record["candidate"] == "best"
    assert "a command of its own" in because(record, "command", None)


def test_an_inexact_candidate_is_refused_only_where_its_plan_requires_exactness(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    proof = {"step": 200, "verdict": "inexact", "required": True, "because": "weights differs from step 190 on"}
    campaign.runs[campaign.runs.index(pair[0])] = replace(pair[0], proof=proof)
    record = campaign.select()
    assert record["candidate"] == "second"
    assert because(record, "best") == "it is not exact, and its plan requires that: weights differs from step 190 on"
    for harmless in ({**proof, "required": False}, {**proof, "verdict": "unknown"}):
        campaign.runs[campaign.runs.index(next(run for run in campaign.runs if run.candidate == "best"))] = replace(pair[0], proof=harmless)
        assert campaign.select()["candidate"] == "best"


def test_choosing_again_gives_the_same_choice(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    first = campaign.select()
    campaign.runs.reverse()
    assert campaign.select() == {**first, "compared_with_host": campaign.select()["compared_with_host"]}


def test_a_link_in_the_run_directory_is_not_followed(campaign: SmallCampaign, pair: tuple[Run, Run]) -> None:
    folder = campaign.run_paths(pair[0]).predictions("validation")
    target = campaign.base / "elsewhere.jsonl"
    os.rename(folder / f"{STEP}.jsonl", target)
    (folder / f"{STEP}.jsonl").symlink_to(target)
    record = campaign.select()
    assert record["candidate"] == "second"
    assert "is a link" in because(record, "best")
