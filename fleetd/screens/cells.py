"""One run as named cells. The table of the status, the live table and the progress lines all take them, so that one fact reads the same.

`?` is unknown where something should be known, `—` is not there yet, `~` marks a value that was read more than a few seconds ago.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from fleetd.screens import layout, words
from fleetd.screens.document import WAITING_STATES, Document, is_settled, number, seconds_between, sight
from fleetd.screens.layout import Column, Line, Span, Tone

FRESH_SECONDS_MAX = 5.0
"""Values older than this say so."""

RUN_COLUMNS = (
    Column("candidate", "RUN", 0, "run {}"),
    Column("state", "STATE", 1, "{}"),
    Column("host", "HOST", 6, "on {}"),
    Column("step", "STEP", 2, "step {}", right=True),
    Column("rate", "STEPS/S", 8, "{} steps/s", right=True),
    Column("loss", "LOSS", 3, "loss {}", right=True),
    Column("best", "BEST", 4, "best {}"),
    Column("memory", "MEMORY/CAP", 5, "memory {}"),
    Column("checkpoint", "CHECKPOINT", 9, "checkpoint {}"),
    Column("last_step", "LAST STEP", 10, "last step {}"),
    Column("restarts", "RESTARTS", 11, "restarts {}"),
)
_STATE_TONES = {
    "running": Tone.GOOD, "finished": Tone.GOOD, "failed": Tone.BAD, "held": Tone.BAD, "stuck": Tone.BAD, "lost": Tone.WARN, "backoff": Tone.WARN,
}
_GRADE_STRENGTH = {"enforced": 2, "sampled": 1, "absent": 0}


def folded_parts(columns: Sequence[Column], row: Mapping[str, Span]) -> list[Line]:
    """What the folded columns say of a run; values that can't be there yet are left out."""
    return layout.folded_parts([each for each in columns if row[each.key].text != words.ABSENT], row)


def run_cells(run: Document, now: datetime | None) -> dict[str, Span]:
    """One run as named cells, at the moment of its document."""
    return {
        "candidate": Span(words.one_line(run.get("candidate") or run["run_id"]), Tone.STRONG),
        "state": state_span(run),
        "host": Span(words.one_line(run.get("host") or words.ABSENT)),
        "step": step_span(run),
        "rate": _measured(run, "steps_per_second", words.rate) if not is_settled(run) else Span(words.ABSENT, Tone.QUIET),
        "loss": _measured(run, "loss", words.loss),
        "best": best_span(run),
        "memory": memory_span(run),
        "checkpoint": checkpoint_span(run),
        "last_step": last_step_span(run, now),
        "restarts": restarts_span(run),
    }


def state_span(run: Document) -> Span:
    """`running`, `failed (oom)`, `running, stop asked`; ` !` when an alarm or a doubtful identity waits in the notes."""
    state = str(run.get("state") or words.UNKNOWN)
    tone = _STATE_TONES.get(state, Tone.PLAIN)
    reason = f" ({run['reason']})" if run.get("reason") else ""
    asked = ", stop asked" if run.get("want") == "stop" and state in {"running", "starting", "backoff", "lost"} else ""
    doubt = str(sight(run.get("identity")).value).startswith("cannot verify") and not is_settled(run)
    alarm = " !" if run.get("alarms") or doubt else ""
    return Span(words.one_line(f"{state}{reason}{asked}{alarm}"), Tone.BAD if alarm else tone)


def step_span(run: Document) -> Span:
    """`123/400`; `—/400` before the first step is possible, `?/400` when it should be known and is not."""
    planned = number(run.get("steps_planned"))
    found = _measured(run, "step", lambda value: f"{value:.0f}")
    return Span(f"{found.text}/{planned:.0f}", found.tone) if planned is not None else found


def best_span(run: Document) -> Span:
    """`5.104 at 100, 2 min ago`: the lowest validation value so far, its step, and when."""
    best = sight(run.get("best"))
    if not isinstance(best.value, dict):
        return Span(words.ABSENT, Tone.QUIET)
    return Span(f"{words.loss(number(best.value.get('value')))} at {best.value.get('step', words.UNKNOWN)}{when(best.age_seconds)}")


