"""How a host process is started from another: detached, from the release its run names. An engine such as Slurm would replace this file."""

from __future__ import annotations

import os
import pwd
import signal
import sys
from pathlib import Path
from typing import NoReturn

import fleetd
from fleetd import faults
from fleetd.host.homes import start_in_unit
from fleetd.host.rundir import read_spec
from fleetd.paths import HostPaths, RunPaths
from policies.facts import (
    ENV_MEMORY_CAP_BYTES,
    ENV_RESUME,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_TRAIN_CUTOFF,
    ENV_TRAIN_CUTOFF_BOOTTIME,
    ENV_TREE_TOKEN,
)

CONTRACT_VARIABLES = (
    ENV_RUN_DIR, ENV_RUN_ID, ENV_RESUME, ENV_MEMORY_CAP_BYTES, ENV_TRAIN_CUTOFF, ENV_TRAIN_CUTOFF_BOOTTIME, ENV_TREE_TOKEN,
)
ANSWER_BYTES_MAX = 64
RESET_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD)


def release_folder(root: Path, digest: str) -> Path:
    """`<root>/releases/<digest>` when it exists, else where the running code lies."""
    staged = HostPaths(root).releases / digest
    return staged if digest and staged.is_dir() else Path(fleetd.__file__).resolve().parent.parent


def program_argv(release: Path, module: str, *arguments: str) -> tuple[str, ...]:
    """`python3 -I <release>/fleetd/host/__main__.py MODULE ...`; a release from before that door existed is entered as it was then."""
    door = release / "fleetd" / "host" / "__main__.py"
    if not door.exists():
        return (sys.executable, "-m", f"fleetd.host.{module}", *arguments)
    return (sys.executable, "-I", str(door), module, *arguments)


def program_environment(release: Path) -> dict[str, str]:
    """Our own environment without a tree token, for supervisors and shims. The release is on the path only where it asks for that."""
    environment = {name: value for name, value in os.environ.items() if name not in (*CONTRACT_VARIABLES, "PYTHONPATH")}
    door = release / "fleetd" / "host" / "__main__.py"
    return environment if door.exists() else {**environment, "PYTHONPATH": str(release)}


def start_supervisor(run_dir: Path) -> int:
    """Start `fleetd.host.supervisor RUN_DIR` in a unit of its own where one can be had, else detached: own session, no parent, stdin null,
    stderr into supervisor.log. Returns its pid.

    OSError when it could not be executed. Whether it got the run's lock is to be seen in `lock` and heartbeat.json.
    """
    run_dir = run_dir.resolve()
    paths = RunPaths(run_dir)
    release = release_folder(run_dir.parent.parent, read_spec(paths).release_digest)
    argv, environment = program_argv(release, "supervisor", str(run_dir)), program_environment(release)
    pid = start_in_unit(run_dir, argv, environment)
    return pid if pid is not None else start_detached(argv, environment, paths.supervisor_log)


def start_detached(argv: tuple[str, ...], environment: dict[str, str], output: Path, *, folder: str = "/", uid: int | None = None) -> int:
    """Execute `argv` in `folder` in a session of its own without a parent that waits for it, as `uid` where one is given. Returns its pid;
    OSError when exec failed. A name without a slash is looked for along the PATH of `environment`.

    Two forks: the first child makes the session and ends at once, the second is nobody's child (or that of a subreaper).
    """
    faults.before(f"{output.name} open")
    log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    reader, writer = os.pipe()
    try:
        child = os.fork()
        if child == 0:
            _detach(argv, environment, (null, log, writer), folder, uid)
        os.close(writer)
        writer = -1
        os.waitpid(child, 0)
        faults.after("program started")
        return _answer(reader, argv)
    finally:
        for descriptor in (log, null, reader, writer):
            if descriptor >= 0:
                os.close(descriptor)


def reset_signals() -> None:
    """Between fork and exec: the next program starts with the defaults, whatever this one handles, ignores or blocks."""
    for number in RESET_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _detach(argv: tuple[str, ...], environment: dict[str, str], ends: tuple[int, int, int], folder: str, uid: int | None) -> NoReturn:
    null, log, writer = ends
    try:
        os.setsid()
        if (grandchild := os.fork()) != 0:
            os.write(writer, b"pid %d\n" % grandchild)
            os._exit(0)
        reset_signals()
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        if uid is not None and uid != os.geteuid():
            _become(uid)
        os.chdir(folder)
        os.execvpe(argv[0], argv, environment)  # noqa: S606  (an exact argv is the point)
    except OSError as fault:
        os.write(writer, b"errno %d\n" % (fault.errno or 0))
    finally:
        os._exit(127)


def _become(uid: int) -> None:
    """Another user with the groups that are theirs. Only root can."""
    try:
        entry = pwd.getpwuid(uid)
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
    except KeyError:
        os.setgroups([])
        os.setgid(uid)
    os.setuid(uid)


def _answer(reader: int, argv: tuple[str, ...]) -> int:
    """The pipe closes at the exec: a pid alone is success, an errno beside it is the reason of the failure."""
    text = b""
    while len(text) < ANSWER_BYTES_MAX and (part := os.read(reader, ANSWER_BYTES_MAX)):
        text += part
    words = dict(line.split(b" ", 1) for line in text.splitlines())
    if b"errno" in words or b"pid" not in words:
        number = int(words.get(b"errno", b"0"))
        raise OSError(number, os.strerror(number), argv[0])
    return int(words[b"pid"])
