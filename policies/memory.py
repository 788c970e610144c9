"""Whether a run may start with its cap, and whether it has reached a line of it. All arithmetic is shown in the verdict.

The cap has two parts (`host`: anonymous and shared memory of the tree, `accelerator`: device bytes of its processes) and a floor under
the host's MemAvailable. An unknown measurement (None) never trips a line.

    host         soft: its fraction of the cap           hard: the cap
    accelerator  soft: the cap and the context allowance hard: that, divided by the soft fraction
    floor        soft: the floor                         hard: half of it
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.facts import GIB, Reason, Word

CONTEXT_ALLOWANCE_BYTES = 3 * GIB // 2
"""What a CUDA context and its libraries hold beside the allocator, as NVML counts it from outside the process."""
FLOOR_HARD_FRACTION = 0.5


class Line(Word):
    NONE = "none"
    SOFT = "soft"
    HARD = "hard"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryVerdict:
    """SOFT: save and stop. HARD: kill the tree. `part` is `host`, `accelerator` or `floor`, empty when no line is reached."""

    line: Line
    reason: Reason | None
    text: str
    part: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`possible` is False when the cap would not fit even an empty host: waiting can't help."""

    admitted: bool
    possible: bool
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Bytes from which on a run is asked to save and stop (soft), or its tree is killed (hard)."""

    host_soft_bytes: int
    host_hard_bytes: int
    accelerator_soft_bytes: int
    accelerator_hard_bytes: int


def lines_of(
    *, host_cap_bytes: int, accelerator_cap_bytes: int, soft_fraction: float, context_allowance_bytes: int = CONTEXT_ALLOWANCE_BYTES
) -> Lines:
    """The lines of one cap. A process that fills its allocator to the limit, with any context that the allowance covers, does what
    it was promised: both lines of the accelerator lie above that."""
    assert 0.0 < soft_fraction <= 1.0 and host_cap_bytes > 0 and accelerator_cap_bytes >= 0
    accelerator_soft_bytes = accelerator_cap_bytes + context_allowance_bytes
    return Lines(
        host_soft_bytes=int(host_cap_bytes * soft_fraction), host_hard_bytes=host_cap_bytes,
        accelerator_soft_bytes=accelerator_soft_bytes, accelerator_hard_bytes=int(accelerator_soft_bytes / soft_fraction),
    )


def judge(
    *,
    host_cap_bytes: int,
    accelerator_cap_bytes: int,
    floor_bytes: int,
    soft_fraction: float,
    host_bytes: int | None,
    accelerator_bytes: int | None,
    available_bytes: int | None,
    context_allowance_bytes: int = CONTEXT_ALLOWANCE_BYTES,
) -> MemoryVerdict:
    """The hardest line that one look has reached; of two equally hard ones, the run's own cap before the host's floor."""
    assert floor_bytes >= 0
    lines = lines_of(
        host_cap_bytes=host_cap_bytes, accelerator_cap_bytes=accelerator_cap_bytes, soft_fraction=soft_fraction,
        context_allowance_bytes=context_allowance_bytes,
    )
    verdicts = (
        _part("host", host_bytes, soft_bytes=lines.host_soft_bytes, hard_bytes=lines.host_hard_bytes),
        _part("accelerator", accelerator_bytes, soft_bytes=lines.accelerator_soft_bytes, hard_bytes=lines.accelerator_hard_bytes),
        _floor(available_bytes, floor_bytes),
    )
    for line in (Line.HARD, Line.SOFT):
        for verdict in verdicts:
            if verdict.line is line:
                return verdict
    return MemoryVerdict(line=Line.NONE, reason=None, text="; ".join(verdict.text for verdict in verdicts))


def look_again_seconds(
    *, used_bytes: int | None, line_bytes: int, growth_bytes_per_second: float, calm_seconds: float, quick_seconds: float
) -> float:
    """How long the next look at a growing amount may wait: half the time in which the growth would reach the line, within the bounds."""
    assert 0.0 < quick_seconds <= calm_seconds
    if used_bytes is None or growth_bytes_per_second <= 0.0:
        return calm_seconds
    return max(quick_seconds, min(calm_seconds, (line_bytes - used_bytes) / growth_bytes_per_second / 2))


def admit(
    *, capacity_bytes: int, floor_bytes: int, available_bytes: int | None, committed: tuple[tuple[str, int], ...], asked_bytes: int
) -> Admission:
    """Whether `asked_bytes` fit beside what the runs in `committed` (name, bytes) hold, above the floor, on one host.

    `available_bytes` is what the host reports as free for use right now, None when nobody has looked: then the promises alone decide.
    """
    assert asked_bytes >= 0 and capacity_bytes >= 0 and floor_bytes >= 0
    held_bytes = sum(amount for _, amount in committed)
    room_bytes = capacity_bytes - floor_bytes
    free_bytes = room_bytes - held_bytes
    asks = f"asks {gib(asked_bytes)}; {gib(capacity_bytes)} capacity − {gib(floor_bytes)} floor"
    if asked_bytes > room_bytes:
        return Admission(admitted=False, possible=False, text=f"{asks} = {gib(room_bytes)}, even with no other run")
    held = f" − {gib(held_bytes)} held by {', '.join(name for name, _ in committed)}" if committed else ""
    if asked_bytes > free_bytes:
        return Admission(admitted=False, possible=True, text=f"{asks}{held} = {gib(free_bytes)}")
    if available_bytes is not None and asked_bytes > available_bytes - floor_bytes:
        text = f"asks {gib(asked_bytes)}; {gib(available_bytes)} available now − {gib(floor_bytes)} floor = {gib(available_bytes - floor_bytes)}"
        return Admission(admitted=False, possible=True, text=text)
    return Admission(admitted=True, possible=True, text=f"{asks}{held} = {gib(free_bytes)}")


def gib(amount_bytes: int) -> str:
    """`6.0 GiB`; amounts under a tenth of one in MiB, so that a small figure never reads as zero."""
    return f"{amount_bytes / GIB:.1f} GiB" if abs(amount_bytes) >= GIB // 10 or amount_bytes == 0 else f"{amount_bytes / 1024**2:.1f} MiB"


def _part(name: str, used_bytes: int | None, *, soft_bytes: int, hard_bytes: int) -> MemoryVerdict:
    if used_bytes is None:
        return MemoryVerdict(line=Line.NONE, reason=None, text=f"{name} unknown")
    if used_bytes >= hard_bytes:
        return MemoryVerdict(line=Line.HARD, reason=Reason.MEMORY, part=name, text=f"{name} {gib(used_bytes)} ≥ hard line {gib(hard_bytes)}")
    if used_bytes >= soft_bytes:
        text = f"{name} {gib(used_bytes)} ≥ soft line {gib(soft_bytes)} (hard {gib(hard_bytes)})"
        return MemoryVerdict(line=Line.SOFT, reason=Reason.MEMORY, part=name, text=text)
    return MemoryVerdict(line=Line.NONE, reason=None, text=f"{name} {gib(used_bytes)} of {gib(hard_bytes)}")


def _floor(available_bytes: int | None, floor_bytes: int) -> MemoryVerdict:
    if available_bytes is None:
        return MemoryVerdict(line=Line.NONE, reason=None, text="host available unknown")
    if available_bytes >= floor_bytes:
        return MemoryVerdict(line=Line.NONE, reason=None, text=f"host {gib(available_bytes)} available, floor {gib(floor_bytes)}")
    hard_bytes = int(floor_bytes * FLOOR_HARD_FRACTION)
    line, name = (Line.HARD, "half of the floor") if available_bytes < hard_bytes else (Line.SOFT, "the floor")
    text = f"host {gib(available_bytes)} available < {name} ({gib(hard_bytes if line is Line.HARD else floor_bytes)})"
    return MemoryVerdict(line=line, reason=Reason.HOST_MEMORY, part="floor", text=text)
