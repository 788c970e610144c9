"""Taking over a host root that obeys another coordinator, or a later life of this one. Asked for by a person, never by itself.

    look       who owns the root now, and which runs are at work there
    decide     the loop grants or refuses, and writes the intent down
    act        another owner: its agent changes the owner, if it still is the one that was seen
               a later life of ours: our generation is raised above it; the next start of this coordinator goes by that
    tell       history says that it is done
"""

from __future__ import annotations

from typing import Any

from fleetd.campaign import HostPlan
from fleetd.coordinator.decide_operator import known_hosts
from fleetd.coordinator.loop import Loop
from fleetd.files import read_record, write_record
from fleetd.model import Owner
from fleetd.paths import StatePaths
from fleetd.wire import WireError, decode, encode
from policies.errors import ExplainedError, NotFound, RequestRefused, from_json

CALL_SECONDS_MAX = 20.0
WISH_SECONDS_MAX = 25.0
NAMES_LISTED_MAX = 8


def take_over(loop: Loop, paths: StatePaths, body: dict[str, Any]) -> dict[str, Any]:
    """What was found there, and whether it was taken over. With `dry_run` in the body only the former."""
    plan, actor = _host(loop, body), str(body.get("actor") or "user")
    session = loop.open_session(plan)
    try:
        seen = session.call("owner", {}, CALL_SECONDS_MAX)
        found = decode(Owner, seen["owner"], "owner") if seen.get("owner") else None
        ours = loop.owner
        is_ours = found is not None and found.coordinator_id == ours.coordinator_id
        answer = {
            "host": plan.name, "root": plan.root, "owner": encode(found) if found else None, "ours": encode(ours), "runs": seen.get("runs") or [],
            "is_ours": is_ours, "taken_over": False, "restart_needed": False,
        }
        if body.get("dry_run"):
            return answer
        asked = {"host": encode(plan), "found": answer["owner"], "runs": answer["runs"], "actor": actor, "because": str(body.get("because") or "")}
        _ask(loop, "takeover", asked)
        if is_ours and found is not None:
            raise_generation(paths, found)
        else:
            session.call("takeover", {"from": answer["owner"], "actor": actor}, CALL_SECONDS_MAX)
        done = {"host": plan.name, "root": plan.root, "from": answer["owner"], "to": encode(ours), "runs": answer["runs"], "actor": actor}
        _ask(loop, "took_over", {**done, "because": asked["because"]})
        return {**answer, "taken_over": True, "restart_needed": is_ours}
    finally:
        session.close()


def raise_generation(paths: StatePaths, found: Owner) -> None:
    """Let the next life of this coordinator count on from the latest one that its hosts have seen."""
    body: dict[str, Any] = read_record(paths.identity)
    write_record(paths.identity, {**body, "generation": max(int(body["generation"]), found.generation)})


def _host(loop: Loop, body: dict[str, Any]) -> HostPlan:
    if body.get("host"):
        try:
            return decode(HostPlan, body["host"], "host")
        except WireError as fault:
            raise RequestRefused("the host can't be understood", where="host", what=str(fault), fix="fleetd check PLAN") from fault
    name, fleet = str(body.get("target") or ""), loop.published.fleet if loop.published is not None else None
    known = known_hosts(fleet) if fleet is not None else {}
    if name not in known:
        listed = ", ".join([*known][:NAMES_LISTED_MAX]) or "none"
        what = f"hosts of plans that were launched here: {listed}"
        raise NotFound(f"there is no host {name!r}", where="fleetd takeover", what=what, fix=f"fleetd takeover {name or 'HOST'} --plan PLAN")
    return known[name]


def _ask(loop: Loop, kind: str, body: dict[str, Any]) -> None:
    reply = loop.inbox.ask(kind, body, WISH_SECONDS_MAX)
    if reply.error is not None:
        error: ExplainedError = from_json(reply.error)
        raise error
