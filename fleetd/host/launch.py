"""How a host process is started from another: detached, from the release its run names. An engine such as Slurm would replace this file."""

from __future__ import annotations

from pathlib import Path

from fleetd.model import RunSpec


def release_folder(root: Path, digest: str) -> Path:
    """`<root>/releases/<digest>` when it exists, else where the running code lies."""
    raise NotImplementedError


def program_argv(module: str, *arguments: str) -> tuple[str, ...]:
    """`sys.executable -m fleetd.host.<module> ...`."""
    raise NotImplementedError


def program_environment(root: Path, spec: RunSpec) -> dict[str, str]:
    """Our own environment with PYTHONPATH = the release, without a tree token: for supervisors and shims."""
    raise NotImplementedError


def start_supervisor(run_dir: Path) -> int:
    """Start `fleetd.host.supervisor RUN_DIR`: own session, no parent, stdin null, stderr into supervisor.log. Returns its pid.

    OSError when it could not be executed. Whether it got the run's lock is to be seen in `lock` and heartbeat.json.
    """
    raise NotImplementedError
