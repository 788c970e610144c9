"""The first line of every status: OK, NEEDS YOU or BLIND, with what, where and since when. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from fleetd.coordinator.decide_displacement import displaced_words
from fleetd.coordinator.decide_hosts import HOST_SILENT_SECONDS, needed_hosts
from fleetd.coordinator.sight import HostSight, Sight
from fleetd.coordinator.strangers import strangers
from fleetd.coordinator.targets import is_over
from fleetd.fleet import Campaign, Fleet, Run
from policies.facts import CampaignStage, RunState
from policies.lifecycle import SETTLED

TROUBLE_COUNT_MIN = 3
"""A job that failed this often in a row is somebody's business; once or twice it is the world's."""
TROUBLE_SECONDS_MAX = 180.0
"""Trouble that is older was given up: what is still wanted is tried again each minute."""

SKEW_SECONDS_TOLERATED = 10.0
"""Beyond what NTP leaves and what a way of some seconds looks like."""
DISK_FREE_BYTES_MIN = 1024**2
"""With less than this no supervisor can record what happens."""
_CANNOT_WRITE = ("the supervisor's journal is", "nothing can be started here")
"""How the alarms begin by which a supervisor says that its disk takes nothing."""
_CANNOT_VERIFY = "cannot verify"

_HELP = {RunState.HELD: "fleetd resume", RunState.STUCK: "look at its processes on the host; fleetd clear", RunState.FAILED: "fleetd logs"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    word: str
    text: str
    since: datetime | None


def judge(fleet: Fleet, sight: Sight, now: datetime, journal_health: str, clock_alarm: str = "") -> Verdict:
    """What a person has to know first. Of several things the most pressing, and how many more there are."""
    alarms = [(f"the coordinator's journal is {journal_health}", None)] if journal_health != "ok" else []
    alarms += [(clock_alarm, None)] if clock_alarm else []
    pressing = [*alarms, *_needs_you(fleet, sight, now)]
    if pressing:
        return _first("NEEDS YOU", pressing)
    silent = _silent_hosts(fleet, sight, now)
    if silent:
        return _first("BLIND", silent)
    return _well(fleet)


def _first(word: str, found: list[tuple[str, datetime | None]]) -> Verdict:
    text, since = found[0]
    return Verdict(word=word, text=f"{text} (and {len(found) - 1} more)" if len(found) > 1 else text, since=since)


def _needs_you(fleet: Fleet, sight: Sight, now: datetime) -> list[tuple[str, datetime | None]]:
    found: list[tuple[str, datetime | None]] = []
    shown = _shown(fleet)
    runs = [fleet.runs[run_id] for campaign in shown for run_id in campaign.runs]
    for state in (RunState.STUCK, RunState.HELD, RunState.FAILED):
        over = {campaign.campaign_id for campaign in shown if is_over(campaign)}
        found += [(_run_words(run), run.since) for run in runs if run.state is state and run.campaign_id not in over and not _is_answered(run)]
    found += [(f"{campaign.plan.name} failed: {campaign.detail}", campaign.since) for campaign in shown if campaign.stage is CampaignStage.FAILED]
    for run in runs:
        look = sight.observations.get(run.run_id)
        if look is None or run.state in SETTLED:
            continue
        # A look alone is no reason to wake anybody: between fork, exec and record no trainer can be verified. The supervisor raises an
        # alarm once its patience is over. A stop that takes its rungs needs nobody, unless it can't tell whom it would stop.
        alarms = [alarm for alarm in look.alarms if not alarm.startswith(_CANNOT_WRITE)]
        if run.state is RunState.STOPPING:
            alarms = [alarm for alarm in alarms if alarm.startswith(_CANNOT_VERIFY)]
        found += [(f"{run.candidate} on {run.host}: {alarm}", sight.observed_at.get(run.run_id)) for alarm in alarms]
    found += _full_disks(sight, [run for run in runs if run.state not in SETTLED])
    found += _skewed_clocks(sight)
    found += [(f"{each.words} (fleetd stop {each.run_id})", None) for each in strangers(fleet, sight)]
    found += displaced_words(fleet)
    for key, trouble in (*sight.job_troubles.items(), *sight.order_troubles.items()):
        is_tried = (now - trouble.last_at).total_seconds() < TROUBLE_SECONDS_MAX and trouble.error["error"] != "HostUnreachable"
        if trouble.count >= TROUBLE_COUNT_MIN and is_tried:
            found.append((f"{key.split(':')[0]}: {trouble.error['title']}: {trouble.error['what']}; {trouble.error['fix']}", trouble.last_at))
    return found


def _is_answered(run: Run) -> bool:
    """Whether a person has said already what is to become of it: its work goes on elsewhere, or its host takes others all the same."""
    return run.left_behind or run.cleared is not None


def _skewed_clocks(sight: Sight) -> list[tuple[str, datetime | None]]:
    """Hosts whose clock disagrees with ours. Their runs count their deadlines by what they were told; logs and whatever else there don't."""
    return [(f"{skew_words(name, host)} (set the clock there)", None) for name, host in sight.hosts.items() if is_skewed(host)]


