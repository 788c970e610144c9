"""What the coordinator and a host say to each other: the order of a run, what a supervisor sees, and its notices.

    run.json          RunSpec            written once by the agent
    orders/want.json  WantOrder          the newest wish, by sequence
    orders/cutoff.json CutoffOrder       may only move earlier
    observation.json  Observation        the supervisor's last look, replaced every tick
    journal.db        Notice             what happened, kept until the coordinator acknowledged it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from policies.facts import CapGrade, OnReboot, Reason, RunKind, RunState, SignalTarget, StopMode, Want
from policies.workloads import Workload, WorkloadSight


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Whose orders a host obeys. The generation grows by one each time the coordinator starts."""

    coordinator_id: str
    generation: int
    life: str = ""
    """Drawn at each start. A copy of the state directory counts to the same number as the original, and is still somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """The two parts of a memory cap in bytes, the floor under the host's MemAvailable, and the grade a plan demands of `host`."""

    host_bytes: int
    accelerator_bytes: int
    floor_bytes: int
    soft_fraction: float = 0.95
    demand: CapGrade = CapGrade.SAMPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineTerms:
    """Absolute moments. A serving run has none. `cutoff_at` is final minus the reserve, and never moves later."""

    final_at: datetime
    cutoff_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTerms:
    """Bounds of the grace in seconds: the measured grace is clamped between them."""

    grace_floor_seconds: float = 5.0
    grace_ceiling_seconds: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartTerms:
    """At most `restarts_max` restarts in any `window_seconds`; waits double from first to ceiling, in seconds."""

    restarts_max: int = 5
    window_seconds: float = 3600.0
    first_seconds: float = 2.0
    ceiling_seconds: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StallTerms:
    """Seconds without a step before the first one, and after it (at least the floor, at least factor x the slowest recent step)."""

    launch_seconds: float = 600.0
    floor_seconds: float = 600.0
    factor: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Whose work a run goes on with: another run, whose host was fenced, from a verified copy of one of its checkpoints. Without a copy
    (`step` and `digest` are None) the work begins anew."""

    run_id: str
    step: int | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """The order for one run. `argv` is exact: no shell string is ever built from a plan."""

    schema: int = 1
    run_id: str
    campaign_id: str
    candidate: str
    kind: RunKind
    owner: Owner
    created_at: datetime
    argv: tuple[str, ...]
    environment: dict[str, str]
    working_directory: str | None = None
    signal: SignalTarget = SignalTarget.LEADER
    contract: bool = True
    """Whether the command keeps the trainer contract (log, checkpoints, exit codes); a plain command does not."""
    release_digest: str
    """The release under releases/ that supervisor and shim of this run are started from."""
    caps: Caps
    deadline: DeadlineTerms | None
    stop: StopTerms = field(default_factory=StopTerms)
    restarts: RestartTerms = field(default_factory=RestartTerms)
    stall: StallTerms = field(default_factory=StallTerms)
    on_reboot: OnReboot = OnReboot.RESUME
    digests: dict[str, str] = field(default_factory=dict)
    """Digest by role: `train`, `validation`, `test`, `release`, ..."""
    continues: Continuation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WantOrder:
    """What somebody wishes of a run. Higher sequences replace lower ones; lower ones are acknowledged as stale."""

    sequence: int
    want: Want
    mode: StopMode = StopMode.GRACEFUL
    reason: Reason = Reason.USER
    actor: str
    at: datetime
    is_final: bool = False
    """No later order replaces it: the run was left behind when its host was fenced, and its work goes on elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutoffOrder:
    """A training cutoff that moved earlier. A later one than the recorded is ignored."""

    sequence: int
    cutoff_at: datetime
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CapPart:
    """One mechanism of the cap: how strongly it holds, and by what means (`cgroup v1 /fleetd/…`, `RssAnon + RssShmem each second`)."""

    grade: CapGrade
    means: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySight:
    """Bytes of the trainer's tree at one look; None is unknown, never zero. `parts` by mechanism: cgroup sampler allocator floor."""

    host_bytes: int | None
    accelerator_bytes: int | None
    host_peak_bytes: int | None
    available_bytes: int | None
    parts: dict[str, CapPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSight:
    step: int
    digest: str
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSight:
    """What the trainer claims of one validation; the coordinator recomputes it from the rows."""

    step: int
    value: float
    at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One look of a supervisor at its run. Every moment is the one at which the value was read, not sent."""

    run_id: str
    at: datetime
    state: RunState
    reason: Reason | None
    detail: str
    attempt: int
    pid: int | None
    identity: str
    """`verified`, `gone`, or `cannot verify: …` with what was found."""
    step: int | None = None
    steps_planned: int | None = None
    step_at: datetime | None = None
    steps_per_second: float | None = None
    loss: float | None = None
    memory: MemorySight | None = None
    checkpoint: CheckpointSight | None = None
    best: ValidationSight | None = None
    grace_seconds: float = 0.0
    stop_at: datetime | None = None
    """When the supervisor will ask the trainer to stop for the cutoff: the last safe moment."""
    cutoff_at: datetime | None = None
    final_at: datetime | None = None
    restarts_used: int = 0
    restarts_max: int = 0
    next_attempt_at: datetime | None = None
    alarms: tuple[str, ...] = ()
    supervisor_pid: int | None = None
    shim_pid: int | None = None
    boot_id: str = ""
    boottime_seconds: float | None = None
    """`at` once more, by the clock of this boot that nobody steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One thing that happened on a host, numbered per run from 1 without gaps, delivered at least once.

    kind            body
    state_changed   from, to, reason, detail, attempt, evidence{...}
    attempt_started attempt, pid, start_ticks, resume_step, resume_digest
    attempt_ended   attempt, exit (see ExitRecord), reason
    checkpoint      step, digest, bytes
    validation      step, value, rows, seconds, sha256
    pilot           step, passed, because
    proof           step, verdict (exact, inexact or unknown), required, because
    signal          target pid, signal, purpose, verdict (what was verified), or a refusal with what was found
    adopted         supervisor pid, trainer pid, how it was verified
    alarm           text
    """

    sequence: int
    at: datetime
    kind: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecord:
    """exit.json: how one attempt ended. `wait_status` is the raw status of wait(2), None when nobody saw it."""

    attempt: int
    at: datetime
    wait_status: int | None
    exit_code: int | None
    signal: int | None
    observed_by: str
    """`shim`, `supervisor`, `pidfd`, `trainer`, `kernel`, or `nobody`."""
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What an agent measured of its machine just now."""

    hostname: str
    boot_id: str
    kernel: str
    python: str
    architecture: str
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int
    disk_free_bytes: int
    root_writable: bool
    cap_means: dict[str, CapPart] = field(default_factory=dict)
    accelerators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run in the answer to a poll."""

    run_id: str
    supervisor: str
    """`alive`, `gone`, or `cannot verify: …`."""
    observation: Observation | None
    notices: tuple[Notice, ...]
    look_age_seconds: float | None = None
    """How old the observation was when this was said, by boottime. None where nobody can tell."""
    has_more: bool = False
    """Whether more notices lie there than are told here: cut off by a bound, or unreadable for the moment."""
    notices_lost_to: int = 0
    """The last of the notices asked for that this host does not have any more; 0 when it has them all."""
    retold: tuple[Notice, ...] = ()
    """What files still say of the lost ones: attempts, exits, validations and checkpoints, without numbers (sequence 0)."""
    spec: RunSpec | None = None
    """Of a run that the poll did not ask for, or asked for from its beginning: what it is and what it may use."""
    want: WantOrder | None = None
    """The wish that the host obeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DisplaceOrder:
    """The order to move a workload out of the way (`displace`) or to bring it back (`restore`). Sent until the answer says that it is done."""

    campaign_id: str
    workload: Workload
    found: WorkloadSight
    """What preflight showed: only these processes are ever signalled."""
    asking: int = 0
    """Of a restore: counted, so that each asking starts what is missing at most once. 0: only say what runs."""
