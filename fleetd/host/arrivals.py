"""A tree on its way into a folder: what is there, what comes, whether it is right, and whether the disk has it. Used by the stager.

Hashing has a thread beside the one that reads and writes. The disk is waited for at the end only, with signs of life meanwhile: a sync in
between holds up the writes behind it, and so does asking the kernel to begin early (posix_fadvise took half as long as everything else).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Protocol

from fleetd.host.porter import Refused, sync

FRAME_BYTES_MAX = 1024 * 1024
"""What is read at once, and hashed while the next part is read."""
PIPE_BYTES = 1024 * 1024
SYNCS_MAX = 4
"""Several syncs at a time share one commit of the file system's journal."""
HAVE_BYTES_MAX, HAVE_BYTES_EACH = 4 * 1024 * 1024, 100
"""What there is has to fit into one answer."""
SETTLE_WORD_SECONDS = 1.0
PULL_SILENCE_SECONDS_MAX = 60.0
CHATTER_BYTES_MAX = 1024 * 1024
"""What a login shell may print before its turn is over."""
WORDS_BYTES_MAX = 2000
END_SECONDS_MAX = 2.0


class GaveUp(Exception):
    """Whoever sends can't go on, and this tree will not come."""


class Feed(Protocol):
    def next(self, view: memoryview) -> int:
        """Put the next bytes of the file into the view; how many. Refused when they can't be had."""


class Frames:
    """Frames of the coordinator. `fill` fills a view whole."""

    def __init__(self, fill: Callable[[memoryview], None]) -> None:
        self._fill, self._head = fill, bytearray(8)

    def next(self, view: memoryview) -> int:
        self._fill(memoryview(self._head))
        count = int.from_bytes(self._head, "big")
        if count == 0:
            raise GaveUp
        if count > len(view):
            raise Refused("order", f"a frame of {count} bytes came, at most {len(view)} are missing")
        self._fill(view[:count])
        return count


class Arrival:
    """The folder that becomes the tree. `files` are `[path, bytes, sha256]`, in the order in which their bytes come."""

    def __init__(self, folder: str, files: list[list[Any]]) -> None:
        self.folder = folder
        self.files: dict[str, tuple[int, str]] = {path: (size, sha256) for path, size, sha256 in files}
        for path in self.files:
            if path.startswith("/") or ".." in path.split("/"):
                raise Refused("order", f"{path} leads out of the tree")
        self._whole: set[str] = set()
        self._begun: dict[str, Any] = {}
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._buffers = [memoryview(bytearray(FRAME_BYTES_MAX)) for _ in range(2)]

    def look(self, told: Callable[[int], None]) -> dict[str, list[Any]]:
        """Read what an earlier try has left, remove what does not belong; the rest, with its digest."""
        said_bytes = 0
        os.makedirs(self.folder, exist_ok=True)
        self._whole.clear()
        self._begun.clear()
        have: dict[str, list[Any]] = {}
        for base, folders, names in os.walk(self.folder):
            for name in (*(each for each in folders if os.path.islink(os.path.join(base, each))), *names):
                place = os.path.join(base, name)
                path = os.path.relpath(place, self.folder)
                size, sha256 = self.files.get(path, (-1, ""))
                if os.path.islink(place) or not os.path.isfile(place) or os.path.getsize(place) > size:
                    os.unlink(place)
                    continue
                digest, found = digest_of(place, told)
                if found == size and digest.hexdigest() != sha256:
                    os.unlink(place)
                    continue
                said_bytes += len(path) + HAVE_BYTES_EACH
                if said_bytes > HAVE_BYTES_MAX:
                    continue  # it comes again
                have[path] = [found, digest.hexdigest()]
                if found == size:
                    self._whole.add(path)
                else:
                    self._begun[path] = digest
        return have

    def receive(self, feed: Feed, offsets: dict[str, int], told: Callable[[int], None]) -> None:
        """Take every file that is not whole, from its offset on. Refused when a file is not what it should be: it is removed then."""
        for path, (size, sha256) in self.files.items():
            if path in self._whole:
                continue
            place, offset = os.path.join(self.folder, path), offsets.get(path, 0)
            digest = self._begun.get(path) if offset else None
            if offset and digest is None:
                raise Refused("order", f"nothing of {path} is here to go on with")
            os.makedirs(os.path.dirname(place), exist_ok=True)
            digest = digest or hashlib.sha256()
            try:
                with open(place, "r+b" if offset else "wb", buffering=0) as file:
                    file.seek(offset)
                    self._take(file.fileno(), feed, size - offset, digest, told)
                    if digest.hexdigest() != sha256:
                        raise Refused("damaged", f"it arrived as SHA-256 {digest.hexdigest()}, sent was {sha256}", place)
            except Refused as fault:
                if fault.kind == "damaged":
                    os.unlink(place)
                raise
            self._whole.add(path)

    def settle(self, told: Callable[[int], None]) -> None:
        """All of it durable, folders last."""
        with ThreadPoolExecutor(SYNCS_MAX, thread_name_prefix="sync") as pool:
            left = {pool.submit(sync_file, os.path.join(self.folder, path)) for path in self.files}
            while left:
                done, left = wait(left, SETTLE_WORD_SECONDS, FIRST_EXCEPTION)
                told(0)
                for each in done:
                    each.result()
        for base, _, _ in os.walk(self.folder, topdown=False):
            sync(base)
            told(0)

    def _take(self, target: int, feed: Feed, left: int, digest: Any, told: Callable[[int], None]) -> None:
        """`left` bytes into the file, hashed while the next ones come."""
        hashing: list[Future[None]] = []
        turn = 0
        try:
            while left:
                while len(hashing) >= len(self._buffers):
                    hashing.pop(0).result()
                view = self._buffers[turn][:left]
                count = feed.next(view)
                part = view[:count]
                hashing.append(self._hashing.submit(digest.update, part))
                write_all(target, part)
                turn, left = 1 - turn, left - count
                told(count)
        finally:
            wait(hashing)


