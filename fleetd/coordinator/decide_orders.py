"""What hosts answered to orders: refused, in trouble, or outranked by an order of which this history knows nothing.

A restored or salvaged journal makes the coordinator count orders from an older number. The host says which order holds, and history
goes on from there: the later of the two wishes, under a number that the host will take.
"""

from __future__ import annotations

from dataclasses import replace

from fleetd.coordinator.decide_displacement import take_displacement_answer
from fleetd.coordinator.delivery import cutoff_in_force, is_in_force, want_in_force
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import OrderDone
from fleetd.coordinator.specs import wish
from fleetd.fleet import Run
from fleetd.model import WantOrder
from fleetd.wire import encode
from policies.facts import Reason, RunKind, RunState, StopMode, Want, format_moment

REFUSALS = frozenset({"RequestRefused", "PlanInvalid", "DataDamaged", "ResumeMismatch", "NotFound"})
"""A host that refuses a start with one of these has not started anything and will say the same again."""


def read_order_answers(pen: Pen) -> None:
    """A refused start ends the run with the host's own words; every other fault is tried again."""
    for done in pen.sight.orders_done:
        if done.error is None:
            _take_answer(pen, done)
            continue
        if done.order.order != "start" or done.error.get("error") not in REFUSALS:
            _note_trouble(pen, done)
            continue
        run_id = done.order.run_id
        text = f"{done.error['title']}: {done.error['what']}"
        if pen.run(run_id).state in (RunState.STARTING, RunState.LOST):
            pen.write("order_refused", dict(done.error), run=run_id, host=done.order.host, actor=f"host:{done.order.host}", because=text)
            pen.move_run(run_id, RunState.FAILED, text, reason=Reason.PREFLIGHT, actor=f"host:{done.order.host}")


def _note_trouble(pen: Pen, done: OrderDone) -> None:
    """Journal the first failure of an order; repeats with the same words stay out of history."""
    if done.error is None or done.error.get("error") == "HostUnreachable":
        return
    earlier = pen.sight.order_troubles.get(done.order.key)
    if earlier is None or earlier.count <= 1:
        text = f"{done.error['title']}: {done.error['what']}"
        run_id = done.order.run_id or None
        pen.write("order_refused", dict(done.error), run=run_id, host=done.order.host, actor=f"host:{done.order.host}", because=text)


def _take_answer(pen: Pen, done: OrderDone) -> None:
    if done.order.order in ("displace", "restore"):
        take_displacement_answer(pen, done)
        return
    run = pen.fleet.runs.get(done.order.run_id)
    if run is None:
        return
    if done.order.order == "want" and not is_in_force(done):
        _want_again(pen, run, done)
    elif done.order.order == "cutoff":
        _take_earlier_cutoff(pen, run, done)


def catch_up_with_wish(pen: Pen, run: Run, held: WantOrder) -> None:
    """A host tells which order it obeys. One with a higher number than history knows was given in a part of history that is lost; nobody
    would ask about it before the next order, which may never come."""
    wanted = wish(run, pen.campaign(run.campaign_id))
    if held.sequence > wanted.sequence:
        _outranked(pen, run, wanted, held, held.sequence)


def _want_again(pen: Pen, run: Run, done: OrderDone) -> None:
    wanted, sequence = wish(run, pen.campaign(run.campaign_id)), done.answer.get("sequence")
    if isinstance(sequence, int) and wanted.sequence <= sequence:  # else a newer order is on its way already
        _outranked(pen, run, wanted, want_in_force(done.answer), sequence)


def _outranked(pen: Pen, run: Run, wanted: WantOrder, held: WantOrder | None, sequence: int) -> None:
    """The host obeys another order. The later wish holds: ours again under the next number, or the host's, which history had lost."""
    if held == wanted:
        return  # its report has told that already
    if held is not None and held.at > wanted.at:
        because = f"{want_words(held)}: order {held.sequence} of {held.actor} holds on {run.host}; history had lost it"
        pen.write("want_changed", {"want": encode(held)}, run=run.run_id, host=run.host, actor=f"host:{run.host}", because=because)
        return
    again = replace(wanted, sequence=sequence + 1)
    because = f"{want_words(again)}: {run.host} had obeyed order {sequence}, of which history had lost a part; this is order {again.sequence}"
    pen.write("want_changed", {"want": encode(again)}, run=run.run_id, host=run.host, actor=again.actor, because=because)


def want_words(order: WantOrder) -> str:
    mode = StopMode(order.mode)
    return f"{order.want} {mode}" if order.want is Want.STOP else order.want.value


def _take_earlier_cutoff(pen: Pen, run: Run, done: OrderDone) -> None:
    """A host that holds an earlier cutoff than ours was given it by a part of history that is lost. A cutoff never moves later."""
    held_at = cutoff_in_force(done.answer)
    if run.kind is RunKind.TRAIN and held_at is not None and held_at < pen.campaign(run.campaign_id).cutoff_at:
        because = f"{run.host} holds this earlier cutoff for {run.candidate}; history had lost it"
        body = {"cutoff_at": format_moment(held_at)}
        pen.write("cutoff_moved", body, campaign=run.campaign_id, host=run.host, actor=f"host:{run.host}", because=because)
