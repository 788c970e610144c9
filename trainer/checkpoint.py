"""Checkpoint directories: written whole, verified before they are believed, pruned only when verified.

    checkpoints/step-000000128/     model.safetensors, optimizer.safetensors, rng.safetensors, trainer.json, config.json, ...
                                    manifest.json (written last: size and SHA-256 of every other file)
    checkpoints/.tmp-...-PID/       one being written; swept when its process is gone
    checkpoints/.trash-.../         one being deleted
    checkpoints/refused-.../        one that did not verify and stood in the way of a new save: kept for a person

A directory appears under its name by a rename that replaces nothing, after it and its files are synced. The truth about what
can be resumed is this scan and nothing else. No torch here: an asked stop during start-up must be answered in time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from policies.errors import CheckpointDamaged, ResumeMismatch
from policies.facts import step_name, step_of
from policies.manifest import MANIFEST_NAME, FileEntry, directory_digest, manifest_body, manifest_entries
from trainer.files import (
    Buffer,
    JsonFault,
    dumps,
    entry_of,
    file_entry,
    forget_cached,
    has_ended,
    read_json,
    remove_tree,
    rename_without_replacing,
    sync_file,
    sync_folder,
    write_synced,
)

RESUME_FILES = ("config.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json")
CHECKPOINTS = "checkpoints"
TEMPORARY, TRASH, REFUSED = ".tmp-", ".trash-", "refused-"
REFUSED_MAX = 1000


class Held:
    """The bytes of a file that memory holds: made when they are first asked for, written and hashed from there."""

    def __init__(self, make: Callable[[], Sequence[Buffer]]) -> None:
        self._make = make

    @cached_property
    def pieces(self) -> Sequence[Buffer]:
        return self._make()

    def __call__(self, path: Path) -> None:
        write_synced(path, *self.pieces)


Content = bytes | Held | Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A directory that verified: all its bytes are what its manifest says."""

    path: Path
    step: int
    digest: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """The newest checkpoint that verifies, and each newer directory that does not, with the reason."""

    newest: Checkpoint | None
    skipped: tuple[tuple[Path, str], ...]


class SaveAbandoned(Exception):
    """The save was given up on request; nothing of it is left."""


def verify(path: Path, *, contents: bool = True) -> Checkpoint:
    """The checkpoint in a directory. CheckpointDamaged names the file and what is wrong; `contents=False` looks at sizes only."""
    try:
        entries = manifest_entries(read_json(path / MANIFEST_NAME))
    except FileNotFoundError as fault:
        raise _damaged(path / MANIFEST_NAME, "it is missing, so the directory was never complete") from fault
    except (OSError, JsonFault, ValueError, AttributeError) as fault:
        raise _damaged(path / MANIFEST_NAME, str(fault)) from fault
    present = {name.name for name in path.iterdir()} - {MANIFEST_NAME}
    for entry in entries:
        if entry.path not in present:
            raise _damaged(path / entry.path, "it is missing, the manifest lists it")
        _verify_file(path, entry, contents)
    listed = {entry.path for entry in entries}
    if present != listed:
        raise _damaged(path / min(present - listed), "the manifest does not list it")
    step = step_of(path.name)
    return Checkpoint(path=path, step=-1 if step is None else step, digest=directory_digest(entries), bytes=sum(entry.bytes for entry in entries))


def newest_verified(folder: Path) -> Scan:
    """The newest checkpoint of a run that can be resumed, newest step first; why newer ones were passed over."""
    skipped: list[tuple[Path, str]] = []
    for step in sorted(steps_in(folder), reverse=True):
        path = folder / step_name(step)
        try:
            found = verify(path)
            missing = [name for name in RESUME_FILES if not (path / name).is_file()]
            if missing:
                raise _damaged(path, f"{', '.join(missing)} missing: it can't be resumed")
            return Scan(newest=found, skipped=tuple(skipped))
        except CheckpointDamaged as damage:
            skipped.append((path, f"{Path(damage.where).name}: {damage.what}"))
    return Scan(newest=None, skipped=tuple(skipped))


def steps_in(folder: Path) -> list[int]:
    """The steps that have a directory of that name, in ascending order, verified or not."""
    if not folder.is_dir():
        return []
    return sorted(step for path in folder.iterdir() if (step := step_of(path.name)) is not None and path.is_dir() and not path.is_symlink())


def write_checkpoint(folder: Path, step: int, contents: Mapping[str, Content], *, abandon: Callable[[], bool] = lambda: False) -> Checkpoint:
    """Write a checkpoint durably under its final name. OSError (a full disk) and SaveAbandoned leave nothing behind.

    When a verified one of the same digest is there already, that is the checkpoint; another one is ResumeMismatch.
    """
    final, temporary = folder / step_name(step), folder / f"{TEMPORARY}{step_name(step)}-{os.getpid()}"
    try:
        temporary.mkdir()
        entries = _write_files(temporary, contents, abandon)
        saved = Checkpoint(path=final, step=step, digest=directory_digest(entries), bytes=sum(entry.bytes for entry in entries))
        if final.exists() and _stands_already(final, saved.digest):
            remove_tree(temporary)
            sync_folder(folder)  # who put it there may have died before doing this
            return saved
        rename_without_replacing(temporary, final)
        sync_folder(folder)
    except BaseException:
        remove_tree(temporary, quietly=True)
        raise
    return saved


