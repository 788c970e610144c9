"""Isolated environments of a host, built from a lock: `<release>/fleetd/host environment ROOT REQUEST` prints one JSON object.

    {"do": "look", "python": PROGRAM, "lock_sha256", "wheels"}    what that Python is, and whether the environment is there
    {"do": "build", "order": EnvironmentOrder}                    an environment that is there and whole: EnvironmentAnswer
    {"do": "prune", "keep": [name], "wheelhouses": [digest]}      what nobody keeps is gone

An environment is made where it will lie. It can't be made aside and renamed as everything else is: the scripts that pip writes begin with
the whole path of their interpreter, and pyvenv.cfg and compiled files carry it too. In place of the rename there is `fleetd.json`,
written last, after everything below the environment is on the disk: without it a folder is nobody's, and is removed and begun again.
One lock for all builds of a host, held by each of their processes; a build is niced and has a deadline.

It needs of the host's Python no more than the standard library without ensurepip, which Debian splits off: pip comes with the wheels.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fleetd import clock, faults
from fleetd.environments import (
    MARK,
    REGISTRY,
    REQUIREMENTS,
    WHEELS,
    EnvironmentAnswer,
    EnvironmentMark,
    EnvironmentOrder,
    Interpreter,
    environment_name,
)
from fleetd.files import write_record
from fleetd.host.environment_use import prune, read_mark
from fleetd.host.steps import StepFailed, Steps
from fleetd.host.survey import look_at_python
from fleetd.paths import HostPaths
from fleetd.pip_words import missing_packages, pip_fault
from fleetd.release_use import TRASH_PREFIX
from fleetd.wire import WireError, decode, dumps, encode
from policies.errors import DataDamaged, ExplainedError, NoRoom, RequestRefused
from policies.surveys import PythonSurvey

PROBE = Path(__file__).with_name("interpreter_probe.py")
PROBE_SECONDS_MAX = 30.0
OLDEST = (3, 10)
LOCK_LOOK_SECONDS = 0.2
NICENESS = 10
KEPT_VARIABLES = ("LANG", "LC_ALL", "PATH", "TZ", "USER")
SHOWN_MAX = 6


def interpreter(program: str) -> Interpreter:
    """What a Python of this host is, asked of itself."""
    try:
        done = subprocess.run(
            [program, "-I", "-B", str(PROBE)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS_MAX, check=False,
        )
        found = decode(Interpreter, {**json.loads(done.stdout), "program": program, "fault": None}, "probe")
    except OSError as fault:
        return Interpreter(program=program, fault=fault.strerror or str(fault))
    except subprocess.TimeoutExpired:
        return Interpreter(program=program, fault=f"it gave no answer in {PROBE_SECONDS_MAX:.0f} s")
    except (ValueError, WireError):
        words = done.stderr.strip().splitlines()
        return Interpreter(program=program, fault=words[-1][:300] if words else f"exit status {done.returncode} and no words")
    return found


def fault_of(found: Interpreter) -> RequestRefused | None:
    """Why no environment can be made of this Python."""
    where, version = f"python {found.program}", tuple(int(part) for part in found.version.split(".")[:2] if part.isdigit())
    if found.fault is not None:
        what, fix = f"{found.program}: {found.fault}", "install it there, or name another one as environment.python"
        return RequestRefused("that Python can't be used", where=where, what=what, fix=fix)
    if version < OLDEST:
        what = f"it is Python {found.version}, {OLDEST[0]}.{OLDEST[1]} or newer is needed"
        return RequestRefused("that Python is too old", where=where, what=what, fix="name a newer one as environment.python")
    if found.lacks:
        package = f"python{version[0]}.{version[1]}-venv" if "venv" in found.lacks else f"libpython{version[0]}.{version[1]}-stdlib"
        what = f"Python {found.version} there has no {', '.join(found.lacks)}"
        fix = f"sudo apt-get install {package}, or name another one as environment.python"
        return RequestRefused("that Python is not complete", where=where, what=what, fix=fix)
    return None


def look(paths: HostPaths, asked: dict[str, Any]) -> dict[str, Any]:
    """The interpreter, the environment's name where `wheels` is known, and its mark where it is complete."""
    found = interpreter(str(asked["python"]))
    refused, wheels = fault_of(found), asked.get("wheels")
    name = environment_name(str(asked["lock_sha256"]), found, str(wheels)) if refused is None and wheels else None
    mark = read_mark(paths.environments / name) if name is not None else None
    return {"interpreter": encode(found), "error": refused.to_json() if refused else None, "name": name, "mark": encode(mark)}


