"""The API on the unix socket: readers are answered from the last published tick, wishes go through the inbox and wait for the loop.

A status is answered at once whatever a host or a disk does; its ages grow when the loop is late. Errors are 4xx with the three lines.
"""

from __future__ import annotations

import codecs
import grp
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fleetd import clock, logs
from fleetd.bounded import data_at
from fleetd.campaign import HostPlan, Plan
from fleetd.coordinator import document
from fleetd.coordinator.check import check_hosts
from fleetd.coordinator.deliveries import Deliveries
from fleetd.coordinator.jobs import WriteReport
from fleetd.coordinator.loop import Loop, Published
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.specs import host_plan
from fleetd.coordinator.takeover import take_over
from fleetd.coordinator.targets import find_campaign, find_runs
from fleetd.journal import Journal
from fleetd.paths import HostPaths, RunPaths
from fleetd.wire import LINE_BYTES_MAX, WireError, decode, encode, loads
from policies.errors import ExplainedError, FreezeRefused, HostUnreachable, NotFound, PlanInvalid, RequestRefused

FIRST_TICK_SECONDS_MAX = 25.0
WISH_SECONDS_MAX = 25.0
LAUNCH_SECONDS_MAX = 590.0
"""Registration reads all data once before a launch is answered."""
EVENTS_MAX = 5000
EVENTS_PAGE = 1000
LOG_BYTES_MAX = 4 * 1024 * 1024
HOLE_BYTES_MIN = 4096
"""No log holds so many zeros in a row but where its middle was dropped."""
SOCKET_PATH_BYTES_MAX = 100
"""sun_path of unix(7) holds 108 bytes; longer paths are bound through a descriptor of their folder."""
_HOLE = re.compile(rb"\0{%d,}" % HOLE_BYTES_MIN)
BACKLOG = 64
CLOSE_SECONDS_MAX = 3.0

WISHES = ("launch", "stop", "resume", "open", "drain", "undrain", "fence", "clear", "restore")
"""What goes straight to the loop, which answers."""

_STATUS = {NotFound: 404, FreezeRefused: 409, PlanInvalid: 400, RequestRefused: 422, HostUnreachable: 424}


