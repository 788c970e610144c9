"""Checkpoints as a host sees them: what they claim, whether that is true, and which one the next attempt starts from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from fleetd.files import file_entry, read_record
from fleetd.paths import RunPaths
from fleetd.wire import WireError
from policies.errors import CheckpointDamaged
from policies.facts import step_of
from policies.manifest import MANIFEST_NAME, FileEntry, manifest_entries

RESUME_TRIES_MAX = 20
"""So many newest checkpoints are tried before a run starts from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointClaim:
    """What a checkpoint's manifest says of itself; `verify_checkpoint` proves it."""

    path: Path
    step: int
    digest: str
    bytes: int
    at: datetime
    """When the manifest was written (its mtime)."""


def newest_checkpoints(paths: RunPaths) -> tuple[CheckpointClaim, ...]:
    """Complete-looking checkpoint directories (a readable manifest), newest step first. Nothing is hashed."""
    claims = []
    for folder in _folders(paths.checkpoints):
        try:
            claims.append(_claim(folder)[0])
        except CheckpointDamaged:
            continue  # `choose_resume` says why, once, when it matters
    return tuple(claims)


def verify_checkpoint(path: Path) -> CheckpointClaim:
    """Prove a checkpoint: every file of its manifest with its size and SHA-256, and nothing missing. CheckpointDamaged otherwise."""
    claim, entries = _claim(path)
    for entry in entries:
        try:
            found = file_entry(path, entry.path)
        except OSError as fault:
            raise _damaged(path / entry.path, fault.strerror or str(fault)) from fault
        if found != entry:
            what = f"{found.bytes} bytes with digest {found.sha256[:12]}…, the manifest says {entry.bytes} with {entry.sha256[:12]}…"
            raise _damaged(path / entry.path, what)
    return claim


def choose_resume(paths: RunPaths) -> tuple[CheckpointClaim | None, tuple[str, ...]]:
    """The newest checkpoint that verifies, and why newer ones were refused. The shim calls this before each start. A run that has none of
    its own yet begins with the one of the run that it goes on with, where there is one."""
    refused: list[str] = []
    for folder in (*_folders(paths.checkpoints)[:RESUME_TRIES_MAX], *_folders(paths.seed)):
        try:
            return verify_checkpoint(folder), tuple(refused)
        except CheckpointDamaged as fault:
            refused.append(f"{folder.name}: {fault.what}")
    return None, tuple(refused)


def _folders(place: Path) -> list[Path]:
    """Checkpoint directories by step, newest first; temporary and foreign names have no step."""
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return []
    steps = sorted(((step, name) for name in names if (step := step_of(name)) is not None), reverse=True)
    return [place / name for _, name in steps]


def _claim(folder: Path) -> tuple[CheckpointClaim, tuple[FileEntry, ...]]:
    step, manifest = step_of(folder.name), folder / MANIFEST_NAME
    try:
        body = read_record(manifest)
        entries = manifest_entries(body if isinstance(body, dict) else {})
        at = datetime.fromtimestamp(manifest.stat().st_mtime, timezone.utc)
    except FileNotFoundError as fault:
        raise _damaged(manifest, "it has no manifest: it was never completed") from fault
    except (OSError, WireError, ValueError) as fault:
        raise _damaged(manifest, str(fault)) from fault
    if step is None:
        raise _damaged(folder, "its name carries no step")
    size = sum(entry.bytes for entry in entries)
    return CheckpointClaim(path=folder, step=step, digest=str(body["digest"]), bytes=size, at=at), entries


def _damaged(where: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("a checkpoint does not verify", where=str(where), what=what, fix="the newest one that verifies is used instead")
