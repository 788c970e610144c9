"""Files that somebody else appends to for weeks, held to a size on disk while the writer goes on and every reader keeps its place.

    as it began │ a hole, given back to the disk │ what was said last

The hole is punched into the middle of the file that the writer holds open: no rename, no pipe, no signal, nothing to wait for, and
every offset stays what it was, so that whoever follows the file goes on. Where a file system can't punch (fallocate(2): EOPNOTSUPP),
the end is copied to NAME.1 and the file cut to nothing; a writer in append mode goes on at its new end.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from fleetd import faults

OUTPUT_BYTES_MAX = 64 * 1024 * 1024
"""What the output of one attempt may take on disk; it may be more for as long as its supervisor takes for one turn."""
HEAD_BYTES_MAX = 1024 * 1024
"""How it began explains much: this much of it is kept, or an eighth of a smaller bound."""
BLOCK_BYTES = 64 * 1024
"""Holes begin and end at multiples of this: a part of a block would be overwritten with zeros instead of given back."""
STAT_BLOCK_BYTES = 512

_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_CANNOT_PUNCH = (errno.EOPNOTSUPP, errno.ENOSYS)


def hold_path_within(path: Path, bytes_max: int = OUTPUT_BYTES_MAX) -> int:
    """The same for a file by its name; 0 when there is none. OSError where it can't be held."""
    try:
        if os.stat(path).st_blocks * STAT_BLOCK_BYTES <= bytes_max:
            return 0
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        return hold_within(descriptor, bytes_max, aside=path.with_name(f"{path.name}.1"))
    finally:
        os.close(descriptor)


def hold_within(descriptor: int, bytes_max: int, *, aside: Path | None = None) -> int:
    """Give the middle of an open file back to the disk once it takes more than `bytes_max` there; the bytes that were dropped.

    About half of the bound is left, so that this is seldom. Where no hole can be punched and no name is given for the end, nothing happens.
    """
    assert bytes_max >= 8 * BLOCK_BYTES
    status = os.fstat(descriptor)
    if status.st_blocks * STAT_BLOCK_BYTES <= bytes_max:
        return 0
    first = min(HEAD_BYTES_MAX, bytes_max // 8) // BLOCK_BYTES * BLOCK_BYTES
    last = (status.st_size - bytes_max // 2) // BLOCK_BYTES * BLOCK_BYTES
    if last <= first:
        return 0  # it takes more than it holds: room that the file system has put by
    try:
        _punch(descriptor, first, last - first)
    except OSError as fault:
        if fault.errno not in _CANNOT_PUNCH:
            raise
        return 0 if aside is None else _cut(descriptor, status.st_size, bytes_max // 2, aside)
    return last - first


def data_at(descriptor: int, offset: int, size: int) -> tuple[int, int]:
    """Where the data at or behind `offset` begins, and where it ends: at the next hole, or at the end of the file."""
    try:
        start = os.lseek(descriptor, offset, os.SEEK_DATA)
        return start, os.lseek(descriptor, start, os.SEEK_HOLE)
    except OSError as fault:
        if fault.errno == errno.ENXIO:
            return size, size
        return offset, size  # this file system keeps no holes


def _punch(descriptor: int, offset: int, length: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    punch = library.fallocate
    punch.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    faults.before("hole")
    if punch(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "fallocate")


def _cut(descriptor: int, size: int, kept_bytes: int, aside: Path) -> int:
    """What is written between the copy and the cut is lost: the price of a file system without holes."""
    with open(f"/proc/self/fd/{descriptor}", "rb") as source, open(aside, "wb") as target:
        source.seek(max(0, size - kept_bytes))
        target.write(source.read(kept_bytes))
    os.ftruncate(descriptor, 0)
    return size - kept_bytes
