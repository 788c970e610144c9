"""Brings one tree to this host: what lies there already is kept, the rest is taken, every byte verified before the tree has its name.

    {"do":"begin","kind","digest","files"}   → {"read":n}…, then "present", or what is there: "have": {path: [bytes, SHA-256 of them]}
    {"do":"take","from": {path: offset}}     → frames follow (eight bytes of length, then so many bytes), file after file; then "placed"
    {"do":"pull","from", "argv","script",…}  → another host's ssh gives the bytes: {"taken":n}…, then "placed", or why not and "have"

A program of the release, started in a login shell on any channel. The tree grows in `.tmp-<digest>` while `.lock-<digest>` is held. A cut
leaves it there for the next try; whatever else goes wrong takes it away.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable
from typing import Any

from fleetd.host.arrivals import Arrival, Feed, Frames, GaveUp, Pull, widen
from fleetd.host.porter import LEFTOVER, Refused, Talk, sweep, sync, tree_path, wrong_with

WORD_SECONDS = 1.0
"""So often a sign of life is given while the disk is busy."""
FORGET_SECONDS = 3 * 86400.0
"""A half tree that nobody went on with for so long is removed when another one comes."""
TEMPORARY, LOCK = ".tmp-", ".lock-"


class Stager(Talk):
    def __init__(self, source: int, target: int, root: str) -> None:
        super().__init__(source, target)
        self.root, self.folder, self._lock, self._said_at = root, "", -1, 0.0
        self.arrival: Arrival | None = None
        widen(source)

    def do_begin(self, request: dict[str, Any]) -> dict[str, Any]:
        self.folder = tree_path(self.root, request)
        parent, name = os.path.split(self.folder)
        os.makedirs(parent, exist_ok=True)
        self._take_lock(os.path.join(parent, f"{LOCK}{name}"))
        if os.path.isdir(self.folder):
            fault = wrong_with(self.folder, request["files"], self._tell("read"))
            self._leave_lock()
            if fault is not None:
                raise Refused("damaged", fault, self.folder)
            return {"ok": True, "present": True}
        sweep(parent)
        forget_old(parent, name)
        self.arrival = Arrival(os.path.join(parent, f"{TEMPORARY}{name}"), request["files"])
        return {"ok": True, "present": False, "have": self.arrival.look(self._tell("read"))}

    def do_take(self, request: dict[str, Any]) -> dict[str, Any]:
        """The bytes from the coordinator. After a refusal the stream is out of step, so nothing more is understood."""
        try:
            return self._receive(Frames(self._take_bytes), request["from"], lambda count: None)
        except GaveUp:
            self._drop()
            self._say({"ok": True, "dropped": True})
        except OSError as fault:
            self._drop()
            self._say({"ok": False, "kind": "os", "errno": fault.errno, "what": str(fault.strerror or fault), "path": str(fault.filename or "")})
        except Refused as fault:
            self._drop()
            self._say({"ok": False, "kind": fault.kind, "what": fault.what, "path": fault.path})
        raise SystemExit(0)

    def do_pull(self, request: dict[str, Any]) -> dict[str, Any]:
        """The bytes from another host. Whatever keeps it from giving them, the coordinator may go on with what has arrived."""
        assert self.arrival is not None
        parent = os.path.dirname(self.folder)
        try:
            with Pull(parent, request["argv"], request["known_hosts"], request["script"], request["marker"]) as pull:
                return self._receive(pull, request["from"], self._tell("taken"))
        except Refused as fault:
            have = self.arrival.look(self._tell("read"))
            return {"ok": False, "kind": "link", "what": fault.what, "path": fault.path, "have": have}
        except OSError:
            self._drop()
            raise

    def _receive(self, feed: Feed, offsets: dict[str, int], told: Callable[[int], None]) -> dict[str, Any]:
        assert self.arrival is not None
        self.arrival.receive(feed, offsets, told)
        self.arrival.settle(self._tell("synced"))
        os.rename(self.arrival.folder, self.folder)
        sync(os.path.dirname(self.folder))
        self.arrival = None
        self._leave_lock()
        return {"ok": True, "placed": True}

    def _take_bytes(self, view: memoryview) -> None:
        """Fill the view from the channel. SystemExit when nobody speaks any more: what has arrived stays."""
        count = min(len(self.buffer), len(view))
        view[:count], self.buffer = self.buffer[:count], self.buffer[count:]
        while count < len(view):
            if not self._is_readable():
                raise SystemExit("the coordinator says nothing")
            found = os.readv(self.source, [view[count:]])
            if not found:
                raise SystemExit("the coordinator is gone")
            count += found

    def _tell(self, word: str) -> Callable[[int], None]:
        """A sign of life with a count, now and then."""
        total = 0

        def told(count: int) -> None:
            nonlocal total
            total += count
            if time.monotonic() - self._said_at >= WORD_SECONDS:
                self._said_at = time.monotonic()
                self._say({"ok": True, word: total})

        return told

    def _say(self, answer: dict[str, Any]) -> None:
        """Nobody to hear it is the same as nobody to speak: what has arrived stays."""
        try:
            super()._say(answer)
        except BrokenPipeError:
            raise SystemExit("the coordinator is gone") from None

    def _take_lock(self, path: str) -> None:
        """Hold the lock file, and be sure that it is the one with that name: its last holder may just have removed it."""
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if not lock_now(descriptor):
                os.close(descriptor)
                raise Refused("busy", "another connection is bringing the same tree", self.folder)
            if is_named(descriptor, path):
                self._lock = descriptor
                return
            os.close(descriptor)

    def _leave_lock(self) -> None:
        parent, name = os.path.split(self.folder)
        os.unlink(os.path.join(parent, f"{LOCK}{name}"))
        os.close(self._lock)
        self._lock = -1

    def _drop(self) -> None:
        """Nothing is left behind."""
        if self.arrival is not None:
            shutil.rmtree(self.arrival.folder, ignore_errors=True)
            self.arrival = None
            self._leave_lock()


def lock_now(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def is_named(descriptor: int, path: str) -> bool:
    ours = os.fstat(descriptor)
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return (ours.st_dev, ours.st_ino) == (found.st_dev, found.st_ino)


def forget_old(parent: str, name: str) -> None:
    """Remove half trees that nobody goes on with. One that is being brought is held by its lock."""
    for entry in os.listdir(parent):
        digest = entry.removeprefix(TEMPORARY)
        path = os.path.join(parent, entry)
        if not entry.startswith(TEMPORARY) or digest == name or LEFTOVER.fullmatch(entry) or time.time() - newest_change(path) < FORGET_SECONDS:
            continue
        lock = os.path.join(parent, f"{LOCK}{digest}")
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if lock_now(descriptor):
                shutil.rmtree(path, ignore_errors=True)
                os.unlink(lock)
        finally:
            os.close(descriptor)


def newest_change(folder: str) -> float:
    """When anything in it was written last, by the wall clock."""
    newest = os.stat(folder).st_mtime
    for base, folders, names in os.walk(folder):
        for each in (*folders, *names):
            found = os.lstat(os.path.join(base, each))
            newest = max(newest, found.st_mtime if stat.S_ISREG(found.st_mode) else newest)
    return newest


def main(arguments: list[str]) -> int:
    Stager(0, 1, arguments[0]).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
