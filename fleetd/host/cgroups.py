"""The kernel's part of a memory cap: one cgroup per attempt, below our own, v1 memory or delegated v2. The shim makes and removes it.

    v1, as root        <memory>/<own>/fleetd-<name>     memory.limit_in_bytes (and memsw where the kernel counts swap)
                       <unified>/<own>/fleetd-<name>    tracker: cgroup.kill ends the tree at once
    v2, delegated      <unified>/<own>/fleetd-<name>    memory.max, memory.swap.max, memory.oom.group, cgroup.kill: one folder

Page cache is reclaimed before the limit bites, so a big file never kills. A limit counts only after it was read back.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from fleetd.model import CapPart
from policies.facts import CapGrade
from policies.memory import gib

PREFIX = "fleetd-"
PROBE_PREFIX = "probe-"
"""Of a group that an agent makes for a moment, to see what this host can do: its pid follows."""
REMOVE_TRIES_MAX = 40
REMOVE_WAIT_SECONDS = 0.05
V1_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""
CHARGE_PAGES_MAX = 64
"""The kernel charges pages to a group in batches of up to so many (MEMCG_CHARGE_BATCH)."""
_HELD_KEYS_V2 = ("anon", "shmem")
_HELD_KEYS_V1 = ("total_rss", "total_shmem", "total_swap")
_HELD_KEYS = frozenset(_HELD_KEYS_V2 + _HELD_KEYS_V1)
_LEAF = "fleetd-self"
"""Where our own processes move in a delegated v2 group: a group that hands out controllers may hold no process itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The folders of one attempt: `memory` carries the limit, `tracker` (cgroup v2 without memory) can kill as a whole."""

    memory: str | None = None
    tracker: str | None = None

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(folder for folder in (self.memory, self.tracker) if folder is not None)

    def encode(self) -> str | None:
        """What AttemptRecord.cgroup holds (`memory path:tracker path`); None when there is no folder at all."""
        return f"{self.memory or ''}:{self.tracker or ''}" if self.folders else None


def decode_group(text: str | None) -> Group:
    if not text:
        return Group()
    memory, _, tracker = text.partition(":")
    return Group(memory=memory or None, tracker=tracker or None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """One mounted hierarchy and our own place in it."""

    kind: str
    mount: str
    own: str

    @property
    def folder(self) -> str:
        return self.mount + self.own.rstrip("/")


def hierarchies(pid: int | str = "self") -> tuple[Hierarchy | None, Hierarchy | None]:
    """Our own place, or that of `pid`, in cgroup v1 memory and in cgroup v2; None where not mounted or not visible from here."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()]
    v1_mount = next((fields[1] for fields in mounts if fields[2] == "cgroup" and "memory" in fields[3].split(",")), None)
    v2_mount = next((fields[1] for fields in mounts if fields[2] == "cgroup2"), None)
    v1, v2 = None, None
    for line in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
        number, controllers, own = line.split(":", 2)
        if v1_mount and "memory" in controllers.split(","):
            v1 = Hierarchy(kind="v1", mount=v1_mount, own=own)
        if v2_mount and number == "0":
            v2 = Hierarchy(kind="v2", mount=v2_mount, own=own)
    # Inside a container the path may belong to a namespace that is not mounted here.
    return tuple(one if one and ":" not in one.folder and os.path.isdir(one.folder) else None for one in (v1, v2))  # type: ignore[return-value]


def places() -> tuple[str, ...]:
    """The folders in which `create` makes groups, seen from this process."""
    try:
        v1, v2 = hierarchies()
    except OSError:
        return ()
    return (*((v1.folder,) if v1 else ()), *((_parent_v2(v2),) if v2 else ()))


