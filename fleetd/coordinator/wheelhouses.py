"""The wheels of a lock for one kind of Python: fetched once by pip on the coordinator, kept by digest, and staged to hosts as any tree.

    pip-23.2.1-py3-none-any.whl      the host needs no pip of its own
    requirements.txt                 what holds there: name==version, each with the SHA-256 of its very wheel
    wheels/*.whl                     absent where the host fetches them itself (`wheels: registry`)

pip's own configuration says where packages come from (indexes, mirrors, credentials); nothing of it is written down here, and of what pip
says addresses are kept without user, password and query.
"""

from __future__ import annotations

import email.parser
import ensurepip
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from fleetd import logs
from fleetd.coordinator.trees import TEMPORARY_PREFIX, TreeFault, discard_tree, read_entry, read_manifest, write_manifest
from fleetd.environments import REGISTRY, REQUIREMENTS, WHEELS, Interpreter
from fleetd.files import files_below, read_record, sync_folder, write_record
from fleetd.paths import StatePaths
from fleetd.pip_words import pip_fault
from fleetd.plan_lock import Pin
from fleetd.wire import WireError
from policies.errors import DataDamaged, ExplainedError, NoRoom, RequestRefused
from policies.manifest import FileEntry, directory_digest

FETCH_SECONDS_MAX = 3600.0
PIP_SECONDS_MAX = 120.0
SHOWN_MAX = 6
KEPT_MAX = 4
"""Wheelhouses on the coordinator's disk; the least recently used goes first, and is fetched again when it is asked for."""
AUTO = "auto"
GLIBC_OLDEST = 5
"""manylinux1 was glibc 2.5; tags count from there up to what the host has."""
_MANYLINUX = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheelhouse:
    """One staged tree. `wheels` is the digest of what is installed from it, without the pip that does it, or `registry`."""

    digest: str
    wheels: str
    folder: Path
    entries: tuple[FileEntry, ...]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a wheelhouse is for. `source` is auto, registry, or a directory of wheels."""

    lock_sha256: str
    pins: tuple[Pin, ...]
    interpreter: Interpreter
    source: str

    @property
    def target(self) -> str:
        """For a person: `cp311 on aarch64, glibc 2.39`."""
        return f"{self.interpreter.abi} on {self.interpreter.machine}{', ' if self.interpreter.libc else ''}{self.interpreter.libc}"

    @property
    def key(self) -> str:
        """Equal for equal wheels. A directory's wheels count by name, size and time: a person may put other ones there."""
        listed = [] if self.source in (AUTO, REGISTRY) else sorted(
            (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in Path(self.source).glob("*.whl"))
        found = self.interpreter
        said = [[str(pin) for pin in self.pins], self.lock_sha256, found.abi, found.implementation, found.machine, found.libc, self.source, listed]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


class Wheelhouses:
    """Safe to use from many threads; two hosts that want the same wheels wait for one fetch."""

    def __init__(self, paths: StatePaths) -> None:
        self._store, self._libraries = paths.wheelhouses, paths.wheels
        self._guard = threading.Lock()
        self._guards: dict[str, threading.Lock] = {}
        self._used: set[str] = set()

    def get(self, wanted: Wanted) -> Wheelhouse:
        """The wheelhouse, fetched if it is not there. RequestRefused names a package without a wheel for that Python; NoRoom."""
        key = wanted.key
        with self._guard:
            guard = self._guards.setdefault(key, threading.Lock())
        with guard:
            try:
                found = self._resolved(key) or self._make(wanted, key)
            except OSError as fault:
                fix = "free some space there; it is tried again by itself"
                raise NoRoom("the wheels can't be kept", where=str(self._store), what=str(fault), fix=fix) from fault
            with self._guard:
                self._used.add(found.digest)
            os.utime(found.folder)
            return found

    def _resolved(self, key: str) -> Wheelhouse | None:
        """What this lock came to before: the same lock gives the same wheels, whatever has appeared in an index meanwhile."""
        try:
            record = read_record(self._store / f"{key}.json")
            folder = self._store / str(record["digest"])
            entries = read_manifest(folder)
        except (OSError, WireError, KeyError, TypeError, TreeFault):
            return None
        if directory_digest(entries) != folder.name or any((folder / entry.path).stat().st_size != entry.bytes for entry in entries):
            return None
        return _wheelhouse(folder, entries)

    def _make(self, wanted: Wanted, key: str) -> Wheelhouse:
        self._store.mkdir(parents=True, exist_ok=True)
        # By our number too: a pip that has outlived an earlier coordinator finds its folder gone, and never writes into ours.
        temporary = self._store / f"{TEMPORARY_PREFIX}{key}-{os.getpid()}"
        discard_tree(temporary)
        temporary.mkdir()
        try:
            pip = pip_wheel(self._libraries)
            shutil.copyfile(pip, temporary / pip.name)
            if wanted.source == REGISTRY:
                lines = [f"{pin}{''.join(f' --hash={value}' for value in pin.hashes)}" for pin in wanted.pins]
            else:
                _fetch(wanted, temporary, pip)
                paired = _paired(wanted, temporary)
                check_complete(wanted, {pin: temporary / path for pin, path in paired})
                lines = [f"{pin} --hash=sha256:{read_entry(temporary, path).sha256}" for pin, path in paired]
            (temporary / REQUIREMENTS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            entries = tuple(read_entry(temporary, path) for path in files_below(temporary))
            write_manifest(temporary, entries)
            final = self._store / directory_digest(entries)
            if final.exists():
                shutil.rmtree(final)  # it is not what it says, or it would have been found
            self._drop_oldest()
            os.rename(temporary, final)
            sync_folder(self._store)
            write_record(self._store / f"{key}.json", {"digest": final.name, "lock_sha256": wanted.lock_sha256, "target": wanted.target})
            found = _wheelhouse(final, entries)
            logs.changed("wheels_kept", lock=wanted.lock_sha256[:12], target=wanted.target, packages=len(wanted.pins), bytes=found.bytes)
            return found
        finally:
            discard_tree(temporary)

    def _drop_oldest(self) -> None:
        """Keep those of this life and the newest others; hosts have no need of them once their environments are built."""
        with self._guard:
            folders = [path for path in self._store.glob("[0-9a-f]*/") if path.name not in self._used]
        for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[KEPT_MAX - 1:]:
            shutil.rmtree(folder, ignore_errors=True)


def unpacked_bytes(house: Wheelhouse) -> int:
    """What the wheels take once they are installed, with the byte code that pip makes of every module, near enough for a disk."""
    total = 0
    for entry in house.entries:
        if entry.path.startswith(f"{WHEELS}/"):
            with zipfile.ZipFile(house.folder / entry.path) as archive:
                total += sum(each.file_size * (2 if each.filename.endswith(".py") else 1) for each in archive.infolist())
    return total


def pip_wheel(wheels: Path) -> Path:
    """A wheel of pip: the newest of those in `<state>/wheels` and the one that comes with Python, else one that pip brings. RequestRefused."""
    bundled = Path(ensurepip.__file__).parent / "_bundled"
    known = [path for folder in (wheels, bundled) for path in folder.glob("pip-*-py3-none-any.whl")]
    if known:
        return max(known, key=_version)
    wheels.mkdir(parents=True, exist_ok=True)
    trouble = "it brought none"
    try:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(wheels), "pip"]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PIP_SECONDS_MAX, check=False)
        trouble = pip_fault(done.stdout + done.stderr).words or trouble
    except (OSError, subprocess.TimeoutExpired) as fault:
        trouble = str(fault)
    known = list(wheels.glob("pip-*-py3-none-any.whl"))
    if not known:
        fix = f"where there is a network: python3 -m pip download --no-deps pip; then copy the wheel into {wheels}"
        raise RequestRefused("pip is missing", where=str(wheels), what=f"this Python came without it, and pip: {trouble}", fix=fix)
    return known[0]


