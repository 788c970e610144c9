"""A real agent over real pipes: ownership, idempotent orders, polls with news, the sweep, and reads that stay inside."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from host_runs import WAIT_SECONDS, HostRun, fill, needs_root, own_environment, small_disk, spec_for, wait_for, want

from fleetd.host import rundir
from fleetd.model import CutoffOrder, HostFacts, RunReport
from fleetd.paths import HostPaths
from fleetd.wire import decode, dumps, encode
from policies.facts import RunState, Want
from policies.manifest import MANIFEST_NAME, FileEntry, manifest_body

OWNER = {"coordinator_id": "coordinator", "generation": 1}


class Channel:
    """The coordinator's end of one agent."""

    def __init__(self, root: Path) -> None:
        argv = [sys.executable, "-m", "fleetd.host.agent", str(root)]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=own_environment(PYTHONDONTWRITEBYTECODE="1")
        )
        self.number = 0

    def send(self, order: str, owner: dict[str, Any] = OWNER, **body: Any) -> int:
        self.number += 1
        self.raw(dumps({"id": self.number, "order": order, "owner": owner, "body": body}))
        return self.number

    def raw(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found = json.loads(self.process.stdout.readline())
        assert isinstance(found, dict)
        return found

    def call(self, order: str, owner: dict[str, Any] = OWNER, **body: Any) -> dict[str, Any]:
        number = self.send(order, owner, **body)
        answer = self.answer()
        assert answer["id"] == number
        return answer

    def ok(self, order: str, **body: Any) -> dict[str, Any]:
        answer = self.call(order, **body)
        assert answer["ok"], answer
        return dict(answer["body"])

    def error(self, order: str, owner: dict[str, Any] = OWNER, **body: Any) -> dict[str, str]:
        answer = self.call(order, owner, **body)
        assert not answer["ok"], answer
        assert all(answer["error"][name] for name in ("error", "title", "where", "what", "fix")), "an error explains itself"
        return dict(answer["error"])

    def close(self) -> int:
        assert self.process.stdin is not None and self.process.stdout is not None and self.process.stderr is not None
        self.process.stdin.close()
        status = self.process.wait(WAIT_SECONDS)
        self.process.stdout.close()
        self.process.stderr.close()
        return status


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[..., Channel]]:
    channels: list[Channel] = []

    def begin(root: Path | None = None) -> Channel:
        channels.append(Channel(root or tmp_path / "root"))
        return channels[-1]

    yield begin
    for channel in channels:
        if channel.process.poll() is None:
            channel.close()
    if (tmp_path / "root" / "runs").is_dir():
        for folder in (tmp_path / "root" / "runs").iterdir():
            HostRun(tmp_path / "root", rundir.read_spec(HostPaths(tmp_path / "root").run(folder.name))).clean()


def start_body(run: HostRun, sequence: int = 1) -> dict[str, Any]:
    return {"spec": encode(run.spec), "task": None, "want": encode(want(sequence, Want.RUN))}


def test_hello_measures_the_host_and_records_its_first_owner(connect: Callable[..., Channel], tmp_path: Path) -> None:
    channel = connect()
    body = channel.ok("hello", protocol=1)
    facts = decode(HostFacts, body["facts"])
    assert facts.memory_total_bytes > facts.memory_available_bytes > 0 and facts.root_writable
    assert set(facts.cap_means) >= {"cgroup", "sampler", "floor"}
    assert json.loads((tmp_path / "root" / "owner.json").read_text()) == {**OWNER, "life": ""}
    assert channel.close() == 0, "the agent ends with its channel"


