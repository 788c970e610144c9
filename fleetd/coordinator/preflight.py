"""Preflight: every host of a plan is surveyed by its own tools, judged, and compared with the others, before anything is staged.

    release in place ─► `survey` on the host (fleetd/host/survey.py) ─► policies.preflight, policies.parity ─► findings, preflight.json
                    └─► its environment, as far as it can be said before it is built (environments.py)
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from fleetd import clock
from fleetd.campaign import HostPlan, Plan
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.environments import Prepared, source_python
from fleetd.coordinator.needs import BUILD_MODULES, offer_of, programs_of, trainer_modules, wanted_by
from fleetd.coordinator.specs import agent_python, trainer_python
from fleetd.environments import environment_python
from fleetd.model import CapPart
from fleetd.wire import WireError, decode, dumps, encode, loads
from policies.displacement import workload_findings
from policies.errors import RequestRefused
from policies.parity import parity_findings
from policies.preflight import Asked, findings, program_findings, python_findings, same_machine, source_findings
from policies.room import Wanted, room_findings
from policies.surveys import BuiltEnvironment, EnvironmentSurvey, Finding, HostSurvey, ProgramSurvey, PythonSurvey
from policies.workloads import WorkloadSight

LOOK_SECONDS_MAX = 60.0
READ_SECONDS_MAX = 240.0
"""Every installed file of an environment is read: several gigabytes where torch comes with CUDA."""
HOSTS_AT_ONCE_MAX = 8
WORDS_MAX = 300
OTHERS_SHOWN_MAX = 4

Prepare = Callable[[HostPlan, Courier, str], Prepared]
"""What a host's environment will be, from the host, its courier and the release that lies there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLook:
    """What one host showed, and by how much its clock differed while it was asked."""

    survey: HostSurvey
    python: PythonSurvey | None
    """The trainer's interpreter, where a candidate of ours may run there. That of an environment also where only commands do."""
    environment: EnvironmentSurvey | None = None
    """What the plan has built there, or is to have."""
    source: PythonSurvey | None = None
    """The Python that an environment would be built from, where only that was looked at: by a check, which fetches no wheels."""
    built: tuple[BuiltEnvironment, ...] = ()
    """The environments of that lock which are there already, where a check looked."""
    programs: tuple[ProgramSurvey, ...] = ()
    """The commands of candidates that may run there."""
    caps: dict[str, CapPart] = field(default_factory=dict)
    """By what a cap could be held there, by mechanism."""
    displace: tuple[WorkloadSight, ...] = ()
    """What runs of the work that the plan wants out of the way, in the order of the plan."""
    skew_seconds: float | None
    skew_uncertainty_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What was seen and what it means: `preflight.json` of the campaign."""

    schema: int = 1
    at: datetime
    parity: str
    looks: dict[str, HostLook]
    findings: tuple[Finding, ...]
    silent: dict[str, dict[str, str]] = field(default_factory=dict)
    """Hosts that could not be looked at, and why, as `ExplainedError.to_json` gives it."""

    @property
    def refusals(self) -> tuple[Finding, ...]:
        return tuple(each for each in self.findings if each.refuses)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(f"{each.host}: {each.title}: {each.what}" for each in self.findings if not each.refuses)


def preflight(
    plan: Plan, couriers: dict[str, Courier], *, own_python: str, stage: Callable[[Courier], str], prepare: Prepare | None = None,
) -> Preflight:
    """Look at all hosts that have a courier, side by side. HostUnreachable, or what a host explains of itself."""
    hosts = [host for host in plan.hosts if host.name in couriers]

    def look(host: HostPlan) -> HostLook:
        courier = couriers[host.name]
        release = stage(courier)
        folder, is_prepared = courier.tree_path(TreeKind.RELEASES, release), host.environment is not None and _is_used(plan, host)
        prepared = prepare(host, courier, release) if prepare is not None and is_prepared else None
        return look_at(plan, host, courier, folder, own_python, prepared)

    with ThreadPoolExecutor(HOSTS_AT_ONCE_MAX, thread_name_prefix="preflight") as workers:
        looks = dict(zip((host.name for host in hosts), workers.map(look, hosts), strict=True))
    return Preflight(at=clock.read().now, parity=parity_of(plan), looks=looks, findings=judge(plan, looks))


def look_at(plan: Plan, host: HostPlan, courier: Courier, release: str, own_python: str, prepared: Prepared | None = None) -> HostLook:
    """One host by its own tools, from the folder of a release there: itself first and alone, since its clock is compared on the way.

    A built environment is read as any interpreter; one that is to be built is taken for what its lock and wheels will make of it."""
    before = clock.read()
    seen = _ask(host, courier, release, {}, LOOK_SECONDS_MAX)
    after = clock.read()
    survey = decode(HostSurvey, seen["host"], "survey")
    half_seconds = (after.boottime_seconds - before.boottime_seconds) / 2
    skew_seconds = (survey.now - before.now).total_seconds() - half_seconds
    program, source = _interpreter(plan, host, own_python, prepared), None
    if host.environment is not None and prepared is None and _is_used(plan, host):
        source = source_python(host, host.environment)
    asked: dict[str, tuple[str, ...]] = {program: trainer_modules(plan) if _trains_ours(plan, host) else ()} if program is not None else {}
    asked |= {source: BUILD_MODULES} if source is not None else {}
    question = {
        "host": False, "displace": host.displace, "programs": programs_of(plan, host), "read_files": source is None and parity_of(plan) != "off",
        "pythons": asked, "locks": [host.environment.lock_sha256] if host.environment is not None and source is not None else [],
    }
    more = _ask(host, courier, release, question, READ_SECONDS_MAX) if asked or host.displace or question["programs"] else {}
    pythons = {name: decode(PythonSurvey, each, "survey") for name, each in more.get("pythons", {}).items()}
    python = pythons[program] if program is not None else None
    return HostLook(
        survey=survey, python=python or (prepared.expected(host.root) if prepared is not None else None),
        environment=prepared.survey() if prepared is not None else None, source=pythons[source] if source is not None else None,
        built=tuple(decode(BuiltEnvironment, each, "environments") for each in more.get("environments", ())),
        displace=tuple(decode(WorkloadSight, each, "displace") for each in more.get("displace", ())),
        programs=tuple(decode(ProgramSurvey, each, "programs") for each in more.get("programs", ())),
        caps={name: decode(CapPart, part, name) for name, part in seen["caps"].items()},
        skew_seconds=None if host.is_local else skew_seconds, skew_uncertainty_seconds=half_seconds,
    )


def _interpreter(plan: Plan, host: HostPlan, own_python: str, prepared: Prepared | None) -> str | None:
    """The Python of this host that can be read now, where the plan uses one."""
    if host.environment is None:
        return trainer_python(host, own_python) if _trains_ours(plan, host) else None
    return environment_python(host.root, prepared.name) if prepared is not None and prepared.mark is not None else None


def judge(plan: Plan, looks: dict[str, HostLook], asker: str | None = None) -> tuple[Finding, ...]:
    """Everything to be said of the hosts, refusals first. `asker` as in `policies.preflight.Asked`."""
    surveys = {name: look.survey for name, look in looks.items()}
    pythons = {name: look.python for name, look in looks.items() if look.python is not None}
    found: list[Finding] = list(same_machine(surveys, {host.name: host.capacity_bytes for host in plan.hosts}))
    for name, look in looks.items():
        host = _host(plan, name)
        found += findings(Asked(
            host=name, transport=host.transport, skew_seconds=look.skew_seconds, skew_uncertainty_seconds=look.skew_uncertainty_seconds,
            uses_accelerator=bool(look.survey.accelerators), asker=asker,
        ), look.survey)
        if look.python is not None:
            found += python_findings(name, "python", look.python, repair=None if look.environment is None else _repair(host, look.environment))
        if look.source is not None:
            found += source_findings(name, look.source)
        found += program_findings(name, look.programs)
        for workload, sight in zip(host.displace, look.displace, strict=True):
            found += workload_findings(name, workload, sight)
    offers = tuple(
        offer_of(plan, _host(plan, name), look.survey, look.displace, 0 if look.environment is None else look.environment.disk_bytes)
        for name, look in looks.items()
    )
    found += room_findings(wanted_by(plan) if len(looks) == len(plan.hosts) else _pinned(plan, looks), offers)
    if parity_of(plan) != "off":
        found += parity_findings(pythons, surveys, required=parity_of(plan) == "require")
    return tuple(sorted(found, key=lambda each: not each.refuses))


def _pinned(plan: Plan, looks: dict[str, HostLook]) -> tuple[Wanted, ...]:
    """Where a host was not seen, only what can't go there anyway is judged."""
    return tuple(each for each in wanted_by(plan) if each.host in looks)


