"""The kernel's part of a cap in a live tree: a member that it kills, a limit that is changed under us, a process that leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import HostRun, needs_root, spec_for

from fleetd.host import cgroups, rundir
from fleetd.model import Caps
from policies.facts import MIB, CapGrade, Reason, RunState

CAPS = Caps(host_bytes=128 * MIB, accelerator_bytes=MIB, floor_bytes=MIB, soft_fraction=1.0)
"""Its soft line is the kernel's limit: whoever gets there meets the kernel first."""
EATING_WORKER = """
import os, sys
sys.argv = sys.argv[1:]
if os.fork() == 0:
    held = b"x" * (400 * 2**20)
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HostRun]:
    if os.geteuid() != 0 or cgroups.hierarchies()[0] is None:
        pytest.skip("cgroup v1 as root: v2 ends a group as a whole")
    made = HostRun(tmp_path / "root", spec_for("5000", "0.05", "every=1000", caps=CAPS))
    yield made
    made.clean()


def group_of(run: HostRun) -> cgroups.Group:
    record = rundir.read_attempt(run.paths, 1)
    assert record is not None
    return cgroups.decode_group(record.cgroup)


@needs_root
def test_a_worker_that_the_kernel_killed_at_the_limit_makes_its_trainer_save_and_stop(run: HostRun) -> None:
    argv = (sys.executable, "-S", "-c", EATING_WORKER, *run.spec.argv[2:])
    run.spec = spec_for(argv=argv, caps=CAPS)
    run.create().supervise()

    seen = run.settle()

    assert (seen.state, seen.reason, seen.attempt) == (RunState.FAILED, Reason.MEMORY, 1) and "asking was enough" in seen.detail
    stopping = next(notice["body"] for notice in run.notices("state_changed") if notice["body"]["to"] == "stopping")
    assert "the kernel has killed " in stopping["detail"] and "at the limit" in stopping["detail"]
    assert (run.paths.checkpoints / f"step-{seen.step:09d}").exists()


@needs_root
def test_a_limit_that_somebody_raised_or_a_process_that_left_is_no_enforced_cap_any_more(run: HostRun) -> None:
    run.create().supervise()

    def part(what: str) -> bool:
        def shows(seen: object) -> bool:
            found = seen.memory.parts["cgroup"]  # type: ignore[attr-defined]
            return what in found.means and found.grade is (CapGrade.ABSENT if what.startswith(("the", "pid")) else CapGrade.ENFORCED)

        return bool(run.wait(lambda seen: seen.memory and shows(seen)))

    run.wait_step(1)
    assert part("limit read back 0.1 GiB")
    folder = Path(str(group_of(run).memory))
    with_swap = folder / "memory.memsw.limit_in_bytes"  # may never be the lower one of the two
    if with_swap.exists():
        with_swap.write_text(str(512 * MIB))
    (folder / "memory.limit_in_bytes").write_text(str(512 * MIB))
    assert part(f"the limit reads back as {512 * MIB} now")
    (folder / "memory.limit_in_bytes").write_text(str(128 * MIB))
    assert part("limit read back 0.1 GiB"), "and it is told when it holds again"
    leader = rundir.read_attempt(run.paths, 1)
    assert leader is not None
    (folder.parent / "cgroup.procs").write_text(str(leader.identity.pid))
    assert part(f"pid {leader.identity.pid} of the tree lives outside")


def test_a_kill_in_a_group_that_never_stood_at_its_limit_was_for_the_machines_sake(tmp_path: Path) -> None:
    group = cgroups.Group(memory=str(tmp_path))
    (tmp_path / "memory.limit_in_bytes").write_text(str(64 * MIB))
    for name, text, is_hit in (
        ("memory.events", "low 0\nmax 9\noom 0\noom_kill 1\n", False), ("memory.events", "low 0\noom 1\noom_kill 1\n", True),
        ("memory.max_usage_in_bytes", str(63 * MIB), False), ("memory.max_usage_in_bytes", str(64 * MIB - 4096), True),
    ):
        (tmp_path / name).write_text(text)
        assert cgroups.limit_was_hit(group) is is_hit
        (tmp_path / name).unlink()
