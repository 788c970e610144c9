"""By what a cap can be held on this host, and how strongly, for the user and the cgroup that ask.

The agent tells it with its facts, a survey with everything else that it saw.
"""

from __future__ import annotations

from fleetd.host import devices
from fleetd.model import CapPart
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
