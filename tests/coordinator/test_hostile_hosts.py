"""A host that answers nonsense, by malice or by damage, costs its own link a rest: never the loop, an order, or a file elsewhere."""

from __future__ import annotations

import errno
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from virtual_fleet import VirtualCoordinator, plan

from fleetd.campaign import HostPlan
from fleetd.coordinator.deliveries import Deliveries
from fleetd.coordinator.inbox import HostTrouble, Inbox
from fleetd.coordinator.links import HostLink
from fleetd.coordinator.loop import Loop
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.sight import Job, Order
from fleetd.coordinator.ssh_courier import SshCourier
from fleetd.coordinator.ssh_road import Porter, SshRoad
from fleetd.coordinator.tree_delivery import Stager, tree_of
from fleetd.fleet import Fleet
from fleetd.journal import Journal
from fleetd.model import Owner
from fleetd.paths import StatePaths
from fleetd.wire import WireError, dumps, loads
from policies.deadlines import cutoff_at, reserve_seconds
from policies.errors import ExplainedError, HostUnreachable, NoRoom, NotFound, RequestRefused, from_json
from policies.facts import CampaignStage, RunState, parse_moment
from policies.manifest import directory_digest

WAIT_SECONDS_MAX = 90.0
HOST = HostPlan(name="h", root="/x")
FACTS = {
    "hostname": "h", "boot_id": "b", "kernel": "k", "python": "3", "architecture": "x", "cpu_count": 1, "memory_total_bytes": 8,
    "memory_available_bytes": 4, "disk_free_bytes": 2, "root_writable": True,
}


