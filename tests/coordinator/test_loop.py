"""The real loop with its threads, inbox, journal and workers; hosts are virtual behind the session protocol, jobs are functions."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import VirtualHost, candidate, plan

from fleetd import clock
from fleetd import journal as journal_module
from fleetd.coordinator import decide_launch
from fleetd.coordinator.couriers import Courier, LocalCourier
from fleetd.coordinator.loop import Loop, replay_journal
from fleetd.coordinator.sight import Job, Order
from fleetd.fleet import Fleet
from fleetd.journal import Journal
from fleetd.kept_clock import KeptClock
from fleetd.model import Owner
from fleetd.wire import encode
from policies.errors import LedgerDamaged, from_json
from policies.facts import CampaignStage, RunState, format_moment

OWNER = Owner(coordinator_id="c0ffee", generation=1)
WAIT_SECONDS_MAX = 90.0
HANG_SECONDS = 600.0
"""A host that hangs does so for longer than anybody waits."""


class VirtualSession:
    """A session to a virtual host, which works a stride at each poll."""

    def __init__(self, host: VirtualHost, folder: Path) -> None:
        self.host = host
        self.courier: Courier = LocalCourier(host.name, folder)
        self.hangs = threading.Event()
        self.goes_on = threading.Event()
        self.acknowledged: dict[str, int] = {}
        self.before_second_start: Callable[[], None] = lambda: None

    def call(self, order: str, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        if self.hangs.is_set():
            self.goes_on.wait(HANG_SECONDS)
        now = clock.read().now
        if order in ("hello", "facts"):
            return {"protocol": 1, "facts": encode(self.host.facts())}
        if order == "poll":
            self.acknowledged = body["after"]
            for run_id in list(self.host.specs):
                self.host.work(run_id, now)
            answer = self.host.answer(body["after"], now)
            return {"at": format_moment(now), "memory_available_bytes": 2**40, "disk_free_bytes": 1, "runs": encode(answer.reports)}
        run_id = body.get("run_id") or body["spec"]["run_id"]
        if order == "start" and len(self.host.start_orders) == 1:
            self.before_second_start()
        done = self.host.obey(Order(key="", host=self.host.name, order=order, run_id=run_id, body=body), now)
        if done.error is not None:
            raise from_json(done.error)
        return done.answer

    def close(self) -> None:
        self.goes_on.set()


class Office:
    """A loop in its thread, with a journal on a real disk."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.host = folder, VirtualHost(memory_bytes=2**40)
        self.jobs: list[str] = []
        self.broken: dict[str, Exception] = {}
        self.before: dict[str, Callable[[], None]] = {}
        """What happens in the world just when a kind of job is done."""
        self.session = VirtualSession(self.host, folder)
        self.begin()

    def begin(self) -> None:
        self.journal = Journal.open(self.folder / "journal.db")
        self.loop = Loop(
            self.journal, OWNER, python="python", make_session=lambda plan, owner: self.session, run_job=self.do,
            kept_clock=KeptClock(self.folder / "clock.json"),
        )
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def do(self, job: Job, fleet: Fleet, sessions: dict[str, Any], now: Any) -> dict[str, Any]:
        self.jobs.append(job.kind)
        self.before.get(job.kind, lambda: None)()
        if job.kind in self.broken:
            raise self.broken[job.kind]
        results: dict[str, dict[str, Any]] = {
            "preflight": {"digests": {"train": "t", "validation": "v", "test": "e"}}, "stage": {"digests": {"release": "r"}},
            "select": {
                "because": "lowest", "run_id": "x", "candidate": "low", "step": 1, "checkpoint_digest": "c", "base_checkpoint_digest": "b",
                "table": [],
            },
            "freeze": {"frozen_sha256": "f"}, "stage_evaluation": {"digests": {}, "opening": {"split": "test", "number": 1}}, "judge": {"result": {}},
            "prune": {"removed": []},
        }
        return results.get(job.kind, {})

    @property
    def fleet(self) -> Fleet:
        return self.loop.published.fleet if self.loop.published is not None else Fleet()

    def until(self, what: Callable[[], bool]) -> None:
        give_up_seconds = time.monotonic() + WAIT_SECONDS_MAX
        while not what():
            assert time.monotonic() < give_up_seconds, [(run.candidate, run.state.value, run.detail) for run in self.fleet.runs.values()]
            time.sleep(0.02)

    def is_at_work(self) -> bool:
        """Whether a run has got so far: it may be over again by the next look."""
        return any(run.state is RunState.RUNNING or run.exits for run in self.fleet.runs.values())

    def disk(self, *, writable: bool) -> None:
        """From here on every write of the journal fails, as on a disk that went read-only; or works again."""
        connection = self.journal._connection
        assert connection is not None
        connection.execute(f"PRAGMA query_only = {'OFF' if writable else 'ON'}")

    def ticks(self, count: int) -> None:
        for _ in range(count):
            before = self.loop.published
            self.loop.inbox.wake()
            self.until(lambda seen=before: self.loop.published is not seen)  # type: ignore[misc]

    def launch(self) -> None:
        reply = self.loop.inbox.ask("launch", {"plan": encode(plan(candidate("low"), candidate("high"))), "actor": "user:test"}, WAIT_SECONDS_MAX)
        assert reply.error is None, reply.error

    def stage(self) -> CampaignStage | None:
        return next((campaign.stage for campaign in self.fleet.campaigns.values()), None)

    def end(self) -> Fleet:
        self.session.close()
        self.loop.stop()
        self.thread.join(WAIT_SECONDS_MAX)
        assert not self.thread.is_alive()
        fleet = replay_journal(self.journal)
        self.journal.close()
        return fleet


