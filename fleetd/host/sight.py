"""What a supervisor saw of its run at one moment: everything that one decision rests on. The observer makes it, `decide` reads it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from fleetd.model import ExitRecord, RunSpec, WantOrder
from policies.deadlines import EffectiveTime
from policies.identity import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSight:
    """The newest attempt at one look. `standing` is None while the shim has not recorded a trainer.

    `tree_count`: living members without the leader; None when nobody looked. `shim_is_alive`: None when that can't be told.
    """

    number: int
    standing: Standing | None
    standing_text: str = ""
    is_dead: bool = False
    is_executed: bool = True
    exit: ExitRecord | None = None
    tree_count: int | None = None
    shim_is_alive: bool | None = None
    is_started: bool = True
    age_seconds: float = 0.0
    """Since the supervisor first saw this attempt."""
    unverified_seconds: float = 0.0
    host_rebooted: bool = False
    oom_kill_count: int = 0
    is_limit_hit: bool = True
    """Of these kills: whether they were at the tree's own limit, not for want of memory on the whole machine."""
    cap_fault: str = ""
    """Why the kernel's part of the cap no longer holds the whole tree, in words."""
    device_left: str = ""
    """What of an ended tree a device still holds, in words; empty when nothing, or when there is no device to ask."""
    is_contested: bool = False
    """Whether the process that now has the leader's pid is not the recorded one, but carries a mark of the tree all the same."""

    @property
    def may_live(self) -> bool:
        """Whether anything of it may live: its trainer, what has outlived that one and has to be ended, or a shim that may still bear one."""
        if self.standing is None:
            return self.shim_is_alive is not False
        return not self.is_dead or self.tree_count != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLook:
    host_bytes: int | None = None
    accelerator_bytes: int | None = None
    accelerator_least_bytes: int | None = None
    """Where the whole is not known: what the tree holds at the very least."""
    accelerator_why: str = ""
    """Why the accelerator's bytes are not known."""
    available_bytes: int | None = None
    means: str = "RssAnon + RssShmem + VmSwap of the tree each second, faster near the line"
    """By which figures the host's part was sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSight:
    """Everything that one decision rests on. `cutoff_at` is the hard deadline of this kind of run, None when it has none."""

    time: EffectiveTime
    boottime_seconds: float
    spec: RunSpec
    want: WantOrder | None
    cutoff_at: datetime | None
    attempt: AttemptSight | None
    memory: MemoryLook = MemoryLook()
    silent_seconds: float = 0.0
    """Since the trainer's log last grew, or the attempt began."""
    is_trainer_lock_held: bool = False
    """Looked at only while no verified trainer lives."""
    lock_held_seconds: float = 0.0
    disk_free_bytes: int | None = None
    """Where the run directory lies; looked at only while no verified trainer lives."""
    is_durable: bool = True
    clock_doubted_seconds: float | None = None
    """For how long nobody has known what time it is since this boot; None when the time is known."""
