"""The shim with real trainers: the exit is known and durable, a second shim is refused, the tree ends at the cutoff."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from host_edges import (
    WAIT_SECONDS,
    executed,
    living_shim,
    make_run,
    make_spec,
    python,
    start_shim,
    supervised,
    wait_until,
    want_run,
    without_a_supervisor,
)
from test_rundir import checkpoint, flip_a_byte

from fleetd.host import cgroups, cradle, rundir
from fleetd.host.birth import EXIT_NOT_STARTED, conceive
from fleetd.host.processes import look, sight_of
from fleetd.host.tree import members
from fleetd.model import CutoffOrder
from policies.facts import MIB, CapGrade, SignalTarget, Want

DEAF = "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.write(1, b'deaf\\n')\ntime.sleep(120)"
POLITE = """
import os, signal, sys, time
def leave(number, frame):
    os.write(1, b"asked\\n")
    sys.exit(10)
signal.signal(signal.SIGTERM, leave)
os.write(1, b"ready\\n")
while True:
    time.sleep(0.05)
"""
ORPHANS = """
import os, subprocess, sys
for _ in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-S", "-c", sys.argv[1]])
        os._exit(0)
    os.wait()
sys.exit(7)
"""


def output(paths) -> str:
    return paths.attempt(1).stdout.read_text() if paths.attempt(1).stdout.exists() else ""


def order_cutoff(paths, seconds):
    """Once all that the test is about is there: what a slow machine takes for it is no part of the time that is left."""
    cutoff_at = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    assert rundir.apply_cutoff(paths, CutoffOrder(sequence=1, cutoff_at=cutoff_at, because="slow validation"))[0]


def ended(paths):
    return lambda: rundir.read_exit(paths, 1) is not None


def test_the_exit_of_a_trainer_is_known_and_durable_before_the_shim_leaves(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(10)"), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        assert shim.wait(WAIT_SECONDS) == 0
        record = rundir.read_exit(paths, 1)

    assert (record.exit_code, record.signal, record.wait_status, record.observed_by) == (10, None, 10 << 8, "shim")
    assert sorted(output(paths).split()) == ["err", "out"]
    assert not rundir.is_locked(paths.trainer_lock)


def test_a_trainer_that_is_killed_by_a_signal_is_recorded_with_it(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import time; time.sleep(60)"), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(executed(paths))
        os.kill(rundir.read_attempt(paths, 1).identity.pid, signal.SIGKILL)
        assert shim.wait(WAIT_SECONDS) == 0

    record = rundir.read_exit(paths, 1)
    assert (record.exit_code, record.signal, record.wait_status) == (None, signal.SIGKILL, 9)


def test_the_trainer_gets_its_session_its_contract_and_nothing_of_ours_on_its_path(tmp_path):
    code = "import json, os; print(json.dumps([dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), os.read(0, 1) == b'']))"
    spec = make_spec(python(code), run_id="r1", environment={"MINE": "1"})
    paths = make_run(tmp_path, spec)

    with supervised(paths), living_shim(paths) as shim:
        shim.wait(WAIT_SECONDS)

    environment, folder, leads_its_session, stdin_is_empty = json.loads(output(paths))
    assert (folder, leads_its_session, stdin_is_empty) == (str(paths.root), True, True)
    assert environment["FLEETD_RUN_DIR"] == str(paths.root)
    assert environment["FLEETD_RUN_ID"] == "r1"
    assert environment["FLEETD_RESUME"] == ""
    assert environment["FLEETD_MEMORY_CAP_BYTES"] == str(spec.caps.accelerator_bytes)
    assert environment["FLEETD_TRAIN_CUTOFF"].endswith("Z")
    assert environment["FLEETD_TREE_TOKEN"] == rundir.read_attempt(paths, 1).token
    assert environment["MINE"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"
    assert "PYTHONPATH" not in environment


def test_our_own_trainer_finds_the_release_on_its_path(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import os; print(os.environ['PYTHONPATH'])"), run_id="r1"), task={"task": "any"})

    with supervised(paths), living_shim(paths) as shim:
        shim.wait(WAIT_SECONDS)

    assert os.path.isfile(os.path.join(output(paths).strip(), "fleetd", "__init__.py"))


def test_the_trainer_resumes_from_the_newest_checkpoint_that_verifies(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import os; print(os.environ['FLEETD_RESUME'])"), run_id="r1"))
    good = checkpoint(paths, 100)
    flip_a_byte(checkpoint(paths, 200))

    with supervised(paths), living_shim(paths) as shim:
        shim.wait(WAIT_SECONDS)
        record = rundir.read_attempt(paths, 1)

    assert output(paths).strip() == str(good)
    assert (record.resume, record.resume_step) == (str(good), 100)
    assert record.refused[0].startswith("step-000000200")


def test_the_record_holds_the_argv_of_the_program_that_runs_also_after_further_execs(tmp_path):
    paths = make_run(tmp_path, make_spec(("sh", "-c", "sleep 0.3; exec sleep 60"), run_id="r1"))

    with supervised(paths), living_shim(paths):
        wait_until(lambda: executed(paths)() and rundir.read_attempt(paths, 1).identity.argv == ("sleep", "60"))

        assert look(rundir.read_attempt(paths, 1).identity).is_verified
        assert rundir.read_attempt(paths, 1).argv == ("sh", "-c", "sleep 0.3; exec sleep 60")


@pytest.mark.parametrize(
    ("argv", "folder", "said"),
    [
        (("/no/such/program",), None, "/no/such/program: No such file"),
        (("true",), "/no/such/folder", "/no/such/folder: No such file"),
        (("./plain.txt",), None, "./plain.txt: Permission denied"),
    ],
)
def test_a_program_that_cannot_be_executed_is_a_fault_of_the_order(tmp_path, argv, folder, said):
    paths = make_run(tmp_path, make_spec(argv, run_id="r1", working_directory=folder))
    (paths.root / "plain.txt").write_text("no program")

    with supervised(paths), living_shim(paths) as shim:
        assert shim.wait(WAIT_SECONDS) == 0

    record = rundir.read_exit(paths, 1)
    assert record.evidence["reason"] == "config"
    assert record.evidence["start"].startswith(said)
    assert not rundir.read_attempt(paths, 1).is_executed


def test_a_second_shim_for_the_same_attempt_is_refused_while_it_runs_and_afterwards(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import time; time.sleep(60)"), run_id="r1"))

    with supervised(paths), living_shim(paths) as first:
        wait_until(executed(paths))
        second = start_shim(paths)
        assert (second.wait(WAIT_SECONDS), b"holds" in second.communicate()[1]) == (3, True)

        os.kill(rundir.read_attempt(paths, 1).identity.pid, signal.SIGKILL)
        first.wait(WAIT_SECONDS)
        third = start_shim(paths)
        assert (third.wait(WAIT_SECONDS), b"started before" in third.communicate()[1]) == (3, True)

    assert rundir.read_exit(paths, 1).signal == signal.SIGKILL, "the record of the first is untouched"


@pytest.mark.parametrize("change", ["stop", "newer", "claimed"])
def test_a_shim_refuses_an_attempt_that_is_not_to_run(tmp_path, change):
    paths = make_run(tmp_path, make_spec(python("pass"), run_id="r1"))
    if change == "stop":
        rundir.apply_want(paths, want_run(2, Want.STOP))
    elif change == "newer":
        rundir.create_attempt(paths)
    else:
        rundir.mark_started(paths, 1)

    shim = start_shim(paths)

    assert shim.wait(WAIT_SECONDS) == 3
    assert b"shim refused" in shim.communicate()[1]
    assert rundir.read_exit(paths, 1) is None
    assert not paths.attempt(1).record.exists()


def test_the_trainers_lock_is_held_after_the_leaders_death_while_a_child_lives(tmp_path):
    paths = make_run(tmp_path, make_spec(python(ORPHANS, DEAF), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(ended(paths))
        attempt = rundir.read_attempt(paths, 1)
        orphans = members(attempt.token, None, attempt.cgroup, None)

        assert rundir.read_exit(paths, 1).exit_code == 7
        assert len(orphans) == 2
        assert shim.poll() is None, "the shim stays with the tree"
        assert rundir.is_locked(paths.trainer_lock)

        for orphan in orphans:
            os.kill(orphan.identity.pid, signal.SIGKILL)
        assert shim.wait(WAIT_SECONDS) == 0
    assert not rundir.is_locked(paths.trainer_lock)


def test_at_the_cutoff_the_whole_tree_is_killed_whoever_watches(tmp_path):
    paths = make_run(tmp_path, make_spec(python(ORPHANS.replace("sys.exit(7)", "exec(sys.argv[1])"), DEAF), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(executed(paths))
        attempt = rundir.read_attempt(paths, 1)
        wait_until(lambda: output(paths).count("deaf") == 3)
        everybody = [member.identity for member in members(attempt.token, attempt.session, attempt.cgroup, attempt.identity)]
        order_cutoff(paths, 0.3)
        assert shim.wait(WAIT_SECONDS) == 0

    assert len(everybody) == 3
    assert not any(look(identity).is_verified for identity in everybody)
    record = rundir.read_exit(paths, 1)
    assert (record.signal, record.evidence["reason"]) == (signal.SIGKILL, "deadline")
    assert record.evidence["killed_at"]
    assert {report["pid"] for report in record.evidence["signals"]} == {identity.pid for identity in everybody}


def test_a_cutoff_that_was_moved_earlier_rules(tmp_path):
    paths = make_run(tmp_path, make_spec(python(DEAF), run_id="r1", cutoff_seconds=3600.0))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(executed(paths))
        order_cutoff(paths, 0.5)
        assert shim.wait(WAIT_SECONDS) == 0

    assert rundir.read_exit(paths, 1).evidence["reason"] == "deadline"


def test_after_the_cutoff_nothing_is_started(tmp_path):
    paths = make_run(tmp_path, make_spec(python("print('ran')"), run_id="r1", cutoff_seconds=-1.0))

    with supervised(paths), living_shim(paths) as shim:
        assert shim.wait(WAIT_SECONDS) == 0

    record = rundir.read_exit(paths, 1)
    assert (record.wait_status, record.evidence["reason"]) == (None, "deadline")
    assert not paths.attempt(1).stdout.exists()


def test_a_hog_is_killed_at_the_cap_and_the_record_shows_whose_kill_it_was(tmp_path):
    if cradle.self_test().grade is not CapGrade.ENFORCED:
        pytest.skip("no limit bites here")
    hog = "held = [bytearray(b'x' * 2**20) for _ in range(400)]"
    paths = make_run(tmp_path, make_spec(python(hog), run_id="r1", host_bytes=100 * MIB))

    with supervised(paths), living_shim(paths) as shim:
        shim.wait(WAIT_SECONDS)
        attempt = rundir.read_attempt(paths, 1)

    record = rundir.read_exit(paths, 1)
    assert record.signal == signal.SIGKILL and record.evidence["oom_kills"] >= 1
    assert record.evidence["cap"].startswith("enforced: cgroup")
    assert not any(os.path.exists(folder) for folder in cgroups.decode_group(attempt.cgroup).folders)


def test_the_shim_itself_is_not_in_the_trainers_cgroup_session_or_token(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import time; time.sleep(60)"), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(executed(paths))
        attempt = rundir.read_attempt(paths, 1)
        found = members(attempt.token, attempt.session, attempt.cgroup, attempt.identity)

        assert [member.identity.pid for member in found] == [attempt.identity.pid]
        assert rundir.read_program(paths.shim).identity.pid == shim.pid
        assert os.getsid(shim.pid) == shim.pid


def test_a_shim_is_deaf_to_what_a_whole_service_is_told(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import time; time.sleep(60)"), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(executed(paths))
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(shim.pid, number)
        trainer = rundir.read_attempt(paths, 1).identity
        os.kill(trainer.pid, signal.SIGTERM)
        assert shim.wait(WAIT_SECONDS) == 0

    assert rundir.read_exit(paths, 1).signal == signal.SIGTERM, "the trainer has the defaults back"


def fill(path: Path) -> None:
    """Take every last byte of the disk."""
    with path.open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


def test_a_full_disk_delays_the_exit_record_but_never_loses_it(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if os.getuid() != 0 or os.system(f"mount -t tmpfs -o size=512k tmpfs {small} 2>/dev/null") != 0:
        pytest.skip("no small disk can be mounted here")
    try:
        spec = make_spec(python("import sys; open(sys.argv[1]).read(); sys.exit(5)", str(tmp_path / "go")), run_id="r1")
        paths = make_run(small, spec)
        os.mkfifo(tmp_path / "go")
        with supervised(paths), living_shim(paths) as shim:
            wait_until(executed(paths))
            trainer = rundir.read_attempt(paths, 1).identity
            filler = small / "filler"
            fill(filler)
            (tmp_path / "go").write_text("now")
            wait_until(lambda: look(trainer).is_dead)
            time.sleep(1.5)  # several ticks, each of which tries to write

            assert shim.poll() is None
            assert rundir.read_exit(paths, 1) is None
            assert sight_of(trainer.pid).state == "Z", "not reaped before its exit is on record"
            filler.unlink()
            assert shim.wait(WAIT_SECONDS) == 0
        assert rundir.read_exit(paths, 1).exit_code == 5
    finally:
        os.system(f"umount {small}")


def test_the_group_of_a_shell_is_asked_one_by_one_when_nobody_supervises(tmp_path):
    """The supervisor's lock is free: at the last safe moment the shim asks by itself."""
    command = ("sh", "-c", 'trap "" TERM; "$@" & wait $!; wait $!', "sh", *python(POLITE))
    paths = make_run(tmp_path, make_spec(command, run_id="r1", grace_seconds=90.0, signal=SignalTarget.GROUP))

    without_a_supervisor(paths)

    with living_shim(paths) as shim:
        wait_until(lambda: "ready" in output(paths), "the program below the shell")
        order_cutoff(paths, 90.5)
        assert shim.wait(WAIT_SECONDS) == 0

    record = rundir.read_exit(paths, 1)
    assert "asked" in output(paths), record
    assert record.evidence["asked_at"]
    assert {report["signal"] for report in record.evidence["signals"]} == {signal.SIGTERM, signal.SIGCONT}
    assert len({report["pid"] for report in record.evidence["signals"]}) == 2
    assert record.exit_code == 10


