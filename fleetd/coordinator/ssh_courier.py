"""The courier of a host that is reached over SSH: the promises of `LocalCourier`, over channels of the session's connection.

A release goes out through a porter, every other tree through a stager, by the road that `tree_delivery` chooses: many bytes by the system's
ssh. Files of a run come back through an agent of the courier's own, so that a long digest never keeps the session's agent from answering.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.coordinator.couriers import READ_BYTES_MAX, Courier, Finished, TreeKind, damaged_source
from fleetd.coordinator.data_link import Link, NoLink, link_to
from fleetd.coordinator.deliveries import Deliveries, Delivery
from fleetd.coordinator.ssh_connection import ENTER_SHELL, Hop
from fleetd.coordinator.ssh_road import AgentLine, SshRoad, start_agent
from fleetd.coordinator.system_ssh import NoSystemSsh, ProcessLines, SshProcess, why_not
from fleetd.coordinator.tree_delivery import BULK_BYTES_MIN, CONTROL, SSH, Road, Stager, Tree, choose_road, deliver, start_stager, tree_of
from fleetd.coordinator.trees import TreeFault, manifest_bytes
from fleetd.files import COPY_CHUNK_BYTES, sync_folder
from fleetd.wire import WireError, decode
from policies.errors import ExplainedError, HostUnreachable, NotFound, RequestRefused
from policies.manifest import MANIFEST_NAME, FileEntry, directory_digest

CALL_SECONDS_MAX = 60.0
SILENCE_SECONDS_MAX = 60.0
"""So long may a host take no bytes and say nothing while a tree is sent, or be reading what it has."""
VERIFY_SECONDS_MAX = 1800.0
"""A host reads its whole copy: 100 GB at 60 MB/s. A host that died meanwhile is noticed by its session."""
START_SECONDS_MAX = 30.0
"""For a connection of the system's ssh, login and stager included."""
IDLE_LINES_MAX = 2