def read_back(saved: Checkpoint) -> None:
    """Verify a checkpoint from the disk, past the kernel's copy where it lets us. OSError when it is not what was written; it is
    set aside then, so that nobody takes it for the newest."""
    try:
        for name in os.listdir(saved.path):
            forget_cached(saved.path / name)
        found = verify(saved.path)
        if found.digest != saved.digest:
            raise _damaged(saved.path, f"its digest is {found.digest}, {saved.digest} was written")
    except CheckpointDamaged as damage:
        kept = set_aside(saved.path)
        raise OSError(errno.EIO, f"what was written does not read back ({damage.what}); kept as {kept.name}", damage.where) from damage


def prune(folder: Path, *, keep: int, protected: frozenset[int]) -> tuple[int, ...]:
    """Delete complete checkpoints that are neither among the newest `keep`, nor step 0, nor protected. Returns their steps.

    Call it only right after a save that verified: the newest is then known to be good.
    """
    steps = steps_in(folder)
    deleted = []
    for step in steps[:-keep] if keep < len(steps) else []:
        if step == 0 or step in protected:
            continue
        path = folder / step_name(step)
        try:
            verify(path, contents=False)
        except CheckpointDamaged:
            continue  # a damaged one is evidence; a person deletes it
        trash = folder / f"{TRASH}{path.name}"
        os.rename(path, trash)
        sync_folder(folder)  # or a power cut could leave it half empty under its own name
        remove_tree(trash, quietly=True)
        deleted.append(step)
    return tuple(deleted)


def sweep(folder: Path) -> tuple[str, ...]:
    """Remove what a dead process left: half-written and half-deleted directories. Returns their names."""
    swept = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(TRASH) or (path.name.startswith(TEMPORARY) and not _writer_lives(path.name)):
            remove_tree(path, quietly=True)
            swept.append(path.name)
    return tuple(swept)


def set_aside(path: Path) -> Path:
    """Move a directory that does not verify out of the way of the next save, its bytes kept."""
    for number in range(1, REFUSED_MAX):
        target = path.parent / f"{REFUSED}{path.name}-{number}"
        if not os.path.lexists(target):
            os.rename(path, target)
            sync_folder(path.parent)
            return target
    raise _damaged(path, f"{REFUSED_MAX} refused copies of it lie here already")


def _write_files(temporary: Path, contents: Mapping[str, Content], abandon: Callable[[], bool]) -> list[FileEntry]:
    """Write every file, and hash each from memory while it is written: SHA-256 is slower than many disks."""
    pending: list[Future[FileEntry]] = []
    with ThreadPoolExecutor(1, "digests") as hashing:
        for name, content in contents.items():
            if abandon():
                raise SaveAbandoned
            if isinstance(content, (bytes, Held)):
                pieces = [content] if isinstance(content, bytes) else content.pieces
                pending.append(hashing.submit(entry_of, name, pieces))
                write_synced(temporary / name, *pieces)
            else:
                content(temporary / name)
                os.chmod(temporary / name, 0o644)  # some writers make private files; an agent of another user has to read them
                sync_file(temporary / name)
                pending.append(hashing.submit(file_entry, temporary, name))
        entries = [entry.result() for entry in pending]
    write_synced(temporary / MANIFEST_NAME, dumps(manifest_body(entries)))
    sync_folder(temporary)
    return entries


def _stands_already(final: Path, digest: str) -> bool:
    """Whether the same checkpoint is there. A damaged one is set aside; another one is ResumeMismatch."""
    try:
        there = verify(final)
    except CheckpointDamaged:
        set_aside(final)
        return False
    if there.digest != digest:
        raise ResumeMismatch("a different checkpoint of this step exists", where=str(final),
                             what=f"its digest is {there.digest}, this training gives {digest}", fix="start a new run, or move the other one away")
    return True


def _verify_file(path: Path, entry: FileEntry, contents: bool) -> None:
    try:
        status = os.stat(path / entry.path, follow_symlinks=False)
        if status.st_size != entry.bytes or (path / entry.path).is_symlink():
            raise _damaged(path / entry.path, f"it has {status.st_size} bytes, the manifest says {entry.bytes}")
        if contents and (found := file_entry(path, entry.path).sha256) != entry.sha256:
            raise _damaged(path / entry.path, f"its sha256 is {found}, the manifest says {entry.sha256}")
    except OSError as fault:
        raise _damaged(path / entry.path, str(fault)) from fault


def _writer_lives(name: str) -> bool:
    """Whether the process that a temporary directory is named after may still be writing. Our own pid is only now starting."""
    pid = name.rpartition("-")[2]
    return pid.isdigit() and int(pid) != os.getpid() and not has_ended(pid)


def _damaged(path: Path, what: str) -> CheckpointDamaged:
    return CheckpointDamaged("the checkpoint can't be used", where=str(path), what=what,
                             fix="resume from an older one: the trainer takes the newest that verifies")
