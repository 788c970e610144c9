"""`fleetd service install|status|uninstall`: the coordinator as a systemd service, of the whole machine or of one user.

Everything it does is said, one line each; doing it again changes nothing; what it did not install it does not touch.
"""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from fleetd.paths import SYSTEM_STATE, StatePaths, state_root
from fleetd.screens import service_files, terminal
from fleetd.screens.service_files import COORDINATOR, RUN, SWEEP, TIMER, Service, Standing
from policies.errors import EXIT_ERROR, EXIT_NOT_FOUND, EXIT_OK, EXIT_UNFINISHED, ExplainedError, PlanInvalid, RequestRefused

SYSTEMCTL_SECONDS_MAX = 700.0
"""A start waits until the coordinator answers, which takes as long as its history is."""
LOOK_SECONDS = 1.0
AT_REST = ("stopped", "finished", "failed", "lost")
"""Where a stop leads, and where it can't be waited for: a silent host gets the order when it answers."""
LINGERING = Path("/var/lib/systemd/linger")
SYSTEMD_RUNS = Path("/run/systemd/system")
SHOWN = ("LoadState", "ActiveState", "SubState", "Result", "StatusText", "MainPID", "NRestarts", "ControlGroup", "WatchdogUSec")
UNLIMITED_BYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
OfUser = Annotated[bool | None, typer.Option("--user/--system", help="This user's own service, or the machine's. [default: --system for root]")]

app = typer.Typer(help="The coordinator as a systemd service.", no_args_is_help=True, rich_markup_mode=None)


def add_to(parent: typer.Typer) -> None:
    app.command()(install)
    app.command()(status)
    app.command()(uninstall)
    app.command("print")(print_unit)
    app.command("stop-runs", hidden=True)(stop_runs)
    parent.add_typer(app, name="service")


def install(
    of_user: OfUser = None,
    account: Annotated[str, typer.Option("--account", metavar="NAME", help="Who the machine's service runs as.")] = "fleetd",
    socket_group: Annotated[str | None, typer.Option(metavar="GROUP", help="Who may talk to it. [default: the account's group]")] = None,
    credential: Annotated[list[str] | None, typer.Option(metavar="NAME=PATH", help="A secret that only the service may read.")] = None,
    stop_runs_too: Annotated[bool, typer.Option("--stop-runs", help="Stopping the service saves and stops every run first.")] = False,
    root: Annotated[list[Path] | None, typer.Option(metavar="DIR", help="A host's root on this machine, swept each minute.")] = None,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Enable and start it now.")] = True,
) -> int:
    """Install the coordinator's service, start it, and see it answer. Runs on hosts do not notice, unless --stop-runs asks for that."""
    is_system = _is_system(of_user)
    manager = _Manager(is_system)  # first of all: where there is none, nothing is written
    roots, owner = _roots(root or [])
    service = Service(
        is_system=is_system, python=sys.executable, state=SYSTEM_STATE if is_system else state_root().absolute(), user=account,
        socket_group=socket_group or (account if is_system else None), credentials=tuple(_credential(each) for each in credential or []),
        stops_runs=stop_runs_too, roots=roots, roots_owner=owner,
    )
    files = service.files()
    service_files.refuse_foreign(list(files))
    done = {path: service_files.write(path, text) for path, text in files.items()}
    for path, what in done.items():
        terminal.say(f"{what:9} {path}")
    if any(path.parent == service_files.accounts_folder() for path in done):
        _act(["systemd-sysusers", str(service_files.accounts_folder() / service_files.ACCOUNT)])
    manager.act("daemon-reload")
    if start:
        for unit in (COORDINATOR, *([TIMER] if roots else [])):
            manager.act("enable", "--now", unit)
        if done[service.folder / COORDINATOR] == "replaced":
            manager.act("restart", COORDINATOR)
    _say_what_is_left(service, started=start)
    return EXIT_OK


