"""Following a campaign: changes as lines, progress, an ending that says what to type next, and a Ctrl-C that hurts nothing."""

from __future__ import annotations

import re
import signal
from typing import Any

import canned
import pytest
from fake_coordinator import FakeCoordinator
from screen_tools import COMMAND_SECONDS_MAX, CONTROL_CODES, fleetd, on_terminal, start

from fleetd.screens import follow, layout


def staged() -> dict[str, Any]:
    return canned.document(runs=[canned.waiting("lr-high"), canned.waiting("lr-mid")], stage="staging")


def under_way(**changes: Any) -> dict[str, Any]:
    return canned.document(runs=[canned.run("lr-high", **changes), canned.run("lr-mid", step=canned.known(40))])


def texts(before: dict[str, Any] | None, after: dict[str, Any]) -> list[str]:
    return [layout.text_of(spans).rstrip() for spans in follow.changes(before, after, canned.CAMPAIGN)]


def test_every_change_is_told_once() -> None:
    assert texts(None, staged()) == ["staging"], "what waits at the start is no news"
    assert texts(staged(), under_way()) == [
        "training",
        "lr-high: running on gx10",
        "lr-high: best so far 5.104 at step 100",
        "lr-mid: running on gx10",
        "lr-mid: best so far 5.104 at step 100",
    ]
    assert texts(under_way(), under_way(step=canned.known(124), loss=canned.known(5.1))) == [], "a step is progress, not news"
    held = under_way(state="held", reason="exit_nonzero", detail="5 of 5 restarts used", alarms=["memory at 96 %"])
    assert texts(under_way(), held) == ["lr-high: held (exit_nonzero) !  5 of 5 restarts used", "lr-high: ! memory at 96 %"]
    assert texts(under_way(), canned.evaluated())[-2:] == [
        "chosen: lr-high at step 400, 4.812 nats per token · frozen",
        "opened: the test split, for the frozen selection only",
    ]


def test_in_a_pipe_it_is_lines_that_end_with_the_outcome(coordinator: FakeCoordinator) -> None:
    coordinator.status = [staged(), staged(), under_way(), canned.evaluated()]
    done = fleetd(coordinator.root, "follow", "manpages")
    assert (done.returncode, done.stderr) == (0, "")
    assert not CONTROL_CODES.search(done.stdout)
    lines = done.stdout.splitlines()
    assert lines[0] == "staging"
    order = [lines.index(each) for each in ("training", "lr-high: running on gx10", "evaluated")]
    assert order == sorted(order)
    assert "manpages is evaluated: lr-high at step 400 was chosen (checkpoint abababababab)" in lines
    assert re.search(r"^en +8,267 +446 +1,054$", done.stdout, re.MULTILINE)
    assert "next    fleetd report manpages --open" in lines


@pytest.mark.parametrize(("stage", "code", "next_command"), [("failed", 5, "fleetd status manpages"), ("stopped", 6, "fleetd resume manpages")])
def test_its_exit_code_is_that_of_the_ending(coordinator: FakeCoordinator, stage: str, code: int, next_command: str) -> None:
    coordinator.status = canned.document(runs=[canned.run("a", state=stage)], stage=stage, detail="by a person", is_over=stage == "failed")
    done = fleetd(coordinator.root, "follow", "manpages")
    assert done.returncode == code
    assert f"manpages is {stage}: by a person" in done.stdout
    assert f"next    {next_command}" in done.stdout


def test_an_interrupt_only_ends_the_looking(coordinator: FakeCoordinator) -> None:
    coordinator.status = under_way()
    following = start(coordinator.root, "follow", "manpages")
    coordinator.wait_for_looks(3)
    following.send_signal(signal.SIGINT)
    out, error = following.communicate(timeout=COMMAND_SECONDS_MAX)
    assert (following.returncode, error) == (130, "")
    assert "the campaign goes on without this screen" in out
    assert f"fleetd follow {canned.CAMPAIGN}" in out
    assert coordinator.asked == []


def test_it_outlives_a_restart_of_the_coordinator_and_says_so(coordinator: FakeCoordinator) -> None:
    coordinator.status = under_way()
    following = start(coordinator.root, "follow", "manpages")
    coordinator.wait_for_looks(3)
    coordinator.stop()
    assert following.stdout is not None and following.stderr is not None
    with following.stdout, following.stderr:
        assert any("BLIND: no coordinator is running here; runs go on without it" in line for line in following.stdout)
        coordinator.status = canned.evaluated()
        coordinator.start()
        rest = following.stdout.read()
    assert following.wait(COMMAND_SECONDS_MAX) == 0
    assert "the coordinator answers again" in rest


def test_on_a_terminal_there_is_a_bar_for_each_run_and_the_end_stays(coordinator: FakeCoordinator) -> None:
    coordinator.status = [under_way()] * 4 + [canned.evaluated()]
    code, seen = on_terminal(coordinator.root, "follow", "manpages")
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen)
    assert code == 0
    assert re.search(r"lr-high +running +123/400 +loss 5\.231 +2\.13 steps/s +1\.20/2\.00 GiB E enforced +━+", text)
    assert text.rstrip().endswith("fleetd status manpages")
    assert "\x1b[?25h" in seen, "the cursor is given back"


def test_ctrl_c_on_a_terminal_gives_the_cursor_back_and_detaches(coordinator: FakeCoordinator) -> None:
    coordinator.status = under_way()
    code, seen = on_terminal(coordinator.root, "follow", "manpages", interrupt_at="123/400")
    assert code == 130
    assert "the campaign goes on without this screen" in seen
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l")


def test_what_waiting_runs_are_brought_is_a_bar_each_and_no_news_once_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board of 100 columns: the bar is three quarters full, and the line beside it says how long still."""
    from rich.console import Console

    waiting, running = staged(), under_way()
    for document in (waiting, running):
        document["hosts"] = [canned.host("spark-a", deliveries=[canned.delivery()])]
    board, console = follow._Live(), Console(width=100, color_system=None, highlight=False)
    board._console = console

    def drawn(document: dict[str, Any]) -> str:
        with console.capture() as capture:
            console.print(board._bars(document, document["campaigns"][0]))
        return capture.get()

    shown = drawn(waiting)
    assert "spark-a: datasets abababababab" in shown and "10 s left" in shown
    assert max(line.count("\N{BOX DRAWINGS HEAVY HORIZONTAL}") for line in shown.splitlines()) >= 7
    assert "datasets" not in drawn(running)
    assert [layout.text_of(each) for each in follow.delivery_lines(waiting, waiting["campaigns"][0])] == [
        "spark-a: datasets abababababab: 3.00/4.00 GiB · 100 MiB/s · 10 s left · by ssh, it is large: 4096 MiB",
    ]
