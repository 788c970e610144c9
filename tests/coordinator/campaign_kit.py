"""A small real campaign on disk: token shards, a registered plan, a host root with run directories as a trainer leaves them.

The shards are made here because they have to be damaged in many ways; the prediction files are written by the trainer's own writer.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fleetd.campaign import CandidatePlan, DataRole, HostPlan, Plan, SelectionTerms
from fleetd.coordinator.couriers import Courier, LocalCourier
from fleetd.coordinator.ledger import Act
from fleetd.coordinator.pipeline import select_campaign
from fleetd.coordinator.registration import read_registered_validation, register_campaign
from fleetd.coordinator.shards import RegisteredRow
from fleetd.fleet import Run, Saved, Validated
from fleetd.model import Caps, Owner, RunSpec
from fleetd.paths import CampaignPaths, HostPaths, RunPaths
from policies.facts import RunKind, RunState, Split, step_name
from policies.manifest import FileEntry, directory_digest, manifest_body
from policies.token_nll import ScoredRow
from trainer.predictions import write_predictions

NOW = datetime(2026, 9, 16, 18, 59, 10, tzinfo=timezone.utc)
ACT = Act(actor="user:tester", at=NOW, code_digest="c0de")
HOST = "gx10"
CAMPAIGN = "20260916T185910Z-small"
GONE = 9


def write_shards(folder: Path, counts: dict[str, int], *, shards: int = 1) -> None:
    """Shards of `counts` documents a split, in the layout of a real corpus, each document 5 to 40 tokens in one of four languages."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    listed = []
    for split, docs in counts.items():
        for number in range(shards):
            lengths, codes = random.integers(5, 40, docs), np.arange(docs, dtype=np.uint8) % 4
            texts = [np.append(random.integers(3, 500, length), 2) for length in lengths]
            tokens = np.concatenate(texts).astype("<u2")
            name = f"{split}_{number:03d}.bin"
            (folder / name).write_bytes(tokens.tobytes())
            (folder / f"{split}_{number:03d}.langs.u8").write_bytes(codes.tobytes())
            langs = {language: int(sum(len(text) for text, code in zip(texts, codes, strict=True) if code == index))
                     for index, language in enumerate(("en", "de", "fr", "ja"))}
            sha256 = hashlib.sha256(tokens.tobytes()).hexdigest()
            side = {"name": name, "split": split, "tokens": len(tokens), "docs": docs, "sha256": sha256, "langs": langs}
            (folder / f"{name}.json").write_text(json.dumps(side))
            listed.append(side)
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    (folder / "shards_index.json").write_text(json.dumps({"tokenizer": "tokenizer.model", "dtype": "uint16", "seed": 7, "shards": listed}))


def make_plan(directory: Path, *, roles: tuple[DataRole, ...] | None = None) -> Plan:
    shard_splits = {Split.TRAIN: "train", Split.VALIDATION: "val", Split.TEST: "test", Split.HOLDOUT: "hold"}
    default = tuple(
        DataRole(split=split, path="data", shard_split=name, tokens_per_document_max=None if split is Split.TRAIN else 16)
        for split, name in shard_splits.items()
    )
    candidate = CandidatePlan(name="a", host="any", memory_host_bytes=1, memory_accelerator_bytes=1)
    return Plan(
        name="small", plan_sha256="0" * 64, directory=str(directory), deadline_at=None, deadline_seconds=60.0,
        hosts=(HostPlan(name=HOST, root=str(directory / "root")),), data=default if roles is None else roles, candidates=(candidate,),
    )


@dataclass
class SmallCampaign:
    """A registered campaign whose runs are written as they would be after training."""

    base: Path
    paths: CampaignPaths
    plan: Plan
    digests: dict[str, str]
    courier: LocalCourier
    runs: list[Run] = field(default_factory=list)

    @property
    def couriers(self) -> dict[str, Courier]:
        return {HOST: self.courier}

    def run_paths(self, run: Run) -> RunPaths:
        return HostPaths(self.base / "root").run(run.run_id)

    def rows(self, value: float) -> list[ScoredRow]:
        """The registered rows, each `value` nats a token, a little different by family."""
        registered = read_registered_validation(self.paths)
        assert registered is not None
        return scored_rows(registered.rows, value)

    def add_run(self, candidate: str, values: list[float], *, contract: bool = True) -> Run:
        """A finished run with a checkpoint and predictions every 100 steps, one of each value, from step 0 on."""
        run_id = f"{CAMPAIGN}-{candidate}"
        saved, validated = [], []
        for step, value in ((100 * number, value) for number, value in enumerate(values)):
            digest = self.write_checkpoint(run_id, step)
            sha256 = self.write_validation(run_id, step, digest, value)
            saved.append(Saved(step=step, digest=digest, bytes=10))
            validated.append(Validated(step=step, sha256=sha256, value=value, rows=12, seconds=0.1))
        run = Run(
            run_id=run_id, campaign_id=CAMPAIGN, candidate=candidate, kind=RunKind.TRAIN, host=HOST, state=RunState.FINISHED, since=NOW, added_at=NOW,
            spec=make_spec(run_id, candidate, contract=contract), saved=tuple(saved), validated=tuple(validated),
        )
        self.runs.append(run)
        return run

    def write_checkpoint(self, run_id: str, step: int) -> str:
        return write_checkpoint(HostPaths(self.base / "root").run(run_id).checkpoints / step_name(step), f"{run_id} {step}".encode())

    def write_validation(self, run_id: str, step: int, checkpoint_digest: str, value: float, **changed: object) -> str:
        described = {
            "split": "validation", "step": step, "dataset_digest": self.digests["validation"], "checkpoint_digest": checkpoint_digest,
            "numeric_mode": "fp32 cpu", **changed,
        }
        folder = HostPaths(self.base / "root").run(run_id).predictions("validation")
        return str(write_predictions(folder, step_name(step), self.rows(value), **described)["sha256"])

    def select(self, couriers: dict[str, Courier] | None = None, minimum_improvement: float = 0.001) -> dict:
        terms = SelectionTerms(minimum_improvement=minimum_improvement)
        return select_campaign(self.paths, CAMPAIGN, terms, tuple(self.runs), self.couriers if couriers is None else couriers, ACT)