def displaced_in(plan: Plan, seen: Preflight) -> list[dict[str, Any]]:
    """What runs and is to make room, as history keeps it: `host`, `workload`, `found`."""
    return [
        {"host": host.name, "workload": encode(workload), "found": encode(sight)}
        for host in plan.hosts if host.name in seen.looks
        for workload, sight in zip(host.displace, seen.looks[host.name].displace, strict=True) if sight.processes
    ]


def refusal(found: tuple[Finding, ...]) -> RequestRefused:
    """One error for all refusals: the first in full, the others by name."""
    first, others = found[0], found[1:]
    more = "".join(f"; {each.host}: {each.title}: {each.what}" for each in others[:OTHERS_SHOWN_MAX])
    if len(others) > OTHERS_SHOWN_MAX:
        more += f"; {len(others) - OTHERS_SHOWN_MAX} more in preflight.json of the campaign"
    title = first.title if not others else f"{first.title}, and {len(others)} more"
    return RequestRefused(title, where=f"host {first.host}", what=f"{first.what}{more}", fix=first.fix)


def parity_of(plan: Plan) -> str:
    """`off`, `report` or `require`. Where a plan says nothing, several hosts are compared and the differences told."""
    return plan.parity or ("report" if len(plan.hosts) > 1 else "off")


