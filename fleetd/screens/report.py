"""The report of a campaign: report.json with every figure, then report.html, one file that shows them, with nothing fetched from anywhere.

    status document + campaign directory ─ report_document ─▶ report.json ─ report.html (jinja2) + report_curves ─▶ report.html
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from fleetd.files import write_record, write_text
from fleetd.paths import CampaignPaths
from fleetd.plan_units import show_duration
from fleetd.screens import words
from fleetd.screens.report_curves import loss_curves, memory_curves, perplexity_chart, style_of, time_line
from fleetd.screens.report_document import report_document
from fleetd.screens.report_runs import moment

TEMPLATE = "report.html"


def write_report(paths: CampaignPaths, document: dict[str, Any]) -> tuple[Path, Path]:
    """Write report.json and report.html of the campaign at `paths`; (html, json). What can't be shown is said in both.

    NotFound when the status document does not hold the campaign.
    """
    found = report_document(paths, document)
    write_record(paths.report_json, found)
    write_text(paths.report_html, render_html(found))
    return paths.report_html, paths.report_json


def render_html(found: dict[str, Any]) -> str:
    """The page for a report document. All text is escaped; only our own drawings are markup."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )
    environment.filters |= {
        "perplexity": _perplexity, "nats": _nats, "ratio": _ratio, "moment": _moment, "clock": _clock, "duration": show_duration, "size": words.size,
        "count": _count, "short": _short, "share_of_cap": _share_of_cap,
    }
    return environment.get_template(TEMPLATE).render(report=found, drawings=_drawings(found), keys=_keys(found))


def _drawings(found: dict[str, Any]) -> dict[str, Markup]:
    """The SVGs by name, only those for which there are figures."""
    trained = [run for run in found["runs"] if run["kind"] == "train"]
    launched_at = moment(found["times"]["launched_at"])
    charts = {"loss": loss_curves(trained, found["selection"]), "memory": memory_curves(found["runs"], launched_at)}
    charts["time"] = time_line(found["runs"], _marks(found["times"]), launched_at)
    for result in found["results"]:
        families = {row["family"]: {who: row[who] for who in ("selected", "unigram", "base") if row[who]} for row in result["families"]}
        charts[f"{result['split']}-{result['look']}"] = perplexity_chart(families, f"{result['split']}-{result['look']}")
    return {name: Markup(svg) for name, svg in charts.items() if svg is not None}  # noqa: S704 (our own drawing; its texts were escaped)


def _marks(times: dict[str, Any]) -> list[tuple[str, datetime]]:
    named = [(mark["name"], moment(mark["at"])) for mark in times["marks"]]
    named += [("training cutoff", moment(times["cutoff_at"])), ("deadline", moment(times["deadline_at"]))]
    return [(name, at) for name, at in named if at is not None]


def _keys(found: dict[str, Any]) -> dict[str, int]:
    """The number of each run's series, for the little keys beside its name."""
    return {run["run_id"]: index % len(_SHAPES) + 1 for index, run in enumerate(found["runs"])}


_SHAPES = [style_of(index)["marker"] for index in range(6)]


def _perplexity(value: float | None) -> str:
    if value is None:
        return words.ABSENT
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _nats(value: float | None) -> str:
    return words.ABSENT if value is None else f"{value:.4f}"


def _ratio(value: float | None) -> str:
    return words.ABSENT if value is None else f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def _count(value: Any) -> str:
    return words.ABSENT if value is None else f"{value:,}"


def _share_of_cap(run: dict[str, Any]) -> str:
    if run["host_peak_bytes"] is None or not run["host_cap_bytes"]:
        return words.ABSENT
    share = 100 * run["host_peak_bytes"] / run["host_cap_bytes"]
    return f"{share:.0f} %" if share >= 1 else "under 1 %"


def _short(digest: Any) -> str:
    return str(digest)[:12] if digest else words.ABSENT


def _moment(text: Any) -> str:
    at = moment(text)
    return words.ABSENT if at is None else at.strftime("%Y-%m-%d %H:%M:%S UTC")


def _clock(text: Any) -> str:
    at = moment(text)
    return words.ABSENT if at is None else at.strftime("%H:%M:%S")