def status(of_user: OfUser = None, as_json: AsJson = False) -> int:
    """Say whether the service is installed, runs and answers, and which limits its cgroup really has."""
    is_system = _shows_system() if of_user is None else not of_user
    manager = _Manager(is_system)
    found = manager.show(COORDINATOR)
    files = {str(path): service_files.standing(path).value for path in _paths(manager.is_system)}
    body = {
        "manager": manager.name, "state_dir": str(SYSTEM_STATE if manager.is_system else state_root()), "unit": found, "files": files,
        "memory_limit_bytes": _memory_limit(found["ControlGroup"]), "lingers": None if manager.is_system else _lingers(),
    }
    if as_json:
        terminal.emit(body)
    else:
        terminal.say(f"{COORDINATOR} of {manager.name}: {found['ActiveState']} ({found['SubState']}), result {found['Result']}")
        terminal.say(f"  {found['StatusText'] or 'it says nothing'} · pid {found['MainPID']} · restarts {found['NRestarts']}")
        limit = body["memory_limit_bytes"]
        terminal.say(f"  memory limit, read back from its cgroup: {limit if limit is not None else 'none'}")
        if body["lingers"] is False:
            terminal.say(f"  it ends with your last login: loginctl enable-linger {getpass.getuser()}")
        for path, what in files.items():
            terminal.say(f"  {what:15} {path}")
    if files[str(service_files.units_folder(is_system=manager.is_system) / COORDINATOR)] == Standing.ABSENT.value:
        return EXIT_NOT_FOUND
    return EXIT_OK if found["ActiveState"] == "active" else EXIT_ERROR


def uninstall(of_user: OfUser = None) -> int:
    """Stop the service and take away what `install` wrote. Runs go on, unless --stop-runs was asked for; the state directory and the account stay."""
    manager = _Manager(_is_system(of_user))
    ours = [path for path in _paths(manager.is_system) if service_files.standing(path) is Standing.OURS]
    for unit in (TIMER, COORDINATOR):
        if any(path.name == unit for path in ours):
            manager.act("disable", "--now", unit)
    for path in _paths(manager.is_system):
        found = service_files.standing(path)
        if found is Standing.OURS:
            path.unlink()
            terminal.say(f"removed   {path}")
        elif found is not Standing.ABSENT:
            terminal.say(f"left      {path}   ({found.value})")
    if not ours:
        terminal.say("nothing of it was installed")
        return EXIT_OK
    manager.act("daemon-reload")
    terminal.say(f"left      {SYSTEM_STATE if manager.is_system else state_root()}   (history, choices and copies; yours to remove)")
    return EXIT_OK


def print_unit() -> int:
    """Print the unit in which supervisors live, for a host without an installation of its own."""
    where = state_root().absolute()
    typer.echo(Service(is_system=True, python=sys.executable, state=where).render(RUN), nl=False)
    return EXIT_OK


def stop_runs(seconds: Annotated[int, typer.Option(help="How long to wait for the saves.")]) -> int:
    """Stop every run after a save, and wait until they have. Used by the service where its operator asked for it."""
    end = time.monotonic() + seconds
    with terminal.connect() as client:
        names = client.stop("all", "graceful", "service")["runs"]
        while at_work := [run for run in client.status()["runs"] if run["run_id"] in names and run["state"] not in AT_REST]:
            if time.monotonic() > end:
                terminal.say(f"still at work: {', '.join(str(run['candidate']) for run in at_work)}", talk=True)
                return EXIT_UNFINISHED
            time.sleep(LOOK_SECONDS)
    return EXIT_OK


class _Manager:
    """The service manager of the machine or of this user. Every act is said before it is done."""

    def __init__(self, is_system: bool) -> None:
        self.is_system = is_system
        self.name = "the system's manager" if is_system else f"the manager of user {getpass.getuser()}"
        self._argv = ["systemctl", *([] if is_system else ["--user"])]
        if shutil.which("systemctl") is None or not SYSTEMD_RUNS.is_dir():
            fix = "fleetd daemon start; or an entry of your own init that runs `fleetd daemon`"
            raise RequestRefused("systemd does not run here", where=str(SYSTEMD_RUNS), what="there is no service manager to ask", fix=fix)

    def act(self, *arguments: str) -> None:
        _act([*self._argv, *arguments])

    def show(self, unit: str) -> dict[str, str]:
        done = _run([*self._argv, "show", *(f"--property={name}" for name in SHOWN), unit])
        found = dict(line.partition("=")[::2] for line in done.stdout.splitlines())
        return {name: found.get(name, "") for name in SHOWN}


