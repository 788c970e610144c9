"""Displaced work as the coordinator decides: shown first, moved away in order before the first start, kept on the books until it is back."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import ROOT, VirtualCoordinator, VirtualHost, candidate, plan

from fleetd.campaign import HostPlan, Notify
from fleetd.coordinator.decide_displacement import displaced_words
from fleetd.coordinator.document import Daemon, build
from fleetd.coordinator.run_book import run_book, run_book_text
from fleetd.coordinator.sight import Job, JobDone, Order, OrderDone
from fleetd.coordinator.verdict import judge
from fleetd.model import DisplaceOrder
from fleetd.paths import StatePaths
from fleetd.wire import decode, encode
from policies.errors import NoRoom
from policies.facts import GIB, CampaignStage, ProcessIdentity, RunState
from policies.workloads import DisplacedState, FoundProcess, Progress, Restart, Workload, WorkloadSight

LLM = Workload(name="llm", unit="llm.service")
BOOK = Workload(name="book", pattern="jupyter", uid=1000, restart=Restart(command=("jupyter", "lab", "it's"), environment=("HF_HOME",)))
HOST = HostPlan(name="gx10", root=ROOT, capacity_bytes=8 * GIB, displace=(LLM, BOOK))


def sight(name: str, pid: int) -> WorkloadSight:
    identity = ProcessIdentity(boot_id="boot-1", pid=pid, start_ticks=1, uid=1000, argv=("python3", name))
    at = datetime(2026, 9, 1, tzinfo=timezone.utc)
    return WorkloadSight(
        name=name, agent_uid=0, processes=(FoundProcess(identity=identity, started_at=at, host_bytes=GIB, working_directory="/home/ada"),),
    )


class BusyHost(VirtualHost):
    """A host with work of others: it goes when it is asked, or is held, and comes back when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.runs_there = {"llm": True, "book": True}
        self.stays: set[str] = set()
        self.fails: set[str] = set()
        self.asked: list[tuple[str, str, int]] = []
        self.runs_at_asking: list[int] = []

    def obey(self, order: Order, now: datetime) -> OrderDone:
        if order.order not in ("displace", "restore"):
            return super().obey(order, now)
        body = decode(DisplaceOrder, order.body["displacement"])
        name = body.workload.name
        if (order.order, name, body.asking) not in self.asked[-1:]:
            self.asked.append((order.order, name, body.asking))
        self.runs_at_asking.append(len(self.specs))
        if order.order == "displace":
            self.runs_there[name] = name in self.stays
            state = DisplacedState.HELD if name in self.stays else DisplacedState.DISPLACED
        elif body.asking == 0:
            state = DisplacedState.RESTORED if self.runs_there[name] else DisplacedState.DISPLACED
        else:
            self.runs_there[name] = name not in self.fails
            state = DisplacedState.FAILED if name in self.fails else DisplacedState.RESTORED
        return OrderDone(order=order, answer={"progress": encode(Progress(state=state, text=f"{name} {state}"))})


class Office(VirtualCoordinator):
    def __init__(self, host: BusyHost) -> None:
        self.books: list[Any] = []
        super().__init__(host)

    def _done(self, job: Job) -> JobDone:
        if job.kind == "run_book":
            self.books.append(run_book(self.campaign()))
            return JobDone(job=job, result={"moves": self.campaign().displaced_moves, "path": "displaced.json"})
        done = super()._done(job)
        if job.kind == "preflight":
            shown = [{"host": "gx10", "workload": encode(each), "found": encode(sight(each.name, pid))} for each, pid in ((LLM, 7), (BOOK, 8))]
            done.result.update(displaced=shown, looked_at=["gx10"])
        return done

    def states(self) -> dict[str, str]:
        return {item.workload.name: item.state.value for item in self.campaign().displaced}

    def words(self) -> str:
        return judge(self.fleet, self.board.take(self.news, self.now, "ok"), self.now, "ok").text

    def ask_restore(self, **body: Any) -> dict[str, Any]:
        number = self.ask("restore", target=self.campaign().campaign_id, **body)
        for _ in range(40):
            self.round()
            if number in self.replies:
                reply = self.replies[number]
                return reply.error or reply.body
        raise AssertionError("no answer")


@pytest.fixture
def host() -> BusyHost:
    return BusyHost()


@pytest.fixture
def office(host: BusyHost) -> Office:
    found = Office(host)
    found.launch(plan(candidate("low"), hosts=(HOST,)))
    return found


def test_work_goes_in_the_plans_order_after_the_run_book_and_before_the_first_start(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.EVALUATED)
    assert host.asked[:2] == [("displace", "llm", 0), ("displace", "book", 0)] and set(host.runs_at_asking[:2]) == {0}
    kinds = [event.kind for event in office.events()]
    first = kinds.index("displacement_moved")
    assert kinds.index("displacement_planned") < kinds.index("run_book_written") < first < kinds.index("run_placed")
    assert [item["state"] for item in office.books[0]["displaced"]] == ["found", "found"], "on the disk before anything was asked to go"
    assert office.states() == {"llm": "displaced", "book": "displaced"}


