"""Identity of real processes: what /proc and a pidfd prove, and that a stranger under a recorded pid is never signalled."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from host_edges import python, wait_until

from fleetd.files import read_record, write_record
from fleetd.host import processes, tree
from fleetd.host.processes import Grip, grip, identity_of, look, sight_of
from fleetd.wire import decode, encode
from policies.facts import ProcessIdentity
from policies.identity import Standing

SLEEP = python("import time; time.sleep(60)")
NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="changes its user in a child")


@pytest.fixture
def sleeper():
    child = subprocess.Popen(SLEEP)
    wait_until(lambda: sight_of(child.pid).argv == SLEEP, "the child's exec")
    yield child
    child.kill()
    child.wait()


def test_a_living_child_is_verified_and_its_record_survives_json(sleeper):
    recorded = decode(ProcessIdentity, encode(identity_of(sleeper.pid)))

    assert recorded.argv == SLEEP
    assert recorded.uid == os.getuid()
    assert look(recorded).is_verified


def test_a_signal_through_a_grip_reaches_the_verified_process(sleeper):
    with grip(identity_of(sleeper.pid)) as held:
        assert not held.exited()
        assert held.send(signal.SIGTERM)
        assert select.select([held], [], [], 100)[0]
        assert held.exited()
        assert not held.send(signal.SIGTERM), "an ended process is not signalled again"

    assert sleeper.wait() == -signal.SIGTERM


@pytest.mark.parametrize(
    "changed",
    [{"start_ticks": 17}, {"argv": ("python", "-m", "trainer")}, {"uid": 4321}, {"boot_id": "another-boot"}, {"pidfd_inode": 1}],
    ids=lambda changed: next(iter(changed)),
)
def test_a_stranger_under_a_recorded_pid_is_never_signalled(sleeper, changed):
    recorded = replace(identity_of(sleeper.pid), **changed)

    verdict = grip(recorded)
    reports = tree.signal_one(recorded, signal.SIGKILL)

    assert not isinstance(verdict, Grip)
    assert verdict.standing in (Standing.STRANGER, Standing.GONE)
    assert [report.delivered for report in reports] == [False]
    assert sleeper.poll() is None, "the stranger lives"
    assert look(identity_of(sleeper.pid)).is_verified


def test_a_zombie_is_gone_and_takes_no_signal(sleeper):
    recorded = identity_of(sleeper.pid)
    held = grip(recorded)
    sleeper.kill()
    wait_until(lambda: sight_of(sleeper.pid).state == "Z", "the zombie")

    assert look(recorded).standing is Standing.GONE
    assert not held.send(signal.SIGTERM)
    with pytest.raises(ProcessLookupError):
        identity_of(sleeper.pid)
    held.close()


def test_a_reaped_process_is_gone(sleeper):
    recorded = identity_of(sleeper.pid)
    sleeper.kill()
    sleeper.wait()

    verdict = look(recorded)

    assert verdict.standing is Standing.GONE
    assert verdict.is_dead


def test_a_name_with_parentheses_and_blanks_does_not_confuse_the_fields():
    code = "import ctypes,sys,time; ctypes.CDLL(None).prctl(15, b'x) R 1 (y'); print('named', flush=True); time.sleep(60)"
    child = subprocess.Popen(python(code), stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"named\n"
        sight = sight_of(child.pid)

        assert sight.state in ("S", "R")
        assert look(identity_of(child.pid)).is_verified
    finally:
        child.kill()
        child.communicate()


def test_an_argument_that_is_no_unicode_is_recorded_and_compared_all_the_same(tmp_path):
    child = subprocess.Popen([*SLEEP, b"\xff\xfe"])
    try:
        wait_until(lambda: len(sight_of(child.pid).argv or ()) == len(SLEEP) + 1)
        write_record(tmp_path / "record.json", identity_of(child.pid))

        assert look(decode(ProcessIdentity, read_record(tmp_path / "record.json"))).is_verified
    finally:
        child.kill()
        child.wait()


def test_an_exec_under_the_same_pid_is_a_stranger_but_no_proof_of_a_death():
    child = subprocess.Popen(
        python("import os,sys; sys.stdin.readline(); os.execv(sys.argv[1], [sys.argv[1], '-c', 'import time; time.sleep(60)'])", sys.executable),
        stdin=subprocess.PIPE,
    )
    try:
        wait_until(lambda: "sys.stdin" in (sight_of(child.pid).argv or ("", "", "", ""))[3])
        recorded = identity_of(child.pid)
        child.stdin.write(b"go\n")
        child.stdin.flush()
        wait_until(lambda: not look(recorded).is_verified)
        wait_until(lambda: look(recorded).standing is Standing.STRANGER)

        assert not look(recorded).is_dead
    finally:
        child.kill()
        child.communicate()


def test_a_mere_thread_under_a_recorded_pid_is_no_process_of_ours():
    code = """
