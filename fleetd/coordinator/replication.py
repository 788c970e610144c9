"""Copies of a run's work in the campaign's store, so that a silent host can't hold the campaign hostage.

    store/runs/<run-id>/predictions/validation/step-000000128.jsonl + .meta.json, log.jsonl, trace.jsonl, lineage.jsonl
    store/checkpoints/<digest>/

A copy is verified before it gets its name; what is there already and verifies is not fetched again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleetd import faults
from fleetd.coordinator.couriers import READ_BYTES_MAX, Courier
from fleetd.coordinator.predictions import META_BYTES_MAX, ROWS_BYTES_MAX, Meta, parse_meta, read_bytes
from fleetd.coordinator.trees import (
    MANIFEST_BYTES_MAX,
    TEMPORARY_PREFIX,
    TreeFault,
    discard_tree,
    locked,
    read_manifest,
    tree_fault,
    write_manifest,
)
from fleetd.files import sync_folder
from fleetd.paths import CampaignPaths
from policies.errors import CheckpointDamaged, DataDamaged, NoRoom, NotFound
from policies.facts import Split, step_name
from policies.manifest import MANIFEST_NAME, directory_digest

GROWING_FILES = ("log.jsonl", "trace.jsonl", "lineage.jsonl")
GROWING_BYTES_MAX = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedPredictions:
    """A verified pair in the store. `sha256` is that of the rows, `value` what the trainer claims."""

    step: int | None
    sha256: str
    value: float
    checkpoint_digest: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedCheckpoint:
    step: int
    digest: str
    bytes: int
    folder: Path


def replicate_predictions(courier: Courier, paths: CampaignPaths, run_id: str, step: int, sha256: str | None = None) -> CopiedPredictions:
    """The validation predictions of one step, verified, in the store. With `sha256`, exactly the rows that the host told of: an
    older copy gives way to them. NotFound when the host has none, DataDamaged when they don't verify."""
    return copy_predictions(courier, paths, run_id, Split.VALIDATION.value, step_name(step), sha256)


def copy_predictions(
    courier: Courier, paths: CampaignPaths, run_id: str, split: str, name: str, sha256: str | None = None,
) -> CopiedPredictions:
    """`predictions/<split>/NAME.jsonl` and its meta, verified, in the store."""
    with locked(paths.store_run(run_id) / ".predictions.lock"):
        stored = _stored_pair(paths.store_run(run_id) / "predictions" / split, name)
        if stored is None or sha256 not in (None, stored.sha256):
            stored = _fetch_pair(courier, paths, run_id, split, name, sha256)
    return CopiedPredictions(step=stored.step, sha256=stored.sha256, value=stored.claim, checkpoint_digest=stored.checkpoint_digest)


def replicate_checkpoint(courier: Courier, paths: CampaignPaths, run_id: str, step: int, digest: str | None = None) -> CopiedCheckpoint:
    """The checkpoint of one step, every byte verified against its manifest, in the store under its digest. NotFound when the host no
    longer has it, CheckpointDamaged when it does not verify or is another than `digest`."""
    with locked(paths.store_run(run_id) / ".checkpoints.lock"):
        if digest is None or not (paths.store_checkpoints / digest).exists():
            digest = _fetch_checkpoint(courier, paths, run_id, step, digest)
    folder = paths.store_checkpoints / digest
    fault = stored_checkpoint_fault(paths, digest)
    if fault is not None:
        raise _checkpoint_damaged(str(folder), fault)
    return CopiedCheckpoint(step=step, digest=digest, bytes=sum(entry.bytes for entry in read_manifest(folder)), folder=folder)


def replicate_logs(courier: Courier, paths: CampaignPaths, run_id: str) -> None:
    """Bring the run's growing records up to date, for the report. A file that was replaced by a shorter one is left as it is."""
    folder = paths.store_run(run_id)
    with locked(folder / ".logs.lock"):
        for name in GROWING_FILES:
            _follow(courier, run_id, name, folder / name)


def stored_checkpoint_fault(paths: CampaignPaths, digest: str) -> str | None:
    """What is wrong with the store's copy of a checkpoint, every byte read; None when it is whole."""
    fault = tree_fault(paths.store_checkpoints / digest, digest)
    return None if fault is None else str(fault)


