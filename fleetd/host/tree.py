"""The trainer's tree: who belongs to it, by what proof, and how it is signalled and ended as a whole."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from fleetd.host import cgroups
from fleetd.host.processes import Grip, boot_id, grip, identity_of, open_process, read_file, sight_of, stat_fields
from policies.facts import ENV_TREE_TOKEN, ProcessIdentity

KILL_ROUNDS_MAX = 40
KILL_WAIT_SECONDS = 0.05
ENVIRON_BYTES_MAX = 256 * 1024
ANCESTRY_DEPTH_MAX = 64
UID_UNKNOWN = -1
"""In the identity of a member that does not show itself: it is listed, so that no tree counts as empty, and no grip matches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One living process of the tree. `proofs`: which of `leader`, `token`, `session`, `cgroup`, `descent` showed it."""

    identity: ProcessIdentity
    proofs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalReport:
    """One line for the audit: who was (not) signalled and what was verified before."""

    pid: int
    signal: int
    delivered: bool
    verdict: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KillOutcome:
    """`remaining` is empty when the tree is provably empty. `reports`: one per SIGKILL or refusal."""

    remaining: tuple[Member, ...]
    reports: tuple[SignalReport, ...]
    rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What one pass over /proc shows of a living process."""

    pid: int
    parent: int
    session: int
    start_ticks: int


def members(
    token: str, session: int | None, cgroup: str | None, leader: ProcessIdentity | None,
    *, never: frozenset[int] = frozenset(), ancestor: int | None = None, among: frozenset[int] | None = None,
) -> tuple[Member, ...]:
    """The living processes of the tree (zombies left out), leader first; with `among`, only those of these pids.

    Proof is one of: the leader's identity; `FLEETD_TREE_TOKEN` in the process's environment; the leader's session while the
    leader's pid is still its own; membership of a cgroup folder in `cgroup` (as AttemptRecord holds it); descent from
    `ancestor`, a living subreaper of the tree. The caller itself and `never` (supervisor, shim) are left out.
    """
    if leader is not None and leader.boot_id != boot_id():
        return ()
    # Every proof is read between two looks at the start time (the row here, the identity in _member), so it can't belong to
    # a process that had the pid before or after.
    rows = _processes(all_pids() if among is None else among)
    grouped = frozenset(cgroups.processes_in(cgroups.decode_group(cgroup)))
    if session is not None and not _session_is_ours(session, leader):
        session = None
    left_out = never | {os.getpid()}
    found: list[Member] = []
    for row in rows.values():
        if row.pid in left_out or (among is not None and row.pid not in among):
            continue
        below = ancestor is not None and _descends(row, ancestor, rows, left_out)
        member = _member(row, token=token, session=session, grouped=grouped, leader=leader, below=below)
        if member is not None:
            found.append(member)
    return tuple(sorted(found, key=lambda each: ("leader" not in each.proofs, each.identity.pid)))


def kill_tree(
    token: str, session: int | None, cgroup: str | None, leader: ProcessIdentity | None,
    *, never: frozenset[int] = frozenset(), ancestor: int | None = None,
) -> KillOutcome:
    """SIGKILL every member, again and again (bounded, about 2 s at most) until a look finds none. Uses cgroup.kill where it exists."""
    group = cgroups.decode_group(cgroup)
    reports: list[SignalReport] = []
    for number in range(KILL_ROUNDS_MAX):
        remaining = members(token, session, cgroup, leader, never=never, ancestor=ancestor)
        if not remaining and not cgroups.processes_in(group):
            return KillOutcome(remaining=(), reports=tuple(reports), rounds=number)
        for report in signal_group(remaining, signal.SIGKILL):
            if not _is_repeated(report, reports):
                reports.append(report)
        # After the single signals, each with its verdict for the audit: this catches what was forked in between.
        cgroups.kill_all(group)
        time.sleep(KILL_WAIT_SECONDS)
    remaining = members(token, session, cgroup, leader, never=never, ancestor=ancestor)
    return KillOutcome(remaining=remaining, reports=tuple(reports), rounds=KILL_ROUNDS_MAX)


def is_empty(
    token: str, session: int | None, cgroup: str | None, leader: ProcessIdentity | None,
    *, never: frozenset[int] = frozenset(), ancestor: int | None = None,
) -> bool:
    """Whether no member is left: neither in a look over /proc, which a fast chain of forks can slip through, nor in the cgroup."""
    if members(token, session, cgroup, leader, never=never, ancestor=ancestor):
        return False
    return not cgroups.processes_in(cgroups.decode_group(cgroup))


def signal_group(targets: tuple[Member, ...], *signals: int) -> tuple[SignalReport, ...]:
    """Send each signal in turn to each member, one by one through a verified grip; never by process group number."""
    return tuple(report for target in targets for report in signal_one(target.identity, *signals))


