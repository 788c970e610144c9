"""How a trainer comes into the world: forked, put into its session and cgroup, held at a gate until it is on record, then exec.

    shim                                trainer-to-be
    fork ─────────────────────────────► setsid, join the cgroup, streams
    read "joined" ◄──────────────────── says so, waits at the gate
    write attempt.json (durable)
    open the gate ────────────────────► chdir, exec        (the pipe closes: it runs; a line in it: why not)
If the shim dies before the gate opens, the child reads the end of the pipe and leaves: no trainer ever runs unrecorded. With a scope
(fleetd.host.scopes) the child executes systemd-run before it stands at the gate, and the gate is a program in the scope.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from fleetd import clock, faults
from fleetd.host import cgroups, scopes
from fleetd.host.launch import CONTRACT_VARIABLES, release_folder, reset_signals
from fleetd.host.rundir import effective_cutoff, read_cutoff
from fleetd.model import RunSpec
from fleetd.paths import RunPaths
from policies.facts import (
    ENV_MEMORY_CAP_BYTES,
    ENV_RESUME,
    ENV_RUN_DIR,
    ENV_RUN_ID,
    ENV_TRAIN_CUTOFF,
    ENV_TRAIN_CUTOFF_BOOTTIME,
    ENV_TREE_TOKEN,
    format_moment,
)

EXIT_NOT_STARTED = 127
_GATE = """
import os, signal, sys
gate, report, folder, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
subject = folder
try:
    os.dup2(1, 2)
    os.write(report, b"joined")
    if os.read(gate, 1) != b"g":
        os._exit(127)
    os.close(gate)
    os.set_inheritable(report, False)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.chdir(folder)
    subject = argv[0]
    os.execvp(argv[0], argv)
except Exception as fault:
    os.write(report, f"{subject}: {getattr(fault, 'strerror', None) or fault}".encode()[:4096])
finally:
    os._exit(127)
"""
"""The same as `_become` from the gate on, as a program: systemd-run executes it once its process is in the scope."""
REPORT_BYTES_MAX = 4096
OOM_SCORE_ADJUSTMENT = 300
"""If the whole machine runs out, the kernel should take a trainer, which resumes, before the processes that watch it."""


class ScopeRefused(OSError):
    """The service manager made no scope; the child that asked for it has ended and was reaped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newborn:
    """A child at the gate. `report` closes at its exec; `join_errno` is set when the kernel refused the cgroup."""

    pid: int
    gate: int
    report: int
    join_errno: int | None

    def open_gate(self) -> None:
        """Let it exec. A child that has died meanwhile is no error: its exit will say so."""
        faults.after("gate reached")
        try:
            os.write(self.gate, b"g")
        except BrokenPipeError:
            pass
        os.close(self.gate)

    def send_away(self) -> None:
        """Close the gate for good: the child leaves with EXIT_NOT_STARTED."""
        os.close(self.gate)


def trainer_environment(
    paths: RunPaths, spec: RunSpec, *, token: str, resume: str, inherited: dict[str, str], cutoff_boottime_seconds: float | None = None,
) -> dict[str, str]:
    """What the trainer gets: the inherited environment without ours, then the order's, then the contract.

    Our packages are on the path of our own trainer only (it is known by its task.json), never on that of a user's command.
    """
    environment = {name: value for name, value in inherited.items() if name not in CONTRACT_VARIABLES and name != "PYTHONPATH"}
    environment = {**environment, "PYTHONUNBUFFERED": "1", **spec.environment}
    if paths.task.exists():
        release = str(release_folder(paths.root.parent.parent, spec.release_digest))
        environment["PYTHONPATH"] = os.pathsep.join(part for part in (release, environment.get("PYTHONPATH")) if part)
    environment |= {
        ENV_RUN_DIR: str(paths.root), ENV_RUN_ID: spec.run_id, ENV_RESUME: resume, ENV_MEMORY_CAP_BYTES: str(spec.caps.accelerator_bytes),
        ENV_TREE_TOKEN: token,
    }
    cutoff_at = effective_cutoff(spec, read_cutoff(paths))
    if cutoff_at is not None:
        environment[ENV_TRAIN_CUTOFF] = format_moment(cutoff_at)
    if cutoff_boottime_seconds is not None:
        environment[ENV_TRAIN_CUTOFF_BOOTTIME] = f"{cutoff_boottime_seconds:.3f}"
    return environment


