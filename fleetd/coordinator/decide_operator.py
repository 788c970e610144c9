"""What an operator says of hosts: fence, drain, undrain, clear, takeover. Each is granted as events or refused in three lines. Pure.

    drain     no new run is placed there; what runs goes on          undone by undrain
    fence     it is off for good or for long: see decide_fence       undone by itself, once the host answers and is clean
    clear     somebody looked at a stuck run: its host takes others  void as soon as the run moves
    takeover  this coordinator becomes the owner of a host root      undone by a takeover from the other one
"""

from __future__ import annotations

from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator import decide_fence, decide_found
from fleetd.coordinator.pen import Pen
from fleetd.coordinator.sight import Request
from fleetd.coordinator.targets import find_runs
from fleetd.fleet import Fleet, Run
from fleetd.model import Owner
from fleetd.wire import decode, encode
from policies.errors import NotFound, RequestRefused
from policies.facts import RunState, format_moment

NAMES_LISTED_MAX = 8


def known_hosts(fleet: Fleet) -> dict[str, HostPlan]:
    """Every host that a plan of this history names, the newest plan's word for each."""
    return {host.name: host for campaign in fleet.campaigns.values() for host in campaign.plan.hosts}


def drain(pen: Pen, request: Request) -> None:
    host, actor, because = _host_of(pen, request)
    known = pen.fleet.hosts.get(host)
    if known is not None and known.drained is not None:
        raise RequestRefused(
            f"{host} is drained already", where=f"host {host}", what=f"by {known.drained.actor} since {format_moment(known.drained.at)}",
            fix=f"fleetd undrain {host}   (lets it take new runs again)",
        )
    pen.write("host_drained", host=host, actor=actor, because=because)
    pen.answer(request, {"host": host, "runs": [run.run_id for run in _runs_on(pen, host)]})


def undrain(pen: Pen, request: Request) -> None:
    host, actor, because = _host_of(pen, request)
    known = pen.fleet.hosts.get(host)
    if known is None or known.drained is None:
        raise RequestRefused(f"{host} is not drained", where=f"host {host}", what="it takes new runs as it is", fix="fleetd status")
    pen.write("host_undrained", host=host, actor=actor, because=because)
    pen.answer(request, {"host": host})


def fence(pen: Pen, request: Request) -> None:
    """With `dry_run` in the body, only the answer: what would happen."""
    host, actor, because = _host_of(pen, request)
    known, sight = pen.fleet.hosts.get(host), pen.sight.hosts.get(host)
    if known is not None and known.fenced is not None and decide_found.is_given_up(pen.fleet, pen.sight, host):
        raise RequestRefused(
            f"{host} is fenced already", where=f"host {host}", what=f"by {known.fenced.actor} since {format_moment(known.fenced.at)}",
            fix="fleetd status   (shows where its work goes on)",
        )
    if known is None or known.reachable:
        answered_at = sight.answered_at if sight is not None else None
        age = f"{max(0.0, (pen.now - answered_at).total_seconds()):.0f} s ago" if answered_at is not None else "at an unknown moment"
        raise RequestRefused(
            f"{host} is not fenced: it is not known to be silent", where=f"host {host}", what=f"it last answered {age}",
            fix=f"fleetd drain {host}   (no new runs there), or fleetd stop TARGET; fence it once status says that it does not answer",
        )
    found = decide_fence.fates(pen.fleet, pen.sight, host, pen.now)
    told = [_told(pen, fate) for fate in found]
    if request.body.get("dry_run"):
        pen.answer(request, {"host": host, "silent_since": format_moment(known.since), "runs": told, "dry_run": True})
        return
    body = {
        "runs": [fate.run_id for fate in found], "boot_id": known.boot_id, "silent_since": format_moment(known.since),
        "generation": pen.sight.owner.generation, "may_have": decide_fence.undecided(pen.fleet, pen.sight, host),
    }
    others = {fate.run_id: decide_found.given_up(pen.fleet, pen.sight, pen.run(fate.run_id)) for fate in found}
    pen.write("host_fenced", body, host=host, actor=actor, because=because)
    for run_id, hosts in others.items():
        decide_fence.leave_behind(pen, pen.run(run_id), hosts, actor)
    successors = decide_fence.carry_out(pen, found, actor)
    answered = [{**each, "successor": successors.get(each["run_id"])} for each in told]
    pen.answer(request, {"host": host, "silent_since": format_moment(known.since), "runs": answered, "dry_run": False})


