"""What a person sees of a status document, as agreed texts: healthy, in trouble, over, at 80, 100 and 160 columns."""

from __future__ import annotations

from typing import Any

import canned
import pytest
from hypothesis import given
from hypothesis import strategies as st
from screen_tools import assert_snapshot

from fleetd.screens import cells, layout, view_outcome, view_run, views
from fleetd.screens.document import aged, moment_of, unknown_runs

SITUATIONS = {"training": canned.training, "trouble": canned.trouble, "evaluated": canned.evaluated}


def text_of(lines: list[layout.Line]) -> str:
    return layout.painted(lines, colour=False)


def row_of(run: dict[str, Any]) -> dict[str, str]:
    return {key: span.text for key, span in cells.run_cells(run, moment_of({"at": canned.AT})).items()}


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_status_reads_as_agreed(situation: str, width: int) -> None:
    text = text_of(views.status_lines(SITUATIONS[situation](), width=width))
    assert max(layout.width_of(each) for each in text.split("\n")) <= width
    assert_snapshot(f"status-{situation}-{width}", text)


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_details_of_a_run_read_as_agreed(situation: str) -> None:
    document = SITUATIONS[situation]()
    run = document["runs"][0]
    run["attempts_ended"] = [
        {"attempt": 1, "reason": "signal", "exit": {"attempt": 1, "wait_status": 9, "exit_code": None, "signal": 9, "observed_by": "shim"}}
    ]
    run["attempt"] = 2
    assert_snapshot(f"details-{situation}", text_of(view_run.run_details(document, run, width=80)))


@pytest.mark.parametrize("width", [80, 120])
def test_the_outcome_reads_as_agreed(width: int) -> None:
    document = canned.evaluated()
    assert_snapshot(f"outcome-{width}", text_of(view_outcome.outcome_lines(document, document["campaigns"][0], width=width)))


def test_the_first_line_is_the_verdict_with_the_two_times_that_matter() -> None:
    first = text_of(views.status_lines(canned.training(), width=120)).split("\n")[0]
    assert first == "OK · 3 runs at work · deadline in 1 h 15 min · last safe stop in 58 min"
    pressing = text_of(views.status_lines(canned.trouble(), width=160)).split("\n")[0]
    assert pressing.startswith("NEEDS YOU: held-one is held on gx10: 5 of 5 restarts used, for 12 min")


def test_unknown_is_never_zero_and_what_can_not_be_there_yet_is_a_dash() -> None:
    blind = canned.run(
        "a",
        step=canned.known(None, None),
        loss=canned.known(None, None),
        steps_per_second=canned.known(None, None),
        last_step_at=canned.known(None, None),
        restarts_used=None,
        best=canned.known(None, None),
    )
    blind["memory"] = {**blind["memory"], "host_bytes": canned.known(None, None), "parts": {}}
    row = row_of(blind)
    assert (row["step"], row["loss"], row["last_step"], row["restarts"]) == ("?/400", "?", "?", "?")
    assert row["memory"] == "?/2.00 GiB ? unknown"
    waiting = row_of(canned.waiting("b"))
    assert (waiting["step"], waiting["loss"], waiting["rate"], waiting["last_step"], waiting["checkpoint"]) == ("—/400", "—", "—", "—", "—")
    assert "0" not in "".join((row["step"], row["loss"], row["rate"])).replace("400", "")


def test_an_old_value_is_marked_and_the_note_says_how_old() -> None:
    document = aged(canned.training(), 40.0)
    run = document["runs"][0]
    row = {key: span.text for key, span in cells.run_cells(run, moment_of(document)).items()}
    assert row["loss"] == "~5.231"
    assert row["step"] == "~123/400"
    assert row["memory"].startswith("~1.20/2.00 GiB")
    assert row["last_step"] == "41 s ago"
    assert "last look 41 s ago" in text_of(views.run_notes(run, document))


def test_a_run_that_is_looked_at_but_does_not_step_shows_the_age_of_its_step_and_not_of_the_look() -> None:
    stalled = canned.run("a", last_step_at=canned.known("2026-11-30T11:50:00.000000Z", 0.5))
    assert row_of(stalled)["last_step"] == "10 min ago"