import threading, time
thread = threading.Thread(target=time.sleep, args=(60,), daemon=True)
thread.start()
print(thread.native_id, flush=True)
time.sleep(60)
"""
    child = subprocess.Popen(python(code), stdout=subprocess.PIPE)
    try:
        thread = int(child.stdout.readline())
        recorded = replace(identity_of(child.pid), pid=thread, start_ticks=1)

        verdict = grip(recorded)

        assert not isinstance(verdict, Grip)
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


def as_nobody(check: str, pid: int, hide: int) -> str:
    """What `check` prints when an ordinary user evaluates it, in a mount namespace whose /proc hides others by `hidepid`."""
    code = f"""
import ctypes, os, sys
from fleetd.host.processes import *
from fleetd.host.processes import Grip
from fleetd.host.tree import signal_one
recorded = identity_of({pid})
libc = ctypes.CDLL(None, use_errno=True)
if {hide}:
    assert libc.unshare(0x00020000) == 0
    assert libc.mount(None, b"/", None, 16384 | (1 << 18), None) == 0
    assert libc.mount(b"proc", b"/proc", b"proc", 0, b"hidepid={hide}") == 0, ctypes.get_errno()
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
{check}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_root
@pytest.mark.parametrize("hide", [1, 2])
def test_a_process_that_hides_from_an_ordinary_user_cannot_be_verified_and_is_left_alone(sleeper, hide):
    said = as_nobody("print(look(recorded).standing.name, look(recorded).is_dead, isinstance(grip(recorded), Grip))", sleeper.pid, hide)

    assert said == "UNKNOWN False False"
    assert sleeper.poll() is None


@needs_root
def test_another_users_process_is_recognised_but_the_kernel_refuses_the_signal(sleeper):
    check = "report = signal_one(recorded, 9)[0]; print(report.delivered, report.verdict)"

    said = as_nobody(check, sleeper.pid, 0)

    assert said.startswith("False the kernel refused")
    assert sleeper.poll() is None


@pytest.mark.skipif(not processes.can_read_exit_by_pidfd(), reason="this kernel has no PIDFD_GET_INFO with the exit bit")
def test_an_adopter_reads_the_exit_status_through_a_pidfd_once_the_parent_has_reaped(sleeper):
    held = grip(identity_of(sleeper.pid))
    sleeper.terminate()
    assert select.select([held], [], [], 100)[0]
    assert processes.exit_status_by_pidfd(held.fileno()) is None, "not reaped yet"
    sleeper.wait()

    assert processes.exit_status_by_pidfd(held.fileno()) == signal.SIGTERM
    held.close()


def test_orphans_come_to_a_subreaper():
    code = """
import os, time
from fleetd.host.processes import set_child_subreaper
set_child_subreaper()
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(0.2)
        os._exit(42)
    os._exit(0)
os.wait()
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "42"


def test_two_processes_have_two_pidfd_inodes_where_the_kernel_gives_any(sleeper):
    own, other = identity_of(os.getpid()), identity_of(sleeper.pid)

    assert (own.pidfd_inode is None) == (other.pidfd_inode is None)
    assert own.pidfd_inode is None or own.pidfd_inode != other.pidfd_inode
