"""The command's side of the unix socket: one method a call, errors as the coordinator explained them.

Nothing here starts a coordinator or retries: a command says at once that nobody answers, and where it looked.
"""

from __future__ import annotations

import grp
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from fleetd.paths import SYSTEM_STATE, StatePaths
from policies.errors import ExplainedError, HostUnreachable, from_json

CONNECT_SECONDS_MAX = 3.0
ANSWER_SECONDS_MAX = 30.0
LAUNCH_SECONDS_MAX = 600.0
"""Launching looks at data and hosts before it answers."""
REPORT_SECONDS_MAX = 300.0
WISH_SECONDS_MAX = 120.0
"""A takeover brings the release to the host first."""
LOG_CHUNK_BYTES = 256 * 1024
EVENTS_PAGE = 500
SOCKET_PATH_BYTES_MAX = 100
"""sun_path of unix(7) holds 108 bytes; longer paths are reached through a descriptor of their folder."""


class CoordinatorAway(HostUnreachable):
    """Nobody answers on the socket of this state directory."""


class Client:
    """A connection to the coordinator of one state directory. Used as a context; safe to keep over many calls and coordinator restarts."""

    def __init__(self, paths: StatePaths, *, answer_seconds: float = ANSWER_SECONDS_MAX) -> None:
        self.paths = paths
        self._folder: int | None = None
        timeout = httpx.Timeout(answer_seconds, connect=CONNECT_SECONDS_MAX)
        transport = httpx.HTTPTransport(uds=self._socket_path(), retries=0)
        self._http = httpx.Client(transport=transport, base_url="http://fleetd", timeout=timeout, trust_env=False)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None

    def status(self) -> dict[str, Any]:
        return self._call("GET", "/v1/status")

    def events(self, *, after: int = 0, campaign: str | None = None, run: str | None = None, limit: int = EVENTS_PAGE) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", "/v1/events", {"after": after, "campaign": campaign, "run": run, "limit": limit})["events"]
        return found

    def all_events(self, *, campaign: str | None = None, run: str | None = None, after: int = 0) -> Iterator[dict[str, Any]]:
        """Every event after `after`, page by page; ends when there are no more now."""
        while page := self.events(after=after, campaign=campaign, run=run):
            yield from page
            after = int(page[-1]["sequence"])

    def logs(self, run: str, *, stream: str, attempt: int | None, offset: int, bytes_max: int = LOG_CHUNK_BYTES) -> dict[str, Any]:
        return self._call("GET", "/v1/logs", {"run": run, "stream": stream, "attempt": attempt, "offset": offset, "bytes_max": bytes_max})

    def check(self, plan: Any) -> dict[str, Any]:
        """What the hosts of a plan show of themselves now, and what is to be said of it."""
        return self._call("POST", "/v1/check", body={"plan": plan}, seconds=LAUNCH_SECONDS_MAX)

    def launch(self, plan: Any, plan_text: str, actor: str) -> dict[str, Any]:
        return self._call("POST", "/v1/launch", body={"plan": plan, "plan_text": plan_text, "actor": actor}, seconds=LAUNCH_SECONDS_MAX)

    def stop(self, target: str, mode: str, actor: str) -> dict[str, Any]:
        return self._call("POST", "/v1/stop", body={"target": target, "mode": mode, "actor": actor})

    def resume(self, target: str, actor: str) -> dict[str, Any]:
        return self._call("POST", "/v1/resume", body={"target": target, "actor": actor})

    def open_split(self, campaign: str, split: str, actor: str, because: str) -> dict[str, Any]:
        return self._call("POST", "/v1/open", body={"campaign": campaign, "split": split, "actor": actor, "because": because})

    def wish(self, verb: str, target: str, actor: str, because: str = "", **more: Any) -> dict[str, Any]:
        """What an operator says of a host or run: `drain`, `undrain`, `fence`, `clear`, `takeover`."""
        body = {"target": target, "actor": actor, "because": because, **more}
        return self._call("POST", f"/v1/{verb}", body=body, seconds=WISH_SECONDS_MAX)

    def report(self, campaign: str) -> dict[str, Any]:
        return self._call("POST", "/v1/report", body={"campaign": campaign}, seconds=REPORT_SECONDS_MAX)

    def _call(
        self, method: str, path: str, query: dict[str, Any] | None = None, *, body: dict[str, Any] | None = None, seconds: float | None = None,
    ) -> dict[str, Any]:
        asked = {key: value for key, value in (query or {}).items() if value is not None}
        timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS_MAX) if seconds else httpx.USE_CLIENT_DEFAULT
        try:
            answer = self._http.request(method, path, params=asked or None, json=body, timeout=timeout)
        except httpx.TimeoutException as fault:
            raise self._silent(fault) from fault
        except (httpx.TransportError, OSError) as fault:
            raise self._away(fault) from fault
        return self._body(answer, method, path)

    def _body(self, answer: httpx.Response, method: str, path: str) -> dict[str, Any]:
        try:
            body = answer.json()
        except ValueError:
            body = None
        if answer.is_success and isinstance(body, dict):
            return body
        if isinstance(body, dict) and "error" in body:
            raise from_json(body)
        raise ExplainedError(
            f"the coordinator answered {answer.status_code} without an explanation", where=f"{method} {path} on {self.paths.socket}",
            what=" ".join(answer.text[:200].split()) or "an empty answer", fix=f"look at the end of {self.paths.log}",
        )

    def _away(self, fault: Exception) -> CoordinatorAway:
        if self.paths.root.exists() and not os.access(self.paths.root, os.X_OK, effective_ids=True):
            owner, group = self.paths.root.stat().st_uid, self.paths.root.stat().st_gid
            if self.paths.root == SYSTEM_STATE:
                return CoordinatorAway(
                    "the machine's coordinator is not open to you", where=str(self.paths.root), what=f"you are not in its group {group_name(group)}",
                    fix=f"sudo usermod --append --groups {group_name(group)} $USER, and log in again",
                )
            return CoordinatorAway(
                "this coordinator belongs to somebody else", where=str(self.paths.root), what=f"only user {owner} may look into it",
                fix=f"sudo -u '#{owner}' fleetd --state {self.paths.root} status, or set FLEETD_STATE to a directory of your own",
            )
        found = "there is no such directory"
        if self.paths.root.exists():
            found = f"its socket is there but nobody answers: {fault}" if self.paths.socket.exists() else "it has no socket"
        return CoordinatorAway(
            "no coordinator is running here", where=f"{self.paths.root}   (FLEETD_STATE, else $XDG_STATE_HOME/fleetd)", what=found,
            fix="fleetd daemon start, or fleetd launch PLAN   (starts one too); runs on hosts go on without it",
        )

    def _silent(self, fault: Exception) -> CoordinatorAway:
        return CoordinatorAway(
            "the coordinator does not answer in time", where=str(self.paths.socket), what=f"connected, but no answer came: {type(fault).__name__}",
            fix=f"try again; look at the end of {self.paths.log}; runs on hosts go on without it",
        )

    def _socket_path(self) -> str:
        path = str(self.paths.socket)
        if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX or not self.paths.root.is_dir():
            return path if len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX else path[-SOCKET_PATH_BYTES_MAX:]
        self._folder = os.open(self.paths.root, os.O_PATH | os.O_DIRECTORY)
        return str(Path(f"/proc/self/fd/{self._folder}") / self.paths.socket.name)


def group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
