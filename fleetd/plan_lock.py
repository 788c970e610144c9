"""A lock file: a pip requirements file in which every line pins one package to one version, and nothing says where it comes from.

    name==version [; marker] [--hash=sha256:…]      a line may go on after a backslash

What packages are is the lock's business, where they come from that of pip's own configuration, so lines that name an index, a URL, a
folder or another file are refused. Read by the plan, and by the coordinator when it prepares an environment.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

LOCK_BYTES_MAX = 4 * 1024 * 1024
PINS_MAX = 2000
SHOWN_CHARACTERS_MAX = 80

_HASH = re.compile(r"--hash[=\s]\s*(\S+)")
_HASH_VALUE = re.compile(r"(?:sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128})")
_COMMENT = re.compile(r"(^|\s+)#.*$")
_LOCATION = re.compile(r"^(?:[a-z+]+://|git\+|file:|\.{0,2}/|~)|(?:\.whl|\.tar\.gz|\.zip)$", re.IGNORECASE)
_OPTIONS = {
    "-e": "an editable folder is another thing on every machine", "--editable": "an editable folder is another thing on every machine",
    "-r": "another file is not part of this lock", "--requirement": "another file is not part of this lock",
    "-c": "another file is not part of this lock", "--constraint": "another file is not part of this lock",
}
_MEND = {
    "-e": "build a wheel of it (pip wheel --no-deps .), pin it by version, and name its folder as `wheels`",
    "-r": "put everything into one file, such as with pip-compile or uv pip compile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One package at one version. `name` as packages are compared; `marker` is empty where the line holds everywhere."""

    name: str
    version: str
    line: int
    marker: str = ""
    hashes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFault:
    line: int
    what: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """What a lock file says. Only one without faults may be used."""

    sha256: str
    pins: tuple[Pin, ...]
    faults: tuple[LockFault, ...]

    def for_host(self, markers: dict[str, str]) -> tuple[Pin, ...]:
        """The pins that hold where `markers` are what PEP 508 calls the environment. pip would judge them by this machine's."""
        return tuple(pin for pin in self.pins if not pin.marker or Requirement(f"x; {pin.marker}").marker.evaluate(markers))  # type: ignore[union-attr]


def read_lock_file(path: Path) -> tuple[Lock, bytes]:
    """A lock and its bytes. OSError or ValueError with the reason when it can't be read."""
    with open(path, "rb") as file:
        data = file.read(LOCK_BYTES_MAX + 1)
    if len(data) > LOCK_BYTES_MAX:
        raise ValueError(f"it is over {LOCK_BYTES_MAX} bytes")
    return read_lock(data), data


def read_lock(data: bytes) -> Lock:
    """Every pin of a lock, and everything that is wrong with it."""
    pins: list[Pin] = []
    faults: list[LockFault] = []
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        text = ""
        faults.append(LockFault(line=1, what=f"byte {fault.start} is not UTF-8", fix="save the file as UTF-8 text"))
    for number, line in _logical_lines(text):
        found = _read_line(number, line)
        if isinstance(found, Pin):
            pins.append(found)
        else:
            faults.append(found)
    if not pins and not faults:
        faults.append(LockFault(line=1, what="it pins no package", fix="write it with pip freeze --all, pip-compile or uv pip compile"))
    if len(pins) > PINS_MAX:
        faults.append(LockFault(line=pins[PINS_MAX].line, what=f"more than {PINS_MAX} packages", fix="leave out what the trainer does not need"))
    faults += [*_repeated(pins), *_unhashed(pins)]
    return Lock(sha256=hashlib.sha256(data).hexdigest(), pins=tuple(pins), faults=tuple(sorted(faults, key=lambda fault: fault.line)))


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their number, joined where a backslash says so, without comments and empty ones; as pip reads them."""
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        is_comment = line.lstrip().startswith("#")
        first = first or number
        joined += "" if is_comment else line
        if joined.endswith("\\") and not is_comment:
            joined = joined[:-1] + " "
            continue
        if is_comment and joined:
            continue
        if stripped := _COMMENT.sub("", joined).strip():
            yield first, stripped
        first, joined = 0, ""
    if stripped := _COMMENT.sub("", joined).strip():
        yield first, stripped


def _read_line(number: int, line: str) -> Pin | LockFault:
    option = re.split(r"[=\s]", line, maxsplit=1)[0]
    if option.startswith("-"):
        what = _OPTIONS.get(option, f"{option} is a setting of pip, not a package")
        mend = _MEND.get(option[:2] if not option.startswith("--") else "-" + option[2], "")
        fix = mend or "set it in pip's own configuration (pip config set …): where packages come from is no part of a lock"
        return LockFault(line=number, what=what, fix=fix)
    hashes = tuple(_HASH.findall(line))
    text = _HASH.sub("", line).strip()
    shown = text if len(text) <= SHOWN_CHARACTERS_MAX else text[: SHOWN_CHARACTERS_MAX - 1] + "…"
    if " @ " in text or _LOCATION.search(text.partition(";")[0].strip()):
        # Never shown: it may carry a password.
        what, fix = "a package by its address", "pin it as name==version; a wheel of your own goes into a folder that `wheels` names"
        return LockFault(line=number, what=what, fix=fix)
    try:
        found = Requirement(text)
    except InvalidRequirement:
        return LockFault(line=number, what=f"{shown!r} is no package with a version", fix="write name==version")
    exact = [each for each in found.specifier if each.operator in ("==", "===")]
    if len(found.specifier) != 1 or len(exact) != 1 or not _is_version(exact[0].version):
        what = f"{shown!r} names no one version"
        return LockFault(line=number, what=what, fix=f"write {found.name}==VERSION, such as with pip freeze --all or pip-compile")
    wrong = next((value for value in hashes if not _HASH_VALUE.fullmatch(value)), None)
    if wrong is not None:
        return LockFault(line=number, what=f"--hash={wrong[:24]}… is no SHA-2 digest", fix="write --hash=sha256: and 64 hexadecimal digits")
    return Pin(name=canonicalize_name(found.name), version=exact[0].version, line=number, marker=str(found.marker or ""), hashes=hashes)


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _repeated(pins: list[Pin]) -> Iterator[LockFault]:
    """One package twice under the same marker: one of the two lines could never hold."""
    seen: dict[tuple[str, str], Pin] = {}
    for pin in pins:
        first = seen.setdefault((pin.name, pin.marker), pin)
        if first is not pin:
            yield LockFault(line=pin.line, what=f"{pin.name} stands in line {first.line} already", fix="remove one of the two")


def _unhashed(pins: list[Pin]) -> Iterator[LockFault]:
    """As pip has it: one hash asks for all of them."""
    if any(pin.hashes for pin in pins):
        for pin in pins:
            if not pin.hashes:
                fix = "pip-compile --generate-hashes, or no hashes at all"
                yield LockFault(line=pin.line, what=f"{pin} has no --hash, and others have one", fix=fix)