def test_the_end_of_the_campaign_tells_of_it_until_it_is_back_in_the_reverse_order(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.EVALUATED)
    name = office.campaign().campaign_id
    assert f"displaced work not yet restored on gx10: llm, book (fleetd restore {name} --host gx10)" in office.words()
    del host.asked[:]
    answer = office.ask_restore()
    assert [each["state"] for each in answer["displaced"]] == ["restored", "restored"]
    assert [asked for asked in host.asked if asked[2]] == [("restore", "book", 1), ("restore", "llm", 1)]
    assert "displaced" not in office.words()
    office.round()
    assert [item["state"] for item in office.books[-1]["displaced"]] == ["restored", "restored"], "each outcome is in the run book"
    again = office.ask_restore()
    assert [each["state"] for each in again["displaced"]] == ["restored", "restored"] and len([asked for asked in host.asked if asked[2]]) == 2


def test_what_does_not_end_holds_the_start_and_is_said_and_goes_on_once_it_has_ended(office: Office, host: BusyHost) -> None:
    host.stays.add("llm")
    for _ in range(30):
        office.round()
    run = office.run("low")
    assert run.state is RunState.QUEUED and run.detail == "waits for llm to make room on gx10: llm held"
    assert "llm on gx10 does not make room: llm held" in office.words()
    assert not host.specs and not any(asked[1] == "book" for asked in host.asked), "in order: the next one waits"
    assert len(office.events("displacement_moved")) == 1, "asked again and again, told once"
    host.stays.clear()
    office.until(CampaignStage.EVALUATED)
    assert office.states() == {"llm": "displaced", "book": "displaced"}


def test_a_restore_waits_for_the_runs_unless_it_is_said_now(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.TRAINING)
    for _ in range(6):
        office.round(work=False)
    refused = office.ask_restore()
    assert refused["title"] == "runs still need the room" and "low on gx10" in refused["what"] and "--now" in refused["fix"]
    answer = office.ask_restore(now=True)
    assert [each["state"] for each in answer["displaced"]] == ["restored", "restored"]
    office.until(CampaignStage.EVALUATED)
    assert office.states() == {"llm": "restored", "book": "restored"}, "once back, it is not moved away a second time"


def test_the_plan_may_bring_it_back_by_itself(host: BusyHost) -> None:
    office = Office(host)
    office.launch(plan(candidate("low"), hosts=(HOST,), restore_displaced=True))
    office.until(CampaignStage.EVALUATED)
    for _ in range(6):
        office.round()
    assert office.states() == {"llm": "restored", "book": "restored"} and host.runs_there == {"llm": True, "book": True}
    assert "displaced" not in office.words()


def test_what_would_not_go_by_the_end_is_told_as_perhaps_alive_and_recognised_by_a_restore(office: Office, host: BusyHost) -> None:
    host.stays.add("llm")
    for _ in range(8):
        office.round()
    office.ask("stop", target="all")
    for _ in range(4):
        office.round()
    for _ in range(70):
        office.round(200.0)
    assert office.campaign().stage is CampaignStage.FAILED
    assert "displaced work not yet restored on gx10: llm (asked to end, perhaps alive)" in str(displaced_words(office.fleet))
    assert [each["state"] for each in office.ask_restore()["displaced"]] == ["restored", "found"], "what was never touched is left as it is"
    assert displaced_words(office.fleet) == []


def test_work_that_comes_back_by_itself_is_told_while_the_campaign_needs_the_room(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.TRAINING)
    for _ in range(6):
        office.round(work=False)
    host.runs_there["llm"] = True  # a reboot, or a person
    for _ in range(40):
        office.round(work=False)
    assert office.states() == {"llm": "returned", "book": "displaced"}
    assert "llm on gx10 is back beside the runs of demo: llm restored" in office.words()
    assert all(asked[0] != "displace" for asked in host.asked[2:]), "it was not shown in preflight, so nobody touches it"


@pytest.mark.parametrize("ticks", range(4, 16))
def test_a_coordinator_that_dies_at_any_moment_asks_for_exactly_what_is_missing(host: BusyHost, ticks: int) -> None:
    office = Office(host)
    office.launch(plan(candidate("low"), hosts=(HOST,)))
    for _ in range(ticks):
        office.round()
    office.crash()
    if not office.fleet.campaigns:
        return
    office.until(CampaignStage.EVALUATED)
    assert office.states() == {"llm": "displaced", "book": "displaced"} and len(set(host.specs)) == 2
    office.ask_restore()
    assert host.runs_there == {"llm": True, "book": True}


