"""What `fleetd check` shows: the resolved plan, where each value came from, and what it would mean if it were launched now.

Pure lines from a LoadedPlan, a moment and a look at its hosts; how that is taken and shown lives next door, in `host_checks`.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from fleetd.campaign import AfterFreeze, CandidatePlan, DataFrom, DataRole, HostPlan
from fleetd.plan import LoadedPlan
from fleetd.plan_lock import read_lock_file
from fleetd.plan_resolve import listed_files, read_index
from fleetd.plan_rules import cutoff_if_launched
from fleetd.plan_units import Seconds, SizeBytes, show_duration, show_moment, show_size, write_duration, write_size
from fleetd.screens import layout
from fleetd.screens.document import Document
from fleetd.screens.host_checks import data_rows, host_rows, shown_looked
from fleetd.screens.layout import Line, Span, Tone, line, quiet
from policies.deadlines import reserve_seconds
from policies.facts import RESERVED_SPLITS, CapGrade, format_moment

LABEL_WIDTH = 14
KEY_WIDTH_MAX = 44
SHOWN_CHARACTERS_MAX = 60
OWN_PYTHON = line("the coordinator's own Python")
HOST_PYTHON = line("the host's python3")


def render_check(loaded: LoadedPlan, now: datetime, *, width: int = 100, looked: Document | None = None) -> list[Line]:
    """The whole check of a valid plan, as lines for `layout.painted`. `looked`: what `look_at_hosts` found, None where nobody looked."""
    plan = loaded.plan
    counts = f"{_count(len(plan.candidates), 'candidate')} on {_count(len(plan.hosts), 'host')}"
    lines = layout.wrapped(line(Span(f"{loaded.path} is a valid plan", Tone.GOOD), quiet(f": campaign {plan.name}, {counts}")), width, hanging=2)
    lines += _section("if launched now", _when(loaded, now), width)
    rows = [row for host in plan.hosts for row in (*_host(loaded, host), *host_rows(looked or {}, host.name))]
    lines += _section("hosts", rows, width)
    data = [_data(loaded, role) for role in plan.data] or [("none", [line("commands read what they like")])]
    lines += _section("data", [*data, *data_rows(looked or {})], width)
    lines += _candidates(loaded, width)
    lines += _section("then", _afterwards(loaded), width)
    return lines


def check_document(loaded: LoadedPlan, now: datetime, looked: Document | None = None) -> dict[str, Any]:
    """The same as one JSON document, for `fleetd check --json`."""
    cutoff, final = _moments(loaded, now)
    return {
        "schema": 1, "path": str(loaded.path), "name": loaded.plan.name, "plan_sha256": loaded.plan.plan_sha256,
        "if_launched_now": {"at": format_moment(now), "cutoff_at": format_moment(cutoff), "final_at": format_moment(final)},
        "hosts": [
            {"name": host.name, "root": host.root, "memory": _memory(loaded, host), "environment": environment_summary(host)}
            for host in loaded.plan.hosts
        ],
        "looked": shown_looked(looked) if looked is not None else None,
        "data": [{"split": role.split.value, "path": role.path, **data_summary(role)} for role in loaded.plan.data],
        "values": {path: {"value": _plain(value), "source": str(loaded.sources[path])} for path, value in loaded.values.items()},
    }


def _section(title: str, rows: list[tuple[str, list[Line]]], width: int) -> list[Line]:
    """A heading, then a label and its parts a row; parts are joined by dots and broken to the width."""
    lines: list[Line] = [layout.EMPTY_LINE, line(Span(title, Tone.STRONG))]
    label_width = max([LABEL_WIDTH, *(layout.width_of(label) + 2 for label, _ in rows)])
    for label, parts in rows:
        packed = layout.packed(parts, width - label_width - 2, hanging=0)
        for index, each in enumerate(packed):
            lines.append((quiet("  " + (label if index == 0 else "").ljust(label_width)), *each))
    return lines


def _moments(loaded: LoadedPlan, now: datetime) -> tuple[datetime, datetime]:
    plan, terms = loaded.plan, loaded.plan.reserve
    reserve = reserve_seconds(
        rows=0, seconds_per_row=0.0, minimum_seconds=terms.minimum_seconds, factor=terms.factor, margin_seconds=terms.margin_seconds,
    )
    deadline = plan.deadline_at if plan.deadline_at is not None else plan.deadline_seconds
    assert deadline is not None, "a valid plan has a deadline"
    return cutoff_if_launched(deadline, reserve, now)


def _when(loaded: LoadedPlan, now: datetime) -> list[tuple[str, list[Line]]]:
    cutoff, final = _moments(loaded, now)
    terms = loaded.plan.reserve
    rule = f"max({show_duration(terms.minimum_seconds)}, {terms.factor:g} × measured judging time + {show_duration(terms.margin_seconds)})"
    return [
        ("train until", [line(show_moment(cutoff)), line(f"{show_duration((cutoff - now).total_seconds())} from now")]),
        ("deadline", [line(show_moment(final)), line(f"{show_duration((final - now).total_seconds())} from now"), _origin(loaded, "deadline")]),
        ("reserve", [line(show_duration((final - cutoff).total_seconds())), line(rule), _origin(loaded, "reserve.minimum"),
                     line(quiet("training only ever ends earlier than this, never later"))]),
    ]


def _host(loaded: LoadedPlan, host: HostPlan) -> list[tuple[str, list[Line]]]:
    prefix = f"hosts.{host.name}"
    pythons = [line(f"{key} {value}") for key, value in (("python", host.python), ("agent_python", host.agent_python)) if value]
    pythons = pythons or [OWN_PYTHON if host.is_local else HOST_PYTHON]
    if host.environment is not None:
        pythons = [line(f"agent_python {host.agent_python}")] if host.agent_python else []
    return [
        (host.name, [line(_reach(host)), line(f"root {host.root}"), _origin(loaded, f"{prefix}.root"), *pythons]),
        *([("", _environment(loaded, host))] if host.environment is not None else []),
        ("", [line(_memory(loaded, host)), _origin(loaded, f"{prefix}.capacity")]),
        *([("", [line(_neighbour(host.data_from)), _origin(loaded, f"{prefix}.data_from.host")])] if host.data_from is not None else []),
    ]


def _neighbour(data_from: DataFrom) -> str:
    """`data from spark-a over 192.168.100.10`: what comes from there needs no way through the coordinator."""
    return f"data from {data_from.host}" + (f" over {data_from.address}" if data_from.address else "")


def _environment(loaded: LoadedPlan, host: HostPlan) -> list[Line]:
    """`environment of requirements.lock: 86 packages, lock 2cf24dba5fb0`, and where its wheels come from."""
    seen = environment_summary(host)
    assert host.environment is not None and seen is not None
    name, own = Path(host.environment.lock).name, f"hosts.{host.name}.environment.lock"
    wheels = {"auto": "wheels brought from here", "registry": "wheels fetched by the host"}.get(seen["wheels"], f"wheels of {seen['wheels']}")
    return [
        line(f"environment of {name}: {_count(seen['packages'], 'package')}, lock {seen['lock_sha256'][:12]}"), line(wheels),
        *([line(f"from {host.environment.python}")] if host.environment.python else []),
        _origin(loaded, own if loaded.values.get(own) is not None else "environment.lock"),
    ]


def environment_summary(host: HostPlan) -> dict[str, Any] | None:
    """What the plan asks for on a host; `looked` says what is there. None without an environment."""
    asked = host.environment
    if asked is None:
        return None
    lock, _ = read_lock_file(Path(asked.lock))
    return {
        "lock": asked.lock, "lock_sha256": asked.lock_sha256, "packages": len({pin.name for pin in lock.pins}), "wheels": asked.wheels,
        "python": asked.python,
    }


def _reach(host: HostPlan) -> str:
    return host.transport if host.is_local else host.place.removesuffix(f":{host.root}").replace(":", " ", 1)


def _memory(loaded: LoadedPlan, host: HostPlan) -> str:
    """The arithmetic of the caps on this host, in one sentence."""
    here = [each for each in loaded.plan.candidates if each.host in (host.name, "any")]
    if not here:
        return "no candidate may run here"
    total = sum(each.memory_host_bytes for each in here)
    asked = " + ".join(f"{each.name} {show_size(each.memory_host_bytes)}" for each in here)
    asked = f"{asked} = {show_size(total)}" if len(here) > 1 else asked
    if host.capacity_bytes is None:
        return f"{asked} asked; capacity is what the host reports, {show_size(host.floor_bytes)} of it stays free"
    room = host.capacity_bytes - host.floor_bytes
    sum_text = f"{show_size(host.capacity_bytes)} − {show_size(host.floor_bytes)} floor = {show_size(room)} for runs; {asked}"
    if total <= room:
        return f"{sum_text}: {'all run at once' if len(here) > 1 else 'it fits'}"
    return f"{sum_text}: {_at_once(here, room)} of {len(here)} run at once, the others wait"


def _at_once(candidates: list[CandidatePlan], room: int) -> int:
    """How many of the first candidates, in the order of the plan, fit together."""
    count = 0
    for each in candidates:
        if each.memory_host_bytes <= room:
            room -= each.memory_host_bytes
            count += 1
    return count


def data_summary(role: DataRole) -> dict[str, int]:
    """Files and bytes of a role, and for token shards what their index says; no file is read."""
    files = listed_files(role)
    summary = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
    if role.shard_split is not None:
        shards = [each for each in read_index(Path(role.path))["shards"] if each.get("split") == role.shard_split]
        summary |= {"shards": len(shards), "documents": sum(each.get("docs", 0) for each in shards), "tokens": sum(each["tokens"] for each in shards)}
    return summary


def _data(loaded: LoadedPlan, role: DataRole) -> tuple[str, list[Line]]:
    summary = data_summary(role)
    kind = f", split {role.shard_split}" if role.shard_split else ", a Zrodlo corpus" if role.is_corpus else f", {' '.join(role.include)}"
    parts = [line(role.path + kind)]
    if "tokens" in summary:
        parts.append(line(f"{_count(summary['shards'], 'shard')}, {summary['documents']:,} documents, {summary['tokens']:,} tokens"))
    parts.append(line(f"{summary['files']} files, {show_size(summary['bytes'])}"))
    if role.tokens_per_document_max:
        parts.append(line(f"scored on the first {role.tokens_per_document_max} tokens of each document"))
    if role.split in RESERVED_SPLITS:
        parts.append(line(Span("sealed until the freeze", Tone.WARN)))
    key = f"data.{role.split.value}.{'shards' if role.shard_split else 'corpus' if role.is_corpus else 'path'}"
    return role.split.value, [*parts, _origin(loaded, key)]


def _candidates(loaded: LoadedPlan, width: int) -> list[Line]:
    """What is the same for all candidates once, then what differs, each value with its line."""
    names = [each.name for each in loaded.plan.candidates]
    keys = dict.fromkeys(path.split(".", 2)[2] for path in loaded.values if path.startswith("candidates."))
    same: list[str] = []
    differs: list[str] = []
    for key in keys:
        paths = [f"candidates.{name}.{key}" for name in names]
        values = [repr(loaded.values[path]) if path in loaded.values else None for path in paths]
        (same if len(set(values)) == 1 and len(names) > 1 else differs).append(key)
    rows = [(key, [part for name in names for part in _one_value(loaded, name, key, alone=len(names) == 1)]) for key in differs]
    lines = _section(names[0] if len(names) == 1 else "what differs", rows, width) if rows else []
    rows = [(key, _shared_value(loaded, names, key)) for key in same]
    return lines + (_section(f"the same for all {len(names)} candidates", rows, width) if rows else [])


def _shared_value(loaded: LoadedPlan, names: list[str], key: str) -> list[Line]:
    paths = [f"candidates.{name}.{key}" for name in names]
    return [line(show_value(loaded.values[paths[0]])), _origin(loaded, *paths)]


def _one_value(loaded: LoadedPlan, name: str, key: str, *, alone: bool) -> list[Line]:
    path = f"candidates.{name}.{key}"
    if path not in loaded.values:
        return []
    label = () if alone else (quiet(f"{name} "),)
    return [(*label, Span(show_value(loaded.values[path])), quiet(f"  ({loaded.sources[path]})"))]


def _afterwards(loaded: LoadedPlan) -> list[tuple[str, list[Line]]]:
    plan = loaded.plan
    splits = ", ".join(split.value for split in plan.after_freeze.evaluate) or "nothing by itself"
    settings = ", ".join(f"{key} {value}" for key, value in plan.after_freeze.settings.items())
    rule = f"by {plan.selection.criterion}, a later checkpoint only when better by {plan.selection.minimum_improvement:g}"
    judging = [line(splits), *([line(settings)] if settings else []), line(f"under a cap of {_judging_cap(plan.after_freeze)}")]
    report = "report.html and report.json" if plan.after_freeze.report else "none by itself: fleetd report"
    rows = [
        ("choose", [line(rule), _origin(loaded, "selection.criterion", "selection.minimum_improvement")]),
        ("freeze, judge", [*judging, _origin(loaded, "after_freeze.evaluate")]),
        ("report", [line(report), _origin(loaded, "after_freeze.report")]),
    ]
    rows += [("notify", [line(" ".join(each.command)), line(f"on {', '.join(each.on)}")]) for each in plan.notify]
    return rows


def _judging_cap(terms: AfterFreeze) -> str:
    """`2 GiB`, or both parts where they differ, and what is demanded of the host's."""
    host, accelerator = terms.memory_host_bytes, terms.memory_accelerator_bytes
    demand = ", enforced" if terms.memory_demand is CapGrade.ENFORCED else ""
    return f"{show_size(host)}{'' if host == accelerator else f' and {show_size(accelerator)} of the accelerator'}{demand}"


def _origin(loaded: LoadedPlan, *paths: str) -> Line:
    """`(line 7)`, `(default)`, or every place when they differ."""
    origins = dict.fromkeys(str(loaded.sources[path]) for path in paths if path in loaded.sources)
    return line(quiet(f"({', '.join(origins)})"))


def show_value(value: Any) -> str:
    """A value as a plan writes it."""
    if isinstance(value, Seconds):
        return write_duration(value)
    if isinstance(value, SizeBytes):
        return write_size(value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, list):
        return f"[{', '.join(show_value(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show_value(each)}" for key, each in value.items()) + "}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"


def _plain(value: Any) -> Any:
    return format_moment(value) if isinstance(value, datetime) else value


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
