"""Files in memory (memfd, /dev/shm) that a tree holds open and nobody has mapped: no resident size of any process shows them.

Only where no cgroup counts for us. Only what was opened
for writing. Descriptors are read as links first, so that a file on a dead network disk is never touched. A file that
was closed again belongs to nobody any more: a cgroup still counts it, elsewhere only the floor under the host's memory sees it.
"""

from __future__ import annotations

import os
import stat
from functools import lru_cache

from fleetd.host.processes import open_process, read_file, stat_fields
from fleetd.host.tree import Member

BLOCK_BYTES = 512
"""Of st_blocks, whatever the file system (stat(2))."""
MAPS_BYTES_MAX = 4 * 1024 * 1024
DESCRIPTORS_MAX = 4096
MEMFD = "/memfd:"


def unmapped_bytes(members: tuple[Member, ...]) -> int:
    """Bytes of such files, each counted once. What is mapped stands in the resident size of whoever touches it."""
    open_bytes: dict[tuple[int, int], int] = {}
    for member in members:
        open_bytes |= _files_of(member)
    if not open_bytes:
        return 0
    mapped = frozenset(inode for member in members for inode in _mapped_inodes(member))
    return sum(amount for (_, inode), amount in open_bytes.items() if inode not in mapped)


def _files_of(member: Member) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    try:
        process = open_process(member.identity.pid)
    except OSError:
        return found
    try:
        if int(stat_fields(process)[19]) != member.identity.start_ticks:
            return found
        folder = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=process)
        try:
            for name in os.listdir(folder)[:DESCRIPTORS_MAX]:
                # What is only read (a data set somebody put there) is not this tree's: the link's own mode says how it was opened.
                if _is_in_memory(os.readlink(name, dir_fd=folder)) and os.lstat(name, dir_fd=folder).st_mode & stat.S_IWUSR:
                    status = os.stat(name, dir_fd=folder)
                    found[(status.st_dev, status.st_ino)] = status.st_blocks * BLOCK_BYTES
        finally:
            os.close(folder)
    except (OSError, IndexError, ValueError):
        pass  # it ended, or is another user's: what was found of it stands
    finally:
        os.close(process)
    return found


def _mapped_inodes(member: Member) -> set[int]:
    try:
        folder = open_process(member.identity.pid)
    except OSError:
        return set()
    try:
        lines = read_file(folder, "maps", MAPS_BYTES_MAX).splitlines()
    except OSError:
        return set()
    finally:
        os.close(folder)
    found = (line.split(None, 5) for line in lines)
    return {int(fields[4]) for fields in found if len(fields) >= 5 and fields[4] != b"0" and fields[4].isdigit()}


def _is_in_memory(path: str) -> bool:
    """Whether the innermost mount of a path is a tmpfs; by its name alone."""
    if path.startswith(MEMFD):
        return True
    kind = next((kind for place, kind in _mounts() if path.startswith(place)), "")
    return kind == "tmpfs"


@lru_cache(maxsize=1)
def _mounts() -> tuple[tuple[str, str], ...]:
    """(folder with a slash at its end, type), innermost first."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="replace") as file:
            found = [(fields[1].rstrip("/") + "/", fields[2]) for fields in map(str.split, file) if len(fields) > 2]
    except OSError:
        return ()
    found.reverse()  # of two on one folder the later one is seen
    return tuple(sorted(found, key=lambda each: -len(each[0])))
