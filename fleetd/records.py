"""What a Fleet is made of: the event, and campaigns, runs, copies and hosts as history adds them up. `fleetd.fleet` applies events to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleetd.campaign import Plan
from fleetd.model import Continuation, RunSpec, WantOrder
from policies.facts import CampaignStage, Reason, RunKind, RunState
from policies.workloads import DisplacedState, Workload, WorkloadSight


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One journaled change. `actor` is who (`user:root`, `coordinator`, `host:gx10`), `because` the rule or reason in words."""

    sequence: int
    at: datetime
    kind: str
    campaign_id: str | None = None
    run_id: str | None = None
    host: str | None = None
    actor: str = "coordinator"
    because: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A verified copy with the coordinator: of a checkpoint (digest of the directory) or of predictions (SHA-256 of the rows)."""

    step: int
    digest: str
    value: float | None
    verified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Validated:
    """What a host told of one validation: the claim, and the SHA-256 of the rows it left on disk."""

    step: int
    sha256: str
    value: float | None
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a host told of one complete checkpoint in its run directory."""

    step: int
    digest: str
    bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a person has said of a host or of a run: when, who, and why, in their words."""

    at: datetime
    actor: str
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run as the coordinator knows it."""

    run_id: str
    campaign_id: str
    candidate: str
    kind: RunKind
    host: str | None
    state: RunState
    reason: Reason | None = None
    detail: str = ""
    since: datetime
    added_at: datetime
    """When it became part of history: no life of the coordinator before that one can have placed it."""
    spec: RunSpec | None = None
    want: WantOrder | None = None
    waiting_at: datetime | None = None
    """When `detail` last said what the run waits for."""
    notices_seen: int = 0
    attempt: int = 0
    exits: tuple[dict[str, Any], ...] = ()
    checkpoints: tuple[Replica, ...] = ()
    predictions: tuple[Replica, ...] = ()
    validated: tuple[Validated, ...] = ()
    saved: tuple[Saved, ...] = ()
    """`checkpoints` and `predictions` are verified copies here; `validated` and `saved` are what the host says it has."""
    pilot: dict[str, Any] | None = None
    """How its pilot was judged: `step`, `passed`, `because`. None while it was not."""
    proof: dict[str, Any] | None = None
    """Whether its last steps came out again: `step`, `verdict`, `required`, `because`. None while that was not tried."""
    faults: tuple[dict[str, Any], ...] = ()
    """Copies given up for good: `what` (predictions or checkpoint), `step`, `digest`, `because`."""
    continues: Continuation | None = None
    """Whose work this run goes on with."""
    successor: str | None = None
    """The run that goes on with this one's work."""
    left_behind: bool = False
    """Its host was fenced: what is left of it there is ended, it is never started again, and its work goes on in another run or not at all."""
    cleared: Mark | None = None
    """Somebody has looked at this stuck run and lets its host take others. Void as soon as its state changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Displaced:
    """One workload of a host that preflight showed, and how far it is out of the way or back."""

    host: str
    workload: Workload
    found: WorkloadSight
    state: DisplacedState
    since: datetime
    detail: str = ""
    asking: int = 0
    """How often somebody has asked for it to be brought back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    campaign_id: str
    plan: Plan
    stage: CampaignStage
    detail: str = ""
    since: datetime
    launched_at: datetime
    launched_sequence: int = 0
    """The number of the event that launched it."""
    final_at: datetime
    cutoff_at: datetime
    runs: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)
    """Digest by data role, release and model, as staged."""
    selection: dict[str, Any] | None = None
    frozen_digest: str | None = None
    openings: tuple[dict[str, Any], ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    """Headline figures by split, once judged."""
    reported: bool = False
    plan_text: str = ""
    warnings: tuple[str, ...] = ()
    """What preflight found worth knowing."""
    staged: tuple[str, ...] = ()
    """What lies ready where: `gx10:campaign`, `gx10:evaluate-test`."""
    asked: tuple[dict[str, str], ...] = ()
    """Reserved splits that people asked for after the freeze, in the order of asking: `split`, `actor`, `because`."""
    reserved_rows: dict[str, int] = field(default_factory=dict)
    """Rows that a look at each reserved split has to score, as registered."""
    cutoff_moves: int = 0
    frozen_at: datetime | None = None
    displaced: tuple[Displaced, ...] = ()
    """In the order in which they are moved away; they come back in the reverse order, host by host."""
    displaced_shown: tuple[str, ...] = ()
    """Hosts that preflight has looked at for such work: on any other one nothing is touched, and nothing starts that waits for it."""
    displaced_moves: int = 0
    run_book_moves: int = 0
    """Of those moves, how many the run book on the disk tells of. Nothing is signalled while it is behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine as the journal knows it; its last measurements live with the loop, each with its age."""

    name: str
    reachable: bool
    since: datetime
    boot_id: str | None = None
    detail: str = ""
    drained: Mark | None = None
    """No new run is placed here."""
    fenced: Mark | None = None
    """A person has said that this host is off. It counts until the host answers again and its own copies of `superseded` have ended."""
    fenced_sequence: int = 0
    """The number of the event that said so."""
    superseded: tuple[str, ...] = ()
    """Runs whose work goes on elsewhere, or was given up: whatever is left of them here is stopped before anything else happens here."""
    may_have: tuple[str, ...] = ()
    """Runs that were placed nowhere when it was fenced, by a part of history that is lost: it may have them, and others may as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    sequence: int = 0
    campaigns: dict[str, Campaign] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    hosts: dict[str, Host] = field(default_factory=dict)
    stranger_wants: dict[str, WantOrder] = field(default_factory=dict)
    """What people asked of runs that hosts tell of and history does not know, by run; the sequence is the host's to count."""
