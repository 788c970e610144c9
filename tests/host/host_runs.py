"""Real runs for tests: a host root with a run directory, a detached supervisor, and what is needed to watch and end them."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import pytest

from fleetd.host import cgroups, launch, rundir, tree
from fleetd.host.processes import Grip, grip
from fleetd.journal import Journal
from fleetd.model import Caps, DeadlineTerms, Observation, Owner, RestartTerms, RunSpec, StallTerms, StopTerms, WantOrder
from fleetd.paths import RunPaths
from policies.errors import ExplainedError
from policies.facts import MIB, RunKind, RunState, StopMode, Want
from policies.lifecycle import SETTLED

TRAINER = Path(__file__).with_name("fake_trainer.py")
WAIT_SECONDS = 100.0
"""Of a machine that stands still now and then. Nobody waits for it where all goes well."""
PATIENT = StopTerms(grace_floor_seconds=30.0, grace_ceiling_seconds=60.0)
BRIEF = StopTerms(grace_floor_seconds=1.0, grace_ceiling_seconds=5.0)
"""For who has to be ended by force: the test waits for all of the ladder. Whoever is to end by itself needs more time than a machine stands still."""
COUNTER = itertools.count(1)
T = TypeVar("T")


def now() -> datetime:
    return datetime.now(timezone.utc)


def spec_for(*arguments: str, argv: tuple[str, ...] | None = None, cutoff_seconds: float = 3600.0, **changes: Any) -> RunSpec:
    """An order for the fake trainer; keyword arguments replace fields of the RunSpec."""
    at = now()
    spec = RunSpec(
        run_id=f"20260916T180000Z-c-{os.getpid()}x{next(COUNTER)}", campaign_id="c", candidate="a", kind=RunKind.TRAIN,
        owner=Owner(coordinator_id="coordinator", generation=1),
        created_at=at, argv=argv or (sys.executable, "-S", str(TRAINER), *arguments), environment={}, release_digest="",
        caps=Caps(host_bytes=256 * MIB, accelerator_bytes=256 * MIB, floor_bytes=MIB),
        deadline=DeadlineTerms(final_at=at + timedelta(seconds=cutoff_seconds + 5), cutoff_at=at + timedelta(seconds=cutoff_seconds)),
        stop=PATIENT,
        restarts=RestartTerms(restarts_max=3, first_seconds=0.2, ceiling_seconds=1.0), stall=StallTerms(launch_seconds=90.0, floor_seconds=90.0),
    )
    return replace(spec, **changes)


def want(sequence: int, wish: Want, mode: StopMode = StopMode.GRACEFUL) -> WantOrder:
    return WantOrder(sequence=sequence, want=wish, mode=mode, actor="user:test", at=now())


@dataclass
class HostRun:
    """One run directory below `root`, and every process that a test has seen in it."""

    root: Path
    spec: RunSpec

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.root / "runs" / self.spec.run_id)

    def create(self) -> HostRun:
        assert rundir.create_run(self.paths, self.spec, None, want(1, Want.RUN))
        return self

    def supervise(self) -> int:
        return launch.start_supervisor(self.paths.root)

    def order(self, sequence: int, wish: Want, mode: StopMode = StopMode.GRACEFUL) -> None:
        assert rundir.apply_want(self.paths, want(sequence, wish, mode))[0]

    def seen(self) -> Observation | None:
        return rundir.read_observation(self.paths)

    def wait(self, what: Callable[[Observation], T], seconds: float = WAIT_SECONDS) -> T:
        """Until the observation satisfies `what`; its answer. The supervisor's log explains a failure."""
        return wait_for(lambda: (seen := self.seen()) and what(seen), seconds, lambda: f"{self.seen()}\n{self.log_text()}")

    def wait_state(self, *states: RunState, seconds: float = WAIT_SECONDS) -> Observation:
        return self.wait(lambda seen: seen if seen.state in states else None, seconds)

    def wait_step(self, step: int) -> Observation:
        return self.wait(lambda seen: seen if (seen.step or 0) >= step and seen.state is RunState.RUNNING else None)

    def settle(self) -> Observation:
        """Until the run is settled and its supervisor has left."""
        self.wait_state(*SETTLED)
        wait_for(lambda: not rundir.is_locked(self.paths.lock), WAIT_SECONDS, self.log_text)
        seen = self.seen()
        assert seen is not None
        return seen

    def log_text(self) -> str:
        texts = [path.read_text() for path in (self.paths.supervisor_log, *self.paths.attempts.glob("*/shim.log")) if path.exists()]
        return "\n".join(texts)[-6000:]

    def notices(self, kind: str | None = None) -> list[dict[str, Any]]:
        entries = wait_for(self._entries, WAIT_SECONDS, self.log_text)
        assert [entry["sequence"] for entry in entries] == list(range(1, len(entries) + 1)), "notices have no gaps"
        return [entry for entry in entries if kind is None or entry["kind"] == kind]

    def _entries(self) -> list[dict[str, Any]] | None:
        """None while somebody else just has it locked, which no entry would look like."""
        try:
            journal = Journal.open(self.paths.journal, read_only=True)
        except ExplainedError:
            return None
        with contextlib.closing(journal):
            entries = journal.entries(limit=10_000)
            return entries if entries and journal.health == "ok" else None

    def moves(self) -> list[str]:
        return [notice["body"]["to"] for notice in self.notices("state_changed")]

    def kill_program(self, path: Path) -> None:
        """SIGKILL the supervisor or shim that recorded itself at `path`, once verified."""
        record = rundir.read_program(path)
        assert record is not None
        held = grip(record.identity)
        assert isinstance(held, Grip), held
        with held:
            held.send(signal.SIGKILL)
            wait_for(held.exited, WAIT_SECONDS, lambda: "it survives")

    def orphan(self) -> None:
        """Nobody watches the trainer any more. The shim first: it would start another supervisor, if the test were held up between the two."""
        self.kill_program(self.paths.shim)
        self.kill_program(self.paths.supervisor)

    def go(self) -> None:
        """What a trainer with `pause_at` waits for."""
        (self.paths.root / "go").touch()

    def kill_trainer(self, attempt: int = 1) -> None:
        record = rundir.read_attempt(self.paths, attempt)
        assert record is not None
        end_tree(record)

    def clean(self) -> None:
        """End whatever of this run still lives: supervisor first, then shims, then the trees."""
        for path in (self.paths.supervisor, self.paths.shim, self.paths.supervisor):
            record = rundir.read_program(path)
            held = grip(record.identity) if record is not None else None
            if isinstance(held, Grip):
                with held:
                    held.send(signal.SIGKILL)
                    wait_for(held.exited, WAIT_SECONDS, lambda: "it survives")
        for number in range(1, rundir.newest_attempt(self.paths) + 1):
            record = rundir.read_attempt(self.paths, number)
            if record is not None:
                end_tree(record)


