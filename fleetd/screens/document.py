"""Reading the status document: a value with its age, the runs of a campaign, and which one a person means.

The document comes from a coordinator that may be older or newer than this command, so a missing key is an unknown value, never a
crash and never a zero.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fleetd.screens.words import plural
from policies.errors import NotFound, RequestRefused
from policies.facts import format_moment, parse_moment

Document = dict[str, Any]

SETTLED_STATES = frozenset({"stopped", "finished", "failed"})
WAITING_STATES = frozenset({"queued", "staging"})
ATTENTION_STATES = frozenset({"held", "stuck", "failed"})
SETTLED_STAGES = frozenset({"evaluated", "finished", "stopped", "failed"})
MATCHES_SHOWN_MAX = 5


@dataclass(frozen=True, slots=True)
class Sight:
    """A measured value and how old it is, in seconds. None is unknown."""

    value: Any
    age_seconds: float | None


def sight(field: Any) -> Sight:
    """The Sight in `{"value", "age_seconds"}`; anything else is a value of unknown age."""
    if isinstance(field, dict) and "value" in field:
        return Sight(field["value"], number(field.get("age_seconds")))
    return Sight(field, None)


def number(value: Any) -> float | None:
    """The value as a float when it is a number (`nan` included), else None."""
    if isinstance(value, str) and value in {"nan", "inf", "-inf"}:
        return math.nan if value == "nan" else math.inf
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def moment_of(document: Document) -> datetime | None:
    """The moment at which the coordinator made the document; every age in it counts from there."""
    try:
        return parse_moment(document["at"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None


def seconds_between(earlier: Any, now: datetime | None) -> float | None:
    """Seconds from a moment of the document to `now`, never below zero; None when either is unknown."""
    try:
        return None if now is None else max(0.0, (now - parse_moment(earlier)).total_seconds())
    except (ValueError, TypeError, AttributeError):
        return None


def is_settled(run: Document) -> bool:
    return run.get("state") in SETTLED_STATES


def seen_age(run: Document) -> float | None:
    """Seconds since the host last looked at the run: the youngest of what one look reads. None when nobody looked yet."""
    fields = (run.get("identity"), run.get("pid"), (run.get("memory") or {}).get("host_bytes"))
    ages = [found.age_seconds for found in map(sight, fields) if found.age_seconds is not None and found.value is not None]
    return min(ages, default=None)


def aged(document: Document, seconds: float) -> Document:
    """The document as it reads `seconds` after it was received: ages grow, times left shrink, the values stay what they were."""
    shown: Document = _aged(document, seconds)
    if now := moment_of(document):
        shown["at"] = format_moment(now + timedelta(seconds=seconds))
    return shown


def _aged(value: Any, seconds: float) -> Any:
    if isinstance(value, list):
        return [_aged(item, seconds) for item in value]
    return {key: _aged_number(key, item, seconds) for key, item in value.items()} if isinstance(value, dict) else value


def _aged_number(key: str, value: Any, seconds: float) -> Any:
    known = number(value)
    if known is not None and key == "age_seconds":
        return known + seconds
    if known is not None and (key.startswith("seconds_to_") or key == "time_left_seconds"):
        return known - seconds
    return _aged(value, seconds)


def campaigns(document: Document) -> list[Document]:
    return list(document.get("campaigns") or [])


def runs(document: Document) -> list[Document]:
    return list(document.get("runs") or [])


def runs_of(document: Document, campaign_id: str) -> list[Document]:
    return [run for run in runs(document) if run.get("campaign_id") == campaign_id]


def is_over(document: Document, campaign: Document) -> bool:
    """Whether nothing more happens to a campaign by itself. A coordinator that does not say so is judged by stage, report and runs at work."""
    if isinstance(campaign.get("is_over"), bool):
        return bool(campaign["is_over"]) or campaign.get("stage") == "stopped"
    if campaign.get("stage") in SETTLED_STAGES:
        return True
    at_work = any(not is_settled(run) for run in runs_of(document, campaign["campaign_id"]))
    return campaign.get("stage") == "frozen" and bool(campaign.get("report")) and not at_work


def is_closed(document: Document, campaign: Document) -> bool:
    """Whether a campaign is over for good. A stopped one may be resumed, and its deadline still counts."""
    return campaign.get("stage") != "stopped" and is_over(document, campaign)


@dataclass(frozen=True, slots=True)
class Target:
    """What a person named: exactly one run or one campaign."""

    kind: str
    """`run` or `campaign`."""
    id: str
    body: Document


def find(document: Document, word: str) -> Target:
    """The run or campaign that `word` names: an id, a campaign's name, a candidate's name, `campaign/candidate`, or the start of an id.

    Of several with one name the one still at work is meant, else the newest. NotFound suggests near names; RequestRefused lists the
    choices when the word fits several that are at work.
    """
    for matches in _by_rule(document, word):
        if matches:
            return _the_one(document, word, matches)
    known = [str(each.get("name")) for each in campaigns(document)] + [str(run.get("candidate")) for run in runs(document)]
    near = difflib.get_close_matches(word, dict.fromkeys(known), n=MATCHES_SHOWN_MAX, cutoff=0.6)
    raise NotFound(
        f"nothing is called {word!r}",
        where=f"{plural(len(campaigns(document)), 'campaign')} and {plural(len(runs(document)), 'run')} of this coordinator",
        what=f"close to it: {', '.join(near)}" if near else "no id, campaign or candidate starts with it",
        fix="fleetd status   (shows every name)",
    )


def is_host(document: Document, word: str) -> bool:
    """Whether a host of this fleet has that name."""
    return any(host.get("name") == word for host in document.get("hosts") or [])


def unknown_runs(document: Document) -> set[str]:
    """The ids of runs that hosts tell of and history does not know. Nothing shorter names one."""
    return {str(run.get("run_id")) for host in document.get("hosts") or [] for run in host.get("unknown_runs") or []}


def find_run(document: Document, word: str) -> Document:
    """The run that `word` names. A campaign's name is refused with the names of its runs, unless it has only one."""
    target = find(document, word)
    if target.kind == "run":
        return target.body
    inside = runs_of(document, target.id)
    if len(inside) == 1:
        return inside[0]
    names = [str(run.get("candidate")) for run in inside]
    raise RequestRefused(
        f"{word} is a campaign of {len(inside)} runs: name one", where=target.id, what=f"its runs: {', '.join(names)}",
        fix=f"fleetd logs {names[0] if names else 'RUN'}",
    )