@pytest.fixture
def make_office(tmp_path: Path) -> Iterator[Callable[[], Office]]:
    made: list[Office] = []

    def make() -> Office:
        made.append(Office(tmp_path))
        return made[-1]

    yield make
    for office in made:
        if office.thread.is_alive():
            office.end()


@pytest.fixture
def office(make_office: Callable[[], Office]) -> Office:
    return make_office()


def test_a_campaign_goes_through_threads_and_disk_as_it_does_in_the_story(office: Office) -> None:
    office.launch()
    office.until(lambda: any(campaign.reported for campaign in office.fleet.campaigns.values()))
    lived = office.fleet

    replayed = office.end()
    assert lived.campaigns == replayed.campaigns and lived.runs == replayed.runs
    assert office.stage() is CampaignStage.EVALUATED
    assert {spec.run_id for spec in office.host.start_orders} == set(replayed.runs)


def test_a_new_loop_on_the_same_journal_goes_on_where_the_first_one_was(office: Office) -> None:
    office.launch()
    office.until(office.is_at_work)
    office.end()
    office.session = VirtualSession(office.host, office.folder)
    office.begin()
    office.until(lambda: any(campaign.reported for campaign in office.fleet.campaigns.values()))

    placed = {run.run_id: run.spec for run in office.fleet.runs.values()}
    assert all(spec == placed[spec.run_id] for spec in office.host.start_orders)
    assert [kind for kind in office.jobs if kind == "preflight"] == ["preflight"], "what is done is not asked for again"


def test_a_hanging_host_holds_up_nobody_else(office: Office) -> None:
    office.launch()
    office.session.hangs.set()
    before = office.loop.published
    office.until(lambda: office.loop.published is not before)

    reply = office.loop.inbox.ask("stop", {"target": "demo", "mode": "graceful", "actor": "user:test"}, WAIT_SECONDS_MAX)
    assert reply.error is None and len(reply.body["runs"]) == 2


def test_no_start_leaves_before_its_intent_is_on_the_disk(office: Office) -> None:
    office.before["stage"] = lambda: office.disk(writable=False)
    office.launch()
    office.until(lambda: any(run.state is RunState.STARTING for run in office.fleet.runs.values()))
    office.ticks(10)
    assert not office.host.start_orders and office.loop.published is not None and office.loop.published.journal_health != "ok"

    office.disk(writable=True)
    office.until(lambda: len(office.host.start_orders) == 2)


def test_a_host_keeps_its_notices_until_they_are_on_the_disk(office: Office) -> None:
    office.launch()
    office.until(lambda: len(office.host.start_orders) == 2)
    office.disk(writable=False)
    office.until(lambda: all(run.notices_seen >= 6 for run in office.fleet.runs.values()))
    office.ticks(5)

    durable = replay_journal(office.journal)
    assert all(sequence <= durable.runs[run_id].notices_seen for run_id, sequence in office.session.acknowledged.items())
    office.disk(writable=True)
    office.until(lambda: office.session.acknowledged.get(next(iter(office.fleet.runs)), 0) >= 6)