def build(paths: HostPaths, order: EnvironmentOrder) -> EnvironmentAnswer:
    """The environment of an order, there and verified file by file; made if it is not there."""
    until_seconds = time.monotonic() + order.seconds_max
    found = interpreter(order.python)
    if (refused := fault_of(found)) is not None:
        raise refused
    name = environment_name(order.lock_sha256, found, order.wheels)
    place = paths.environments / name
    mark = read_mark(place)
    if mark is None:
        os.makedirs(place.parent, exist_ok=True)
        with alone(paths, until_seconds) as lock:
            mark = read_mark(place)  # another campaign may have had it built meanwhile
            if mark is None:
                return _make(paths, order, found, name, lock, until_seconds)
    survey = _read_back(place, until_seconds)
    fault = difference(mark, survey)
    if fault is not None:
        raise DataDamaged(
            "the environment is damaged", where=str(place), what=fault, fix=f"make sure that no run uses it, then rm -r {place} and launch again",
        )
    return EnvironmentAnswer(name=name, is_new=False, mark=mark, python=survey)


def difference(mark: EnvironmentMark, survey: PythonSurvey) -> str | None:
    """What an environment has become since it was built; None where it is what its mark says, to the last byte of every package."""
    if survey.fault is not None:
        return f"its interpreter: {survey.fault}"
    if survey.version != mark.version:
        return f"its interpreter is Python {survey.version} now, it was built from {mark.version}"
    now = {name: (package.version, package.files_sha256) for name, package in survey.packages.items()}
    gone, strange = sorted(mark.packages.keys() - now.keys()), sorted(now.keys() - mark.packages.keys())
    if gone or strange:
        return "; ".join(f"{word}: {', '.join(names[:SHOWN_MAX])}" for word, names in (("gone", gone), ("not of the lock", strange)) if names)
    changed = [name for name in sorted(now) if now[name] != mark.packages[name] or survey.packages[name].damaged_count]
    if not changed:
        return None
    files = [f"{file} of {name}" for name in changed for file in survey.packages[name].damaged]
    return f"changed since it was built: {', '.join((files or changed)[:SHOWN_MAX])}"