def find_campaign(document: Document, word: str) -> Document:
    """The campaign that `word` names, or that holds the run it names."""
    target = find(document, word)
    if target.kind == "campaign":
        return target.body
    return next(each for each in campaigns(document) if each["campaign_id"] == target.body["campaign_id"])


def narrow(document: Document, target: Target) -> Document:
    """The document with only this run, or this campaign and its runs. Verdict and coordinator stay those of the whole fleet."""
    campaign_id = target.id if target.kind == "campaign" else target.body.get("campaign_id")
    chosen = [target.body] if target.kind == "run" else runs_of(document, target.id)
    used = {run.get("host") for run in chosen}
    return {
        **document,
        "campaigns": [each for each in campaigns(document) if each["campaign_id"] == campaign_id],
        "runs": chosen,
        "hosts": [host for host in document.get("hosts") or [] if host.get("name") in used],
    }


def _by_rule(document: Document, word: str) -> list[list[Target]]:
    """Matches by each rule, the strictest first."""
    all_campaigns = [Target("campaign", each["campaign_id"], each) for each in campaigns(document)]
    all_runs = [Target("run", run["run_id"], run) for run in runs(document)]
    campaign_name = {each["campaign_id"]: each.get("name") for each in campaigns(document)}
    everything = all_campaigns + all_runs
    return [
        [target for target in everything if target.id == word],
        [target for target in all_campaigns if target.body.get("name") == word],
        [target for target in all_runs if target.body.get("candidate") == word],
        [target for target in all_runs if f"{campaign_name.get(target.body['campaign_id'])}/{target.body.get('candidate')}" == word],
        [target for target in all_campaigns if target.id.startswith(word)],
        [target for target in all_runs if target.id.startswith(word)],
    ]


def _the_one(document: Document, word: str, matches: list[Target]) -> Target:
    at_work = [target for target in matches if not _rests(document, target)]
    chosen = at_work or [max(matches, key=lambda target: target.id)]
    if len(chosen) == 1:
        return chosen[0]
    raise RequestRefused(
        f"{word!r} could be any of {len(chosen)}", where="the coordinator's campaigns and runs at work",
        what=", ".join(target.id for target in chosen[:MATCHES_SHOWN_MAX]) + (", …" if len(chosen) > MATCHES_SHOWN_MAX else ""),
        fix="use a whole id, or campaign/candidate",
    )


def _rests(document: Document, target: Target) -> bool:
    return is_settled(target.body) if target.kind == "run" else is_over(document, target.body)
