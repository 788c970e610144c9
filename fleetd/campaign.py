"""A resolved plan: every key has its value, every duration is seconds, every moment is absolute.

`fleetd/plan.py` makes one from plan.yaml, `campaign.json` holds it, the coordinator works from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleetd.model import RestartTerms, StallTerms, StopTerms
from policies.facts import CapGrade, OnReboot, RunKind, SignalTarget, Split
from policies.workloads import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveTerms:
    """Seconds kept between the training cutoff and the final deadline: max(minimum, factor x rows x seconds per row + margin)."""

    minimum_seconds: float = 7200.0
    factor: float = 1.3
    margin_seconds: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFrom:
    """The line by which a host takes trees from a neighbour that has them: from which host, and how it is reached from there."""

    host: str
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentPlan:
    """An isolated environment that fleetd builds on a host: exactly the packages of a lock."""

    lock: str
    """The lock file, as the coordinator finds it; `lock_sha256` says which bytes of it were checked."""
    lock_sha256: str
    wheels: str = "auto"
    """`auto`: fetched by the coordinator and staged; `registry`: fetched by the host; else a directory of wheels with the coordinator."""
    python: str | None = None
    """The interpreter it is built from. None: as for `HostPlan.python`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlan:
    """One machine. `python` runs the trainer, `agent_python` runs agent, supervisor and shim. None: the coordinator's own, or over SSH the
    `python3` that the host finds. Where there is an `environment`, its interpreter runs the trainer and `python` is None."""

    name: str
    transport: str = "local"
    address: str | None = None
    """What `ssh` would be given: a name of the user's SSH configuration, a host name or an address. None: the host's name."""
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    ssh_config: str | None = None
    """An SSH configuration to read instead of the user's own."""
    root: str
    python: str | None = None
    agent_python: str | None = None
    environment: EnvironmentPlan | None = None
    capacity_bytes: int | None = None
    """Memory that fleetd may hand out; None: what the host reports as total."""
    floor_bytes: int = 1024**3
    displace: tuple[Workload, ...] = ()
    """Work of others that makes room before the first run starts here, in this order."""
    data_from: DataFrom | None = None

    @property
    def is_local(self) -> bool:
        return self.transport == "local"

    @property
    def place(self) -> str:
        """Machine and directory in one word: equal for two plans that mean the same."""
        if self.is_local:
            return f"{self.transport}:{self.root}"
        user, port = f"{self.user}@" if self.user else "", f":{self.port}" if self.port else ""
        return f"{self.transport}:{user}{self.address or self.name}{port}:{self.root}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRole:
    """The files of one role: those below `path` that match one of `include`. Relative paths start at the plan's directory."""

    split: Split
    path: str
    include: tuple[str, ...] = ("*",)
    shard_split: str | None = None
    """For token shards: which split of shards_index.json the role is (`train`, `val`, `test`)."""
    is_corpus: bool = False
    """Whether the folder is a Zrodlo corpus, whose files `include` names."""
    tokens_per_document_max: int | None = None
    """For scored roles: only the first tokens of each document are scored. Part of what is registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatePlan:
    """One line of training. Either `task` (settings of our trainer) or `command` (any argv) is set."""

    name: str
    host: str
    """A host's name, or `any`: the one with most free memory."""
    kind: RunKind = RunKind.TRAIN
    task: dict[str, Any] | None = None
    command: tuple[str, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    working_directory: str | None = None
    signal: SignalTarget = SignalTarget.LEADER
    memory_host_bytes: int
    memory_accelerator_bytes: int
    memory_demand: CapGrade = CapGrade.SAMPLED
    stop: StopTerms = field(default_factory=StopTerms)
    restarts: RestartTerms = field(default_factory=RestartTerms)
    stall: StallTerms = field(default_factory=StallTerms)
    on_reboot: OnReboot = OnReboot.RESUME


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionTerms:
    criterion: str = "token_nll_v1"
    minimum_improvement: float = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterFreeze:
    """What happens by itself once the selection is frozen. `evaluate`: reserved splits in the order in which they are opened."""

    evaluate: tuple[Split, ...] = ()
    report: bool = True
    memory_host_bytes: int = 2 * 1024**3
    memory_accelerator_bytes: int = 2 * 1024**3
    memory_demand: CapGrade = CapGrade.SAMPLED
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings handed to the evaluation task of our trainer (batch, threads, ...)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify:
    """An argv run with one line of JSON on its standard input at each of `on` (`needs_you`, `finished`, `failed`)."""

    command: tuple[str, ...]
    on: tuple[str, ...] = ("needs_you", "finished", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole campaign, resolved. `deadline_at` is set at launch when the plan gives a duration."""

    schema: int = 1
    name: str
    plan_sha256: str
    directory: str
    """Where the plan lay: relative data paths start here."""
    deadline_at: datetime | None
    deadline_seconds: float | None
    reserve: ReserveTerms = field(default_factory=ReserveTerms)
    hosts: tuple[HostPlan, ...]
    parity: str | None = None
    """`off`, `report` or `require`: whether the hosts' interpreters are compared. None: reported where there are several hosts."""
    data: tuple[DataRole, ...] = ()
    candidates: tuple[CandidatePlan, ...]
    selection: SelectionTerms = field(default_factory=SelectionTerms)
    after_freeze: AfterFreeze = field(default_factory=AfterFreeze)
    notify: tuple[Notify, ...] = ()
    restore_displaced: bool = False
    """Whether displaced work is brought back by itself once the campaign is over."""
