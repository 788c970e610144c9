"""The kernel's part of a memory cap: one cgroup per attempt, below our own, v1 memory or delegated v2. The shim makes and removes it."""

from __future__ import annotations

from dataclasses import dataclass

from fleetd.model import CapPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The folders of one attempt: `memory` carries the limit, `tracker` (cgroup v2 without memory) can kill as a whole."""

    memory: str | None = None
    tracker: str | None = None

    def encode(self) -> str | None:
        """What AttemptRecord.cgroup holds; None when there is no folder at all."""
        raise NotImplementedError


def decode_group(text: str | None) -> Group:
    raise NotImplementedError


def create(name: str, limit_bytes: int) -> tuple[Group, CapPart]:
    """A fresh group with its limit set and read back: ENFORCED with the means in words, else ABSENT with why. Never raises OSError."""
    raise NotImplementedError


def join(group: Group) -> None:
    """Move the calling process (a child before exec) into the group. OSError when the kernel refuses."""
    raise NotImplementedError


def oom_kills(group: Group) -> int | None:
    """How many processes the kernel has killed at this limit; None when unknown."""
    raise NotImplementedError


def peak_bytes(group: Group) -> int | None:
    raise NotImplementedError


def processes_in(group: Group) -> tuple[int, ...]:
    raise NotImplementedError


def kill_all(group: Group) -> bool:
    """cgroup.kill: every process of the group at once. False where the kernel has no such file."""
    raise NotImplementedError


def remove(group: Group) -> bool:
    """Remove the folders (bounded retries while the last zombie leaves). True when nothing is left."""
    raise NotImplementedError


def self_test() -> CapPart:
    """Let a 200 MB hog run under a 64 MB limit: ENFORCED when it died of it, else ABSENT with what happened. About a second;
    the caller keeps the answer per boot."""
    raise NotImplementedError
