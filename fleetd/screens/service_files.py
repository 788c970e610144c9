"""The unit files of `fleetd service`: what they say for this machine, where they go, and whose a file is that lies there already.

A file of ours begins with a line that names the digest of the rest. A file without it was made by somebody else; one whose rest has another
digest was changed by hand. Neither is ever written or removed.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from enum import Enum
from importlib import resources
from pathlib import Path

from fleetd.files import write_text
from policies.errors import RequestRefused

MARK = "# written by `fleetd service install`, sha256 of the rest: "
COORDINATOR, RUN, SWEEP, TIMER = "fleetd.service", "fleetd-run@.service", "fleetd-sweep.service", "fleetd-sweep.timer"
ACCOUNT = "fleetd.conf"
STOP_SECONDS = 1200
"""How long the saves of all runs may take where stopping the service stops them."""


class Standing(Enum):
    ABSENT = "absent"
    OURS = "ours"
    CHANGED = "changed by hand"
    FOREIGN = "not ours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is to be installed, and for whom."""

    is_system: bool
    python: str
    state: Path
    user: str = "fleetd"
    socket_group: str | None = None
    credentials: tuple[str, ...] = ()
    """`NAME:PATH`, each."""
    stops_runs: bool = False
    roots: tuple[str, ...] = ()
    """Of hosts on this machine, for the sweep."""
    roots_owner: str = ""

    @property
    def folder(self) -> Path:
        return units_folder(is_system=self.is_system)

    def files(self) -> dict[Path, str]:
        """Every file, whole, by its path."""
        names = [COORDINATOR, RUN, *([SWEEP, TIMER] if self.roots else [])]
        found = {self.folder / name: self.render(name) for name in names}
        if self.is_system and self.user == "fleetd":
            account = f'u {self.user} - "coordinator of training campaigns" {self.state} /bin/sh\n'
            found[accounts_folder() / ACCOUNT] = marked(f"# The user of {COORDINATOR}; it stays when the service goes.\n{account}")
        return found

    def render(self, name: str) -> str:
        text = resources.files("fleetd").joinpath("systemd", name).read_text(encoding="utf-8")
        parts = {"system": self.is_system, "stop-runs": self.stops_runs, "credentials": bool(self.credentials)}
        for part, is_kept in parts.items():
            inner = r"\1" if is_kept else ""
            text = re.sub(rf"^# \[{part}\]\n(.*?)^# \[/{part}\]\n", inner, text, flags=re.MULTILINE | re.DOTALL)
        if re.search(r"[\"'\\$]", self.python):
            what = "the path of a unit's program may hold no quote, no backslash and no $"
            raise RequestRefused("systemd can't start this interpreter", where=self.python, what=what, fix="install it below another path")
        values = {
            "PYTHON": word(self.python), "STATE": word(str(self.state)), "USER": self.user,
            "GROUP": self.socket_group or self.user,
            "DAEMON_OPTIONS": f" --socket-group {self.socket_group}" if self.socket_group else "",
            "STOP_SECONDS": str(STOP_SECONDS), "STOP_TIMEOUT": str(STOP_SECONDS + 60 if self.stops_runs else 30),
            "CREDENTIALS": "\n".join(f"LoadCredential={each}" for each in self.credentials),
            "ROOTS": " ".join(word(each) for each in self.roots), "OWNER": self.roots_owner,
            "WANTED_BY": "multi-user.target" if self.is_system else "default.target",
        }
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        assert not re.search(r"@[A-Z_]{3,}@|# \[", text), f"{name} has a place that nothing fills"
        return marked(text)


def word(text: str) -> str:
    """One word of a unit file: specifiers and variables taken literally, and quoted where it needs to be."""
    literal = text.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")
    return literal if re.fullmatch(r"[A-Za-z0-9_@%+=:,./$-]+", literal) else '"' + literal.replace('"', '\\"') + '"'


def marked(text: str) -> str:
    return f"{MARK}{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def standing(path: Path) -> Standing:
    """Whose the file at this path is."""
    try:
        found = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Standing.ABSENT
    first, _, rest = found.partition("\n")
    if not first.startswith(MARK):
        return Standing.FOREIGN
    return Standing.OURS if marked(rest) == found else Standing.CHANGED


def refuse_foreign(paths: list[Path]) -> None:
    """RequestRefused when one of these can't be replaced; before anything is written."""
    for path in paths:
        found = standing(path)
        if found in (Standing.FOREIGN, Standing.CHANGED):
            fix = f"keep what you need of it as a drop-in ({path}.d/own.conf), then: mv {path} {path}.old"
            raise RequestRefused("a file is in the way that is not ours to replace", where=str(path), what=f"it is {found.value}", fix=fix)


def write(path: Path, text: str) -> str:
    """Make the file say this. What was done: `wrote`, `replaced`, or `unchanged`."""
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before == text:
        return "unchanged"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    os.chmod(path, 0o644)
    return "wrote" if before is None else "replaced"


def units_folder(*, is_system: bool) -> Path:
    if is_system:
        return Path("/etc/systemd/system")
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd" / "user"


def accounts_folder() -> Path:
    return Path("/etc/sysusers.d")
