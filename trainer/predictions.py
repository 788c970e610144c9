"""Prediction files: one row a document, and beside them what they are of. No torch: the host may look at them.

    predictions/validation/step-000000128.jsonl       rows in order of the documents
    predictions/validation/step-000000128.meta.json   digests, the claim, and the SHA-256 of the rows; written last

A pair that verifies is complete; whatever else lies there is written again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from policies.errors import DataDamaged
from policies.token_nll import CRITERION, RowsInvalid, ScoredRow, parse_row, token_nll
from trainer.files import JsonFault, dumps, dumps_line, loads, read_bounded, read_json, replace_whole

ROWS_BYTES_MAX = 1024 * 1024 * 1024


def write_predictions(folder: Path, name: str, rows: Sequence[ScoredRow], **described: Any) -> dict[str, Any]:
    """Write rows and meta, each whole. `described` holds split, step, the digests and the numeric mode. Returns the meta."""
    folder.mkdir(parents=True, exist_ok=True)
    data = b"".join(dumps_line(_as_json(row)) for row in rows)
    score = token_nll(rows)
    meta = {
        "schema": 1, "criterion": CRITERION, "rows": len(rows), "sha256": hashlib.sha256(data).hexdigest(), **described,
        "claim": {"value": score.value, "families": {family: each.nll_per_token for family, each in score.families.items()}},
    }
    replace_whole(folder / f"{name}.jsonl", data)
    replace_whole(folder / f"{name}.meta.json", dumps(meta))
    return meta


def complete_predictions(folder: Path, name: str, **expected: Any) -> dict[str, Any] | None:
    """The meta of predictions that are complete and have the `expected` fields, else None."""
    try:
        meta = read_json(folder / f"{name}.meta.json")
        data = read_bounded(folder / f"{name}.jsonl", ROWS_BYTES_MAX)
    except (OSError, JsonFault):
        return None
    if not isinstance(meta, dict) or any(meta.get(key, "absent") != value for key, value in expected.items()):
        return None
    matches = meta.get("sha256") == hashlib.sha256(data).hexdigest() and meta.get("rows") == data.count(b"\n")
    return meta if matches and isinstance(meta.get("claim"), dict) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a prediction file, each with the fields of a row. DataDamaged names the line."""
    rows = []
    try:
        data = read_bounded(path, ROWS_BYTES_MAX)
    except (OSError, JsonFault) as fault:
        raise _damaged(str(path), str(fault)) from fault
    if not data.endswith(b"\n"):
        raise _damaged(str(path), f"it is empty, or cut in its last line, at offset {len(data)}")
    for number, line in enumerate(data[:-1].split(b"\n"), start=1):
        try:
            row = loads(line)
            parse_row(row, f"line {number}")
        except (JsonFault, RowsInvalid) as fault:
            raise _damaged(f"{path}:{number}", str(fault)) from fault
        rows.append(row)
    return rows


def _damaged(where: str, what: str) -> DataDamaged:
    return DataDamaged("the predictions can't be used", where=where, what=what, fix="delete the pair of files: the trainer scores it again")


def _as_json(row: ScoredRow) -> dict[str, Any]:
    """`source_group` is what rows are resampled by; each manual page, article or file stands for itself here."""
    return {"id": row.id, "family": row.family, "source_group": row.id, "label": None, "tokens": row.tokens, "nll": row.nll}
