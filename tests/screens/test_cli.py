"""The commands as programs: what they print, where, in which shape, and with which exit code."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import canned
import pytest
from fake_coordinator import FakeCoordinator
from screen_tools import COMMAND_SECONDS_MAX, CONTROL_CODES, argv, assert_error_shape, environment, fleetd, on_terminal, start

LR_HIGH = f"{canned.CAMPAIGN}-lr-high"
HEAVY = ("torch", "matplotlib", "textual", "paramiko", "transformers", "apscheduler", "uvicorn", "jinja2", "numpy")


def test_the_status_in_a_pipe_is_one_table_without_control_codes(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    done = fleetd(coordinator.root, "status")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("OK · 3 runs at work · deadline in 1 h 15 min · last safe stop in 58 min\n")
    assert not CONTROL_CODES.search(done.stdout)
    assert max(map(len, done.stdout.split("\n"))) <= 100
    assert canned.CAMPAIGN in done.stdout


def test_status_as_json_is_the_document_and_nothing_else(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    done = fleetd(coordinator.root, "status", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == canned.training()
    one = json.loads(fleetd(coordinator.root, "status", "lr-mid", "--json").stdout)
    assert [run["candidate"] for run in one["runs"]] == ["lr-mid"]


def test_a_silent_host_is_exit_8_and_the_rest_is_still_shown(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.trouble()
    done = fleetd(coordinator.root, "status")
    assert done.returncode == 8
    assert "UNREACHABLE" in done.stdout
    assert "held-one" in done.stdout
    assert fleetd(coordinator.root, "status", "held-one", "--once").returncode == 0, "the host of that run answers"


@pytest.mark.parametrize("words", [("status",), ("events",), ("wait", "x"), ("stop", "--all"), ("follow", "x")])
def test_without_a_coordinator_every_verb_says_where_it_looked_and_what_to_do(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = fleetd(tmp_path / "nobody", *words)
    assert done.returncode == 8
    assert done.stdout == ""
    assert_error_shape(done.stderr)
    assert str(tmp_path / "nobody") in done.stderr
    assert "fleetd launch PLAN" in done.stderr


def test_without_a_coordinator_json_is_still_one_document(tmp_path: Path) -> None:
    done = fleetd(tmp_path, "status", "--json")
    body = json.loads(done.stdout)
    assert (done.returncode, body["coordinator"], body["state_dir"], body["exit_code"]) == (8, None, str(tmp_path), 8)


def test_a_coordinator_that_died_leaves_a_socket_and_an_error_that_says_so(coordinator: FakeCoordinator, tmp_path: Path) -> None:
    import socket

    state = tmp_path / "dead"
    state.mkdir()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(state / "api.sock"))
    done = fleetd(state, "status")
    assert done.returncode == 8
    assert "its socket is there but nobody answers" in done.stderr


def test_a_state_directory_with_a_long_path_is_reached_all_the_same(tmp_path: Path) -> None:
    """sun_path holds 108 bytes; the daemon may have bound by a short name."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    short = FakeCoordinator(tmp_path / "s")
    deep.parent.mkdir()
    (tmp_path / "s").rename(deep)
    (tmp_path / "s").symlink_to(deep)
    short.status = canned.training()
    short.start()
    try:
        assert fleetd(deep, "status").returncode == 0
    finally:
        short.stop()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("status", "nope"), 4),
        (("logs", "manpages"), 3),
        (("stop",), 2),
        (("stop", "lr-high", "--all"), 2),
        (("stop", "nope"), 4),
        (("bogus",), 2),
        (("wait", "lr-high", "--timeout", "soon"), 2),
        (("evaluate", "manpages", "--split", "train"), 2),
        (("evaluate", "manpages"), 2),
        (("logs", "lr-high", "--stream", "nope"), 2),
        (("status", "--watch"), 2),
    ],
)
def test_every_refusal_is_three_lines_and_its_code(coordinator: FakeCoordinator, words: tuple[str, ...], code: int) -> None:
    coordinator.status = canned.training()
    done = fleetd(coordinator.root, *words)
    assert done.returncode == code
    assert_error_shape(done.stderr)
    assert coordinator.asked == [], "nothing was asked of the coordinator"


