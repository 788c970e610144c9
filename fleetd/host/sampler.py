"""The sampler: what a trainer's tree holds, looked at as often as its growth asks for, and as cheaply as it can be told.

    in a cgroup of ours   anon + shmem of memory.stat, and what members outside of it hold: exact, 20 microseconds
    elsewhere             RssAnon + RssShmem + VmSwap summed, which can only be too high, and files in memory that are open and not mapped;
                          from the soft line on the proportional share (30 to 75 ms for a few GiB) decides, read for a twentieth of the time
Between two looks of the supervisor `peek` reads the quick figure alone, four times a second and faster while it grows.
"""

from __future__ import annotations

import os
import time

from fleetd.host import cgroups, devices, meters, tmpfs
from fleetd.host.processes import open_process, stat_fields
from fleetd.host.sight import MemoryLook
from fleetd.host.tree import Member
from fleetd.model import Caps
from policies.memory import gib, lines_of, look_again_seconds

PEEK_SECONDS = 0.25
PEEK_SECONDS_MIN = 0.02
EXACT_TIME_SHARE = 0.05
"""Of the time, what may go into reading proportional shares, and as much into looking for files in memory."""
GROWTH_MEMORY_SHARE = 0.5
"""Allocation comes in bursts: after each look at least this share of the growth seen before is still expected."""
DEVICE_CALM_SECONDS = 1.0
DEVICE_QUICK_SECONDS = 0.2
"""Asking NVML costs milliseconds."""

_OFTEN = "four times a second, faster while it grows"
_BY_CGROUP = f"anon + shmem of the cgroup {_OFTEN}"
_BY_SUM = f"RssAnon + RssShmem + VmSwap of the tree {_OFTEN}"
_BY_SHARE = f"{_BY_SUM}; shared pages once (PSS) near the line"


