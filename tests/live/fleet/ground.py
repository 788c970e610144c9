"""What one fleet may call its own: a number that nobody else has now, and the names, addresses and folders that follow from it.

    number N → /var/tmp/fleetd-hosts-N/ · 10.213.N.0/24 · fd00:213:N::/64 · bridge fhN · cables fhN-1 … · cgroups fhN-<host>

The claim is an abstract unix socket: it belongs to a process and to a network namespace, as the bridge does, and ends with the process
whatever happens to it. Who holds a number may therefore clear away everything that carries it. Number 0 is for a person (`make fleet-up`);
nobody claims it, and it stays until `make fleet-down`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BY_HAND = 0
NUMBERS = range(1, 100)
END_SECONDS_MAX = 60.0
DISK_KINDS = {"ext4", "xfs", "btrfs", "tmpfs"}
"""File systems that the writable layer of an overlay may lie on."""


@dataclass(frozen=True, slots=True)
class Ground:
    number: int

    @property
    def prefix(self) -> str:
        """How every interface and cgroup of this fleet begins. An interface's name has at most 15 characters."""
        return f"fh{self.number}"

    @property
    def bridge(self) -> str:
        return self.prefix

    @property
    def folder(self) -> Path:
        return disk() / f"fleetd-hosts-{self.number}"

    @property
    def subnet(self) -> str:
        return f"10.213.{self.number}.0/24"

    def address(self, place: int) -> str:
        """Of the host at this place, counted from 1; place 0 is the machine that the tests run on."""
        return f"10.213.{self.number}.{10 + place if place else 1}"

    def address_v6(self, place: int) -> str:
        return f"fd00:213:{self.number}::{10 + place if place else 1}"

    def hardware_address(self, place: int) -> str:
        """A machine keeps it over a power cycle, and others remember it."""
        return f"02:fd:00:{self.number:02x}:00:{place:02x}"

    def cable(self, place: int) -> str:
        return f"{self.prefix}-{place}"

    def tap(self, place: int) -> str:
        return f"{self.prefix}-{place}t"

    def cgroup(self, name: str) -> str:
        return f"{self.prefix}-{name}"


class Claim:
    """A number that is ours until `leave`, or until this process ends.

    Which one depends on this process: whoever still looks for hosts that are gone must not find ours at their addresses.
    """

    def __init__(self, numbers: Iterable[int] | None = None) -> None:
        first = os.getpid() % len(NUMBERS)
        for number in numbers or (*NUMBERS[first:], *NUMBERS[:first]):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._socket.bind(f"\0fleetd-hosts-{number}")
            except OSError:
                self._socket.close()
                continue
            self.ground = Ground(number)
            return
        raise NoNumber("every number that was asked for is taken")

    def leave(self) -> None:
        self._socket.close()


class NoNumber(Exception):
    """Somebody has it."""


def clear_stale() -> None:
    """Clear away what owners left who were killed: everything under a number that nobody claims."""
    for number in NUMBERS:
        if Ground(number).folder.exists():
            try:
                claim = Claim([number])
            except NoNumber:
                continue
            clear(claim.ground)
            claim.leave()


def disk() -> Path:
    """A folder on a disk that can be the writable layer of an overlay: /var/tmp, in a container /dev/shm."""
    kinds = {fields[1]: fields[2] for fields in (line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines())}
    for folder in (Path("/var/tmp"), Path("/dev/shm")):
        mounted = next((str(each) for each in (folder, *folder.parents) if str(each) in kinds), "/")
        if kinds.get(mounted) in DISK_KINDS:
            return folder
    raise AssertionError("neither /var/tmp nor /dev/shm can hold the disks of test hosts")


def clear(ground: Ground) -> None:
    """Take away everything that carries this number: processes, links, route, cgroups, folder. Nothing to do is fine."""
    for record in sorted(ground.folder.glob("*/*.pid")):
        end_recorded(record)
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]:
        name = line.split(":")[0].strip()
        if name == ground.bridge or name.startswith(f"{ground.prefix}-"):
            subprocess.run(["ip", "link", "delete", name], stderr=subprocess.DEVNULL, check=False)  # a cable may go with its host meanwhile
    subprocess.run(["ip", "route", "delete", "unreachable", ground.subnet], stderr=subprocess.DEVNULL, check=False)
    for group in groups_of(ground):
        remove_groups(group)
    if ground.folder.exists():
        shutil.rmtree(ground.folder)


def groups_of(ground: Ground) -> list[Path]:
    """Every cgroup that carries this number. No `glob`: that fails when a group of somebody else goes while it looks."""
    found = []
    for folder, groups, _ in os.walk("/sys/fs/cgroup"):
        ours = [group for group in groups if group.startswith(f"{ground.prefix}-")]
        found += [Path(folder, group) for group in ours]
        groups[:] = [group for group in groups if group not in ours]
    return found


def remember(record: Path, pid: int) -> None:
    """Write down a process, so that whoever clears up later can end exactly this one."""
    record.write_text(json.dumps({"pid": pid, "start_ticks": start_ticks(pid)}), encoding="utf-8")


def recorded_pid(record: Path) -> int | None:
    """The recorded process, if it still lives and is the same."""
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    pid = int(known["pid"])
    return pid if known["start_ticks"] is not None and start_ticks(pid) == known["start_ticks"] else None


def end_recorded(record: Path) -> None:
    """SIGKILL to the recorded process, and its end awaited. For pid 1 of a host this ends everything on it."""
    pid = recorded_pid(record)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + END_SECONDS_MAX
        while recorded_pid(record) is not None:
            assert time.monotonic() < end, f"{record.parent.name}: process {pid} does not end"
            time.sleep(0.005)
    record.unlink(missing_ok=True)


def start_ticks(pid: int) -> int | None:
    """When a process began, None for one that is gone or a zombie (proc(5), fields 3 and 22, counted behind the last parenthesis)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def remove_groups(top: Path) -> None:
    """An empty cgroup with all below it. The kernel lets go of the last process a moment after its end."""
    for group in sorted((each for each in (top, *top.rglob("*")) if each.is_dir()), key=lambda each: len(each.parts), reverse=True):
        end = time.monotonic() + END_SECONDS_MAX
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                assert time.monotonic() < end, f"{group} is still in use"
                time.sleep(0.01)
