"""Which run or campaign a word means, and when a campaign is over."""

from __future__ import annotations

from typing import Any

import canned
import pytest

from fleetd.screens.document import find, find_campaign, find_run, is_over, narrow, seen_age
from policies.errors import NotFound, RequestRefused


def fleet_of_two() -> dict[str, Any]:
    """An old campaign that is over and a new one at work, with one name and the same candidates."""
    old_id, new_id = "20261129T000000Z-manpages", "20261130T114000Z-manpages"
    old = [canned.run(name, run_id=f"{old_id}-{name}", campaign_id=old_id, state="finished") for name in ("a", "b")]
    new = [canned.run(name, run_id=f"{new_id}-{name}", campaign_id=new_id) for name in ("a", "b")]
    document = canned.document(runs=[*old, *new])
    document["campaigns"] = [
        canned.campaign([run["run_id"] for run in old], campaign_id=old_id, stage="evaluated", is_over=True),
        canned.campaign([run["run_id"] for run in new], campaign_id=new_id),
    ]
    return document


@pytest.mark.parametrize(
    ("word", "kind", "found"),
    [
        ("20261129T000000Z-manpages", "campaign", "20261129T000000Z-manpages"),
        ("20261129T000000Z-manpages-a", "run", "20261129T000000Z-manpages-a"),
        ("manpages", "campaign", "20261130T114000Z-manpages"),
        ("a", "run", "20261130T114000Z-manpages-a"),
        ("20261129", "campaign", "20261129T000000Z-manpages"),
        ("20261129T000000Z-manpages-", "run", None),
    ],
)
def test_of_several_with_one_name_the_one_at_work_is_meant(word: str, kind: str, found: str | None) -> None:
    document = fleet_of_two()
    if found is None:
        document["runs"] = document["runs"][:1]
        found = document["runs"][0]["run_id"]
    target = find(document, word)
    assert (target.kind, target.id) == (kind, found)


def test_when_none_is_at_work_the_newest_is_meant() -> None:
    document = fleet_of_two()
    document["campaigns"][1]["is_over"] = True
    assert find(document, "manpages").id == "20261130T114000Z-manpages"


def test_two_at_work_with_one_name_are_refused_with_their_ids() -> None:
    document = fleet_of_two()
    document["campaigns"][0].update(is_over=False, stage="training")
    with pytest.raises(RequestRefused) as refused:
        find(document, "manpages")
    assert "20261129T000000Z-manpages, 20261130T114000Z-manpages" in refused.value.what


def test_a_candidate_of_two_campaigns_is_named_with_its_campaign() -> None:
    document = fleet_of_two()
    for run in document["runs"]:
        run["state"] = "running"
    document["campaigns"][0]["name"] = "other"
    with pytest.raises(RequestRefused):
        find(document, "a")
    assert find(document, "other/a").id == "20261129T000000Z-manpages-a"


def test_a_word_that_is_nothing_gets_what_is_near() -> None:
    with pytest.raises(NotFound) as refused:
        find(canned.training(), "lr-hihg")
    assert "lr-high" in refused.value.what


def test_logs_of_a_campaign_need_a_run_and_a_run_leads_to_its_campaign() -> None:
    document = canned.training()
    with pytest.raises(RequestRefused, match="campaign of 3 runs"):
        find_run(document, "manpages")
    assert find_campaign(document, "lr-mid")["campaign_id"] == canned.CAMPAIGN


def test_a_narrowed_document_keeps_verdict_and_coordinator() -> None:
    document = fleet_of_two()
    shown = narrow(document, find(document, "a"))
    assert [run["run_id"] for run in shown["runs"]] == ["20261130T114000Z-manpages-a"]
    assert [each["campaign_id"] for each in shown["campaigns"]] == ["20261130T114000Z-manpages"]
    assert (shown["verdict"], shown["coordinator"]) == (document["verdict"], document["coordinator"])


@pytest.mark.parametrize(
    ("changes", "over"),
    [
        ({"stage": "training"}, False),
        ({"stage": "frozen"}, False),
        ({"stage": "frozen", "is_over": True}, True),
        ({"stage": "evaluated", "is_over": False}, False),
        ({"stage": "stopped", "is_over": False}, True),
        ({"stage": "failed", "is_over": None}, True),
        ({"stage": "evaluated", "is_over": None}, True),
        ({"stage": "frozen", "is_over": None, "report": "r.html"}, True),
        ({"stage": "frozen", "is_over": None, "report": None}, False),
    ],
)
def test_a_campaign_is_over_when_the_coordinator_says_so_or_it_rests(changes: dict[str, Any], over: bool) -> None:
    document = canned.document(runs=[canned.run("a", state="finished")], **changes)
    assert is_over(document, document["campaigns"][0]) is over


def test_the_last_look_at_a_run_is_unknown_before_the_first() -> None:
    assert seen_age(canned.waiting("a")) is None
    assert seen_age(canned.run("a")) == 1.0
