"""The far end of the coordinator's one channel to a host: `<release>/fleetd/host agent ROOT`. JSON lines in, JSON lines out.

It holds no state, watches nothing and signals nobody but displaced work of others, as it is told to (displacing.py): it writes orders
into run directories, reads what is there, and starts supervisors that are missing. It ends when its standard input does, and everything
on the host goes on.
"""

from __future__ import annotations

import os
import platform
import select
import shutil
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetd import clock, faults, logs
from fleetd.host import cradle, devices, displacing, means, meters, reading, rundir, tidy
from fleetd.host.ownership import claim, explain_os_error, read_owner, take_over
from fleetd.host.processes import boot_id
from fleetd.host.reports import Reports
from fleetd.kept_clock import KeptClock, pair_of
from fleetd.model import CapPart, CutoffOrder, DisplaceOrder, HostFacts, Owner, RunSpec, WantOrder
from fleetd.paths import HostPaths
from fleetd.release_use import prune_releases
from fleetd.wire import LINE_BYTES_MAX, PROTOCOL, WireError, decode, dumps, encode, loads
from policies.deadlines import ClockPair
from policies.errors import ExplainedError, NotFound, RequestRefused
from policies.facts import format_moment

POLL_LOOK_SECONDS = 0.1
POLL_WAIT_SECONDS_MAX = 60.0
READ_BYTES = 256 * 1024
SILENCE_SECONDS_MAX = 600.0


@dataclass
class WaitingPoll:
    """A poll that is answered when there is news, or when its time is up."""

    number: Any
    after: dict[str, int]
    until_seconds: float


