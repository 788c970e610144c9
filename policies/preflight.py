"""Whether a host is fit for a campaign, judged from its survey: what would end a night badly is said before it begins."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

from policies.surveys import Finding, HostSurvey, PackageSurvey, ProgramSurvey, PythonSurvey

SKEW_SECONDS_TOLERATED = 2.0
SKEW_SECONDS_MAX = 60.0
"""Beyond this, deadlines and the order of records would no longer mean the same on both machines."""
PYTHON_OLDEST = (3, 10)
DAMAGED_SHOWN_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a plan asks of one host."""

    host: str
    transport: str
    skew_seconds: float | None
    """The host's clock minus the coordinator's, half the round trip taken off. None on the coordinator's own machine."""
    skew_uncertainty_seconds: float = 0.0
    uses_accelerator: bool = False
    asker: str | None = None
    """The coordinator that asks; empty where it has no id yet. None: the host has just obeyed it, or nobody can say who asks."""


def findings(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    """Everything to be said of one host, refusals first."""
    rules = (_owner, _root, _clock, _sessions, _reboots, _accelerators)
    found = [finding for rule in rules for finding in rule(asked, survey)]
    return tuple(sorted(found, key=lambda each: not each.refuses))


def _owner(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    """Whether its agent would obey the one who asks: what a launch would run into."""
    if survey.owner_fault is not None:
        fix = f"look at {survey.root}/owner.json; once you know that no other coordinator uses this root, remove it"
        return (_refuse(asked.host, "the record of this host's owner can't be read", survey.owner_fault, fix),)
    if asked.asker is None or survey.owner in (None, asked.asker):
        return ()
    what = f"{survey.root} obeys {survey.owner}; this coordinator is {asked.asker or 'a new one'}"
    fix = f"fleetd takeover {asked.host} --plan PLAN   (once you know that the other one is gone for good), or give the plan another root there"
    return (_refuse(asked.host, "this host belongs to another coordinator", what, fix),)


def same_machine(surveys: dict[str, HostSurvey], capacities: dict[str, int | None]) -> tuple[Finding, ...]:
    """Hosts of a plan that are one machine under several names: refused where its memory would be handed out twice."""
    machines: dict[tuple[str, str], list[str]] = {}
    for name, survey in surveys.items():
        # A cloned disk has its machine id twice; the same boot as well is the same machine.
        machines.setdefault((survey.machine, survey.boot_id), []).append(name)
    found = []
    for names in machines.values():
        survey = surveys[names[0]]
        handed_out = sum(capacities.get(name) or survey.memory_total_bytes for name in names)
        what = f"all are {survey.hostname}, boot {survey.boot_id[:8]}, with {_gib(survey.memory_total_bytes)}; the plan hands out {_gib(handed_out)}"
        title, fix = f"{' and '.join(names)} are one machine", "keep one of the names, or give each a capacity so that they fit together"
        if len(names) > 1:
            found.append((_refuse if handed_out > survey.memory_total_bytes else _warn)(names[-1], title, what, fix))
    return tuple(found)


def python_findings(host: str, key: str, survey: PythonSurvey, *, repair: str | None = None) -> tuple[Finding, ...]:
    """Whether an interpreter can do what the plan's key `key` (python, agent_python) is for. `repair`: how changed files are mended, where
    not by pip."""
    fix = f"name another interpreter as {key} of host {host}"
    if survey.fault is not None:
        return (_refuse(host, f"{key} can't be used", f"{survey.program}: {survey.fault}", fix),)
    version = tuple(int(part) for part in survey.version.split(".")[:2])
    if version < PYTHON_OLDEST:
        what = f"{survey.program} is Python {survey.version}, {PYTHON_OLDEST[0]}.{PYTHON_OLDEST[1]} or newer is needed"
        return (_refuse(host, f"{key} can't be used", what, fix),)
    found = []
    if survey.missing:
        what = f"{survey.program} has no {', '.join(survey.missing)}"
        found.append(_refuse(host, f"{key} lacks packages", what, f"{survey.program} -m pip install {' '.join(survey.missing)}"))
    damaged = {name: package for name, package in survey.packages.items() if package.damaged_count}
    if damaged:
        shown = "; ".join(_damage(name, package) for name, package in list(damaged.items())[:DAMAGED_SHOWN_MAX])
        more = f"; and {len(damaged) - DAMAGED_SHOWN_MAX} more packages" if len(damaged) > DAMAGED_SHOWN_MAX else ""
        asked = " ".join(f"{name}=={package.version}" for name, package in damaged.items())
        fix = repair or f"{survey.program} -m pip install --force-reinstall --no-deps {asked}"
        found.append(_refuse(host, "installed files are not what was installed", f"{shown}{more}", fix))
    return tuple(found)


def source_findings(host: str, survey: PythonSurvey) -> tuple[Finding, ...]:
    """Whether an environment can be built from this interpreter. What it lacks is of the standard library: a distribution has split it off."""
    found = python_findings(host, "environment.python", replace(survey, missing=(), packages={}))
    if survey.missing and not found:
        series = ".".join(survey.version.split(".")[:2])
        what, fix = f"{survey.program} has no {', '.join(survey.missing)}", f"sudo apt-get install python{series}-venv"
        return (_refuse(host, "environment.python lacks modules", what, fix),)
    return found


def program_findings(host: str, programs: tuple[ProgramSurvey, ...]) -> tuple[Finding, ...]:
    """Commands of candidates that could not be run on this host."""
    return tuple(
        _refuse(host, f"the command of {each.candidate} can't be run", each.fault, each.fix) for each in programs if each.fault is not None
    )


def _damage(name: str, package: PackageSurvey) -> str:
    more = f" and {package.damaged_count - DAMAGED_SHOWN_MAX} more" if package.damaged_count > DAMAGED_SHOWN_MAX else ""
    return f"{name} {package.version}: {', '.join(package.damaged[:DAMAGED_SHOWN_MAX])}{more}"


def _refuse(host: str, title: str, what: str, fix: str) -> Finding:
    return Finding(host=host, refuses=True, title=title, what=what, fix=fix)


def _warn(host: str, title: str, what: str, fix: str) -> Finding:
    return Finding(host=host, refuses=False, title=title, what=what, fix=fix)


def _root(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    host, found = asked.host, []
    if survey.root_fault is not None:
        fix = f"make {survey.root} writable for {survey.traps.user}, or name another root"
        found.append(_refuse(host, "the host's root can't be used", survey.root_fault, fix))
    if survey.cleaner is not None:
        found.append(_warn(host, "old files are removed where the root lies", survey.cleaner, "name a root elsewhere, such as below the user's home"))
    return tuple(found)


def _clock(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    host, found = asked.host, []
    if asked.skew_seconds is not None:
        certain = max(0.0, abs(asked.skew_seconds) - asked.skew_uncertainty_seconds)
        side = "ahead of" if asked.skew_seconds > 0 else "behind"
        what = f"its clock is {timedelta(seconds=round(abs(asked.skew_seconds)))} {side} the coordinator's"
        fix = f"on {host}: timedatectl set-ntp true, then wait until `timedatectl` says synchronized"
        if certain > SKEW_SECONDS_MAX:
            found.append(_refuse(host, "the clocks disagree", what, fix))
        elif certain > SKEW_SECONDS_TOLERATED:
            found.append(_warn(host, "the clocks disagree", what, fix))
    if survey.clock_synchronised is False:
        what, fix = "the kernel says that nothing disciplines it", f"on {host}: timedatectl set-ntp true"
        found.append(_warn(host, "the clock is not synchronised", what, fix))
    return tuple(found)


def _sessions(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    """An SSH cut ends the last session: what logind then does to a trainer that outlives it."""
    traps = survey.traps
    if asked.transport == "local" or traps.is_lingering or traps.is_lingering is None:
        return ()
    fix = f"on {asked.host}: loginctl enable-linger {traps.user}"
    found = []
    if traps.kills_processes:
        found.append(_refuse(
            asked.host, "a cut link would kill the trainers", f"KillUserProcesses is on and {traps.user} does not linger", fix,
        ))
    if traps.removes_ipc and not traps.is_system_user:
        what = f"RemoveIPC is on and {traps.user} does not linger: the trainers' shared memory in /dev/shm goes with the last session"
        found.append(_refuse(asked.host, "a cut link would break the trainers", what, fix))
    return tuple(found)


def _reboots(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    if survey.reboot_pending is None and not survey.reboots_by_itself:
        return ()
    packages = f" for {', '.join(survey.reboot_pending[:5])}" if survey.reboot_pending else ""
    if survey.reboot_pending is not None and survey.reboots_by_itself:
        what = f"a reboot is pending{packages}, and unattended-upgrades may do it by itself"
        return (_warn(asked.host, "the host is about to reboot", what, "reboot it now, or set Unattended-Upgrade::Automatic-Reboot \"false\""),)
    if survey.reboot_pending is not None:
        return (_warn(asked.host, "a reboot is pending", f"asked for{packages or ' by the system'}", "reboot it before a long campaign"),)
    what = "unattended-upgrades may reboot this host by itself"
    return (_warn(asked.host, "the host may reboot by itself", what, "set Unattended-Upgrade::Automatic-Reboot \"false\""),)


def _accelerators(asked: Asked, survey: HostSurvey) -> tuple[Finding, ...]:
    strangers = [user for user in survey.accelerator_users if not user.is_ours]
    if not strangers or not asked.uses_accelerator:
        return ()
    shown = ", ".join(
        f"{user.name} (pid {user.pid}, {user.user}, {'memory not told' if user.bytes is None else _gib(user.bytes)})" for user in strangers
    )
    return (_warn(asked.host, "others use the accelerator", shown, "end them, or name them under displace in the plan"),)


def _gib(amount: int) -> str:
    return f"{amount / 1024**3:.1f} GiB"
