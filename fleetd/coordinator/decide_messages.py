"""Which of this tick's events somebody wants to be told of, through the plan's notify command.

    needs_you   a run is held, stuck or failed; displaced work does not go, or does not come back
    finished    the campaign's last word is written
    failed      the campaign failed
"""

from __future__ import annotations

from typing import Any

from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Message
from fleetd.fleet import Event
from policies.facts import CampaignStage, RunState, format_moment

NEEDS_YOU = frozenset({RunState.HELD, RunState.STUCK, RunState.FAILED})


def write_messages(pen: Pen) -> None:
    for event in pen.events:
        word = _word(event)
        if event.run_id in pen.fleet.runs and pen.run(str(event.run_id)).left_behind:
            continue  # whoever fenced its host knows
        if word is None or event.campaign_id is None:
            continue
        campaign = pen.campaign(event.campaign_id)
        body: dict[str, Any] = {
            "schema": 1, "kind": word, "at": format_moment(pen.now), "campaign_id": campaign.campaign_id, "run_id": event.run_id,
            "stage": campaign.stage.value, "text": event.because,
        }
        for notify in campaign.plan.notify:
            if word in notify.on:
                pen.write("notified", {"kind": word, "run": event.run_id}, campaign=campaign.campaign_id, because=f"{word}: {event.because}")
                pen.tell(Message(command=notify.command, body=body))


def _word(event: Event) -> str | None:
    if event.kind == "run_moved" and RunState(event.body["to"]) in NEEDS_YOU:
        return "needs_you"
    if event.kind == "displacement_moved" and event.body["to"] in ("held", "failed"):
        return "needs_you"
    if event.kind == "report_written":
        return "finished"
    if event.kind == "campaign_moved" and event.body["to"] == CampaignStage.FAILED:
        return "failed"
    return None