def test_another_coordinator_and_an_older_life_of_the_same_one_are_refused_on_every_order(connect: Callable[..., Channel]) -> None:
    channel = connect()
    channel.ok("hello", protocol=1)
    assert channel.call("hello", {"coordinator_id": "coordinator", "generation": 3}, protocol=1)["ok"]
    for order, body in (("hello", {"protocol": 1}), ("poll", {"after": {}, "wait_seconds": 0}), ("want", {"run_id": "r", "want": {}})):
        assert channel.error(order, {"coordinator_id": "other", "generation": 9}, **body)["error"] == "OwnerMismatch"
        assert channel.error(order, {"coordinator_id": "coordinator", "generation": 2}, **body)["error"] == "GenerationStale"
        copy = channel.error(order, {"coordinator_id": "coordinator", "generation": 3, "life": "from a copy"}, **body)
        assert copy["error"] == "GenerationStale" and "copy of the other's state directory" in copy["what"]


def test_a_start_sent_twice_starts_once_and_another_order_under_its_name_is_refused(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("20", "0.05", "pause_at=10"))
    channel = connect()
    channel.ok("hello", protocol=1)
    assert channel.ok("start", **start_body(run)) == {"created": True, "supervisor": "started"}
    run.wait_state(RunState.RUNNING)
    assert channel.ok("start", **start_body(run)) == {"created": False, "supervisor": "alive"}
    other = {**start_body(run), "spec": {**encode(run.spec), "argv": ["/bin/true"]}}
    assert channel.error("start", **other)["error"] == "RequestRefused"
    run.go()
    assert run.settle().state is RunState.FINISHED
    assert channel.ok("start", **start_body(run)) == {"created": False, "supervisor": "settled"}
    assert len(run.notices("attempt_started")) == 1


def test_polls_bring_each_notice_once_it_is_there_and_acknowledge_the_rest(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("10", "0.05"))
    channel = connect()
    channel.ok("start", **start_body(run))
    seen: list[int] = []
    state = None
    for _ in range(200):
        body = channel.ok("poll", after={run.spec.run_id: len(seen)}, wait_seconds=1)
        (report,) = (decode(RunReport, each) for each in body["runs"])
        seen += [notice.sequence for notice in report.notices]
        state = report.observation.state if report.observation else None
        if state is RunState.FINISHED and not report.notices:
            break
    assert state is RunState.FINISHED and seen == list(range(1, len(seen) + 1)) and len(seen) >= 6
    assert json.loads(run.paths.acknowledged.read_text()) == {"notice": len(seen)}
    assert body["memory_available_bytes"] > 0 and body["disk_free_bytes"] > 0


def test_what_was_acknowledged_and_dropped_is_told_as_lost_with_what_files_still_say(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("2000", "0.05"))
    channel, run_id = connect(), run.spec.run_id
    channel.ok("start", **start_body(run))
    run.wait_step(2)

    def report(after: int) -> RunReport:
        return decode(RunReport, channel.ok("poll", after={run_id: after}, wait_seconds=0.1)["runs"][0])

    known = report(0).notices[-1].sequence
    assert report(known).notices_lost_to == 0, "nothing is missing of what was asked for"
    wait_for(lambda: report(0).notices_lost_to >= known, WAIT_SECONDS, lambda: str(report(0)))
    again = report(0)
    assert all(notice.sequence > known for notice in again.notices)
    assert {(told.kind, told.sequence) for told in again.retold} >= {("attempt_started", 0)}
    assert [told.body["attempt"] for told in again.retold if told.kind == "attempt_started"] == [1]


def test_a_waiting_poll_does_not_hold_up_other_orders(connect: Callable[..., Channel], tmp_path: Path) -> None:
    channel = connect()
    channel.ok("hello", protocol=1)
    run = HostRun(tmp_path / "root", spec_for("5", "0.05"))
    waiting = channel.send("poll", after={run.spec.run_id: 0}, wait_seconds=60)
    asked = channel.send("facts")
    assert channel.answer()["id"] == asked
    started = channel.send("start", **start_body(run))
    assert [channel.answer()["id"], channel.answer()["id"]] == [started, waiting], "and what it waits for ends it"