def _version(wheel: Path) -> Version:
    try:
        return Version(wheel.name.split("-")[1])
    except InvalidVersion:
        return Version("0")


def platforms(interpreter: Interpreter) -> tuple[str, ...]:
    """The platform tags that a host's Python takes, the best first: PEP 600 up to its glibc, then what was built on such a machine."""
    machine, version = interpreter.machine, re.fullmatch(r"glibc 2\.(\d+)(?:\.\d+)?", interpreter.libc)
    if version is None:
        return (*(f"musllinux_1_{minor}_{machine}" for minor in range(2, 0, -1)), f"linux_{machine}")
    tags: list[str] = []
    for minor in range(int(version[1]), GLIBC_OLDEST - 1, -1):
        tags += [f"manylinux_2_{minor}_{machine}", *([f"{_MANYLINUX[minor]}_{machine}"] if minor in _MANYLINUX else [])]
    return (*tags, f"linux_{machine}")


def _fetch(wanted: Wanted, temporary: Path, pip: Path) -> None:
    """Let pip choose and bring one wheel for each pin. Markers are judged already: pip would judge them by this machine."""
    asked, found = temporary / ".asked.txt", wanted.interpreter
    lines = [f"{pin}{''.join(f' --hash={value}' for value in pin.hashes)}" for pin in wanted.pins]
    asked.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (temporary / WHEELS).mkdir()
    own_pip = ("-m", "pip") if importlib.util.find_spec("pip") is not None else (f"{pip}/pip",)
    version = ".".join(found.version.split(".")[:2])
    argv = [
        sys.executable, *own_pip, "download", "--no-input", "--disable-pip-version-check", "--no-color", "--progress-bar", "off", "--no-deps",
        "--only-binary", ":all:", "--dest", str(temporary / WHEELS), "--python-version", version, "--implementation", "cp", "--abi", found.abi,
        *(word for tag in platforms(found) for word in ("--platform", tag)),
        *(() if wanted.source == AUTO else ("--no-index", "--find-links", wanted.source)), "--requirement", str(asked),
    ]
    hidden = ("PYTHON",) if wanted.source == AUTO else ("PYTHON", "PIP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    if wanted.source != AUTO:
        environment["PIP_CONFIG_FILE"] = os.devnull
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True, errors="replace",
            timeout=FETCH_SECONDS_MAX, check=False,
        )
    except subprocess.TimeoutExpired as fault:
        what, fix = f"pip took longer than {FETCH_SECONDS_MAX:.0f} s", "launch again: what it has fetched is in its cache"
        raise RequestRefused("the wheels have not come", where=f"lock {wanted.lock_sha256[:12]}", what=what, fix=fix) from fault
    finally:
        asked.unlink()
    if done.returncode != 0:
        raise _explained(wanted, done.stdout)


