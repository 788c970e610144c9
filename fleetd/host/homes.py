"""The home of a supervisor: a unit of its own where systemd is the init and `fleetd-run@.service` is installed, else a detached process.

    root               fleetd-run@….service of the system's manager
    a user, lingering  fleetd-run@….service of that user's manager
    anybody else       detached: a user's manager ends with the last login, and would take the supervisor along
A unit is started again by systemd when it dies, and no out-of-memory kill in it ends the rest. The instance is the escaped run directory.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fleetd import logs
from fleetd.host import scopes
from fleetd.paths import RunPaths

TEMPLATE = "fleetd-run@.service"
SYSTEM_UNITS = tuple(Path(each) for each in ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"))
USER_UNITS = tuple(Path(each) for each in ("/etc/systemd/user", "/run/systemd/user", "/usr/lib/systemd/user", "/lib/systemd/user"))
UNIT_NAME_CHARACTERS_MAX = 255
SYSTEMCTL_SECONDS_MAX = 5.0
"""The shim asks too, and it keeps a deadline meanwhile. What is started late by systemd finds the run's lock taken, and leaves."""
OF_A_SESSION = re.compile(
    r"SSH_.*|XDG_SESSION_.*|XDG_VTNR|XDG_SEAT|NOTIFY_SOCKET|WATCHDOG_.*|INVOCATION_ID|JOURNAL_STREAM|CREDENTIALS_DIRECTORY|MAINPID|SYSTEMD_EXEC_PID|_",
)
"""Variables that are true only of the login or unit that an agent happens to run in."""
ENV_COMMAND = "FLEETD_SUPERVISOR"
"""The whole command in one variable: systemd splits it into its words again. Which one it is depends on the release of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    unit: str
    manager: str
    options: tuple[str, ...]
    environment: dict[str, str]


def home_of(run_dir: Path) -> Home | str:
    """The unit that a supervisor of this run can live in here, or why there is none."""
    if not scopes.SYSTEMD_RUNS.is_dir():
        return "systemd does not run here"
    is_root = os.geteuid() == 0
    folders = SYSTEM_UNITS if is_root else (Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "systemd/user", *USER_UNITS)
    if not any((folder / TEMPLATE).exists() for folder in folders):
        return f"{TEMPLATE} is not installed"
    unit = TEMPLATE.replace("@", f"@{escape(run_dir)}")
    if len(unit) > UNIT_NAME_CHARACTERS_MAX:
        return f"the name of its unit would have {len(unit)} characters"
    if is_root:
        return Home(unit=unit, manager="system", options=(), environment={})
    reached = scopes.user_manager()
    if isinstance(reached, str):
        return reached
    return Home(unit=unit, manager="user", options=("--user",), environment=reached)


def start_in_unit(run_dir: Path, argv: tuple[str, ...], environment: dict[str, str]) -> int | None:
    """Start the supervisor's unit. Its pid, 0 where it has left already; None when it has to live elsewhere, and the log says why."""
    home = home_of(run_dir)
    if isinstance(home, str):
        return None
    try:
        _write_environment(RunPaths(run_dir).supervisor_environment, {**environment, ENV_COMMAND: shlex.join(argv)})
        _systemctl(home, "start", home.unit)
        pid = _systemctl(home, "show", "--property=MainPID", "--value", home.unit)
    except (OSError, ValueError, subprocess.SubprocessError) as fault:
        said = fault.stderr.strip() if isinstance(fault, subprocess.CalledProcessError) else fault
        logs.failed("unit_not_started", unit=home.unit, because=said)
        return None
    logs.changed("unit_started", unit=home.unit, manager=home.manager, pid=pid)
    return int(pid or 0)


def own_home() -> str:
    """Where this process lives, for its log: the unit and whose manager, or `detached`."""
    try:
        places = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "unknown"
    found = re.search(r"/(fleetd-run@[^/\n]+\.service)", places)
    if found is None:
        return "detached"
    manager = "user" if re.search(r"/user@\d+\.service/", places) else "system"
    return f"{found[1]} of the {manager} manager"


def escape(path: Path) -> str:
    """A path as the instance of a unit (systemd.unit(5), string escaping for inclusion in unit names)."""
    text = os.fsencode(os.path.normpath(path)).strip(b"/")
    plain = re.compile(rb"[A-Za-z0-9:_.]")
    parts = [b"-" if byte == b"/" else byte if plain.fullmatch(byte) else b"\\x%02x" % byte[0] for byte in (text[i:i + 1] for i in range(len(text)))]
    if parts and parts[0] == b".":
        parts[0] = b"\\x2e"
    return b"".join(parts).decode("ascii") or "-"


def _systemctl(home: Home, *arguments: str) -> str:
    done = subprocess.run(
        ["systemctl", *home.options, *arguments], env={**os.environ, **home.environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=SYSTEMCTL_SECONDS_MAX, check=True,
    )
    return done.stdout.strip()


def _write_environment(path: Path, environment: dict[str, str]) -> None:
    """What the unit hands to its supervisor. Only its user may read it: a trainer's settings may be among it."""
    lines = [f"{name}={_quoted(value)}\n" for name, value in sorted(environment.items()) if not OF_A_SESSION.fullmatch(name) and name.isidentifier()]
    temporary = path.with_name(f".{path.name}-{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.writelines(lines)
    os.replace(temporary, path)


def _quoted(value: str) -> str:
    """In double quotes, as EnvironmentFile= reads it (systemd.exec(5))."""
    return '"' + re.sub(r'(["\\`$])', r"\\\1", value) + '"'