@contextmanager
def alone(paths: HostPaths, until_seconds: float) -> Iterator[int]:
    """The one lock of all builds of this host, waited for until the deadline."""
    descriptor = os.open(paths.environments / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until_seconds:
                    where, what = str(paths.environments), "another environment is still being built there"
                    raise RequestRefused("the build has not begun in time", where=where, what=what, fix="launch again once it is done") from None
                time.sleep(LOCK_LOOK_SECONDS)
        yield descriptor
    finally:
        os.close(descriptor)


def _make(
    paths: HostPaths, order: EnvironmentOrder, source: Interpreter, name: str, lock: int, until_seconds: float,
) -> EnvironmentAnswer:
    """Called with the lock held: whatever lies there without a mark is nobody's."""
    place, wheelhouse = paths.environments / name, paths.wheelhouses / order.wheelhouse
    log, scratch = paths.environments / f"{name}.log", paths.environments / f".tmp-{os.getpid()}"
    for leftover in (place, *paths.environments.glob(".tmp-*")):
        shutil.rmtree(leftover, ignore_errors=True)
    began_seconds = time.monotonic()
    try:
        if place.exists():
            raise OSError(errno.ENOTEMPTY, "what a build has left half-made can't be removed", str(place))
        os.mkdir(scratch)
        steps = Steps(log=log, lock=lock, environment=_environment(order, scratch), until_seconds=until_seconds)
        steps.begin(f"environment {name}, from {source.program}")
        _install(steps, order, source, place, wheelhouse)
        survey = _read_back(place, until_seconds)
        _check(survey, place, log)
        _sync(place)
        faults.before("environment complete")
        mark = EnvironmentMark(
            name=name, lock_sha256=order.lock_sha256, wheels=order.wheels, version=survey.version, implementation=survey.implementation,
            machine=survey.architecture, built_at=clock.read().now, seconds=round(time.monotonic() - began_seconds, 1), bytes=_bytes(place),
            packages={each: (package.version, package.files_sha256) for each, package in survey.packages.items()},
        )
        write_record(place / MARK, mark)
    except (StepFailed, OSError) as fault:
        shutil.rmtree(place, ignore_errors=True)
        raise _explained(fault, place, log, order) from fault
    except ExplainedError:
        shutil.rmtree(place, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _drop(wheelhouse)
    return EnvironmentAnswer(name=name, is_new=True, mark=mark, python=survey)


def _environment(order: EnvironmentOrder, scratch: Path) -> dict[str, str]:
    """What the steps get. Where wheels were brought, nothing that a user or machine has set of pip or Python has a say, and the home is a
    scratch: pip asks programs such as rustc for their version, and those write there."""
    if order.wheels == REGISTRY:
        given = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FLEETD_"))}
        return given | {"TMPDIR": str(scratch)}
    given = {key: os.environ[key] for key in KEPT_VARIABLES if key in os.environ}
    return given | {"HOME": str(scratch), "TMPDIR": str(scratch), "PIP_CONFIG_FILE": os.devnull}


def _install(steps: Steps, order: EnvironmentOrder, source: Interpreter, place: Path, wheelhouse: Path) -> None:
    pip = next(iter(sorted(wheelhouse.glob("pip-*.whl"))), None)
    if pip is None:
        raise OSError(f"{wheelhouse} holds no pip")
    # -B: a Python of the system that has no byte code yet is not given any by us. What pip installs it compiles all the same.
    steps.run(source.program, "-I", "-B", "-m", "venv", "--without-pip", str(place))
    faults.before("environment made")
    runs_pip = (str(place / "bin" / "python"), "-I", "-B", f"{pip}/pip")
    quiet = ("--no-input", "--disable-pip-version-check", "--no-cache-dir", "--no-color")
    place_of_wheels = () if order.wheels == REGISTRY else ("--no-index", "--find-links", str(wheelhouse / WHEELS), "--require-hashes")
    steps.run(
        *runs_pip, "install", *quiet, "--progress-bar", "off", "--no-warn-script-location", "--no-deps", "--only-binary", ":all:",
        *place_of_wheels, "--requirement", str(wheelhouse / REQUIREMENTS),
    )
    faults.before("environment filled")
    if order.wheels == REGISTRY:  # of wheels that were brought, the coordinator has looked already
        _check_complete(steps, order, runs_pip, quiet)


def _check_complete(steps: Steps, order: EnvironmentOrder, runs_pip: tuple[str, ...], quiet: tuple[str, ...]) -> None:
    try:
        steps.run(*runs_pip, "check", *quiet)
    except StepFailed as fault:
        missing = missing_packages(fault.output)
        if fault.is_late or not missing:
            return  # versions that their authors would not have put together are the lock's own business
        what = f"{', '.join(missing[:SHOWN_MAX])}{' and more' if len(missing) > SHOWN_MAX else ''}"
        raise RequestRefused(
            "the lock is not complete", where=f"lock {order.lock_sha256[:12]}", what=f"it does not have {what}", fix="add them with their versions",
        ) from fault


def _read_back(place: Path, until_seconds: float) -> PythonSurvey:
    """Every file of it, by its own interpreter; a slow disk has the rest of the time for it."""
    return look_at_python(str(place / "bin" / "python"), [], True, max(PROBE_SECONDS_MAX, until_seconds - time.monotonic()))


def _check(survey: PythonSurvey, place: Path, log: Path) -> None:
    if survey.fault is not None:
        what, fix = f"{survey.program}: {survey.fault}", f"see {log}"
        raise RequestRefused("the environment does not run", where=str(place), what=what, fix=fix)
    damaged = [name for name, package in survey.packages.items() if package.damaged_count]
    if damaged:
        what = f"what lies on the disk is not what was installed: {', '.join(damaged[:SHOWN_MAX])}"
        raise RequestRefused("the environment is damaged", where=str(place), what=what, fix="look at the disk of that host, then launch again")


def _explained(fault: StepFailed | OSError, place: Path, log: Path, order: EnvironmentOrder) -> ExplainedError:
    title, fix = "the environment can't be built", f"see {log}"
    if isinstance(fault, OSError):
        kind: type[ExplainedError] = NoRoom if fault.errno in (errno.ENOSPC, errno.EDQUOT) else RequestRefused
        return kind(title, where=str(place), what=str(fault), fix=fix)
    if fault.is_late:
        what = f"it took longer than {order.seconds_max:.0f} s"
        return RequestRefused(title, where=str(place), what=what, fix=f"{fix}; launch again when that host has less to do")
    found = pip_fault(fault.output)
    if found.kind is NoRoom:
        fix = f"free some space below {place.parent.parent.parent}; it is tried again by itself"
    return found.kind(f"{title}: {found.title}", where=str(place), what=found.words, fix=fix)


def _sync(place: Path) -> None:
    """pip syncs nothing, and the mark must not outlive what it speaks of. syncfs(2), of the file system that it lies on."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if library.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(place))
    finally:
        os.close(descriptor)


def _bytes(place: Path) -> int:
    return sum(os.lstat(os.path.join(base, name)).st_size for base, _, names in os.walk(place) for name in names)


def _drop(wheelhouse: Path) -> None:
    """The wheels have done their work; the same ones are brought again if they are ever needed."""
    trash = wheelhouse.with_name(f"{TRASH_PREFIX}{wheelhouse.name}")
    try:
        os.rename(wheelhouse, trash)
    except OSError:
        return
    shutil.rmtree(trash, ignore_errors=True)


def answer(paths: HostPaths, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "look":
        return look(paths, asked)
    if asked["do"] == "prune":
        return {"removed": list(prune(paths, frozenset(asked["keep"]), frozenset(asked["wheelhouses"])))}
    assert asked["do"] == "build", asked["do"]
    os.nice(NICENESS)  # a training that goes on beside it has the first say
    try:
        return {"answer": encode(build(paths, decode(EnvironmentOrder, asked["order"], "order")))}
    except ExplainedError as error:
        return {"error": error.to_json()}


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: fleetd/host/__main__.py environment ROOT REQUEST", file=sys.stderr)
        return 2
    print(dumps(answer(HostPaths(Path(arguments[0]).absolute()), json.loads(arguments[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
