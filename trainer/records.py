"""What the trainer tells while it works: log.jsonl for the machine, lineage.jsonl for the story, hints for the hurried.

The kinds of lines are those of docs/ARCHITECTURE.md. A line that can't be written is told on stderr and forgotten.
"""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from policies.facts import format_moment
from trainer.files import append_line, dumps, replace_whole, sweep_temporaries

LOG_NAME = "log.jsonl"
LINEAGE_NAME = "lineage.jsonl"


def now_text() -> str:
    return format_moment(datetime.now(timezone.utc))


class RunRecords:
    """The append-only files of one run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def sweep(self) -> None:
        """Remove half-written records of an attempt that was killed, here and beside the predictions."""
        for folder in (self._run_dir, *self._run_dir.glob("predictions/*/")):
            sweep_temporaries(folder)

    def log(self, **record: Any) -> None:
        """One line of log.jsonl. Not synced: the supervisor reads it through the page cache, and a checkpoint holds the losses."""
        append_line(self._run_dir / LOG_NAME, {**record, "at": now_text()}, durable=False)

    def lineage(self, event: str, **record: Any) -> None:
        """One synced line of lineage.jsonl: the only place for wall-clock values and parents."""
        append_line(self._run_dir / LINEAGE_NAME, {"at": now_text(), "event": event, "pid": os.getpid(), **record}, durable=True)

    def last_code(self) -> str | None:
        """Digest of the code that the newest attempt before this one ran, None when there was none or it did not say."""
        return next((str(line["code"]) for line in reversed(self.story()) if line.get("code")), None)

    def story(self) -> list[dict[str, Any]]:
        """The lines of lineage.jsonl that can be read, in order."""
        try:
            text = (self._run_dir / LINEAGE_NAME).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return [line for line in map(_object, text.splitlines()) if line is not None]

    def hint(self, name: str, *, step: int, digest: str, value: float | None) -> None:
        """best.json or latest.json. Only a hint: the truth is the newest directory that verifies."""
        try:
            replace_whole(self._run_dir / f"{name}.json", dumps({"step": step, "digest": digest, "value": value}))
        except OSError as fault:
            self.log(event="note", text=f"{name}.json could not be written: {fault}")


def _object(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None  # a torn tail
    return value if isinstance(value, dict) else None