class Api:
    """The server thread. `daemon` says who answers; `write_report` writes a campaign's report now."""

    def __init__(
        self, loop: Loop, journal: Journal, daemon: document.Daemon, write_report: WriteReport, deliveries: Deliveries, *,
        releases: Releases, socket_group: str | None = None,
    ) -> None:
        self._releases = releases
        self._loop, self._journal, self._daemon, self._write_report, self._deliveries = loop, journal, daemon, write_report, deliveries
        self._socket = bind(daemon.paths.socket, socket_group)
        config = uvicorn.Config(self.app(), log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="api", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(CLOSE_SECONDS_MAX)
        self._socket.close()
        self._daemon.paths.socket.unlink(missing_ok=True)

    def app(self) -> Starlette:
        return Starlette(routes=[
            Route("/v1/status", _guarded(self._status)), Route("/v1/events", _guarded(self._events)), Route("/v1/logs", _guarded(self._logs)),
            *(Route(f"/v1/{kind}", _guarded(self._wish), methods=["POST"]) for kind in WISHES),
            Route("/v1/shutdown", _guarded(self._shutdown), methods=["POST"]),
            Route("/v1/takeover", _guarded(self._takeover), methods=["POST"]),
            Route("/v1/check", _guarded(self._check), methods=["POST"]),
            Route("/v1/report", _guarded(self._report), methods=["POST"]),
        ])

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception:  # the loop and its hosts go on without readers; daemon.log says why nobody answers
            logs.logger.exception("event=api_ended")

    def _seen(self) -> Published:
        deadline = time.monotonic() + FIRST_TICK_SECONDS_MAX
        while self._loop.published is None:
            if time.monotonic() > deadline:
                where = str(self._daemon.paths.root)
                raise RequestRefused("the coordinator is still starting", where=where, what="no tick is finished yet", fix="ask again")
            time.sleep(0.02)
        return self._loop.published

    def _status(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        return build_status(self._seen(), self._daemon, self._deliveries)

    def _events(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        asked = request.query_params
        after, limit = _whole(asked.get("after"), 0), min(max(_whole(asked.get("limit"), EVENTS_PAGE), 1), EVENTS_MAX)
        fleet = self._seen().fleet
        campaign = find_campaign(fleet, asked["campaign"]) if asked.get("campaign") else None
        runs = set(find_runs(fleet, asked["run"])) if asked.get("run") else None
        found: list[dict[str, Any]] = []
        while len(found) < limit and (entries := self._journal.entries(after=after, limit=EVENTS_PAGE)):
            after = entries[-1]["sequence"]
            found += [
                entry for entry in entries
                if (campaign is None or entry["campaign_id"] == campaign.campaign_id) and (runs is None or entry["run_id"] in runs)
            ]
        return {"events": found[:limit]}

    def _logs(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        asked, fleet = request.query_params, self._seen().fleet
        runs = find_runs(fleet, asked.get("run") or "")
        if len(runs) != 1:
            names = ", ".join(fleet.runs[run_id].candidate for run_id in runs)
            raise NotFound("one run is needed", where=asked.get("run") or "run", what=f"it names {len(runs)}: {names}", fix="name one of them")
        run = fleet.runs[runs[0]]
        if run.host is None:
            raise NotFound(f"{run.candidate} has no logs yet", where=run.run_id, what=f"it is {run.state}: {run.detail}", fix="fleetd status")
        place, attempt = RunPaths(Path()), _whole(asked.get("attempt"), max(run.attempt, 1))
        paths = {"stdout": place.attempt(attempt).stdout, "log": place.log, "supervisor": place.supervisor_log}
        stream = asked.get("stream") or "stdout"
        if stream not in paths:
            known = f"the streams are {', '.join(paths)}"
            raise NotFound(f"there is no stream {stream!r}", where=run.run_id, what=known, fix="use one of them")
        offset, limit = _whole(asked.get("offset"), 0), min(_whole(asked.get("bytes_max"), LOG_BYTES_MAX), LOG_BYTES_MAX)
        plan = host_plan(fleet.campaigns[run.campaign_id], run.host)
        copy = self._daemon.paths.campaign(run.campaign_id).store_run(run.run_id) / paths[stream]
        if plan.is_local:
            folder = HostPaths(Path(plan.root)).run(run.run_id).root
            path = next((each for each in (folder / paths[stream], copy) if each.is_file()), None)
            if path is not None:
                return read_text(path, offset, limit)
        elif (found := self._read_there(plan, run.run_id, str(paths[stream]), offset, limit)) is not None:
            return found
        elif copy.is_file():
            return read_text(copy, offset, limit)
        what, fix = f"{paths[stream]} does not exist on {run.host}, and there is no copy", "wait until it has started, or name another attempt"
        raise NotFound(f"{run.candidate} has no {stream} log", where=f"{plan.place}/runs/{run.run_id}", what=what, fix=fix)

    def _read_there(self, plan: HostPlan, run_id: str, path: str, offset: int, bytes_max: int) -> dict[str, Any] | None:
        """Text from a host that is reached over SSH; None when it has no such file. HostUnreachable when it can't be asked and there is no copy."""
        session = self._loop.session(plan.name)
        if session is None:
            return None
        try:
            data, start, size = session.courier.read_part(run_id, path, offset, max(bytes_max, 4))
        except NotFound:
            return None
        return as_text(data, start, size)

    def _wish(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        kind = request.url.path.rsplit("/", 1)[1]
        reply = self._loop.inbox.ask(kind, body, LAUNCH_SECONDS_MAX if kind == "launch" else WISH_SECONDS_MAX)
        if reply.error is not None:
            raise _Refused(reply.error, reply.exit_code)
        return reply.body

    def _shutdown(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        self._loop.stop()
        return {"pid": self._daemon.pid}

    def _takeover(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        self._seen()
        return take_over(self._loop, self._daemon.paths, body)

    def _check(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        """A look at the hosts of a plan, in this thread; nothing of it is history."""
        try:
            plan = decode(Plan, body.get("plan"))
        except WireError as fault:
            raise RequestRefused("the plan can't be checked", where="plan", what=str(fault), fix="use the same release here") from fault
        found: dict[str, Any] = encode(
            check_hosts(plan, own_python=sys.executable, releases=self._releases, coordinator_id=self._daemon.id),
        )
        return found

    def _report(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        campaign = find_campaign(self._seen().fleet, str(body.get("campaign") or ""))
        assert campaign is not None
        html, data = self._write_report(campaign.campaign_id)
        return {"html": str(html), "json": str(data)}


def build_status(seen: Published, daemon: document.Daemon, deliveries: Deliveries | None = None) -> dict[str, Any]:
    """The status document of a published tick, as old as it is now; deliveries as they stand at this moment."""
    elapsed = timedelta(seconds=clock.boottime_seconds() - seen.boottime_seconds)
    return document.build(
        seen.fleet, seen.sight, daemon, now=seen.at + elapsed, journal_health=seen.journal_health, clock_alarm=seen.clock_alarm,
        deliveries=deliveries.shown() if deliveries is not None else {},
    )


class _Refused(Exception):
    """An error that the loop has already put into its three lines."""

    def __init__(self, error: dict[str, str], exit_code: int) -> None:
        super().__init__(error["title"])
        self.error, self.status = error, next((status for kind, status in _STATUS.items() if kind.__name__ == error["error"]), 422)


def _guarded(handler: Callable[[Request, dict[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
    """A handler on a thread of the pool, with every fault as an explained answer."""

    async def endpoint(request: Request) -> JSONResponse:
        try:
            body = _object(await request.body()) if request.method == "POST" else {}
            return JSONResponse(await run_in_threadpool(handler, request, body))
        except _Refused as refused:
            return JSONResponse(refused.error, status_code=refused.status)
        except ExplainedError as error:
            status = next((status for kind, status in _STATUS.items() if type(error) is kind), 422)
            return JSONResponse(error.to_json(), status_code=status)
        except Exception as fault:  # our mistake in one answer must not look like a dead coordinator
            path = request.url.path
            logs.logger.exception("event=api_fault path=%s", path)
            broken = ExplainedError("the coordinator broke down over this request", where=path, what=repr(fault), fix="report this with daemon.log")
            return JSONResponse(broken.to_json(), status_code=500)

    return endpoint


def _object(data: bytes) -> dict[str, Any]:
    if len(data) > LINE_BYTES_MAX:
        raise RequestRefused("the request is too long", where="body", what=f"{len(data)} bytes, {LINE_BYTES_MAX} are possible", fix="send less")
    try:
        found = loads(data) if data else {}
    except WireError as fault:
        raise RequestRefused("the request can't be read", where="body", what=str(fault), fix="send one JSON object") from fault
    if not isinstance(found, dict):
        raise RequestRefused("the request can't be read", where="body", what="it is no JSON object", fix="send one JSON object")
    return found


def _whole(text: str | None, default: int) -> int:
    try:
        return int(text) if text else default
    except ValueError as fault:
        raise RequestRefused("a number is needed", where="query", what=f"{text!r} is none", fix="give a whole number") from fault


def read_text(path: Path, offset: int, bytes_max: int) -> dict[str, Any]:
    """Text from `offset` (negative: from the end), never ending within a character that is still being written.

    What was dropped to keep the file within its bound is stepped over, in words; a file that was cut short is read from its beginning.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        asked = max(0, size + offset) if offset < 0 else offset if offset <= size else 0
        start, end = data_at(file.fileno(), asked, size)
        file.seek(start)
        data = file.read(min(max(bytes_max, 4), end - start))
    found = as_text(data, start, size)
    if start + len(data) == end < size:
        found["next"] = end  # what a hole has cut never gets its rest
    return found if start == asked else {**found, "data": _gap(start - asked) + found["data"]}


def as_text(data: bytes, start: int, size: int) -> dict[str, Any]:
    """Bytes of a log that were read from `start` on. A hole that came over a wire as zeros is put into words here."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = decoder.decode(_HOLE.sub(lambda hole: _gap(len(hole[0])).encode(), data))
    waiting = len(decoder.getstate()[0])
    return {"data": text, "next": start + len(data) - waiting, "size": size}


def _gap(bytes_dropped: int) -> str:
    return f"\n[{bytes_dropped} bytes were dropped here: this file has reached its bound]\n"


def bind(path: Path, group: str | None = None) -> socket.socket:
    """A listening unix socket at `path` that only this user may use, and `group` where one is named. Called while the state directory's
    lock is held. A group is one that this user belongs to: nobody else's socket can be given away."""
    path.unlink(missing_ok=True)
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    before = os.umask(0o177)
    try:
        is_long = len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX
        found.bind(f"/proc/self/fd/{folder}/{path.name}" if is_long else str(path))
    finally:
        os.umask(before)
        os.close(folder)
    if group is not None:
        _give_to_group(path, group)
    os.chmod(path, 0o600 if group is None else 0o660)
    found.listen(BACKLOG)
    return found


def _give_to_group(path: Path, group: str) -> None:
    try:
        number = grp.getgrnam(group).gr_gid
        if os.stat(path).st_gid != number:  # as a service it is our own group, and we may give nothing to anybody
            os.chown(path, -1, number)
    except (KeyError, OSError) as fault:
        what = "there is no such group" if isinstance(fault, KeyError) else f"{fault.strerror}; the coordinator's user must belong to it"
        fix = f"getent group {group}; or leave --socket-group out"
        raise ExplainedError(f"the socket can't be given to group {group}", where=str(path), what=what, fix=fix) from fault
