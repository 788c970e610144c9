"""Whether what a plan asks for fits its hosts: memory, caps that the kernel has to hold, and disk, with the arithmetic in the words.

    Wanted (a candidate, or the evaluation) + Offer (a host as it is) ─► findings of preflight and of `fleetd check`
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.facts import MIB, CapGrade
from policies.memory import Admission, admit, gib
from policies.surveys import Finding

DISK_SLACK_BYTES = 256 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What one line of the plan asks of the host it will run on; `host` is a name, or `any`."""

    name: str
    host: str
    host_bytes: int
    accelerator_bytes: int
    demand: CapGrade = CapGrade.SAMPLED


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One host as it was found. `freed_bytes` comes back once displaced work has ended."""

    host: str
    capacity_bytes: int | None
    floor_bytes: int
    total_bytes: int
    available_bytes: int | None
    freed_bytes: int = 0
    has_accelerator: bool = False
    cap_grade: str = ""
    cap_means: str = ""
    disk_free_bytes: int | None = None
    data_bytes: int = 0
    environment_bytes: int = 0
    checkpoint_bytes: int = 0
    root: str = ""


def room_findings(wanted: tuple[Wanted, ...], offers: tuple[Offer, ...]) -> tuple[Finding, ...]:
    """Everything to be said of memory, caps and disk. Hosts that were not looked at are not among the offers, and nothing is said of them."""
    found = [each for offer in offers for each in (*_capacity(offer), *_disk(offer))]
    for each in wanted:
        found += _fits(each, tuple(offer for offer in offers if each.host in ("any", offer.host)))
    for offer in offers:
        found += _starts_now(offer, tuple(each for each in wanted if each.host in ("any", offer.host)))
    return tuple(found)


def _capacity(offer: Offer) -> tuple[Finding, ...]:
    if offer.capacity_bytes is None or offer.capacity_bytes <= offer.total_bytes:
        return ()
    what = f"capacity is {gib(offer.capacity_bytes)}, but the machine has {gib(offer.total_bytes)}"
    fix = f"set capacity of {offer.host} to at most {gib(offer.total_bytes)}"
    return (Finding(host=offer.host, refuses=True, title="the plan hands out more memory than there is", what=what, fix=fix),)


def _disk(offer: Offer) -> tuple[Finding, ...]:
    needed_bytes = offer.data_bytes + offer.environment_bytes + offer.checkpoint_bytes + DISK_SLACK_BYTES
    if offer.disk_free_bytes is None or offer.disk_free_bytes >= needed_bytes:
        return ()
    environment = f" + environment {gib(offer.environment_bytes)}" if offer.environment_bytes else ""
    what = (
        f"data {gib(offer.data_bytes)}{environment} + checkpoints about {gib(offer.checkpoint_bytes)} + slack {gib(DISK_SLACK_BYTES)} "
        f"= {gib(needed_bytes)}, but {gib(offer.disk_free_bytes)} are free under {offer.root}"
    )
    fix = "free some space, or name a root on another disk"
    return (Finding(host=offer.host, refuses=True, title="the disk is too small for this plan", what=what, fix=fix),)


def _fits(each: Wanted, options: tuple[Offer, ...]) -> tuple[Finding, ...]:
    """Refused where no host could ever take it, not even empty."""
    whys = [_why_not(each, offer) for offer in options]
    if not options or not all(whys):
        return ()
    title = f"{each.name} can never start here" if len(options) == 1 else f"{each.name} fits no host"
    what = "; ".join(f"{offer.host}: {why}" if len(options) > 1 else str(why) for offer, why in zip(options, whys, strict=True))
    fix = "give it a smaller memory_cap, a host with more memory, or set memory_cap.demand: sampled"
    return (Finding(host=options[0].host, refuses=True, title=title, what=what, fix=fix),)


def _why_not(each: Wanted, offer: Offer) -> str | None:
    if each.demand is CapGrade.ENFORCED and offer.cap_grade != CapGrade.ENFORCED:
        return f"memory_cap.demand is enforced, here it is {offer.cap_grade or 'unknown'}: {offer.cap_means}"
    verdict = _admission(each, offer, available_bytes=None)
    return None if verdict.possible else verdict.text


def _starts_now(offer: Offer, wanted: tuple[Wanted, ...]) -> tuple[Finding, ...]:
    """Told where everything that could run here would have to wait for memory."""
    if offer.available_bytes is None:
        return ()
    verdicts = [_admission(each, offer, available_bytes=offer.available_bytes + offer.freed_bytes) for each in wanted]
    possible = [verdict for verdict in verdicts if verdict.possible]
    if not possible or any(verdict.admitted for verdict in possible):
        return ()
    fix = "end other programs there, name them under displace, or lower memory_cap; a launched run waits for the memory"
    return (Finding(host=offer.host, refuses=False, title="nothing of this plan can start here now", what=possible[0].text, fix=fix),)


def _admission(each: Wanted, offer: Offer, *, available_bytes: int | None) -> Admission:
    return admit(
        capacity_bytes=offer.capacity_bytes or offer.total_bytes, floor_bytes=offer.floor_bytes, available_bytes=available_bytes, committed=(),
        asked_bytes=each.host_bytes + (each.accelerator_bytes if offer.has_accelerator else 0),
    )
