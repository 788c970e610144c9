"""Work of others that makes room for a campaign: when a host is asked to move it away, when to bring it back, and what people ask of it. Pure.

    found ─► stopping ─► displaced ─► restoring ─► restored
               ↓ ↑          ↓ ↑           ↓ ↑
               held       returned       failed       left: stays away, by a person's word

An order is sent again and again until the host says that it is done; only its words that differ become history. Nothing is signalled
before the run book on the disk says how it is brought back. Away in the order of the plan, back in the reverse order, host by host.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Job, JobDone, Order, OrderDone, Request
from fleetd.coordinator.strangers import strangers
from fleetd.coordinator.targets import find_campaign, is_over
from fleetd.fleet import Campaign, Displaced, Fleet
from fleetd.model import DisplaceOrder
from fleetd.wire import WireError, decode, encode
from policies.errors import NotFound, RequestRefused
from policies.lifecycle import SETTLED
from policies.workloads import IN_THE_WAY, TO_RESTORE, DisplacedState, Progress

ANSWER_SECONDS_MAX = 20.0
"""How long `fleetd restore` waits for hosts before it says how far they are."""
LOOK_SECONDS = 30
"""Whether displaced work runs again although nobody asked fleetd for it: looked at this often."""
HELD_LOOK_SECONDS = 5
BOOTED_LOOK_SECONDS = 5
"""The same on a host that was booted since preflight, where a unit may be up by itself."""
NAMES_SHOWN_MAX = 4
BROUGHT_BACK = TO_RESTORE | {DisplacedState.LEFT}
"""What a restore is about: also what a person had left away, and wants back now."""


def room_held_up(pen: Pen, campaign: Campaign, host: HostPlan) -> str | None:
    """What the first start on this host waits for because of work that is to make room; None when there is none. Asks for the next of it."""
    if host.displace and host.name not in campaign.displaced_shown:
        return f"{host.name}, which was silent when preflight looked: what is to make room there was never shown (launch again)"
    for item in campaign.displaced:
        if item.host != host.name or item.state not in IN_THE_WAY:
            continue
        if campaign.run_book_moves == 0:
            return f"the run book of displaced work on {host.name}"
        if item.state is not DisplacedState.HELD or _is_time(pen, HELD_LOOK_SECONDS):
            pen.send(_order("displace", campaign, item))
        said = f": {item.detail}" if item.detail else ""
        return f"{item.workload.name} to make room on {host.name}{said}"
    return None


def follow_displaced(pen: Pen) -> None:
    """Each tick: keep the run book true, go on with what is being brought back, and look whether displaced work has come back."""
    for campaign_id in pen.fleet.campaigns:
        if not pen.campaign(campaign_id).displaced:
            continue
        _restore_at_the_end(pen, pen.campaign(campaign_id))
        campaign = pen.campaign(campaign_id)
        for host in dict.fromkeys(item.host for item in campaign.displaced):
            here = [item for item in reversed(campaign.displaced) if item.host == host]
            next_back = next((item for item in here if item.state is DisplacedState.RESTORING), None)
            if next_back is not None:
                pen.send(_order("restore", campaign, next_back))
            else:
                for item in here:
                    seconds = BOOTED_LOOK_SECONDS if _has_booted(pen, item) else LOOK_SECONDS
                    if item.state in (DisplacedState.DISPLACED, DisplacedState.RETURNED) and _is_time(pen, seconds):
                        pen.send(_order("restore", campaign, item, only_look=True))
        if campaign.run_book_moves < campaign.displaced_moves:
            pen.start(Job(key=f"run_book:{campaign_id}", kind="run_book", campaign_id=campaign_id))


def run_book_written(pen: Pen, done: JobDone) -> None:
    moves = int(done.result["moves"])
    if moves > pen.campaign(done.job.campaign_id).run_book_moves:
        body = {"moves": moves, "path": done.result["path"]}
        pen.write("run_book_written", body, campaign=done.job.campaign_id, because="how displaced work is brought back is on the disk")


def plan_displacement(pen: Pen, campaign_id: str, displaced: list[dict[str, Any]], hosts: list[str]) -> None:
    """Preflight has shown what is to make room on these hosts: from here on its identities are history."""
    campaign = pen.campaign(campaign_id)
    if any(host.displace for host in campaign.plan.hosts) and not campaign.displaced_shown:
        names = ", ".join(f"{each['workload']['name']} on {each['host']}" for each in displaced) or "nothing runs that would have to"
        body = {"displaced": displaced, "hosts": hosts}
        pen.write("displacement_planned", body, campaign=campaign_id, because=f"shown in preflight, not touched yet: {names}")


def take_displacement_answer(pen: Pen, done: OrderDone) -> None:
    """What a host says of one workload, where it is news."""
    asked = decode(DisplaceOrder, done.order.body["displacement"])
    campaign = pen.fleet.campaigns.get(asked.campaign_id)
    found = [each for each in campaign.displaced if (each.host, each.workload.name) == (done.order.host, asked.workload.name)] if campaign else []
    if campaign is None or not found:
        return
    try:
        progress = decode(Progress, done.answer.get("progress"), "progress")
    except WireError:
        return
    item, to = found[0], _state_told(done, progress)
    if done.order.order == "restore" and asked.asking == 0:
        if item.state not in (DisplacedState.DISPLACED, DisplacedState.RETURNED):
            return  # a look from before somebody asked for it
    elif (done.order.order == "displace") != (item.state in IN_THE_WAY):
        return  # an answer from before it moved on
    elif done.order.order == "restore" and (item.state is not DisplacedState.RESTORING or asked.asking != item.asking):
        return
    if to is not item.state or (progress.text != item.detail and asked.asking + (done.order.order == "displace") > 0):
        _move(pen, campaign, item, to, progress.text, actor=f"host:{done.order.host}", pids=progress.pids, available=progress.available_bytes)


def _state_told(done: OrderDone, progress: Progress) -> DisplacedState:
    """A look that finds it running calls it returned: nobody here has asked for that."""
    is_look = done.order.order == "restore" and done.order.body["displacement"].get("asking") == 0
    return DisplacedState.RETURNED if is_look and progress.state is DisplacedState.RESTORED else progress.state


def restore(pen: Pen, request: Request) -> None:
    """`target` a campaign, `host` one of its hosts or none, `now`: although runs are alive there, `leave`: it stays away for good."""
    campaign = find_campaign(pen.fleet, str(request.body.get("target") or ""))
    assert campaign is not None
    host, actor = str(request.body.get("host") or ""), str(request.body.get("actor") or "user")
    items = [item for item in campaign.displaced if host in ("", item.host)]
    if not items:
        known = ", ".join(dict.fromkeys(item.host for item in campaign.displaced)) or "none"
        what = f"hosts of which it has displaced work: {known}"
        raise NotFound("nothing was displaced there", where=f"campaign {campaign.campaign_id}{f', host {host}' if host else ''}", what=what,
                       fix="fleetd status   (shows what a campaign has displaced)")
    if request.body.get("leave"):
        _leave(pen, campaign, items, actor, str(request.body.get("because") or ""))
        now = [item for item in pen.campaign(campaign.campaign_id).displaced if host in ("", item.host)]
        pen.answer(request, {"campaign_id": campaign.campaign_id, "displaced": [told(item) for item in now]})
        return
    if not request.body.get("begun"):
        _check_free(pen, campaign, items, bool(request.body.get("now")))
        for item in items:
            if item.state in BROUGHT_BACK:
                _move(pen, campaign, item, DisplacedState.RESTORING, "asked to be brought back", actor=actor)
                campaign = pen.campaign(campaign.campaign_id)
        pen.keep(replace(request, body={**request.body, "begun": True}))
        return
    is_under_way = any(item.state is DisplacedState.RESTORING for item in items)
    if is_under_way and (pen.now - request.received_at).total_seconds() < ANSWER_SECONDS_MAX:
        pen.keep(request)
        return
    pen.answer(request, {"campaign_id": campaign.campaign_id, "displaced": [told(item) for item in items]})


def _leave(pen: Pen, campaign: Campaign, items: Iterable[Displaced], actor: str, because: str) -> None:
    """A person's word that it is not wanted back: nothing is started, and nobody is told of it any more."""
    for item in items:
        if item.state in TO_RESTORE | {DisplacedState.RESTORING}:
            _move(pen, pen.campaign(campaign.campaign_id), item, DisplacedState.LEFT, because or "it is not wanted back", actor=actor)


