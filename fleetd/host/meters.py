"""Memory of the host and of a trainer's tree, in bytes. Unknown is None, never zero."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fleetd.host.processes import open_process, read_file, stat_fields
from fleetd.host.tree import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMemory:
    """`host_bytes`: RssAnon + RssShmem + VmSwap summed, or (`is_exact`) the proportional share, which counts shared pages once."""

    host_bytes: int | None
    is_exact: bool = False
    process_count: int = 0
    unreadable_count: int = 0


def tree_memory(members: tuple[Member, ...], near_bytes: int | None = None) -> TreeMemory:
    """Host bytes of these processes. From `near_bytes` on, measured exactly (30 to 75 ms for a few GiB).

    Summing resident sizes counts a page that several processes share (a fork's, a data loader's shared memory) once for each, so
    the sum can only be too high: below the line it is good enough, near it the proportional share decides.
    """
    sizes = [_resident_bytes(member) for member in members]
    known = [size for size in sizes if size is not None]
    memory = TreeMemory(
        host_bytes=sum(known) if known else None, process_count=len(known), unreadable_count=sum(1 for size in sizes if size is None),
    )
    if near_bytes is None or memory.host_bytes is None or memory.host_bytes < near_bytes or len(known) < 2:
        return memory
    shares = [_proportional_bytes(member) for member in members]
    if any(share is None for share, size in zip(shares, sizes, strict=True) if size is not None):
        return memory  # a kernel without Pss_Anon, or a member that just ended: the higher figure stands
    exact_bytes = sum(share for share in shares if share is not None)
    return TreeMemory(
        host_bytes=min(exact_bytes, memory.host_bytes), is_exact=True, process_count=memory.process_count,
        unreadable_count=memory.unreadable_count,
    )


def available_bytes() -> int | None:
    """MemAvailable of the host."""
    return _meminfo("MemAvailable")


def disk_free_bytes(folder: Path) -> int | None:
    """What an ordinary user may still write where `folder` lies; None when that can't be told."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def total_bytes() -> int:
    """MemTotal of the host."""
    total = _meminfo("MemTotal")
    assert total is not None, "/proc/meminfo always has MemTotal"
    return total


def _resident_bytes(member: Member) -> int | None:
    data = _file_of(member, "status")
    return None if data is None else _sum_kib(data, (b"RssAnon", b"RssShmem", b"VmSwap"))


def _proportional_bytes(member: Member) -> int | None:
    data = _file_of(member, "smaps_rollup")
    return None if data is None else _sum_kib(data, (b"Pss_Anon", b"Pss_Shmem", b"SwapPss"))


def _file_of(member: Member, name: str) -> bytes | None:
    """A file of this very process: None when it ended, or another has its pid."""
    try:
        folder = open_process(member.identity.pid)
    except OSError:
        return None
    try:
        if int(stat_fields(folder)[19]) != member.identity.start_ticks:
            return None
        return read_file(folder, name)
    except (OSError, IndexError, ValueError):
        return None
    finally:
        os.close(folder)


def _sum_kib(data: bytes, names: tuple[bytes, ...]) -> int | None:
    found = [int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(b":") for line in data.splitlines()) if name in names]
    return sum(found) if len(found) == len(names) else None


def _meminfo(name: str) -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:")), None)
    except (OSError, ValueError):
        return None