def clear(pen: Pen, request: Request) -> None:
    """TARGET is a host, all of whose stuck runs are meant, or one run."""
    target, actor, because = _said(request)
    if target in known_hosts(pen.fleet):
        named = [run for run in pen.fleet.runs.values() if run.host == target]
    else:
        named = [pen.run(run_id) for run_id in find_runs(pen.fleet, target)]
    stuck = [run for run in named if run.state is RunState.STUCK]
    waiting = [run for run in stuck if run.cleared is None]
    if not waiting:
        cleared = "; ".join(f"{run.candidate}: by {run.cleared.actor}" for run in stuck if run.cleared is not None)
        what = f"cleared already: {cleared}" if cleared else "no run of it is stuck"
        raise RequestRefused("nothing to clear", where=target, what=what, fix="fleetd status   (shows which runs are stuck, and where)")
    for run in waiting:
        pen.write("run_cleared", {"pid": _pid(pen, run)}, run=run.run_id, host=run.host, actor=actor, because=because)
    pen.answer(request, {"runs": [run.run_id for run in waiting], "hosts": sorted({str(run.host) for run in waiting})})


def takeover(pen: Pen, request: Request) -> None:
    """The intent, before the host is told. `found`: who owns the root now, as its agent just said; None for nobody."""
    plan, actor, because = decode(HostPlan, request.body["host"]), str(request.body.get("actor") or "user"), _because(request)
    found = decode(Owner, request.body["found"]) if request.body.get("found") else None
    ours = pen.sight.owner
    if found is not None and (found == ours or (found.coordinator_id == ours.coordinator_id and found.generation < ours.generation)):
        raise RequestRefused(
            f"{plan.name} is ours already", where=f"{plan.name}:{plan.root}",
            what=f"it obeys {found.coordinator_id}, generation {found.generation}", fix="nothing: launch, or fleetd status",
        )
    body = {"root": plan.root, "from": encode(found) if found else None, "to": encode(ours), "runs": request.body.get("runs") or []}
    pen.write("host_takeover_ordered", body, host=plan.name, actor=actor, because=because)
    pen.answer(request, {"host": plan.name})


def took_over(pen: Pen, request: Request) -> None:
    body = {name: request.body.get(name) for name in ("root", "from", "to", "runs")}
    pen.write("host_taken_over", body, host=str(request.body["host"]), actor=str(request.body.get("actor") or "user"), because=_because(request))
    pen.answer(request, {"host": request.body["host"]})


def _said(request: Request) -> tuple[str, str, str]:
    return str(request.body.get("target") or ""), str(request.body.get("actor") or "user"), _because(request)


def _because(request: Request) -> str:
    return str(request.body.get("because") or "")


def _host_of(pen: Pen, request: Request) -> tuple[str, str, str]:
    target, actor, because = _said(request)
    known = known_hosts(pen.fleet)
    if target not in known:
        listed = ", ".join([*known][:NAMES_LISTED_MAX]) or "none: nothing was launched here yet"
        raise NotFound(f"there is no host {target!r}", where="hosts of all plans launched here", what=f"known are {listed}", fix="fleetd status")
    return target, actor, because


def _runs_on(pen: Pen, host: str) -> list[Run]:
    still = (RunState.STAGING, RunState.STARTING, RunState.RUNNING, RunState.STOPPING, RunState.BACKOFF, RunState.LOST, RunState.HELD, RunState.STUCK)
    return [run for run in pen.fleet.runs.values() if run.host == host and run.state in still]


def _pid(pen: Pen, run: Run) -> int | None:
    look = pen.sight.observations.get(run.run_id)
    return look.pid if look is not None else None


def _told(pen: Pen, fate: decide_fence.Fate) -> dict[str, Any]:
    run = pen.run(fate.run_id)
    return {
        "run_id": run.run_id, "campaign_id": run.campaign_id, "candidate": run.candidate, "state": run.state.value, "becomes": fate.to.value,
        "goes_on": fate.goes_on, "from_step": fate.begins.step if fate.begins is not None else None, "hosts": list(fate.hosts),
        "because": fate.because, "successor": None,
    }
