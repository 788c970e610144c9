"""Forces the kernel to hand a recorded pid to a stranger, and lets every path that would signal it do its worst.

usage: unshare --pid --fork --mount-proc python reused_pids.py FOLDER STORY ROUNDS [--fault]

It must be the first process of a pid namespace of its own (root): there ns_last_pid chooses the next pid without touching the
machine's. One JSON line a round: {"lives": whether the stranger is still the same process, "found": what was said of it}.
`--fault` signals by bare pid, as a supervisor must never do: then the stranger has to die, or these rounds would prove nothing.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from host_runs import HostRun, is_alive, now, spec_for, wait_for

from fleetd.host import rundir, tree
from fleetd.host.guard import SupervisorGuard
from fleetd.host.processes import Grip, grip, identity_of, open_process, stat_fields
from fleetd.host.reports import Reports
from fleetd.model import Caps, CutoffOrder, Observation, StopTerms
from fleetd.paths import HostPaths
from policies.facts import MIB, ProcessIdentity, RunState, StopMode, Want

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")
PLACING_TRIES_MAX = 2000
TRAINER = (sys.executable, "-S", "-c", "import os, time\nheld = b'x' * int(os.environ.get('HELD', '0'))\ntime.sleep(600)")
TRAINER_WITH_A_WORKER = (
    sys.executable, "-S", "-c",
    "import os, signal, time\nif os.fork() == 0:\n    os.setsid()\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
)
HELD_BYTES = 120 * MIB
WAIT_SECONDS = 60.0


class Stranger:
    """A process under a pid that somebody recorded, with the same command line; never of the tree."""

    def __init__(self, pid: int, argv: tuple[str, ...] | None = None) -> None:
        self.pid = pid
        for _ in range(PLACING_TRIES_MAX):
            reap()
            LAST_PID.write_text(str(pid - 1))
            born = os.fork()
            if born == 0:
                _live_as_stranger(argv)
            if born == pid:
                break
            os.kill(born, signal.SIGKILL)  # another process was quicker: our own child, not reaped yet
            os.waitpid(born, 0)
        else:
            raise AssertionError(f"pid {pid} could not be had")
        if argv is not None:
            wait_for(lambda: identity_of(pid).argv == argv, WAIT_SECONDS, lambda: f"{pid} is no copy")
        self.start_ticks = ticks_of(pid)

    @property
    def lives(self) -> bool:
        """A signal that was sent counts at once, however late the scheduler lets it do its work."""
        try:
            return is_alive(self.pid) and ticks_of(self.pid) == self.start_ticks and not has_a_deadly_signal(self.pid)
        except FileNotFoundError:
            return False

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _live_as_stranger(argv: tuple[str, ...] | None) -> None:
    try:
        os.setsid()
        if argv is None:
            time.sleep(600)
        os.execve(argv[0], argv, {"PATH": "/usr/bin:/bin", "HELD": str(HELD_BYTES)})
    finally:
        os._exit(127)


def ticks_of(pid: int) -> int:
    folder = open_process(pid)
    try:
        return int(stat_fields(folder)[19])
    finally:
        os.close(folder)


def has_a_deadly_signal(pid: int) -> bool:
    pending = [line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(int(mask, 16) & (1 << number - 1) for mask in pending for number in (signal.SIGKILL, signal.SIGTERM))


def reap() -> None:
    """The first process of a namespace inherits every orphan, and a pid is free only once its zombie was taken in."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def dead_child(argv: tuple[str, ...]) -> ProcessIdentity:
    """The record of a process of ours that has ended and was reaped: its pid is free."""
    pid = os.fork()
    if pid == 0:
        _live_as_stranger(argv)
    wait_for(lambda: identity_of(pid).argv == argv, WAIT_SECONDS, lambda: f"{pid} never ran")
    recorded = identity_of(pid)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return recorded


# One signal, without a supervisor around it.


def by_record(fault: bool) -> tuple[bool, str]:
    recorded = dead_child(TRAINER)
    stranger = Stranger(recorded.pid, TRAINER)
    if fault:
        os.kill(recorded.pid, signal.SIGKILL)
    reports = tree.signal_one(recorded, signal.SIGTERM, signal.SIGKILL)
    assert not any(report.delivered for report in reports)
    return stranger, reports[0].verdict