class SshCourier:
    """Safe to use from many threads: each call has a channel of its own while it lasts."""

    def __init__(self, road: SshRoad, deliveries: Deliveries | None = None, neighbour: Callable[[str], Courier | None] = lambda name: None) -> None:
        self._road, self._deliveries, self._neighbour = road, deliveries or Deliveries(), neighbour
        self.release = ""
        """The release that the session has put in place; agents are started from it."""
        self._idle: list[AgentLine] = []
        self._bulk: set[SshProcess] = set()
        self._by_digest: dict[str, threading.Lock] = {}
        self._is_closed = False
        self._guard = threading.Lock()

    @property
    def host(self) -> str:
        return self._road.plan.name

    @property
    def machine(self) -> str:
        if self._road.facts is None:
            raise self._road.unreachable("it has not answered yet")
        return self._road.facts.machine

    def tree_path(self, kind: TreeKind, digest: str) -> str:
        return f"{self._road.plan.root}/{kind.value}/{digest}"

    def has_tree(self, kind: TreeKind, digest: str) -> bool:
        return bool(self._ask("has", {"kind": kind.value, "digest": digest})["present"])

    def tree_fault(self, kind: TreeKind, digest: str) -> str | None:
        answer = self._ask("verify", {"kind": kind.value, "digest": digest}, VERIFY_SECONDS_MAX)
        return None if answer["ok"] else str(answer["what"])

    def put_tree(self, kind: TreeKind, digest: str, source: Path, entries: tuple[FileEntry, ...]) -> bool:
        assert directory_digest(entries) == digest, "a tree is named by its digest"
        if kind is TreeKind.RELEASES:
            return self._put_release(digest, source, entries)
        tree = tree_of(kind.value, digest, source, entries)
        under_way = self._deliveries.under_way(self.host, kind.value, digest, tree.bytes_total)
        with self._alone_with(digest), under_way as delivery, self._stager(tree, delivery) as stager:
            return deliver(tree, delivery, self._road, stager, self._link(kind, tree))

    def _put_release(self, digest: str, source: Path, entries: tuple[FileEntry, ...]) -> bool:
        """Before there is a release over there, its porter is all there is."""
        files = [[entry.path, entry.bytes, entry.sha256] for entry in entries]
        tree = {"kind": TreeKind.RELEASES.value, "digest": digest}
        with closing(self._road.porter(time.monotonic() + CALL_SECONDS_MAX)) as porter:
            if porter.ask({"do": "has", "files": files, **tree}, time.monotonic() + VERIFY_SECONDS_MAX)["present"]:
                return False
            manifest = manifest_bytes(entries, source)
            listed = [*files, [MANIFEST_NAME, len(manifest), hashlib.sha256(manifest).hexdigest()]]
            porter.ask({"do": "put", "files": listed, "zipped": True, **tree}, time.monotonic() + CALL_SECONDS_MAX)
            faults.before("releases in place")
            try:
                porter.send(_zipped(_stream(source, entries, manifest)), SILENCE_SECONDS_MAX)
            except TreeFault as fault:
                raise damaged_source(TreeKind.RELEASES.value, self.host, fault) from fault
        return True

    def look(self, run_id: str, path: str) -> tuple[FileEntry, ...]:
        try:
            answer = self._ask("digest", {"run_id": run_id, "path": path}, VERIFY_SECONDS_MAX)
        except NotFound:
            return ()
        try:
            found = tuple(decode(FileEntry, each) for each in answer["entries"])
        except (WireError, KeyError, TypeError) as fault:
            raise self._road.unreachable(f"its list of files can't be read: {fault}") from fault
        stray = next((entry.path for entry in found if entry.path[:1] in ("", "/") or ".." in entry.path.split("/") or "\0" in entry.path), None)
        if stray is not None:  # it would become a path over here
            raise self._road.unreachable(f"it lists {stray!r}, which lies outside of what was asked for")
        return tuple(entry for entry in found if not any(part.startswith(".") for part in entry.path.split("/")))

    def fetch_tree(self, run_id: str, path: str, destination: Path, entries: tuple[FileEntry, ...]) -> None:
        os.mkdir(destination, 0o755)
        folders = {destination}
        for entry in entries:
            target = destination / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            folders.update(each for each in target.parents if each.is_relative_to(destination))
            self._fetch(run_id, f"{path}/{entry.path}", target, entry)
        for folder in sorted(folders, reverse=True):
            sync_folder(folder)

    def read_tail(self, run_id: str, path: str, offset: int, bytes_max: int) -> bytes:
        try:
            return self.read_part(run_id, path, offset, bytes_max)[0]
        except NotFound:
            return b""

    def read_part(self, run_id: str, path: str, offset: int, bytes_max: int) -> tuple[bytes, int, int]:
        body = {"run_id": run_id, "path": path, "offset": offset, "bytes_max": min(bytes_max, READ_BYTES_MAX)}
        answer = self._ask("read", body)
        data = base64.b64decode(answer["data"])
        return data, int(answer["next"]) - len(data), int(answer["size"])

    def run_program(self, argv: tuple[str, ...], timeout_seconds: float) -> Finished:
        with closing(self._road.porter(time.monotonic() + CALL_SECONDS_MAX)) as porter:
            request = {"do": "run", "argv": list(argv), "seconds": timeout_seconds}
            try:
                answer = porter.ask(request, time.monotonic() + timeout_seconds + CALL_SECONDS_MAX)
            except RequestRefused as fault:
                raise OSError(fault.what) from fault
        return Finished(status=int(answer["status"]), stdout=str(answer["stdout"]), stderr=str(answer["stderr"]))

    def prune_releases(self, keep: frozenset[str]) -> tuple[str, ...]:
        return tuple(self._ask("prune", {"keep": sorted(keep)})["removed"])

    def drop(self) -> None:
        """The control connection is gone, and what waited on it."""
        with self._guard:
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()

    def close(self) -> None:
        """The coordinator leaves this host: bulk that is on its way ends as well."""
        self.drop()
        with self._guard:
            bulk, self._is_closed = list(self._bulk), True
        for process in bulk:
            process.end()

    @contextmanager
    def _alone_with(self, digest: str) -> Iterator[None]:
        """Two jobs that want the same tree: the second finds it there."""
        with self._guard:
            lock = self._by_digest.setdefault(digest, threading.Lock())
        with lock:
            yield

    @contextmanager
    def _stager(self, tree: Tree, delivery: Delivery) -> Iterator[Stager]:
        """A stager by the road that suits the tree; where the system's ssh does not get through, on the control connection."""
        if not self.release:
            raise self._road.unreachable("its release is not in place yet")
        hops = self._road.current().hops
        with ExitStack() as stack:
            chosen, stager = choose_road(tree.bytes_total, why_not(hops)), None
            if chosen.word == SSH:
                try:
                    process = stack.enter_context(self._bulk_shell(hops))
                    stager = start_stager(self._road, self.release, time.monotonic() + START_SECONDS_MAX, ProcessLines(process))
                    process.forget_files()
                except (NoSystemSsh, ExplainedError) as fault:
                    words = fault.what if isinstance(fault, ExplainedError) else str(fault)
                    chosen = Road(word=CONTROL, because=f"the system's ssh does not get through: {words}")
            delivery.goes_by(chosen.word, chosen.because)
            if stager is None:
                stager = stack.enter_context(closing(start_stager(self._road, self.release, time.monotonic() + CALL_SECONDS_MAX)))
            yield stager

    def _link(self, kind: TreeKind, tree: Tree) -> Link | NoLink | None:
        """How the host takes this tree from its neighbour, or why it can't; None where the plan names none, or it is not worth it."""
        data_from = self._road.plan.data_from
        if data_from is None or tree.bytes_total < BULK_BYTES_MIN:
            return None
        neighbour = self._neighbour(data_from.host)
        if not isinstance(neighbour, SshCourier):
            return NoLink(f"{data_from.host} has no session over ssh now")
        try:
            if not neighbour.has_tree(kind, tree.digest):
                return NoLink(f"{data_from.host} does not have it")
            hop = neighbour._road.current().hops[0]
        except HostUnreachable as fault:
            return NoLink(f"{data_from.host} does not answer: {fault.what}")
        return link_to(data_from, hop, neighbour.tree_path(kind, tree.digest))

    @contextmanager
    def _bulk_shell(self, hops: tuple[Hop, ...]) -> Iterator[SshProcess]:
        """A login shell over the system's ssh, by the way and with the keys of the control connection. NoSystemSsh."""
        process = SshProcess(hops, ENTER_SHELL)
        with self._guard:
            self._bulk.add(process)
            is_closed = self._is_closed
        try:
            if is_closed:
                process.end()
            yield process
        finally:
            with self._guard:
                self._bulk.discard(process)
            process.close()

    def _fetch(self, run_id: str, path: str, target: Path, entry: FileEntry) -> None:
        digest, size = hashlib.sha256(), 0
        faults.before("tree file")
        with open(target, "xb") as file:
            while size < entry.bytes:
                try:
                    data, _, _ = self.read_part(run_id, path, size, min(READ_BYTES_MAX, entry.bytes - size))
                except NotFound as fault:
                    raise TreeFault(target, fault.what) from fault
                if not data:
                    break
                digest.update(data)
                size += len(data)
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if size != entry.bytes or digest.hexdigest() != entry.sha256:
            what = f"it changed: SHA-256 {digest.hexdigest()} in {size} bytes, expected {entry.sha256} in {entry.bytes}"
            raise TreeFault(Path(path), what)

    def _ask(self, order: str, body: dict[str, Any], seconds: float = CALL_SECONDS_MAX) -> dict[str, Any]:
        with self._line() as line:
            return line.ask(order, body, time.monotonic() + seconds)

    @contextmanager
    def _line(self) -> Iterator[AgentLine]:
        """An agent for one call, kept for the next one when the call ends well."""
        line, is_good = self._idle_line() or self._new_line(), False
        try:
            yield line
            is_good = True
        except HostUnreachable:
            raise
        except ExplainedError:
            is_good = True  # the agent answered, and is good for more
            raise
        finally:
            if not (is_good and self._keep(line)):
                line.close()

    def _keep(self, line: AgentLine) -> bool:
        """Whether it waits for the next call now, which may be another thread's already: from here on it is not ours."""
        with self._guard:
            if len(self._idle) >= IDLE_LINES_MAX or not self._road.is_open:
                return False
            self._idle.append(line)
            return True

    def _idle_line(self) -> AgentLine | None:
        while True:
            with self._guard:
                if not self._idle:
                    return None
                line = self._idle.pop()
            if not line.lines.channel.closed and not line.lines.has_answer():
                return line
            line.close()

    def _new_line(self) -> AgentLine:
        if not self.release:
            raise self._road.unreachable("its release is not in place yet")
        until_seconds = time.monotonic() + CALL_SECONDS_MAX
        return start_agent(self._road, self._road.porter(until_seconds), self.release, until_seconds)


def _stream(source: Path, entries: tuple[FileEntry, ...], manifest: bytes) -> Iterator[bytes]:
    """The bytes of every file, one after the other. TreeFault when a file is not what its entry says: nothing wrong is ever completed."""
    for entry in entries:
        digest, size = hashlib.sha256(), 0
        try:
            descriptor = os.open(source / entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as fault:
            raise TreeFault(source / entry.path, f"can't be read: {fault.strerror}") from fault
        with os.fdopen(descriptor, "rb") as file:
            while part := file.read(COPY_CHUNK_BYTES):
                digest.update(part)
                size += len(part)
                if size > entry.bytes:
                    break
                yield part
        if size != entry.bytes or digest.hexdigest() != entry.sha256:
            raise TreeFault(source / entry.path, f"it changed: SHA-256 {digest.hexdigest()}, expected {entry.sha256}")
    yield manifest


def _zipped(parts: Iterable[bytes]) -> Iterator[bytes]:
    machine = zlib.compressobj()
    for part in parts:
        if data := machine.compress(part):
            yield data
    yield machine.flush()