def test_a_host_that_is_silent_gets_it_back_once_it_answers(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.EVALUATED)
    office.silent.add("gx10")
    answer = office.ask_restore()
    assert [each["state"] for each in answer["displaced"]] == ["restoring", "restoring"] and not any(host.runs_there.values())
    office.silent.clear()
    for _ in range(70):
        office.round()
    assert office.states() == {"llm": "restored", "book": "restored"}


def test_what_was_never_shown_is_never_touched_and_nothing_starts_beside_it(office: Office, host: BusyHost, monkeypatch: pytest.MonkeyPatch) -> None:
    done = office._done

    def looked_at_nobody(job: Job) -> JobDone:
        found = done(job)
        found.result.update(displaced=[], looked_at=[])
        return found

    monkeypatch.setattr(office, "_done", looked_at_nobody)
    for _ in range(12):
        office.round()
    assert "which was silent when preflight looked" in office.run("low").detail and not host.specs and host.asked == []


def test_what_nobody_wants_back_is_said_once_and_told_no_more(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.EVALUATED)
    answer = office.ask_restore(leave=True, because="another box has it")
    assert [(each["state"], each["detail"]) for each in answer["displaced"]] == [("left", "another box has it")] * 2
    assert "displaced" not in office.words() and not any(host.runs_there.values())
    assert [each["state"] for each in office.ask_restore()["displaced"]] == ["restored", "restored"], "a mind may change"


def test_while_the_run_book_can_not_be_written_nothing_is_asked_to_go(office: Office, host: BusyHost) -> None:
    office.failing["run_book"] = NoRoom("the disk is full", where="displaced.json", what="ENOSPC", fix="free some space").to_json()
    for _ in range(12):
        office.round()
    assert host.asked == [] and office.run("low").detail == "waits for the run book of displaced work on gx10"
    assert office.campaign().stage is CampaignStage.TRAINING, "and it is tried again"
    del office.failing["run_book"]
    office.until(CampaignStage.EVALUATED, 120)
    assert office.states() == {"llm": "displaced", "book": "displaced"}


def test_a_restore_that_failed_can_be_asked_for_again_and_each_asking_counts(office: Office, host: BusyHost) -> None:
    office.until(CampaignStage.EVALUATED)
    host.fails.add("llm")
    answer = office.ask_restore()
    assert [each["state"] for each in answer["displaced"]] == ["failed", "restored"]
    assert "llm on gx10 could not be brought back: llm failed" in office.words()
    host.fails.clear()
    answer = office.ask_restore()
    assert [each["state"] for each in answer["displaced"]] == ["restored", "restored"]
    assert [asked for asked in host.asked if asked[:2] == ("restore", "llm") and asked[2]] == [("restore", "llm", 1), ("restore", "llm", 2)]


def test_who_asked_to_be_told_is_told_of_work_that_does_not_go(host: BusyHost) -> None:
    office = Office(host)
    host.stays.add("llm")
    office.launch(plan(candidate("low"), hosts=(HOST,), notify=(Notify(command=("tell",), on=("needs_you",)),)))
    for _ in range(12):
        office.round()
    (told,) = office.events("notified")
    assert told.body["kind"] == "needs_you" and "llm held" in told.because


def test_the_run_book_holds_whole_commands_in_the_order_in_which_they_are_typed(office: Office) -> None:
    office.until(CampaignStage.EVALUATED)
    text, name = run_book_text(office.campaign()), office.campaign().campaign_id
    assert text.index("### book") < text.index("### llm")
    assert "\nsystemctl start llm.service\n" in text
    folder = f"{ROOT}/displaced/{name}"
    line = next(line for line in text.splitlines() if line.startswith("sudo"))
    assert line.startswith("sudo -u '#1000' env -i setsid -f sh -c ")
    assert f"/home/ada {folder}/book-0.env {folder}/book.log jupyter lab 'it'\"'\"'s'" in line


def test_the_status_document_shows_each_of_them(office: Office) -> None:
    office.until(CampaignStage.EVALUATED)
    daemon = Daemon(pid=1, id="c0ffee", generation=1, started_at=office.now, paths=StatePaths(Path(ROOT)))
    seen = build(office.fleet, office.board.take(office.news, office.now, "ok"), daemon, now=office.now, journal_health="ok")
    shown = [(each["name"], each["host"], each["state"], each["pids_found"]) for each in seen["campaigns"][0]["displaced"]]
    assert shown == [("llm", "gx10", "displaced", [7]), ("book", "gx10", "displaced", [8])]


def test_a_campaign_without_displaced_work_has_nothing_to_restore() -> None:
    office = Office(BusyHost())
    office._done = lambda job: VirtualCoordinator._done(office, job)  # type: ignore[method-assign]
    office.launch(plan(candidate("low")))
    office.until(CampaignStage.EVALUATED)
    assert office.ask_restore()["error"] == "NotFound" and office.books == []
