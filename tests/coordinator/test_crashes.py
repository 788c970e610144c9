"""Each job of the byte keeper, killed at every single change it makes on the disk: run again, it comes to the very same files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign_kit import ACT, CAMPAIGN, SmallCampaign, dies_at, files_of, make_plan, scored_rows, small_campaign, write_shards

from fleetd.coordinator.evaluation import MODELS, collect_evaluation, judge, prepare_evaluation
from fleetd.coordinator.ledger import read_ledger
from fleetd.coordinator.pipeline import freeze_campaign
from fleetd.coordinator.registration import register_campaign, register_rows
from fleetd.coordinator.replication import replicate_checkpoint, replicate_predictions
from fleetd.coordinator.staging import collect_role, stage_data
from fleetd.coordinator.vault import read_frozen
from fleetd.paths import CampaignPaths, HostPaths
from policies.facts import Split
from policies.freeze import order_faults
from trainer.predictions import write_predictions

CHANGES_MAX = 200
RUN = f"{CAMPAIGN}-a"
EVALUATION = f"{CAMPAIGN}-evaluate-test"


def dies_everywhere(place: Path, prepare: Callable[[Path], Callable[[], object]], stride: int) -> int:
    """Kill the job that `prepare` makes for a fresh folder at every `stride`-th change, run it again, compare. The number of deaths."""
    reference = place / "undisturbed"
    prepare(reference)()
    wanted = files_of(reference)
    for deaths, change in enumerate(range(0, CHANGES_MAX, stride)):
        folder = place / "killed"
        job = prepare(folder)
        died = dies_at(change, job)
        job()
        assert files_of(folder) == wanted, f"killed at change {change}"
        shutil.rmtree(folder)
        if not died:
            return deaths
    raise AssertionError(f"the job makes over {CHANGES_MAX} changes")


def trained(base: Path) -> SmallCampaign:
    campaign = small_campaign(base)
    campaign.add_run("a", [9.0, 6.0])
    return campaign


def frozen(base: Path) -> SmallCampaign:
    campaign = trained(base)
    campaign.select()
    freeze_campaign(campaign.paths, CAMPAIGN, ACT)
    return campaign


def registration(base: Path) -> Callable[[], object]:
    write_shards(base / "data", {"train": 4, "val": 4, "test": 4, "hold": 4})
    paths = CampaignPaths(base / "campaign")
    paths.root.mkdir()
    return lambda: register_campaign(paths, make_plan(base), ACT)


def staging(base: Path) -> Callable[[], object]:
    campaign = small_campaign(base)
    return lambda: stage_data(campaign.plan, campaign.digests, campaign.courier)


def newer_predictions(base: Path) -> Callable[[], object]:
    """An older copy is in the store, the host has validated again."""
    campaign = trained(base)
    replicate_predictions(campaign.courier, campaign.paths, RUN, 100)
    newer = campaign.write_validation(RUN, 100, campaign.runs[0].saved[1].digest, 5.0)
    return lambda: replicate_predictions(campaign.courier, campaign.paths, RUN, 100, newer)


def checkpoint(base: Path) -> Callable[[], object]:
    campaign = trained(base)
    return lambda: replicate_checkpoint(campaign.courier, campaign.paths, RUN, 100)


def choice(base: Path) -> Callable[[], object]:
    campaign = trained(base)
    return campaign.select


def freeze(base: Path) -> Callable[[], object]:
    campaign = trained(base)
    campaign.select()
    return lambda: freeze_campaign(campaign.paths, CAMPAIGN, ACT)


def evaluation(base: Path) -> Callable[[], object]:
    campaign = frozen(base)
    selection = read_frozen(campaign.paths)
    assert selection is not None
    return lambda: prepare_evaluation(campaign.paths, campaign.plan, campaign.digests, Split.TEST, selection, campaign.courier, ACT)


def judgement(base: Path) -> Callable[[], object]:
    campaign = frozen(base)
    evaluation_of = read_frozen(campaign.paths)
    assert evaluation_of is not None
    prepare_evaluation(campaign.paths, campaign.plan, campaign.digests, Split.TEST, evaluation_of, campaign.courier, ACT)
    rows = register_rows(collect_role(campaign.plan.directory, next(role for role in campaign.plan.data if role.split == Split.TEST))).rows
    digests = {"selected": evaluation_of.checkpoint_digest, "base": evaluation_of.base_checkpoint_digest, "unigram": None}
    for name in MODELS:
        write_predictions(
            HostPaths(base / "root").run(EVALUATION).predictions("test"), name, scored_rows(rows, 3.0), split="test", step=None,
            dataset_digest=campaign.digests["test"], checkpoint_digest=digests[name], numeric_mode="fp32 cpu",
        )

    def job() -> object:
        collect_evaluation(campaign.courier, campaign.paths, Split.TEST, EVALUATION)
        return judge(campaign.paths, campaign.plan, Split.TEST, evaluation_of, EVALUATION, ACT)
    return job


@pytest.mark.parametrize(
    ("job", "stride", "deaths_min"),
    [
        (registration, 7, 5), (staging, 5, 5), (newer_predictions, 1, 10), (checkpoint, 1, 10), (choice, 3, 10), (freeze, 1, 5), (evaluation, 7, 5),
        (judgement, 3, 5),
    ],
)
def test_a_job_killed_at_any_change_on_the_disk_comes_to_the_same_when_it_runs_again(
    quick_path: Path, job: Callable[[Path], Callable[[], object]], stride: int, deaths_min: int,
) -> None:
    assert dies_everywhere(quick_path, job, stride) >= deaths_min


def test_an_evaluation_killed_around_its_opening_counts_as_one_look(quick_path: Path) -> None:
    campaign = frozen(quick_path)
    selection = read_frozen(campaign.paths)
    assert selection is not None
    job = lambda: prepare_evaluation(campaign.paths, campaign.plan, campaign.digests, Split.TEST, selection, campaign.courier, ACT)  # noqa: E731
    change = 0
    while dies_at(change, job):  # each death leaves what it had done; nothing is cleared in between
        change += 3
    events = read_ledger(campaign.paths.ledger).events
    assert [event.kind for event in events] == ["registered", "frozen", "opened"]
    assert order_faults(events) == ()