class Agent:
    def __init__(self, root: Path, output: int) -> None:
        self.root, self.paths, self._output = root, HostPaths(root), output
        self.reports = Reports(self.paths)
        self._clock = KeptClock(self.paths.clock)
        self._polls: list[WaitingPoll] = []
        self._buffer = b""
        self._cgroup_part: CapPart | None = None

    def serve(self, source: int) -> None:
        """Answer until `source` ends. While a poll waits, other orders are answered at once.

        A coordinator that says nothing for long is gone, even where the network never said so; a living one starts another agent.
        """
        heard_seconds = time.monotonic()
        while time.monotonic() - heard_seconds < SILENCE_SECONDS_MAX:
            timeout = POLL_LOOK_SECONDS if self._polls else SILENCE_SECONDS_MAX
            if select.select([source], [], [], timeout)[0]:
                data = os.read(source, READ_BYTES)
                if not data:
                    return
                self._take(data)
                heard_seconds = time.monotonic()
            self._answer_polls()

    def _take(self, data: bytes) -> None:
        self._buffer += data
        while b"\n" in self._buffer:
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line.strip():
                self._handle(line)
        if len(self._buffer) > LINE_BYTES_MAX:
            raise WireError(f"an order is over the limit of {LINE_BYTES_MAX} bytes")

    def _handle(self, line: bytes) -> None:
        number = None
        try:
            request = loads(line)
            if not isinstance(request, dict):
                raise WireError("an order is an object")
            number = request.get("id")
            answer = self._carry_out(number, str(request.get("order")), _object(request, "body"), decode(Owner, request.get("owner"), "owner"))
        except Exception as fault:  # whatever went wrong with one order, the agent lives on and says so
            self._write({"id": number, "ok": False, "error": self._explain(fault).to_json()})
        else:
            faults.after(f"{request.get('order')} carried out")
            if answer is not None:
                self._write({"id": number, "ok": True, "body": answer})

    def _explain(self, fault: Exception) -> ExplainedError:
        if isinstance(fault, ExplainedError):
            return fault
        if isinstance(fault, OSError):
            return explain_os_error(fault, str(self.root))
        if isinstance(fault, WireError | KeyError):
            what = f"{type(fault).__name__}: {fault}"
            return RequestRefused("the order can't be read", where="the order", what=what, fix="use the release that fleetd staged")
        traceback.print_exc()
        return ExplainedError("the agent made a mistake", where=str(self.root), what=f"{type(fault).__name__}: {fault}", fix="see the agent's log")

    def _carry_out(self, number: Any, order: str, body: dict[str, Any], owner: Owner) -> dict[str, Any] | None:
        """The answer's body; None for a poll, which is answered later."""
        if order == "hello":
            return self._hello(body, owner)
        if order == "facts":
            return {"facts": encode(self._facts())}
        if order == "owner":
            return {"owner": encode(read_owner(self.paths)), "runs": self.reports.at_work()}
        if order == "takeover":
            expected = body.get("from")
            before = take_over(self.paths, decode(Owner, expected, "from") if expected is not None else None, owner, str(body.get("actor") or ""))
            return {"from": encode(before)}
        claim(self.paths, owner)
        if order == "start":
            return self._start(body)
        if order == "poll":
            return self._poll(number, body)
        if order in ("has", "verify"):
            return self._staged(order, body)
        if order == "prune":
            keep = [reading.safe_name(digest, "digest") for digest in body.get("keep", ())]
            return {"removed": list(prune_releases(self.paths, keep))}
        if order in ("displace", "restore"):
            return self._displacement(order, body)
        run_id = reading.safe_name(body.get("run_id"), "run id")
        if not self.paths.run(run_id).order.exists():
            where = str(self.paths.run(run_id).root)
            raise NotFound("this host has no such run", where=where, what=f"nothing is recorded of {run_id}", fix="fleetd status")
        if order in ("want", "cutoff"):
            return self._change(order, run_id, body)
        root = self.paths.run(run_id).root
        if order == "read":
            return reading.read_part(root, body.get("path"), int(body.get("offset", 0)), int(body.get("bytes_max", reading.READ_BYTES_MAX)))
        if order == "digest":
            return {"entries": reading.entries_of(root, body.get("path"))}
        raise RequestRefused("the agent knows no such order", where="the order", what=order, fix="use the release that fleetd staged")

    def _hello(self, body: dict[str, Any], owner: Owner) -> dict[str, Any]:
        if body.get("protocol") != PROTOCOL:
            raise RequestRefused(
                "agent and coordinator speak different protocols", where=str(self.root), what=f"{body.get('protocol')!r} there, {PROTOCOL} here",
                fix="start the agent from the release that this coordinator staged",
            )
        claim(self.paths, owner)
        self._clock.judge(pair_of(clock.read()))
        self._end_left_behind(body, owner)
        return {"protocol": PROTOCOL, "facts": encode(self._facts())}

    def _end_left_behind(self, body: dict[str, Any], owner: Owner) -> None:
        """Before anything else happens here: end what is left of runs whose work went on elsewhere while this host was away."""
        for run_id in (reading.safe_name(each, "run id") for each in body.get("left_behind") or ()):
            paths = self.paths.run(run_id)
            if not paths.order.exists():  # its start may still come, out of a buffer on the way
                self.paths.never_start(run_id).parent.mkdir(exist_ok=True)
                self.paths.never_start(run_id).touch()
            if paths.order.exists() and rundir.leave_behind(paths, actor=f"coordinator:{owner.coordinator_id}", at=clock.read().now):
                logs.changed("left_behind", run=run_id, because="this host was fenced; its work goes on in another run")
                self.reports.ensure_supervisor(run_id)

    def _start(self, body: dict[str, Any]) -> dict[str, Any]:
        spec, want = decode(RunSpec, body["spec"], "spec"), decode(WantOrder, body["want"], "want")
        task = body.get("task")
        if task is not None and not isinstance(task, dict):
            raise WireError("task: expected an object or null")
        reading.safe_name(spec.run_id, "run id")
        paths = self.paths.run(spec.run_id)
        mark = self.paths.never_start(spec.run_id)
        if mark.exists():
            what, fix = "this host was fenced before the order came; its work goes on in another run", "nothing: fleetd status shows where it goes on"
            raise RequestRefused("that run is not started here any more", where=str(mark), what=what, fix=fix)
        created = rundir.create_run(paths, spec, task, want)
        if not created:
            rundir.apply_want(paths, want)
        if mark.exists():  # made by another agent meanwhile, which saw no run yet
            rundir.leave_behind(paths, actor=f"coordinator:{spec.owner.coordinator_id}", at=clock.read().now)
        logs.changed("run_created" if created else "run_was_there", run=spec.run_id)
        return {"created": created, "supervisor": self.reports.ensure_supervisor(spec.run_id)}

    def _displacement(self, order: str, body: dict[str, Any]) -> dict[str, Any]:
        asked = decode(DisplaceOrder, body.get("displacement"), "displacement")
        reading.safe_name(asked.campaign_id, "campaign id")
        reading.safe_name(asked.workload.name, "name of a workload")
        return (displacing.displace if order == "displace" else displacing.restore)(self.paths, asked)

    def _change(self, order: str, run_id: str, body: dict[str, Any]) -> dict[str, Any]:
        paths = self.paths.run(run_id)
        if order == "cutoff":
            applied, cutoff = rundir.apply_cutoff(paths, decode(CutoffOrder, body["cutoff"], "cutoff"))
            return {"applied": applied, "cutoff_at": format_moment(cutoff.cutoff_at)}
        applied, want = rundir.apply_want(paths, decode(WantOrder, body["want"], "want"))
        logs.changed("want_applied" if applied else "want_stale", run=run_id, want=want.want, sequence=want.sequence, actor=want.actor)
        self.reports.ensure_supervisor(run_id)
        return {"applied": applied, "sequence": want.sequence, "want": encode(want)}

    def _poll(self, number: Any, body: dict[str, Any]) -> dict[str, Any] | None:
        if body.get("clock") is not None:
            self._clock.confirm(decode(ClockPair, body["clock"], "clock"), pair_of(clock.read()))
        after = {reading.safe_name(run_id, "run id"): int(sequence) for run_id, sequence in _object(body, "after").items()}
        wait_seconds = max(0.0, min(float(body.get("wait_seconds", 0.0)), POLL_WAIT_SECONDS_MAX))
        self._polls.append(WaitingPoll(number=number, after=after, until_seconds=time.monotonic() + wait_seconds))
        self._clock.judge(pair_of(clock.read()))  # kept for supervisors that start after a step of the wall clock
        self.reports.sweep()
        return None

    def _answer_polls(self) -> None:
        waiting, self._polls = self._polls, []
        for poll in waiting:
            try:
                if not self.reports.has_news(poll.after) and time.monotonic() < poll.until_seconds:
                    self._polls.append(poll)
                    continue
                runs, moment = encode(self.reports.answer(poll.after)), clock.read()  # the clocks last: their readings are compared on arrival
                body = {
                    "at": format_moment(moment.now), "boottime_seconds": moment.boottime_seconds,
                    "memory_available_bytes": meters.available_bytes(), "disk_free_bytes": self._disk_free(), "runs": runs,
                }
                self._write({"id": poll.number, "ok": True, "body": body})
            except BrokenPipeError:
                raise
            except Exception as fault:  # as for every order
                self._write({"id": poll.number, "ok": False, "error": self._explain(fault).to_json()})

    def _staged(self, order: str, body: dict[str, Any]) -> dict[str, Any]:
        if order == "has":
            return {"present": reading.is_present(self.paths, body.get("kind"), body.get("digest"))}
        is_whole, what = reading.verify_staged(self.paths, body.get("kind"), body.get("digest"))
        return {"ok": is_whole, "what": what}

    def _facts(self) -> HostFacts:
        if self._cgroup_part is None:
            self._cgroup_part = cradle.host_part(self.root)
        accelerators = devices.names()
        return HostFacts(
            hostname=platform.node(), boot_id=boot_id(), kernel=platform.release(), python=platform.python_version(), architecture=platform.machine(),
            cpu_count=os.cpu_count() or 1, memory_total_bytes=meters.total_bytes(), memory_available_bytes=meters.available_bytes() or 0,
            disk_free_bytes=self._disk_free() or 0, root_writable=os.access(self.root, os.W_OK | os.X_OK),
            cap_means=means.of_host(self._cgroup_part, accelerators), accelerators=accelerators,
        )

    def _disk_free(self) -> int | None:
        try:
            return shutil.disk_usage(self.root).free
        except OSError:
            return None

    def _write(self, answer: dict[str, Any]) -> None:
        data = memoryview(dumps(answer).encode() + b"\n")
        while data:
            data = data[os.write(self._output, data):]


def _object(request: dict[str, Any], name: str) -> dict[str, Any]:
    value = request.get(name, {})
    if not isinstance(value, dict):
        raise WireError(f"{name}: expected an object")
    return value


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: fleetd/host/__main__.py agent ROOT", file=sys.stderr)
        return 2
    # The protocol has standard output for itself: whatever prints goes to standard error from here on.
    output = os.dup(1)
    os.dup2(2, 1)
    logs.to_standard_error()
    try:
        agent = Agent(Path(arguments[0]).absolute(), output)
        tidy.tidy_root(agent.paths)
        agent.serve(0)
    except BrokenPipeError:
        pass  # the coordinator is gone
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