def test_nothing_is_asked_of_what_tells_nothing() -> None:
    """A plain command has no steps, an evaluation no loss: a dash. A training that should tell them and does not: a question mark."""
    nothing = {key: canned.known(None, 1.0) for key in ("step", "loss", "steps_per_second", "last_step_at", "best")}
    plain = row_of(canned.run("plain", **nothing, steps_planned=None))
    assert (plain["step"], plain["loss"], plain["rate"]) == ("—", "—", "—")
    judging = row_of(canned.run("evaluate-test", kind="evaluate", loss=canned.known(None, 1.0)))
    assert (judging["step"], judging["loss"]) == ("123/400", "—")
    silent = row_of(canned.run("a", **nothing))
    assert (silent["step"], silent["loss"]) == ("?/400", "?")


def test_the_newest_campaign_stays_whole_beside_an_older_one_that_rests() -> None:
    document = canned.evaluated()
    document["campaigns"].insert(0, canned.campaign([], campaign_id="20261101T000000Z-old", name="old", stage="stopped"))
    document["campaigns"].insert(0, canned.campaign([], campaign_id="20261001T000000Z-older", name="older", stage="evaluated", is_over=True))
    text = text_of(views.status_lines(document, width=100))
    assert "chosen: lr-high at step 400" in text
    assert "stopped for" in text
    assert text.count("over: ") == 1


def test_the_grade_of_a_cap_is_a_letter_and_a_word() -> None:
    run = canned.run("a")
    run["memory"]["parts"] = {
        "cgroup": {"grade": "absent", "means": ""},
        "sampler": {"grade": "sampled", "means": ""},
        "allocator": {"grade": "enforced", "means": ""},
    }
    assert row_of(run)["memory"] == "1.20/2.00 GiB S sampled"


def test_a_long_history_keeps_the_status_short() -> None:
    document = canned.training()
    for number in range(9):
        document["campaigns"].append(canned.campaign([], campaign_id=f"2026112{number}T000000Z-old", name="old", stage="evaluated", is_over=True))
    text = text_of(views.status_lines(document, width=100))
    assert text.count("over: evaluated") == views.OLDER_SHOWN_MAX
    assert "and 4 older: fleetd status CAMPAIGN shows one" in text


def test_a_host_shows_how_strongly_a_cap_can_hold_there() -> None:
    parts = {"cgroup": {"grade": "absent", "means": "no cgroup is mounted"}, "sampler": {"grade": "sampled", "means": ""},
             "floor": {"grade": "sampled", "means": ""}, "allocator": {"grade": "enforced", "means": ""}}

    def shown(cgroup: str) -> str:
        means = {**parts, "cgroup": {"grade": cgroup, "means": ""}}
        return text_of(views.host_lines({"hosts": [canned.host("gx10", facts={"cap_means": means})]}, width=160))

    assert "caps S sampled" in shown("absent"), "what holds the accelerator's part alone is no grade of the host's"
    assert "caps E enforced" in shown("enforced")
    assert "caps" not in text_of(views.host_lines({"hosts": [canned.host("gx10")]}, width=160)), "a host that has not told"


def test_a_run_that_nobody_knows_stands_below_its_host_with_what_stops_it() -> None:
    document = canned.training()
    unknown = {"run_id": "20261130-090000-lost-low", "pid": 4711, "state": "running", "supervisor": "alive", "want": "run"}
    document["hosts"][0]["unknown_runs"] = [unknown, {**unknown, "run_id": "20261130-090000-lost-high", "pid": None, "want": "stop"}]
    lines = views.host_lines(document, width=80)

    text = " ".join(text_of(lines).split())
    assert "! a run that nobody here knows: 20261130-090000-lost-low, pid 4711, running (fleetd stop 20261130-090000-lost-low)" in text
    assert "20261130-090000-lost-high, pid ?, running (it was asked to stop)" in text
    assert max(layout.width_of(each) for each in text_of(lines).split("\n")) <= 80
    assert unknown_runs(document) == {"20261130-090000-lost-low", "20261130-090000-lost-high"}


def test_nothing_that_a_trainer_or_host_wrote_steers_the_terminal() -> None:
    document = canned.training()
    document["runs"][0].update(detail="\x1b]0;owned\x07 \x1b[2J", alarms=["\x1b[31m!"], candidate="a\x1b[1m")
    document["hosts"][0].update(name="gx\x1b[5m", reachable=False, detail="\x9b1m")
    shown = text_of(views.status_lines(document, width=100)) + text_of(view_run.run_details(document, document["runs"][0], width=100))
    assert "\x1b" not in shown
    assert "\x9b" not in shown


