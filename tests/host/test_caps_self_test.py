"""Before the first start a hog dies under the same mechanism; scopes are found, read back, and given up where they are none."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from host_edges import living_shim, make_run, make_spec, python, wait_until, without_a_supervisor
from host_runs import needs_root

from fleetd.host import cgroups, cradle, rundir, scopes
from fleetd.host.birth import ScopeRefused, conceive
from fleetd.host.kills import KillCounter, wait_for_kills
from fleetd.host.processes import boot_id
from fleetd.model import CapPart
from fleetd.paths import HostPaths
from policies.facts import MIB, CapGrade

SYSTEMD_RUN = """#!/bin/sh
# Does what systemd-run --scope does: put this process into a group of that name with that limit, then become the command.
while [ "$1" != "--" ]; do
  case "$1" in
    --unit=*) unit="${1#--unit=}" ;;
    --property=MemoryMax=*) limit="${1#--property=MemoryMax=}" ;;
  esac
  shift
done
shift
%s
exec "$@"
"""
MAKE = """
mkdir "$PLACE/$unit"
echo $limit > "$PLACE/$unit/memory.limit_in_bytes"
echo 0 > "$PLACE/$unit/cgroup.procs"
"""


def v1_folder() -> str:
    v1 = cgroups.hierarchies()[0]
    if v1 is None or os.geteuid() != 0:
        pytest.skip("only root with cgroup v1 memory can surely make a group by hand")
    return v1.folder


def enforced_or_skip() -> None:
    group, part = cgroups.create(f"captest-{os.getpid()}-{secrets.token_hex(3)}", 64 * MIB)
    cgroups.remove(group)
    if part.grade is not CapGrade.ENFORCED:
        pytest.skip(f"no cgroup with a limit is to be had here: {part.means}")


def test_the_self_test_lets_a_hog_die_and_leaves_nothing_behind() -> None:
    enforced_or_skip()

    part = cradle.self_test()

    assert part.grade is CapGrade.ENFORCED and "a 200 MiB hog under a 64 MiB limit died by the kernel's count" in part.means
    left = [name for place in cgroups.places() for name in os.listdir(place) if f"self-test-{os.getpid()}" in name]
    assert left == []


def test_a_limit_that_reads_back_and_does_not_bite_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    enforced_or_skip()
    monkeypatch.setattr(cgroups, "join", lambda group: None)

    part = cradle.self_test()

    assert part.grade is CapGrade.ABSENT and "ended with 0, 0 kills counted" in part.means


def test_what_a_hog_has_shown_is_kept_for_this_boot_by_mechanism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    shown = CapPart(grade=CapGrade.ENFORCED, means="cgroup v9: it died")
    monkeypatch.setattr(cradle, "self_test", lambda: tried.append("once") or shown)
    cap = CapPart(grade=CapGrade.ENFORCED, means="cgroup v9 /fleetd-x, limit read back 1.0 GiB")

    assert cradle.proven(tmp_path, cap) == cap == cradle.proven(tmp_path, cap)
    assert tried == ["once"]
    cradle.proven(tmp_path, replace(cap, means="systemd user scope /x, limit read back 1.0 GiB"))
    assert tried == ["once"] * 2, "another mechanism has its own hog"

    record = json.loads(HostPaths(tmp_path).caps.read_text())
    HostPaths(tmp_path).caps.write_text(json.dumps({**record, "boot_id": "an earlier boot"}))
    cradle.proven(tmp_path, cap)
    assert tried == ["once"] * 3 and json.loads(HostPaths(tmp_path).caps.read_text())["boot_id"] == boot_id()

    HostPaths(tmp_path).caps.write_text("{torn")
    cradle.proven(tmp_path, cap)
    assert tried == ["once"] * 4


def test_a_self_test_that_could_not_run_is_tried_again_and_nothing_counts_as_enforced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> CapPart:
        raise OSError("no process to be had")

    monkeypatch.setattr(cradle, "self_test", fails)
    part = cradle.proven(tmp_path, CapPart(grade=CapGrade.ENFORCED, means="cgroup v1 /fleetd-x, limit read back 1.0 GiB"))

    assert part.grade is CapGrade.ABSENT and "no process to be had" in part.means and not HostPaths(tmp_path).caps.exists()


@pytest.mark.parametrize("demand", [CapGrade.ENFORCED, CapGrade.SAMPLED])
def test_where_no_hog_dies_a_plan_that_demands_enforced_is_refused_before_the_start(tmp_path: Path, demand: CapGrade) -> None:
    enforced_or_skip()
    paths = make_run(tmp_path, make_spec(python("print('ran')"), run_id="r1", demand=demand))
    without_a_supervisor(paths)
    key = f"cgroup {'v1' if cgroups.hierarchies()[0] else 'v2'}, uid {os.geteuid()}"
    toothless = {"grade": "absent", "means": "a 200 MiB hog under a 64 MiB limit ended with 0, 0 kills counted"}
    HostPaths(tmp_path).caps.write_text(json.dumps({"boot_id": boot_id(), "parts": {key: toothless}}))

    with living_shim(paths):
        wait_until(lambda: rundir.read_exit(paths, 1) is not None)

    record = rundir.read_exit(paths, 1)
    assert record is not None
    if demand is CapGrade.ENFORCED:
        assert record.evidence["reason"] == "preflight" and "demands an enforced cap" in record.evidence["start"]
        assert "hog" in record.evidence["start"] and "ran" not in paths.attempt(1).stdout.read_text()
    else:
        assert record.exit_code == 0 and record.evidence["cap"].startswith("absent") and "hog" in record.evidence["cap"]


def scope_of(folder: Path, script: str, *, unit: str, environment: dict[str, str] | None = None) -> scopes.Scope:
    program = folder / "systemd-run"
    program.write_text(SYSTEMD_RUN % script)
    program.chmod(0o755)
    return scopes.Scope(
        unit=unit, manager="systemd scope", limit_bytes=64 * MIB, environment={"PATH": os.environ["PATH"], **(environment or {})},
        command=(str(program), "--user", "--scope", "--quiet", f"--unit={unit}", f"--property=MemoryMax={64 * MIB}", "--"),
    )


def bear_in(scope: scopes.Scope, folder: Path, argv: tuple[str, ...], **environment: str):  # type: ignore[no-untyped-def]
    return conceive(
        argv, {"PATH": os.environ["PATH"], **environment}, folder=folder, output=folder / "out", group=cgroups.Group(), lock=None, scope=scope,
    )


@needs_root
def test_a_trainer_that_came_through_a_scope_keeps_its_pid_session_words_and_environment(tmp_path: Path) -> None:
    unit = f"fleetd-captest-{os.getpid()}.scope"
    scope = scope_of(tmp_path, MAKE, unit=unit, environment={"PLACE": v1_folder()})
    code = (
        "import os, signal, sys; print(sys.argv[1:], os.getpid(), os.getsid(0), os.getcwd(), os.environ['MARK'], "
        "signal.pthread_sigmask(0, ()), flush=True); print('and errors', file=sys.stderr, flush=True); held = b'x' * (200 * 2**20)"
    )
    newborn = bear_in(scope, tmp_path, (sys.executable, "-c", code, "a b"), MARK="kept")
    group, part = scopes.found(scope, newborn.pid)
    try:
        assert part.grade is CapGrade.ENFORCED and part.means.startswith("systemd scope /") and "limit read back 64.0 MiB" in part.means
        assert group.memory is not None and group.memory.endswith(f"/{unit}") and cgroups.processes_in(group) == (newborn.pid,)

        newborn.open_gate()
        _, status = os.waitpid(newborn.pid, 0)

        assert os.WTERMSIG(status) == signal.SIGKILL and (cgroups.oom_kills(group) or 0) >= 1
        assert (tmp_path / "out").read_text() == f"['a b'] {newborn.pid} {newborn.pid} {tmp_path} kept set()\nand errors\n"
    finally:
        os.close(newborn.report)
        assert cgroups.remove(group)


def test_a_scope_of_which_only_the_exit_code_speaks_is_none_and_nobody_elses_group_is_taken_for_it(tmp_path: Path) -> None:
    scope = scope_of(tmp_path, ":", unit=f"fleetd-captest-{os.getpid()}.scope")
    newborn = bear_in(scope, tmp_path, (sys.executable, "-c", "print('ran')"))
    group, part = scopes.found(scope, newborn.pid)
    newborn.open_gate()
    _, status = os.waitpid(newborn.pid, 0)
    os.close(newborn.report)

    assert part.grade is CapGrade.ABSENT and f"pid {newborn.pid} is not in fleetd-captest" in part.means and group == cgroups.Group()
    assert status == 0 and (tmp_path / "out").read_text() == "ran\n"


@needs_root
def test_a_scope_whose_limit_is_silently_not_enforced_is_absent(tmp_path: Path) -> None:
    unit = f"fleetd-captest-{os.getpid()}.scope"
    scope = scope_of(tmp_path, 'mkdir "$PLACE/$unit"; echo 0 > "$PLACE/$unit/cgroup.procs"', unit=unit, environment={"PLACE": v1_folder()})
    newborn = bear_in(scope, tmp_path, (sys.executable, "-c", "pass"))
    _, part = scopes.found(scope, newborn.pid)
    newborn.open_gate()
    os.waitpid(newborn.pid, 0)
    os.close(newborn.report)

    assert part.grade is CapGrade.ABSENT and "the limit reads back as" in part.means
    assert cgroups.remove(cgroups.Group(memory=f"{v1_folder()}/{unit}"))


def test_a_manager_that_refuses_is_quoted_and_the_trainer_starts_without_a_scope(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scope = scope_of(tmp_path, "echo 'Failed to start transient scope unit: access denied' >&2; exit 1", unit="fleetd-captest.scope")
    with pytest.raises(ScopeRefused, match="access denied"):
        bear_in(scope, tmp_path, (sys.executable, "-c", "pass"))
    absent = CapPart(grade=CapGrade.ABSENT, means="cgroup v2: Permission denied")
    monkeypatch.setattr(cgroups, "create", lambda name, limit: (cgroups.Group(), absent))
    monkeypatch.setattr(cradle, "_scope", lambda name, limit: scope)

    def conceive_in(group: cgroups.Group, asked: scopes.Scope | None):  # type: ignore[no-untyped-def]
        argv = (sys.executable, "-c", "pass")
        return conceive(argv, dict(os.environ), folder=tmp_path, output=tmp_path / "out", group=group, lock=None, scope=asked)

    born = cradle.bear("captest", 64 * MIB, conceive_in)
    born.newborn.open_gate()
    os.waitpid(born.newborn.pid, 0)
    os.close(born.newborn.report)

    assert born.cap.grade is CapGrade.ABSENT and "access denied" in born.cap.means and "Permission denied" in born.cap.means
    with pytest.raises(OSError, match="access denied"):
        cradle.self_test()


def test_a_manager_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "SCOPE_SECONDS_MAX", 0.5)
    scope = scope_of(tmp_path, "exec sleep 600", unit="fleetd-captest.scope")

    with pytest.raises(ScopeRefused, match="made no scope within"):
        bear_in(scope, tmp_path, (sys.executable, "-c", "pass"))


def test_where_no_manager_can_help_the_reason_names_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(scopes, "SYSTEMD_RUNS", tmp_path / "nowhere")
    assert scopes.plan("x", MIB) == "systemd does not run here"

    (tmp_path / "systemd-run").write_text("#!/bin/sh\n")
    (tmp_path / "systemd-run").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(scopes, "SYSTEMD_RUNS", tmp_path)
    monkeypatch.setattr(scopes, "LINGERING", tmp_path / "linger")
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    assert "no systemd manager of user nobody" in str(scopes.plan("x", MIB))

    (tmp_path / "systemd").mkdir()
    (tmp_path / "systemd" / "private").touch()
    assert "loginctl enable-linger nobody" in str(scopes.plan("x", MIB)) and "end with the last login" in str(scopes.plan("x", MIB))

    (tmp_path / "linger").mkdir()
    (tmp_path / "linger" / "nobody").touch()
    scope = scopes.plan("x", MIB)
    assert isinstance(scope, scopes.Scope) and scope.unit == "fleetd-x.scope" and "--user" in scope.command and scope.command[-1] == "--"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    system = scopes.plan("x", MIB)
    assert isinstance(system, scopes.Scope) and "--user" not in system.command


def test_a_count_of_kills_is_remembered_when_its_group_has_vanished(tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("low 0\noom 1\noom_kill 2\n")
    counter = KillCounter(cgroups.Group(memory=str(tmp_path)))
    assert counter.fileno() >= 0 and counter.read() == 2
    (tmp_path / "memory.events").unlink()

    assert counter.read() == 2
    counter.close()
    assert counter.fileno() == -1 and KillCounter(cgroups.Group()).read() is None
    assert not wait_for_kills((), KillCounter(cgroups.Group()), 0.01)
