"""Bringing one tree to one host that is reached over SSH: which road it goes by, and our end of `fleetd/host/stager.py`.

    a few bytes ─► a channel of the control connection     many ─► the system's ssh, as quick as it goes     where the plan names a
    neighbour that has the tree ─► from host to host, asked for by whoever receives it

By each of them the same stager receives, so that what a cut has left behind serves the next try whichever way that goes. What the host
reads and hashes decides; the sender looks whether its files stand still while they are sent.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetd import faults
from fleetd.coordinator.couriers import damaged_source
from fleetd.coordinator.data_link import Link, NoLink, why_it_gave_nothing
from fleetd.coordinator.deliveries import Delivery
from fleetd.coordinator.ssh_lines import TROUBLES, ChannelLines, ShortFile, become, in_words
from fleetd.coordinator.ssh_road import SshRoad, refusal
from fleetd.coordinator.trees import TreeFault, manifest_bytes, read_entry
from fleetd.wire import dumps
from policies.errors import DataDamaged, ExplainedError
from policies.facts import MIB
from policies.manifest import MANIFEST_NAME, FileEntry

BULK_BYTES_MIN = 16 * MIB
"""Below that a connection of its own costs more than it saves."""
SILENCE_SECONDS_MAX = 60.0
"""So long may a host take no bytes and say nothing."""
LINK_SILENCE_SECONDS_MAX = 90.0
"""A host waits for its neighbour a little shorter, and says so then."""
ENTRY = "fleetd/host/__main__.py"
FRAME_BYTES = 1024 * 1024
HASH_BYTES = 1024 * 1024
CONTROL, SSH = "control connection", "ssh"

Have = dict[str, tuple[int, str]]
"""What the host has of a file: so many bytes, with this SHA-256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Road:
    """One way to a host, and why it is this one."""

    word: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What is brought: the files with their manifest, and where they lie here."""

    kind: str
    digest: str
    source: Path
    entries: tuple[FileEntry, ...]
    manifest: bytes

    @property
    def files(self) -> list[list[Any]]:
        """As the stager wants them, in the order in which they are sent."""
        listed = [[entry.path, entry.bytes, entry.sha256] for entry in self.entries]
        return [*listed, [MANIFEST_NAME, len(self.manifest), hashlib.sha256(self.manifest).hexdigest()]]

    @property
    def bytes_total(self) -> int:
        return sum(entry.bytes for entry in self.entries) + len(self.manifest)


def tree_of(kind: str, digest: str, source: Path, entries: tuple[FileEntry, ...]) -> Tree:
    return Tree(kind=kind, digest=digest, source=source, entries=entries, manifest=manifest_bytes(entries, source))


def choose_road(bytes_total: int, ssh_fault: str | None, *, bulk_bytes_min: int = BULK_BYTES_MIN) -> Road:
    """How the coordinator reaches a host for this tree. `ssh_fault`: why the system's ssh is out of the question."""
    if bytes_total < bulk_bytes_min:
        return Road(word=CONTROL, because=f"it is small: {bytes_total} bytes")
    if ssh_fault is not None:
        return Road(word=CONTROL, because=ssh_fault)
    return Road(word=SSH, because=f"it is large: {bytes_total // MIB} MiB")


