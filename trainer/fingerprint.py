"""Where exactness holds: the machine settings that bits depend on, made strict and written down.

Two runs promise the same bits only when these are equal; a resume under others is refused. Nothing here names a host or a time.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from torch.nn.attention import SDPBackend

from policies.errors import PlanInvalid
from trainer.environment import CUBLAS_WORKSPACE
from trainer.head_loss import CHUNK_ROWS
from trainer.products import has_onednn

ATTENTION = {"cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH), "cuda": (SDPBackend.MATH,)}
"""By device, the first that can do it. On the CPU the fused kernel gives each head of each row to one thread, so forward and backward
add in one order; it has no dropout and then leaves the work to the other. On an accelerator only the plain one is always deterministic."""
OPTIMIZER = "adamw, fused"
POLICIES = ("errors", "facts", "manifest", "selection", "token_nll")
"""What the trainer imports of the shared policies; the others change nothing that it computes."""
LOSS = {"fp32": f"cross entropy, gradient made in chunks of {CHUNK_ROWS} rows", "bf16": "cross entropy of all logits"}


def make_strict(threads: int) -> None:
    """Deterministic algorithms only, fixed threads, no TF32, no search for the fastest convolution."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory is a debugging aid that strict mode switches on; it costs time and changes no defined result.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def choose_device(wish: str, precision: str, *, where: str) -> torch.device:
    """The device that `auto`, `cpu`, `cuda` or `cuda:N` means here. PlanInvalid when it is not there."""
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wish == "auto":
        wish = "cuda:0" if available else "cpu"
    device = torch.device(wish)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= available:
            raise PlanInvalid("the device is not there", where=where, what=f"device is {wish!r}, this process sees {available} CUDA devices",
                              fix="set device: auto or cpu in the plan, or choose another host")
    elif precision == "bf16":
        raise PlanInvalid("bf16 needs an accelerator", where=where, what="the device is the CPU, where bf16 is many times slower than fp32",
                          fix="set precision: fp32 in the plan")
    return device


def attention_kernels(device: torch.device) -> list[SDPBackend]:
    return list(ATTENTION[device.type])


def limit_memory(device: torch.device, cap_bytes: int | None) -> None:
    """Make the accelerator's allocator refuse what is over the cap. A CPU has no such limit: the supervisor watches it."""
    if device.type == "cuda" and cap_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total), device)


def fingerprint(device: torch.device, *, threads: int, precision: str) -> dict[str, Any]:
    """What a resume has to find unchanged."""
    return {
        "torch": torch.__version__, "numpy": np.__version__, "safetensors": safetensors.__version__, "transformers": transformers.__version__,
        "threads": threads, "device": device.type, "accelerators": _accelerators(device), "architecture": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(), "precision": precision,
        "attention": " or ".join(kernel.name.lower() for kernel in ATTENTION[device.type]), "optimizer": OPTIMIZER, "loss": LOSS[precision],
        "products": "onednn" if has_onednn(device) else "torch",
        "deterministic": torch.are_deterministic_algorithms_enabled(), "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE),
    }


def code_digest() -> str:
    """SHA-256 over the trainer's own files and the policies that it imports, by name and content: a resume under other code is told."""
    digest, root = hashlib.sha256(), Path(__file__).resolve().parent.parent
    for path in sorted([*(root / "trainer").rglob("*.py"), *(root / "policies" / f"{name}.py" for name in POLICIES)]):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return digest.hexdigest()


def _accelerators(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return []
    return [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]


def differences(then: Any, now: Any, name: str = "") -> list[str]:
    """Every place where two JSON values differ, in words: `optimizer.lr: 0.003 in the checkpoint, 0.004 now`."""
    if isinstance(then, dict) and isinstance(now, dict):
        found = []
        for key in sorted(then.keys() | now.keys()):
            below = f"{name}.{key}" if name else key
            found += differences(then.get(key, "absent"), now.get(key, "absent"), below)
        return found
    return [] if then == now else [f"{name}: {then!r} in the checkpoint, {now!r} now"]
