"""The trainer's tree is found whatever its members do to hide, and ended whole; strangers are never in it."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from contextlib import contextmanager

import pytest
from host_edges import python, wait_until

from fleetd.host import cgroups, tree
from fleetd.host.processes import identity_of, look
from policies.facts import ENV_TREE_TOKEN, MIB

CHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.write(1, f"{sys.argv[1]} {os.getpid()}\\n".encode())
time.sleep(120)
"""
LEADER = """
import os, subprocess, sys, time
def child(kind):
    environment = {} if kind.startswith("clean") else None
    argv = [sys.executable, "-S", "-c", sys.argv[1], kind]
    return subprocess.Popen(argv, start_new_session=kind.endswith("setsid"), env=environment)
for kind in sys.argv[2:]:
    if kind.startswith("forked"):
        if os.fork() == 0:
            if os.fork() == 0:
                child(kind).wait()
            os._exit(0)
        os.wait()
    else:
        child(kind)
os.write(1, f"leader {os.getpid()}\\n".encode())
time.sleep(120)
"""


class Family:
    """A leader in its own session with children of several kinds, as a shim would have started it."""

    def __init__(self, *kinds: str, cgroup: str | None = None) -> None:
        self.token = secrets.token_hex(16)
        group = cgroups.decode_group(cgroup)
        self.process = subprocess.Popen(
            python(LEADER, CHILD, *kinds), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, ENV_TREE_TOKEN: self.token}, preexec_fn=lambda: cgroups.join(group),
        )
        self.cgroup = cgroup
        self.pids = dict(self._line() for _ in range(len(kinds) + 1))
        self.leader = identity_of(self.process.pid)

    def _line(self) -> tuple[str, int]:
        kind, pid = self.process.stdout.readline().decode().split()
        return kind, int(pid)

    def members(self, *, session: bool = True) -> dict[int, tuple[str, ...]]:
        found = tree.members(self.token, self.process.pid if session else None, self.cgroup, self.leader)
        return {member.identity.pid: member.proofs for member in found}

    def kill(self) -> tree.KillOutcome:
        return tree.kill_tree(self.token, self.process.pid, self.cgroup, self.leader)


@contextmanager
def family(*kinds: str, cgroup: str | None = None):
    made = Family(*kinds, cgroup=cgroup)
    recorded = [identity_of(pid) for pid in made.pids.values()]
    try:
        yield made
    finally:
        for identity in recorded:
            tree.signal_one(identity, signal.SIGKILL)
        made.process.communicate()


@pytest.fixture
def group():
    made, _ = cgroups.create(f"treetest-{os.getpid()}-{secrets.token_hex(4)}", 512 * MIB)
    if not made.folders:
        pytest.skip("no cgroup can be made here")
    yield made
    assert cgroups.remove(made), "no cgroup is left behind"


def test_children_are_found_whether_they_fork_away_or_make_sessions_of_their_own():
    with family("plain", "setsid", "forked", "forked-setsid") as made:
        found = made.members()

        assert set(made.pids.values()) <= set(found)
        assert found[made.pids["leader"]] == ("leader", "session", "token")
        assert found[made.pids["setsid"]] == ("token",)
        assert os.getpid() not in found


def test_a_child_with_a_clean_environment_is_found_by_its_session():
    with family("clean") as made:
        assert made.members()[made.pids["clean"]] == ("session",)


def test_a_child_without_token_and_session_is_found_by_its_cgroup(group):
    with family("clean-setsid", cgroup=group.encode()) as made:
        assert made.members()[made.pids["clean-setsid"]] == ("cgroup",)
        assert made.kill().remaining == ()


def test_members_that_ignore_sigterm_are_ended_with_the_whole_tree():
    with family("plain", "setsid", "forked-setsid") as made:
        recorded = {kind: identity_of(pid) for kind, pid in made.pids.items()}

        outcome = made.kill()

        assert outcome.remaining == ()
        assert {report.pid for report in outcome.reports if report.delivered} >= set(made.pids.values())
        assert all(not look(identity).is_verified for identity in recorded.values())


def test_a_process_that_forks_as_fast_as_it_can_is_ended_too(group):
    code = "import os\nos.setsid()\nfor _ in range(20000):\n    if os.fork(): os._exit(0)\n"
    token = secrets.token_hex(16)
    comet = subprocess.Popen(python(code), env={**os.environ, ENV_TREE_TOKEN: token}, preexec_fn=lambda: cgroups.join(group))
    comet.wait()

    outcome = tree.kill_tree(token, None, group.encode(), None)

    assert outcome.remaining == ()
    assert cgroups.processes_in(group) == ()


def test_a_stranger_with_another_token_is_not_in_the_tree():
    with family("plain") as ours, family("plain") as theirs:
        ours.kill()

        assert set(theirs.pids.values()) <= set(theirs.members())
        assert not set(ours.members()) & set(theirs.pids.values())


def test_a_session_number_proves_nothing_once_its_leader_has_been_reaped():
    with family("clean") as made:
        made.process.kill()
        wait_until(lambda: not look(made.leader).is_verified)
        assert made.members()[made.pids["clean"]] == ("session",), "a zombie leader still keeps its number"
        made.process.wait()

        assert made.pids["clean"] not in made.members(), "now the number could be anybody's"


def test_after_a_reboot_nobody_is_a_member():
    from dataclasses import replace

    with family("plain") as made:
        old = replace(made.leader, boot_id="the boot before")

        assert tree.members(made.token, made.process.pid, None, old) == ()


def test_zombies_are_not_members():
    with family() as made:
        made.process.kill()
        wait_until(lambda: not look(made.leader).is_verified)

        assert made.members() == {}


def test_descendants_of_a_living_subreaper_are_members_except_those_below_a_supervisor():
    code = "import subprocess, sys, time; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); time.sleep(60)"
    child = subprocess.Popen(python(code, *python("import time; time.sleep(60)")), stdout=subprocess.PIPE)
    grandchild = int(child.stdout.readline())
    try:
        def found(never: frozenset[int]) -> set[int]:
            members = tree.members(secrets.token_hex(16), None, None, None, ancestor=os.getpid(), never=never)
            return {member.identity.pid for member in members}

        assert {child.pid, grandchild} <= found(frozenset())
        assert not {child.pid, grandchild} & found(frozenset({child.pid}))
    finally:
        tree.signal_one(identity_of(grandchild), signal.SIGKILL)
        child.kill()
        child.communicate()


def test_a_group_is_asked_one_by_one_and_each_answer_is_reported():
    with family("plain", "setsid") as made:
        members = tree.members(made.token, made.process.pid, None, made.leader)

        reports = tree.signal_group(members, signal.SIGTERM, signal.SIGCONT)

        assert {report.pid for report in reports if report.signal == signal.SIGTERM and report.delivered} == set(made.pids.values())
        assert [(report.pid, report.signal) for report in reports] == [
            (member.identity.pid, number) for member in members for number in (signal.SIGTERM, signal.SIGCONT)
        ]
        assert made.process.wait() == -signal.SIGTERM
        assert set(made.members(session=False)) == {made.pids["plain"], made.pids["setsid"]}, "they ignore SIGTERM and live"
