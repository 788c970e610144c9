"""A virtual machine: processes with pids that are handed on quickly, two clocks, memory, a disk, a power cord.

Stands in for the kernel that fleetd/host/processes.py, tree.py, meters.py and fleetd/clock.py talk to.
"""

from __future__ import annotations

import errno
import math
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fleetd.clock import Moment
from fleetd.coordinator.host_keys import HostKey
from fleetd.kept_clock import KeptClock, pair_of
from policies.deadlines import after_reboot
from policies.facts import GIB, ProcessIdentity
from policies.identity import ProcessSight
from tests.sim.world import EPOCH, World

if TYPE_CHECKING:
    from tests.sim.laws import Laws
    from tests.sim.rundir import VirtualRun

FIRST_PID, PIDS_MAX = 300, 60
"""So few pids that each is handed on within a minute or two."""
SERVICES = 12
CROWDED_BYTES = 64 * 1024
"""Room for small records, and for no checkpoint."""
UID = 1000
NTP_SECONDS = (2.0, 90.0)
"""After a boot, until the network has told the time."""


class Process:
    """One process. `run_id` and `role` are the truth about whose it is, which no code under test can read."""

    __slots__ = (
        "argv",
        "base_bytes",
        "bytes_max",
        "grows_at",
        "growth",
        "hung_until",
        "inode",
        "is_reaped",
        "machine",
        "on_end",
        "on_signal",
        "parent",
        "pid",
        "role",
        "run_id",
        "start_ticks",
        "status",
        "token",
        "unkillable_until",
    )

    def __init__(self, machine: Machine, pid: int, role: str, argv: tuple[str, ...], parent: Process | None, run_id: str, token: str) -> None:
        self.machine, self.pid, self.role, self.argv, self.parent, self.run_id, self.token = machine, pid, role, argv, parent, run_id, token
        self.start_ticks, self.inode = int(machine.boottime_seconds() * 100), machine.next_inode()
        self.status: int | None = None
        """Raw wait status once it has ended."""
        self.is_reaped = False
        self.base_bytes, self.growth, self.grows_at, self.bytes_max = 0, 0.0, 0.0, 1 << 62
        self.unkillable_until = self.hung_until = 0.0
        self.on_signal: Callable[[int], None] | None = None
        self.on_end: list[Callable[[], None]] = []

    @property
    def is_alive(self) -> bool:
        return self.status is None and not self.is_reaped

    def bytes(self) -> int:
        if not self.is_alive:
            return 0
        grown = self.growth * max(0.0, self.machine.world.seconds - self.grows_at) if self.growth else 0.0
        return min(self.bytes_max, self.base_bytes + int(grown))

    def identity(self) -> ProcessIdentity:
        return ProcessIdentity(
            boot_id=self.machine.boot_id, pid=self.pid, start_ticks=self.start_ticks, uid=UID, argv=self.argv, pidfd_inode=self.inode,
        )

    def leave(self, status: int) -> None:
        self.machine.end(self, status)

    def __repr__(self) -> str:
        return f"{self.role} {self.pid} of {self.run_id or 'nobody'} on {self.machine.name}"


