"""What a coordinator makes of an environment: brought to hosts of this machine, compared between them, named in the order of a run."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from small_wheels import lock_of, small_wheel
from virtual_fleet import START, candidate, plan

from fleetd.campaign import AfterFreeze, EnvironmentPlan, HostPlan
from fleetd.coordinator.couriers import LocalCourier
from fleetd.coordinator.environments import Environments
from fleetd.coordinator.jobs import Jobs
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.sight import Job
from fleetd.coordinator.specs import build_spec
from fleetd.coordinator.wheelhouses import Wheelhouses
from fleetd.fleet import Campaign, Fleet, Run
from fleetd.model import Owner, RunSpec
from fleetd.paths import CampaignPaths, HostPaths, StatePaths
from fleetd.plan_lock import read_lock_file
from policies.errors import RequestRefused
from policies.facts import CampaignStage, RunKind, RunState

NAME = "ab/cpython-3.12.3-aarch64-0123456789ab"


class Office:
    """A coordinator's state, and hosts whose wheels need not be the same although their lock is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, CampaignPaths(folder / "campaign")
        self.paths.root.mkdir()
        self.releases = Releases(StatePaths(folder / "state"))
        self.environments = Environments(Wheelhouses(StatePaths(folder / "state")))
        self.lock = lock_of(folder / "lock", small_wheel(folder / "gx10", "alpha"))
        small_wheel(folder / "spark-a", "alpha", files={"alpha/of_this_host.py": "\n"})

    def host(self, name: str) -> HostPlan:
        asked = EnvironmentPlan(lock=str(self.lock), lock_sha256=read_lock_file(self.lock)[0].sha256, wheels=str(self.folder / name))
        return HostPlan(name=name, root=str(self.folder / f"{name}-root"), environment=asked)

    def bring(self, name: str, parity: str) -> tuple[str, ...]:
        host = self.host(name)
        courier = LocalCourier(name, Path(host.root))
        release = self.releases.stage(courier)
        answer, differences = self.environments.bring(self.paths, host, courier, release, parity)
        assert (HostPaths(Path(host.root)).environments / answer.name / "fleetd.json").is_file()
        self.environments.prune(host, courier, release, frozenset({answer.name}))
        return differences


def test_two_hosts_with_one_lock_and_other_wheels_differ_and_are_told_or_refused_as_the_plan_says(quick_path: Path) -> None:
    office = Office(quick_path)
    assert office.bring("gx10", "require") == ()
    with pytest.raises(RequestRefused) as caught:
        office.bring("spark-a", "require")
    assert caught.value.title == "the hosts differ" and "files of alpha 1.0" in caught.value.what and "host spark-a" in caught.value.where
    (told,) = office.bring("spark-a", "report")
    assert told.startswith("files of alpha 1.0")


def spec_of(command: tuple[str, ...] | None, digests: dict[str, str]) -> RunSpec:
    asked = EnvironmentPlan(lock="/l", lock_sha256="ab")
    host = HostPlan(name="gx10", transport="ssh", root="/srv/fleetd", environment=asked)
    own = candidate("own", command=command, task=None if command else {"steps": 1}, environment={"X": "1"})
    campaign = Campaign(
        campaign_id="c", plan=plan(own, hosts=(host, replace(host, name="spark-a"))), stage=CampaignStage.TRAINING, since=START, launched_at=START,
        final_at=START + timedelta(hours=2), cutoff_at=START + timedelta(hours=1), digests={"release": "r", **digests},
    )
    run = Run(run_id="c-own", campaign_id="c", candidate="own", kind=RunKind.TRAIN, host=None, state=RunState.QUEUED, since=START, added_at=START)
    return build_spec(campaign, run, host, owner=Owner(coordinator_id="x", generation=1), python="/own/python", now=START)


def test_the_order_of_a_run_names_the_environment_of_its_host_and_its_python() -> None:
    python = f"/srv/fleetd/environments/{NAME}/bin/python"
    digests = {"environment:gx10": NAME, "environment:spark-a": "cd/other"}
    ours = spec_of(None, digests)
    assert ours.argv == (python, "-m", "trainer", "train") and ours.digests["environment"] == NAME and "FLEETD_PYTHON" not in ours.environment
    for word in ("python", "python3"):
        assert spec_of((word, "train.py", "python"), digests).argv == (python, "train.py", "python")
    shell = spec_of(("sh", "-c", '"$FLEETD_PYTHON" train.py'), digests)
    assert shell.argv[0] == "sh" and shell.environment == {"FLEETD_PYTHON": python, "X": "1"}
    assert spec_of(("/usr/bin/python3", "x"), digests).argv[0] == "/usr/bin/python3", "a whole path means that very program"


def test_a_launch_keeps_the_locks_of_hosts_that_are_silent_too(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("six==1.17.0\n", encoding="utf-8")
    asked = EnvironmentPlan(lock=str(lock), lock_sha256=read_lock_file(lock)[0].sha256)
    own = candidate("own", command=("python", "x"), task=None)
    what = plan(own, hosts=(HostPlan(name="gx10", root="/virtual", environment=asked),), data=(), after_freeze=AfterFreeze())
    campaign = Campaign(
        campaign_id="c", plan=what, stage=CampaignStage.PREFLIGHT, since=START, launched_at=START,
        final_at=START + timedelta(hours=2), cutoff_at=START + timedelta(hours=1),
    )
    state = StatePaths(tmp_path / "state")
    jobs = Jobs(state, python="python3", releases=Releases(state), write_report=lambda _: (lock, lock))
    jobs.run(Job(key="preflight:c", kind="preflight", campaign_id="c"), Fleet(campaigns={"c": campaign}), {}, START)
    assert state.campaign("c").lock(asked.lock_sha256).read_bytes() == lock.read_bytes()