def test_a_refusal_as_json_is_one_document_too(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    done = fleetd(coordinator.root, "status", "nope", "--json")
    assert json.loads(done.stdout)["error"]["error"] == "NotFound"
    assert_error_shape(done.stderr)


def test_an_answer_that_is_no_json_names_the_log_to_look_at(coordinator: FakeCoordinator) -> None:
    coordinator.status = "out of order"
    done = fleetd(coordinator.root, "status")
    assert done.returncode == 1
    assert_error_shape(done.stderr)
    assert "daemon.log" in done.stderr


def test_our_own_bug_is_one_line_and_its_traceback_is_in_a_file(coordinator: FakeCoordinator) -> None:
    coordinator.status = {"campaigns": ["not an object"], "runs": []}
    done = fleetd(coordinator.root, "status")
    assert done.returncode == 70
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    log = coordinator.root / "command.log"
    assert str(log) in done.stderr
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_a_stop_asks_for_exactly_the_named_run_gracefully_by_default(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/stop"] = {"runs": [LR_HIGH]}
    done = fleetd(coordinator.root, "stop", "lr-high")
    assert done.returncode == 0
    assert "asked lr-high to save and stop" in done.stdout
    fleetd(coordinator.root, "stop", "manpages", "--now")
    fleetd(coordinator.root, "stop", "--all", "--graceful")
    asked = [(each["path"], each["target"], each["mode"]) for each in coordinator.asked]
    assert asked == [("/v1/stop", LR_HIGH, "graceful"), ("/v1/stop", canned.CAMPAIGN, "now"), ("/v1/stop", "all", "graceful")]
    assert all(each["actor"].startswith("user:") for each in coordinator.asked)


def test_a_resume_says_what_goes_on_and_an_empty_one_says_that_too(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/resume"] = {"runs": [LR_HIGH]}
    assert fleetd(coordinator.root, "resume", "lr-high").stdout.startswith("resuming lr-high\n")
    coordinator.answers["/v1/resume"] = {"runs": []}
    assert "nothing to resume" in fleetd(coordinator.root, "resume", "manpages").stdout


def test_asking_for_a_split_before_the_freeze_is_exit_9_in_the_coordinators_words(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.answers["/v1/open"] = {
        "error": "FreezeRefused",
        "title": "test stays sealed",
        "where": "manpages",
        "what": "nothing is frozen",
        "fix": "fleetd wait manpages",
    }
    done = fleetd(coordinator.root, "evaluate", "manpages", "--split", "test", "--because", "a second look")
    assert done.returncode == 9
    assert_error_shape(done.stderr)
    assert (coordinator.asked[0]["campaign"], coordinator.asked[0]["split"], coordinator.asked[0]["because"]) == (
        canned.CAMPAIGN,
        "test",
        "a second look",
    )


@pytest.mark.parametrize(
    ("document", "target", "code", "text"),
    [
        (canned.document(runs=[canned.run("a", state="finished")]), "a", 0, "a is finished"),
        (
            canned.document(runs=[canned.run("a", state="failed", reason="oom", detail="killed at 2.00 GiB")]),
            "a",
            5,
            "a is failed (oom): killed at 2.00 GiB",
        ),
        (canned.document(runs=[canned.run("a", state="stopped", reason="user")]), "a", 6, "a is stopped (user)"),
        (canned.evaluated(), "manpages", 0, "manpages is evaluated"),
        (canned.document(runs=[canned.run("a")], stage="failed", is_over=True), "manpages", 5, "manpages is failed"),
        (canned.document(runs=[canned.run("a")], stage="stopped"), "manpages", 6, "manpages is stopped"),
        (canned.training(), "lr-high", 7, "not over after 0 s: it is running"),
    ],
)
def test_waiting_ends_with_the_code_of_the_ending(coordinator: FakeCoordinator, document: dict[str, Any], target: str, code: int, text: str) -> None:
    coordinator.status = document
    done = fleetd(coordinator.root, "wait", target, "--timeout", "0.2", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["exit_code"], text in told["text"]) == (code, code, True), told


def test_waiting_outlives_a_restart_of_the_coordinator_and_says_what_needs_a_person(coordinator: FakeCoordinator) -> None:
    held = canned.document(runs=[canned.run("a", state="held", detail="5 of 5 restarts used")])
    coordinator.status = held
    waiting = start(coordinator.root, "wait", "a", "--timeout", "90")
    coordinator.wait_for_looks(2)
    coordinator.stop()
    assert waiting.stderr is not None
    assert waiting.stderr.readline() == "needs you: a is held: 5 of 5 restarts used\n"
    assert "waiting for it; runs go on without it" in waiting.stderr.readline()
    coordinator.status = canned.document(runs=[canned.run("a", state="finished")])
    coordinator.start()
    out, _ = waiting.communicate(timeout=COMMAND_SECONDS_MAX)
    assert (waiting.returncode, out) == (0, "a is finished\n")


def test_an_interrupt_is_130_without_a_word(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    waiting = start(coordinator.root, "wait", "lr-high")
    coordinator.wait_for_looks(2)
    waiting.send_signal(signal.SIGINT)
    out, error = waiting.communicate(timeout=COMMAND_SECONDS_MAX)
    assert (waiting.returncode, out, error) == (130, "", "")


def test_logs_show_the_tail_and_a_pipe_gets_the_bytes_as_written(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.logs[f"{LR_HIGH}/stdout/1"] = "".join(f"line {number}\n" for number in range(500)) + "\x1b[31mred\x1b[0m\n"
    done = fleetd(coordinator.root, "logs", "lr-high", "--tail", "3")
    assert done.stdout == "line 498\nline 499\n\x1b[31mred\x1b[0m\n"
    assert len(fleetd(coordinator.root, "logs", "lr-high", "--tail", "0").stdout.splitlines()) == 501
    assert json.loads(fleetd(coordinator.root, "logs", "lr-high", "--tail", "1", "--json").stdout)["lines"] == ["\x1b[31mred\x1b[0m"]
    code, seen = on_terminal(coordinator.root, "logs", "lr-high", "--tail", "1")
    assert (code, seen) == (0, "red\n"), "a terminal is not steered by a trainer"


def test_following_a_log_goes_over_to_the_next_attempt_and_ends_with_the_run(coordinator: FakeCoordinator) -> None:
    first, second = canned.run("a", attempt=1), canned.run("a", attempt=2)
    over = canned.run("a", attempt=2, state="finished")
    coordinator.status = [canned.document(runs=[each]) for each in (first, first, second, second, over)]
    coordinator.logs = {f"{first['run_id']}/stdout/1": "one\n", f"{first['run_id']}/stdout/2": "two\n"}
    done = fleetd(coordinator.root, "logs", "a", "-f")
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\ntwo\n", "-- attempt 2 of a --\n")


def story() -> list[dict[str, Any]]:
    shared: dict[str, Any] = {"at": canned.AT, "campaign_id": canned.CAMPAIGN, "host": None, "body": {}}
    return [
        {**shared, "sequence": 1, "kind": "campaign_launched", "run_id": None, "actor": "user:ada", "because": ""},
        {
            **shared,
            "sequence": 2,
            "kind": "run_moved",
            "run_id": LR_HIGH,
            "actor": "coordinator",
            "because": "first step seen",
            "body": {"to": "running"},
        },
        {
            **shared,
            "sequence": 3,
            "kind": "noticed",
            "run_id": LR_HIGH,
            "actor": "host:gx10",
            "because": "",
            "body": {"kind": "attempt_ended", "notice": 4, "body": {"attempt": 1, "exit": {"exit_code": None, "signal": 9, "observed_by": "shim"}}},
        },
    ]


def test_events_read_as_sentences_and_as_one_document(coordinator: FakeCoordinator) -> None:
    coordinator.status, coordinator.events = canned.training(), story()
    lines = fleetd(coordinator.root, "events", "lr-high").stdout.splitlines()
    assert [" ".join(each.split("UTC")[1].split()) for each in lines] == [
        "run_moved lr-high to running: first step seen",
        "attempt_ended lr-high 1: killed by SIGKILL (seen by shim) (by host:gx10)",
    ]
    assert json.loads(fleetd(coordinator.root, "events", "--json").stdout) == {"events": story()}
    assert len(fleetd(coordinator.root, "events", "--tail", "1").stdout.splitlines()) == 1


def test_following_events_as_json_is_one_object_a_line(coordinator: FakeCoordinator) -> None:
    coordinator.events = story()[:1]
    following = start(coordinator.root, "events", "-f", "--json")
    assert following.stdout is not None
    assert json.loads(following.stdout.readline())["sequence"] == 1
    coordinator.events = story()
    assert json.loads(following.stdout.readline())["sequence"] == 2
    following.send_signal(signal.SIGINT)
    following.communicate(timeout=COMMAND_SECONDS_MAX)
    assert following.returncode == 130


def test_a_report_says_where_it_lies(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.evaluated()
    coordinator.answers["/v1/report"] = {"html": "/r/report.html", "json": "/r/report.json"}
    assert "/r/report.html" in fleetd(coordinator.root, "report", "manpages").stdout
    assert fleetd(coordinator.root, "report", "manpages", "--path").stdout == "/r/report.html\n"
    assert json.loads(fleetd(coordinator.root, "report", "manpages", "--json").stdout)["json"] == "/r/report.json"
    assert coordinator.asked[0] == {"path": "/v1/report", "campaign": canned.CAMPAIGN}


def test_colour_is_for_a_terminal_and_never_against_no_color(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    code, coloured = on_terminal(coordinator.root, "status", "--once")
    assert code == 0
    assert "\x1b[32mOK\x1b[0m" in coloured
    _, plain = on_terminal(coordinator.root, "status", "--once", NO_COLOR="1")
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).split() == plain.split(), "colour adds nothing but colour"
    _, dumb = on_terminal(coordinator.root, "status", TERM="dumb")
    assert "\x1b" not in dumb, "a terminal that can't move its cursor gets the table"


def test_a_reader_that_leaves_early_is_no_error_with_a_traceback(coordinator: FakeCoordinator) -> None:
    coordinator.status = canned.training()
    coordinator.logs[f"{LR_HIGH}/stdout/1"] = "x" * 200_000 + "\n"
    reader = subprocess.Popen(argv("logs", "lr-high"), env=environment(coordinator.root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.read(10)
    reader.stdout.close()
    error = reader.stderr.read()
    reader.stderr.close()
    assert reader.wait(timeout=COMMAND_SECONDS_MAX) == 1
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [("version",), ("status",), ("wait", "lr-high", "--timeout", "0")])
def test_everyday_verbs_import_nothing_heavy(coordinator: FakeCoordinator, words: tuple[str, ...]) -> None:
    coordinator.status = canned.training()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fleetd.screens.cli", *words],
        env=environment(coordinator.root),
        capture_output=True,
        text=True,
        check=False,
    )
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "httpx" in imported or words == ("version",)
    assert not imported & set(HEAVY)


def test_help_names_every_verb(tmp_path: Path) -> None:
    done = fleetd(tmp_path, "--help")
    assert done.returncode == 0
    verbs = {line.split()[0] for line in done.stdout.split("Commands:")[1].splitlines() if line.startswith("  ") and line.strip()}
    assert {
        "check",
        "plan-schema",
        "launch",
        "follow",
        "status",
        "logs",
        "events",
        "wait",
        "report",
        "stop",
        "resume",
        "evaluate",
        "daemon",
        "version",
    } <= verbs