def by_tree(_fault: bool) -> tuple[bool, str]:
    """The stranger leads a session that has the number of the trainer's."""
    recorded = dead_child(TRAINER)
    stranger = Stranger(recorded.pid, TRAINER)
    outcome = tree.kill_tree("no such token", recorded.pid, None, recorded)
    return stranger, f"{len(outcome.remaining)} members, {len(outcome.reports)} signals"


def by_list(_fault: bool) -> tuple[bool, str]:
    """A member ends between the look that listed it and the signal."""
    recorded = dead_child(TRAINER)
    stranger = Stranger(recorded.pid, TRAINER)
    reports = tree.signal_group((tree.Member(identity=recorded, proofs=("token",)),), signal.SIGKILL)
    return stranger, reports[0].verdict


def within_a_tick(_fault: bool) -> tuple[bool, str]:
    """Start times count in hundredths of a second: the recorded process and the stranger share one."""
    while True:
        time.sleep(0.01 - time.time() % 0.01)  # the ticks' phase is another's, but a fresh start of a try is worth it
        pid = os.fork()
        if pid == 0:
            _live_as_stranger(None)
        recorded = identity_of(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        stranger = Stranger(pid)
        if stranger.start_ticks == recorded.start_ticks:
            break
        stranger.end()
    reports = tree.signal_one(recorded, signal.SIGKILL)
    outcome = tree.kill_tree("no such token", recorded.pid, None, recorded)
    return stranger, f"{reports[0].verdict}; {len(outcome.reports)} signals to a tree"


def by_silence(_fault: bool) -> tuple[bool, str]:
    """The shim ends a supervisor that has stopped beating: here the recorded one has ended."""
    run = HostRun(folder_of("silent"), spec_for(argv=TRAINER, contract=False)).create()
    recorded = dead_child(TRAINER)
    stranger = Stranger(recorded.pid, TRAINER)
    run.paths.supervisor.write_text(json.dumps({"identity": vars_of(recorded), "at": now().isoformat()}))
    SupervisorGuard(run.paths, 1)._end_silent()
    return stranger, "the guard of the shim"


def vars_of(identity: ProcessIdentity) -> dict[str, object]:
    return {name: getattr(identity, name) for name in identity.__dataclass_fields__}


# A whole supervisor that finds a stranger where its trainer was.


def orphaned(*, argv: tuple[str, ...] = TRAINER, **changes: object) -> HostRun:
    """A run under way whose supervisor and shim were killed."""
    terms = {"stop": StopTerms(grace_floor_seconds=0.3, grace_ceiling_seconds=0.5), **changes}
    run = HostRun(folder_of("orphaned"), spec_for(argv=argv, contract=False, **terms)).create()
    run.supervise()
    run.wait_state(RunState.RUNNING)
    run.orphan()
    return run


def replaced(run: HostRun) -> Stranger:
    """Its trainer is killed, and a stranger gets the pid."""
    recorded = trainer_of(run)
    held = grip(recorded)
    assert isinstance(held, Grip), held
    with held:
        held.send(signal.SIGKILL)
        wait_for(held.exited, WAIT_SECONDS, lambda: "it survives")
    return Stranger(recorded.pid, recorded.argv)


def trainer_of(run: HostRun) -> ProcessIdentity:
    record = rundir.read_attempt(run.paths, 1)
    assert record is not None
    return record.identity


def settled(run: HostRun) -> Observation:
    """Until the run has come to rest, or a new attempt lives: the old one is over either way."""
    def holds() -> Observation | None:
        reap()
        seen = run.seen()
        is_over = seen is not None and (seen.attempt > 1 or seen.state in (RunState.STOPPED, RunState.FINISHED, RunState.FAILED, RunState.BACKOFF))
        return seen if is_over else None

    return wait_for(holds, WAIT_SECONDS, lambda: f"{run.seen()}\n{run.log_text()}")


def finished(run: HostRun, stranger: Stranger) -> tuple[Stranger, str]:
    seen = settled(run)
    signalled = [notice["body"] for notice in run.notices("signal") if notice["body"].get("pid") == stranger.pid and notice["body"].get("delivered")]
    assert not signalled, signalled
    run.clean()
    reap()
    return stranger, f"{seen.state}, {seen.reason}: {seen.detail}"


def stop(mode: StopMode) -> Callable[[bool], tuple[Stranger, str]]:
    def story(_fault: bool) -> tuple[Stranger, str]:
        run = orphaned()
        stranger = replaced(run)
        run.order(2, Want.STOP, mode)
        run.supervise()
        return finished(run, stranger)

    return story


def deadline(_fault: bool) -> tuple[Stranger, str]:
    run = orphaned()
    stranger = replaced(run)
    assert rundir.apply_cutoff(run.paths, CutoffOrder(sequence=2, cutoff_at=now() + timedelta(seconds=0.2), because="test"))[0]
    time.sleep(0.3)
    run.supervise()
    return finished(run, stranger)


def memory(_fault: bool) -> tuple[Stranger, str]:
    """The stranger alone holds twice the cap."""
    run = orphaned(caps=Caps(host_bytes=HELD_BYTES // 2, accelerator_bytes=MIB, floor_bytes=MIB))
    stranger = replaced(run)
    wait_for(lambda: resident_bytes(stranger.pid) > HELD_BYTES, WAIT_SECONDS, lambda: "it holds nothing")
    run.supervise()
    return finished(run, stranger)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sweep(_fault: bool) -> tuple[Stranger, str]:
    """No order at all: the agent's sweep finds a run without a supervisor."""
    run = orphaned()
    stranger = replaced(run)
    Reports(HostPaths(run.root)).sweep()
    return finished(run, stranger)


def worker(_fault: bool) -> tuple[Stranger, str]:
    """A stranger under the leader's pid protects itself, not what is left of the tree."""
    run = orphaned(argv=TRAINER_WITH_A_WORKER)
    record = rundir.read_attempt(run.paths, 1)
    assert record is not None

    def workers() -> list[tree.Member]:
        return [each for each in tree.members(record.token, record.session, record.cgroup, record.identity) if "leader" not in each.proofs]

    left = wait_for(workers, WAIT_SECONDS, lambda: "the trainer has forked no worker")
    assert len(left) == 1
    stranger = replaced(run)
    run.order(2, Want.STOP)
    run.supervise()
    found = finished(run, stranger)
    assert not is_alive(left[0].identity.pid), "the worker outlived the stop"
    return found


def asleep(_fault: bool) -> tuple[Stranger, str]:
    """The supervisor watched a living trainer, slept through its death, and wakes to an order to kill it."""
    run = HostRun(folder_of("asleep"), spec_for(argv=TRAINER, contract=False)).create()
    run.supervise()
    run.wait_state(RunState.RUNNING)
    supervisor = rundir.read_program(run.paths.supervisor)
    assert supervisor is not None
    os.kill(supervisor.identity.pid, signal.SIGSTOP)
    recorded = trainer_of(run)
    os.kill(recorded.pid, signal.SIGKILL)
    wait_for(lambda: rundir.read_exit(run.paths, 1), WAIT_SECONDS, run.log_text)
    wait_for(lambda: not Path(f"/proc/{recorded.pid}").exists(), WAIT_SECONDS, run.log_text)
    stranger = Stranger(recorded.pid, recorded.argv)
    run.order(2, Want.STOP, StopMode.NOW)
    with suppress(ProcessLookupError):  # its shim may have found it silent for too long, where all of this is slow, and started another
        os.kill(supervisor.identity.pid, signal.SIGCONT)
    return finished(run, stranger)


STORIES: dict[str, Callable[[bool], tuple[Stranger, str]]] = {
    "record": by_record, "tree": by_tree, "list": by_list, "tick": within_a_tick, "silence": by_silence,
    "graceful": stop(StopMode.GRACEFUL), "now": stop(StopMode.NOW), "deadline": deadline, "memory": memory, "sweep": sweep, "worker": worker,
    "asleep": asleep,
}
_folders: list[Path] = []


def folder_of(name: str) -> Path:
    _folders.append(Path(sys.argv[1]) / f"{name}-{len(_folders)}")
    return _folders[-1]


def main() -> None:
    assert os.getpid() == 1, "this belongs into a pid namespace of its own"
    for _ in range(int(sys.argv[3])):
        stranger, found = STORIES[sys.argv[2]](sys.argv[4:] == ["--fault"])
        reap_others(stranger)
        print(json.dumps({"lives": stranger.lives, "found": found}), flush=True)
        stranger.end()


def reap_others(stranger: Stranger) -> None:
    """A stranger that was killed stays a zombie until it was looked at."""
    time.sleep(0.01)
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != stranger.pid:
            os.waitpid(ended.si_pid, 0)


if __name__ == "__main__":
    main()
