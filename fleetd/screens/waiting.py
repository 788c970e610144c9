"""Waiting for a run or a campaign to be over, through a coordinator that may restart meanwhile.

    running … ── finished, evaluated ─▶ 0     failed ─▶ 5     stopped ─▶ 6     time is up ─▶ 7     nobody answers any more ─▶ 8
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from fleetd.screens import terminal, words
from fleetd.screens.client import Client, CoordinatorAway
from fleetd.screens.document import ATTENTION_STATES, Document, Target, is_over, is_settled
from policies.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_STOPPED, EXIT_UNFINISHED, EXIT_UNREACHABLE

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How the waiting ended: the target's last state, its exit code, and one line for a person."""

    kind: str
    id: str
    state: str
    exit_code: int
    text: str
    body: Document | None

    def to_json(self) -> dict[str, Any]:
        return {self.kind: self.body, "id": self.id, "state": self.state, "exit_code": self.exit_code, "text": self.text}


def ending_of(document: Document, target: Target) -> Ending | None:
    """The Ending of a target that is over in this document, else None. A target that vanished has ended unseen: not finished."""
    kind, key = ("runs", "run_id") if target.kind == "run" else ("campaigns", "campaign_id")
    body = next((each for each in document.get(kind) or [] if each.get(key) == target.id), None)
    if body is None:
        return Ending(target.kind, target.id, words.UNKNOWN, EXIT_UNFINISHED, f"{target.id} is not known to this coordinator any more", None)
    over = is_settled(body) if target.kind == "run" else is_over(document, body)
    if not over:
        return None
    state = str(body.get("state") or body.get("stage"))
    exit_code = {"failed": EXIT_RUN_FAILED, "stopped": EXIT_STOPPED}.get(state, EXIT_OK)
    return Ending(target.kind, target.id, state, exit_code, _text(body, state), body)


def wait_for(client: Client, target: Target, timeout_seconds: float | None) -> Ending:
    """Look once a second until the target is over or the time is up. Says on stderr, once each, when it needs a person or nobody answers."""
    return wait_for_all(client, (target,), timeout_seconds)[0]


def worst(endings: tuple[Ending, ...]) -> int:
    """One exit code for several endings: the one that most needs a person."""
    found = {ending.exit_code for ending in endings}
    return next((code for code in (EXIT_RUN_FAILED, EXIT_STOPPED, EXIT_UNREACHABLE, EXIT_UNFINISHED) if code in found), EXIT_OK)


def wait_for_all(client: Client, targets: tuple[Target, ...], timeout_seconds: float | None) -> tuple[Ending, ...]:
    """The same until every one of the targets is over; what is not over when the time is up has an ending that says so."""
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    told: set[str] = set()
    states, endings, away = [words.UNKNOWN] * len(targets), list[Ending | None]([None] * len(targets)), False
    while True:
        try:
            document = client.status()
            away = False
            endings = [ending_of(document, target) for target in targets]
            if all(endings):
                return tuple(ending for ending in endings if ending is not None)
            states = [_state(document, target) for target in targets]
            for text in (text for target, ending in zip(targets, endings, strict=True) if ending is None for text in _calls(document, target)):
                _tell_once(told, text)
        except CoordinatorAway as fault:
            away = True
            _tell_once(told, f"{fault.title}: waiting for it; runs go on without it")
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            found = zip(targets, states, endings, strict=True)
            return tuple(ending or _time_is_up(target, state, timeout_seconds or 0.0, away=away) for target, state, ending in found)
        time.sleep(LOOK_SECONDS if left is None else min(LOOK_SECONDS, left))


def _time_is_up(target: Target, state: str, seconds: float, *, away: bool) -> Ending:
    reason = "and no coordinator answers" if away else f"it is {state}"
    text = f"{target.id} is not over after {words.duration(seconds)}: {reason}"
    return Ending(target.kind, target.id, state, EXIT_UNREACHABLE if away else EXIT_UNFINISHED, text, None)


def _state(document: Document, target: Target) -> str:
    kind, key, field = ("runs", "run_id", "state") if target.kind == "run" else ("campaigns", "campaign_id", "stage")
    return next((str(each.get(field)) for each in document.get(kind) or [] if each.get(key) == target.id), words.UNKNOWN)


def _calls(document: Document, target: Target) -> list[str]:
    """Runs of the target that wait for a person, in words."""
    concerned = [run for run in document.get("runs") or [] if target.id in (run.get("run_id"), run.get("campaign_id"))]
    return [
        f"needs you: {run.get('candidate')} is {run.get('state')}: {words.one_line(run.get('detail') or 'see fleetd status')}"
        for run in concerned if run.get("state") in ATTENTION_STATES - {"failed"}
    ]


def _tell_once(told: set[str], text: str) -> None:
    if text not in told:
        told.add(text)
        terminal.say(text, talk=True)


def _text(body: Document, state: str) -> str:
    name = words.one_line(body.get("candidate") or body.get("name") or body.get("run_id"))
    reason = f" ({body['reason']})" if body.get("reason") else ""
    detail = words.one_line(body.get("detail") or "")
    return f"{name} is {state}{reason}" + (f": {detail}" if detail else "")
