"""A local session against agents that misbehave: real processes over real pipes, scripted to answer, stall, lie or die."""

from __future__ import annotations

import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fleetd.campaign import HostPlan
from fleetd.coordinator import sessions
from fleetd.coordinator.couriers import Courier
from fleetd.coordinator.inbox import HostAnswer, HostTrouble, Inbox
from fleetd.coordinator.links import HostLink
from fleetd.coordinator.sessions import LocalSession
from fleetd.coordinator.sight import Order, Reply
from fleetd.model import Owner
from fleetd.wire import encode
from policies.errors import HostUnreachable, RequestRefused

CALL_SECONDS = 90.0
OWNER = Owner(coordinator_id="c0ffee", generation=3, life="first")
PROGRAM = """
    import json, os, sys, time
    while line := sys.stdin.readline():
        asked = json.loads(line)
        def answer(body, **changes):
            print(json.dumps({"id": asked["id"], "ok": True, "body": body, **changes}), flush=True)
        order = asked["order"]
        if order == "pid": answer({"pid": os.getpid(), "owner": asked["owner"], "argv": sys.argv, "isolated": sys.flags.isolated})
        elif order == "stall": time.sleep(600)
        elif order == "die": print("the last words", file=sys.stderr); os._exit(3)
        elif order == "lie": answer({}, id=999)
        elif order == "babble": print("no json at all", flush=True)
        elif order == "refuse": answer(None, ok=False, error={"error": "RequestRefused", "title": "no", "where": "here", "what": "why", "fix": "do"})
        elif order == "echo": answer(asked["body"])
        elif order == "hello": answer({"protocol": 1, "facts": FACTS})
        elif order == "facts": answer({"facts": FACTS})
        elif order == "poll": answer({"at": "2026-11-30T12:00:00.000000Z", "memory_available_bytes": 5, "disk_free_bytes": None, "runs": []})
        else: answer({"applied": True})
"""
FACTS = (
    '{"hostname": "h", "boot_id": "b", "kernel": "k", "python": "3", "architecture": "x", "cpu_count": 1, "memory_total_bytes": 8, '
    '"memory_available_bytes": 4, "disk_free_bytes": 2, "root_writable": True}'
)


@pytest.fixture
def make_session(tmp_path: Path) -> Iterator[Callable[[], LocalSession]]:
    package = tmp_path / "releases" / "scripted" / "fleetd" / "host"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(f"FACTS = {FACTS}\n{textwrap.dedent(PROGRAM)}")
    made: list[LocalSession] = []

    def make(stage: Callable[[Courier], str] = lambda courier: "scripted") -> LocalSession:
        made.append(LocalSession(HostPlan(name="h", root=str(tmp_path)), OWNER, stage=stage))
        return made[-1]

    yield make
    for session in made:
        session.close()


def test_a_call_carries_owner_and_body_and_starts_the_staged_release(make_session: Callable[[], LocalSession], tmp_path: Path) -> None:
    session = make_session()
    answer = session.call("pid", {}, CALL_SECONDS)

    assert answer["owner"] == encode(OWNER)
    assert answer["argv"] == [str(tmp_path / "releases" / "scripted" / "fleetd" / "host" / "__main__.py"), "agent", str(tmp_path)]
    assert answer["isolated"] == 1
    assert session.call("pid", {}, CALL_SECONDS)["pid"] == answer["pid"], "one agent serves many calls"


@pytest.mark.parametrize("order", ["stall", "die", "lie", "babble"])
def test_an_agent_that_misbehaves_is_ended_and_the_next_call_has_a_new_one(make_session: Callable[[], LocalSession], order: str) -> None:
    session = make_session()
    before = session.call("pid", {}, CALL_SECONDS)["pid"]
    with pytest.raises(HostUnreachable):
        session.call(order, {}, 0.5)

    assert not psutil.pid_exists(before)
    assert session.call("pid", {}, CALL_SECONDS)["pid"] != before


def test_a_slow_disk_below_a_new_release_is_no_silence_of_its_host(make_session: Callable[..., LocalSession]) -> None:
    """The release is put in place before the agent starts, and nobody's time for an answer counts from before that."""
    def stage_slowly(courier: Courier) -> str:
        time.sleep(0.3)
        return "scripted"

    assert make_session(stage_slowly).call("pid", {}, 0.2)["pid"]


def test_the_last_words_of_a_dead_agent_are_told(make_session: Callable[[], LocalSession], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "END_SECONDS_MAX", 60.0)
    with pytest.raises(HostUnreachable, match="exit status 3, the last words"):
        make_session().call("die", {}, CALL_SECONDS)