def create(name: str, limit_bytes: int) -> tuple[Group, CapPart]:
    """A fresh group with its limit set and read back: ENFORCED with the means in words, else ABSENT with why. Never raises OSError."""
    assert limit_bytes > 0 and "/" not in name and ":" not in name
    try:
        v1, v2 = hierarchies()
    except OSError as fault:
        return Group(), _absent(f"no view of cgroups: {fault.strerror}")
    tracker = _make_tracker(v2, name) if v2 else None
    whys: list[str] = []
    for hierarchy, limiter in ((v1, _limit_v1), (v2, _limit_v2)):
        if hierarchy is None:
            continue
        folder = None
        try:
            folder = limiter(hierarchy, name, limit_bytes, tracker)
            part = _read_back(hierarchy, folder, limit_bytes)
            return Group(memory=folder, tracker=tracker if tracker != folder else None), part
        except OSError as fault:
            whys.append(f"cgroup {hierarchy.kind}: {fault.strerror or fault}")
            if folder and folder != tracker:
                remove(Group(memory=folder))
    return Group(tracker=tracker), _absent("; ".join(whys) or "no cgroup is mounted")


def join(group: Group) -> None:
    """Move the calling process (a child before exec) into the group. OSError when the kernel refuses."""
    for folder in group.folders:
        _write(f"{folder}/cgroup.procs", "0")


def limit_read_back(hierarchy: Hierarchy, folder: str, limit_bytes: int) -> int:
    """What the kernel keeps of a limit: rounded down to whole pages. OSError for anything else, which is no limit of ours."""
    name = "memory.limit_in_bytes" if hierarchy.kind == "v1" else "memory.max"
    text = _read(f"{folder}/{name}") or "nothing"
    if not _is_limit(text, limit_bytes):
        raise OSError(errno.EINVAL, f"the limit reads back as {text}, not {limit_bytes}")
    return int(text)


def _is_limit(text: str, limit_bytes: int) -> bool:
    set_bytes = int(text) if text.isdigit() else V1_UNLIMITED_BYTES
    return limit_bytes - os.sysconf("SC_PAGE_SIZE") < set_bytes <= limit_bytes


def end_as_a_whole(folder: str) -> None:
    """Let the kernel end the whole group at its limit instead of its biggest process, where it can (v2)."""
    try:
        _write(f"{folder}/memory.oom.group", "1")
    except OSError:
        pass  # v1, or a group that belongs to another user


def oom_kills(group: Group) -> int | None:
    """How many processes the kernel has killed at this limit; None when unknown."""
    if group.memory is None:
        return None
    for name in ("memory.events", "memory.oom_control"):
        for line in (_read(f"{group.memory}/{name}") or "").splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return None


def limit_was_hit(group: Group) -> bool:
    """Whether this group ever stood at its limit: a kill in one that never did was for want of memory on the whole machine."""
    if group.memory is None:
        return False
    events = dict(line.partition(" ")[::2] for line in (_read(f"{group.memory}/memory.events") or "").splitlines())
    if "oom" in events:
        return events["oom"] != "0"
    # v1 has no such count (newer kernels keep memory.failcnt at 0): the most it ever held stands at the limit, but for a batch of pages.
    most, limit = (_read(f"{group.memory}/{name}") or "" for name in ("memory.max_usage_in_bytes", "memory.limit_in_bytes"))
    return most.isdigit() and limit.isdigit() and int(most) + CHARGE_PAGES_MAX * os.sysconf("SC_PAGE_SIZE") > int(limit)


def limit_fault(group: Group, limit_bytes: int) -> str:
    """Why the limit no longer holds, in words; empty when it reads back as it was set. A group that has vanished says nothing."""
    if group.memory is None:
        return ""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = _read(f"{group.memory}/{name}")
        if text is not None and not _is_limit(text, limit_bytes):
            return f"the limit reads back as {text} now, not {limit_bytes}"
    return ""


def peak_bytes(group: Group) -> int | None:
    """The most this group has held, page cache included."""
    for name in ("memory.peak", "memory.max_usage_in_bytes"):
        if group.memory is not None and (text := _read(f"{group.memory}/{name}")):
            return int(text)
    return None


def held_bytes(group: Group) -> int | None:
    """Anonymous and shared memory charged to this group (v1: also what of it lies in swap), each page once, no page cache."""
    if group.memory is None or (text := _read(f"{group.memory}/memory.stat")) is None:
        return None
    found = {key: int(value) for key, _, value in (line.partition(" ") for line in text.splitlines()) if key in _HELD_KEYS}
    held = [sum(found.get(key, 0) for key in keys) for keys in (_HELD_KEYS_V2, _HELD_KEYS_V1) if keys[0] in found]
    return held[0] if held else None