def signal_one(recorded: ProcessIdentity, *signals: int) -> tuple[SignalReport, ...]:
    """The same for one recorded process: for the ladder's ask use `signal_one(leader, SIGTERM, SIGCONT)`."""
    assert recorded.pid != os.getpid(), "nobody signals itself through here"
    held = grip(recorded)
    if not isinstance(held, Grip):
        return tuple(SignalReport(pid=recorded.pid, signal=number, delivered=False, verdict=str(held)) for number in signals)
    with held:
        return tuple(_send(held, number) for number in signals)


def _send(held: Grip, number: int) -> SignalReport:
    try:
        delivered, verdict = held.send(number), held.verdict.explanation
    except OSError as fault:
        delivered, verdict = False, f"the kernel refused: {fault.strerror}"
    return SignalReport(pid=held.identity.pid, signal=number, delivered=delivered, verdict=verdict)


def _is_repeated(report: SignalReport, earlier: list[SignalReport]) -> bool:
    """A process that dies slowly is signalled in every round; the audit needs it once."""
    return any((report.pid, report.delivered) == (each.pid, each.delivered) for each in earlier)


def all_pids() -> frozenset[int]:
    """Of every process, ended ones that nobody has reaped included."""
    return frozenset(int(name) for name in os.listdir("/proc") if name.isdigit())


def _processes(pids: frozenset[int]) -> dict[int, _Row]:
    """Every living process of these, by pid: zombies and those that end while we look are left out."""
    rows = ((pid, _row(pid)) for pid in sorted(pids))
    return {pid: row for pid, row in rows if row is not None}


def _row(pid: int) -> _Row | None:
    try:
        folder = open_process(pid)
    except OSError:
        return None
    try:
        fields = stat_fields(folder)
        if fields[0] in "Xx" or (fields[0] == "Z" and int(fields[17]) <= 1):
            return None
        return _Row(pid=pid, parent=int(fields[1]), session=int(fields[3]), start_ticks=int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None
    finally:
        os.close(folder)


def _member(
    row: _Row, *, token: str, session: int | None, grouped: frozenset[int], leader: ProcessIdentity | None, below: bool
) -> Member | None:
    proofs = []
    if leader is not None and (row.pid, row.start_ticks) == (leader.pid, leader.start_ticks):
        proofs.append("leader")
    if session is not None and row.session == session:
        proofs.append("session")
    if row.pid in grouped:
        proofs.append("cgroup")
    if below:
        proofs.append("descent")
    if _carries(row, token):
        proofs.append("token")
    if not proofs:
        return None
    try:
        identity = identity_of(row.pid)
    except ProcessLookupError:
        return None
    except OSError:
        identity = ProcessIdentity(boot_id=boot_id(), pid=row.pid, start_ticks=row.start_ticks, uid=UID_UNKNOWN, argv=())
    if leader is not None and "leader" in proofs and not _is_same(leader, identity):
        proofs.remove("leader")
    return Member(identity=identity, proofs=tuple(proofs)) if proofs and identity.start_ticks == row.start_ticks else None


def _is_same(leader: ProcessIdentity, found: ProcessIdentity) -> bool:
    """Whether two looks at one pid and start time met one process: a start time counts in hundredths of a second, a pid may change
    hands in less. Where the kernel has no inode for each process, the command line has to speak for it."""
    if found.uid == UID_UNKNOWN:
        return True  # listed, and never signalled
    if None in (leader.pidfd_inode, found.pidfd_inode):
        return (leader.uid, leader.argv) == (found.uid, found.argv)
    return leader.pidfd_inode == found.pidfd_inode


def _carries(row: _Row, token: str) -> bool:
    """Whether the environment the process was started with holds our token, as one whole entry."""
    try:
        folder = open_process(row.pid)
    except OSError:
        return False
    try:
        entries = read_file(folder, "environ", ENVIRON_BYTES_MAX).split(b"\0")
    except OSError:
        return False  # another user's process: only session, cgroup or descent can show it
    finally:
        os.close(folder)
    return f"{ENV_TREE_TOKEN}={token}".encode() in entries


def _session_is_ours(session: int, leader: ProcessIdentity | None) -> bool:
    """A session number is a pid: it means ours only as long as the leader, alive or unreaped, keeps that pid from being reused."""
    if leader is None or leader.pid != session:
        return False
    sight = sight_of(session)
    is_same_inode = None in (sight.pidfd_inode, leader.pidfd_inode) or sight.pidfd_inode == leader.pidfd_inode
    return sight.start_ticks == leader.start_ticks and is_same_inode


def _descends(row: _Row, ancestor: int, rows: dict[int, _Row], stops: frozenset[int]) -> bool:
    """Whether the chain of parents leads to `ancestor` without passing through one of ours (a supervisor may be the shim's child)."""
    for _ in range(ANCESTRY_DEPTH_MAX):
        if row.parent == ancestor:
            return True
        if row.parent <= 0:
            return False
        parent = rows.get(row.parent) or _row(row.parent)  # among a few, whoever they descend from is looked at as it is needed
        if parent is None or parent.pid in stops or parent.start_ticks > row.start_ticks:
            return False
        row = parent
    return False
