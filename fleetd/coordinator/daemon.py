"""The coordinator as a process: one for each state directory, in the foreground or detached, ended by SIGTERM.

    lock ── flock, held for life     coordinator.json ── id, and a generation that grows by one each start
    journal.db ── replayed           api.sock ── answers as soon as the first tick is done
Its end changes nothing on any host.
"""

from __future__ import annotations

import fcntl
import http.client
import importlib
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from fleetd import clock, logs
from fleetd.campaign import HostPlan
from fleetd.coordinator.api import SOCKET_PATH_BYTES_MAX, Api, build_status
from fleetd.coordinator.deliveries import Deliveries
from fleetd.coordinator.document import Daemon
from fleetd.coordinator.jobs import Jobs
from fleetd.coordinator.loop import Loop, Published
from fleetd.coordinator.releases import Releases, code_digest
from fleetd.coordinator.service_manager import ServiceManager
from fleetd.coordinator.sessions import LocalSession, Session
from fleetd.coordinator.ssh_session import SshSession
from fleetd.coordinator.tidying import forgotten_campaigns, tidy_state
from fleetd.files import read_record, write_record
from fleetd.journal import Journal
from fleetd.kept_clock import KeptClock
from fleetd.model import Owner
from fleetd.paths import CampaignPaths, StatePaths
from fleetd.wire import WireError, dumps, loads
from policies.errors import EXIT_BUG, EXIT_OK, ExplainedError, JournalDamaged, from_json
from policies.lifecycle import ACTIVE

ENV_READY = "FLEETD_READY_FD"
START_SECONDS_MAX, STOP_SECONDS_MAX = 120.0, 30.0
"""A start that fails is told at once. One that takes its time may be on a disk that needs seconds for each sync."""
LOCK_PATIENCE_SECONDS = 0.3
ANSWER_SECONDS_MAX = 5.0
ANSWER_LOOK_SECONDS = 0.1
ID_BYTES, LIFE_BYTES = 8, 4
READY_BYTES_MAX = 65536
CAMPAIGNS_SHOWN_MAX = 3
ENTRIES_PER_READ = 10_000

ReportWriter = Callable[[CampaignPaths, dict[str, Any]], tuple[Path, Path]]
"""Writes report.html and report.json of a campaign from a status document; it comes from the screens, which know how things look."""

# The first fork leaves the caller's family; the setsid came with start_new_session. -I and -S keep this helper quick.
_DETACH = "import os, sys\nif os.fork(): os._exit(0)\nos.execv(sys.argv[1], sys.argv[1:])"


def run_foreground(state_root: Path, write_report: ReportWriter | None = None, *, socket_group: str | None = None) -> int:
    """Be the coordinator of `state_root` until SIGTERM or SIGINT. ExplainedError when it can't be: another one runs, the journal is damaged.

    `socket_group`: who may talk to it beside its own user.
    """
    paths, manager = StatePaths(state_root), ServiceManager.from_environment()
    _make_root(paths)
    with _only_one(paths):
        logs.to_file(paths.log)
        tidy_state(paths)
        journal = Journal.open(paths.journal)
        try:
            _serve(paths, journal, write_report or report_writer_by_name, manager, socket_group)
        finally:
            journal.close()
    return EXIT_OK


def ensure_running(state_root: Path) -> tuple[int, bool]:
    """The pid of the coordinator of `state_root`, and whether it had to be started (detached, log in daemon.log). Returns once it answers."""
    paths = StatePaths(state_root)
    _make_root(paths)
    pid = answering_pid(paths)
    if pid is not None:
        return pid, False
    told, deadline = _start_detached(paths), time.monotonic() + START_SECONDS_MAX
    while told.get("error") == AlreadyRunning.__name__ and time.monotonic() < deadline:
        pid = answering_pid(paths)  # somebody else was starting one at the same moment
        if pid is not None:
            return pid, False
        time.sleep(0.1)
        told = told if _is_held(paths) else _start_detached(paths)  # whoever held the lock was only just ending
    if "error" in told:
        raise from_json(told)
    return int(told["pid"]), True


