"""A passing and a failing pilot in real campaigns: real daemons, real trainers, real processes that begin afresh. The one that passes
trains, validates and is judged on Zrodlo corpora; of the other one a run draws its windows as zxell does."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_fleet import Fleet

pytestmark = pytest.mark.live

PILOT = {"pilot": {"steps": 5}, "memory_cap": "1GiB"}
"""Small enough that all of them fit at once: one that has to wait would be judged later, and alone."""
PROOF = {"proof": {"steps": 4, "required": True}}
END = 2


def corpus_of(shards: Path, name: str, folder: Path, tokens_max: int) -> dict[str, Any]:
    """The documents of a token shard as a Zrodlo corpus, as many as fit into `tokens_max`; the role of a plan."""
    tokens = np.fromfile(shards / name, dtype="<u2")[:tokens_max].astype("<u4")
    ends = np.flatnonzero(tokens == END)
    data = tokens[:ends[-1] + 1].tobytes()
    folder.mkdir(parents=True)
    (folder / "tokens.bin").write_bytes(data)
    (folder / "corpus.json").write_text(json.dumps({
        "schema": 1, "sources": [{"file": f"{number}.txt"} for number in range(len(ends))], "tokenizer_sha256": "0" * 64, "end_of_sequence": END,
        "vocabulary": 8000, "documents": len(ends), "tokens": int(ends[-1]) + 1, "tokens_sha256": hashlib.sha256(data).hexdigest(),
    }))
    return {"corpus": str(folder)}


def test_a_pilot_that_passes_goes_on_and_one_that_fails_ends_its_campaign_before_the_time_is_spent(fleet: Fleet) -> None:
    scored = {"tokens_per_document_max": 32}
    data = {"train": corpus_of(fleet.shards, "train_009.bin", fleet.root / "corpora/train", 100_000),
            "validation": {**corpus_of(fleet.shards, "val_000.bin", fleet.root / "corpora/val", 40_000), **scored},
            "test": {**corpus_of(fleet.shards, "test_000.bin", fleet.root / "corpora/test", 40_000), **scored}}
    good = fleet.launch(fleet.plan("good", cadence=10, candidates={"one": {**PILOT, **PROOF, "training": {"steps": 20}}}, data=data))
    broken = {**PILOT, "training": {"steps": 4000, "optimizer": {"lr": 1e30, "warmup": 0}}}
    both = {"sound": {**PILOT, "training": {"steps": 4000, "sampler": "zxell"}}, "broken": broken}
    bad = fleet.launch(fleet.plan("bad", candidates=both, after_freeze={"evaluate": []}))

    document = fleet.until(lambda seen: {each["campaign_id"]: each["stage"] for each in seen["campaigns"]} == {good: "evaluated", bad: "failed"},
                           "one campaign evaluated, the other one failed")
    stages = {each["campaign_id"]: each for each in document["campaigns"]}
    assert "the pilot of broken failed" in stages[bad]["detail"]
    runs = fleet.runs()
    evidence = json.loads((fleet.run_dir(runs["one"]) / "evidence/pilot.json").read_text())
    assert evidence["passed"] and evidence["first_predictions"]["maximum_difference"] == 0.0
    assert (runs["one"]["exactness"]["verdict"], runs["one"]["exactness"]["required"]) == ("exact", True), runs["one"]["exactness"]
    assert json.loads((fleet.run_dir(runs["one"]) / "evidence/exactness.json").read_text())["from"]["step"] == 16
    assert sorted(path.name for path in (fleet.run_dir(runs["one"]) / "attempts").iterdir()) == ["0001"], "fresh processes, one attempt"
    assert runs["broken"]["state"] == "failed"
    fleet.until(lambda seen: all(run["state"] == "stopped" for run in seen["runs"] if run["candidate"] == "sound"), "the sound one stops as asked")
    assert json.loads((fleet.run_dir(runs["sound"]) / "task.json").read_text())["sampler"] == "zxell"
    moved = [event for event in json.loads(fleet("events", good, "--json").stdout)["events"] if event["kind"] == "campaign_moved"]
    assert [event["body"]["to"] for event in moved][:3] == ["staging", "pilot", "training"]
    result = json.loads((fleet.state / "campaigns" / good / "results/test.json").read_text())
    assert set(result["models"]["selected"]["families"]) == {"all"}, "documents of a corpus have no language"
