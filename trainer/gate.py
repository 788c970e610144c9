"""The proof at the end of a training that asks for one: a fresh process takes its last steps again and compares every bit.

    train    finished, every save settled                                     then a fresh process begins (trainer.afresh)
    proof    evidence/exactness.json, one line in the log, "finish" again      exit 0: the training is over, whatever comes of it

Which part is next is read from the run directory alone. It runs under the cap of the training and asks the same stop: near the
cutoff it is left out, and a cutoff or a signal ends it between two steps. A process that died at it is not followed by another
try. In all these cases the verdict is unknown, and says why. No torch before the proof itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from policies.errors import ExplainedError
from policies.facts import TrainerExit
from trainer.config import ProofSettings
from trainer.files import JsonFault, dumps, read_json, replace_whole
from trainer.records import RunRecords, now_text
from trainer.stopping import Stop

EVIDENCE_NAME = "evidence/exactness.json"
START_SECONDS = 60.0
"""What a fresh process may need until its first step, on a busy machine."""
READING = 3
"""Times the margin of a stop, which holds two saves."""
PROGRESS_SECONDS = 2.0
UNKNOWN = "unknown"
_STORY = ("start", "resume", "finish", "proof")


def is_due(run_dir: Path, records: RunRecords, step: int) -> bool:
    """Whether the training ended at `step`, its newest checkpoint, and no verdict on that end is written."""
    return _last_part(records) in (("finish", step), ("proof", step)) and not is_judged(run_dir, step)


def is_judged(run_dir: Path, step: int) -> bool:
    try:
        evidence = read_json(run_dir / EVIDENCE_NAME)
    except (OSError, JsonFault):
        return False
    return isinstance(evidence, dict) and evidence.get("end_step") == step


def has_time(stop: Stop, terms: ProofSettings) -> bool:
    """Whether a fresh process can take these steps again before the cutoff. Where it can't, the training ends without. It reads every kept
    checkpoint first, and that is not interrupted: taken to last as long as some saves."""
    return stop.because() is None and stop.has_time_for(START_SECONDS + 2 * terms.steps * stop.step_seconds() + READING * stop.margin_seconds())


def give_up(run_dir: Path, step: int, terms: ProofSettings, records: RunRecords, because: str) -> None:
    """The verdict of a proof that was not made."""
    conclude(run_dir, step, terms, records, {"schema": 1, "verdict": UNKNOWN}, because)


def prove_the_end(run_dir: Path, step: int, terms: ProofSettings, stop: Stop, records: RunRecords) -> TrainerExit:
    """Take the last steps again, as a fresh process that `is_due` says has to. Finished in any case, and the verdict written."""
    because = "the process that took the steps again ended before it was done" if _last_part(records)[0] == "proof" else stop.because()
    if because is not None:
        give_up(run_dir, step, terms, records, because)
        return TrainerExit.FINISHED
    records.lineage("proof", step=step)
    records.log(event="proof", phase="begin", step=step)
    from trainer.memory import is_out_of_memory
    from trainer.prove import prove

    try:
        proof = prove(run_dir, start=None, steps=terms.steps, stop=stop, on_step=_teller(records, step))
        found, because = proof.to_json(), proof.summary()
    except ExplainedError as refused:
        found, because = {"schema": 1, "verdict": UNKNOWN}, f"{refused.title}: {refused.what}"
    except (MemoryError, RuntimeError, OSError) as fault:
        if isinstance(fault, RuntimeError) and not is_out_of_memory(fault):
            raise
        found, because = {"schema": 1, "verdict": UNKNOWN}, f"the steps could not be taken again: {str(fault).splitlines()[:1]}"
    conclude(run_dir, step, terms, records, found, because)
    return TrainerExit.FINISHED


def conclude(run_dir: Path, step: int, terms: ProofSettings, records: RunRecords, found: dict[str, Any], because: str) -> None:
    """Evidence first, then the log, where the supervisor hears of it; the last word is that the training is finished."""
    evidence = {**found, "end_step": step, "because": because, "required": terms.required, "at": now_text()}
    try:
        (run_dir / EVIDENCE_NAME).parent.mkdir(exist_ok=True)
        replace_whole(run_dir / EVIDENCE_NAME, dumps(evidence))
    except OSError as fault:
        records.log(event="note", text=f"{EVIDENCE_NAME} could not be written: {fault}")  # a finished training does not fail of it
    records.log(event="proof", phase="end", step=step, verdict=found["verdict"], required=terms.required, because=because)
    records.log(event="finish", step=step, because="proof")


def _last_part(records: RunRecords) -> tuple[str, int | None]:
    """What the newest process of this run has begun or ended, by its own words, and at which step."""
    return next(((str(line["event"]), line.get("step")) for line in reversed(records.story()) if line.get("event") in _STORY), ("", None))


def _teller(records: RunRecords, step: int) -> Callable[[int], None]:
    """A line each few seconds, so that a long proof is not taken for a stall."""
    told_at = time.monotonic()

    def on_step(done: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= PROGRESS_SECONDS:
            told_at = time.monotonic()
            records.log(event="proof", phase="progress", step=step, done=done)

    return on_step