def stop_running(state_root: Path) -> int | None:
    """End the coordinator of `state_root` and return once its lock is free: its pid, None when none was running. Runs go on.

    It is asked through its own socket: no signal is sent by a number that stands in a file."""
    paths = StatePaths(state_root)
    pid = answering_pid(paths)
    if pid is None and not _is_held(paths):
        return None
    if pid is None or _ask_socket(paths, "POST", "/v1/shutdown") is None:
        held_by = paths.lock.read_text(encoding="ascii", errors="replace").strip() or "unknown"
        what = f"pid {held_by} holds {paths.lock}, and does not answer on its socket"
        fix = f"look at the end of {paths.log}; to end it all the same: kill {held_by}"
        raise ExplainedError("the coordinator can't be asked to stop", where=str(paths.root), what=what, fix=fix)
    deadline = time.monotonic() + STOP_SECONDS_MAX
    while _is_held(paths):
        if time.monotonic() > deadline:
            what, fix = f"pid {pid} still holds {paths.lock} after {STOP_SECONDS_MAX:.0f} s", f"look at the end of {paths.log}, then try again"
            raise ExplainedError("the coordinator has not ended yet", where=str(paths.root), what=what, fix=fix)
        time.sleep(0.05)
    return pid


def _is_held(paths: StatePaths) -> bool:
    """Whether a coordinator lives here: it holds the lock as long as it does."""
    try:
        descriptor = os.open(paths.lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


class AlreadyRunning(ExplainedError):
    """Another coordinator holds the state directory."""


def answering_pid(paths: StatePaths) -> int | None:
    """The pid of the coordinator that answers on the socket now, None when nobody does."""
    answer = _ask_socket(paths, "GET", "/v1/status")
    try:
        return int(answer["coordinator"]["pid"]) if answer is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def _ask_socket(paths: StatePaths, method: str, path: str) -> dict[str, Any] | None:
    """The answer of whoever listens on the socket now; None when nobody does, or not in time."""
    if not paths.socket.exists():
        return None
    folder = os.open(paths.root, os.O_PATH | os.O_DIRECTORY)
    try:
        is_long = len(os.fsencode(paths.socket)) > SOCKET_PATH_BYTES_MAX
        address = f"/proc/self/fd/{folder}/{paths.socket.name}" if is_long else str(paths.socket)
        with closing(http.client.HTTPConnection("fleetd", timeout=ANSWER_SECONDS_MAX)) as connection:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(ANSWER_SECONDS_MAX)
            connection.sock.connect(address)
            connection.request(method, path)
            answer = json.loads(connection.getresponse().read())
            return answer if isinstance(answer, dict) else None
    except (http.client.HTTPException, OSError, ValueError):
        return None
    finally:
        os.close(folder)


def report_writer_by_name(paths: CampaignPaths, document: dict[str, Any]) -> tuple[Path, Path]:
    """The screens' report writer, found by name when it is first needed: until then the daemon carries none of their libraries."""
    html, data = importlib.import_module("fleetd.screens.report").write_report(paths, document)
    return html, data


def _serve(paths: StatePaths, journal: Journal, write_report: ReportWriter, manager: ServiceManager, socket_group: str | None) -> None:
    _check_history(paths, journal)
    owner, started_at = _next_generation(paths, journal), clock.read().now
    code_digest()  # read now: files may be replaced by a newer release while this process runs
    releases, deliveries = Releases(paths), Deliveries()
    daemon = Daemon(pid=os.getpid(), id=owner.coordinator_id, generation=owner.generation, started_at=started_at, paths=paths)
    guard = threading.Lock()

    def write_now(campaign_id: str) -> tuple[Path, Path]:
        """One report at a time; matplotlib and two writers of one file do not go together."""
        assert loop.published is not None, "reports are asked for after the first tick"
        with guard:
            return write_report(paths.campaign(campaign_id), build_status(loop.published, daemon, deliveries))

    def make_session(plan: HostPlan, owner: Owner) -> Session:
        if plan.is_local:
            return LocalSession(plan, owner, stage=releases.stage, deliveries=deliveries)
        return SshSession(plan, owner, stage=releases.stage, deliveries=deliveries, neighbour=loop.courier)

    jobs = Jobs(paths, python=sys.executable, releases=releases, write_report=write_now)
    loop = Loop(
        journal, owner, python=sys.executable, make_session=make_session, run_job=jobs.run, forgotten=forgotten_campaigns(paths),
        kept_clock=KeptClock(paths.clock), came_round=lambda seen: manager.ticked(_service_status(seen)),
    )
    api = Api(loop, journal, daemon, write_now, deliveries, releases=releases, socket_group=socket_group)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: loop.stop())
    api.start()
    _tell_ready({"pid": os.getpid()})
    if manager.is_there:
        threading.Thread(target=_ready_when_it_answers, args=(paths, manager), name="ready", daemon=True).start()
    try:
        loop.run()
    finally:
        manager.stopping()
        api.close()


