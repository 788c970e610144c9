"""The choice of one checkpoint, by a fixed rule, from evidence that somebody else has verified.

Within a run the unchanged base (step 0) is the first incumbent, and a later checkpoint replaces the incumbent only by the
minimum improvement. Across runs the lowest value wins, equal ones by checkpoint digest. Values are compared as integers of
1e-9 nats, so no tie depends on the last bits of a float and an improvement of exactly the minimum counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

NANO = 1_000_000_000
NO_IMPROVEMENT = "no_improvement"
NOTHING_ELIGIBLE = "nothing_eligible"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvidence:
    """One validated checkpoint. `value` is recomputed from its rows; `refused` says in words why it can't take part."""

    step: int
    checkpoint_digest: str
    value: float | None
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateEvidence:
    """One run with all checkpoints it validated. `refused` excludes the whole run, for the reason it gives."""

    run_id: str
    candidate: str
    checkpoints: tuple[CheckpointEvidence, ...]
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """One line of the selection table. A run without any checkpoint has one line, whose step is None."""

    run_id: str
    candidate: str
    step: int | None
    checkpoint_digest: str | None
    value: float | None
    eligible: bool
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The chosen checkpoint, and the unchanged base of the same run, which it is compared with from here on."""

    run_id: str
    candidate: str
    step: int
    checkpoint_digest: str
    value: float
    base_checkpoint_digest: str
    base_value: float
    table: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSelection:
    """Nothing is chosen, never "the best anyway". `reason` is `no_improvement` or `nothing_eligible`."""

    reason: str
    because: str
    table: tuple[TableRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contest:
    """One run's own result: its lines, its unchanged base and the last incumbent."""

    run: CandidateEvidence
    rows: tuple[TableRow, ...]
    base: CheckpointEvidence | None = None
    winner: CheckpointEvidence | None = None


def nano(value: float) -> int:
    """A value as an integer of 1e-9, halves to even."""
    assert math.isfinite(value), "only finite values are compared"
    return round(value * NANO)


def better_than_incumbent(value: float, incumbent: float, minimum_improvement: float) -> bool:
    """Whether `value` is lower than `incumbent` by at least the minimum improvement; an equal value never is."""
    assert minimum_improvement >= 0
    return nano(value) <= nano(incumbent) - max(1, nano(minimum_improvement))


def select(candidates: tuple[CandidateEvidence, ...], minimum_improvement: float) -> Selection | NoSelection:
    """The choice and a table with every checkpoint. The order of `candidates` and of their checkpoints changes nothing."""
    assert len({run.run_id for run in candidates}) == len(candidates), "a run occurs once"
    ordered = sorted(candidates, key=lambda run: (run.candidate, run.run_id))
    contests = [_contest(run, minimum_improvement) for run in ordered]
    settled = [contest for contest in contests if contest.winner is not None]
    if not settled:
        because = "no candidate has an eligible checkpoint" if contests else "there are no candidates"
        return NoSelection(reason=NOTHING_ELIGIBLE, because=because, table=_table(contests))
    best = min(settled, key=_rank)
    assert best.winner is not None and best.winner.value is not None and best.base is not None and best.base.value is not None
    if best.winner.step == 0:
        because = f"the unchanged base of {best.run.candidate} ({best.winner.value:.6f}) is not beaten by {minimum_improvement:g}"
        return NoSelection(reason=NO_IMPROVEMENT, because=because, table=_table(contests))
    return Selection(
        run_id=best.run.run_id, candidate=best.run.candidate, step=best.winner.step,
        checkpoint_digest=best.winner.checkpoint_digest, value=best.winner.value,
        base_checkpoint_digest=best.base.checkpoint_digest, base_value=best.base.value,
        table=_table([_crowned(contest, best, len(settled)) for contest in contests]),
    )


def _rank(contest: _Contest) -> tuple[int, str, str]:
    """Lowest value first, equal ones by checkpoint digest; two runs with one digest differ by run id only in name."""
    assert contest.winner is not None and contest.winner.value is not None
    return nano(contest.winner.value), contest.winner.checkpoint_digest, contest.run.run_id


def _contest(run: CandidateEvidence, minimum_improvement: float) -> _Contest:
    checkpoints = sorted(run.checkpoints, key=lambda each: (each.step, each.checkpoint_digest))
    assert len({each.step for each in checkpoints}) == len(checkpoints), f"{run.run_id}: one validation a step"
    refused = run.refused or _without_base(checkpoints)
    if refused is not None:
        rows = tuple(_row(run, each, False, run.refused or each.refused or refused) for each in checkpoints)
        return _Contest(run=run, rows=rows or (_empty_row(run, refused),))
    rows_made: list[TableRow] = []
    base = incumbent = checkpoints[0]
    for each in checkpoints:
        eligible = each.refused is None
        if eligible and each is not base and _beats(each, incumbent, minimum_improvement):
            because = f"better than step {incumbent.step} by {_gain(each, incumbent):.6f}"
            incumbent = each
        else:
            because = each.refused or _stays(each, base, incumbent, minimum_improvement)
        rows_made.append(_row(run, each, eligible, because))
    return _Contest(run=run, rows=tuple(rows_made), base=base, winner=incumbent)


def _without_base(checkpoints: list[CheckpointEvidence]) -> str | None:
    """Why a run can't take part for want of a first incumbent, or None when it has one."""
    if not checkpoints:
        return "it has no validated checkpoint"
    base = checkpoints[0]
    if base.step != 0:
        return "the validation of its unchanged base (step 0) is missing, so there is nothing to improve on"
    if base.refused is not None:
        return f"its unchanged base (step 0) can't be used: {base.refused}"
    return None


def _beats(each: CheckpointEvidence, incumbent: CheckpointEvidence, minimum_improvement: float) -> bool:
    assert each.value is not None and incumbent.value is not None, "eligible evidence carries its value"
    return better_than_incumbent(each.value, incumbent.value, minimum_improvement)


def _gain(each: CheckpointEvidence, incumbent: CheckpointEvidence) -> float:
    assert each.value is not None and incumbent.value is not None
    return incumbent.value - each.value


def _stays(each: CheckpointEvidence, base: CheckpointEvidence, incumbent: CheckpointEvidence, minimum_improvement: float) -> str:
    if each is base:
        return "the unchanged base, the first incumbent"
    return f"not better than step {incumbent.step} by {minimum_improvement:g}"


def _row(run: CandidateEvidence, each: CheckpointEvidence, eligible: bool, because: str) -> TableRow:
    return TableRow(
        run_id=run.run_id, candidate=run.candidate, step=each.step, checkpoint_digest=each.checkpoint_digest,
        value=each.value, eligible=eligible, because=because,
    )


def _empty_row(run: CandidateEvidence, because: str) -> TableRow:
    return TableRow(
        run_id=run.run_id, candidate=run.candidate, step=None, checkpoint_digest=None, value=None, eligible=False, because=because,
    )


def _crowned(contest: _Contest, best: _Contest, count: int) -> _Contest:
    """The contest with the last word on its winner: chosen, or beaten by another candidate."""
    winner = contest.winner
    if winner is None:
        return contest
    word = f"chosen, the lowest of {count}" if contest is best else f"the best of its run, {best.run.candidate} is lower"
    rows = tuple(replace(row, because=f"{row.because}; {word}") if row.step == winner.step else row for row in contest.rows)
    return replace(contest, rows=rows)


def _table(contests: list[_Contest]) -> tuple[TableRow, ...]:
    return tuple(row for contest in contests for row in contest.rows)