def _is_system(of_user: bool | None) -> bool:
    is_system = os.geteuid() == 0 if of_user is None else not of_user
    if is_system and os.geteuid() != 0:
        raise RequestRefused("the machine's service is root's to change", where="fleetd service", what=f"you are {getpass.getuser()}",
                             fix="sudo fleetd service …, or fleetd service … --user")
    return is_system


def _shows_system() -> bool:
    """Whose service a person means who did not say: their own if there is one, else the machine's. Anybody may look."""
    own = service_files.units_folder(is_system=False) / COORDINATOR
    return os.geteuid() == 0 or (not own.exists() and (service_files.units_folder(is_system=True) / COORDINATOR).exists())


def _roots(given: list[Path]) -> tuple[tuple[str, ...], str]:
    """The roots as absolute paths, and the one user whose runs they hold: a supervisor must never be started as anybody else."""
    if not given:
        return (), ""
    missing = next((each for each in given if not each.is_dir()), None)
    if missing is not None:
        raise PlanInvalid("there is no such root", where=str(missing), what="no directory", fix="launch something there first, or name another one")
    owners = {each.stat().st_uid for each in given}
    if len(owners) > 1:
        raise PlanInvalid("the roots belong to different users", where=", ".join(map(str, given)), what=f"users {sorted(owners)}",
                          fix="fleetd service install --user, as each of them")
    return tuple(str(each.absolute()) for each in given), pwd.getpwuid(owners.pop()).pw_name


def _credential(text: str) -> str:
    name, equals, path = text.partition("=")
    if not (equals and name.replace("-", "").replace("_", "").isalnum() and path.startswith("/")):
        raise PlanInvalid("a credential can't be read", where=f"--credential {text}", what="it is not NAME=/ABSOLUTE/PATH",
                          fix="fleetd service install --credential ssh-key=/etc/fleetd/id_ed25519")
    if not Path(path).is_file():
        fix = "write it first, readable by root only"
        raise PlanInvalid("a credential is not there", where=path, what="no file; the service would not start", fix=fix)
    return f"{name}:{path}"


def _paths(is_system: bool) -> list[Path]:
    folder = service_files.units_folder(is_system=is_system)
    account = [service_files.accounts_folder() / service_files.ACCOUNT] if is_system else []
    return [*(folder / name for name in (COORDINATOR, RUN, SWEEP, TIMER)), *account]


def _memory_limit(group: str) -> int | None:
    """What the kernel holds it to: the limit that a unit file asks for is no proof of one."""
    if not group:
        return None
    for path in (f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes", f"/sys/fs/cgroup{group}/memory.max"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        return None if text == "max" or int(text) >= UNLIMITED_BYTES else int(text)
    return None


def _lingers() -> bool:
    return (LINGERING / getpass.getuser()).exists()


def _say_what_is_left(service: Service, *, started: bool) -> None:
    where = f"state {service.state}, socket {StatePaths(service.state).socket}"
    group = service.socket_group
    who = f"open to group {group}: usermod --append --groups {group} YOU" if group else "open to you alone"
    terminal.say(f"{'running' if started else 'installed'}: {where}, {who}")
    if not service.is_system and not _lingers():
        terminal.say(f"it ends with your last login until you say: loginctl enable-linger {getpass.getuser()}")


def _act(argv: list[str]) -> None:
    terminal.say(f"run       {' '.join(argv)}")
    done = _run(argv)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split())[-400:] or f"exit status {done.returncode}"
        journal = "journalctl --user" if "--user" in argv else "sudo journalctl"
        raise ExplainedError(f"{argv[0]} refused", where=" ".join(argv), what=said, fix=f"{journal} -u {COORDINATOR} -e")


def _run(argv: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SYSTEMCTL_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise ExplainedError(f"{argv[0]} can't be asked", where=" ".join(argv), what=str(fault), fix="systemctl is-system-running") from fault
