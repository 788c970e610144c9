"""Environments on their way to hosts: what a host's Python is, which wheels it needs, and bringing it to have them, once.

    look at the host's Python ─► pins that hold there ─► wheelhouse (wheelhouses.py) ─► staged ─► built by the host (host/environment.py)

Preflight goes as far as the wheelhouse, so that a package without a wheel is named before anything starts; staging does the rest.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from fleetd import logs
from fleetd.campaign import EnvironmentPlan, HostPlan
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.specs import SSH_PYTHON, agent_python
from fleetd.coordinator.wheelhouses import Wanted, Wheelhouse, Wheelhouses, unpacked_bytes
from fleetd.environments import (
    REGISTRY,
    WHEELS,
    EnvironmentAnswer,
    EnvironmentMark,
    EnvironmentOrder,
    Interpreter,
    environment_name,
    environment_python,
)
from fleetd.files import read_record, write_record, write_text
from fleetd.paths import CampaignPaths
from fleetd.plan_lock import Lock, Pin, read_lock, read_lock_file
from fleetd.wire import WireError, decode, dumps, encode, loads
from policies.errors import ExplainedError, RequestRefused, from_json
from policies.parity import differences
from policies.surveys import EnvironmentSurvey, PackageSurvey, PythonSurvey

LOOK_SECONDS_MAX = 60.0
BUILD_SECONDS_MAX = 1800.0
"""torch with CUDA is unpacked, compiled and read back in a few minutes; a slow disk takes longer."""
ANSWER_SECONDS = 30.0
"""Beyond its own deadline, for a build to say that it has met it."""
WORDS_MAX = 300
SHOWN_MAX = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that an environment will be, known before it is built."""

    plan: EnvironmentPlan
    interpreter: Interpreter
    pins: tuple[Pin, ...]
    wheelhouse: Wheelhouse
    name: str
    mark: EnvironmentMark | None
    """What the host says of it, where it is there and complete."""

    def survey(self) -> EnvironmentSurvey:
        return EnvironmentSurvey(
            lock=self.plan.lock, lock_sha256=self.plan.lock_sha256, name=self.name, is_built=self.mark is not None, python=self.interpreter.version,
            packages=len(self.pins), wheels=self.wheelhouse.wheels, wheels_bytes=self.wheelhouse.bytes,
            disk_bytes=self.wheelhouse.bytes + unpacked_bytes(self.wheelhouse) if self.mark is None else 0,
        )

    def expected(self, root: str) -> PythonSurvey:
        """Its Python as it will be. Which builds a host will fetch from an index nobody knows before: `packages` is empty then."""
        found, wheels = self.interpreter, (entry.path for entry in self.wheelhouse.entries if entry.path.startswith(f"{WHEELS}/"))
        versions = {str(canonicalize_name(path.partition("/")[2].split("-")[0])): path.split("-")[1] for path in wheels}
        return PythonSurvey(
            program=environment_python(root, self.name), fault=None, version=found.version, implementation=found.implementation,
            architecture=found.machine, is_expected=True,
            packages={name: PackageSurvey(version=version, files=0, files_sha256="") for name, version in versions.items()},
        )


