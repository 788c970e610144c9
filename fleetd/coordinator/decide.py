"""The coordinator's judgement: a fleet, a sight and a moment in; events and acts out. No clock, no I/O, no dice.

    notices and silence → finished jobs → answered orders → requests → stages of campaigns → placing → orders → messages

Each rule sees what the ones before it concluded, and everything that is not an event is concluded anew at the next tick.
"""

from __future__ import annotations

from datetime import datetime

from fleetd.coordinator.decide_campaigns import advance_campaigns
from fleetd.coordinator.decide_displacement import follow_displaced
from fleetd.coordinator.decide_fence import find_left_behind, finish_fences
from fleetd.coordinator.decide_hosts import find_unstarted, forgotten_hosts, judge_silence, read_polls, shown_hosts
from fleetd.coordinator.decide_jobs import read_job_results
from fleetd.coordinator.decide_messages import write_messages
from fleetd.coordinator.decide_orders import read_order_answers
from fleetd.coordinator.decide_requests import read_requests
from fleetd.coordinator.decide_runs import place_runs, send_orders, send_to_strangers
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Decision, Sight
from fleetd.fleet import Fleet


def decide(fleet: Fleet, sight: Sight, now: datetime) -> Decision:
    """What follows from one tick's news. The events continue `fleet.sequence`; `Decision.fleet` is the fleet after them."""
    assert now.tzinfo is not None, "a moment carries its zone"
    pen = Pen(fleet, sight, now)
    finish_fences(pen)
    read_polls(pen)
    find_unstarted(pen)
    judge_silence(pen)
    find_left_behind(pen)
    read_job_results(pen)
    read_order_answers(pen)
    read_requests(pen)
    advance_campaigns(pen)
    place_runs(pen)
    send_orders(pen)
    send_to_strangers(pen)
    follow_displaced(pen)
    for host in {**forgotten_hosts(sight), **shown_hosts(pen.fleet)}.values():
        pen.need_host(host)
    write_messages(pen)
    decision = pen.decision()
    assert decision.fleet.sequence == fleet.sequence + len(decision.events), "every conclusion is an event"
    return decision
