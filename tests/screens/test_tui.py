"""The live status, driven by keys: it shows, chooses, explains, asks before a stop, and stays calm when the coordinator dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import canned
import pytest
from fake_coordinator import FakeCoordinator
from textual.pilot import Pilot
from textual.widgets import RichLog, Static

from fleetd.paths import StatePaths
from fleetd.screens import tui, tui_parts
from fleetd.screens.tui import FleetApp, FleetScreen
from fleetd.screens.tui_parts import Ask, Help, RunLog, RunTable

SEEN_SECONDS_MAX = 60.0
ANSWER_SECONDS = 1.0
# httpcore leaves the socket of a refused connection to the garbage collector, which says so.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
LR_HIGH, LR_MID = f"{canned.CAMPAIGN}-lr-high", f"{canned.CAMPAIGN}-lr-mid"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same screens with a shorter pace."""
    for name, seconds in (("LOOK_SECONDS", 0.1), ("ANSWER_SECONDS_MAX", ANSWER_SECONDS), ("BLIND_AFTER_SECONDS", 0.5)):
        monkeypatch.setattr(tui, name, seconds)
    monkeypatch.setattr(tui_parts, "LOG_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(FleetApp, "NOTIFICATION_TIMEOUT", 600.0)  # a story that is held up still finds what was said


def play(root: Path, story: Callable[[Pilot[Any]], Awaitable[None]], *, target: str | None = None, size: tuple[int, int] = (100, 30)) -> None:
    """Run the app without a terminal and tell it a story of keys."""

    async def run() -> None:
        async with FleetApp(StatePaths(root), target).run_test(size=size) as pilot:
            await story(pilot)

    asyncio.run(run())


def shown(pilot: Pilot[Any], selector: str) -> str:
    return str(main(pilot).query_one(selector, Static).content)


def main(pilot: Pilot[Any]) -> FleetScreen:
    return next(screen for screen in pilot.app.screen_stack if isinstance(screen, FleetScreen))


async def until(pilot: Pilot[Any], seen: Callable[[], bool]) -> None:
    end = time.monotonic() + SEEN_SECONDS_MAX
    while time.monotonic() < end:
        if seen():
            return
        await pilot.pause(0.05)
    raise AssertionError(f"never seen; verdict: {shown(pilot, '#verdict')!r}; about: {shown(pilot, '#about')!r}")


def test_it_shows_the_verdict_the_campaign_and_every_run(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: shown(pilot, "#verdict").startswith("OK · 3 runs at work"))
        table = main(pilot).query_one(RunTable)
        assert [str(table.get_row_at(row)[0]).strip() for row in range(table.row_count)] == ["lr-high", "lr-mid", "lr-low"]
        assert "deadline 13:15:00 UTC" in shown(pilot, "#campaigns")
        assert "restarts 0 of 5" in shown(pilot, "#about"), "what found no column is below"

    play(coordinator.root, story)


def test_the_cursor_stays_on_its_run_while_values_change_and_rows_come(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()

    async def story(pilot: Pilot[Any]) -> None:
        table = main(pilot).query_one(RunTable)
        await until(pilot, lambda: table.row_count == 3)
        await pilot.press("j")
        await until(pilot, lambda: table.chosen() == LR_MID)
        coordinator.status = canned.document(runs=[canned.run("a-new"), canned.run("lr-high", step=canned.known(200)), canned.run("lr-mid")])
        await until(pilot, lambda: "200/400" in str(table.get_row_at(1)))
        await until(pilot, lambda: table.chosen() == LR_MID)
        await pilot.press("k")
        await until(pilot, lambda: table.chosen() == LR_HIGH)

    play(coordinator.root, story)


def test_enter_opens_every_detail_with_the_last_events(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.events = [
        {
            "sequence": 1,
            "at": canned.AT,
            "kind": "run_moved",
            "campaign_id": canned.CAMPAIGN,
            "run_id": LR_HIGH,
            "host": None,
            "actor": "coordinator",
            "because": "first step seen",
            "body": {"to": "running"},
        }
    ]

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: main(pilot).query_one(RunTable).row_count == 3)
        await pilot.press("enter")
        await until(pilot, lambda: "run_moved lr-high to running: first step seen" in " ".join(shown(pilot, "#about").split()))
        assert "cgroup: E enforced" in shown(pilot, "#about")
        await pilot.press("escape")
        await until(pilot, lambda: "cgroup:" not in shown(pilot, "#about"))

    play(coordinator.root, story)


def test_a_stop_is_asked_first_and_done_only_on_yes(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/stop"] = {"runs": [LR_HIGH]}

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: main(pilot).query_one(RunTable).row_count == 3)
        for no in ("n", "escape"):
            await pilot.press("s")
            await until(pilot, lambda: isinstance(pilot.app.screen, Ask))
            await pilot.press(no)
            await until(pilot, lambda: not isinstance(pilot.app.screen, Ask))
        assert coordinator.asked == []
        await pilot.press("s")
        await until(pilot, lambda: isinstance(pilot.app.screen, Ask))
        await pilot.press("y")
        await until(pilot, lambda: len(coordinator.asked) == 1)

    play(coordinator.root, story)
    assert (coordinator.asked[0]["path"], coordinator.asked[0]["target"], coordinator.asked[0]["mode"]) == ("/v1/stop", LR_HIGH, "graceful")


def test_a_refused_resume_is_told_with_its_fix(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/resume"] = {
        "error": "RequestRefused",
        "title": "lr-high is running",
        "where": "lr-high",
        "what": "nothing to resume",
        "fix": "wait",
    }

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: main(pilot).query_one(RunTable).row_count == 3)
        await pilot.press("r")
        await until(pilot, lambda: bool(pilot.app._notifications))
        said.extend(each.message for each in pilot.app._notifications)

    said: list[str] = []
    play(coordinator.root, story)
    assert [asked["path"] for asked in coordinator.asked] == ["/v1/resume"]
    assert len(said) == 1 and "lr-high is running" in said[0] and "wait" in said[0]


def test_it_stays_usable_and_says_blind_when_the_coordinator_dies_and_recovers(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: shown(pilot, "#verdict").startswith("OK"))
        await asyncio.to_thread(coordinator.stop)
        await until(pilot, lambda: shown(pilot, "#verdict").startswith("BLIND: no coordinator is running here; what you see is "))
        await pilot.press("j")
        await until(pilot, lambda: main(pilot).query_one(RunTable).chosen() == LR_MID)
        await until(pilot, lambda: "~5.402" in str(main(pilot).query_one(RunTable).get_row_at(1)))
        await asyncio.to_thread(coordinator.start)
        await until(pilot, lambda: shown(pilot, "#verdict").startswith("OK"))

    play(coordinator.root, story)


def test_a_coordinator_that_hangs_does_not_hang_the_keys(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: main(pilot).query_one(RunTable).row_count == 3)
        coordinator.hold.clear()
        arrived, began = coordinator.arrived, time.monotonic()
        await pilot.press("j", "question_mark")
        await until(pilot, lambda: isinstance(pilot.app.screen, Help))
        await pilot.press("escape")
        await until(pilot, lambda: shown(pilot, "#verdict").startswith("BLIND"))
        one_after_the_other = 2 + (time.monotonic() - began) / ANSWER_SECONDS
        assert coordinator.arrived - arrived <= one_after_the_other, "looks do not pile up behind one that hangs"
        coordinator.hold.set()
        await until(pilot, lambda: shown(pilot, "#verdict").startswith("OK"))

    play(coordinator.root, story)


def test_the_log_of_a_run_is_a_key_away_and_tab_changes_the_stream(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.logs = {f"{LR_HIGH}/stdout/1": "hello\n\x1b[31mred\x1b[0m\n", f"{LR_HIGH}/supervisor/1": "watching\n"}

    def lines(pilot: Pilot[Any]) -> list[str]:
        return [strip.text.rstrip() for strip in pilot.app.screen.query_one(RichLog).lines]

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: main(pilot).query_one(RunTable).row_count == 3)
        await pilot.press("l")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunLog) and lines(pilot) == ["hello", "red"])
        coordinator.logs[f"{LR_HIGH}/stdout/1"] += "more\n"
        await until(pilot, lambda: lines(pilot) == ["hello", "red", "more"])
        await pilot.press("tab", "tab")
        await until(pilot, lambda: lines(pilot) == ["watching"])
        await pilot.press("q")
        await until(pilot, lambda: isinstance(pilot.app.screen, FleetScreen))

    play(coordinator.root, story)


def test_one_target_shows_only_its_runs(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()

    async def story(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: main(pilot).query_one(RunTable).row_count == 1)
        await until(pilot, lambda: main(pilot).query_one(RunTable).chosen() == LR_MID)

    play(coordinator.root, story, target="lr-mid", size=(80, 24))
