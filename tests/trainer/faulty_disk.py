"""A disk that fails at a chosen system call, dies there, or loses power: `os` as the trainer sees it, watched and disturbed.

    Disk().watching()              records every call of a save as an operation on a model of the disk
    Disk(fault=...)                the n-th call raises, falls short, or is the last one of this process
    crash_image(operations, ...)   the directory that a machine has after the power went: what was not synced may be missing

Run as a program it is a process that saves until it is killed: `python faulty_disk.py FOLDER FIRST LAST before|after`.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import files

WATCHED = ("mkdir", "open", "write", "fsync", "close", "rename", "replace", "unlink", "rmdir")
REAL: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in WATCHED}
REAL_RENAME = files._rename_unless_there


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What one call did: `path` names a file or folder below the root, `data` is what a write took."""

    name: str
    path: str
    target: str = ""
    data: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """At the call number `at`, counted from 1: an `error` number, `short` (half the bytes, then no room), or a death."""

    at: int
    kind: str
    error: int = errno.EIO


@dataclass
class Disk:
    """Watches the calls below `root`; everything else passes."""

    root: Path
    fault: Fault | None = None
    operations: list[Operation] = field(default_factory=list)
    calls: int = 0
    struck: str | None = None
    """Which call the fault hit."""
    _paths: dict[int, str] = field(default_factory=dict)
    _is_full: bool = False

    @contextmanager
    def watching(self) -> Iterator[Disk]:
        for name in WATCHED:
            setattr(os, name, getattr(self, f"_{name}"))
        files._rename_unless_there = self._rename_unless_there
        try:
            yield self
        finally:
            for name, real in REAL.items():
                setattr(os, name, real)
            files._rename_unless_there = REAL_RENAME

    def _below(self, path: Any) -> str | None:
        text = os.fspath(path)
        return os.path.relpath(text, self.root) if isinstance(text, str) and text.startswith(str(self.root)) else None

    def _call(self, name: str, real: Callable[[], Any], operation: Operation | None) -> Any:
        self.calls += 1
        is_struck = self.fault is not None and self.calls == self.fault.at
        if is_struck:
            self.struck = name
            assert self.fault is not None
            if self.fault.kind == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault.kind == "error" and name != "close":
                raise OSError(self.fault.error, os.strerror(self.fault.error))
        result = real()
        if operation is not None:
            self.operations.append(operation)
        if is_struck and self.fault is not None and self.fault.kind == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._below(path)
        if place is None:
            return REAL["mkdir"](path, mode)
        return self._call("mkdir", lambda: REAL["mkdir"](path, mode), Operation(name="mkdir", path=place))

    def _open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        place = None if isinstance(path, int) else self._below(path)
        if place is None:
            return REAL["open"](path, flags, mode, dir_fd=dir_fd)
        made = Operation(name="create", path=place) if flags & os.O_CREAT else None
        descriptor: int = self._call("open", lambda: REAL["open"](path, flags, mode), made)
        self._paths[descriptor] = place
        return descriptor

    def _write(self, descriptor: int, data: Any) -> int:
        place, data = self._paths.get(descriptor), bytes(data)
        if place is None:
            return REAL["write"](descriptor, data)
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.fault is not None and self.calls + 1 == self.fault.at and self.fault.kind in ("short", "short and full") and len(data) > 1:
            data, self._is_full = data[:len(data) // 2], self.fault.kind == "short and full"
        return int(self._call("write", lambda: REAL["write"](descriptor, data), Operation(name="write", path=place, data=data)))

    def _fsync(self, descriptor: int) -> None:
        place = self._paths.get(descriptor)
        if place is None:
            return REAL["fsync"](descriptor)
        # Recorded, not carried out: a kill loses nothing of the kernel's cache, and a power cut is simulated from the record.
        return self._call("fsync", lambda: None, Operation(name="fsync", path=place))

    def _close(self, descriptor: int) -> None:
        if self._paths.pop(descriptor, None) is None:
            return REAL["close"](descriptor)
        return self._call("close", lambda: REAL["close"](descriptor), None)

    def _rename(self, source: Any, target: Any) -> None:
        return self._renamed("rename", source, target, lambda: REAL["rename"](source, target))

    def _replace(self, source: Any, target: Any) -> None:
        return self._renamed("replace", source, target, lambda: REAL["replace"](source, target))

    def _rename_unless_there(self, source: Any, target: Any) -> int:
        try:
            result = self._renamed("renameat2", source, target, lambda: REAL_RENAME(source, target))
        except OSError as fault:
            return int(fault.errno or errno.EIO)
        return int(result)

    def _renamed(self, name: str, source: Any, target: Any, real: Callable[[], Any]) -> Any:
        old, new = self._below(source), self._below(target)
        assert old is not None and new is not None
        return self._call(name, real, Operation(name="rename", path=old, target=new))

    def _unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._below(path)
        if place is None:
            return REAL["unlink"](path, dir_fd=dir_fd)
        return self._call("unlink", lambda: REAL["unlink"](path), Operation(name="unlink", path=place))

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        place = self._below(path)
        if place is None:
            return REAL["rmdir"](path, dir_fd=dir_fd)
        return self._call("rmdir", lambda: REAL["rmdir"](path), Operation(name="rmdir", path=place))


class _Node:
    """A file or folder of the model, as the running system sees it (`now`) and as the platter has it for certain (`durable`)."""

    def __init__(self, is_folder: bool) -> None:
        self.is_folder = is_folder
        self.now_data, self.durable_data = b"", b""
        self.now_names: dict[str, _Node] = {}
        self.durable_names: dict[str, _Node] = {}
        self.pending: list[dict[str, _Node | None]] = []
        """Changes of names since the last sync, in order; each is one step of a journal."""

    def change(self, names: dict[str, _Node | None]) -> None:
        self.pending.append(names)
        _apply(self.now_names, names)

    def sync(self) -> None:
        self.durable_data = self.now_data
        self.durable_names = dict(self.now_names)
        self.pending = []


def crash_image(operations: list[Operation], folder: Path, *, policy: str, dice: random.Random) -> None:
    """Write to `folder` what the disk may hold after the power went behind the last of `operations`.

    `nothing`: only what was synced. `names`: every change of a name and no unsynced data (files of zero length, as some file
    systems leave them). `dice`: of each folder a prefix of its changes, of each file a prefix of its unsynced bytes or zeros.
    """
    root = _Node(is_folder=True)
    for operation in operations:
        _replay(root, operation)
    _write_image(root, folder, policy, dice)


def _replay(root: _Node, operation: Operation) -> None:
    parts = Path(operation.path).parts if operation.path != "." else ()
    folder = root
    for part in parts[:-1]:
        folder = folder.now_names[part]
    if operation.name in ("mkdir", "create"):
        if operation.name == "create" and parts[-1] in folder.now_names:
            folder.now_names[parts[-1]].now_data = b""
        else:
            folder.change({parts[-1]: _Node(is_folder=operation.name == "mkdir")})
    elif operation.name == "write":
        folder.now_names[parts[-1]].now_data += operation.data
    elif operation.name == "fsync":
        (folder.now_names[parts[-1]] if parts else root).sync()
    elif operation.name in ("unlink", "rmdir"):
        folder.change({parts[-1]: None})
    else:
        target = Path(operation.target)
        assert target.parent == Path(operation.path).parent, "a save renames within one folder"
        folder.change({parts[-1]: None, target.name: folder.now_names[parts[-1]]})


def _write_image(node: _Node, folder: Path, policy: str, dice: random.Random) -> None:
    folder.mkdir(exist_ok=True)
    names = dict(node.durable_names)
    kept = {"nothing": 0, "names": len(node.pending), "dice": dice.randint(0, len(node.pending))}[policy]
    for change in node.pending[:kept]:
        _apply(names, change)
    for name, below in names.items():
        if below.is_folder:
            _write_image(below, folder / name, policy, dice)
            continue
        data = below.durable_data
        if policy == "dice" and below.now_data != data:
            extra = below.now_data[len(data):] if below.now_data.startswith(data) else below.now_data
            taken = dice.randint(0, len(extra))
            data = data + extra[:taken] + b"\0" * dice.choice((0, len(extra) - taken))
        (folder / name).write_bytes(data)


def _apply(names: dict[str, _Node], change: dict[str, _Node | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def contents_of(step: int) -> dict[str, Any]:
    """A checkpoint that is as good as a real one to everybody who only looks at files; both kinds of content are in it."""
    from trainer.checkpoint import Held

    weights = random.Random(step).randbytes(3000)
    return {
        "config.json": b"{}\n", "model.safetensors": Held(lambda: [weights[:1000], memoryview(weights)[1000:]]),
        "optimizer.safetensors": Held(lambda: [weights[::-1]]), "rng.safetensors": bytes([step % 256]) * 40,
        "trainer.json": json.dumps({"step": step}).encode(),
    }


def save(folder: Path, step: int) -> Any:
    """One whole save as the trainer's thread makes it, and the hint that the loop writes after it."""
    from trainer.records import RunRecords
    from trainer.saving import Saver

    saver = Saver(folder / "checkpoints", keep=2, abandon=lambda: False)
    saver.begin(step, contents_of(step), protected=frozenset({step}), began_seconds=0.0)
    done = saver.settle(wait=True)
    RunRecords(folder).hint("latest", step=step, digest=done.checkpoint.digest, value=None)
    return done


def _die_at_every_call(root: Path, first: int, last: int, kind: str) -> None:
    """For each call a child that finds steps 1 and 2 saved, and dies at that call of saving step 3. Prints the deaths."""
    for number in range(first, last + 1):
        run_dir = root / f"{kind}-{number}"
        child = os.fork()
        if child == 0:
            with Disk(run_dir, fault=Fault(at=number, kind=kind)).watching():
                save(run_dir, 3)
            os._exit(0)
        print(number, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _die_at_every_call(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