class Environments:
    """Safe to use from many threads."""

    def __init__(self, wheelhouses: Wheelhouses) -> None:
        self._wheelhouses = wheelhouses
        self._guard = threading.Lock()
        self._under_way: Counter[tuple[str, str]] = Counter()
        self._builders: dict[str, threading.Lock] = {}

    def prepare(self, paths: CampaignPaths, host: HostPlan, courier: Courier, release: str) -> Prepared:
        """What the environment of a host will be, its wheels fetched. RequestRefused when the host or an index can't give it."""
        asked = host.environment
        assert asked is not None, "only for hosts with an environment"
        lock = kept_lock(paths, asked)
        question = {"do": "look", "python": source_python(host, asked), "lock_sha256": asked.lock_sha256, "wheels": None}
        looked = _ask(host, courier, release, question, LOOK_SECONDS_MAX)
        if looked["error"] is not None:
            raise _at(host, from_json(looked["error"]))
        interpreter = decode(Interpreter, looked["interpreter"], "interpreter")
        if interpreter.implementation != "cpython" and asked.wheels != REGISTRY:
            what, fix = f"{interpreter.program} there is {interpreter.implementation}", "wheels: registry, or name a CPython as environment.python"
            raise RequestRefused("wheels are chosen for CPython only", where=f"host {host.name}", what=what, fix=fix)
        pins = _pins(host, lock, interpreter)
        wanted = Wanted(lock_sha256=asked.lock_sha256, pins=pins, interpreter=interpreter, source=asked.wheels)
        try:
            wheelhouse = self._wheelhouses.get(wanted)
        except ExplainedError as error:
            raise _at(host, error) from error
        again = _ask(host, courier, release, {**question, "wheels": wheelhouse.wheels}, LOOK_SECONDS_MAX)
        mark = decode(EnvironmentMark, again["mark"], "mark") if again["mark"] is not None else None
        name = environment_name(asked.lock_sha256, interpreter, wheelhouse.wheels)
        return Prepared(plan=asked, interpreter=interpreter, pins=pins, wheelhouse=wheelhouse, name=name, mark=mark)

    def bring(self, paths: CampaignPaths, host: HostPlan, courier: Courier, release: str, parity: str) -> tuple[EnvironmentAnswer, tuple[str, ...]]:
        """The environment on its host, whole to the last byte as of now, built there if need be; and in what it differs from those of other
        hosts, which is refused where parity is `require` and not looked for where it is `off`."""
        prepared = self.prepare(paths, host, courier, release)
        wheelhouse = prepared.wheelhouse
        order = EnvironmentOrder(
            lock_sha256=prepared.plan.lock_sha256, python=source_python(host, prepared.plan), wheels=wheelhouse.wheels, wheelhouse=wheelhouse.digest,
            seconds_max=BUILD_SECONDS_MAX,
        )
        with self._keeping(host, wheelhouse):
            if prepared.mark is None:
                courier.put_tree(TreeKind.WHEELHOUSES, wheelhouse.digest, wheelhouse.folder, wheelhouse.entries)
            with self._builder(host):  # a host builds one at a time: a second order waits here, where its own time is not running yet
                found = _ask(host, courier, release, {"do": "build", "order": encode(order)}, BUILD_SECONDS_MAX + ANSWER_SECONDS)
        if found.get("error") is not None:
            raise _at(host, from_json(found["error"]))
        answer = decode(EnvironmentAnswer, found["answer"], "answer")
        if answer.is_new:
            logs.changed("environment_built", host=host.name, name=answer.name, seconds=answer.mark.seconds, bytes=answer.mark.bytes)
        return answer, _compare(paths, parity, host, answer)

    def prune(self, host: HostPlan, courier: Courier, release: str, keep: frozenset[str]) -> None:
        """Let the host remove environments that neither `keep` nor a run nor a process needs, and wheels that nobody is installing. What it
        refuses is logged: nothing that is to run depends on it."""
        with self._guard:
            wheels = sorted(digest for name, digest in self._under_way if name == host.name)
        try:
            _ask(host, courier, release, {"do": "prune", "keep": sorted(keep), "wheelhouses": wheels}, LOOK_SECONDS_MAX)
        except RequestRefused as error:
            logs.failed("environments_not_pruned", host=host.name, what=error.what)

    def _builder(self, host: HostPlan) -> threading.Lock:
        with self._guard:
            return self._builders.setdefault(host.name, threading.Lock())

    @contextmanager
    def _keeping(self, host: HostPlan, wheelhouse: Wheelhouse) -> Iterator[None]:
        key = (host.name, wheelhouse.digest)
        with self._guard:
            self._under_way[key] += 1
        try:
            yield
        finally:
            with self._guard:
                self._under_way[key] -= 1
                self._under_way += Counter()  # drops what has come to nothing


def source_python(host: HostPlan, asked: EnvironmentPlan) -> str:
    """The Python of a host that its environment is built from."""
    return asked.python or (sys.executable if host.is_local else SSH_PYTHON)