def prune_checkpoints(paths: CampaignPaths, keep: Iterable[str]) -> tuple[str, ...]:
    """Remove store copies that nobody needs any more; the digests removed. After the freeze nothing is pruned."""
    if paths.frozen.exists() or not paths.store_checkpoints.is_dir():
        return ()
    kept, removed = set(keep), []
    for folder in sorted(paths.store_checkpoints.iterdir()):
        if folder.name not in kept and not folder.name.startswith("."):
            trash = folder.with_name(f"{TEMPORARY_PREFIX}pruned-{folder.name}")
            faults.after("prune")
            os.rename(folder, trash)  # first out of sight, so that half a directory never carries a digest
            faults.after("prune renamed")
            discard_tree(trash)
            removed.append(folder.name)
    return tuple(removed)


def _stored_pair(folder: Path, name: str) -> Meta | None:
    """The meta of a pair in the store, None when it is not complete. A complete pair that does not verify is damage, not absence."""
    data, rows = read_bytes(folder / f"{name}.meta.json", META_BYTES_MAX), read_bytes(folder / f"{name}.jsonl", ROWS_BYTES_MAX)
    if data is None or rows is None:
        return None
    try:
        meta, found = parse_meta(data), hashlib.sha256(rows).hexdigest()
    except ValueError as fault:
        raise _store_damaged(folder / f"{name}.meta.json", str(fault)) from fault
    if found != meta.sha256:
        raise _store_damaged(folder / f"{name}.jsonl", f"its SHA-256 is {found}, its meta says {meta.sha256}")
    return meta


def _fetch_pair(courier: Courier, paths: CampaignPaths, run_id: str, split: str, name: str, sha256: str | None) -> Meta:
    """Bring one pair into the store; its meta. Called with the run's lock held."""
    folder, source = paths.store_run(run_id) / "predictions" / split, f"predictions/{split}"
    where = f"host {courier.host}, run {run_id}, {source}/{name}.jsonl"
    temporary = folder / f"{TEMPORARY_PREFIX}{name}"
    os.makedirs(folder, exist_ok=True)
    discard_tree(temporary)
    try:
        entries = tuple(entry for file in (f"{name}.jsonl", f"{name}.meta.json") for entry in courier.look(run_id, f"{source}/{file}"))
        sizes = {entry.path: entry.bytes for entry in entries}
        if sizes.keys() != {f"{name}.jsonl", f"{name}.meta.json"}:
            what, fix = "rows and meta are not both there", "wait until they are written; it is tried again"
            raise NotFound("there are no such predictions", where=where, what=what, fix=fix)
        if max(sizes.values()) > ROWS_BYTES_MAX:
            what = f"{max(sizes.values())} bytes are announced, {ROWS_BYTES_MAX} are the limit"
            raise DataDamaged("predictions can't be used", where=where, what=what, fix="let the run validate again, or select without it")
        courier.fetch_tree(run_id, source, temporary, entries)
        meta = _verified_pair(where, temporary, name, sha256)
        # The meta makes a pair complete: it goes first when it is replaced and comes last when it is written.
        (folder / f"{name}.meta.json").unlink(missing_ok=True)
        os.replace(temporary / f"{name}.jsonl", folder / f"{name}.jsonl")
        sync_folder(folder)
        faults.after("rows in place")
        os.replace(temporary / f"{name}.meta.json", folder / f"{name}.meta.json")
        sync_folder(folder)
    except TreeFault as fault:
        title, fix = "predictions changed while they were copied", "nothing: it is tried again"
        raise DataDamaged(title, where=str(fault.path), what=fault.what, fix=fix) from fault
    except OSError as fault:
        raise _no_place(folder / name, fault) from fault
    finally:
        discard_tree(temporary)
    return meta


