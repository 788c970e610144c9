"""Named points at which a test kills this process or fills its disk: before a write, and between a write and its acknowledgement.

    FLEETD_FAULT="supervisor:17:kill:/tmp/purse"      the supervisor's 17th boundary is its last
    FLEETD_FAULT="coordinator:~30:kill:/tmp/purse"    each coordinator draws its own number from 1 to 30
    FLEETD_FAULT="shim:cgroup made:kill:/tmp/purse"   the first time that a shim comes to that point
    FLEETD_FAULT="shim:attempt.json write#2:full:/b"  from the second time on, there alone
    FLEETD_FAULT="agent:5:full:/tmp/ballast"          from its 5th write on the disk is full, as long as that file exists
    FLEETD_FAULT="shim:5:refuse:"                     only its 5th write finds no room

Several of them, with commas between. The role is the last word of the module that runs (the daemon is the coordinator), or the program
of a release. A kill costs one file of its folder, a purse: the file `ROLE-PID-POINT` takes the place of the coin, and an empty purse
kills nobody; so a run of tests has as many deaths as it paid for. Without the variable every point is an empty function: nothing is
counted or read.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

ENV_FAULT = "FLEETD_FAULT"
COIN_PREFIX = "coin-"
POINT_MAX = 5
"""So often a point counts as a boundary to die at: of a hundred copied files or heartbeats the first few are enough."""


@dataclass(kw_only=True)
class Fault:
    """One entry of the variable, for this process."""

    number: int
    act: str
    place: str
    point: str = ""
    """When it is named, only this point counts."""
    counted: int = field(default=0)

    def is_due(self, point: str) -> bool:
        if self.point not in ("", point):
            return False
        self.counted += 1
        return self.counted >= self.number if self.act == "full" else self.counted == self.number


class Faults:
    def __init__(self, text: str, role: str) -> None:
        self.role = role
        self.seen: Counter[str] = Counter()
        self.found = [_parse(entry) for entry in text.split(",") if entry.split(":", 1)[0] == role]

    def before(self, point: str, error: Callable[[str], Exception] | None = None) -> None:
        """A write that a full disk would refuse comes next: OSError with ENOSPC, or `error` where the writer raises another kind."""
        self.after(point)
        for fault in self.found:
            if fault.act in ("full", "refuse") and fault.is_due(point) and (fault.act == "refuse" or os.path.exists(fault.place)):
                raise error("database or disk is full") if error is not None else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), point)

    def after(self, point: str) -> None:
        """Something is done, and what rests on it is not."""
        self.seen[point] += 1
        if self.seen[point] > POINT_MAX:
            return
        for fault in self.found:
            if fault.act == "kill" and fault.is_due(point) and _pays(fault.place, f"{self.role}-{os.getpid()}-{point}"):
                os.kill(os.getpid(), signal.SIGKILL)


def _parse(entry: str) -> Fault:
    _, number, act, place = entry.split(":", 3)
    if number.startswith("~"):
        drawn = hashlib.sha256(f"{os.getpid()} {os.times().elapsed}".encode()).digest()
        return Fault(number=1 + int.from_bytes(drawn[:4], "big") % int(number[1:]), act=act, place=place)
    if not number.isdigit():
        point, _, nth = number.partition("#")
        return Fault(number=int(nth or 1), act=act, place=place, point=point)
    return Fault(number=int(number), act=act, place=place)


def _pays(purse: str, name: str) -> bool:
    """Turn one coin of the purse into the record of a death. Atomic: two processes never spend the same."""
    try:
        coins = [coin for coin in os.listdir(purse) if coin.startswith(COIN_PREFIX)]
    except OSError:
        return False
    for coin in sorted(coins):
        try:
            os.rename(f"{purse}/{coin}", f"{purse}/{name}")
            return True
        except OSError:
            continue
    return False


def _role() -> str:
    """The module that was run by name, or the program that was asked for at the door of a release (fleetd/host/__main__.py)."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    words = sys.argv if spec is None else ["", spec.name.rpartition(".")[2]]
    word = words[1] if len(words) > 1 else ""
    return {"daemon": "coordinator"}.get(word, word)


def _no_fault(point: str, error: Callable[[str], Exception] | None = None) -> None:
    """Every point of a process that nobody tests."""


before: Callable[..., None] = _no_fault
after: Callable[[str], None] = _no_fault
if os.environ.get(ENV_FAULT):
    _faults = Faults(os.environ[ENV_FAULT], _role())
    if _faults.found:
        before, after = _faults.before, _faults.after
