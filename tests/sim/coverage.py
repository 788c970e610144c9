"""Which transitions of the tables a soak reached, seen by hosts and by the coordinator."""

from __future__ import annotations

from collections import Counter
from typing import Any

from policies.lifecycle import CAMPAIGN_TRANSITIONS, RUN_TRANSITIONS


class Coverage:
    def __init__(self) -> None:
        self.host: Counter[tuple[Any, Any]] = Counter()
        self.runs: Counter[tuple[Any, Any]] = Counter()
        self.campaigns: Counter[tuple[Any, Any]] = Counter()

    def add(self, other: Coverage) -> None:
        self.host.update(other.host)
        self.runs.update(other.runs)
        self.campaigns.update(other.campaigns)

    def table(self) -> str:
        lines = ["transitions of a run                         host      coordinator"]
        for source, targets in RUN_TRANSITIONS.items():
            for to in sorted(targets, key=str):
                lines.append(f"  {source.value:>10} → {to.value:<12} {self.host[source, to]:>16} {self.runs[source, to]:>16}")
        lines.append("stages of a campaign")
        for stage, stages in CAMPAIGN_TRANSITIONS.items():
            for later in sorted(stages, key=str):
                lines.append(f"  {stage.value:>10} → {later.value:<12} {self.campaigns[stage, later]:>33}")
        return "\n".join(lines)

    def never(self) -> list[str]:
        """Pairs of the tables that were reached neither on a host nor at the coordinator."""
        runs = [f"run {source} → {to}" for source, targets in RUN_TRANSITIONS.items() for to in sorted(targets, key=str)
                if not self.host[source, to] and not self.runs[source, to]]
        stages = [f"campaign {source} → {to}" for source, targets in CAMPAIGN_TRANSITIONS.items() for to in sorted(targets, key=str)
                  if not self.campaigns[source, to]]
        return [*runs, *stages]