class Pull:
    """Bytes that another host sends, asked for with the ssh of this one. Only the key that the coordinator has seen is believed."""

    def __init__(self, parent: str, argv: list[str], known_hosts: str, script: str, marker: str) -> None:
        self._folder = tempfile.mkdtemp(prefix=".tmp-link-", suffix=f"-{os.getpid()}", dir=parent)
        place = os.path.join(self._folder, "known_hosts")
        with open(place, "w", encoding="utf-8") as file:
            file.write(known_hosts)
        self._words = open(os.path.join(self._folder, "words"), "w+b")  # noqa: SIM115  (closed when the pull is over)
        self._argv = [word.replace("{known_hosts}", place.replace("%", "%%")) for word in argv]
        self._script, self._marker, self._early = script.encode(), marker.encode() + b"\n", b""
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Pull:
        try:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, start_new_session=True, bufsize=0,
            )
        except OSError as fault:
            self._clear()
            raise Refused("link", f"there is no ssh on this host: {fault.strerror}") from fault
        assert self._process.stdout is not None
        widen(self._process.stdout.fileno())
        try:
            self._ask()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self._end()

    def next(self, view: memoryview) -> int:
        if self._early:
            count = min(len(self._early), len(view))
            view[:count], self._early = self._early[:count], self._early[count:]
            return count
        count = 0
        while count < len(view):  # all of it has to come anyway, and a pipe gives little at a time
            count += self._read(view[count:])
        return count

    def _ask(self) -> None:
        """Send the script, and skip what a login shell prints before it."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(self._script)
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has left, and said why
        part = memoryview(bytearray(CHATTER_BYTES_MAX))
        while self._marker not in self._early:
            count = self._read(part)
            self._early += bytes(part[:count])
            if len(self._early) > CHATTER_BYTES_MAX:
                raise Refused("link", "its login shell prints without end")
        self._early = self._early.split(self._marker, 1)[1]

    def _read(self, view: memoryview) -> int:
        assert self._process is not None and self._process.stdout is not None
        source = self._process.stdout.fileno()
        if not select.select([source], [], [], PULL_SILENCE_SECONDS_MAX)[0]:
            raise Refused("link", f"it sent nothing for {PULL_SILENCE_SECONDS_MAX:.0f} s")
        found = os.readv(source, [view])
        if not found:
            raise Refused("link", self._last_words())
        return found

    def _last_words(self) -> str:
        assert self._process is not None
        try:
            status = self._process.wait(END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            status = None
        self._words.seek(0)
        said = " ".join(self._words.read(WORDS_BYTES_MAX).decode(errors="replace").split())
        return f"it ended with exit status {status}: {said or 'without a word'}"

    def _end(self) -> None:
        """Our own child and its group: it is not reaped before, so that the number is its own."""
        process = self._process
        if process is not None:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._clear()

    def _clear(self) -> None:
        self._words.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def digest_of(place: str, told: Callable[[int], None]) -> tuple[Any, int]:
    """The running SHA-256 of a whole file, and its size."""
    digest, size = hashlib.sha256(), 0
    for part in parts_of(place):
        digest.update(part)
        size += len(part)
        told(len(part))
    return digest, size


def parts_of(place: str) -> Iterator[bytes]:
    with open(place, "rb", buffering=0) as file:
        while part := file.read(FRAME_BYTES_MAX):
            yield part


def widen(descriptor: int) -> None:
    """A larger pipe means fewer turns. It may be something else, or more than this user is allowed."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass


def sync_file(place: str) -> None:
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(target: int, part: memoryview) -> None:
    while part:
        part = part[os.write(target, part):]