class Machine:
    def __init__(self, world: World, name: str, laws: Laws, *, memory_bytes: int = 16 * GIB, has_cgroup: bool = True, reuse: float = 0.5) -> None:
        self.world, self.name, self.laws = world, name, laws
        self.memory_bytes, self.has_cgroup, self.reuse = memory_bytes, has_cgroup, reuse
        self.boots, self.booted_at, self.offset_seconds = 1, -1000.0, 0.0
        self.is_up, self.is_disk_full, self.is_disk_crowded, self.is_hiding = True, False, False, False
        self.hog_bytes, self.was_stepped, self.shows_since = 0, False, 0.0
        self.laziness, self.reads_exits = 1.0, True
        self.processes: dict[int, Process] = {}
        self.runs: dict[str, VirtualRun] = {}
        self.owner: Any = None
        self.never_start: set[str] = set()
        """Runs that went on elsewhere before their order came here."""
        self.models: set[str] = set()
        """Digests of the checkpoints that were staged here, verified."""
        self.key = HostKey(kind="ssh-ed25519", blob=name.encode())
        self.old_key = HostKey(kind="ssh-ed25519", blob=f"{name}, until it was stolen".encode())
        self.nature: Any = None
        self.kept: KeptClock | None = None
        """What it keeps of the time, where a story is about that: None for a machine whose clock is believed after each boot."""
        self.synchronised_at = 0.0
        """From when on the kernel calls its clock synchronised; never where nothing on the machine asks the network for the time."""
        self.has_ntp = True
        self._told_in_boot = 1
        self._last_pid, self._inodes = FIRST_PID, 0

    # Clocks.

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self.boots}"

    def boottime_seconds(self) -> float:
        return self.world.seconds - self.booted_at + 1e-9

    def moment(self) -> Moment:
        return Moment(now=EPOCH + timedelta(seconds=self.world.seconds + self.offset_seconds), boottime_seconds=self.boottime_seconds())

    def step_clock(self, seconds: float) -> None:
        self.offset_seconds += seconds
        self.was_stepped, self.synchronised_at = True, math.inf  # as after clock_settime(2)
        self.world.say(self.name, f"the wall clock is stepped by {seconds:+.0f} s, it is {self.offset_seconds:+.0f} s off")

    @property
    def is_synchronised(self) -> bool:
        """What the kernel says of its clock."""
        return self.world.seconds >= self.synchronised_at

    @property
    def knows_time(self) -> bool:
        """Whether somebody has told this boot what time it is: the network, or a coordinator."""
        return self.kept is None or self.kept.is_confirmed or self._told_in_boot == self.boots

    def _hear_the_time(self, boots: int) -> None:
        if self.is_up and self.boots == boots:
            if abs(self.offset_seconds) > 1.0:
                self.step_clock(-self.offset_seconds)
            self.synchronised_at, self._told_in_boot = self.world.seconds, boots
            self.world.say(self.name, "its clock is synchronised")

    # The disk and memory.

    def check_disk(self, size_bytes: int = 0) -> None:
        if self.is_disk_full or size_bytes > self.disk_free_bytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def disk_free_bytes(self) -> int:
        return 0 if self.is_disk_full else CROWDED_BYTES if self.is_disk_crowded else 50 * GIB

    def available_bytes(self) -> int:
        return max(0, self.memory_bytes - self.hog_bytes - sum(process.bytes() for process in self.processes.values() if process.base_bytes))

    # Processes.

    def next_inode(self) -> int:
        self._inodes += 1
        return self._inodes

    def spawn(
        self, role: str, argv: tuple[str, ...], *, parent: Process | None = None, run_id: str = "", token: str = "", pid: int | None = None
    ) -> Process:
        if pid is None:
            pid = self._free_pid()
        process = Process(self, pid, role, argv, parent, run_id, token)
        self.processes[pid] = process
        return process

    def _free_pid(self) -> int:
        for _ in range(PIDS_MAX * 20):
            self._last_pid = FIRST_PID + (self._last_pid - FIRST_PID + 1) % PIDS_MAX
            if self._last_pid not in self.processes:
                return self._last_pid
        raise AssertionError("a virtual machine has no pid left")

    def end(self, process: Process, status: int) -> None:
        """It has ended: a zombie of its parent, or reaped by init at once. Its children go to the next living subreaper above it."""
        if not process.is_alive:
            return
        if process.role == "worker" and process.unkillable_until > self.world.seconds:
            self.world.after(process.unkillable_until - self.world.seconds, self.end, process, status)
            return
        process.status = status
        heir = process.parent
        while heir is not None and not (heir.is_alive and heir.role in ("shim", "supervisor")):
            heir = heir.parent
        if heir is None or process.role in ("worker", "stranger"):
            self.reap(process)
        process.parent = heir
        for child in [each for each in self.processes.values() if each.parent is process]:
            child.parent = heir
            if heir is None and not child.is_alive:
                self.reap(child)
        for each in process.on_end:
            each()

    def reap(self, process: Process) -> None:
        if process.is_reaped:
            return
        process.is_reaped = True
        if self.processes.get(process.pid) is process:
            del self.processes[process.pid]
            if process.role != "stranger" and self.world.chance(self.reuse):
                self.world.after(self.world.between(0.0, 2.0), self._hand_on, process.pid, process.argv)

    def _hand_on(self, pid: int, argv: tuple[str, ...]) -> None:
        """Somebody else gets the pid, at times with the very same command line."""
        if self.is_up and pid not in self.processes:
            stranger = self.spawn("stranger", argv if self.world.chance(0.5) else ("sleep", "9"), pid=pid)
            self.world.after(self.world.between(5.0, 120.0), self.end, stranger, 0)

    def sight(self, pid: int) -> ProcessSight:
        """What /proc shows of a pid now: the input of `policies.identity.classify`."""
        process = self.processes.get(pid)
        if process is None:
            return ProcessSight(boot_id=self.boot_id, pid=pid, exists=False)
        hides = self.is_hiding and process.role in ("trainer", "worker") and process.is_alive
        return ProcessSight(
            boot_id=self.boot_id, pid=pid, exists=True, state="S" if process.is_alive else "Z", start_ticks=process.start_ticks, uid=UID,
            argv=None if hides or not process.is_alive else process.argv, pidfd_inode=None if hides else process.inode,
            unreadable=("argv", "pidfd") if hides else (),
        )

    def deliver(self, process: Process, number: int, *, sender: str, run_id: str) -> bool:
        """A signal reaches this very process, as through a pidfd. False when it has ended."""
        self.laws.signalled(process, number, sender, run_id)
        if not process.is_alive:
            return False
        if number == signal.SIGKILL:
            wait_seconds = process.unkillable_until - self.world.seconds
            if wait_seconds > 0:
                self.world.after(wait_seconds, self.end, process, int(signal.SIGKILL))
            else:
                self.end(process, int(signal.SIGKILL))
        elif process.on_signal is not None and process.hung_until <= self.world.seconds:
            process.on_signal(number)
        return True

    # The power cord.

    def power_off(self) -> None:
        """Every process is gone at once, and whatever was not synced may be."""
        self.is_up = False
        for process in list(self.processes.values()):
            process.is_reaped = True
            if process.status is None:
                process.status = int(signal.SIGKILL)
        self.processes.clear()
        for run in self.runs.values():
            run.lose_power()

    def power_on(self) -> None:
        self.boots += 1
        self.booted_at, self.is_up, self._last_pid = self.world.seconds, True, FIRST_PID
        self.hog_bytes = 0
        if self.kept is not None:
            reading, before = pair_of(self.moment()), self.kept.trusted
            self.kept, self.synchronised_at = KeptClock(), math.inf
            self.kept.trusted = after_reboot(reading=reading, recorded_now=before.now if before is not None else None)
            if self.has_ntp:
                self.world.after(self.world.between(*NTP_SECONDS), self._hear_the_time, self.boots)
        for _ in range(SERVICES):
            # What a machine starts by itself has the low pids that trainers had before.
            service = self.spawn("stranger", ("service",))
            self.world.after(self.world.between(5.0, 300.0), self.end, service, 0)
