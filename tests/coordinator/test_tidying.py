"""What a killed coordinator leaves half-made in its own directory, and what the next one makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from campaign_kit import ACT, CAMPAIGN, small_campaign

from fleetd.coordinator.jobs import Jobs
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.replication import replicate_checkpoint
from fleetd.coordinator.sight import Job
from fleetd.coordinator.tidying import tidy_state
from fleetd.fleet import Campaign, Fleet
from fleetd.paths import StatePaths
from fleetd.records import Replica
from policies.facts import CampaignStage


def test_temporaries_of_the_last_life_are_removed_and_nothing_else(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", ""])
    child.wait()
    paths = StatePaths(tmp_path)
    campaign = paths.campaign(CAMPAIGN)
    trees = [campaign.store_checkpoints / ".tmp-run-8", campaign.vault / ".tmp-test", campaign.store_run("r") / "predictions" / "test" / ".tmp-base"]
    trees.append(paths.wheelhouses / ".tmp-0123abcd-7")
    kept = [paths.wheelhouses / ("e" * 64)]
    kept += [campaign.store_checkpoints / ("d" * 64), campaign.vault / "test", campaign.store_run("r") / "predictions" / "test"]
    for folder in (*trees, *kept, campaign.results):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "file").touch()
    for folder in (tmp_path, campaign.root, campaign.results):
        (folder / f".record.json-{child.pid}-abcdefgh.tmp").touch()

    removed = tidy_state(paths)

    assert len(removed) == 7
    assert not any(folder.exists() for folder in trees) and all((folder / "file").exists() for folder in kept)
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_copy_that_was_removed_before_a_crash_could_tell_it_is_told_by_the_next_life(tmp_path: Path) -> None:
    """Otherwise history goes on promising a verified copy that is gone, and the job is asked for at every tick."""
    small = small_campaign(tmp_path)
    run = small.add_run("a", [9.0, 6.0, 5.0])
    copies = tuple(Replica(step=each.step, digest=each.digest, value=None, verified_at=ACT.at) for each in run.saved)
    for copy in copies:
        replicate_checkpoint(small.courier, small.paths, run.run_id, copy.step, copy.digest)
    gone, keep = copies[1].digest, sorted({copies[0].digest, copies[2].digest})
    os.rename(small.paths.store_checkpoints / gone, small.paths.store_checkpoints / f".tmp-pruned-{gone}")
    campaign = Campaign(
        campaign_id=CAMPAIGN, plan=small.plan, launched_at=ACT.at, cutoff_at=ACT.at, final_at=ACT.at, stage=CampaignStage.TRAINING, since=ACT.at,
        runs=(run.run_id,),
    )
    fleet = Fleet(campaigns={CAMPAIGN: campaign}, runs={run.run_id: replace(run, checkpoints=copies)})
    state = StatePaths(small.paths.root.parent.parent)
    jobs = Jobs(state, python=sys.executable, releases=Releases(state), write_report=lambda _: (tmp_path, tmp_path))

    done = jobs.run(Job(key="prune", kind="prune", campaign_id=CAMPAIGN, body={"keep": keep}), fleet, {}, ACT.at)

    assert done == {"removed": [gone]}
