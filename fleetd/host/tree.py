"""The trainer's tree: who belongs to it, by what proof, and how it is signalled and ended as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from policies.facts import ProcessIdentity


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


def members(
    token: str, session: int | None, cgroup: str | None, leader: ProcessIdentity | None,
    *, never: frozenset[int] = frozenset(), ancestor: int | None = None,
) -> tuple[Member, ...]:
    """The living processes of the tree (zombies left out), leader first.

    Proof is one of: the leader's identity; `FLEETD_TREE_TOKEN` in the process's environment; the leader's session while the
    leader's pid is still its own; membership of a cgroup folder in `cgroup` (as AttemptRecord holds it); descent from
    `ancestor`, a living subreaper of the tree. The caller itself and `never` (supervisor, shim) are left out.
    """
    raise NotImplementedError


def kill_tree(
    token: str, session: int | None, cgroup: str | None, leader: ProcessIdentity | None,
    *, never: frozenset[int] = frozenset(), ancestor: int | None = None,
) -> KillOutcome:
    """SIGKILL every member, again and again (bounded, about 2 s at most) until a look finds none. Uses cgroup.kill where it exists."""
    raise NotImplementedError


def signal_group(targets: tuple[Member, ...], *signals: int) -> tuple[SignalReport, ...]:
    """Send each signal in turn to each member, one by one through a verified grip; never by process group number."""
    raise NotImplementedError


def signal_one(recorded: ProcessIdentity, *signals: int) -> tuple[SignalReport, ...]:
    """The same for one recorded process: for the ladder's ask use `signal_one(leader, SIGTERM, SIGCONT)`."""
    raise NotImplementedError