class Growth:
    """How fast an amount grows, in bytes per second."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._before: tuple[float, int] | None = None

    def see(self, seconds: float, amount_bytes: int | None) -> None:
        if amount_bytes is None:
            return
        if self._before is not None and seconds > self._before[0]:
            found = (amount_bytes - self._before[1]) / (seconds - self._before[0])
            self.bytes_per_second = max(found, GROWTH_MEMORY_SHARE * self.bytes_per_second, 0.0)
        self._before = (seconds, amount_bytes)


class Sampler:
    """One tree's memory. `look` once per tick of the supervisor, `peek` in between."""

    def __init__(self, caps: Caps) -> None:
        self.caps = caps
        self.lines = lines_of(
            host_cap_bytes=caps.host_bytes, accelerator_cap_bytes=caps.accelerator_bytes, soft_fraction=caps.soft_fraction,
        )
        self.memory = MemoryLook()
        self.device_members: dict[int, Member] = {}
        """Of this attempt, whoever was seen to hold device memory."""
        self._members: tuple[Member, ...] = ()
        self._group = cgroups.Group()
        self._now_bytes: int | None = None
        self._shared_bytes = 0
        """By how much the quick figure was too high when it was last compared with the exact one."""
        self._unmapped_bytes = 0
        """Of files in memory that no resident size shows."""
        self._exact_due_seconds = self._unmapped_due_seconds = float("-inf")
        self._host, self._device, self._free = Growth(), Growth(), Growth()

    def welcome(self, members: tuple[Member, ...]) -> None:
        """Between two looks: the tree as it is now."""
        self._members = members

    def rest(self) -> MemoryLook:
        """No verified trainer lives: only the host is looked at."""
        self._members, self._now_bytes = (), None
        self.memory = MemoryLook(available_bytes=meters.available_bytes())
        return self.memory

    def look(self, members: tuple[Member, ...], cgroup: str | None, seconds: float) -> MemoryLook:
        self._members, self._group = members, cgroups.decode_group(cgroup)
        host_bytes, means = self._measure(seconds)
        use = devices.look()
        device = devices.bytes_of((member.identity.pid for member in members), use)
        if devices.sees_machine_pids():
            self.device_members |= {member.identity.pid: member for member in members if use.holds(member.identity.pid)}
        self.memory = MemoryLook(
            host_bytes=host_bytes, accelerator_bytes=device.known, accelerator_least_bytes=device.least, accelerator_why=device.why,
            available_bytes=meters.available_bytes(), means=means,
        )
        self._now_bytes = host_bytes
        self._host.see(seconds, host_bytes)
        self._device.see(seconds, self.memory.accelerator_bytes)
        self._free.see(seconds, None if self.memory.available_bytes is None else -self.memory.available_bytes)
        return self.memory

    def peek(self, seconds: float) -> bool:
        """Whether the host's part has reached a line that it had not at the last look."""
        if self._unmapped_bytes > 0:  # a tree that uses such files is watched for them, others only at each look
            self._see_unmapped(seconds)
        before_bytes, (quick_bytes, _) = self.memory.host_bytes, self._quick()
        if quick_bytes is None or before_bytes is None:
            return False
        self._now_bytes = now_bytes = max(0, quick_bytes - self._shared_bytes)
        self._host.see(seconds, now_bytes)
        return any(before_bytes < line <= now_bytes for line in (self.lines.host_soft_bytes, self.lines.host_hard_bytes))

    def peek_seconds(self) -> float | None:
        """Until the next peek; None while there is nothing to look at."""
        used_bytes, lines = self._now_bytes, self.lines
        if not self._members or used_bytes is None:
            return None
        return look_again_seconds(
            used_bytes=used_bytes, line_bytes=lines.host_soft_bytes if used_bytes < lines.host_soft_bytes else lines.host_hard_bytes,
            growth_bytes_per_second=self._host.bytes_per_second, calm_seconds=PEEK_SECONDS, quick_seconds=PEEK_SECONDS_MIN,
        )

    def look_seconds(self) -> float:
        """Until the next whole look, as far as the device and the host's floor go."""
        device, free = self.memory.accelerator_bytes, self.memory.available_bytes
        waits = (
            look_again_seconds(
                used_bytes=used, line_bytes=line, growth_bytes_per_second=growth.bytes_per_second, calm_seconds=DEVICE_CALM_SECONDS,
                quick_seconds=DEVICE_QUICK_SECONDS,
            )
            for used, line, growth in (
                (device, self.lines.accelerator_soft_bytes, self._device),
                (None if free is None else -free, -self.caps.floor_bytes, self._free),
            )
        )
        return min(waits)

    def device_left(self, leader_pid: int) -> str:
        """What of an ended tree the devices still hold, in words. A pid that is somebody else's by now counts for nothing."""
        use = devices.look()
        pids = {*self.device_members, *((leader_pid,) if devices.sees_machine_pids() else ())}
        left = [pid for pid in sorted(pids) if use.holds(pid) and not _is_taken(pid)]
        words = [f"pid {pid} ({'an unknown amount' if pid in use.unsaid else gib(use.by_pid[pid])})" for pid in left]
        if words:
            return f"the device still holds memory of {', '.join(words)}"
        return f"the device no longer answers ({use.trouble}), and held memory of this tree" if use.trouble and self.device_members else ""

    def _measure(self, seconds: float) -> tuple[int | None, str]:
        """The host's part as exactly as it is worth now, and by what means."""
        self._see_unmapped(seconds)
        quick_bytes, is_exact = self._quick()
        if quick_bytes is None or is_exact:
            self._shared_bytes = 0
            return quick_bytes, _BY_CGROUP if is_exact else _BY_SUM
        if quick_bytes < self.lines.host_soft_bytes or len(self._members) < 2:
            self._shared_bytes = 0
            return quick_bytes, _BY_SUM
        if seconds >= self._exact_due_seconds:
            began_seconds = time.perf_counter()
            exact = meters.tree_memory(self._members, near_bytes=0)
            spent_seconds = time.perf_counter() - began_seconds
            self._exact_due_seconds = seconds + spent_seconds / EXACT_TIME_SHARE
            is_told = exact.is_exact and exact.host_bytes is not None
            self._shared_bytes = max(0, quick_bytes - self._unmapped_bytes - (exact.host_bytes or 0)) if is_told else 0
        return max(0, quick_bytes - self._shared_bytes), _BY_SHARE

    def _see_unmapped(self, seconds: float) -> None:
        if self._group.memory is None and seconds >= self._unmapped_due_seconds:
            began_seconds = time.perf_counter()
            self._unmapped_bytes = tmpfs.unmapped_bytes(self._members)
            self._unmapped_due_seconds = seconds + (time.perf_counter() - began_seconds) / EXACT_TIME_SHARE

    def _quick(self) -> tuple[int | None, bool]:
        """A figure that costs next to nothing, and whether it counts shared pages once."""
        held_bytes = cgroups.held_bytes(self._group)
        if held_bytes is None:
            summed_bytes = meters.tree_memory(self._members).host_bytes
            return None if summed_bytes is None else summed_bytes + self._unmapped_bytes, False
        inside = set(cgroups.processes_in(cgroups.Group(memory=self._group.memory)))
        outside = tuple(member for member in self._members if member.identity.pid not in inside)
        return held_bytes + (meters.tree_memory(outside).host_bytes or 0 if outside else 0), True


def _is_taken(pid: int) -> bool:
    """Whether a living process has this pid. The tree is empty: it is nobody of ours."""
    try:
        folder = open_process(pid)
    except OSError:
        return False
    try:
        return stat_fields(folder)[0] not in "ZXx"
    except (OSError, IndexError):
        return False
    finally:
        os.close(folder)