def _ready_when_it_answers(paths: StatePaths, manager: ServiceManager) -> None:
    """Ready means that a request was answered, over the socket that everybody uses: a listening one proves nothing."""
    while answering_pid(paths) != os.getpid():
        time.sleep(ANSWER_LOOK_SECONDS)
    manager.ready()


def _service_status(seen: Published) -> str:
    """What `systemctl status` shows: how much there is to watch."""
    hosts = [run.host for run in seen.fleet.runs.values() if run.state in ACTIVE]
    watched = f"runs at work: {len(hosts)}, on hosts: {len(set(hosts))}"
    return watched if seen.journal_health == "ok" else f"{watched}; journal: {seen.journal_health}"


def _check_history(paths: StatePaths, journal: Journal) -> None:
    """JournalDamaged when the disk holds campaigns of which the journal knows nothing: it was lost or cut, and an empty list would say
    that all is well. A campaign's directory is only ever made after its entry is on the disk."""
    known = {str(entry.get("campaign_id")) for entry in _launches(journal)}
    lost = sorted(path.name for path in paths.campaigns.glob("*") if path.is_dir() and path.name not in known)
    if lost:
        shown = ", ".join(lost[:CAMPAIGNS_SHOWN_MAX]) + (f" and {len(lost) - CAMPAIGNS_SHOWN_MAX} more" if len(lost) > CAMPAIGNS_SHOWN_MAX else "")
        aside = paths.set_aside
        raise JournalDamaged(
            "the journal has lost campaigns", where=str(paths.journal), what=f"it knows nothing of {shown}; their runs on hosts go on by themselves",
            fix="restore it from a backup; to go on without them: " + f"mkdir -p {aside} && mv " + " ".join(
                shlex.quote(str(paths.campaigns / name)) for name in lost) + f" {aside}/",
        )


def _launches(journal: Journal) -> Iterator[dict[str, Any]]:
    after = 0
    while entries := journal.entries(after=after, limit=ENTRIES_PER_READ):
        yield from (entry for entry in entries if entry.get("kind") == "campaign_launched")
        after = entries[-1]["sequence"]


def _make_root(paths: StatePaths) -> None:
    try:
        os.makedirs(paths.root, mode=0o700, exist_ok=True)
    except OSError as fault:
        fix = "set FLEETD_STATE to a directory that you may write"
        raise ExplainedError("the state directory can't be made", where=str(paths.root), what=str(fault), fix=fix) from fault
    if not os.access(paths.root, os.W_OK | os.X_OK, effective_ids=True):
        what, fix = f"it belongs to user {paths.root.stat().st_uid}", "set FLEETD_STATE to a directory that you may write"
        raise ExplainedError("the state directory can't be used", where=str(paths.root), what=what, fix=fix)


