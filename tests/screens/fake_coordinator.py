"""A small real server on a real unix socket that answers as docs/ARCHITECTURE.md says, from what a test puts into it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

Body = dict[str, Any]
WAIT_SECONDS_MAX = 90.0
VERBS = ("launch", "stop", "resume", "open", "report", "fence", "drain", "undrain", "clear", "takeover")


class FakeCoordinator:
    """Serves `root/api.sock` from a thread. `status` is a document, or a list of them: one a look, the last one stays."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.status: Body | list[Body] | str = {}
        self.hold = threading.Event()
        """While it is not set, asking for the status gets no answer."""
        self.hold.set()
        self.events: list[Body] = []
        self.logs: dict[str, str] = {}
        self.answers: dict[str, Body] = {}
        self.asked: list[Body] = []
        self.looks = 0
        """How often the status was answered; `arrived` counts those that still wait, too."""
        self.arrived = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> FakeCoordinator:
        routes = [Route("/v1/status", self._status), Route("/v1/events", self._events), Route("/v1/logs", self._logs)]
        routes += [Route(f"/v1/{verb}", self._post, methods=["POST"]) for verb in VERBS]
        config = uvicorn.Config(
            Starlette(routes=routes), uds=str(self.root / "api.sock"), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + WAIT_SECONDS_MAX
        while not self._server.started and time.monotonic() < end:
            time.sleep(0.01)
        assert self._server.started
        return self

    def stop(self) -> None:
        self.hold.set()
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            self._thread.join(WAIT_SECONDS_MAX)
            assert not self._thread.is_alive(), "it would take the socket of the next one away"
            self._server = None

    def wait_for_looks(self, count: int) -> None:
        """Return when somebody has asked for the status so often."""
        end = time.monotonic() + WAIT_SECONDS_MAX
        while self.looks < count and time.monotonic() < end:
            time.sleep(0.02)
        assert self.looks >= count, f"{self.looks} looks within {WAIT_SECONDS_MAX:.0f} s"

    async def _status(self, _: Request) -> Response:
        self.arrived += 1
        while not self.hold.is_set():
            await asyncio.sleep(0.02)
        if isinstance(self.status, str):
            return PlainTextResponse(self.status, 500)
        document = self.status[min(self.looks, len(self.status) - 1)] if isinstance(self.status, list) else self.status
        self.looks += 1
        return JSONResponse(document)

    async def _events(self, request: Request) -> Response:
        query = request.query_params
        found = [event for event in self.events if event["sequence"] > int(query.get("after", 0))]
        for key, field in (("campaign", "campaign_id"), ("run", "run_id")):
            found = [event for event in found if key not in query or event.get(field) == query[key]]
        return JSONResponse({"events": found[: int(query.get("limit", 500))]})

    async def _logs(self, request: Request) -> Response:
        query = request.query_params
        key = f"{query['run']}/{query['stream']}/{query.get('attempt', 1)}"
        if key not in self.logs:
            error = {"error": "NotFound", "title": "there is no such log", "where": key, "what": "nothing was written", "fix": "fleetd status"}
            return JSONResponse(error, 404)
        data, offset = self.logs[key].encode(), int(query["offset"])
        start = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
        piece = data[start : start + int(query["bytes_max"])]
        return JSONResponse({"data": piece.decode(errors="replace"), "next": start + len(piece), "size": len(data)})

    async def _post(self, request: Request) -> Response:
        self.asked.append({"path": request.url.path, **await request.json()})
        body = self.answers.get(request.url.path, {})
        return JSONResponse(body, 409 if "error" in body else 200)