def test_a_disk_that_stays_full_for_days_loses_nothing_of_what_hosts_tell(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits in memory is bounded. Beyond half of that bound notices are left with their hosts, which tell them again."""
    monkeypatch.setattr(journal_module, "QUEUE_ENTRIES_MAX", 12)
    office.session.before_second_start = lambda: office.disk(writable=False)  # not later: the hosts would have told all of it
    office.launch()
    office.until(lambda: len(office.host.start_orders) == 2)
    office.until(lambda: {office.host.states[run_id] for run_id in office.host.specs} <= {RunState.FINISHED})
    office.ticks(10)
    assert office.journal.is_crowded and "lost" not in office.journal.health
    assert not all(run.state is RunState.FINISHED for run in office.fleet.runs.values()), "the hosts have told more than there is room for"

    office.disk(writable=True)

    office.until(lambda: office.stage() is CampaignStage.EVALUATED)
    lived = office.fleet
    durable = office.end()
    assert all(durable.runs[run_id].notices_seen == run.notices_seen for run_id, run in lived.runs.items())


def test_a_launch_that_a_full_disk_holds_up_is_answered_with_what_it_waits_for(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide_launch, "LAUNCH_WAIT_SECONDS", 0.2)
    office.broken["preflight"] = OSError(errno.ENOSPC, "No space left on device", "/state/plan.yaml")
    reply = office.loop.inbox.ask("launch", {"plan": encode(plan(candidate("low"))), "actor": "user:test"}, WAIT_SECONDS_MAX)
    assert reply.error is not None and "No space left" in reply.error["what"]
    (campaign_id,) = office.fleet.campaigns
    assert "/state/plan.yaml" in reply.error["where"] and f"fleetd stop {campaign_id}" in reply.error["fix"]

    del office.broken["preflight"]
    office.until(lambda: office.stage() not in (None, CampaignStage.PREFLIGHT))


@pytest.mark.parametrize("job", ["select", "freeze", "stage_evaluation", "judge"])
def test_what_was_damaged_after_the_training_can_be_mended_and_the_campaign_goes_on(office: Office, job: str) -> None:
    office.broken[job] = LedgerDamaged("the ledger does not verify", where="entry 2", what="its hash is another one", fix="restore it from a backup")
    office.launch()
    office.until(lambda: office.jobs.count(job) >= 2)
    assert office.stage() in (CampaignStage.SELECTING, CampaignStage.FROZEN)

    del office.broken[job]
    office.until(lambda: office.stage() is CampaignStage.EVALUATED)


def test_a_stop_reaches_its_host_although_the_disk_is_full(office: Office) -> None:
    office.launch()
    office.until(lambda: len(office.host.start_orders) == 2)
    office.disk(writable=False)
    office.until(lambda: office.loop.published is not None and office.loop.published.journal_health != "ok")
    reply = office.loop.inbox.ask("stop", {"target": "all", "mode": "graceful", "actor": "user:test"}, WAIT_SECONDS_MAX)
    refused = office.loop.inbox.ask("launch", {"plan": encode(plan(name="other", plan_sha256="cd" * 32)), "actor": "user:test"}, WAIT_SECONDS_MAX)

    assert reply.error is None and refused.error is not None and "journal" in refused.error["where"]
    office.until(lambda: {office.host.states[run_id] for run_id in office.host.specs} <= {RunState.STOPPED, RunState.FINISHED})
    office.disk(writable=True)
    office.until(lambda: office.journal.health == "ok")
    lived = office.fleet
    assert office.end().runs.keys() == lived.runs.keys()


def test_a_job_that_breaks_down_ends_its_campaign_and_not_the_loop(office: Office) -> None:
    office.broken["select"] = KeyError("our mistake")
    office.launch()
    office.until(lambda: office.stage() is CampaignStage.FAILED)

    assert "select broke down: KeyError('our mistake')" in next(iter(office.fleet.campaigns.values())).detail
    assert office.thread.is_alive()


def test_a_full_disk_of_a_job_is_tried_again_and_shown(office: Office) -> None:
    office.broken["stage"] = OSError(28, "No space left on device", "/host/datasets")
    office.launch()
    office.until(lambda: office.jobs.count("stage") >= 2)
    assert office.stage() is CampaignStage.STAGING
    office.broken.clear()

    office.until(lambda: any(campaign.reported for campaign in office.fleet.campaigns.values()))
    assert office.stage() is CampaignStage.EVALUATED


def test_a_step_of_the_wall_clock_moves_no_deadline(tmp_path: Path, make_office: Callable[[], Office], monkeypatch: pytest.MonkeyPatch) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv(clock.ENV_OFFSET_FILE, str(offset))
    office = make_office()
    office.launch()
    office.until(office.is_at_work)
    offset.write_text("36000")
    office.until(lambda: office.loop.published is not None and bool(office.loop.published.clock_alarm))
    office.until(lambda: any(campaign.reported for campaign in office.fleet.campaigns.values()))

    assert {run.reason for run in office.end().runs.values()} == {None}, "ten hours of wall clock ended no run by its deadline"
    assert office.stage() is CampaignStage.EVALUATED


@pytest.mark.parametrize("step", ["36000", "-36000"])
def test_a_step_while_no_coordinator_ran_moves_no_deadline(
    tmp_path: Path, make_office: Callable[[], Office], monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    offset = tmp_path / "offset"
    offset.write_text("0")
    monkeypatch.setenv(clock.ENV_OFFSET_FILE, str(offset))
    office = make_office()
    office.launch()
    office.until(office.is_at_work)
    before = office.end()
    offset.write_text(step)
    office.session = VirtualSession(office.host, office.folder)
    office.begin()
    office.until(lambda: any(campaign.reported for campaign in office.fleet.campaigns.values()))

    assert office.loop.published is not None and "clock.json" in office.loop.published.clock_alarm, "it is said, with what to do about it"
    after = office.end()
    assert {run.reason for run in after.runs.values()} == {None}, "neither was a run ended early nor an evaluation called late"
    (campaign,), (earlier,) = after.campaigns.values(), before.campaigns.values()
    assert campaign.cutoff_at == earlier.cutoff_at and earlier.since <= campaign.since < campaign.cutoff_at, "history's time never jumps"
