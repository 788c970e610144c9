"""What coordinator and host say to each other about an environment, and what stands in it once it is complete.

    wheelhouses/<digest>/         pip-….whl  requirements.txt  wheels/*.whl    staged as any tree; without wheels/ the host fetches them
    environments/<lock digest>/<flavour>/      the environment; `fleetd.json` in it is written last
    environments/<lock digest>/<flavour>.log   what its newest build said

A flavour is the Python and the wheels: `cpython-3.11.7-x86_64-1a2b3c4d5e6f`. The same lock built from another Python, or from other
wheels, lies beside and not in its place: runs go on in the one that they were started with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from policies.surveys import PythonSurvey

REQUIREMENTS, WHEELS = "requirements.txt", "wheels"
MARK = "fleetd.json"
REGISTRY = "registry"
"""In place of the wheels' digest, where the host fetches what it finds."""
FLAVOUR_DIGITS = 12
PLAIN_PYTHONS = ("python", "python3")
"""A command that begins with one of these means the environment's Python, where its host has an environment."""

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python of a host, as the source of an environment. `fault`: why it can't be one; the rest is empty then."""

    program: str
    fault: str | None = None
    version: str = ""
    implementation: str = ""
    machine: str = ""
    abi: str = ""
    """`cp311`, or `cp313t`."""
    libc: str = ""
    """`glibc 2.36`; empty where it is another one."""
    markers: dict[str, str] = field(default_factory=dict)
    """What PEP 508 calls the environment."""
    lacks: tuple[str, ...] = ()
    """Modules of the standard library that a distribution has left out, and that are needed."""

    @property
    def flavour(self) -> str:
        return _UNSAFE.sub("_", f"{self.implementation}-{self.version}-{self.machine}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentOrder:
    """What a host is asked to have: the environment of this lock and these wheels. `wheels` is their digest, or `registry`."""

    lock_sha256: str
    python: str
    wheels: str
    wheelhouse: str
    seconds_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentMark:
    """`fleetd.json`: there only when the environment is complete. What it says is compared before each use."""

    schema: int = 1
    name: str
    lock_sha256: str
    wheels: str
    version: str
    implementation: str
    machine: str
    built_at: datetime
    seconds: float
    bytes: int
    packages: dict[str, tuple[str, str]]
    """Version, and digest of all its files, by package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentAnswer:
    """An environment that is there and whole: what it was found to hold just now."""

    name: str
    is_new: bool
    """Whether this order has built it."""
    mark: EnvironmentMark
    python: PythonSurvey


def environment_name(lock_sha256: str, interpreter: Interpreter, wheels: str) -> str:
    """`<lock digest>/<flavour>`, below `environments/`."""
    return f"{lock_sha256}/{interpreter.flavour}-{wheels[:FLAVOUR_DIGITS]}"


def environment_python(root: str, name: str) -> str:
    """The interpreter of an environment on a host."""
    return f"{root}/environments/{name}/bin/python"
