"""By what a cap can be held on this host, and how strongly: `python -m fleetd.host.means ROOT` prints one JSON object of CapParts.

The agent tells it with its facts; `fleetd check` asks it of the machine it runs on, for the user and the cgroup that ask.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fleetd.host import cradle, devices
from fleetd.model import CapPart
from fleetd.wire import dumps, encode
from policies.facts import CapGrade


def of_host(cgroup: CapPart, accelerators: tuple[str, ...]) -> dict[str, CapPart]:
    """What each part of a cap can be on this host. How strongly it holds for one run is said by that run's observation."""
    return {
        "cgroup": cgroup, "sampler": CapPart(grade=CapGrade.SAMPLED, means="anonymous and shared memory of the tree, four times a second or faster"),
        "allocator": _device_part(accelerators),
        "floor": CapPart(grade=CapGrade.SAMPLED, means="MemAvailable of the host, each second or faster"),
    }


def _device_part(accelerators: tuple[str, ...]) -> CapPart:
    """Beside the limit of the trainer's own allocator, which each run names for itself."""
    if not accelerators:
        return CapPart(grade=CapGrade.ABSENT, means=f"no accelerator ({devices.why_none() or 'none answers'})")
    if not devices.sees_machine_pids():
        return CapPart(grade=CapGrade.ABSENT, means=f"{', '.join(accelerators)}: {devices.FOREIGN_PIDS}")
    return CapPart(grade=CapGrade.SAMPLED, means=f"device bytes of the tree each second, beside the trainer's own limit: {', '.join(accelerators)}")


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m fleetd.host.means ROOT", file=sys.stderr)
        return 2
    print(dumps(encode(of_host(cradle.host_part(Path(arguments[0])), devices.names()))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