def test_a_stale_wish_changes_nothing_and_is_acknowledged_as_such(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("2000", "0.05"))
    channel = connect()
    channel.ok("start", **start_body(run))
    run.wait_step(2)
    stop, again = encode(want(3, Want.STOP)), encode(want(2, Want.RUN))
    assert channel.ok("want", run_id=run.spec.run_id, want=stop) == {"applied": True, "sequence": 3, "want": stop}
    assert channel.ok("want", run_id=run.spec.run_id, want=again) == {"applied": False, "sequence": 3, "want": stop}, "what holds is told"
    assert run.settle().state is RunState.STOPPED
    assert channel.ok("want", run_id=run.spec.run_id, want=encode(want(4, Want.RUN)))["applied"]
    assert run.wait_step(3).attempt == 2


def test_a_cutoff_moves_earlier_and_never_later(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("2000", "0.05"))
    channel = connect()
    channel.ok("start", **start_body(run))
    assert run.spec.deadline is not None
    at = run.spec.deadline.cutoff_at
    later = CutoffOrder(sequence=1, cutoff_at=at.replace(year=at.year + 1), because="test")
    assert not channel.ok("cutoff", run_id=run.spec.run_id, cutoff=encode(later))["applied"]
    earlier = CutoffOrder(sequence=2, cutoff_at=run.spec.created_at, because="test")
    assert channel.ok("cutoff", run_id=run.spec.run_id, cutoff=encode(earlier))["applied"]
    assert run.settle().state is RunState.FINISHED


def test_the_sweep_starts_a_supervisor_where_it_and_the_shim_are_gone(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("5000", "0.05"))
    channel = connect()
    channel.ok("start", **start_body(run))
    pid = run.wait_step(2).pid
    run.orphan()
    give_up_at = time.monotonic() + WAIT_SECONDS
    while not run.notices("adopted") and time.monotonic() < give_up_at:
        channel.ok("poll", after={run.spec.run_id: 0}, wait_seconds=0.2)
        time.sleep(0.1)
    assert [notice["body"]["trainer_pid"] for notice in run.notices("adopted")] == [pid]


def test_reads_stay_inside_the_run_directory(connect: Callable[..., Channel], tmp_path: Path) -> None:
    run = HostRun(tmp_path / "root", spec_for("1", "0.01")).create()
    run.order(2, Want.STOP)
    run.paths.log.write_bytes(b'{"step":1}\n')
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    (run.paths.root / "link").symlink_to(secret)
    (run.paths.root / "folder").symlink_to(tmp_path)
    os.mkfifo(run.paths.root / "pipe")
    channel = connect()
    channel.ok("hello", protocol=1)

    body = channel.ok("read", run_id=run.spec.run_id, path="log.jsonl", offset=2, bytes_max=4)
    assert (base64.b64decode(body["data"]), body["size"], body["next"]) == (b"step", 11, 6)
    assert base64.b64decode(channel.ok("read", run_id=run.spec.run_id, path="log.jsonl", offset=-3)["data"]) == b"1}\n"
    for path in ("../../../secret", "/etc/passwd", "link", "folder/secret", "", "orders/../../x", "checkpoints/../link"):
        assert channel.error("read", run_id=run.spec.run_id, path=path)["error"] in ("RequestRefused", "NotFound")
        assert channel.error("digest", run_id=run.spec.run_id, path=path)["error"] in ("RequestRefused", "NotFound")
    for run_id in ("..", "../runs", "", ".hidden", None):
        assert channel.error("read", run_id=run_id, path="log.jsonl")["error"] == "RequestRefused"
    assert channel.error("read", run_id=run.spec.run_id, path="nothing.json")["error"] == "NotFound"
    assert not channel.call("read", run_id=run.spec.run_id, path="pipe")["ok"]
    (entry,) = channel.ok("digest", run_id=run.spec.run_id, path="log.jsonl")["entries"]
    assert entry["bytes"] == 11 and len(entry["sha256"]) == 64


