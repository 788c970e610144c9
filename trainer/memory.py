"""How much memory a training needs at least, where that is known before it begins, and whether an error means there was none."""

from __future__ import annotations

import re
import resource
from pathlib import Path

import torch

from policies.errors import PlanInvalid
from trainer.config import TASK_NAME, TrainTask
from trainer.head_loss import CHUNK_ROWS
from trainer.state import TrainingState

CGROUPS = Path("/sys/fs/cgroup")


def is_out_of_memory(fault: BaseException) -> bool:
    """Whether an allocator said no: Python's, CUDA's, or torch's on the CPU (which has no class of its own)."""
    return isinstance(fault, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(fault)


def planned_bytes(model: torch.nn.Module, task: TrainTask) -> int:
    """Weights, gradients and two moments, and the logits that are held at once (all of a micro-batch three times, where autocast makes
    them): the least that a step needs."""
    vocabulary, rows = int(model.config.vocab_size), task.micro_batch * task.window  # type: ignore[union-attr, arg-type]
    logits_bytes = 4 * min(rows, CHUNK_ROWS) * vocabulary if task.precision == "fp32" else 12 * rows * vocabulary
    return 16 * sum(weight.numel() for weight in model.parameters()) + logits_bytes


def peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    try:  # getrusage(2) would tell of the program before an exec too
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def host_limit_bytes() -> int | None:
    """What our control group may use, the tightest of its line; None when nothing limits it or it can't be read."""
    limits = []
    try:
        own = [line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        for folder in [place for name in own for place in ((CGROUPS / name.lstrip("/")), *(CGROUPS / name.lstrip("/")).parents)]:
            limit = folder / "memory.max"
            if limit.is_file() and (text := limit.read_text().strip()).isdigit():
                limits.append(int(text))
    except OSError:
        return None
    return min(limits, default=None)


def check_memory(state: TrainingState, task: TrainTask, device: torch.device, *, cap_bytes: int | None, where: Path) -> None:
    """PlanInvalid when the training can't fit: refused at once, instead of killed at the first save."""
    step_bytes, copy_bytes, limit_bytes = planned_bytes(state.model, task), state.snapshot_bytes(), host_limit_bytes()
    on_host = copy_bytes + (step_bytes if device.type == "cpu" else 0)
    on_device = step_bytes if device.type == "cuda" else 0
    faults = []
    if limit_bytes is not None and on_host > limit_bytes:
        faults.append(f"host memory: at least {on_host} bytes are needed ({copy_bytes} of them for the copy that a save writes from), "
                      f"{limit_bytes} are allowed")
    if cap_bytes is not None and on_device > cap_bytes:
        faults.append(f"accelerator memory: at least {on_device} bytes are needed, {cap_bytes} are allowed")
    if faults:
        raise PlanInvalid("the training does not fit under its memory cap", where=str(where / TASK_NAME), what="; ".join(faults),
                          fix="raise memory_cap in the plan, or choose a smaller micro_batch or model")
