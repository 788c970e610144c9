"""Memory of the host and of a trainer's tree, in bytes. Unknown is None, never zero."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from fleetd import logs
from fleetd.host.processes import open_process, read_file, stat_fields
from fleetd.host.tree import Member
from policies.memory import gib

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's own pid namespace (linux/proc_ns.h). NVML counts pids there."""


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


def accelerator_bytes(members: tuple[Member, ...], used: dict[int, int | None] | None) -> int | None:
    """Device bytes of these processes by what `device_bytes_by_pid` said; None without NVML or where the device says not available."""
    if used is None:
        return None
    ours = [used[member.identity.pid] for member in members if member.identity.pid in used]
    if not ours and not sees_machine_pids():
        return None  # NVML names pids of the machine, we see those of a container: nothing found proves nothing
    return None if any(amount is None for amount in ours) else sum(amount for amount in ours if amount is not None)


def accelerator_names() -> tuple[str, ...]:
    """`NVIDIA H200 (139.8 GiB)` each; empty without NVML."""
    nvml = _nvml()
    if nvml is None:
        return ()
    names = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml.nvmlDeviceGetName(handle))
        try:
            names.append(f"{name} ({gib(int(nvml.nvmlDeviceGetMemoryInfo(handle).total))})")
        except nvml.NVMLError:
            names.append(name)  # memory shared with the CPU: the device has no total of its own
    return tuple(names)


def driver_version() -> str | None:
    """The accelerator driver's own version; None without NVML or where it does not say."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None


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


def device_bytes_by_pid() -> dict[int, int | None] | None:
    """Bytes by pid over all devices; a value is None where a device does not say. None when there is no NVML to ask."""
    nvml = _nvml()
    if nvml is None:
        return None
    used: dict[int, int | None] = {}
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index)):
                before, amount = used.get(process.pid, 0), process.usedGpuMemory
                used[process.pid] = None if before is None or amount is None else before + int(amount)
    except nvml.NVMLError as fault:
        logs.failed("nvml_silent", because=fault)
        return None
    return used


_loaded: list[ModuleType | None] = []


def _nvml() -> ModuleType | None:
    """pynvml, started; looked for once per process, since a machine does not grow a driver under a running supervisor."""
    if not _loaded:
        try:
            import pynvml

            pynvml.nvmlInit()
            _loaded.append(pynvml)
        except ImportError:
            _loaded.append(None)
        except pynvml.NVMLError:
            _loaded.append(None)
    return _loaded[0]


def sees_machine_pids() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
