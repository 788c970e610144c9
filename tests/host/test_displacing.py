"""Work of others on a real machine: found, asked to end once, proven gone with its memory, and brought back, whoever dies in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleetd.host import displacing, workloads
from fleetd.model import DisplaceOrder
from fleetd.paths import HostPaths
from fleetd.wire import decode, dumps
from policies.workloads import DisplacedState, Progress, Restart, Workload

HOG = Path(__file__).with_name("hog.py")
NAME = "hog"
HELD_MIB = 400
WAIT_SECONDS_MAX = 100.0


def wait_for(met: Any) -> Any:
    """What `met` gives once it is something."""
    give_up_at = time.monotonic() + WAIT_SECONDS_MAX
    while not (found := met()):
        assert time.monotonic() < give_up_at, "it never came"
        time.sleep(0.02)
    return found


class Place:
    """A host root, and hogs that are ended with it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, HostPaths(folder / "root")
        self.paths.root.mkdir()
        self.pids: set[int] = set()

    def argv(self, name: str = NAME, mib: int = 1, *more: str) -> tuple[str, ...]:
        return (sys.executable, "-S", str(HOG), str(self.folder), name, str(mib), *more)

    def run(self, name: str = NAME, mib: int = 1, *more: str, **variables: str) -> int:
        self.said(name).unlink(missing_ok=True)
        process = subprocess.Popen(self.argv(name, mib, *more), cwd=self.folder, env={**os.environ, **variables}, start_new_session=True)
        self.pids.add(process.pid)
        REAPED.append(process)
        wait_for(lambda: self.said(name).exists())
        return process.pid

    def said(self, name: str = NAME) -> Path:
        return self.folder / f"{name}.json"

    def workload(self, **changes: Any) -> Workload:
        restart = Restart(command=self.argv(), environment=("HOG_SAYS",))
        usual = Workload(name=NAME, pattern=f"{self.folder} {NAME} ", uid=os.getuid(), restart=restart, grace_seconds=120.0)
        return replace(usual, **changes)

    def order(self, workload: Workload, **changes: Any) -> DisplaceOrder:
        return DisplaceOrder(campaign_id="c1", workload=workload, found=workloads.find(self.paths.root, workload), **changes)

    def displace(self, order: DisplaceOrder) -> Progress:
        return decode(Progress, displacing.displace(self.paths, order)["progress"])

    def restore(self, order: DisplaceOrder, asking: int = 1) -> Progress:
        progress = decode(Progress, displacing.restore(self.paths, replace(order, asking=asking))["progress"])
        self.pids |= set(progress.pids)
        return progress

    def until(self, act: Any, *states: DisplacedState) -> Progress:
        found: Progress = wait_for(lambda: reap() or ((found := act()).state in states and found))
        reap()  # what has ended since the last look before that is a zombie of ours
        return found

    def audit(self) -> list[dict[str, Any]]:
        path = self.paths.displaced("c1", NAME).audit
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def end(self) -> None:
        for pid in self.pids:
            try:
                process = psutil.Process(pid)
                if str(HOG) in process.cmdline():
                    for each in (*process.children(recursive=True), process):
                        each.kill()
            except psutil.NoSuchProcess:
                continue
        reap()


REAPED: list[subprocess.Popen[bytes]] = []


def reap() -> None:
    for process in REAPED:
        process.poll()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.end()


