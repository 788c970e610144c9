"""Device bytes by process: what is told adds up, what is not told is unknown, and no failure of the library reaches anybody."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fleetd.host import devices
from fleetd.host.devices import DeviceBytes
from fleetd.host.means import of_host
from fleetd.model import CapPart
from policies.facts import CapGrade

OURS, THEIRS = 4711, 1


class FakeNvml:
    """The calls of pynvml that are made, with the processes of each device as given; None is a device that is lost."""

    class NVMLError(Exception):
        pass

    def __init__(self, *given: dict[int, int | None] | None, fails: str = "", total: int | None = None) -> None:
        self.given, self.fails, self.total = given, fails, total

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name == object.__getattribute__(self, "fails"):
            raise FakeNvml.NVMLError("Function Not Found")
        return object.__getattribute__(self, name)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.given)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if self.given[index] is None:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in (self.given[handle] or {}).items()]

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA GB10"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        if self.total is None:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=self.total)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def use(fake: Any, *, machine: bool = True) -> None:
        monkeypatch.setattr(devices, "_loaded", [fake])
        monkeypatch.setattr(devices, "sees_machine_pids", lambda: machine)

    return use


def ours() -> DeviceBytes:
    return devices.bytes_of((OURS,), devices.look())


def test_device_bytes_of_our_processes_add_up_over_devices(nvml: Callable[..., None]) -> None:
    nvml(FakeNvml({OURS: 100, THEIRS: 7}, {OURS: 20}))
    assert ours() == DeviceBytes(known=120, least=120)

    nvml(FakeNvml({THEIRS: 7}))
    assert ours() == DeviceBytes(known=0, least=0), "a tree without a process there uses nothing of it"


def test_what_a_device_does_not_say_is_unknown_and_what_the_others_say_is_the_least(nvml: Callable[..., None]) -> None:
    nvml(FakeNvml({OURS: None}))
    assert (ours().known, ours().least) == (None, None) and f"how much pid {OURS} holds" in ours().why

    nvml(FakeNvml({OURS: 100}, {OURS: None}))
    assert (ours().known, ours().least) == (None, 100)

    nvml(FakeNvml({OURS: 100}, None))
    assert (ours().known, ours().least) == (None, 100) and "device 1: GPU is lost" in ours().why
    assert devices.look().holds(OURS)

    nvml(FakeNvml({THEIRS: None}))
    assert ours() == DeviceBytes(known=0, least=0), "a stranger's unknown amount is no unknown of ours"


@pytest.mark.parametrize("fails", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetName"])
def test_a_library_in_which_any_call_fails_makes_the_figure_unknown_and_hurts_nobody(nvml: Callable[..., None], fails: str) -> None:
    nvml(FakeNvml({OURS: 100}, fails=fails))

    assert ours().known is None or fails == "nvmlDeviceGetName"
    assert devices.names() == (() if fails != "nvmlDeviceGetComputeRunningProcesses" else ("NVIDIA GB10",))


def test_without_a_library_its_own_words_say_why_nothing_is_measured(nvml: Callable[..., None]) -> None:
    nvml("no NVML: Driver/library version mismatch")

    assert ours() == DeviceBytes(known=None, least=None, why="no NVML: Driver/library version mismatch") and devices.names() == ()
    part = of_host(CapPart(grade=CapGrade.ABSENT, means=""), devices.names())["allocator"]
    assert part.grade is CapGrade.ABSENT and "version mismatch" in part.means


def test_a_stranger_whose_machine_pid_equals_ours_in_a_container_is_never_taken_for_us(nvml: Callable[..., None]) -> None:
    nvml(FakeNvml({OURS: 10**12}), machine=False)

    assert (ours().known, ours().least) == (None, None) and "container" in ours().why
    part = of_host(CapPart(grade=CapGrade.ABSENT, means=""), devices.names())["allocator"]
    assert part.grade is CapGrade.ABSENT and "container" in part.means


def test_a_device_is_named_with_its_total_or_without_one_and_a_lost_one_is_left_out(nvml: Callable[..., None]) -> None:
    nvml(FakeNvml({}, None))
    assert devices.names() == ("NVIDIA GB10",)

    nvml(FakeNvml({}, total=2**31))
    assert devices.names() == ("NVIDIA GB10 (2.0 GiB)",)
