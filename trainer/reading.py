"""Settings from JSON: every key asked for by name, every fault noted, all faults told at once.

A `Reader` stands on one object of the document. What nobody asked for is unknown, and answered with the nearest known key.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

_REQUIRED: Any = object()
_MISSING: Any = object()
T = TypeVar("T")


@dataclass(slots=True)
class Reader:
    """One object of a settings file. `faults` is shared by all readers of the file, in the order of finding."""

    body: dict[str, Any]
    path: str
    faults: list[str]
    asked: list[str] = field(default_factory=list)

    def integer(self, key: str, *, minimum: int, maximum: int = 2**53, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default)
        if value is _MISSING or value is default:
            return default
        if type(value) is not int:
            return self._fault(key, f"an integer is needed, not {value!r}", minimum)
        if not minimum <= value <= maximum:
            return self._fault(key, f"{value} is outside {minimum} to {maximum}", minimum)
        return value

    def number(self, key: str, *, above: float = -math.inf, minimum: float = -math.inf, maximum: float = math.inf, default: Any = _REQUIRED) -> Any:
        value = self._take(key, default)
        if value is _MISSING or value is default:
            return default
        if type(value) not in (int, float) or not math.isfinite(value):
            return self._fault(key, f"a number is needed, not {value!r}", 1.0)
        if not (value > above and minimum <= value <= maximum):
            bounds = f"above {above}" if above > -math.inf else f"at least {minimum}"
            return self._fault(key, f"{value} must be {bounds} and at most {maximum}", 1.0)
        return float(value)

    def text(self, key: str, *, choices: tuple[str, ...] = (), default: Any = _REQUIRED) -> Any:
        value = self._take(key, default)
        if value is _MISSING or value is default:
            return default
        if not isinstance(value, str) or not value:
            return self._fault(key, f"a word is needed, not {value!r}", "")
        if choices and value not in choices:
            return self._fault(key, f"{value!r} is none of {', '.join(choices)}{_nearest(value, choices)}", choices[0])
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self._take(key, default)
        if not isinstance(value, bool):
            return self._fault(key, f"true or false is needed, not {value!r}", default)
        return value

    def section(self, key: str, *, required: bool = True) -> Reader | None:
        """The reader of an object below, None when it is absent and need not be there."""
        value = self._take(key, _REQUIRED if required else None)
        if value is _MISSING or (value is None and not required):
            return None
        if not isinstance(value, dict):
            self.faults.append(f"{self._name(key)}: an object is needed, not {value!r}")
            return None
        return Reader(value, self._name(key), self.faults)

    def pair(self, key: str, *, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers in [0, 1)."""
        value = self._take(key, default)
        if value is _MISSING or value is default:
            return default
        if isinstance(value, list) and len(value) == 2 and all(type(item) in (int, float) and 0 <= item < 1 for item in value):
            return (float(value[0]), float(value[1]))
        return self._fault(key, f"two numbers of at least 0 and below 1 are needed, not {value!r}", default)

    def anything(self, key: str) -> Any:
        value = self._take(key, None)
        return None if value is _MISSING else value

    def finish(self) -> None:
        """Note every key that nobody asked for."""
        for key in self.body:
            if key not in self.asked:
                self.faults.append(f"{self._name(key)}: unknown key{_nearest(key, self.asked)}")

    def _take(self, key: str, default: Any) -> Any:
        self.asked.append(key)
        if key in self.body:
            value = self.body[key]
            return default if value is None and default is not _REQUIRED else value
        if default is _REQUIRED:
            self.faults.append(f"{self._name(key)}: missing")
            return _MISSING
        return default

    def _fault(self, key: str, what: str, stand_in: T) -> T:
        self.faults.append(f"{self._name(key)}: {what}")
        return stand_in

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""
