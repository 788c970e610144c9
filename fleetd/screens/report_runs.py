"""One run for the report: its losses, validations, memory over time, and the story of its attempts. From the copies in the store."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd.screens.document import Document, number, sight
from fleetd.screens.report_files import Missing, lines
from fleetd.screens.report_files import number as finite
from fleetd.screens.view_run import exit_words
from policies.facts import parse_moment

POINTS_MAX = 2_000
"""Of a curve in report.json and in the drawing; longer ones are thinned, which the report says."""
STORY_MAX = 200
FINISH_WORDS = {"steps": "all steps done", "patience": "no improvement for as many validations as patience allows"}
STORY_EVENTS = frozenset({"start", "resume", "stop", "finish", "refuse", "failed"})


def run_facts(run: Document, folder: Path, missing: Missing) -> dict[str, Any]:
    """Everything the report says of one run."""
    candidate, is_training = str(run.get("candidate") or run["run_id"]), run.get("kind", "train") == "train"
    # A user's own command keeps no log and no lineage, and that is no fault.
    told = missing if run.get("steps_planned") else Missing()
    log = _log_facts(folder if is_training and run.get("attempt") else None, f"training log of {candidate}", told)
    memory = run.get("memory") or {}
    trace = _trace_facts(folder if run.get("attempt") else None, f"memory of {candidate}", missing)
    looks = [number(sight(memory.get("host_peak_bytes")).value), *trace["host_bytes"]]
    peaks = [value for value in looks if value is not None]
    return {
        "run_id": run["run_id"], "candidate": candidate, "kind": run.get("kind", "train"), "host": run.get("host"), "state": run.get("state"),
        "reason": run.get("reason"), "detail": run.get("detail") or "", "selectable": run.get("selectable"), "exactness": run.get("exactness"),
        "steps_planned": run.get("steps_planned"), "restarts_used": run.get("restarts_used"), "restarts_max": run.get("restarts_max"),
        **log,
        "trace": trace, "host_peak_bytes": int(max(peaks)) if peaks else None, "host_cap_bytes": memory.get("host_cap_bytes"),
        "accelerator_cap_bytes": memory.get("accelerator_cap_bytes"), "cap_parts": memory.get("parts") or {},
        "attempts": _attempts(run), "story": _story(run, folder, candidate, told), "alarms": list(run.get("alarms") or []),
    }


def _log_facts(folder: Path | None, what: str, missing: Missing) -> dict[str, Any]:
    """Losses by step, validations, tokens and seconds. A step that was trained again after a crash counts once, and is compared."""
    losses: dict[int, float] = {}
    again = equal = tokens = 0
    seconds = 0.0
    validations: dict[int, dict[str, Any]] = {}
    saves: dict[int, str] = {}
    for line in lines(folder / "log.jsonl", what, missing) if folder else ():
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            continue
        event = line.get("event")
        if event is None and (loss := finite(line.get("loss"))) is not None:
            if step in losses:
                again, equal = again + 1, equal + (losses[step] == loss)
            losses[step] = loss
            tokens += int(finite(line.get("tokens")) or 0)
            seconds += finite(line.get("seconds")) or 0.0
        elif event == "validation" and line.get("phase") == "end" and (value := finite(line.get("value"))) is not None:
            families = {str(name): finite(each) for name, each in (line.get("families") or {}).items()}
            validations[step] = {"step": step, "value": value, "families": families, "rows": line.get("rows")}
        elif event == "save" and line.get("phase") == "end":
            saves[step] = str(line.get("digest") or "")
    points = [{"step": step, "loss": losses[step]} for step in sorted(losses)]
    if len(points) > POINTS_MAX:
        missing.add(what, f"{len(points)} losses are shown by {POINTS_MAX} of them, evenly spaced")
    return {
        "steps": max(losses, default=None), "losses": thinned(points), "smoothed": thinned(smoothed(points)),
        "validations": [validations[step] for step in sorted(validations)],
        "saves": [{"step": step, "digest": saves[step]} for step in sorted(saves)],
        "tokens": tokens, "seconds": round(seconds, 3), "repeated_steps": again, "repeated_equal": equal,
    }


def smoothed(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """An exponential mean over about a thirtieth of the run, corrected for its start (Kingma and Ba 2015, section 3)."""
    decay = 1.0 - 1.0 / max(4.0, len(points) / 30.0)
    mean, found = 0.0, []
    for index, point in enumerate(points, 1):
        mean = decay * mean + (1.0 - decay) * point["loss"]
        found.append({"step": point["step"], "loss": mean / (1.0 - decay**index)})
    return found


def thinned(points: list[Any]) -> list[Any]:
    """At most POINTS_MAX of them, evenly spaced, the first and the last among them."""
    if len(points) <= POINTS_MAX:
        return points
    return [points[round(index * (len(points) - 1) / (POINTS_MAX - 1))] for index in range(POINTS_MAX)]


def _trace_facts(folder: Path | None, what: str, missing: Missing) -> dict[str, list[Any]]:
    """Columns of trace.jsonl: moment, state, step, host and accelerator bytes."""
    rows = []
    for line in lines(folder / "trace.jsonl", what, missing) if folder else ():
        if moment(line.get("at")) is not None:
            rows.append(line)
    if len(rows) > POINTS_MAX:
        missing.add(what, f"{len(rows)} looks are shown by {POINTS_MAX} of them, evenly spaced")
    kept = thinned(rows)
    return {
        "at": [str(row["at"]) for row in kept], "state": [str(row.get("state")) for row in kept], "step": [row.get("step") for row in kept],
        "host_bytes": [finite(row.get("host_bytes")) for row in kept], "accelerator_bytes": [finite(row.get("accelerator_bytes")) for row in kept],
        "host_cap_bytes": [finite(row.get("host_cap_bytes")) for row in kept],
    }


def moment(text: Any) -> datetime | None:
    try:
        return parse_moment(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _attempts(run: Document) -> list[dict[str, Any]]:
    found = []
    for each in run.get("attempts_ended") or []:
        if isinstance(each, dict):
            exit_record = each["exit"] if isinstance(each.get("exit"), dict) else each
            found.append({
                "attempt": each.get("attempt"), "at": exit_record.get("at"), "exit_code": exit_record.get("exit_code"), "text": exit_words(each),
                "signal": exit_record.get("signal"), "observed_by": exit_record.get("observed_by"), "reason": each.get("reason"),
            })
    return found


def _story(run: Document, folder: Path, candidate: str, missing: Missing) -> list[dict[str, Any]]:
    """Starts, resumes, stops and ends in order of time: what the trainer wrote, and what was seen of its exits."""
    story = [{"at": each["at"], "kind": "ended", "text": _ended(each)} for each in _attempts(run) if moment(each["at"]) is not None]
    for line in lines(folder / "lineage.jsonl", f"lineage of {candidate}", missing) if run.get("attempt") else ():
        if line.get("event") in STORY_EVENTS and moment(line.get("at")) is not None:
            story.append({"at": str(line["at"]), "kind": str(line["event"]), "text": _lineage_words(line)})
    story.sort(key=lambda each: str(each["at"]))
    if len(story) > STORY_MAX:
        missing.add(f"story of {candidate}", f"{len(story) - STORY_MAX} earlier entries are left out")
    return story[-STORY_MAX:]


def _ended(attempt: dict[str, Any]) -> str:
    number_ = attempt["attempt"] if attempt["attempt"] is not None else "?"
    return f"attempt {number_} ended: {attempt['text']}" + (f", {attempt['reason']}" if attempt["reason"] else "")


def _lineage_words(line: dict[str, Any]) -> str:
    digest, because, step = str(line.get("digest") or "")[:12], line.get("because"), line.get("step")
    skipped = ", ".join(str(each) for each in line.get("skipped") or [])
    words = {
        "start": "started" + (f" at step {step}" if step else ""),
        "resume": f"resumed at step {step} from checkpoint {digest}",
        "stop": f"stopped at step {step}: {because}" + (f"; left out: {skipped}" if skipped else ""),
        "finish": f"finished at step {step}: {FINISH_WORDS.get(str(because), because)}" if step is not None else "finished",
        "refuse": f"refused {line.get('name')}: {because}",
        "failed": f"failed at step {step}: {because}",
    }
    return words[str(line["event"])]
