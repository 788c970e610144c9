"""What pip says, read for the person who has to act on it: which package, and why. For both ends, since both run pip."""

from __future__ import annotations

import re
from dataclasses import dataclass

from policies.errors import DataDamaged, ExplainedError, NoRoom, RequestRefused

QUOTED_CHARACTERS_MAX = 600
QUOTED_LINES_MAX = 8

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/\s@'\"]*@)?([^\s?#'\"]*)(?:[?#][^\s'\"]*)?")
_NO_WHEEL = re.compile(r"No matching distribution found for (\S+)")
_WRONG_HASH = re.compile(r"^\s+([A-Za-z0-9][^\s]*)[^\n]*:\n\s+Expected sha\d+", re.MULTILINE)
_NO_NETWORK = re.compile(
    r"NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|Max retries exceeded|ProxyError|SSLError|Could not fetch URL")
_NO_ROOM = re.compile(r"\[Errno (?:28|122)\]|No space left on device")
_MISSING = re.compile(r"^(\S+) \S+ requires (\S+), which is not installed", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipFault:
    """Why pip gave up, as far as its words tell. `package` is empty where they name none."""

    kind: type[ExplainedError]
    title: str
    package: str
    words: str


def pip_fault(output: str) -> PipFault:
    """The first reason in pip's output that a person can act on, else its last words."""
    words = last_words(output)
    if _NO_ROOM.search(output):
        return PipFault(kind=NoRoom, title="no room for the packages", package="", words=words)
    wrong = _WRONG_HASH.search(output)
    if wrong is not None:
        title = f"the bytes of {wrong[1]} are not those that the lock names"
        return PipFault(kind=DataDamaged, title=title, package=wrong[1], words=words)
    missing = _NO_WHEEL.search(output)
    if missing is not None and _NO_NETWORK.search(output):
        return PipFault(kind=RequestRefused, title="the package index can't be reached", package=missing[1], words=words)
    if missing is not None:
        return PipFault(kind=RequestRefused, title=f"there is no wheel of {missing[1]}", package=missing[1], words=words)
    return PipFault(kind=RequestRefused, title="pip has failed", package="", words=words)


def missing_packages(output: str) -> tuple[str, ...]:
    """What `pip check` misses: `numpy (for torch)`."""
    return tuple(f"{wanted} (for {package})" for package, wanted in _MISSING.findall(output))


def last_words(output: str) -> str:
    """The end of an output in one line, its errors alone where it marks them, without addresses' secrets."""
    lines = [line.strip() for line in without_secrets(output).splitlines() if line.strip() and not line.strip().startswith("[notice]")]
    errors = [line for line in lines if line.startswith("ERROR:")]
    shown = " / ".join((errors or lines)[-QUOTED_LINES_MAX:])
    return shown if len(shown) <= QUOTED_CHARACTERS_MAX else "…" + shown[-QUOTED_CHARACTERS_MAX:]


def without_secrets(text: str) -> str:
    """The text, its addresses without user, password and query: what pip says is shown and kept in logs."""
    return _ADDRESS.sub(r"\1\2", text)