def _repair(host: HostPlan, environment: EnvironmentSurvey) -> str:
    return f"make sure that no run uses it, then on {host.name}: rm -r {host.root}/environments/{environment.name}; launch again"


def _host(plan: Plan, name: str) -> HostPlan:
    return next(host for host in plan.hosts if host.name == name)


def _trains_ours(plan: Plan, host: HostPlan) -> bool:
    return any(candidate.task is not None and candidate.host in ("any", host.name) for candidate in plan.candidates)


def _is_used(plan: Plan, host: HostPlan) -> bool:
    return any(candidate.host in ("any", host.name) for candidate in plan.candidates)


def _ask(host: HostPlan, courier: Courier, release: str, question: dict[str, Any], seconds_max: float) -> dict[str, Any]:
    """The answer of the host's `survey`. RequestRefused in its own last words when it gives none."""
    argv = (agent_python(host, sys.executable), "-I", f"{release}/fleetd/host/__main__.py", "survey", host.root, dumps(question))
    try:
        done = courier.run_program(argv, seconds_max)
        answer = loads(done.stdout)
    except OSError as fault:
        what, fix = f"{argv[0]}: {fault}", f"set agent_python of host {host.name} to a Python 3.10 or newer, or leave it out"
        raise RequestRefused("agent_python can't be used", where=f"host {host.name}", what=what, fix=fix) from fault
    except WireError as fault:
        words = done.stderr.strip()[-WORDS_MAX:] or f"{argv[0]}: exit status {done.status}, and no answer"
        what, fix = words, f"run it there by hand: {' '.join(argv[:5])} '{{}}'"
        raise RequestRefused("the host can't be surveyed", where=f"host {host.name}", what=what, fix=fix) from fault
    assert isinstance(answer, dict), "survey prints one object"
    return answer
