"""The inbox: what waits for the loop, bounded for each host by itself."""

from __future__ import annotations

import threading
from datetime import datetime, timezone

import pytest

from fleetd.coordinator import inbox as module
from fleetd.coordinator.inbox import NEWS_PER_HOST_MAX, HostAnswer, HostTrouble, Inbox
from fleetd.model import Notice, RunReport

ERROR = {"error": "HostUnreachable", "title": "no answer", "where": "", "what": "", "fix": ""}


def trouble(host: str, number: int = 0) -> HostTrouble:
    return HostTrouble(host=host, error={**ERROR, "what": str(number)})


def test_no_number_of_hosts_and_none_that_talks_much_costs_another_host_its_news() -> None:
    inbox = Inbox()
    inbox.put_host(trouble("quiet"))
    for number in range(10 * NEWS_PER_HOST_MAX):
        inbox.put_host(trouble("talker", number))
    for number in range(1000):
        inbox.put_host(trouble(f"h{number}"))

    hosts = inbox.drain().hosts

    assert [news.host for news in hosts].count("quiet") == 1
    assert len({news.host for news in hosts}) == 1002
    talked = [int(news.error["what"]) for news in hosts if news.host == "talker" and isinstance(news, HostTrouble)]
    assert talked == list(range(9 * NEWS_PER_HOST_MAX, 10 * NEWS_PER_HOST_MAX)), "its newest, in their order"


def test_what_was_drained_is_not_drained_again_and_what_comes_then_ends_a_wait() -> None:
    inbox = Inbox()
    inbox.put_host(trouble("a"))
    assert len(inbox.drain().hosts) == 1
    assert inbox.drain().hosts == ()

    for leave in (lambda: inbox.put_host(trouble("b")), inbox.wake):
        timer = threading.Timer(0.01, leave)
        timer.start()
        inbox.wait(60.0)  # the limit of a test ends it if nothing does
        timer.join()
        inbox.drain()


def told(*notices: Notice) -> HostAnswer:
    return HostAnswer(host="a", reports=(RunReport(run_id="r", supervisor="alive", observation=None, notices=notices),))


def test_what_happened_on_a_host_waits_for_nothing_and_what_it_only_measured_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOST_NEWS_SECONDS", 3600.0)
    inbox = Inbox()
    inbox.put_host(told(Notice(sequence=1, at=datetime.now(timezone.utc), kind="attempt_ended", body={})))
    inbox.wait(3600.0)  # the limit of a test ends it if this waits for more

    inbox.drain()
    inbox.put_host(told())
    threading.Timer(0.05, lambda: inbox.put_host(told(Notice(sequence=2, at=datetime.now(timezone.utc), kind="checkpoint", body={})))).start()
    inbox.wait(3600.0)
    assert len(inbox.drain().hosts) == 2, "both in one tick"
