"""Drawings of the report as inline SVG: losses, memory, the campaign's time line, perplexity by language.

Drawn once, right in light and dark and on paper: colours leave matplotlib as marks that become CSS variables of the page. A series is told
by its dash, its marker and a name at its end, so that colour is never the only signal. Same facts, same bytes.
"""

from __future__ import annotations

import html
import io
import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fleetd.plan_units import show_duration
from fleetd.screens.report_runs import moment
from policies.facts import GIB, MIB

WIDTH_INCHES = 9.6
TEXT_POINTS = 8.5
GAP_SECONDS = 60.0
"""Looks further apart than this are not joined by a line: nobody looked in between."""
AXIS_STRETCH_MAX = 3.0
"""A deadline further ahead than this many times what happened is named at the edge instead of drawn to scale."""

INK, MUTED, LINE, PAPER = "#fe1001", "#fe1002", "#fe1003", "#fe1004"
SERIES = tuple(f"#fe000{number}" for number in range(1, 7))
DASHES: tuple[Any, ...] = ("solid", (0, (5, 1.6)), (0, (1.6, 1.2)), (0, (7, 1.6, 1.6, 1.6)), (0, (3, 3)), (0, (9, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", PAPER: "--paper"}
_VARIABLES |= {mark: f"--series-{number}" for number, mark in enumerate(SERIES, 1)}
_DRAWING = threading.Lock()  # matplotlib's settings are global, and the coordinator writes reports on worker threads


def style_of(index: int) -> dict[str, Any]:
    """Colour, dash and marker of the candidate at that place; all three repeat only together after six."""
    place = index % len(SERIES)
    return {"color": SERIES[place], "dash": DASHES[place], "marker": MARKERS[place]}


def loss_curves(runs: Sequence[dict[str, Any]], chosen: dict[str, Any] | None) -> str | None:
    """Smoothed training loss as lines, validation as markers, the chosen checkpoint ringed. None when nothing was logged."""
    drawn = [(index, run) for index, run in enumerate(runs) if run["smoothed"] or run["validations"]]
    if not drawn:
        return None
    with _DRAWING:
        figure, axes = _figure(height=3.7)
        ends: list[tuple[float, str, str]] = []
        for index, run in drawn:
            style = style_of(index)
            steps, losses = [each["step"] for each in run["smoothed"]], [each["loss"] for each in run["smoothed"]]
            axes.plot(steps, losses, color=style["color"], linestyle=style["dash"], linewidth=1.5)
            scored = run["validations"]
            axes.plot(
                [each["step"] for each in scored], [each["value"] for each in scored], linestyle="none", marker=style["marker"], markersize=6,
                markerfacecolor=PAPER, markeredgecolor=style["color"], markeredgewidth=1.5,
            )
            ends.append((losses[-1] if losses else scored[-1]["value"], run["candidate"], style["color"]))
            if chosen and chosen.get("run_id") == run["run_id"]:
                _ring(axes, chosen, style["color"])
        axes.set_xlabel("step")
        axes.set_ylabel("nats per token")
        last = max((each["step"] for _, run in drawn for each in (*run["smoothed"], *run["validations"])), default=1)
        axes.set_xlim(-0.015 * last, last * 1.015)
        axes.margins(y=0.11)
        _name_ends(axes, ends)
        described = "Training loss (lines, smoothed) and validation (markers) by step: " + ", ".join(run["candidate"] for _, run in drawn)
        return _svg(figure, "loss", described)


def _ring(axes: Any, chosen: dict[str, Any], colour: str) -> None:
    step, value = chosen.get("step"), chosen.get("value")
    if not isinstance(step, int) or not isinstance(value, float):
        return
    axes.plot([step], [value], marker="o", markersize=14, markerfacecolor="none", markeredgecolor=colour, markeredgewidth=1.6)
    axes.annotate("chosen", (step, value), xytext=(-14, -22), textcoords="offset points", ha="right", color=INK, weight="bold",
                  arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.8, "shrinkB": 8})


def _name_ends(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Each name beside the end of its line, moved apart where they would lie on each other."""
    low, high = axes.get_ylim()
    heights = spread([value for value, _, _ in ends], gap=(high - low) * 0.062)
    for (_, name, colour), height in zip(ends, heights, strict=True):
        axes.annotate(name, (1.0, height), xycoords=("axes fraction", "data"), xytext=(7, 0), textcoords="offset points", va="center",
                      color=colour, weight="bold", annotation_clip=False)


def spread(values: Sequence[float], gap: float) -> list[float]:
    """The values, moved apart as little as needed so that none is nearer to another than `gap`, in unchanged order."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    moved = [values[index] for index in order]
    for _ in range(100):
        close = [index for index in range(len(moved) - 1) if moved[index + 1] - moved[index] < gap * 0.999]
        for index in close:
            push = (gap - (moved[index + 1] - moved[index])) / 2
            moved[index], moved[index + 1] = moved[index] - push, moved[index + 1] + push
        if not close:
            break
    found = [0.0] * len(values)
    for place, index in enumerate(order):
        found[index] = moved[place]
    return found


def memory_curves(runs: Sequence[dict[str, Any]], launched_at: datetime | None) -> str | None:
    """Memory of each run over time, its cap as a line, one small panel a run. None when nothing was measured."""
    drawn = [(index, run) for index, run in enumerate(runs) if any(value is not None for value in run["trace"]["host_bytes"])]
    start = launched_at or min((at for _, run in drawn for at in _moments(run)), default=None)
    if not drawn or start is None:
        return None
    columns = min(3, len(drawn))
    rows = math.ceil(len(drawn) / columns)
    with _DRAWING:
        figure, panels = _figure(height=0.5 + 1.85 * rows, rows=rows, columns=columns)
        seen = [at for _, run in drawn for at in _moments(run)]
        clock = time_axis(start, max(seen))
        span = clock.place(max(seen))
        for place, axes in enumerate(panels if isinstance(panels, list) else [panels]):
            if place < len(drawn):
                index, run = drawn[place]
                _memory_panel(axes, run, clock, style_of(index))
                axes.set_xlim(0, span * 1.02)
                axes.set_xlabel(clock.unit if place >= len(drawn) - columns else "")
            else:
                axes.set_visible(False)
        return _svg(figure, "memory", "Memory over time against the cap: " + ", ".join(run["candidate"] for _, run in drawn))


def _memory_panel(axes: Any, run: dict[str, Any], clock: TimeAxis, style: dict[str, Any]) -> None:
    cap = run.get("host_cap_bytes")
    scale, unit = (GIB, "GiB") if max([cap or 0, *(value or 0 for value in run["trace"]["host_bytes"])]) >= GIB else (MIB, "MiB")
    places, used = _broken(clock, _moments(run), [None if value is None else value / scale for value in run["trace"]["host_bytes"]])
    axes.fill_between(places, used, color=style["color"], alpha=0.16, linewidth=0)
    is_lone = sum(not math.isnan(value) for value in used) == 1
    axes.plot(places, used, color=style["color"], linewidth=1.5, marker=style["marker"] if is_lone else None, markersize=5)
    top = max((value for value in used if not math.isnan(value)), default=0.0)
    if cap:
        axes.axhline(cap / scale, color=INK, linewidth=1.0, linestyle=(0, (4, 2)))
        axes.annotate(f"cap {_trimmed(cap / scale)} {unit}", (1.0, cap / scale), xycoords=("axes fraction", "data"), xytext=(0, 3),
                      textcoords="offset points", ha="right", color=INK)
        top = max(top, cap / scale)
    axes.set_ylim(0, top * 1.22 or 1.0)
    axes.set_title(run["candidate"], loc="left", color=style["color"], weight="bold", fontsize=TEXT_POINTS + 0.5)
    axes.set_title(unit, loc="right", color=MUTED, fontsize=TEXT_POINTS)


def _broken(clock: TimeAxis, moments: Sequence[datetime], values: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """The curve with a gap wherever nobody looked for a while, or saw nothing."""
    places: list[float] = []
    found: list[float] = []
    for index, (at, value) in enumerate(zip(moments, values, strict=True)):
        if index and (at - moments[index - 1]).total_seconds() > GAP_SECONDS:
            places.append(clock.place(at))
            found.append(math.nan)
        places.append(clock.place(at))
        found.append(math.nan if value is None else value)
    return places, found


def time_line(runs: Sequence[dict[str, Any]], marks: Sequence[tuple[str, datetime]], launched_at: datetime | None) -> str | None:
    """When each run did what, and the moments of the campaign as lines across. None when no run was ever looked at."""
    drawn = [(index, run) for index, run in enumerate(runs) if run["trace"]["at"]]
    if not drawn or launched_at is None:
        return None
    happened_at = max(at for _, run in drawn for at in _moments(run))
    edge = launched_at + (happened_at - launched_at) * AXIS_STRETCH_MAX
    clock = time_axis(launched_at, max([happened_at, *(at for _, at in marks if at <= edge)]))
    inside = [(name, clock.place(at)) for name, at in marks if at <= edge]
    beyond = [f"{name} after {show_duration((at - launched_at).total_seconds())} →" for name, at in marks if at > edge]
    span = max([clock.place(happened_at), *(place for _, place in inside)]) * 1.04
    with _DRAWING:
        figure, axes = _figure(height=1.05 + 0.34 * len(drawn))
        for place, (index, run) in enumerate(drawn):
            _bars(axes, run, clock, place, style_of(index)["color"])
        axes.set_yticks(range(len(drawn)), [run["candidate"] for _, run in drawn])
        axes.set_ylim(len(drawn) - 0.4, -0.6)
        axes.set_xlim(0, span)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("   ·   ".join([f"{clock.unit} since launch", *beyond]))
        _name_marks(axes, inside, span)
        return _svg(figure, "time", "What each run did over time: " + ", ".join(run["candidate"] for _, run in drawn))


def _bars(axes: Any, run: dict[str, Any], clock: TimeAxis, place: int, colour: str) -> None:
    """One row of bars: full while running, light while starting or stopping, hatched while waiting to try again, a thin line at rest."""
    for state, left, right in stretches([clock.place(each) for each in _moments(run)], run["trace"]["state"]):
        width = right - left
        if state in ("running", "stopping", "starting"):
            axes.barh(place, width, left=left, height=0.5, color=colour, alpha=1.0 if state == "running" else 0.45, linewidth=0)
        elif state in ("backoff", "held", "stuck", "lost"):
            axes.barh(place, width, left=left, height=0.5, facecolor="none", edgecolor=colour, hatch="////", linewidth=0.6)
        elif state == "stopped":
            axes.plot([left, left + width], [place, place], color=colour, linewidth=1.2, linestyle=(0, (1, 2)))


def stretches(at: Sequence[float], states: Sequence[str]) -> list[tuple[str, float, float]]:
    """(state, from, to), neighbours of one state joined. A state lasts until the next look."""
    found: list[tuple[str, float, float]] = []
    for index in range(len(at) - 1):
        if found and found[-1][0] == states[index]:
            found[-1] = (states[index], found[-1][1], at[index + 1])
        else:
            found.append((states[index], at[index], at[index + 1]))
    return found


def joined(marks: Sequence[tuple[str, float]], nearness: float) -> list[tuple[str, float]]:
    """Marks in order of time; those nearer than that become one, with both names."""
    found: list[tuple[str, float]] = []
    for name, place in sorted(marks, key=lambda mark: mark[1]):
        if found and place - found[-1][1] < nearness:
            found[-1] = (f"{found[-1][0]}, {name}", found[-1][1])
        else:
            found.append((name, place))
    return found


def _name_marks(axes: Any, marks: Sequence[tuple[str, float]], span: float) -> None:
    """Lines across for freeze, opening, cutoff and deadline, named above; names that would meet go one line higher."""
    level_ends: list[float] = []
    for name, place in joined(marks, span * 0.004):
        axes.axvline(place, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
        width = len(name) * 0.0102 * span
        left = min(max(place - width / 2, 0.0), span - width)
        level = next((index for index, end in enumerate(level_ends) if left > end), len(level_ends))
        level_ends[level:level + 1] = [left + width * 1.12]
        axes.annotate(name, (left + width / 2, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4 + 11 * level), textcoords="offset points",
                      ha="center", color=INK, annotation_clip=False)


def perplexity_chart(families: dict[str, dict[str, float]], split: str) -> str | None:
    """Per language on a logarithmic axis: base, the unigram model, and the selected model. None without figures."""
    names = [name for name in sorted(families) if any(value and value > 0 for value in families[name].values())]
    if not names:
        return None
    with _DRAWING:
        figure, axes = _figure(height=0.85 + 0.52 * len(names))
        axes.set_xscale("log")
        for place, name in enumerate(names):
            values = {who: value for who, value in families[name].items() if value and value > 0}
            axes.plot([min(values.values()), max(values.values())], [place, place], color=LINE, linewidth=2.5, zorder=1, solid_capstyle="round")
            for who, value in values.items():
                _perplexity_point(axes, who, value, place)
        axes.set_yticks(range(len(names)), names)
        axes.set_ylim(len(names) - 0.4, -0.65)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        every = [value for name in names for value in families[name].values() if value and value > 0]
        axes.set_xlim(min(every) / 1.5, max(every) * 1.5)
        axes.set_xlabel("perplexity, logarithmic: further left is better")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        return _svg(figure, f"perplexity-{split}", f"Perplexity on {split} by language: selected, unigram and base")


def _perplexity_point(axes: Any, who: str, value: float, place: int) -> None:
    looks = {
        "selected": {"marker": "o", "markersize": 8, "markerfacecolor": SERIES[0], "markeredgecolor": SERIES[0]},
        "unigram": {"marker": "|", "markersize": 13, "markeredgecolor": INK, "markeredgewidth": 2.0},
        "base": {"marker": "o", "markersize": 8, "markerfacecolor": PAPER, "markeredgecolor": MUTED, "markeredgewidth": 1.5},
    }
    if who in looks:
        axes.plot([value], [place], linestyle="none", zorder=3, **looks[who])
        text = f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
        above = who == "selected"
        axes.annotate(text, (value, place), xytext=(0, 8 if above else -9), textcoords="offset points", ha="center", va="bottom" if above else "top",
                      color=INK if above else MUTED, weight="bold" if above else "normal", fontsize=TEXT_POINTS - 0.5)


def _moments(run: dict[str, Any]) -> list[datetime]:
    found = [moment(text) for text in run["trace"]["at"]]
    return [at for at in found if at is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """Time since `start` in a unit that suits what is shown."""

    start: datetime
    unit: str
    unit_seconds: float

    def place(self, at: datetime) -> float:
        return (at - self.start).total_seconds() / self.unit_seconds


def time_axis(start: datetime, end: datetime) -> TimeAxis:
    seconds = (end - start).total_seconds()
    unit, unit_seconds = next(((name, size) for name, size, most in _TIME_UNITS if seconds <= most), ("days", 86400.0))
    return TimeAxis(start=start, unit=unit, unit_seconds=unit_seconds)


_TIME_UNITS = (("seconds", 1.0, 180.0), ("minutes", 60.0, 3 * 3600.0), ("hours", 3600.0, 4 * 86400.0))


def _trimmed(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _figure(*, height: float, rows: int = 1, columns: int = 1) -> Any:
    """A figure and its axes (one, or a list for a grid), in the style of the page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "text.parse_math": False,
        "svg.fonttype": "none", "svg.hashsalt": "fleetd", "font.size": TEXT_POINTS, "axes.edgecolor": LINE, "axes.labelcolor": MUTED,
        "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": INK, "text.color": INK, "axes.grid": True,
        "grid.color": LINE, "grid.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
        "axes.axisbelow": True, "ytick.major.size": 0, "font.family": ["DejaVu Sans"], "hatch.linewidth": 0.8,
    }
    mpl.rcParams.update(settings)
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.subplots(rows, columns, squeeze=False)
    for each in axes.flat:
        each.patch.set_alpha(0.0)
    return figure, axes.flat[0] if rows * columns == 1 else list(axes.flat)


def _svg(figure: Any, name: str, described: str) -> str:
    """The figure as an inline SVG: no outer markup, ids of its own, colours and fonts of the page."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"font: ((?:[a-z0-9]+ )*[\d.]+px) [^;\"]*", r"font: \1 var(--sans)", text)
    for mark, variable in _VARIABLES.items():
        text = text.replace(mark, f"var({variable})")
    box = re.search(r'viewBox="([^"]+)"', text)
    assert box is not None, "matplotlib always writes a viewBox"
    head = f'<svg class="plot" role="img" viewBox="{box.group(1)}" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return f"{head}<title>{html.escape(described)}</title>{text[text.index('>') + 1:]}"