def is_skewed(host: HostSight) -> bool:
    return host.skew_seconds is not None and abs(host.skew_seconds) > SKEW_SECONDS_TOLERATED


def skew_words(name: str, host: HostSight) -> str:
    skew_seconds = host.skew_seconds or 0.0
    side = "ahead of" if skew_seconds > 0 else "behind"
    return f"the clock of {name} is {abs(skew_seconds):.0f} s {side} the coordinator's; deadlines go by the time that its agent was told"


def _full_disks(sight: Sight, live: list[Run]) -> list[tuple[str, datetime | None]]:
    """Hosts on which a live run can't be recorded any more: it may have ended, and nobody could write down how."""
    found: list[tuple[str, datetime | None]] = []
    by_host: dict[str | None, list[Run]] = {}
    for run in live:
        by_host.setdefault(run.host, []).append(run)
    for name, host in sight.hosts.items():
        here = by_host.get(name, [])
        alarms = [f"{run.candidate}: {alarm}" for run in here for alarm in _alarms(sight, run) if alarm.startswith(_CANNOT_WRITE)]
        free_bytes = host.disk_free_bytes
        is_full = free_bytes is not None and free_bytes < DISK_FREE_BYTES_MIN
        if not here or not (alarms or is_full):
            continue
        words = [f"host {name}: its disk is full, {free_bytes} bytes are free" if is_full else f"host {name} can't be written", *alarms[:1]]
        gone = [run.candidate for run in here if _is_gone(sight, run)]
        words += [f"the trainer of {', '.join(gone)} is gone, and how it ended waits to be recorded"] if gone else []
        found.append((f"{'; '.join(words)} (free space below {host.plan.root})", None))
    return found


def _alarms(sight: Sight, run: Run) -> tuple[str, ...]:
    look = sight.observations.get(run.run_id)
    return look.alarms if look is not None else ()


def _is_gone(sight: Sight, run: Run) -> bool:
    look = sight.observations.get(run.run_id)
    return look is not None and look.identity == "gone" and run.state in (RunState.RUNNING, RunState.STOPPING)


def _shown(fleet: Fleet) -> list[Campaign]:
    """Campaigns under way, and the newest one even if it is over."""
    every = list(fleet.campaigns.values())
    return [campaign for campaign in every if not is_over(campaign) or campaign is every[-1]]


def _run_words(run: Run) -> str:
    why = run.detail or run.reason or "no reason given"
    return f"{run.candidate} is {run.state} on {run.host or 'no host'}: {why} ({_HELP[run.state]} {run.candidate})"


def _silent_hosts(fleet: Fleet, sight: Sight, now: datetime) -> list[tuple[str, datetime | None]]:
    found: list[tuple[str, datetime | None]] = []
    for name in needed_hosts(fleet):
        known, seen = fleet.hosts.get(name), sight.hosts.get(name)
        if known is not None and known.fenced is not None:
            continue  # a person has said that it is off
        heard_at = seen.answered_at if seen is not None else None
        is_quiet = seen is not None and (now - max(seen.asked_since, heard_at or seen.asked_since)).total_seconds() > HOST_SILENT_SECONDS
        if (known is not None and not known.reachable) or is_quiet:
            since = heard_at or (known.since if known is not None else None)
            why = f": {seen.trouble['what']}" if seen is not None and seen.trouble else ""
            found.append((f"{name} does not answer{why}; its runs go on by themselves", since))
    return found


def _well(fleet: Fleet) -> Verdict:
    going = [campaign for campaign in fleet.campaigns.values() if not is_over(campaign)]
    if not going:
        last = next(reversed(fleet.campaigns.values()), None)
        if last is None:
            return Verdict(word="OK", text="nothing was launched yet", since=None)
        return Verdict(word="OK", text=f"{last.plan.name} is {last.stage}", since=last.since)
    words = "; ".join(f"{campaign.plan.name} {_stage_words(fleet, campaign)}" for campaign in going)
    return Verdict(word="OK", text=words, since=max(campaign.since for campaign in going))


def _stage_words(fleet: Fleet, campaign: Campaign) -> str:
    counted = Counter(fleet.runs[run_id].state.value for run_id in campaign.runs)
    states = ", ".join(f"{count} {state}" for state, count in counted.items())
    return f"{campaign.stage}: {states}" if states else campaign.stage.value