def test_a_staged_directory_is_present_by_name_and_verified_by_its_bytes(connect: Callable[..., Channel], tmp_path: Path) -> None:
    entry = FileEntry(path="a.bin", bytes=3, sha256="2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824")
    entry = FileEntry(path="a.bin", bytes=5, sha256=entry.sha256)
    body = manifest_body([entry])
    folder = tmp_path / "root" / "models" / str(body["digest"])
    folder.mkdir(parents=True)
    (folder / "a.bin").write_bytes(b"hello")
    (folder / MANIFEST_NAME).write_text(json.dumps(body))
    channel = connect()
    channel.ok("hello", protocol=1)
    assert channel.ok("has", kind="models", digest=body["digest"]) == {"present": True}
    assert channel.ok("has", kind="models", digest="0" * 64) == {"present": False}
    assert channel.ok("verify", kind="models", digest=body["digest"]) == {"ok": True, "what": ""}
    (folder / "a.bin").write_bytes(b"hellO")
    verdict = channel.ok("verify", kind="models", digest=body["digest"])
    assert not verdict["ok"] and "a.bin" in verdict["what"]
    assert channel.error("has", kind="secrets", digest=body["digest"])["error"] == "RequestRefused"


def test_a_start_that_comes_after_its_run_was_left_behind_starts_nothing(connect: Callable[..., Channel], tmp_path: Path) -> None:
    """It may have waited in a jump host's buffer or in a suspended agent while the host was fenced: the host has nothing of the run yet."""
    run = HostRun(tmp_path / "root", spec_for("20", "0.05"))
    late, channel = connect(), connect()
    late.ok("hello", protocol=1)
    channel.ok("hello", protocol=1, left_behind=[run.spec.run_id])

    assert "not started here any more" in late.error("start", **start_body(run))["title"]
    assert not HostPaths(tmp_path / "root").run(run.spec.run_id).root.exists()


def test_nonsense_is_answered_and_the_agent_lives_on(connect: Callable[..., Channel]) -> None:
    channel = connect()
    for line in ("{", "[]", '{"id":1}', '{"id":2,"order":"start","owner":{"coordinator_id":"coordinator","generation":1},"body":{}}'):
        channel.raw(line)
        assert not channel.answer()["ok"]
    assert channel.error("dance")["error"] == "RequestRefused"
    assert channel.error("hello", protocol=99)["title"] == "agent and coordinator speak different protocols"
    assert channel.ok("hello", protocol=1)["protocol"] == 1


@needs_root
def test_a_root_that_is_full_or_not_writable_is_explained_and_the_agent_lives_on(connect: Callable[..., Channel], tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "64k") as folder:
        fill(folder)
        channel = connect(folder)
        assert channel.error("hello", protocol=1)["title"] == "the host's disk is full"
        (folder / "filler").unlink()
        assert channel.ok("hello", protocol=1)["protocol"] == 1
        assert channel.close() == 0
    with small_disk(tmp_path / "frozen", "64k", "ro") as folder:
        channel = connect(folder)
        assert channel.error("hello", protocol=1)["title"] == "the host's root can't be written"
        assert channel.close() == 0


def test_what_prints_in_the_agent_never_reaches_the_protocol(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom fleetd.host import agent\nold = agent.Agent._facts\n"
        "def loud(self):\n    print('noise on stdout')\n    return old(self)\n"
        "agent.Agent._facts = loud\nsys.exit(agent.main(sys.argv[1:]))"
    )
    line = dumps({"id": 1, "order": "facts", "owner": OWNER, "body": {}}).encode() + b"\n"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], input=line, capture_output=True, check=True)
    assert json.loads(done.stdout)["ok"] and b"noise" in done.stderr


def test_the_waiting_helper_says_what_did_not_happen() -> None:
    with pytest.raises(AssertionError, match="because of this"):
        wait_for(lambda: False, 0.05, lambda: "because of this")
