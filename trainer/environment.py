"""What the process is told by its environment, and what it has to set there before torch is imported.

No torch in this file. The maths libraries read their variables once, when they are loaded; the allocator's settings work from
the moment they are made.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from policies.errors import PlanInvalid
from policies.facts import ENV_MEMORY_CAP_BYTES, ENV_RESUME, ENV_RUN_DIR, ENV_RUN_ID, ENV_TRAIN_CUTOFF, ENV_TRAIN_CUTOFF_BOOTTIME, parse_moment

CUBLAS_WORKSPACE = ":4096:8"
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # mallopt(3)
BLOCK_BYTES_KEPT = 1 << 30
TRIM_BYTES = 2**31 - 1
TOP_PAD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironment:
    """The trainer contract, typed. `resume` is a checkpoint to go on from, None: the newest one that verifies."""

    run_dir: Path
    run_id: str
    resume: Path | None
    memory_cap_bytes: int | None
    cutoff_at: datetime | None
    cutoff_boottime_seconds: float | None = None
    """The same moment as our host counts it. Where it is known the wall clock is not asked."""


def read_environment(values: Mapping[str, str], run_dir: str | None) -> RunEnvironment:
    """The environment of an attempt; an argument wins over FLEETD_RUN_DIR. PlanInvalid names the variable."""
    folder = run_dir or values.get(ENV_RUN_DIR)
    if not folder:
        raise PlanInvalid("no run directory is named", where=ENV_RUN_DIR, what="neither an argument nor the variable says where the run lies",
                          fix="fleetd-trainer train RUN_DIR, with a task.json in it")
    if not Path(folder).is_dir():
        raise PlanInvalid("the run directory can't be used", where=folder, what="there is no such directory",
                          fix=f"mkdir -p {folder}, then write its task.json")
    cap, cutoff = values.get(ENV_MEMORY_CAP_BYTES, ""), values.get(ENV_TRAIN_CUTOFF, "")
    try:
        cap_bytes = int(cap) if cap else None
    except ValueError as fault:
        raise _unreadable(ENV_MEMORY_CAP_BYTES, cap, "a number of bytes") from fault
    try:
        cutoff_at = parse_moment(cutoff) if cutoff else None
    except ValueError as fault:
        raise _unreadable(ENV_TRAIN_CUTOFF, cutoff, "an RFC 3339 moment with its time zone") from fault
    counted = values.get(ENV_TRAIN_CUTOFF_BOOTTIME, "")
    try:
        counted_seconds = float(counted) if counted else None
    except ValueError as fault:
        raise _unreadable(ENV_TRAIN_CUTOFF_BOOTTIME, counted, "seconds since boot") from fault
    resume = values.get(ENV_RESUME, "")
    return RunEnvironment(run_dir=Path(folder).absolute(), run_id=values.get(ENV_RUN_ID, Path(folder).absolute().name),
                          resume=Path(resume) if resume else None, memory_cap_bytes=cap_bytes, cutoff_at=cutoff_at,
                          cutoff_boottime_seconds=counted_seconds)


def fix_arithmetic(threads: int) -> None:
    """Pin what the maths libraries read when they are loaded: thread counts that stay, one cuBLAS workspace, no network."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ["MKL_DYNAMIC"] = os.environ["OMP_DYNAMIC"] = "FALSE"
    # Threads that wait by sleeping: on a machine that others use too, spinning ones burnt 2.5 times the CPU and took 3 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def keep_big_blocks() -> bool:
    """Let glibc reuse big blocks instead of returning them to the kernel after each use: a step frees and takes hundreds of
    megabytes, and the page faults of fresh mappings cost a quarter of its time. The same as the MALLOC_* variables, which win
    when they are set; peak memory grows by up to a fifth."""
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False  # no glibc: its allocator has its own ways
    asked = ((M_MMAP_THRESHOLD, BLOCK_BYTES_KEPT), (M_TRIM_THRESHOLD, TRIM_BYTES), (M_TOP_PAD, TOP_PAD_BYTES))
    return all(mallopt(option, value) == 1 for option, value in asked)


def _unreadable(name: str, value: str, needed: str) -> PlanInvalid:
    return PlanInvalid("the environment can't be understood", where=name, what=f"{value!r} is not {needed}",
                       fix=f"set {name} to {needed}, or leave it out")