def conceive(
    argv: tuple[str, ...], environment: dict[str, str], *, folder: Path, output: Path, group: cgroups.Group, lock: int | None,
    holds_signals: bool = False, scope: scopes.Scope | None = None,
) -> Newborn:
    """Fork a child and wait until it stands at the gate. OSError when there is no process or file to be had, ScopeRefused where the scope
    can't be.

    `holds_signals`: the program takes SIGTERM and SIGINT over itself, so they wait for it while it starts instead of ending it.
    """
    faults.before("stdout.log")
    log = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    gate_reader, gate_writer = os.pipe()
    report_reader, report_writer = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            os.close(gate_writer)
            _become(argv, environment, folder=folder, streams=(null, log, log), group=group, lock=lock, gate=gate_reader, report=report_writer,
                    holds_signals=holds_signals, scope=scope)
    except OSError:
        os.close(gate_writer)
        os.close(report_reader)
        raise
    finally:
        for descriptor in (log, null, gate_reader, report_writer):
            os.close(descriptor)
    faults.after("trainer born")
    if scope is not None and (refusal := _refusal_of_scope(report_reader)) is not None:
        os.close(gate_writer)
        os.close(report_reader)
        _take_in(pid)
        raise ScopeRefused(refusal)
    word, _, number = (b"joined", b"", b"") if scope is not None else os.read(report_reader, REPORT_BYTES_MAX).partition(b" ")
    return Newborn(pid=pid, gate=gate_writer, report=report_reader, join_errno=int(number) if word == b"unjoined" else None)


def read_report(report: int) -> str | None:
    """Once `report` is readable: why the exec failed, or None when the program runs. Closes the pipe."""
    try:
        text = os.read(report, REPORT_BYTES_MAX).decode("utf-8", "replace").strip()
    finally:
        os.close(report)
    return text or None


def _become(
    argv: tuple[str, ...], environment: dict[str, str], *, folder: Path, streams: tuple[int, int, int], group: cgroups.Group, lock: int | None,
    gate: int, report: int, holds_signals: bool, scope: scopes.Scope | None,
) -> NoReturn:
    """The child's side. Nothing here may return or raise into the shim's own code."""
    subject: object = "the start"
    try:
        os.setsid()
        reset_signals()
        if holds_signals:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
        for target, source in enumerate(streams):
            os.dup2(source, target)
        if lock is not None:
            os.set_inheritable(lock, True)
        _prefer_as_victim()
        if scope is not None:
            subject = scope.command[0]
            _enter(scope, argv, environment, folder=folder, gate=gate, report=report)
        _join(group, report)
        if os.read(gate, 1) != b"g":
            os._exit(EXIT_NOT_STARTED)
        subject = folder
        os.chdir(folder)
        subject = argv[0]
        os.execvpe(argv[0], argv, environment)  # noqa: S606  (an exact argv is the point)
    except Exception as fault:  # also a NUL in an argument: whatever it is, the shim has to hear of it
        os.write(report, f"{subject}: {getattr(fault, 'strerror', None) or fault}".encode()[:REPORT_BYTES_MAX])
    finally:
        os._exit(EXIT_NOT_STARTED)


def _enter(scope: scopes.Scope, argv: tuple[str, ...], environment: dict[str, str], *, folder: Path, gate: int, report: int) -> NoReturn:
    """Become systemd-run, which becomes the gate inside of the scope. What systemd-run has to complain about goes to the shim."""
    for descriptor in (gate, report):
        os.set_inheritable(descriptor, True)
    os.dup2(report, 2)
    gatekeeper = (sys.executable, "-I", "-S", "-c", _GATE, str(gate), str(report), str(folder))
    os.execvpe(scope.command[0], (*scope.command, *gatekeeper, *argv), {**environment, **scope.environment})  # noqa: S606


def _refusal_of_scope(report: int) -> str | None:
    """None once the child stands at its gate in the scope; what systemd-run said when it ended or took too long."""
    said = b""
    give_up_seconds = clock.boottime_seconds() + scopes.SCOPE_SECONDS_MAX
    while not said.endswith(b"joined"):
        if not select.select([report], [], [], max(0.0, give_up_seconds - clock.boottime_seconds()))[0]:
            return f"systemd-run made no scope within {scopes.SCOPE_SECONDS_MAX:.0f} s"
        part = os.read(report, REPORT_BYTES_MAX)
        if not part:
            return " ".join(said.decode("utf-8", "replace").split())[:REPORT_BYTES_MAX] or "systemd-run ended without a word"
        said = (said + part)[-REPORT_BYTES_MAX:]
    return None


def _take_in(pid: int) -> None:
    """End and reap a child of ours: until it is reaped nobody else can have its pid."""
    descriptor = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)
    os.waitpid(pid, 0)


def _join(group: cgroups.Group, report: int) -> None:
    try:
        cgroups.join(group)
    except OSError as fault:
        os.write(report, b"unjoined %d" % (fault.errno or 0))
    else:
        os.write(report, b"joined")


def _prefer_as_victim() -> None:
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write(str(OOM_SCORE_ADJUSTMENT))
    except OSError:
        pass  # a wish, no promise