def memory_span(run: Document) -> Span:
    """`1.20/2.00 GiB E enforced`: host memory of the tree against its cap, and how strongly the strongest mechanism holds it."""
    memory = run.get("memory") or {}
    if run.get("state") in WAITING_STATES:
        cap = number(memory.get("host_cap_bytes"))
        return Span(words.ABSENT if cap is None else f"{words.ABSENT} of {words.size(cap)}", Tone.QUIET)
    used = sight(memory.get("host_bytes"))
    count = None if is_settled(run) else number(used.value)
    cap = number(memory.get("host_cap_bytes"))
    if is_settled(run):
        peak = number(sight(memory.get("host_peak_bytes")).value)
        return Span(f"peak {words.share(peak, cap)}", Tone.QUIET)
    near = count is not None and cap is not None and count > 0.9 * cap
    return Span(f"{_mark(run, used.age_seconds)}{words.share(count, cap)} {grade(memory)}", Tone.WARN if near else Tone.PLAIN)


def grade(memory: Document) -> str:
    """`E enforced`, `S sampled`, `A absent`: the strongest of the mechanisms that hold the host part; `?` when none is reported."""
    parts = memory.get("parts") or {}
    found = [str(part.get("grade")) for name, part in parts.items() if name in {"cgroup", "sampler"} and isinstance(part, dict)]
    if not found:
        return f"{words.UNKNOWN} unknown"
    return grade_words({"grade": max(found, key=lambda each: _GRADE_STRENGTH.get(each, -1))})


def grade_words(part: Document) -> str:
    """`E enforced` for one mechanism."""
    found = words.one_line(part.get("grade") or words.UNKNOWN)
    return f"{found[:1].upper()} {found}"


def checkpoint_span(run: Document) -> Span:
    """`100 verified 20 s ago`: the newest copy that the coordinator verified."""
    found = run.get("checkpoint")
    if isinstance(found, dict) and found.get("step") is not None:
        return Span(f"{found['step']} verified {words.age(number(found.get('age_seconds')))}")
    none_due = run.get("state") in WAITING_STATES or run.get("kind", "train") != "train"
    return Span(words.ABSENT if none_due else "none verified", Tone.QUIET)


def last_step_span(run: Document, now: datetime | None) -> Span:
    """How long ago the last step was done: never less than the age of the look that told of it."""
    if run.get("state") in WAITING_STATES:
        return Span(words.ABSENT, Tone.QUIET)
    last = sight(run.get("last_step_at"))
    if last.value is None:
        return Span(words.UNKNOWN if run.get("state") == "running" else words.ABSENT, Tone.QUIET)
    ages = [age for age in (last.age_seconds, seconds_between(last.value, now)) if age is not None]
    return Span(words.age(max(ages, default=None)), Tone.QUIET if is_settled(run) else Tone.PLAIN)


def restarts_span(run: Document) -> Span:
    used = number(run.get("restarts_used"))
    if used is None:
        return Span(words.ABSENT if run.get("state") in WAITING_STATES else words.UNKNOWN, Tone.QUIET)
    return Span(f"{int(used)} of {run.get('restarts_max', words.UNKNOWN)}", Tone.WARN if used else Tone.QUIET)


def _measured(run: Document, key: str, spoken: Callable[[float], str]) -> Span:
    """A measured number with its mark when it is old; `—` while nothing can be known, `?` where it should be."""
    found = sight(run.get(key))
    value = number(found.value)
    if value is None:
        return Span(words.UNKNOWN if _is_expected(run, key) else words.ABSENT, Tone.QUIET)
    return Span(f"{_mark(run, found.age_seconds)}{spoken(value)}")


def _is_expected(run: Document, key: str) -> bool:
    """Whether a value should be known now: a running training tells its steps and loss, a plain command may tell nothing."""
    tells_steps = run.get("steps_planned") is not None or sight(run.get("step")).value is not None
    has_key = run.get("kind", "train") == "train" or key != "loss"
    return run.get("state") == "running" and tells_steps and has_key


def _mark(run: Document, age_seconds: float | None) -> str:
    """`~` before a value of a live run that was read more than a few seconds ago; a note says how long."""
    return "~" if age_seconds is not None and age_seconds > FRESH_SECONDS_MAX and not is_settled(run) else ""


def when(age_seconds: float | None) -> str:
    return f", {words.age(age_seconds)}" if age_seconds is not None and age_seconds > FRESH_SECONDS_MAX else ""
