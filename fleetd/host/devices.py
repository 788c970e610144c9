"""Memory on accelerators, by process, through nvidia-ml-py. Whatever the library does, nobody here falls over it, and nothing is guessed.

    no library, no driver, one that fails        unknown, with its own words
    a device that does not answer, or [N/A]      unknown; what the others say of our processes is a least figure, and trips a line
    pids that are not the machine's (container)  unknown: NVML may name pids of the machine, and a number that looks like ours proves nothing
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fleetd import logs
from policies.memory import gib

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""The inode of the machine's own pid namespace (linux/proc_ns.h). NVML counts pids there."""
FOREIGN_PIDS = "device bytes can't be told apart by process from inside a container (pids of its own)"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What the devices say at one moment. `unsaid`: pids of which some device does not say how much; `trouble`: why this is not all."""

    by_pid: dict[int, int] = field(default_factory=dict)
    unsaid: frozenset[int] = frozenset()
    trouble: str = ""

    def holds(self, pid: int) -> bool:
        """Whether this pid is seen to hold memory, be it an unknown amount."""
        return pid in self.unsaid or self.by_pid.get(pid, 0) != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """Of one tree. `known` is None where it is not all that the tree may hold, `least` what it holds at the very least."""

    known: int | None
    least: int | None
    why: str = ""


def look() -> DeviceUse:
    """Bytes by pid over all devices."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return DeviceUse(trouble=nvml)
    by_pid: dict[int, int] = {}
    unsaid: set[int] = set()
    troubles: list[str] = []
    for index in _indices(nvml, troubles):
        try:
            processes = nvml.nvmlDeviceGetComputeRunningProcesses(nvml.nvmlDeviceGetHandleByIndex(index))
            for process in processes:
                if process.usedGpuMemory is None:
                    unsaid.add(process.pid)
                else:
                    by_pid[process.pid] = by_pid.get(process.pid, 0) + int(process.usedGpuMemory)
        except Exception as fault:  # a library of somebody else's: what it raises is its word for "I don't know"
            troubles.append(f"device {index}: {fault}")
    _say_once("; ".join(troubles))
    return DeviceUse(by_pid=by_pid, unsaid=frozenset(unsaid), trouble="; ".join(troubles))


def bytes_of(pids: Iterable[int], use: DeviceUse) -> DeviceBytes:
    """What these processes hold. A machine without NVML has nothing to know, and knows nothing."""
    if not sees_machine_pids():
        return DeviceBytes(known=None, least=None, why=use.trouble or FOREIGN_PIDS)
    ours = frozenset(pids)
    if use.trouble and not use.by_pid:
        return DeviceBytes(known=None, least=None, why=use.trouble)
    least = sum(amount for pid, amount in use.by_pid.items() if pid in ours)
    unsaid = sorted(ours & use.unsaid)
    whys = [use.trouble] if use.trouble else []
    whys += [f"the device does not say how much pid {unsaid[0]} holds"] if unsaid else []
    return DeviceBytes(known=None if whys else least, least=least if least or not whys else None, why="; ".join(whys))


def names() -> tuple[str, ...]:
    """`NVIDIA H200 (139.8 GiB)` each; empty without NVML, and without those that do not answer."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return ()
    found = []
    for index in _indices(nvml, []):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name = _text(nvml.nvmlDeviceGetName(handle))
        except Exception as fault:  # a lost device must not make its whole host unusable
            logs.failed("device_unnamed", index=index, because=fault)
            continue
        try:
            found.append(f"{name} ({gib(int(nvml.nvmlDeviceGetMemoryInfo(handle).total))})")
        except Exception:  # memory shared with the CPU: the device has no total of its own
            found.append(name)
    return tuple(found)


def driver_version() -> str | None:
    """The driver's own version; None without NVML or where it does not say."""
    nvml = _nvml()
    if isinstance(nvml, str):
        return None
    try:
        return _text(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # as everywhere here: no answer is an answer
        return None


def why_none() -> str:
    """Why there is nothing to ask, in the library's own words; empty where there is."""
    nvml = _nvml()
    return nvml if isinstance(nvml, str) else ""


def sees_machine_pids() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == INITIAL_PID_NAMESPACE
    except OSError:
        return False


_loaded: list[Any] = []
_said: list[str] = [""]


def _nvml() -> Any:
    """pynvml, started, or in words why not; looked for once per process, since a machine does not grow a driver under a running supervisor."""
    if not _loaded:
        try:
            import pynvml

            pynvml.nvmlInit()
            _loaded.append(pynvml)
        except ImportError:
            _loaded.append("nvidia-ml-py is not installed")
        except Exception as fault:
            _loaded.append(f"no NVML: {fault}")
    return _loaded[0]


def _indices(nvml: Any, troubles: list[str]) -> range:
    try:
        return range(nvml.nvmlDeviceGetCount())
    except Exception as fault:
        troubles.append(f"no device is told: {fault}")
        return range(0)


def _say_once(trouble: str) -> None:
    if trouble != _said[0]:
        _said[0] = trouble
        (logs.failed if trouble else logs.changed)("nvml", because=trouble or "it answers again")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