def scored_rows(rows: tuple[RegisteredRow, ...], value: float) -> list[ScoredRow]:
    offsets = {"en": -0.2, "de": -0.1, "fr": 0.1, "ja": 0.2}
    return [ScoredRow(id=row.id, family=row.family, tokens=row.tokens, nll=row.tokens * (value + offsets[row.family])) for row in rows]


def write_checkpoint(folder: Path, weights: bytes) -> str:
    """A complete checkpoint directory with these weights; its digest."""
    folder.mkdir(parents=True)
    files = {"model.safetensors": weights, "config.json": b"{}", "trainer.json": b"{}"}
    entries = []
    for name, data in files.items():
        (folder / name).write_bytes(data)
        entries.append(FileEntry(path=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
    (folder / "manifest.json").write_text(json.dumps(manifest_body(entries, step=folder.name)))
    return directory_digest(entries)


def make_spec(run_id: str, candidate: str, *, contract: bool) -> RunSpec:
    return RunSpec(
        run_id=run_id, campaign_id=CAMPAIGN, candidate=candidate, kind=RunKind.TRAIN, owner=Owner(coordinator_id="c", generation=1), created_at=NOW,
        argv=("true",), environment={}, contract=contract, release_digest="r", caps=Caps(host_bytes=1, accelerator_bytes=1, floor_bytes=1),
        deadline=None,
    )


def small_campaign(base: Path) -> SmallCampaign:
    """A campaign registered below `base`: a copy of one that is registered once, since nothing in it names a place."""
    digests = _template()
    shutil.copytree(_TEMPLATE / "data", base / "data")
    shutil.copytree(_TEMPLATE / "campaigns", base / "campaigns")
    paths = CampaignPaths(base / "campaigns" / CAMPAIGN)
    return SmallCampaign(base=base, paths=paths, plan=make_plan(base), digests=dict(digests), courier=LocalCourier(HOST, base / "root"))


_TEMPLATE = Path(tempfile.mkdtemp(prefix="fleetd-small-campaign-"))
atexit.register(shutil.rmtree, _TEMPLATE, ignore_errors=True)


@cache
def _template() -> dict[str, str]:
    write_shards(_TEMPLATE / "data", {"train": 8, "val": 12, "test": 6, "hold": 5})
    paths = CampaignPaths(_TEMPLATE / "campaigns" / CAMPAIGN)
    paths.root.mkdir(parents=True)
    return register_campaign(paths, make_plan(_TEMPLATE), ACT)


def later(seconds: float) -> Act:
    return Act(actor=ACT.actor, at=NOW + timedelta(seconds=seconds), code_digest=ACT.code_digest)


def flip_byte(path: Path, offset: int | None = None) -> None:
    """Change one byte of a file: the middle one, or the one at `offset`."""
    data = bytearray(path.read_bytes())
    place = len(data) // 2 if offset is None else offset
    data[place] = data[place] ^ 1
    path.write_bytes(data)


def dies_at(change: int, job: Callable[[], object]) -> bool:
    """Run `job` in a process of its own that is gone, without any cleaning up, at its n-th change on the disk. Whether it came to that."""
    child = os.fork()
    if child == 0:
        changes = itertools.count()
        for name in ("link", "fsync", "write", "ftruncate", "replace", "rename", "unlink", "mkdir"):
            setattr(os, name, _tripping(getattr(os, name), changes, change))
        try:
            job()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == GONE


def _tripping(original: Callable[..., object], changes: Iterator[int], last: int) -> Callable[..., object]:
    def step(*arguments: Any, **named: Any) -> object:
        if next(changes) == last:
            os._exit(GONE)
        return original(*arguments, **named)
    return step


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but locks and temporaries."""
    found = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {name: path.read_bytes() for name, path in sorted(names.items()) if not any(part.startswith(".") for part in name.split("/"))}