def test_a_refusal_keeps_its_kind_and_its_agent(make_session: Callable[[], LocalSession]) -> None:
    session = make_session()
    pid = session.call("pid", {}, CALL_SECONDS)["pid"]
    with pytest.raises(RequestRefused, match="why"):
        session.call("refuse", {}, CALL_SECONDS)

    assert session.call("pid", {}, CALL_SECONDS)["pid"] == pid


def test_a_body_larger_than_a_pipe_goes_through_whole(make_session: Callable[[], LocalSession]) -> None:
    body = {"text": "ä" * 500_000}

    assert make_session().call("echo", body, CALL_SECONDS) == body


def test_an_agent_that_takes_no_orders_does_not_hold_its_caller(make_session: Callable[[], LocalSession]) -> None:
    session = make_session()
    session.call("pid", {}, CALL_SECONDS)
    with pytest.raises(HostUnreachable):
        session.call("stall", {"text": "x" * 1_000_000}, 0.5)


def test_closing_a_session_ends_its_agent(make_session: Callable[[], LocalSession]) -> None:
    session = make_session()
    pid = session.call("pid", {}, CALL_SECONDS)["pid"]
    session.close()

    assert not psutil.pid_exists(pid)


def test_a_python_that_does_not_exist_is_told_as_trouble(tmp_path: Path) -> None:
    session = LocalSession(HostPlan(name="h", root=str(tmp_path), agent_python="/no/such/python"), OWNER, stage=lambda courier: "none")
    with pytest.raises(HostUnreachable, match="No such file"):
        session.call("pid", {}, CALL_SECONDS)


def test_a_link_says_hello_polls_and_carries_orders(make_session: Callable[[], LocalSession]) -> None:
    inbox = Inbox()
    link = HostLink(HostPlan(name="h", root="/x"), make_session(), inbox, lambda host: {"run": 7})
    assert link.send(Order(key="want:run:2", host="h", order="want", run_id="run", body={}))
    link.start()
    hosts, orders = [], []
    give_up_seconds = time.monotonic() + CALL_SECONDS
    while not (orders and len(hosts) >= 2) and time.monotonic() < give_up_seconds:
        inbox.wait(0.1)
        news = inbox.drain()
        hosts, orders = [*hosts, *news.hosts], [*orders, *news.orders]
    link.close(CALL_SECONDS)

    assert orders[0].error is None and orders[0].order.key == "want:run:2"
    first, second = hosts[0], hosts[1]
    assert isinstance(first, HostAnswer) and first.facts is not None and first.facts.hostname == "h"
    assert isinstance(second, HostAnswer) and second.reports == () and second.memory_available_bytes == 5


def test_a_link_tells_of_trouble_and_gives_its_orders_back(tmp_path: Path) -> None:
    inbox = Inbox()
    session = LocalSession(HostPlan(name="h", root=str(tmp_path), agent_python="/no/such/python"), OWNER, stage=lambda courier: "none")
    link = HostLink(HostPlan(name="h", root=str(tmp_path)), session, inbox, lambda host: {})
    link.send(Order(key="start:run", host="h", order="start", run_id="run", body={}))
    link.start()
    hosts, orders = [], []
    give_up_seconds = time.monotonic() + CALL_SECONDS
    while not (hosts and orders) and time.monotonic() < give_up_seconds:
        inbox.wait(0.1)
        news = inbox.drain()
        hosts, orders = [*hosts, *news.hosts], [*orders, *news.orders]
    link.close(CALL_SECONDS)

    assert isinstance(hosts[0], HostTrouble) and hosts[0].error["error"] == "HostUnreachable"
    assert orders[0].order.key == "start:run" and orders[0].error is not None


def test_requests_beyond_the_bound_are_refused_and_late_answers_are_dropped() -> None:
    from fleetd.coordinator import inbox as module

    inbox, replies = Inbox(), list[Reply]()
    waiting = [threading.Thread(target=lambda: replies.append(inbox.ask("stop", {}, CALL_SECONDS))) for _ in range(module.REQUESTS_MAX)]
    for thread in waiting:
        thread.start()
    while len(inbox._asking) < module.REQUESTS_MAX:
        inbox.wait(0.05)
    with pytest.raises(RequestRefused, match="64 requests wait already"):
        inbox.ask("stop", {}, 0.1)
    asked = [number for number, _, _ in inbox.drain().asked]
    for number in asked:
        inbox.answer(Reply(number=number))
    for thread in waiting:
        thread.join()
    with pytest.raises(RequestRefused, match="no answer"):
        inbox.ask("stop", {}, 0.1)
    inbox.answer(Reply(number=max(asked) + 1))

    assert sorted(reply.number for reply in replies) == sorted(asked) and not inbox._asking
