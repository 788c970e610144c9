"""Real run directories, real shims and real children for the tests of the host's edges."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path

from fleetd.host import cgroups, launch, rundir, tree
from fleetd.model import Caps, DeadlineTerms, Observation, Owner, RunSpec, StopTerms, WantOrder
from fleetd.paths import HostPaths, RunPaths
from policies.facts import MIB, CapGrade, RunKind, RunState, SignalTarget, Want

WAIT_SECONDS = 100.0


def wait_until(holds: Callable[[], object], what: str = "", seconds: float = WAIT_SECONDS) -> None:
    """Return once `holds()` is true; fail with `what` after a generous time. No test asserts how long it took."""
    give_up_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up_at, f"never happened: {what or holds}"
        time.sleep(0.02)


def make_spec(
    argv: tuple[str, ...], *, run_id: str, cutoff_seconds: float = 3600.0, host_bytes: int = 512 * MIB, grace_seconds: float = 120.0,
    demand: CapGrade = CapGrade.SAMPLED, signal: SignalTarget = SignalTarget.LEADER, kind: RunKind = RunKind.TRAIN,
    environment: dict[str, str] | None = None, working_directory: str | None = None,
) -> RunSpec:
    now = datetime.now(timezone.utc)
    cutoff_at = now + timedelta(seconds=cutoff_seconds)
    return RunSpec(
        run_id=run_id, campaign_id="c1", candidate="a", kind=kind, owner=Owner(coordinator_id="k1", generation=1), created_at=now, argv=argv,
        environment=environment or {}, working_directory=working_directory, signal=signal, contract=False, release_digest="",
        caps=Caps(host_bytes=host_bytes, accelerator_bytes=host_bytes, floor_bytes=0, demand=demand),
        deadline=DeadlineTerms(final_at=cutoff_at + timedelta(seconds=3600), cutoff_at=cutoff_at),
        stop=StopTerms(grace_ceiling_seconds=grace_seconds),
    )


def want_run(sequence: int = 1, want: Want = Want.RUN) -> WantOrder:
    return WantOrder(sequence=sequence, want=want, actor="test", at=datetime.now(timezone.utc))


def make_run(root: Path, spec: RunSpec, task: dict[str, object] | None = None) -> RunPaths:
    """A run directory with an order to run and the folder of its first attempt, as a supervisor leaves it to a shim."""
    paths = HostPaths(root).run(spec.run_id)
    assert rundir.create_run(paths, spec, task, want_run())
    assert rundir.create_attempt(paths) == 1
    return paths


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", code, *arguments)


def start_shim(paths: RunPaths, attempt: int = 1, *, before: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """`before`: a command that ends in exec of the rest."""
    release = launch.release_folder(paths.root.parent.parent, rundir.read_spec(paths).release_digest)
    return subprocess.Popen(
        (*before, *launch.program_argv(release, "shim", str(paths.root), str(attempt))), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env=launch.program_environment(release), start_new_session=True,
    )


@contextmanager
def supervised(paths: RunPaths) -> Iterator[None]:
    """As long as this holds the supervisor's lock, the shim sees a living supervisor."""
    lock = rundir.try_lock(paths.lock)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)


def without_a_supervisor(paths: RunPaths) -> None:
    """As if the run's supervisor had left on purpose: its lock is free, and the shim starts no other."""
    now = datetime.now(timezone.utc)
    seen = Observation(run_id="r1", at=now, state=RunState.HELD, reason=None, detail="", attempt=1, pid=None, identity="gone")
    rundir.write_observation(paths, seen)


@contextmanager
def living_shim(paths: RunPaths, attempt: int = 1, *, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """A shim with its tree; whatever the test leaves alive is ended through the shim's own record of it."""
    shim = start_shim(paths, attempt, before=before)
    try:
        yield shim
    finally:
        wait_until(lambda: shim.poll() is not None or rundir.read_attempt(paths, attempt) is not None)
        record = rundir.read_attempt(paths, attempt)
        if record is not None:
            tree.kill_tree(record.token, record.session, record.cgroup, record.identity)
        if shim.poll() is None:
            try:
                shim.wait(30)
            except subprocess.TimeoutExpired:
                shim.kill()
        shim.communicate()
        if record is not None:
            tree.kill_tree(record.token, None, record.cgroup, None)
            wait_until(lambda: cgroups.remove(cgroups.decode_group(record.cgroup)), "the end of its cgroup")


def executed(paths: RunPaths, attempt: int = 1) -> Callable[[], bool]:
    def holds() -> bool:
        record = rundir.read_attempt(paths, attempt)
        return record is not None and record.is_executed

    return holds
