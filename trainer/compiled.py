"""The model's body compiled by `torch.compile`, where the task asks for it: off by default, tried before the first step, recorded.

    compiled       forward and backward of the body (all but the head), in training
    as written     the head and its loss, the optimizer, and all scoring: a compiled run's rows are those that an evaluation computes

Compiled arithmetic adds up in another order, so a compiled run is another training than the same one as written: what made it
stands in the checkpoint's environment, and a resume under anything else is refused. The body is compiled in its place, so the
names of weights stay the plain ones.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from policies.errors import PlanInvalid
from trainer import randomness
from trainer.config import TrainTask
from trainer.fingerprint import attention_kernels
from trainer.records import RunRecords
from trainer.scoring import mean_nll

COMPILER_SECONDS_MAX = 30.0
WORDS_MAX = 400


def compiler_facts(*, where: str) -> dict[str, str]:
    """What compiled code depends on besides torch: the C++ compiler and the processor that it compiles for. PlanInvalid without a compiler."""
    name = os.environ.get("CXX", "g++")
    try:
        told = subprocess.run([name, "--version"], capture_output=True, text=True, check=True, timeout=COMPILER_SECONDS_MAX).stdout
    except (OSError, subprocess.SubprocessError) as fault:
        raise PlanInvalid("the model can't be compiled here", where=where, what=f"compile is true, and there is no C++ compiler {name!r}: {fault}",
                          fix="install g++ on this host (or name one in CXX), or leave compile out of the plan") from fault
    return {"backend": "inductor, deterministic", "compiler": told.partition("\n")[0].strip(), "processor": _processor()}


def compile_body(model: nn.Module, task: TrainTask, *, step: int, records: RunRecords, where: str) -> None:
    """Compile now what a step needs, on a micro-batch that leaves no trace. PlanInvalid when it can't be done."""
    import torch._inductor.config as inductor

    inductor.deterministic = True  # nothing is chosen by how fast it was just now
    inductor.compile_threads = 1  # no processes of its own, which nobody would stop and which count under the cap
    records.log(event="compile", phase="begin", step=step)
    began, device = time.monotonic(), next(model.parameters()).device
    tokens_BT = torch.zeros((task.micro_batch, task.window + 1), dtype=torch.int64, device=device)
    model.base_model.compile(dynamic=False)  # type: ignore[union-attr]
    try:
        with randomness.untouched(), sdpa_kernel(attention_kernels(device)):
            mean_nll(model, tokens_BT[:, :-1], tokens_BT[:, 1:], precision=task.precision,
                     parts=task.batch // task.micro_batch).backward()  # type: ignore[no-untyped-call]
    except Exception as fault:  # of many kinds, most of them its own: no header, no room for its files, something it can't compile
        raise PlanInvalid("the model can't be compiled here", where=where, what=f"{type(fault).__name__}: {' '.join(str(fault).split())[:WORDS_MAX]}",
                          fix="mend what it names (it needs g++ and Python's headers), or leave compile out of the plan") from fault
    finally:
        model.zero_grad(set_to_none=True)
    records.log(event="compile", phase="end", step=step, seconds=round(time.monotonic() - began, 6))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    named = {line.split(":", 1)[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    return named.get("model name") or named.get("CPU part") or "unknown"
