"""A whole campaign's directory and its status document, made up but in the formats that the other parts write, for the tests of the report.

Three trainings of 300 steps, all stopped at step 120 by a person and resumed, `fast` killed once more at step 213 and resumed from 200; one
plain command beside them; the choice, the freeze, and the test split judged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from fleetd.paths import CampaignPaths
from fleetd.wire import encode
from policies.facts import GIB, MIB, format_moment
from policies.freeze import FrozenSelection, canonical, frozen_digest, frozen_record
from policies.selection import CandidateEvidence, CheckpointEvidence, Selection, select

CAMPAIGN = "20261130T090000Z-manpages"
LAUNCHED = datetime(2026, 11, 30, 9, 0, 0, tzinfo=timezone.utc)
CAP = 3 * GIB // 2
STEPS, STOPPED_AT, KILLED_AT, SAVED_AT = 300, 120, 213, 200
FLOORS = {"slow": 5.35, "middle": 4.71, "fast": 4.58}
NATS = {
    "selected": {"en": 5.31, "de": 5.62, "fr": 5.44, "ja": 5.97}, "base": {"en": 9.02, "de": 9.03, "fr": 9.01, "ja": 9.05},
    "unigram": {"en": 6.961, "de": 6.789, "fr": 7.185, "ja": 7.554},
}
TOKENS = {"en": (44577, 24), "de": (190419, 37), "fr": (58510, 27), "ja": (141262, 41)}
CODE = "c0de" * 16


def at(seconds: float) -> str:
    return format_moment(LAUNCHED + timedelta(seconds=seconds))


def digest_of(*words: Any) -> str:
    return hashlib.sha256(repr(words).encode()).hexdigest()


def loss_at(candidate: str, step: int) -> float:
    """The same step has the same loss, bit for bit, however often it is trained."""
    noise = random.Random(f"{candidate}-{step}").gauss(0, 0.09)
    floor = FLOORS[candidate]
    return floor + (9.02 - floor) * math.exp(-step / {"slow": 90, "middle": 62, "fast": 48}[candidate]) + noise * (1 if step > 1 else 0)


def value_at(candidate: str, step: int) -> float:
    floor = FLOORS[candidate] + 0.13
    return 9.0183 if step == 0 else floor + (9.02 - floor) * math.exp(-step / {"slow": 90, "middle": 62, "fast": 48}[candidate])


def write_lines(path: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")


class Training:
    """One run's files, written as its trainer and supervisor would have."""

    def __init__(self, candidate: str, offset_seconds: float) -> None:
        self.candidate, self.clock = candidate, offset_seconds
        self.log: list[dict[str, Any]] = []
        self.lineage: list[dict[str, Any]] = []
        self.trace: list[dict[str, Any]] = []
        self.ended: list[dict[str, Any]] = []

    def attempt(self, first: int, last: int, resumed: int | None) -> None:
        self.see("starting", first, 40 * MIB)
        self.clock += 6
        event = {"event": "start", "step": first} if resumed is None else {"event": "resume", "step": resumed, "digest": self.digest(resumed)}
        self.lineage.append({"at": at(self.clock), "pid": 4711 + len(self.ended), **event})
        digest = None if resumed is None else self.digest(resumed)
        self.log.append({"event": "start", "step": first, "steps": STEPS, "resumed_from": digest, "at": at(self.clock), "pid": 4711})
        if resumed is None:
            self.save(0)
            self.validate(0)
        for step in range(first + 1, last + 1):
            self.clock += 0.55
            row = {"step": step, "loss": loss_at(self.candidate, step), "lr": 1e-3, "grad_norm": 1.0, "tokens": 2048, "seconds": 0.5}
            self.log.append({**row, "at": at(self.clock)})
            if step % 9 == 0:
                self.see("running", step, 610 * MIB + step * MIB // 2 + (step % 4) * 9 * MIB)
            if step % 100 == 0:
                self.save(step)
                self.validate(step)

    def digest(self, step: int) -> str:
        return digest_of("checkpoint", self.candidate, step)

    def save(self, step: int) -> None:
        self.log.append({"event": "save", "phase": "begin", "step": step, "at": at(self.clock)})
        self.clock += 0.4
        row = {"event": "save", "phase": "end", "step": step, "digest": self.digest(step), "bytes": 22_000_000, "seconds": 0.4}
        self.log.append({**row, "at": at(self.clock)})
        self.lineage.append({"at": at(self.clock), "event": "save", "pid": 4711, "step": step, "digest": self.digest(step)})

    def validate(self, step: int) -> None:
        self.log.append({"event": "validation", "phase": "begin", "step": step, "at": at(self.clock)})
        self.clock += 5
        value = value_at(self.candidate, step)
        self.log.append({
            "event": "validation", "phase": "end", "step": step, "value": value, "families": dict.fromkeys(TOKENS, value), "rows": 114,
            "seconds": 5.0, "sha256": digest_of("rows", self.candidate, step), "checkpoint_digest": self.digest(step), "best": True,
            "at": at(self.clock),
        })
        self.see("running", step, 905 * MIB)

    def see(self, state: str, step: int, host_bytes: int) -> None:
        self.trace.append({
            "at": at(self.clock), "state": state, "step": step, "loss": None, "host_bytes": host_bytes, "accelerator_bytes": None,
            "host_cap_bytes": CAP,
        })

    def end(self, *, code: int | None, signal: int | None, reason: str | None, state: str, step: int, because: str) -> None:
        if code in (0, 10):
            word = "finish" if code == 0 else "stop"
            skipped = [] if code == 0 else ["validation"]
            self.lineage.append({"at": at(self.clock), "event": word, "pid": 4711, "step": step, "because": because, "skipped": skipped})
        self.clock += 1
        self.see(state, step, 0)
        exit_record = {"attempt": len(self.ended) + 1, "at": at(self.clock), "exit_code": code, "signal": signal, "observed_by": "shim"}
        self.ended.append({"attempt": len(self.ended) + 1, "reason": reason, "exit": exit_record})

    def write(self, folder: Path) -> None:
        write_lines(folder / "log.jsonl", self.log, tail='{"step": 301, "lo')
        write_lines(folder / "lineage.jsonl", self.lineage)
        write_lines(folder / "trace.jsonl", self.trace)


def train(paths: CampaignPaths, candidate: str, offset_seconds: float) -> Training:
    training = Training(candidate, offset_seconds)
    training.attempt(0, STOPPED_AT, None)
    training.save(STOPPED_AT)
    training.end(code=10, signal=None, reason="user", state="stopped", step=STOPPED_AT, because="SIGTERM")
    training.clock += 34
    if candidate == "fast":
        training.attempt(STOPPED_AT, KILLED_AT, STOPPED_AT)
        training.end(code=None, signal=9, reason="signal", state="backoff", step=KILLED_AT, because="")
        training.clock += 3
        training.attempt(SAVED_AT, STEPS, SAVED_AT)
    else:
        training.attempt(STOPPED_AT, STEPS, STOPPED_AT)
    training.end(code=0, signal=None, reason=None, state="finished", step=STEPS, because="steps")
    training.write(paths.store_run(run_id(candidate)))
    return training


def run_id(candidate: str) -> str:
    return f"{CAMPAIGN}-{candidate}"


def known(value: Any, age_seconds: float | None = 30.0) -> dict[str, Any]:
    return {"value": value, "age_seconds": age_seconds}


def run(candidate: str, ended: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    parts = {
        "cgroup": {"grade": "enforced", "means": "cgroup v1 /fleetd/run"}, "sampler": {"grade": "sampled", "means": "RssAnon + RssShmem each second"},
        "allocator": {"grade": "absent", "means": "no accelerator"}, "floor": {"grade": "sampled", "means": "MemAvailable above 1.0 GiB"},
    }
    return {
        "run_id": run_id(candidate), "campaign_id": CAMPAIGN, "candidate": candidate, "kind": "train", "host": "workstation", "state": "finished",
        "reason": None, "detail": "all steps done", "since": at(560), "want": "run", "attempt": len(ended), "attempts_ended": ended,
        "restarts_used": max(0, len(ended) - 2), "restarts_max": 5, "pid": known(None), "identity": known("gone"), "step": known(STEPS),
        "steps_planned": STEPS, "loss": known(4.6),
        "memory": {
            "host_bytes": known(None, None), "accelerator_bytes": known(None, None), "host_peak_bytes": known(921 * MIB), "host_cap_bytes": CAP,
            "accelerator_cap_bytes": CAP, "parts": parts,
        },
        "checkpoint": None, "alarms": [], "selectable": True, **changes,
    }


def choose() -> Selection:
    evidence = tuple(
        CandidateEvidence(
            run_id=run_id(name), candidate=name,
            checkpoints=tuple(
                CheckpointEvidence(step=step, checkpoint_digest=digest_of("checkpoint", name, step), value=value_at(name, step))
                for step in (0, 100, 200, 300)
            ),
        )
        for name in FLOORS
    )
    refused = "it is a plain command and wrote no predictions"
    printer = CandidateEvidence(run_id=run_id("printer"), candidate="printer", checkpoints=(), refused=refused)
    chosen = select((*evidence, printer), 0.001)
    assert isinstance(chosen, Selection)
    return chosen


def selection_record(chosen: Selection) -> dict[str, Any]:
    return {
        "schema": 1, "campaign_id": CAMPAIGN, "criterion": "token_nll_v1", "minimum_improvement": 0.001, "outcome": "selected",
        "because": "the lowest", "run_id": chosen.run_id, "candidate": chosen.candidate, "step": chosen.step,
        "checkpoint_digest": chosen.checkpoint_digest, "value": chosen.value, "base_checkpoint_digest": chosen.base_checkpoint_digest,
        "base_value": chosen.base_value, "table": [encode(row) for row in chosen.table], "inputs": {}, "at": at(575), "code_digest": CODE,
    }


def enter(path: Path, seconds: float, kind: str, **body: Any) -> None:
    """One ledger entry, chained as the coordinator chains it."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    previous = json.loads(lines[-1])["hash"] if lines else "0" * 64
    sealed = {"sequence": len(lines) + 1, "at": at(seconds), "code": CODE, "event": {"kind": kind, "actor": "coordinator", **body}}
    line = {**sealed, "prev": previous, "hash": hashlib.sha256(previous.encode() + canonical(sealed)).hexdigest()}
    with open(path, "ab") as file:
        file.write(canonical(line) + b"\n")


def result_record(frozen_sha256: str, nats: dict[str, dict[str, float]]) -> dict[str, Any]:
    models = {}
    for who, families in nats.items():
        mean = math.fsum(families.values()) / len(families)
        figures = {
            name: {"nll": value, "perplexity": math.exp(value), "tokens": TOKENS[name][0], "rows": TOKENS[name][1]}
            for name, value in families.items()
        }
        models[who] = {"nll": mean, "perplexity": math.exp(mean), "families": figures}
    return {
        "schema": 1, "split": "test", "look": 1, "exploratory": False, "because": "after_freeze.evaluate of the plan",
        "frozen_sha256": frozen_sha256, "candidate": "fast", "step": STEPS, "run_id": run_id("evaluate-test"),
        "inputs": {who: digest_of(who) for who in nats}, "rows": 129,
        "numeric_mode": "fp32 cpu", "models": models, "judged_at": at(640), "code_digest": CODE,
    }


def freeze(paths: CampaignPaths, chosen: Selection) -> str:
    frozen = FrozenSelection(
        campaign_id=CAMPAIGN, criterion="token_nll_v1", minimum_improvement=0.001, run_id=chosen.run_id, candidate=chosen.candidate,
        step=chosen.step, checkpoint_digest=chosen.checkpoint_digest, value=chosen.value,
        base_checkpoint_digest=chosen.base_checkpoint_digest, base_value=chosen.base_value,
        candidates=tuple(row for row in chosen.table if row.eligible), exclusions=tuple(row for row in chosen.table if not row.eligible),
        frozen_at=LAUNCHED + timedelta(seconds=580), code_digest=CODE,
    )
    paths.frozen.write_text(json.dumps(frozen_record(frozen)), encoding="utf-8")
    return frozen_digest(frozen)


def whole_campaign(state_root: Path) -> tuple[CampaignPaths, dict[str, Any]]:
    """The directory of the finished campaign, and the status document that goes with it."""
    paths = CampaignPaths(state_root / "campaigns" / CAMPAIGN)
    os.makedirs(paths.results)
    trainings = {name: train(paths, name, 8.0 + 2 * index) for index, name in enumerate(FLOORS)}
    chosen = choose()
    paths.selection.write_text(json.dumps(selection_record(chosen)), encoding="utf-8")
    registered = {role: digest_of("data", role) for role in ("train", "validation", "test", "registered_validation")}
    sealed = {"test": {"digest": registered["test"], "files": 5, "sealed": "held back"}}
    enter(paths.ledger, 1, "registered", splits=sealed, digests=registered)
    frozen_sha256 = freeze(paths, chosen)
    enter(paths.ledger, 580, "frozen", frozen_sha256=frozen_sha256, checkpoint_digest=chosen.checkpoint_digest)
    enter(paths.ledger, 582, "opened", split="test", number=1, frozen_sha256=frozen_sha256, because="after_freeze.evaluate of the plan")
    result = result_record(frozen_sha256, NATS)
    paths.result("test").write_text(json.dumps(result), encoding="utf-8")
    enter(paths.ledger, 640, "judged", split="test", number=1, results_sha256=hashlib.sha256(canonical(result)).hexdigest())
    folder = paths.store_checkpoints / chosen.checkpoint_digest
    os.makedirs(folder)
    environment = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "threads": 1, "device": "cpu", "accelerators": [], "deterministic": True}
    (folder / "trainer.json").write_text(json.dumps({"schema": 1, "environment": environment}), encoding="utf-8")
    evaluation = Training("evaluate-test", 585.0)
    evaluation.see("running", 0, 480 * MIB)
    evaluation.clock += 25
    evaluation.see("running", 0, 530 * MIB)
    evaluation.clock += 25
    evaluation.see("finished", 0, 0)
    write_lines(paths.store_run(run_id("evaluate-test")) / "trace.jsonl", evaluation.trace)
    return paths, _document(paths, trainings, chosen, frozen_sha256, result)


def _document(
    paths: CampaignPaths, trainings: dict[str, Training], chosen: Selection, frozen_sha256: str, result: dict[str, Any],
) -> dict[str, Any]:
    ended = {"attempt": 1, "reason": None, "exit": {"attempt": 1, "at": at(80), "exit_code": 0, "signal": None, "observed_by": "shim"}}
    judged = {"attempt": 1, "reason": None, "exit": {"attempt": 1, "at": at(636), "exit_code": 0, "signal": None, "observed_by": "shim"}}
    runs = [run(name, training.ended) for name, training in trainings.items()]
    runs.append(run("printer", [ended], steps_planned=None, step=known(None), selectable="it is a plain command and wrote no predictions"))
    looks = [{"at": at(10 + 10 * n), "state": "running", "step": None, "host_bytes": 9 * MIB, "host_cap_bytes": 256 * MIB} for n in range(8)]
    write_lines(paths.store_run(run_id("printer")) / "trace.jsonl", looks)
    runs[-1]["memory"] = {**runs[-1]["memory"], "host_peak_bytes": known(9 * MIB), "host_cap_bytes": 256 * MIB}
    runs.append(run("evaluate-test", [judged], kind="evaluate", steps_planned=None, selectable="it is an evaluation"))
    facts = {
        "hostname": "workstation", "kernel": "6.18.0", "python": "3.11.7", "architecture": "x86_64", "cpu_count": 2, "memory_total_bytes": 24 * GIB,
        "accelerators": [],
    }
    return {
        "schema": 1, "at": at(645), "verdict": {"word": "OK", "text": "nothing is at work", "since": at(641)},
        "coordinator": {"pid": 99, "id": "c0ffee", "generation": 2, "started_at": at(-5), "state_dir": "/state", "journal": "ok"},
        "campaigns": [{
            "campaign_id": CAMPAIGN, "name": "manpages", "stage": "evaluated", "detail": "judged: test", "since": at(641), "is_over": True,
            "launched_at": at(0), "deadline_at": at(1800), "cutoff_at": at(1620), "last_safe_stop_at": at(1560),
            "runs": [each["run_id"] for each in runs],
            "selection": {key: value for key, value in selection_record(chosen).items() if key != "inputs"},
            "frozen": {"sha256": frozen_sha256, "at": at(580)}, "openings": [{"split": "test"}], "results": {"test": result}, "report": None,
            "directory": "/state/campaigns/" + CAMPAIGN,
        }],
        "runs": runs,
        "hosts": [{"name": "workstation", "reachable": True, "facts": facts, "age_seconds": 1.0}],
    }
