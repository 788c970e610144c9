"""A small real server on a real unix socket that answers as docs/ARCHITECTURE.md says, from a folder that a test may change meanwhile.

    python fake_coordinator.py STATE_DIR     serves STATE_DIR/api.sock; documents come from STATE_DIR/canned.json

canned.json: {"status": [document, ...] (one an ask, the last stays), "events": [...], "logs": {"RUN/STREAM/ATTEMPT": text}, "answers": {"/v1/stop": body or error}}
Every POST is appended to STATE_DIR/asked.jsonl.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

ROOT = Path(sys.argv[1])


def canned() -> dict[str, Any]:
    body: dict[str, Any] = json.loads((ROOT / "canned.json").read_text(encoding="utf-8"))
    return body


def not_found(what: str) -> JSONResponse:
    return JSONResponse({"error": "NotFound", "title": "there is no such thing", "where": "the fake", "what": what, "fix": "fleetd status"}, 404)


class Answers:
    """Counts the looks, so that a list of documents is a story."""

    looks = 0

    async def status(self, _: Request) -> Response:
        story = canned()["status"]
        if story == "nonsense":
            return PlainTextResponse("out of order", 500)
        document = story[min(self.looks, len(story) - 1)]
        self.looks += 1
        return JSONResponse(document)

    async def events(self, request: Request) -> Response:
        query = request.query_params
        found = [event for event in canned().get("events", []) if event["sequence"] > int(query.get("after", 0))]
        for key, field in (("campaign", "campaign_id"), ("run", "run_id")):
            found = [event for event in found if key not in query or event.get(field) == query[key]]
        return JSONResponse({"events": found[: int(query.get("limit", 500))]})

    async def logs(self, request: Request) -> Response:
        query = request.query_params
        key = f"{query['run']}/{query['stream']}/{query.get('attempt', 1)}"
        text = canned().get("logs", {}).get(key)
        if text is None:
            return not_found(key)
        data, offset = text.encode(), int(query["offset"])
        start = max(0, len(data) + offset) if offset < 0 else min(offset, len(data))
        piece = data[start : start + int(query["bytes_max"])]
        return JSONResponse({"data": piece.decode(errors="replace"), "next": start + len(piece), "size": len(data)})

    async def post(self, request: Request) -> Response:
        with open(ROOT / "asked.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"path": request.url.path, **await request.json()}) + "\n")
        body = canned().get("answers", {}).get(request.url.path, {})
        return JSONResponse(body, 409 if "error" in body else 200)


def main() -> None:
    answers = Answers()
    routes = [Route("/v1/status", answers.status), Route("/v1/events", answers.events), Route("/v1/logs", answers.logs)]
    routes += [Route(f"/v1/{verb}", answers.post, methods=["POST"]) for verb in ("launch", "stop", "resume", "open", "report")]
    uvicorn.run(Starlette(routes=routes), uds=str(ROOT / "api.sock"), log_level="error", lifespan="off")


if __name__ == "__main__":
    main()