def end_tree(record: rundir.AttemptRecord) -> None:
    """Until nothing of it lives and its cgroup is gone: who waits for a disk dies once that has answered."""
    def is_gone() -> bool:
        return not tree.kill_tree(record.token, record.session, record.cgroup, record.identity).remaining

    wait_for(is_gone, WAIT_SECONDS, lambda: f"it survives: {record.identity}")
    wait_for(lambda: cgroups.remove(cgroups.decode_group(record.cgroup)), WAIT_SECONDS, lambda: f"{record.cgroup} stays")


def wait_for(what: Callable[[], T], seconds: float, explain: Callable[[], str]) -> T:
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        answer = what()
        if answer:
            return answer
        time.sleep(0.03)
    raise AssertionError(f"did not happen within {seconds} s: {explain()}")


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def own_environment(**values: str) -> dict[str, str]:
    return {**os.environ, **values}


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


@contextlib.contextmanager
def small_disk(folder: Path, size: str, options: str = "rw") -> Iterator[Path]:
    """A disk of its own that fills up quickly. Needs root."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},{options}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        # Who was killed lets go of its files a moment after it counts as ended.
        wait_for(lambda: subprocess.run(["umount", str(folder)], check=False).returncode == 0, WAIT_SECONDS, lambda: f"{folder} stays busy")


def fill(folder: Path) -> Path:
    """Take all the space that is left; removing the returned file gives it back."""
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    return filler