def test_the_trainer_itself_keeps_its_lock_when_the_shim_is_killed(tmp_path):
    paths = make_run(tmp_path, make_spec(python("import time; time.sleep(60)"), run_id="r1"))

    with supervised(paths), living_shim(paths) as shim:
        wait_until(executed(paths))
        shim.kill()
        shim.wait()

        assert look(rundir.read_attempt(paths, 1).identity).is_verified
        assert rundir.is_locked(paths.trainer_lock)
        second = start_shim(paths, rundir.create_attempt(paths))
        assert second.wait(WAIT_SECONDS) == 3, "two trainers on one run must never happen"
        second.communicate()


def test_a_child_whose_gate_never_opens_leaves_without_becoming_the_program(tmp_path):
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    marker = tmp_path / "ran"

    newborn = conceive(
        ("touch", str(marker)), dict(os.environ), folder=tmp_path, output=tmp_path / "out", group=cgroups.Group(), lock=lock
    )
    newborn.send_away()

    assert os.waitstatus_to_exitcode(os.waitpid(newborn.pid, 0)[1]) == EXIT_NOT_STARTED
    assert not marker.exists()
    os.close(newborn.report)
    os.close(lock)


@pytest.mark.parametrize(("demand", "runs"), [(CapGrade.ENFORCED, False), (CapGrade.SAMPLED, True)])
def test_a_plan_that_demands_an_enforced_cap_is_refused_where_the_kernel_gives_none(tmp_path, demand, runs):
    if os.getuid() != 0:
        pytest.skip("hides the cgroups in a mount namespace")
    paths = make_run(tmp_path, make_spec(python("print('ran')"), run_id="r1", demand=demand))
    hide = "mount -t tmpfs none /sys/fs/cgroup && exec \"$@\""

    with supervised(paths), living_shim(paths, before=("unshare", "--mount", "sh", "-c", hide, "sh")) as shim:
        assert shim.wait(WAIT_SECONDS) == 0

    record = rundir.read_exit(paths, 1)
    assert (output(paths) == "ran\n") is runs
    assert record.evidence["cap"].startswith("absent: ")
    assert (record.evidence.get("reason") == "preflight") is not runs