def test_a_hog_is_shown_with_its_memory_asked_once_and_its_memory_comes_back(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = place.run(NAME, HELD_MIB)
    order = place.order(place.workload())
    (found,) = order.found.processes
    assert (found.identity.pid, found.identity.uid, found.working_directory) == (pid, os.getuid(), str(place.folder))
    assert found.identity.argv == place.argv(NAME, HELD_MIB) and found.unset == ("HOG_SAYS",)
    assert found.host_bytes is not None and found.host_bytes > HELD_MIB * 1024**2 and not found.is_ours
    assert decode(DisplaceOrder, json.loads(dumps(order))) == order, "it crosses a wire"

    first = place.displace(order)
    assert first.state is DisplacedState.STOPPING and f"pid {pid}" in first.text
    done = place.until(lambda: place.displace(order), DisplacedState.DISPLACED)
    # Where somebody else takes memory at this very moment, what it held is not seen to come back, and that is said.
    assert done.text.startswith(("it ended; it held 0.4 GiB, and ", "it ended, but of the 0.4 GiB that it held only "))
    assert done.available_bytes is not None
    assert not psutil.pid_exists(pid)
    (line,) = place.audit()
    assert (line["pid"], line["uid"], line["argv"]) == (pid, os.getuid(), list(place.argv(NAME, HELD_MIB))) and "argv match" in line["verdict"]
    monkeypatch.setattr(displacing.meters, "available_bytes", lambda: 0)  # others have taken what came back
    assert place.displace(order).state is DisplacedState.DISPLACED and len(place.audit()) == 1, "asked again, it changes nothing"


def test_it_comes_back_with_its_folder_and_its_variables_and_is_never_started_twice(place: Place) -> None:
    place.run(HOG_SAYS="it's $HOME")
    order = place.order(place.workload())
    place.until(lambda: place.displace(order), DisplacedState.DISPLACED)
    place.said().unlink()

    place.until(lambda: place.restore(order), DisplacedState.RESTORED)
    wait_for(lambda: place.said().exists())
    told = json.loads(place.said().read_text(encoding="utf-8"))
    assert (told["folder"], told["seen"]) == (str(place.folder), "it's $HOME")
    variables = place.paths.displaced("c1", NAME).variables(0)
    assert variables.stat().st_mode & 0o777 == 0o600 and "it's $HOME" not in dumps(order), "values stay in one file of the host"
    again = place.restore(order, asking=2)
    assert again.state is DisplacedState.RESTORED and again.pids == (told["pid"],) and "runs already" in again.text


def test_what_was_started_and_not_written_down_is_found_by_its_mark(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.run()
    other = place.workload(restart=Restart(command=("sleep", "300")))  # what runs then does not fit the pattern
    order = place.order(other)
    place.until(lambda: place.displace(order), DisplacedState.DISPLACED)

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(displacing.faults, "after", lambda point: dies() if point == "workload started" else None)
        with pytest.raises(KeyboardInterrupt):
            place.restore(order)
    back = place.until(lambda: place.restore(order), DisplacedState.RESTORED)
    try:
        assert len(back.pids) == 1 and place.restore(order, asking=2).pids == back.pids
        assert psutil.Process(back.pids[0]).cmdline() == ["sleep", "300"]
    finally:
        psutil.Process(back.pids[0]).kill()


def test_a_process_that_was_not_shown_is_never_touched(place: Place) -> None:
    place.run()
    order = place.order(place.workload())
    stranger = place.run(NAME, 2)
    held = place.displace(order)
    assert held.state is DisplacedState.HELD and f"pid {stranger}" in held.text and "not shown" in held.text
    assert place.audit() == [] and psutil.pid_exists(stranger) and psutil.pid_exists(order.found.processes[0].identity.pid)


def test_another_process_under_the_same_number_is_never_touched(place: Place) -> None:
    pid = place.run()
    order = place.order(place.workload())
    (found,) = order.found.processes
    older = replace(found, identity=replace(found.identity, start_ticks=found.identity.start_ticks - 100))
    held = place.displace(replace(order, found=replace(order.found, processes=(older,))))
    assert held.state is DisplacedState.HELD and psutil.pid_exists(pid) and place.audit() == []


def test_one_that_does_not_end_is_said_and_killed_only_where_the_plan_says_force(place: Place) -> None:
    pid = place.run(NAME, 1, "deaf", "child")
    order = place.order(place.workload(grace_seconds=0.3))
    assert len(order.found.processes) == 1 and len(order.found.processes[0].members) == 1, "its child belongs to it"
    held = place.until(lambda: place.displace(order), DisplacedState.HELD)
    assert "does not say force" in held.text and psutil.pid_exists(pid)
    assert [line["purpose"] for line in place.audit()] == ["SIGTERM for a displaced process"]

    forced = replace(order, workload=replace(order.workload, force=True))
    place.until(lambda: place.displace(forced), DisplacedState.DISPLACED)
    assert not psutil.pid_exists(pid)
    assert [line["purpose"] for line in place.audit()][1:] == ["SIGKILL for a displaced process"] * 2


def test_a_child_that_outlives_its_parent_is_waited_for(place: Place) -> None:
    pid = place.run(NAME, 1, "deaf child", "child")
    wait_for(lambda: place.said(f"{NAME}-child").exists())
    order = place.order(place.workload(grace_seconds=0.5))
    child = order.found.processes[0].members[0].pid
    place.pids.add(child)
    place.until(lambda: place.displace(order), DisplacedState.HELD)
    wait_for(lambda: reap() or not psutil.pid_exists(pid))
    held = place.displace(order)
    assert held.state is DisplacedState.HELD and f"pid {child}" in held.text and psutil.pid_exists(child)
    os.kill(child, signal.SIGKILL)
    place.until(lambda: place.displace(order), DisplacedState.DISPLACED)


def test_a_boot_in_between_forgets_what_was_asked_and_touches_nothing_new(place: Place) -> None:
    pid = place.run()
    order = place.order(place.workload())
    (found,) = order.found.processes
    earlier = replace(found, identity=replace(found.identity, boot_id="0" * 8, pid=found.identity.pid + 1))
    before = replace(order, found=replace(order.found, processes=(earlier,)))
    held = place.displace(before)
    assert held.state is DisplacedState.HELD and f"pid {pid}" in held.text
    back = place.restore(before, asking=1)
    assert back.state is DisplacedState.RESTORED and back.pids == (pid,) and "runs already" in back.text
    assert place.restore(before, asking=0).state is DisplacedState.RESTORED


def test_a_start_that_fails_says_its_last_words_and_is_not_repeated(place: Place) -> None:
    place.run()
    broken = place.workload(restart=Restart(command=("sh", "-c", "echo no model here >&2; exit 3")))
    order = place.order(broken)
    place.until(lambda: place.displace(order), DisplacedState.DISPLACED)
    failed = place.until(lambda: place.restore(order), DisplacedState.FAILED)
    assert "no model here" in failed.text
    assert place.restore(order).state is DisplacedState.FAILED
    assert place.paths.displaced("c1", NAME).output.read_text(encoding="utf-8").count("no model here") == 1
    missing = replace(order, workload=replace(broken, restart=Restart(command=("no-such-program",))))
    assert "No such file" in place.restore(missing, asking=2).text


def test_a_pattern_never_matches_the_look_itself(place: Place) -> None:
    question = dumps({"host": False, "displace": [place.workload()]})
    argv = [sys.executable, "-m", "fleetd.host.survey", str(place.paths.root), question]
    started = time.monotonic()
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["displace"][0]["processes"] == [] and time.monotonic() > started
