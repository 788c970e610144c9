"""The random streams of the process, out and in: Python, NumPy's legacy one, torch on the CPU and on every CUDA device.

Dropout draws from torch's; a user's model code may draw from any. They are stored as plain integer tensors (no pickle).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PYTHON_VERSION = 3
"""First field of `random.getstate()` since Python 3."""

Streams = dict[str, npt.NDArray[Any]]


def capture() -> Streams:
    """The state of every stream, as arrays by name."""
    version, words, gauss = random.getstate()
    assert version == PYTHON_VERSION
    _, key, position, has_gauss, cached = np.random.get_state(legacy=True)
    streams: Streams = {
        "python": np.array(words, dtype=np.uint32), "python_gauss": np.array([] if gauss is None else [gauss], dtype=np.float64),
        "numpy": np.array(key, dtype=np.uint32), "numpy_place": np.array([position, has_gauss], dtype=np.int64),
        "numpy_gauss": np.array([cached], dtype=np.float64), "torch_cpu": torch.get_rng_state().numpy().copy(),
    }
    for number, state in enumerate(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []):
        streams[f"cuda_{number}"] = state.numpy().copy()
    return streams


def restore(streams: Streams) -> None:
    """Put every stream back. KeyError or ValueError when one is missing, too many, or malformed."""
    devices = sorted(name for name in streams if name.startswith("cuda_"))
    here = [f"cuda_{number}" for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)]
    if devices != sorted(here):
        raise ValueError(f"streams of {devices or 'no CUDA device'} were saved, here are {here or 'none'}")
    gauss = streams["python_gauss"]
    random.setstate((PYTHON_VERSION, tuple(int(word) for word in streams["python"]), float(gauss[0]) if len(gauss) else None))
    position, has_gauss = (int(value) for value in streams["numpy_place"])
    np.random.set_state(("MT19937", streams["numpy"], position, has_gauss, float(streams["numpy_gauss"][0])))
    torch.set_rng_state(torch.from_numpy(streams["torch_cpu"].copy()))
    if devices:
        torch.cuda.set_rng_state_all([torch.from_numpy(streams[name].copy()) for name in here])


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside, the training streams go on as if nothing had been."""
    before = capture()
    try:
        yield
    finally:
        restore(before)
