"""Memory of the host and of a trainer's tree, in bytes. Unknown is None, never zero."""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.host.tree import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMemory:
    """`host_bytes`: RssAnon + RssShmem summed, or (`is_exact`) the proportional share, which counts shared pages once."""

    host_bytes: int | None
    is_exact: bool = False
    process_count: int = 0
    unreadable_count: int = 0


def tree_memory(members: tuple[Member, ...], near_bytes: int | None = None) -> TreeMemory:
    """Host bytes of these processes. From `near_bytes` on, measured exactly (30 to 75 ms for a few GiB)."""
    raise NotImplementedError


def available_bytes() -> int | None:
    """MemAvailable of the host."""
    raise NotImplementedError


def total_bytes() -> int:
    """MemTotal of the host."""
    raise NotImplementedError


def accelerator_bytes(members: tuple[Member, ...]) -> int | None:
    """Device bytes of these processes over all devices; None without NVML or where the device says not available."""
    raise NotImplementedError


def accelerator_names() -> tuple[str, ...]:
    """`NVIDIA H200 (139.8 GiB)` each; empty without NVML."""
    raise NotImplementedError