def test_a_document_of_a_poorer_coordinator_is_shown_with_question_marks() -> None:
    bare = {"campaigns": [{"campaign_id": "c"}], "runs": [{"run_id": "c-a", "campaign_id": "c"}], "hosts": [{"name": "h"}]}
    text = text_of(views.status_lines(bare, width=100))
    assert text.startswith("?")
    assert "c-a" in text
    assert text_of(view_run.run_details(bare, bare["runs"][0], width=100))
    assert text_of(view_outcome.outcome_lines(bare, bare["campaigns"][0], width=100))


@given(seconds=st.floats(min_value=0, max_value=1e6))
def test_ageing_a_document_changes_ages_and_times_left_only(seconds: float) -> None:
    before, after = canned.training(), aged(canned.training(), seconds)
    assert after["runs"][0]["loss"]["value"] == before["runs"][0]["loss"]["value"]
    assert after["runs"][0]["loss"]["age_seconds"] == before["runs"][0]["loss"]["age_seconds"] + seconds
    assert after["campaigns"][0]["seconds_to_deadline"] == before["campaigns"][0]["seconds_to_deadline"] - seconds
    assert after["runs"][2]["loss"]["age_seconds"] is None


def test_a_language_in_which_the_model_is_no_better_than_the_unigram_is_named() -> None:
    document = canned.evaluated()
    document["campaigns"][0]["results"]["test"]["models"]["selected"]["families"]["ja"]["nll"] = 7.6
    text = text_of(view_outcome.outcome_lines(document, document["campaigns"][0], width=100))
    assert "! not below the unigram model in: ja" in text


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        ({"exit": {"exit_code": 0, "signal": None, "observed_by": "shim"}}, "exit 0 (seen by shim)"),
        ({"exit": {"exit_code": None, "signal": 9, "observed_by": "pidfd"}}, "killed by SIGKILL (seen by pidfd)"),
        ({"exit": {"exit_code": None, "signal": None, "observed_by": "nobody"}}, "nobody saw how it ended"),
        ({"exit": {"exit_code": None, "signal": 4711, "observed_by": "shim"}}, "killed by signal 4711 (seen by shim)"),
    ],
)
def test_an_exit_nobody_saw_is_neither_zero_nor_killed(ended: dict[str, Any], text: str) -> None:
    assert view_run.exit_words(ended) == text


def test_what_a_host_is_being_brought_stands_below_it_with_its_pace_and_its_road() -> None:
    def said(**changes: Any) -> str:
        document = {**canned.training(), "hosts": [canned.host("spark-a", deliveries=[canned.delivery(**changes)])]}
        return text_of(views.host_lines(document, width=160)).split("\n")[-1].strip()

    assert said() == "datasets abababababab: 3.00/4.00 GiB · 100 MiB/s · 10 s left · by ssh, it is large: 4096 MiB"
    assert said(bytes_there_before=1024**3).startswith("datasets abababababab: 3.00/4.00 GiB (1.00 GiB from an earlier try) · 100 MiB/s")
    assert said(bytes_per_second=None, seconds_left=None).startswith("datasets abababababab: 3.00/4.00 GiB · by ssh")
    assert said(phase="looking", road="", because="", bytes_read=2**30) == "datasets abababababab: looking what is there, 1.00 GiB read"
    assert said(phase="settling").startswith("datasets abababababab: 3.00/4.00 GiB · the last bytes go to its disk · by ssh")


def test_the_proof_of_a_run_is_told_with_its_reason_and_nothing_is_said_of_one_that_was_not_made() -> None:
    document = canned.training()
    run = document["runs"][0]
    assert "exactness" not in text_of(view_run.run_details(document, run, width=80))
    run["exactness"] = {"step": 400, "verdict": "inexact", "required": True, "because": "steps 381 to 400 taken again: weights differs"}
    assert "exactness" in (shown := text_of(view_run.run_details(document, run, width=100)))
    assert "inexact: steps 381 to 400 taken again: weights differs" in shown