def _verified_pair(where: str, folder: Path, name: str, sha256: str | None) -> Meta:
    data, rows = read_bytes(folder / f"{name}.meta.json", META_BYTES_MAX), read_bytes(folder / f"{name}.jsonl", ROWS_BYTES_MAX)
    fix = "let the run validate again, or select without it"
    if data is None or rows is None:
        raise DataDamaged("predictions can't be used", where=where, what=f"rows over {ROWS_BYTES_MAX} or meta over {META_BYTES_MAX} bytes", fix=fix)
    try:
        meta = parse_meta(data)
    except ValueError as fault:
        raise DataDamaged("predictions can't be used", where=where, what=f"its meta is damaged: {fault}", fix=fix) from fault
    found = hashlib.sha256(rows).hexdigest()
    for said, by in ((meta.sha256, "its meta says"), (sha256, "the host told of")):
        if said is not None and said != found:
            raise DataDamaged("predictions can't be used", where=where, what=f"its SHA-256 is {found}, {by} {said}", fix=fix)
    return meta


def _fetch_checkpoint(courier: Courier, paths: CampaignPaths, run_id: str, step: int, digest: str | None) -> str:
    """Bring the checkpoint of one step into the store; its digest. Called with the run's lock held."""
    source = f"checkpoints/{step_name(step)}"
    where = f"host {courier.host}, run {run_id}, {source}"
    os.makedirs(paths.store_checkpoints, exist_ok=True)
    temporary = paths.store_checkpoints / f"{TEMPORARY_PREFIX}{run_id}-{step}"
    manifest = temporary.with_name(f"{temporary.name}-manifest")
    discard_tree(temporary)
    discard_tree(manifest)
    try:
        _fetch_manifest(courier, run_id, source, where, manifest)
        entries = read_manifest(manifest)
        found = directory_digest(entries)
        if digest is not None and found != digest:
            raise _checkpoint_damaged(where, f"its manifest is of {found}, the host told of {digest}")
        if not (paths.store_checkpoints / found).exists():
            courier.fetch_tree(run_id, source, temporary, entries)
            write_manifest(temporary, entries, source=manifest)
            _put_in_place(temporary, paths.store_checkpoints / found)
    except TreeFault as fault:
        raise _checkpoint_damaged(f"{where}, {fault.path.name}", fault.what) from fault
    except OSError as fault:
        raise _no_place(paths.store_checkpoints, fault) from fault
    finally:
        discard_tree(temporary)
        discard_tree(manifest)
    return found


def _fetch_manifest(courier: Courier, run_id: str, source: str, where: str, destination: Path) -> None:
    entries = courier.look(run_id, f"{source}/{MANIFEST_NAME}")
    if not entries:
        what, fix = "it has no manifest there", "use another one: fleetd status lists them"
        raise NotFound("the host no longer has that checkpoint", where=where, what=what, fix=fix)
    if [entry.path for entry in entries] != [MANIFEST_NAME] or entries[0].bytes > MANIFEST_BYTES_MAX:
        raise _checkpoint_damaged(where, f"asked for its {MANIFEST_NAME}, the host lists {entries[0].path!r} of {entries[0].bytes} bytes")
    courier.fetch_tree(run_id, source, destination, entries)


def _put_in_place(temporary: Path, final: Path) -> None:
    try:
        faults.before("checkpoint in place")
        os.rename(temporary, final)
    except OSError:
        if not final.exists():  # else another run brought the same digest first
            raise
    sync_folder(final.parent)


def _follow(courier: Courier, run_id: str, name: str, copy: Path) -> None:
    """Append to `copy` what the run's file has beyond it."""
    with open(copy, "ab") as file:
        while file.tell() < GROWING_BYTES_MAX:
            data = courier.read_tail(run_id, name, file.tell(), READ_BYTES_MAX)
            if not data:
                break
            faults.before(f"{name} copy")
            file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _checkpoint_damaged(where: str, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("a checkpoint does not verify", where=where, what=what, fix="keep it for inspection; the selection goes on without it")


def _store_damaged(path: Path, what: str) -> DataDamaged:
    fix = "the candidate is refused; keep the file and look who wrote it"
    return DataDamaged("the store's copy of predictions was changed", where=str(path), what=what, fix=fix)


def _no_place(path: Path, fault: OSError) -> NoRoom:
    what = f"{fault}; {shutil.disk_usage(next(each for each in path.parents if each.exists())).free} bytes are free"
    return NoRoom("can't keep a copy", where=str(path), what=what, fix="free some space on that disk; it is tried again")