class Stager:
    """Our end of one stager. One thread at a time; the caller closes it."""

    def __init__(self, road: SshRoad, lines: ChannelLines) -> None:
        self._road, self._lines = road, lines

    def close(self) -> None:
        self._lines.channel.close()

    def begin(self, tree: Tree, delivery: Delivery) -> Have | None:
        """What the host has of the tree; None when it has it all. DataDamaged when what it has under that name is something else."""
        self._write({"do": "begin", "kind": tree.kind, "digest": tree.digest, "files": tree.files})
        answer = self._answer("present", doing="what it has", read=delivery.reads)
        return None if answer["present"] else self._have(answer)

    def take(self, tree: Tree, have: Have, delivery: Delivery) -> None:
        """Send what is missing, and return when the tree is in place. TreeFault when the source is no longer what it was."""
        offsets = self._offsets(tree, have)
        delivery.begins(sum(offsets.values()))
        self._write({"do": "take", "from": offsets})
        faults.before(f"{tree.kind} in place")
        try:
            self._send(tree, offsets, delivery)
            delivery.settles()
            self._answer("placed", doing="files on their way")
        except TROUBLES as fault:
            raise self._unreachable(f"files on their way: {in_words(fault)}") from fault
        except DataDamaged:
            _compare(tree)  # usually it is the source that has changed
            raise

    def pull(self, tree: Tree, have: Have, link: Link, delivery: Delivery) -> tuple[Have, str] | None:
        """Let the host take the rest from its neighbour. None when the tree is in place; else what there is of it now, and why no more."""
        offsets = {path: count for path, (count, _) in have.items()}  # wrong beginnings are found at the end, by the digest
        try:
            request = link.request(tree.files, offsets)
        except NoLink as fault:
            return have, str(fault)
        delivery.begins(sum(offsets.values()))
        self._write(request)
        told: dict[str, Callable[[int], None]] = {"taken": delivery.moved_to, "read": delivery.reads, "synced": delivery.settles}
        answer = self._answer("placed", doing=f"files {link.road}", is_link=True, **told)
        if answer["ok"] is not True:
            return self._have(answer), str(answer.get("what"))
        delivery.moved_to(tree.bytes_total - delivery.bytes_there)
        return None

    def _have(self, answer: dict[str, Any]) -> Have:
        """What the host says that it has. What it says is checked once more by its own digests, so that nonsense can only cost it time."""
        try:
            return {str(path): (int(count), str(sha256)) for path, (count, sha256) in answer["have"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as fault:
            raise self._unreachable(f"what it says it has can't be read: {fault}") from fault

    def _offsets(self, tree: Tree, have: Have) -> dict[str, int]:
        """From where on each file is sent: what the host has counts where it is the beginning of ours."""
        found: dict[str, int] = {}
        for path, size, sha256 in tree.files:
            count, beginning = have.get(path, (0, ""))
            is_whole = count == size and beginning == sha256
            is_begun = 0 < count < size and path != MANIFEST_NAME
            if is_whole or (is_begun and beginning == _hash_of_beginning(tree.source / path, count)):
                found[path] = count
        return found

    def _send(self, tree: Tree, offsets: dict[str, int], delivery: Delivery) -> None:
        """Every missing byte. Returns early when the host has answered: then it has refused."""
        try:
            for entry in tree.entries:
                if offsets.get(entry.path, 0) < entry.bytes and not self._send_file(tree.source, entry, offsets.get(entry.path, 0), delivery):
                    return
        except TreeFault:
            self._lines.write((0).to_bytes(8, "big"), self._until())  # it will never come: nothing of it stays there
            self._answer("dropped", doing="giving up")
            raise
        if MANIFEST_NAME not in offsets:
            self._lines.write(len(tree.manifest).to_bytes(8, "big") + tree.manifest, self._until())
            delivery.sent(len(tree.manifest))

    def _send_file(self, source: Path, entry: FileEntry, offset: int, delivery: Delivery) -> bool:
        """False when the host has answered before the end."""
        place = source / entry.path
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as fault:
            raise TreeFault(place, f"can't be read: {fault.strerror}") from fault
        try:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode) or before.st_size != entry.bytes:
                raise TreeFault(place, f"it changed: {before.st_size} bytes, expected {entry.bytes}")
            while offset < entry.bytes:
                if self._lines.has_answer():
                    return False
                count = min(FRAME_BYTES, entry.bytes - offset)
                self._send_frame(descriptor, offset, count, place)
                offset += count
                delivery.sent(count)
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise TreeFault(place, "it changed while it was read")
        return True

    def _send_frame(self, descriptor: int, offset: int, count: int, place: Path) -> None:
        try:
            self._lines.write(count.to_bytes(8, "big"), self._until())
            self._lines.write_file(descriptor, offset, count, self._until())
        except ShortFile as fault:
            self._lines.write(bytes(fault.missing_bytes), self._until())  # in the middle of a frame nothing can be said
            raise TreeFault(place, "it became shorter or unreadable while it was read") from fault
        except TROUBLES:
            if not self._lines.has_answer():
                raise  # else it has refused and left, and said why before that

    def _answer(self, awaited: str, *, doing: str, is_link: bool = False, **told: Callable[[int], None]) -> dict[str, Any]:
        """The answer that has this word; signs of life before it go to `told`. `is_link`: that a neighbour gave nothing is an answer too."""
        while True:
            try:
                answer = self._lines.read_object(time.monotonic() + (LINK_SILENCE_SECONDS_MAX if is_link else SILENCE_SECONDS_MAX))
            except TROUBLES as fault:
                raise self._unreachable(f"{doing}: {in_words(fault)}") from fault
            if is_link and answer.get("kind") == "link":
                return answer
            if answer.get("ok") is not True:
                raise self._refusal(answer)
            for word, tell in told.items():
                if isinstance(answer.get(word), int):
                    tell(answer[word])
            if awaited in answer:
                return answer

    def _write(self, request: dict[str, Any]) -> None:
        try:
            self._lines.write(dumps(request).encode() + b"\n", self._until())
        except TROUBLES as fault:
            raise self._unreachable(f"{request['do']}: {in_words(fault)}") from fault

    def _until(self) -> float:
        return time.monotonic() + SILENCE_SECONDS_MAX

    def _unreachable(self, what: str) -> ExplainedError:
        return self._road.unreachable(what)

    def _refusal(self, answer: dict[str, Any]) -> ExplainedError:
        if answer.get("kind") == "busy":
            return self._unreachable(f"{answer.get('what')}: {answer.get('path')}")
        return refusal(self._road.plan, answer)


def start_stager(road: SshRoad, release: str, until_seconds: float, lines: ChannelLines | None = None) -> Stager:
    """A stager on a channel of the control connection, or on a login shell of the caller's, who closes it. The session has seen already that
    the host can run it."""
    lines = lines or road.lines(until_seconds)
    try:
        become(lines, (road.python, "-I", f"{road.plan.root}/releases/{release}/{ENTRY}", "stager", road.plan.root), until_seconds)
    except TROUBLES as fault:
        lines.channel.close()
        raise road.unreachable(f"the stager did not start in its login shell: {in_words(fault)}") from fault
    return Stager(road, lines)


def deliver(tree: Tree, delivery: Delivery, road: SshRoad, stager: Stager, link: Link | NoLink | None = None) -> bool:
    """The tree in place; False when it was there. From the neighbour if there is one that gives it, else from here. DataDamaged names the
    file that changed here, or what is wrong over there."""
    have = stager.begin(tree, delivery)
    if have is None:
        return False
    usual = Road(word=delivery.road, because=delivery.because)
    if isinstance(link, Link):
        delivery.goes_by(link.road, f"over {link.address}, as data_from of {road.plan.name} says")
        pulled = stager.pull(tree, have, link, delivery)
        if pulled is None:
            return True
        have, link = pulled[0], NoLink(why_it_gave_nothing(pulled[1], road.plan.name, link))
    if link is not None:
        delivery.goes_by(usual.word, f"{link}; {usual.because}")
    try:
        stager.take(tree, have, delivery)
    except TreeFault as fault:
        raise damaged_source(tree.kind, road.plan.name, fault) from fault
    return True


def _hash_of_beginning(place: Path, count: int) -> str:
    digest = hashlib.sha256()
    try:
        with open(place, "rb", buffering=0) as file:
            while count and (part := file.read(min(count, HASH_BYTES))):
                digest.update(part)
                count -= len(part)
    except OSError:
        return ""
    return digest.hexdigest()


def _compare(tree: Tree) -> None:
    """TreeFault for the first file that is no longer what its entry says."""
    for entry in tree.entries:
        found = read_entry(tree.source, entry.path)
        if found != entry:
            raise TreeFault(tree.source / entry.path, f"it changed: SHA-256 {found.sha256}, expected {entry.sha256}")
