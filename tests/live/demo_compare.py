"""What a campaign of the fleet demo left behind, and two of them side by side: equal to the last bit, or in what they differ."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_campaign import PLACES, Campaign

WEIGHTS = "model.safetensors"
DIFFERENCES_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Of one candidate: by step, every loss and every checkpoint digest that its log names; how many steps were done more than once; and how
    often it was started, with the pid and the step of each."""

    losses: dict[str, list[str]]
    checkpoints: dict[str, list[str]]
    repeated: int
    starts: list[list[int | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    candidate: str
    step: int
    value: float
    checkpoint: str
    weights_sha256: str
    """Of the chosen weights as they lie with the coordinator, every byte read."""
    rows: list[list[Any]]
    results: dict[str, Any]
    stories: dict[str, Story]
    coordinators: int

    def keep(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def kept(cls, path: Path) -> Outcome:
        body = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**body, "stories": {candidate: Story(**story) for candidate, story in body["stories"].items()}})


def outcome_of(campaign: Campaign, ended: dict[str, Any]) -> Outcome:
    selection, events = ended["selection"], campaign.events()
    chosen = Path(ended["directory"]) / "store" / "checkpoints" / selection["checkpoint_digest"] / WEIGHTS
    return Outcome(
        candidate=selection["candidate"], step=selection["step"], value=selection["value"], checkpoint=selection["checkpoint_digest"],
        weights_sha256=hashlib.sha256(chosen.read_bytes()).hexdigest(),
        rows=sorted([row["candidate"], row["step"], row["value"], row["eligible"]] for row in selection["table"]),
        results={split: result["models"] for split, result in ended["results"].items()}, coordinators=int(campaign.coordinator()["generation"]),
        stories={candidate: story_of(Path(ended["directory"]), f"{campaign.campaign_id}-{candidate}", events) for candidate in PLACES},
    )


def story_of(directory: Path, run_id: str, events: list[dict[str, Any]]) -> Story:
    losses: dict[str, set[str]] = defaultdict(set)
    checkpoints: dict[str, set[str]] = defaultdict(set)
    steps = 0
    for line in (directory / "store" / "runs" / run_id / "log.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line) if line.endswith("}") else {}
        if "loss" in record:
            losses[str(record["step"])].add(repr(record["loss"]))
            steps += 1
        elif record.get("event") == "save" and "digest" in record:
            checkpoints[str(record["step"])].add(record["digest"])
    told = [event["body"]["body"] for event in events if event["run_id"] == run_id and event["body"].get("kind") == "attempt_started"]
    return Story(
        losses={step: sorted(found) for step, found in losses.items()}, checkpoints={step: sorted(found) for step, found in checkpoints.items()},
        repeated=steps - len(losses), starts=[[int(each["pid"]), each.get("resume_step")] for each in told],
    )


PARTS: tuple[tuple[str, Callable[[Outcome], Any], Callable[[Outcome], str]], ...] = (
    ("chosen", lambda each: (each.candidate, each.step), lambda each: f"{each.candidate}, step {each.step}"),
    ("held-out, nats a token", lambda each: each.value, lambda each: repr(each.value)),
    ("its checkpoint", lambda each: each.checkpoint, lambda each: each.checkpoint[:16]),
    (f"its {WEIGHTS}", lambda each: each.weights_sha256, lambda each: f"sha256 {each.weights_sha256[:16]}"),
    ("validations of all", lambda each: each.rows, lambda each: f"{len(each.rows)} checkpoints"),
    ("test split, nats a token", lambda each: each.results, lambda each: repr(each.results["test"]["selected"]["nll"])),
)


def compare(left: Outcome, right: Outcome, expected_starts: dict[str, int]) -> int:
    """Print the two side by side; 0 when they are equal and each candidate of the right one was started as often as expected."""
    rows = [(name, shown(left), shown(right), part(left) == part(right)) for name, part, shown in PARTS]
    for candidate, host in PLACES.items():
        one, other = left.stories[candidate], right.stories[candidate]
        rows.append((f"{candidate} on {host}", counted(one), counted(other), not differences(one, other)))
        rows.append(("  started", starts(one), starts(other), len(one.starts) == 1 and len(other.starts) == expected_starts[candidate]))
    rows.append(("coordinators", f"{left.coordinators}", f"{right.coordinators}", (left.coordinators, right.coordinators) == (1, 2)))
    print(f"{'':27}{'undisturbed':<34}{'disturbed':<46}")
    for name, one_text, other_text, is_well in rows:
        print(f"{name:<27}{one_text:<34}{other_text:<46}{verdict(name, is_well)}")
    for candidate in PLACES:
        for difference in differences(left.stories[candidate], right.stories[candidate])[:DIFFERENCES_SHOWN_MAX]:
            print(f"  {candidate}: {difference}")
    is_equal = all(is_well for *_, is_well in rows)
    print("\n" + ("Equal to the last bit: a bad night cost time, and nothing else." if is_equal else "NOT EQUAL"), flush=True)
    return 0 if is_equal else 1


def verdict(name: str, is_well: bool) -> str:
    if name in ("  started", "coordinators"):
        return "as it should be" if is_well else "WRONG"
    return "equal" if is_well else "DIFFERENT"


def differences(left: Story, right: Story) -> list[str]:
    """What of one story is not in the other. A checkpoint more, made on the way out, is no difference; another one for the same step is."""
    found = []
    for what, one, other in (("loss", left.losses, right.losses), ("checkpoint", left.checkpoints, right.checkpoints)):
        found += [f"step {step}: {what} {facts}, disturbed {other.get(step)}" for step, facts in one.items()
                  if other.get(step) != facts]
    return found + [f"step {step}: a loss more" for step in sorted(right.losses.keys() - left.losses.keys())]


def counted(story: Story) -> str:
    again = f", {story.repeated} computed twice" if story.repeated else ""
    return f"{len(story.losses)} losses{again}, {len(story.checkpoints)} checkpoints"


def starts(story: Story) -> str:
    words = {0: "never", 1: "once", 2: "twice"}.get(len(story.starts), f"{len(story.starts)} times")
    again = "".join(f", then from step {step}" for _, step in story.starts[1:])
    return words + again
