"""The report of a campaign: the figures that a person would check stand in report.json and in the page, and nothing missing breaks it."""

from __future__ import annotations

import json
import math
import re
import shutil
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_campaign import (
    CAP,
    KILLED_AT,
    NATS,
    SAVED_AT,
    STEPS,
    STOPPED_AT,
    at,
    choose,
    digest_of,
    enter,
    loss_at,
    result_record,
    run_id,
    value_at,
    whole_campaign,
)

from fleetd.paths import CampaignPaths
from fleetd.screens.report import write_report
from fleetd.screens.report_curves import joined, memory_curves, spread, stretches
from fleetd.screens.report_document import report_document
from fleetd.screens.report_runs import POINTS_MAX, smoothed, thinned
from policies.errors import NotFound
from policies.facts import MIB

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """What a reader of the page sees: headings, table rows, all text; and what a browser would fetch or run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.ids += [value for name, value in attributes if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        if tag in ("h1", "h2", "h3"):
            self.headings.append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            return
        self.words.append(data)
        if self.rows and {"td", "th"} & set(self.open[-4:]):
            self.rows[-1][-1] += data
        if {"h1", "h2", "h3"} & set(self.open[-3:]):
            self.headings[-1] += data

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def row(self, *beginning: str) -> list[str]:
        """The first table row that begins with these cells."""
        cleaned = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        return next(row for row in cleaned if tuple(row[: len(beginning)]) == beginning)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, dict[str, Any], str]:
    """One report of the whole campaign, for the tests that only read it."""
    paths, document = whole_campaign(tmp_path_factory.mktemp("state"))
    html, record = write_report(paths, document)
    text = html.read_text(encoding="utf-8")
    return Page(text), json.loads(record.read_text(encoding="utf-8")), text


def reported(paths: CampaignPaths, document: dict[str, Any]) -> tuple[Page, dict[str, Any]]:
    html, record = write_report(paths, document)
    return Page(html.read_text(encoding="utf-8")), json.loads(record.read_text(encoding="utf-8"))


def reported_without_curves(paths: CampaignPaths, document: dict[str, Any]) -> tuple[Page, dict[str, Any]]:
    """For tests of tables and words: drawing is what takes time."""
    shutil.rmtree(paths.store / "runs")
    return reported(paths, document)


def test_the_verdict_is_one_line_with_the_figures_that_matter(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    after, before = (math.exp(sum(NATS[who].values()) / 4) for who in ("selected", "base"))
    figures = f"perplexity {after:.0f}, the unchanged base {before:,.0f}"
    assert report["verdict"]["text"] == f"fast at step 300 was chosen, frozen, and judged on test: {figures}"
    assert report["verdict"]["text"] in page.headings[0]
    cards = {card["label"]: card for card in report["headlines"]}
    assert cards["test perplexity"]["value"] == f"{after:.0f}"
    assert cards["time"] == {"label": "time", "value": "10 min 41 s", "note": "19 min 19 s before the deadline"}
    assert cards["highest memory"]["value"] == "921 MiB"
    for card in report["headlines"]:
        assert card["value"] in page.text and card["note"] in page.text


def test_perplexity_by_language_stands_beside_the_unigram_model(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    (result,) = report["results"]
    for row in result["families"]:
        family = row["family"]
        for who in NATS:
            assert row[who] == pytest.approx(math.exp(NATS[who][family]))
        assert row["of_unigram"] == pytest.approx(row["selected"] / row["unigram"])
        shown = page.row(family)
        assert shown[1:4] == [f"{row['base']:,.0f}", f"{row['selected']:,.0f}", f"{row['unigram']:,.0f}"]
        assert shown[4] == f"{row['of_unigram']:.2f} × below"
    assert page.row("ja")[-2:] == ["41", "141,262"]


def test_the_selection_table_holds_every_checkpoint_with_its_reason_and_marks_one(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    table = report["selection"]["table"]
    assert len(table) == 3 * 4 + 1
    assert [(row["candidate"], row["step"]) for row in table if row["chosen"]] == [("fast", STEPS)]
    chosen = page.row("★ fast", "300")
    assert chosen[2] == f"{value_at('fast', STEPS):.4f}" and "chosen, the lowest of 3" in chosen[4]
    assert page.row("middle", "200")[4].startswith("better than step 100 by")
    assert "not eligible: it is a plain command" in page.row("printer", "—")[4]


def test_losses_are_those_that_were_logged_and_a_repeated_step_counts_once(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    runs = {run["candidate"]: run for run in report["runs"]}
    assert [point["step"] for point in runs["fast"]["losses"]] == list(range(1, STEPS + 1))
    assert runs["fast"]["losses"][212]["loss"] == loss_at("fast", 213)
    assert (runs["fast"]["repeated_steps"], runs["fast"]["repeated_equal"]) == (KILLED_AT - SAVED_AT, KILLED_AT - SAVED_AT)
    assert (runs["slow"]["repeated_steps"], runs["slow"]["steps"]) == (0, STEPS)
    assert "13 steps were trained a second time after a crash: every loss is equal, bit for bit" in page.text
    assert [each["step"] for each in runs["middle"]["validations"]] == [0, 100, 200, 300]


def test_stops_and_resumes_are_told_with_exit_codes_and_digests_in_order(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    story = [each["text"] for each in next(run for run in report["runs"] if run["candidate"] == "fast")["story"]]
    assert story == [
        "started", f"stopped at step {STOPPED_AT}: SIGTERM; left out: validation", "attempt 1 ended: exit 10 (seen by shim), user",
        f"resumed at step {STOPPED_AT} from checkpoint {digest_of('checkpoint', 'fast', STOPPED_AT)[:12]}",
        "attempt 2 ended: killed by SIGKILL (seen by shim), signal",
        f"resumed at step {SAVED_AT} from checkpoint {digest_of('checkpoint', 'fast', SAVED_AT)[:12]}",
        f"finished at step {STEPS}: all steps done", "attempt 3 ended: exit 0 (seen by shim)",
    ]
    for text in story:
        assert text in page.text
    assert page.row("fast", "finished")[2:5] == ["300 of 300", "3", "1 of 5"]


def test_memory_is_shown_against_its_cap(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, text = finished
    slow = report["runs"][0]
    assert (slow["host_peak_bytes"], slow["host_cap_bytes"]) == (921 * MIB, CAP)
    assert max(value for value in slow["trace"]["host_bytes"] if value) == 905 * MIB
    assert page.row("slow", "workstation")[2:5] == ["921 MiB", "1.50 GiB", "60 %"]
    assert "cap 1.5 GiB" in text and "cap 256 MiB" in text


def test_freeze_and_openings_stand_in_the_order_of_the_ledger(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    assert [entry["kind"] for entry in report["ledger"]["entries"]] == ["registered", "frozen", "opened", "judged"]
    assert (report["ledger"]["chain"], report["ledger"]["order"]) == ("whole", [])
    assert report["ledger"]["entries"][2]["text"].startswith("test, look 1, for selection " + report["frozen"]["sha256"][:12])
    assert page.row("3")[2] == "opened"
    names = [each["name"] for each in report["times"]["table"]]
    assert names == ["launched", "training ended", "frozen", "test opened", "test judged", "ended", "training cutoff", "deadline"]


def test_provenance_names_digests_software_and_machine(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, report, _ = finished
    assert report["provenance"]["data"]["validation"] == digest_of("data", "validation")
    for text in (digest_of("data", "test"), choose().checkpoint_digest, "2.13.0+cpu", "6.18.0", "x86_64"):
        assert text in page.text
    assert report["missing"] == []


def test_the_page_is_whole_in_itself_and_well_formed(finished: tuple[Page, dict[str, Any], str]) -> None:
    page, _, text = finished
    assert page.open == []
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "img", "object", "embed")]
    fetched = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("href", "src", "xlink:href") and value]
    assert all(value.startswith("#") for value in fetched)
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    assert "prefers-color-scheme: dark" in text and "@media print" in text
    drawings = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(drawings) == 4 and all(drawing["role"] == "img" for drawing in drawings)
    assert "#fe" not in text.split("</style>")[1], "every mark of a colour became a variable of the page"


def test_the_same_facts_give_the_same_bytes(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    html, record = write_report(paths, document)
    first = html.read_bytes(), record.read_bytes()
    write_report(paths, document)
    assert (html.read_bytes(), record.read_bytes()) == first


def test_text_from_elsewhere_is_shown_and_never_becomes_markup(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    evil = "<script>alert('x')</script>&\"'"
    document["campaigns"][0]["detail"] = evil
    document["runs"][3] |= {"candidate": evil, "detail": evil, "selectable": evil, "exactness": {"verdict": "inexact", "because": evil}}
    document["runs"][0]["attempts_ended"][0]["reason"] = evil
    document["hosts"][0]["facts"]["kernel"] = evil
    selection = json.loads(paths.selection.read_text())
    selection["table"][0]["because"] = evil
    paths.selection.write_text(json.dumps(selection))
    page, _ = reported(paths, document)
    assert not [tag for tag, _ in page.tags if tag == "script"]
    assert page.text.count(evil) >= 6 and f"exactness: inexact: {evil}" in page.text
    assert page.open == []


PARTS = {
    "selection.json": "selection", "frozen.json": "freeze", "ledger.jsonl": "ledger", "results/test.json": "result",
    f"store/runs/{run_id('fast')}/log.jsonl": "training log of fast", f"store/runs/{run_id('fast')}/trace.jsonl": "memory of fast",
    f"store/runs/{run_id('fast')}/lineage.jsonl": "lineage of fast",
    f"store/checkpoints/{choose().checkpoint_digest}/trainer.json": "software of the chosen checkpoint",
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_gone_is_said_and_the_rest_is_told(tmp_path: Path, name: str) -> None:
    paths, document = whole_campaign(tmp_path)
    (paths.root / name).unlink()
    report = report_document(paths, document)
    assert [note["what"].startswith(PARTS[name]) for note in report["missing"]] == [True]
    assert report["verdict"]["word"] == "Done"


@pytest.mark.parametrize("damage", ["gone", "garbage", "folders"])
def test_a_report_of_ruins_says_what_it_does_not_show(tmp_path: Path, damage: str) -> None:
    paths, document = whole_campaign(tmp_path)
    for name in PARTS:
        (paths.root / name).unlink()
        if damage == "garbage":
            (paths.root / name).write_bytes(b'{"schema": \xff]\n[1, 2]\n')
        elif damage == "folders":
            (paths.root / name).mkdir()
    page, report = reported(paths, document)
    told = [note["what"] for note in report["missing"]]
    assert all(any(each.startswith(beginning) for each in told) for beginning in PARTS.values())
    assert all(note["what"] in page.text and note["because"] in page.text for note in report["missing"])
    assert page.open == [] and report["verdict"]["word"] == "Done"


def test_a_campaign_in_its_first_minute_has_a_report_that_says_so(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    campaign = document["campaigns"][0]
    campaign |= {"stage": "training", "detail": "release and data lie on workstation", "selection": None, "frozen": None, "results": {}}
    empty = CampaignPaths(tmp_path / "empty" / "campaigns" / paths.root.name)
    empty.root.mkdir(parents=True)
    document["runs"] = [{key: each[key] for key in ("run_id", "campaign_id", "candidate")} for each in document["runs"][:3]]
    page, report = reported(empty, document)
    assert report["verdict"] == {"word": "Training", "text": "The campaign is training: release and data lie on workstation"}
    assert {"selection", "freeze", "ledger", "figures on reserved data"} <= {note["what"] for note in report["missing"]}
    assert not [tag for tag, _ in page.tags if tag == "svg"]
    assert page.row("slow", "—")[2:5] == ["—", "—", "—"]


def test_a_campaign_that_chose_nothing_says_why_in_its_title(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    for path in (paths.frozen, paths.result("test")):
        path.unlink()
    because = "the unchanged base of fast (9.018300) is not beaten by 0.001"
    selection = json.loads(paths.selection.read_text())
    selection |= {"outcome": "no_improvement", "because": because, "step": None, "candidate": None, "checkpoint_digest": None, "run_id": None}
    paths.selection.write_text(json.dumps(selection))
    document["campaigns"][0] |= {"stage": "failed", "detail": because, "frozen": None, "results": {}, "selection": selection}
    page, report = reported_without_curves(paths, document)
    assert report["verdict"] == {"word": "No model", "text": f"Nothing was chosen: {because}"}
    assert not any(row["chosen"] for row in report["selection"]["table"])
    assert page.headings[0].startswith("No model")


def test_a_model_that_is_worse_than_counting_words_is_not_hidden(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    nats = {**NATS, "selected": {**NATS["selected"], "ja": NATS["unigram"]["ja"] + 0.1}}
    frozen = json.loads(paths.result("test").read_text())["frozen_sha256"]
    paths.result("test").write_text(json.dumps(result_record(frozen, nats)))
    page, report = reported_without_curves(paths, document)
    card = next(card for card in report["headlines"] if card["label"] == "of the unigram model's")
    assert card["note"] == "not below in ja"
    assert report["verdict"]["text"].endswith("; not below the unigram model in ja")
    assert page.row("ja")[4] == "1.11 × not below"


def test_a_second_look_is_marked_as_exploratory_and_shown_beside_the_first(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    first = json.loads(paths.result("test").read_text())
    again = {**first, "look": 2, "exploratory": True, "because": "the first used the wrong tokenizer", "judged_at": at(900)}
    paths.result("test", 2).write_text(json.dumps(again))
    page, report = reported_without_curves(paths, document)
    assert [(result["look"], result["exploratory"]) for result in report["results"]] == [(1, False), (2, True)]
    assert "look 2, so these figures are exploratory: the first used the wrong tokenizer" in page.text


def test_an_edited_ledger_is_shown_as_broken(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    paths.ledger.write_text(paths.ledger.read_text().replace('"number":1', '"number":2', 1))
    page, report = reported_without_curves(paths, document)
    assert report["ledger"]["chain"] == "broken at entry 3"
    assert report["ledger"]["order"]
    assert "broken at entry 3" in page.text and "its order breaks a rule" in page.text


def test_an_opening_before_the_freeze_is_shown_as_a_broken_rule(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    paths.ledger.unlink()
    enter(paths.ledger, 1, "opened", split="test", number=1, frozen_sha256="0" * 64, because="")
    report = report_document(paths, document)
    assert report["ledger"]["chain"] == "whole"
    assert report["ledger"]["order"] == ["entry 1 (opened): test opened before any freeze"]


def test_losses_that_differ_when_trained_again_are_counted(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    path = paths.store_run(run_id("fast")) / "log.jsonl"
    lines = path.read_text().split("\n")
    place = max(index for index, line in enumerate(lines) if line.startswith('{"step": 205,'))
    lines[place] = json.dumps({**json.loads(lines[place]), "loss": 4.5})
    path.write_text("\n".join(lines))
    page, report = reported(paths, document)
    assert next(run for run in report["runs"] if run["candidate"] == "fast")["repeated_equal"] == 12
    assert "1 of the losses differ" in page.text


def test_numbers_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    path = paths.store_run(run_id("slow")) / "log.jsonl"
    path.write_text('{"step":1,"loss":NaN}\n{"step":2,"loss":1e999}\n{"step":true,"loss":1}\n{"step":3,"loss":"x"}\n{"step":4,"loss":5.5}\n')
    report = report_document(paths, document)
    assert next(run for run in report["runs"] if run["candidate"] == "slow")["losses"] == [{"step": 4, "loss": 5.5}]


def test_a_campaign_that_the_coordinator_does_not_know_is_not_reported(tmp_path: Path) -> None:
    paths, document = whole_campaign(tmp_path)
    with pytest.raises(NotFound):
        write_report(CampaignPaths(paths.root.parent / "other"), document)
    assert not (paths.root.parent / "other").exists()


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    points = [{"step": step, "loss": 1.0} for step in range(100_000)]
    kept = thinned(points)
    assert (len(kept), kept[0]["step"], kept[-1]["step"]) == (POINTS_MAX, 0, 99_999)
    assert all(point["loss"] == pytest.approx(1.0) for point in smoothed(points)[:50])


def test_names_that_would_lie_on_each_other_are_moved_apart() -> None:
    moved = spread([1.0, 1.01, 5.0], gap=0.5)
    assert moved[1] - moved[0] == pytest.approx(0.5, rel=0.01) and moved[2] == 5.0
    assert joined([("b", 5.0), ("a", 1.0), ("c", 1.01)], nearness=0.1) == [("a, c", 1.0), ("b", 5.0)]
    assert stretches([0.0, 1.0, 2.0, 3.0], ["running", "running", "stopped", "running"]) == [("running", 0.0, 2.0), ("stopped", 2.0, 3.0)]


def test_the_memory_of_a_single_run_is_drawn() -> None:
    launched = datetime(2026, 9, 16, 18, 0, tzinfo=timezone.utc)
    run = {
        "candidate": "only", "host_cap_bytes": 2 * 1024**3,
        "trace": {"at": ["2026-09-16T18:00:05Z", "2026-09-16T18:00:10Z"], "host_bytes": [10**9, 11 * 10**8]},
    }
    drawn = memory_curves([run], launched)
    assert drawn is not None
    assert "only" in drawn