def told(item: Displaced) -> dict[str, Any]:
    """One line of the status document, and of the answer to a restore."""
    pids = [each.identity.pid for each in item.found.processes]
    return {
        "host": item.host, "name": item.workload.name, "unit": item.workload.unit, "state": item.state.value, "detail": item.detail,
        "since": encode(item.since), "pids_found": pids,
    }


def not_restored(campaign: Campaign) -> dict[str, list[Displaced]]:
    """By host, what waits to be brought back."""
    found: dict[str, list[Displaced]] = {}
    for item in campaign.displaced:
        if item.state in TO_RESTORE - {DisplacedState.RETURNED}:
            found.setdefault(item.host, []).append(item)
    return found


def displaced_words(fleet: Fleet) -> list[tuple[str, datetime | None]]:
    """What of displaced work needs a person: it stays, it came back beside the runs, or the campaign is over and it is still away."""
    found: list[tuple[str, datetime | None]] = []
    for campaign in fleet.campaigns.values():
        over, restore = is_over(campaign), f"fleetd restore {campaign.campaign_id}"
        for item in campaign.displaced:
            name = f"{item.workload.name} on {item.host}"
            if item.state is DisplacedState.HELD and not over:
                found.append((f"{name} does not make room: {item.detail}", item.since))
            elif item.state is DisplacedState.RETURNED and not over:
                found.append((f"{name} is back beside the runs of {campaign.plan.name}: {item.detail}", item.since))
            elif item.state is DisplacedState.FAILED:
                found.append((f"{name} could not be brought back: {item.detail} ({restore})", item.since))
        for host, items in not_restored(campaign).items() if over else ():
            away = [item for item in items if item.state is not DisplacedState.FAILED]
            marks = ["" if item.state is DisplacedState.DISPLACED else " (asked to end, perhaps alive)" for item in away]
            names = ", ".join(f"{item.workload.name}{mark}" for item, mark in zip(away, marks, strict=True))
            found += [(f"displaced work not yet restored on {host}: {names} ({restore} --host {host})", away[0].since)] if away else []
    return found