@contextmanager
def _only_one(paths: StatePaths) -> Iterator[None]:
    """Hold the state directory's lock. AlreadyRunning names the process that has it."""
    try:
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        fix = "set FLEETD_STATE to a directory that you may write"
        raise ExplainedError("the state directory can't be used", where=str(paths.lock), what=str(fault), fix=fix) from fault
    try:
        try:
            _lock_patiently(descriptor)
        except BlockingIOError as fault:
            pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise AlreadyRunning(
                "a coordinator is running here already", where=str(paths.root), what=f"pid {pid} holds {paths.lock}",
                fix="use it (fleetd status), or end it first: fleetd daemon stop",
            ) from fault
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock_patiently(descriptor: int) -> None:
    """An exclusive flock; BlockingIOError when another coordinator has it. Whoever only looks whether it is held has it for an instant."""
    give_up_at = time.monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= give_up_at:
                raise
            time.sleep(0.01)


def _next_generation(paths: StatePaths, journal: Journal) -> Owner:
    """Who we are to hosts: the id of this state directory for ever, and one generation more than ever before, durable before its first use."""
    try:
        record: dict[str, Any] = read_record(paths.identity)
    except FileNotFoundError:
        record = journal.state_get("coordinator") or {"coordinator_id": secrets.token_hex(ID_BYTES), "generation": 0}
    except WireError as fault:
        fix = f"move it away: the journal beside it knows the id too (rm {paths.identity})"
        raise ExplainedError("the coordinator's identity can't be read", where=str(paths.identity), what=str(fault), fix=fix) from fault
    highest = max(int(record["generation"]), int((journal.state_get("coordinator") or {}).get("generation", 0)))
    owner = Owner(coordinator_id=str(record["coordinator_id"]), generation=highest + 1, life=secrets.token_hex(LIFE_BYTES))
    body = {"schema": 1, "coordinator_id": owner.coordinator_id, "generation": owner.generation}
    write_record(paths.identity, body)
    journal.state_set("coordinator", body)
    return owner


def _start_detached(paths: StatePaths) -> dict[str, Any]:
    """Start a coordinator that outlives us; what it said of its start: its pid, or an error."""
    reader, writer = os.pipe()
    environment = {**os.environ, "FLEETD_STATE": str(paths.root.absolute()), ENV_READY: str(writer)}
    argv = [sys.executable, "-I", "-S", "-c", _DETACH, sys.executable, "-m", "fleetd.coordinator.daemon"]
    try:
        with open(paths.log, "ab") as log:
            subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=paths.root, env=environment, start_new_session=True,
                pass_fds=(writer,), check=True,
            )
        os.close(writer)
        writer = -1
        line = _read_line(reader)
    except (OSError, subprocess.CalledProcessError) as fault:
        raise ExplainedError("the coordinator can't be started", where=str(paths.root), what=str(fault), fix=f"look at {paths.log}") from fault
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)
    try:
        told: dict[str, Any] = loads(line)
    except WireError:
        what, fix = "it left, or took too long, without a word", f"look at the end of {paths.log}"
        return ExplainedError("the coordinator did not start", where=str(paths.root), what=what, fix=fix).to_json()
    return told


def _read_line(reader: int) -> bytes:
    deadline, line = time.monotonic() + START_SECONDS_MAX, b""
    while not line.endswith(b"\n") and len(line) < READY_BYTES_MAX:
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0 or not select.select([reader], [], [], left_seconds)[0]:
            break
        chunk = os.read(reader, READY_BYTES_MAX)
        if not chunk:
            break
        line += chunk
    return line


def _tell_ready(told: dict[str, Any]) -> None:
    """Tell whoever started us how it went, once."""
    descriptor = os.environ.pop(ENV_READY, None)
    if descriptor is None:
        return
    try:
        os.write(int(descriptor), dumps(told).encode() + b"\n")
        os.close(int(descriptor))
    except (OSError, ValueError):
        pass  # it did not wait for the answer; the socket says the same


def main() -> None:
    """`python -m fleetd.coordinator.daemon`: the coordinator of $FLEETD_STATE."""
    from fleetd.paths import state_root

    code = EXIT_BUG
    try:
        code = run_foreground(state_root())
    except ExplainedError as error:
        _tell_ready(error.to_json())
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:
        logs.logger.exception("event=coordinator_crashed")
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # A worker may still copy a large file: whatever it does is safe to cut short, and nobody should wait for it.
    os._exit(code)


if __name__ == "__main__":
    main()
