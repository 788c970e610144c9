"""The paths below one run directory. `fleetd/paths.py` has the rest, and is the door to these too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPaths:
    """One run directory: the whole interface between supervisor, shim, agent and trainer."""

    root: Path

    @property
    def order(self) -> Path:
        return self.root / "run.json"

    @property
    def boot(self) -> Path:
        """In which boot of its host the order came."""
        return self.root / "boot.json"

    @property
    def task(self) -> Path:
        """Settings of our trainer, absent for a user's own command."""
        return self.root / "task.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def trainer_lock(self) -> Path:
        return self.root / "trainer.lock"

    @property
    def supervisor(self) -> Path:
        return self.root / "supervisor.json"

    @property
    def shim(self) -> Path:
        return self.root / "shim.json"

    @property
    def heartbeat(self) -> Path:
        return self.root / "heartbeat.json"

    @property
    def observation(self) -> Path:
        """The supervisor's last look, replaced each tick; not history."""
        return self.root / "observation.json"

    @property
    def trace(self) -> Path:
        """Memory and step over time, one line every few seconds, for the report."""
        return self.root / "trace.jsonl"

    @property
    def journal(self) -> Path:
        return self.root / "journal.db"

    @property
    def lineage(self) -> Path:
        return self.root / "lineage.jsonl"

    @property
    def supervisor_log(self) -> Path:
        return self.root / "supervisor.log"

    @property
    def supervisor_environment(self) -> Path:
        """What systemd gives the supervisor that lives in a unit of its own."""
        return self.root / "supervisor.env"

    @property
    def audit(self) -> Path:
        """What supervisor and shim were about to signal: see fleetd/host/audit.py."""
        return self.root / "audit.jsonl"

    @property
    def orders(self) -> Path:
        return self.root / "orders"

    @property
    def want(self) -> Path:
        return self.orders / "want.json"

    @property
    def cutoff(self) -> Path:
        return self.orders / "cutoff.json"

    @property
    def acknowledged(self) -> Path:
        return self.orders / "acknowledged.json"

    @property
    def attempts(self) -> Path:
        return self.root / "attempts"

    def attempt(self, number: int) -> AttemptPaths:
        return AttemptPaths(self.attempts / f"{number:04d}")

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def seed(self) -> Path:
        """`seed/step-000000128`: the copy of another run's checkpoint, below models/, that this run begins with."""
        return self.root / "seed"

    def predictions(self, split: str) -> Path:
        return self.root / "predictions" / split

    @property
    def evidence(self) -> Path:
        return self.root / "evidence"


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    root: Path

    @property
    def record(self) -> Path:
        return self.root / "attempt.json"

    @property
    def started(self) -> Path:
        return self.root / "started"

    @property
    def stdout(self) -> Path:
        """Standard output and standard error of the attempt, in one file and in order."""
        return self.root / "stdout.log"

    @property
    def exit(self) -> Path:
        return self.root / "exit.json"

    @property
    def shim_log(self) -> Path:
        return self.root / "shim.log"
