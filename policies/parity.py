"""Whether interpreters of several hosts are the same: what a comparison of candidates across machines silently assumes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

from policies.surveys import Finding, HostSurvey, PythonSurvey

SHOWN_MAX = 12


def differences(pythons: dict[str, PythonSurvey], machines: dict[str, HostSurvey]) -> tuple[str, ...]:
    """One line for everything in which the hosts differ: interpreter, torch, CUDA, driver, then packages by name. Empty: all alike."""
    usable = {host: survey for host, survey in pythons.items() if survey.fault is None}
    found = [
        _differ("python", {host: f"{each.implementation} {each.version}" for host, each in usable.items()}),
        _differ("architecture", {host: each.architecture for host, each in usable.items()}),
        _differ("torch", {host: each.torch for host, each in usable.items() if not each.is_expected}),
        _differ("CUDA", {host: each.cuda for host, each in usable.items() if not each.is_expected}),
        _differ("driver", {host: machines[host].driver for host in usable if host in machines}),
    ]
    known = {host: each for host, each in usable.items() if each.packages or not each.is_expected}
    for name in sorted({name for each in known.values() for name in each.packages}):
        found.append(_package(name, known))
    return tuple(line for line in found if line is not None)


def parity_findings(pythons: dict[str, PythonSurvey], machines: dict[str, HostSurvey], *, required: bool) -> tuple[Finding, ...]:
    """The differences as one finding; it refuses where the plan requires parity."""
    found = differences(pythons, machines)
    if not found:
        return ()
    shown = "; ".join(found[:SHOWN_MAX]) + (f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else "")
    fix = "install the same lock on every host"
    fix += ", or set parity: report in the plan" if required else ": until then their results may differ in the last bits"
    return (Finding(host=", ".join(sorted(pythons)), refuses=required, title="the hosts differ", what=shown, fix=fix),)


def _package(name: str, pythons: dict[str, PythonSurvey]) -> str | None:
    versions = {host: each.packages[name].version if name in each.packages else None for host, each in pythons.items()}
    if (line := _differ(name, versions)) is not None:
        return line
    read = {host: each for host, each in pythons.items() if each.are_files_read}
    digests: dict[str, str | None] = {host: each.packages[name].files_sha256 for host, each in read.items()}
    return _differ(f"files of {name} {next(iter(versions.values()))}", digests, _short)


def _short(value: Hashable) -> str:
    return str(value)[:12]


def _differ(what: str, values: dict[str, str | None], show: Callable[[Hashable], str] = str) -> str | None:
    """`torch: 2.13.0 on gx10, spark-a; 2.12.1 on spark-b`, the most common first; None when all are equal."""
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    parts = []
    for value, _ in sorted(counts.items(), key=lambda each: (-each[1], str(each[0]))):
        hosts = ", ".join(sorted(host for host, each in values.items() if each == value))
        parts.append(f"{'none' if value is None else show(value)} on {hosts}")
    return f"{what}: {' / '.join(parts)}"