def _explained(wanted: Wanted, output: str) -> ExplainedError:
    found = pip_fault(output)
    name = canonicalize_name(re.split(r"[=<>!~; ]", found.package)[0]) if found.package else ""
    pin = next((pin for pin in wanted.pins if pin.name == name), None)
    where = f"line {pin.line} of the lock, {pin}" if pin is not None else f"lock {wanted.lock_sha256[:12]}"
    if found.kind is NoRoom:
        return NoRoom(found.title, where=where, what=found.words, fix="free some space there; it is tried again by itself")
    source = "pip's index" if wanted.source == AUTO else wanted.source
    title = f"{found.title} for {wanted.target}" if found.title.startswith("there is no wheel") else found.title
    fix = {
        "the package index can't be reached": "mend the network or pip's configuration (pip config list), or name a directory of wheels as `wheels`",
    }.get(found.title, f"pin a version that {source} has for it, or put its wheel into a directory and name that as `wheels`")
    return found.kind(title, where=where, what=found.words, fix=fix)


def _paired(wanted: Wanted, temporary: Path) -> list[tuple[Pin, str]]:
    """Each pin with its wheel."""
    by_name = {str(parse_wheel_filename(path.name)[0]): f"{WHEELS}/{path.name}" for path in sorted((temporary / WHEELS).glob("*.whl"))}
    lost = [str(pin) for pin in wanted.pins if pin.name not in by_name]
    if lost:
        what = f"pip brought none of {', '.join(lost[:4])}"
        raise RequestRefused("wheels are missing", where=f"lock {wanted.lock_sha256[:12]}", what=what, fix="report this with daemon.log")
    return [(pin, by_name[pin.name]) for pin in wanted.pins]


def check_complete(wanted: Wanted, wheels: dict[Pin, Path]) -> None:
    """RequestRefused when a wheel needs a package that the lock does not have, or has in another version than it takes.

    pip is told to install these wheels and nothing besides, so nobody else would say so before an import fails.
    """
    pinned = {pin.name: pin for pin in wheels}
    lost: list[str] = []
    for pin, wheel in wheels.items():
        for needed in _needs(wheel):
            if needed.marker is not None and not needed.marker.evaluate({**wanted.interpreter.markers, "extra": ""}):
                continue
            have = pinned.get(canonicalize_name(needed.name))
            if have is None:
                lost.append(f"{needed.name} (for {pin.name})")
            elif not needed.specifier.contains(have.version, prereleases=True):
                lost.append(f"{needed.name}{needed.specifier} (for {pin.name}, and it has {have.version})")
    if lost:
        more = f" and {len(lost) - SHOWN_MAX} more" if len(lost) > SHOWN_MAX else ""
        what = f"it does not have {', '.join(lost[:SHOWN_MAX])}{more}"
        fix = "add them with their versions; in an environment where it works: pip freeze --all (without --all it leaves setuptools out)"
        raise RequestRefused("the lock is not complete", where=f"lock {wanted.lock_sha256[:12]} for {wanted.target}", what=what, fix=fix)


def _needs(wheel: Path) -> list[Requirement]:
    """What a wheel says that it requires."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA"))
            said = email.parser.HeaderParser().parsestr(archive.read(name).decode(errors="replace"))
        return [Requirement(text) for text in said.get_all("Requires-Dist") or []]
    except (zipfile.BadZipFile, StopIteration, InvalidRequirement) as fault:
        fix = "remove it where it comes from, and launch again"
        raise DataDamaged("a wheel can't be read", where=str(wheel), what=str(fault), fix=fix) from fault


def _wheelhouse(folder: Path, entries: tuple[FileEntry, ...]) -> Wheelhouse:
    installed = [entry for entry in entries if not entry.path.startswith("pip-")]
    has_wheels = any(entry.path.startswith(f"{WHEELS}/") for entry in entries)
    return Wheelhouse(digest=folder.name, wheels=directory_digest(installed) if has_wheels else REGISTRY, folder=folder, entries=entries)
