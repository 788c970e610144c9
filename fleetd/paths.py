"""Every path that fleetd uses, on the coordinator and on a host. Nothing else builds one by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fleetd.run_paths import AttemptPaths, RunPaths

__all__ = ["SYSTEM_STATE", "AttemptPaths", "CampaignPaths", "DisplacedPaths", "HostPaths", "RunPaths", "StatePaths", "state_root"]

SYSTEM_STATE = Path("/var/lib/fleetd")
"""Of a coordinator that runs as a service of the whole machine: StateDirectory=fleetd."""


@dataclass(frozen=True, slots=True)
class StatePaths:
    """The coordinator's own directory (`$FLEETD_STATE`, else `$XDG_STATE_HOME/fleetd`)."""

    root: Path

    @property
    def identity(self) -> Path:
        return self.root / "coordinator.json"

    @property
    def journal(self) -> Path:
        return self.root / "journal.db"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def log(self) -> Path:
        return self.root / "daemon.log"

    @property
    def command_log(self) -> Path:
        """Tracebacks of commands that met a bug of ours."""
        return self.root / "command.log"

    @property
    def socket(self) -> Path:
        return self.root / "api.sock"

    @property
    def releases(self) -> Path:
        """The running code as hosts get it, one directory for each architecture, named by digest."""
        return self.root / "releases"

    @property
    def wheels(self) -> Path:
        """Libraries for hosts of another architecture, as pip fetched them or a person put them here."""
        return self.root / "wheels"

    @property
    def wheelhouses(self) -> Path:
        """The wheels of locks, as pip fetched them: one directory for each lock and kind of Python, named by digest."""
        return self.root / "wheelhouses"

    @property
    def clock(self) -> Path:
        """What time it was, by both clocks: see fleetd/kept_clock.py."""
        return self.root / "clock.json"

    @property
    def set_aside(self) -> Path:
        """Directories of campaigns that the journal has lost, put here by a person: their hosts are still asked what runs there."""
        return self.root / "campaigns-without-history"

    @property
    def campaigns(self) -> Path:
        return self.root / "campaigns"

    def campaign(self, campaign_id: str) -> CampaignPaths:
        return CampaignPaths(self.campaigns / campaign_id)


@dataclass(frozen=True, slots=True)
class CampaignPaths:
    """One campaign's directory with the coordinator."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "plan.yaml"

    @property
    def resolved(self) -> Path:
        return self.root / "campaign.json"

    @property
    def preflight(self) -> Path:
        """What the hosts showed before the launch, and what was said of it."""
        return self.root / "preflight.json"

    def lock(self, sha256: str) -> Path:
        """A lock of the plan, as it was when the campaign was launched."""
        return self.root / "locks" / f"{sha256}.txt"

    def environment(self, host: str) -> Path:
        """What the environment of a host was found to hold once it was built."""
        return self.root / "environments" / f"{host}.json"

    @property
    def displaced(self) -> Path:
        """The run book of displaced work: what was moved away on which host, how it is brought back, and what became of it."""
        return self.root / "displaced.json"

    @property
    def displaced_text(self) -> Path:
        """The same for a person, with every command whole."""
        return self.root / "displaced.md"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.jsonl"

    @property
    def vault(self) -> Path:
        return self.root / "vault"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def store_checkpoints(self) -> Path:
        """Replicated checkpoints: one directory each, named by digest."""
        return self.store / "checkpoints"

    def store_run(self, run_id: str) -> Path:
        """What was copied back from one run: `predictions/<split>/...`, `log.jsonl`, `lineage.jsonl`, `trace.jsonl`."""
        return self.store / "runs" / run_id

    @property
    def registered_validation(self) -> Path:
        """The rows that every validation must have scored: id, family and token count, in order."""
        return self.root / "registered-validation.json"

    @property
    def selection(self) -> Path:
        return self.root / "selection.json"

    @property
    def frozen(self) -> Path:
        return self.root / "frozen.json"

    @property
    def results(self) -> Path:
        return self.root / "results"

    def result(self, split: str, look: int = 1) -> Path:
        """`results/test.json`; a later look at the same split has its number in its name."""
        return self.results / (f"{split}.json" if look == 1 else f"{split}-look-{look}.json")

    @property
    def report_html(self) -> Path:
        return self.root / "report.html"

    @property
    def report_json(self) -> Path:
        return self.root / "report.json"


@dataclass(frozen=True, slots=True)
class HostPaths:
    """One host's root."""

    root: Path

    @property
    def owner(self) -> Path:
        return self.root / "owner.json"

    @property
    def clock(self) -> Path:
        """What time it was, by both clocks of this machine: see fleetd/kept_clock.py."""
        return self.root / "clock.json"

    @property
    def owners(self) -> Path:
        """Every change of the owner, one line each."""
        return self.root / "owners.jsonl"

    @property
    def caps(self) -> Path:
        """What the self-tests of this boot have shown."""
        return self.root / "caps.json"

    @property
    def caps_lock(self) -> Path:
        return self.root / "caps.lock"

    @property
    def releases(self) -> Path:
        return self.root / "releases"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def wheelhouses(self) -> Path:
        """What environments are built from, until they are."""
        return self.root / "wheelhouses"

    @property
    def environments(self) -> Path:
        """`environments/<lock digest>/<python and wheels>/`: see fleetd/host/environment.py."""
        return self.root / "environments"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    def run(self, run_id: str) -> RunPaths:
        return RunPaths(self.runs / run_id)

    def displaced(self, campaign_id: str, name: str) -> DisplacedPaths:
        return DisplacedPaths(self.root / "displaced" / campaign_id, name)

    def never_start(self, run_id: str) -> Path:
        """There once this host was told that the run goes on elsewhere, and had none of it yet: an order for it may still be on its way."""
        return self.root / "left_behind" / run_id


@dataclass(frozen=True, slots=True)
class DisplacedPaths:
    """What a host keeps of one workload that it moved out of a campaign's way."""

    folder: Path
    name: str

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.name}.lock"

    @property
    def record(self) -> Path:
        """When it was asked to end, and what was started in its place."""
        return self.folder / f"{self.name}.json"

    def variables(self, number: int) -> Path:
        """The environment of one of its processes, as a shell reads it; its user alone may."""
        return self.folder / f"{self.name}-{number}.env"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def audit(self) -> Path:
        return self.folder / "audit.jsonl"


def state_root() -> Path:
    """`$FLEETD_STATE`, else `$XDG_STATE_HOME/fleetd`, else `~/.local/state/fleetd`."""
    named = os.environ.get("FLEETD_STATE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fleetd"