def _check_free(pen: Pen, campaign: Campaign, items: Iterable[Displaced], now: bool) -> None:
    hosts = {item.host for item in items if item.state in BROUGHT_BACK}
    alive = [f"{run.candidate} on {run.host}" for run in pen.fleet.runs.values() if run.host in hosts and run.state not in SETTLED]
    alive += [f"{each.run_id} on {each.host}" for each in strangers(pen.fleet, pen.sight) if each.host in hosts]
    if alive and not now:
        shown = ", ".join(alive[:NAMES_SHOWN_MAX])
        fix = f"fleetd wait {campaign.campaign_id}, or stop them first; to bring it back beside them: add --now"
        raise RequestRefused("runs still need the room", where=f"campaign {campaign.campaign_id}", what=f"at work there: {shown}", fix=fix)


def _restore_at_the_end(pen: Pen, campaign: Campaign) -> None:
    """Where the plan asks for it: once nothing of the campaign runs any more, and nothing else on that host does."""
    if not campaign.plan.restore_displaced or not is_over(campaign):
        return
    busy = {run.host for run in pen.fleet.runs.values() if run.state not in SETTLED} | {each.host for each in strangers(pen.fleet, pen.sight)}
    for item in campaign.displaced:
        if item.state in TO_RESTORE - {DisplacedState.FAILED} and item.host not in busy:
            _move(pen, pen.campaign(campaign.campaign_id), item, DisplacedState.RESTORING, "the campaign is over, and the plan brings it back")


def _move(
    pen: Pen, campaign: Campaign, item: Displaced, to: DisplacedState, because: str, *, actor: str = "coordinator", pids: tuple[int, ...] = (),
    available: int | None = None,
) -> None:
    body = {"name": item.workload.name, "from": item.state.value, "to": to.value, "pids": list(pids), "available_bytes": available}
    pen.write("displacement_moved", body, campaign=campaign.campaign_id, host=item.host, actor=actor, because=because)


def _order(kind: str, campaign: Campaign, item: Displaced, *, only_look: bool = False) -> Order:
    asking = 0 if only_look or kind == "displace" else item.asking
    body = DisplaceOrder(campaign_id=campaign.campaign_id, workload=item.workload, found=item.found, asking=asking)
    key = f"{kind}:{campaign.campaign_id}:{item.host}:{item.workload.name}:{asking}"
    return Order(key=key, host=item.host, order=kind, run_id="", body={"displacement": encode(body)})


def _has_booted(pen: Pen, item: Displaced) -> bool:
    known = pen.fleet.hosts.get(item.host)
    return known is not None and known.boot_id is not None and any(each.identity.boot_id != known.boot_id for each in item.found.processes)


def _is_time(pen: Pen, seconds: int) -> bool:
    """Once in so many seconds of the clock that decisions go by: nothing has to be remembered for it."""
    return int(pen.now.timestamp()) % seconds == 0
