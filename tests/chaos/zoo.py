"""Which processes belong to one installation, and in which role: read from /proc alone, for whoever kills or watches them.

    coordinator, agent, supervisor, shim      by the argv and environment they were started with
    newborn                                   the shim's child that has not become its trainer yet (it still shows the shim's argv)
    trainer                                   a session leader with our trainer's argv and a run of this installation in its environment
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROLES = ("coordinator", "agent", "supervisor", "shim", "newborn", "trainer")
_MODULES = {b"fleetd.coordinator.daemon": "coordinator", b"trainer": "trainer"}
_DOOR = b"/fleetd/host/__main__.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Animal:
    """One living process of the installation. `run`: the name of its run directory, empty for coordinator and agent."""

    pid: int
    start_ticks: int
    role: str
    run: str = ""
    parent: int = 0


def look_at(pid: int, root: bytes) -> Animal | None:
    """What this pid is to the installation below `root` now; None for strangers, zombies and the dead."""
    try:
        fields = _stat(pid)
        words = _read(pid, "cmdline").split(b"\0")
        role, subject = role_of(words)
        if fields[0] in "ZXx" or not role:
            return None
        entries = _read(pid, "environ").split(b"\0")
        if not any(speaks_of(word, root) for word in (*words, *entries)) or _stat(pid)[19] != fields[19]:
            return None
    except (OSError, IndexError):
        return None
    values = dict(entry.partition(b"=")[::2] for entry in entries)
    run = Path(os.fsdecode(subject)).name if role in ("supervisor", "shim") else ""
    if role == "trainer":
        run = os.fsdecode(values.get(b"FLEETD_RUN_ID", b""))
        if not run or int(fields[3]) != pid:
            return None
    return Animal(pid=pid, start_ticks=int(fields[19]), role=role, run=run, parent=int(fields[1]))


def speaks_of(word: bytes, root: bytes) -> bool:
    """Whether this path or one below it stands in the word: `story-24` is another installation than `story-2`."""
    place = word.find(root)
    while place >= 0:
        after = word[place + len(root) : place + len(root) + 1]
        if not (after.isalnum() or after in (b"-", b"_", b".")):
            return True
        place = word.find(root, place + 1)
    return False


def role_of(words: list[bytes]) -> tuple[str, bytes]:
    """The role that a command line speaks of, and what it is about; ("", b"") for a stranger's."""
    for index, (word, after) in enumerate(pairwise(words)):
        if word.endswith(_DOOR):
            return os.fsdecode(after), next(iter(words[index + 2:]), b"")
        if word == b"-m" and after in _MODULES:
            return _MODULES[after], b""
    return "", b""


def animals(root: Path) -> list[Animal]:
    """Every living process of the installation."""
    needle = os.fsencode(root)
    found = [animal for name in os.listdir("/proc") if name.isdigit() and (animal := look_at(int(name), needle)) is not None]
    shims = {animal.pid for animal in found if animal.role == "shim"}
    newborn = {animal.pid for animal in found if animal.role == "shim" and animal.parent in shims}
    return [Animal(pid=each.pid, start_ticks=each.start_ticks, role="newborn", run=each.run, parent=each.parent) if each.pid in newborn else each
            for each in found]


def kill(animal: Animal) -> bool:
    """SIGKILL through a pidfd, if it still is the process that was seen. False when it was gone first."""
    try:
        descriptor = os.pidfd_open(animal.pid)
    except ProcessLookupError:
        return False
    try:
        fields = _stat(animal.pid)
        if int(fields[19]) != animal.start_ticks or fields[0] in "ZXx":
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return True
    except (OSError, IndexError):
        return False
    finally:
        os.close(descriptor)


def age_seconds(animal: Animal) -> float:
    with open("/proc/uptime", encoding="ascii") as file:
        return float(file.read().split()[0]) - animal.start_ticks / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def _read(pid: int, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