def kept_lock(paths: CampaignPaths, asked: EnvironmentPlan) -> Lock:
    """The lock as it was checked, kept with the campaign: what is built tomorrow is not what somebody edits today. RequestRefused."""
    kept = paths.lock(asked.lock_sha256)
    if not kept.exists():
        try:
            lock, data = read_lock_file(Path(asked.lock))
        except (OSError, ValueError) as fault:
            what, fix = getattr(fault, "strerror", None) or str(fault), "put it there, then launch again"
            raise RequestRefused("the lock can't be read", where=asked.lock, what=what, fix=fix) from fault
        if lock.sha256 != asked.lock_sha256:
            what = f"its SHA-256 is {lock.sha256}, it was {asked.lock_sha256}"
            raise RequestRefused("the lock changed since the plan was checked", where=asked.lock, what=what, fix="launch again")
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, data.decode("utf-8"))
    return read_lock(kept.read_bytes())


def _pins(host: HostPlan, lock: Lock, interpreter: Interpreter) -> tuple[Pin, ...]:
    """The lines of the lock that hold on this host."""
    pins = lock.for_host(interpreter.markers)
    where = f"host {host.name}, lock {lock.sha256[:12]}"
    twice = next((pin for pin in pins if sum(each.name == pin.name for each in pins) > 1), None)
    if twice is not None:
        lines = " and ".join(f"{pin.line} ({pin})" for pin in pins if pin.name == twice.name)
        what, fix = f"lines {lines} both hold there", "make their markers exclude each other"
        raise RequestRefused(f"the lock has {twice.name} twice", where=where, what=what, fix=fix)
    if not pins:
        what, fix = "none of its lines holds there, by their markers", "correct the markers"
        raise RequestRefused("the lock is empty for this host", where=where, what=what, fix=fix)
    return pins


def _compare(paths: CampaignPaths, parity: str, host: HostPlan, answer: EnvironmentAnswer) -> tuple[str, ...]:
    """Compare what was built with what the other hosts have; written down before it is read, so that of two hosts one sees the other."""
    record = paths.environment(host.name)
    record.parent.mkdir(parents=True, exist_ok=True)
    write_record(record, answer)
    if parity == "off":
        return ()
    others = {**_seen_in_preflight(paths), **_built(paths)}
    found = differences({**others, host.name: answer.python}, {})
    if found and parity == "require":
        what = "; ".join(found[:SHOWN_MAX]) + (f"; and {len(found) - SHOWN_MAX} more" if len(found) > SHOWN_MAX else "")
        fix = "build them all from one lock with hashes and from one Python, or set parity: report in the plan"
        raise RequestRefused("the hosts differ", where=f"host {host.name}", what=what, fix=fix)
    return found


def _seen_in_preflight(paths: CampaignPaths) -> dict[str, PythonSurvey]:
    try:
        looks = read_record(paths.preflight)["looks"]
        pythons = {name: decode(PythonSurvey, look["python"], "python") for name, look in looks.items() if look.get("python") is not None}
    except (OSError, WireError, KeyError, TypeError, AttributeError):
        return {}
    return {name: python for name, python in pythons.items() if not python.is_expected}


def _built(paths: CampaignPaths) -> dict[str, PythonSurvey]:
    found = {}
    for record in paths.environment("x").parent.glob("*.json"):
        try:
            found[record.stem] = decode(EnvironmentAnswer, read_record(record), record.name).python
        except (OSError, WireError):
            continue
    return found


def _at(host: HostPlan, error: ExplainedError) -> ExplainedError:
    """The same error, with the host that it happened for."""
    return type(error)(error.title, where=f"host {host.name}, {error.where}", what=error.what, fix=error.fix)


def _ask(host: HostPlan, courier: Courier, release: str, request: dict[str, Any], seconds_max: float) -> dict[str, Any]:
    """The answer of the host's `environment` program. RequestRefused in its own last words when it gives none."""
    entry = f"{courier.tree_path(TreeKind.RELEASES, release)}/fleetd/host/__main__.py"
    argv = (agent_python(host, sys.executable), "-I", entry, "environment", host.root, dumps(request))
    try:
        done = courier.run_program(argv, seconds_max)
        answer = loads(done.stdout)
    except (OSError, WireError) as fault:
        words = done.stderr.strip()[-WORDS_MAX:] if not isinstance(fault, OSError) else ""
        title, fix = f"the environment of {host.name} can't be {_VERBS[request['do']]}", f"see {host.root}/environments there, then launch again"
        raise RequestRefused(title, where=f"host {host.name}", what=words or str(fault), fix=fix) from fault
    assert isinstance(answer, dict), "it prints one object"
    return answer


_VERBS = {"look": "looked for", "build": "built", "prune": "tidied"}
