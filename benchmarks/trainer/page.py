"""docs/training.md: text by hand, tables by the benchmarks, each between two marks of its own."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def write_part(page: Path, name: str, text: str) -> None:
    """Put a table where the page wants it."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    whole = page.read_text(encoding="utf-8")
    before, rest = whole.split(begin)
    _, after = rest.split(end)
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
