"""Whether an order that was answered is in force on its host. Pure.

A host keeps the order with the highest sequence. It answers a lower one too, and says what holds instead: that happens when this
coordinator's history was lost in part, so that it counts from an older number than its earlier life had reached.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from fleetd.coordinator.sight import OrderDone
from fleetd.model import WantOrder
from fleetd.wire import WireError, decode
from policies.facts import parse_moment
from policies.workloads import DisplacedState


def is_in_force(done: OrderDone) -> bool:
    """Whether the host obeys this order now. Its answer alone does not say so: a wish that another one outranks was not applied."""
    if done.error is not None:
        return False
    if done.order.order in ("displace", "restore"):
        return _is_moved(done)
    if done.order.order != "want" or done.answer.get("applied") is True:
        return True  # a cutoff is refused only where an earlier or equal one holds
    held = want_in_force(done.answer)
    sent = done.order.body["want"]
    if held is not None:
        return held == decode(WantOrder, sent)
    return bool(done.answer.get("sequence") == sent["sequence"])


def _is_moved(done: OrderDone) -> bool:
    """Whether there is no more to do: until then the same order is the next step. A mere look is never done."""
    state = (done.answer.get("progress") or {}).get("state")
    if done.order.order == "displace":
        return bool(state == DisplacedState.DISPLACED)
    return bool(done.order.body["displacement"]["asking"] > 0 and state in (DisplacedState.RESTORED, DisplacedState.FAILED))


def want_in_force(answer: dict[str, Any]) -> WantOrder | None:
    """The whole wish that the host obeys, as far as it said so."""
    try:
        return decode(WantOrder, answer["want"], "want")
    except (KeyError, WireError):
        return None


def cutoff_in_force(answer: dict[str, Any]) -> datetime | None:
    try:
        return parse_moment(answer["cutoff_at"])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