def processes_in(group: Group) -> tuple[int, ...]:
    """Every pid of the group, also of groups below it."""
    found: set[int] = set()
    for top in group.folders:
        for folder, _, _ in os.walk(top):
            found.update(int(pid) for pid in (_read(f"{folder}/cgroup.procs") or "").split())
    return tuple(sorted(found - {0}))


def kill_all(group: Group) -> bool:
    """cgroup.kill: every process of the group at once, also those being forked. False where the kernel has no such file."""
    done = False
    for folder in group.folders:
        try:
            _write(f"{folder}/cgroup.kill", "1")
            done = True
        except OSError:
            pass  # v1, or a kernel before 5.14: the caller kills one by one
    return done


def remove(group: Group) -> bool:
    """Remove the folders (bounded retries while the last zombie leaves). True when nothing is left."""
    left = [folder for folder in group.folders if not _remove_folder(folder)]
    return not left


def _make_tracker(v2: Hierarchy, name: str) -> str | None:
    folder = f"{_parent_v2(v2)}/{PREFIX}{name}"
    try:
        os.mkdir(folder)
    except OSError:
        return None
    return folder


def _parent_v2(v2: Hierarchy) -> str:
    return os.path.dirname(v2.folder) if os.path.basename(v2.folder) == _LEAF else v2.folder or v2.mount


def _limit_v1(v1: Hierarchy, name: str, limit_bytes: int, tracker: str | None) -> str:
    del tracker
    folder = f"{v1.folder}/{PREFIX}{name}"
    os.mkdir(folder)
    try:
        _write(f"{folder}/memory.limit_in_bytes", str(limit_bytes))
        if os.path.exists(f"{folder}/memory.memsw.limit_in_bytes"):
            _write(f"{folder}/memory.memsw.limit_in_bytes", str(limit_bytes))
    except OSError:
        _remove_folder(folder)
        raise
    return folder


def _limit_v2(v2: Hierarchy, name: str, limit_bytes: int, tracker: str | None) -> str:
    del name
    if tracker is None:
        raise OSError(errno.EACCES, f"no group may be made below {_parent_v2(v2)}")
    _hand_out_memory(v2)
    _write(f"{tracker}/memory.max", str(limit_bytes))
    if os.path.exists(f"{tracker}/memory.swap.max"):
        _write(f"{tracker}/memory.swap.max", "0")
    end_as_a_whole(tracker)
    return tracker


def _hand_out_memory(v2: Hierarchy) -> None:
    """Let groups below our own carry a memory limit. OSError when this place was not delegated to us."""
    parent = _parent_v2(v2)
    if "memory" in (_read(f"{parent}/cgroup.subtree_control") or "").split():
        return
    if "memory" not in (_read(f"{parent}/cgroup.controllers") or "").split():
        raise OSError(errno.ENODEV, f"no memory controller at {parent}")
    try:
        _write(f"{parent}/cgroup.subtree_control", "+memory")
    except OSError as fault:
        if fault.errno != errno.EBUSY:
            raise
        if not _is_delegated(parent):
            raise OSError(errno.EPERM, f"{parent} holds processes and was not delegated to us") from fault
        os.makedirs(f"{parent}/{_LEAF}", exist_ok=True)
        for pid in (_read(f"{parent}/cgroup.procs") or "").split():
            _write(f"{parent}/{_LEAF}/cgroup.procs", pid)
        _write(f"{parent}/cgroup.subtree_control", "+memory")


def _is_delegated(folder: str) -> bool:
    """systemd marks what it has handed over (Delegate=yes); processes elsewhere are not ours to move."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(folder, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _read_back(hierarchy: Hierarchy, folder: str, limit_bytes: int) -> CapPart:
    set_bytes = limit_read_back(hierarchy, folder, limit_bytes)
    shown = folder.removeprefix(hierarchy.mount)
    return CapPart(grade=CapGrade.ENFORCED, means=f"cgroup {hierarchy.kind} {shown}, limit read back {gib(set_bytes)}")


def _remove_folder(folder: str) -> bool:
    for _ in range(REMOVE_TRIES_MAX):
        try:
            os.rmdir(folder)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(REMOVE_WAIT_SECONDS)
    return False


def _absent(why: str) -> CapPart:
    return CapPart(grade=CapGrade.ABSENT, means=why)


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return None


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