class Scripted:
    """A session whose answers are given; an exception is raised."""

    courier: Any = None

    def __init__(self, **answers: Any) -> None:
        self._answers = {"hello": {"facts": FACTS}, "poll": {"at": "2026-11-30T12:00:00.000000Z", "runs": []}, **answers}

    def call(self, order: str, body: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        answer = self._answers[order]
        if isinstance(answer, Exception):
            raise answer
        found: dict[str, Any] = answer
        return found

    def close(self) -> None:
        pass


def told(session: Scripted, order: str) -> tuple[list[Any], list[Any]]:
    """What the loop hears of the host and of one order until it has heard of the order and of trouble."""
    inbox = Inbox()
    link = HostLink(HOST, session, inbox, lambda host: {})
    link.send(Order(key=f"{order}:run", host="h", order=order, run_id="run", body={}))
    link.start()
    hosts: list[Any] = []
    orders: list[Any] = []
    give_up_seconds = time.monotonic() + WAIT_SECONDS_MAX
    while not (orders and any(isinstance(each, HostTrouble) for each in hosts)) and time.monotonic() < give_up_seconds:
        inbox.wait(0.1)
        news = inbox.drain()
        hosts, orders = [*hosts, *news.hosts], [*orders, *news.orders]
    link.close(WAIT_SECONDS_MAX)
    return hosts, orders


def test_a_start_that_never_left_is_no_refusal_whatever_kept_its_host_from_being_reached() -> None:
    """A read-only root or an ssh -G that took too long says nothing of a run that an earlier try may have started there."""
    trouble = RequestRefused("the root on host h is read-only", where="h", what="read-only", fix="remount it")
    hosts, orders = told(Scripted(hello=trouble), "start")

    assert hosts[0].error["error"] == "RequestRefused", "the person still reads what it is"
    assert orders[0].error["error"] == "HostUnreachable" and orders[0].error["title"] == trouble.title


def test_an_order_whose_answer_breaks_the_link_is_given_back_to_be_sent_again() -> None:
    _, orders = told(Scripted(want=AttributeError("no such thing")), "want")

    assert [done.order.key for done in orders] == ["want:run"] and orders[0].error["error"] == "HostUnreachable"


@pytest.mark.parametrize("poll", [
    {"at": "2026-11-30T12:00:00.000000Z", "runs": [], "memory_available_bytes": "much"}, {"at": 5, "runs": []}, {"runs": {}}, {},
])
def test_a_poll_that_cannot_be_counted_with_is_trouble_of_its_link(poll: dict[str, Any]) -> None:
    hosts, _ = told(Scripted(poll=poll, want={"applied": True}), "want")

    assert any(isinstance(each, HostTrouble) and "can't be read" in each.error["title"] for each in hosts)


@pytest.mark.parametrize("text", [
    '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}', r'{"a": "\ud800"}', r'{"\udcff": 1}', b'{"a": "\xed\xa0\x80"}', '{"a": %s}' % ("9" * 5000),
])
def test_what_could_not_be_written_down_again_is_not_taken_in(text: str | bytes) -> None:
    with pytest.raises(WireError):
        loads(text)


def test_what_can_be_written_down_is_taken_in() -> None:
    value = loads(rb'{"a": "\ud83d\ude00 \\ud800 \u00e4", "b": 1e9, "c": -0.5}')

    assert value == {"a": "\U0001f600 \\ud800 ä", "b": 1e9, "c": -0.5} and loads(dumps(value)) == value
    assert str(loads('{"loss": NaN}', any_float=True)["loss"]) == "nan", "a trainer may write so, and its line still counts"


def test_a_change_of_state_for_a_reason_that_is_no_word_stops_neither_the_loop_nor_a_replay() -> None:
    fleet = VirtualCoordinator()
    fleet.launch(plan())
    fleet.tick()
    fleet.until(CampaignStage.TRAINING)
    fleet.round()
    fleet.hosts["gx10"].tell(fleet.run("low").run_id, "state_changed", fleet.now, to="stopping", reason=["user"])
    for _ in range(3):
        fleet.round()
    before = fleet.run("low")
    assert (before.state, before.reason) == (RunState.STOPPING, None), "what can be understood of it holds"
    fleet.crash()
    fleet.round()
    assert (fleet.run("low").state, fleet.run("low").reason) == (before.state, before.reason)


def test_a_reserve_that_was_mismeasured_is_still_a_date() -> None:
    reserve = reserve_seconds(rows=10 ** 9, seconds_per_row=1.8e9, minimum_seconds=60.0, factor=1.3, margin_seconds=600.0)
    final_at = parse_moment("2026-12-01T00:00:00.000000Z")

    assert final_at - cutoff_at(final_at, reserve) == timedelta(days=3650)


@pytest.mark.parametrize("error", [{"error": ["x"]}, {"title": 5}, {}])
def test_an_error_of_any_shape_is_an_error(error: dict[str, Any]) -> None:
    assert isinstance(from_json(error), ExplainedError)


def test_a_host_at_the_end_of_a_slow_line_holds_no_worker_but_its_own(tmp_path: Path) -> None:
    goes_on, done = threading.Event(), []

    def run(job: Job, *rest: Any) -> dict[str, Any]:
        if job.host == "slow":
            goes_on.wait(10 * WAIT_SECONDS_MAX)
        done.append(job.key)
        return {}

    journal, owner = Journal.open(tmp_path / "journal.db"), Owner(coordinator_id="c", generation=1)
    loop = Loop(journal, owner, python="python3", make_session=lambda plan, owner: Scripted(), run_job=run)
    jobs = [Job(key=f"copy {number}", kind="checkpoint", campaign_id="c", host="slow") for number in range(8)]
    others = [Job(key="copy", kind="checkpoint", campaign_id="c", host="quick"), Job(key="select", kind="select", campaign_id="c")]
    futures = [loop._workers_for(job).submit(loop._work, job, Fleet(), parse_moment("2026-12-01T00:00:00.000000Z")) for job in [*jobs, *others]]
    for future in futures[-2:]:
        future.result(WAIT_SECONDS_MAX)
    assert sorted(done) == ["copy", "select"]
    goes_on.set()
    for future in futures:
        future.result(WAIT_SECONDS_MAX)


class Refusing:
    """A channel whose other end has answered and left."""

    def write(self, data: bytes, until_seconds: float) -> None:
        raise OSError("Socket is closed")

    def has_answer(self) -> bool:
        return True

    def read_object(self, until_seconds: float) -> dict[str, Any]:
        return {"ok": False, "kind": "os", "errno": errno.ENOSPC, "what": "No space left on device", "path": "/x/datasets"}


def test_a_host_that_ran_out_of_room_and_left_is_full_and_not_silent() -> None:
    porter = Porter(SshRoad(HostPlan(name="h", root="/x", transport="ssh"), Owner(coordinator_id="c", generation=1)), Refusing())  # type: ignore[arg-type]
    with pytest.raises(NoRoom, match="No space left"):
        porter.send(iter([b"1", b"2"]), 1.0)


class Saying:
    """A channel on which a host has said something, whatever it was asked."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._answer = answer

    def write(self, data: bytes, until_seconds: float) -> None:
        pass

    def read_object(self, until_seconds: float) -> dict[str, Any]:
        return self._answer


@pytest.mark.parametrize("have", [None, 5, "x", {"a": 1}, {"a": [1]}, {"a": ["x", "y"]}, [["a", 1, "b"]]])
def test_what_a_host_says_it_has_of_a_tree_may_be_nonsense_and_costs_one_try(have: Any, tmp_path: Path) -> None:
    road = SshRoad(HostPlan(name="h", root="/x", transport="ssh"), Owner(coordinator_id="c", generation=1))
    tree = tree_of("datasets", directory_digest(()), tmp_path, ())
    stager = Stager(road, Saying({"ok": True, "present": False, "have": have}))  # type: ignore[arg-type]
    with Deliveries().under_way("h", "datasets", tree.digest, 1) as delivery, pytest.raises(HostUnreachable, match="can't be read"):
        stager.begin(tree, delivery)


class Line:
    """What the courier needs of an agent's line."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.closed, self.lines = answer, False, self
        self.channel = self

    def ask(self, order: str, body: dict[str, Any], until_seconds: float) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def has_answer(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True


def courier_with(answer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[SshCourier, Line]:
    monkeypatch.setattr(SshRoad, "is_open", True)
    courier, line = SshCourier(SshRoad(HostPlan(name="h", root="/x", transport="ssh"), Owner(coordinator_id="c", generation=1))), Line(answer)
    monkeypatch.setattr(courier, "_new_line", lambda: line)
    return courier, line


@pytest.mark.parametrize("path", ["/etc/cron.d/x", "../../up", "a/../../up", "", "nul\0"])
def test_a_host_can_not_name_a_file_outside_of_what_was_asked_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    courier, _ = courier_with({"entries": [{"path": path, "bytes": 1, "sha256": "0" * 64}]}, monkeypatch)
    with pytest.raises(HostUnreachable, match="outside"):
        courier.look("run", "predictions")


@pytest.mark.parametrize("answer", [{}, {"entries": 5}, {"entries": [{}]}, {"entries": ["x"]}])
def test_a_list_of_files_that_is_none_is_no_crash(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    courier, _ = courier_with(answer, monkeypatch)
    with pytest.raises(HostUnreachable, match="can't be read"):
        courier.look("run", "predictions")


@pytest.mark.parametrize("answer", [{"present": True}, NotFound("no", where="h", what="gone", fix="none")])
def test_a_line_that_another_thread_has_taken_up_already_is_not_closed_under_it(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    courier, line = courier_with(answer, monkeypatch)
    keep = courier._keep

    def kept_and_taken(found: Any) -> Any:
        is_kept = keep(found)
        assert courier._idle_line() is found, "another thread was quick"
        return is_kept

    monkeypatch.setattr(courier, "_keep", kept_and_taken)
    if isinstance(answer, Exception):
        with pytest.raises(NotFound):
            courier._ask("has", {})
    else:
        courier._ask("has", {})

    assert not line.closed


def test_two_architectures_that_are_built_at_once_keep_both_releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build of the second one tidies the store at the very moment at which the first one is in place."""
    monkeypatch.setattr("fleetd.coordinator.releases.library_files", lambda machine, wheels: {"which": machine.encode()})
    monkeypatch.setattr("fleetd.coordinator.releases.code_files", lambda root: {"fleetd/x.py": b""})
    releases, sent = Releases(StatePaths(tmp_path)), []

    class Courier:
        def __init__(self, machine: str) -> None:
            self.machine = machine

        def put_tree(self, kind: Any, digest: str, source: Path, entries: Any) -> bool:
            if self.machine == "one":
                other = threading.Thread(target=releases.stage, args=(Courier("two"),))
                other.start()
                other.join()
            sent.append((source / "libraries" / "which").read_bytes())
            return True

    build = releases._build

    def build_and_be_overtaken(machine: str) -> Any:
        entries = build(machine)
        if machine == "one":
            releases._build("two")
        return entries

    monkeypatch.setattr(releases, "_build", build_and_be_overtaken)
    releases.stage(Courier("one"))  # type: ignore[arg-type]

    assert sorted(sent) == [b"one", b"two"]
