"""The far end of one channel to a virtual host. Mirrors fleetd/host/agent.py, reports.py and ownership.py.

It holds no state that matters: a new channel gets a new agent, and an old one may still carry out what was on its way to it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetd.host import ownership
from fleetd.host.ownership import explain_os_error
from fleetd.host.reports import NOTICES_PER_RUN_MAX, SHIM_PATIENCE_SECONDS, SWEEP_SECONDS, SWEEP_WAIT_SECONDS_MAX, look_age_seconds
from fleetd.kept_clock import pair_of
from fleetd.model import CutoffOrder, HostFacts, Owner, RunReport, RunSpec, WantOrder
from fleetd.paths import HostPaths
from fleetd.wire import decode, encode
from policies.deadlines import ClockPair
from policies.errors import ExplainedError, NotFound, RequestRefused
from policies.facts import RunState, Want, format_moment
from policies.identity import classify
from policies.lifecycle import SETTLED
from tests.sim.machine import Machine
from tests.sim.rundir import VirtualRun
from tests.sim.supervisor import start_supervisor

Answer = Callable[[dict[str, Any]], None]
LOOK_SECONDS = 0.1


class RunWatch:
    """One run directory as this agent last read it."""

    def __init__(self, run: VirtualRun) -> None:
        self.run = run
        self.told: tuple[object, ...] = ()
        self.free_since_seconds: float | None = None
        self.starts = 0
        self.next_start_seconds = 0.0

    @property
    def state(self) -> RunState | None:
        return self.run.shown_state

    @property
    def supervisor(self) -> str:
        return "alive" if self.run.is_locked() else "gone"

    @property
    def is_settled(self) -> bool:
        woken = self.state is RunState.STOPPED and self.run.want.want is Want.RUN
        return self.state in SETTLED and not woken


class VirtualAgent:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.world = machine, machine.world
        self.boots = machine.boots
        self._watches: dict[str, RunWatch] = {}
        self._swept_seconds = -100.0
        self._poll: tuple[dict[str, int], Answer, Any] | None = None
        self._is_looking = False

    @property
    def is_alive(self) -> bool:
        return self.machine.is_up and self.machine.boots == self.boots

    def carry_out(self, order: str, body: dict[str, Any], owner: Owner, answer: Answer) -> None:
        """Answer with `{"ok": body}` or `{"error": …}`; a poll later."""
        try:
            found = self._carry_out(order, body, owner, answer)
        except ExplainedError as fault:
            answer({"error": fault.to_json()})
        except OSError as fault:
            answer({"error": explain_os_error(fault, self.machine.name).to_json()})
        else:
            if found is not None:
                answer({"ok": found})

    def _carry_out(self, order: str, body: dict[str, Any], owner: Owner, answer: Answer) -> dict[str, Any] | None:
        if order == "facts":
            return {"facts": encode(self.facts())}
        self._claim(owner)
        self.machine.laws.obeyed(self.machine, order, owner)
        if order == "hello":
            self._judge_clock()
            self._end_left_behind(body, owner)
            return {"facts": encode(self.facts())}
        if order == "start":
            return self._start(body)
        if order == "poll":
            return self._take_poll(body, answer)
        run = self.machine.runs.get(body["run_id"])
        if run is None:
            raise NotFound("this host has no such run", where=body["run_id"], what="nothing is recorded of it", fix="fleetd status")
        if order == "cutoff":
            applied, held_at = run.apply_cutoff(decode(CutoffOrder, body["cutoff"])), run.effective_cutoff()
            return {"applied": applied, "cutoff_at": None if held_at is None else format_moment(held_at)}
        applied, want = run.apply_want(decode(WantOrder, body["want"]))
        self.machine.laws.ordered(run, want, applied)
        self._ensure_supervisor(run)
        return {"applied": applied, "sequence": want.sequence, "want": encode(want)}

    def _claim(self, owner: Owner) -> None:
        found = self.machine.owner
        if found == owner:
            return
        if found is not None:
            ownership._refuse_strangers(HostPaths(Path(f"/virtual/{self.machine.name}")), found, owner)
        self.machine.check_disk()
        self.machine.owner = owner

    def _end_left_behind(self, body: dict[str, Any], owner: Owner) -> None:
        for run_id in body.get("left_behind") or ():
            run = self.machine.runs.get(run_id)
            if run is None:
                self.machine.check_disk()
                self.machine.never_start.add(run_id)
            elif run.leave_behind(f"coordinator:{owner.coordinator_id}"):
                self._ensure_supervisor(run)
            self.machine.laws.told_to_end(self.machine, run_id)

    def _is_never_started(self, run_id: str) -> bool:
        return run_id in self.machine.never_start

    def _start(self, body: dict[str, Any]) -> dict[str, Any]:
        spec, want = decode(RunSpec, body["spec"]), decode(WantOrder, body["want"])
        if self._is_never_started(spec.run_id):
            raise RequestRefused("that run is not started here any more", where=spec.run_id, what="it goes on elsewhere", fix="fleetd status")
        run = self.machine.runs.get(spec.run_id)
        if run is None:
            self.machine.check_disk()
            run = self.machine.runs[spec.run_id] = VirtualRun(self.machine, spec, body.get("task"), want)
            self.machine.laws.created(run)
        elif run.spec != spec and encode(run.spec) | {"owner": 0} != encode(spec) | {"owner": 0}:
            raise RequestRefused("the run exists with another order", where=spec.run_id, what="another spec", fix="a new run gets a new id")
        else:
            run.apply_want(want)
        self.machine.laws.ordered(run, want, run.want == want)
        return {"created": True, "supervisor": self._ensure_supervisor(run)}

    def facts(self) -> HostFacts:
        machine = self.machine
        machine.laws.measured(machine)
        return HostFacts(
            hostname=machine.name, boot_id=machine.boot_id, kernel="6.14", python="3.11", architecture="x86_64", cpu_count=2,
            memory_total_bytes=machine.memory_bytes, memory_available_bytes=machine.available_bytes(), disk_free_bytes=self._disk_free(),
            root_writable=True,
        )

    def _disk_free(self) -> int:
        return self.machine.disk_free_bytes()

    # Polls and the sweep.

    def _take_poll(self, body: dict[str, Any], answer: Answer) -> None:
        after = dict(body["after"])
        if self.machine.kept is not None and body.get("clock") is not None:
            was_confirmed = self.machine.kept.is_confirmed
            self.machine.kept.confirm(decode(ClockPair, body["clock"]), pair_of(self.machine.moment()))
            if self.machine.kept.is_confirmed and not was_confirmed:
                self.world.say(self.machine.name, "is told what time it is")
        self._judge_clock()
        self._sweep()
        self._poll = (after, answer, self.world.after(body["wait_seconds"], self.answer_poll))
        if self._has_news(after):
            self.answer_poll()

    def _judge_clock(self) -> None:
        if self.machine.kept is not None:
            self.machine.kept.judge(pair_of(self.machine.moment()))

    def _watch(self, run: VirtualRun) -> RunWatch:
        if run.run_id not in self._watches:
            self._watches[run.run_id] = RunWatch(run)
            run.listeners.append(self._heard)
        return self._watches[run.run_id]

    def _heard(self) -> None:
        """Something changed in a run directory; a real agent finds it at its next look, a tenth of a second later."""
        if self._poll is not None and not self._is_looking and self.is_alive:
            self._is_looking = True
            self.world.after(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._is_looking = False
        if self._poll is not None and self._has_news(self._poll[0]):
            self.answer_poll()

    def _reported(self, after: dict[str, int]) -> list[RunWatch]:
        watches = [self._watch(run) for run in self.machine.runs.values()]
        return [watch for watch in watches if watch.run.run_id in after or not watch.is_settled]

    def _has_news(self, after: dict[str, int]) -> bool:
        return any(
            (watch.run.run_id in after and watch.run.notices(after[watch.run.run_id], 1))
            or (watch.told and watch.told != (watch.state, watch.supervisor))
            for watch in self._reported(after)
        )

    def answer_poll(self) -> None:
        if self._poll is None:
            return
        after, answer, timer = self._poll
        self._poll = None
        timer.call_off()
        if not self.is_alive:
            return
        reports = []
        for watch in self._reported(after):
            run = watch.run
            if run.run_id in after and after[run.run_id] > run.acknowledged and not self.machine.is_disk_full:
                run.acknowledged = after[run.run_id]
                run.acknowledged_ever = max(run.acknowledged_ever, run.acknowledged)
            watch.told = (watch.state, watch.supervisor)
            asked = after.get(run.run_id, 0)
            notices = run.notices(asked, NOTICES_PER_RUN_MAX)
            lost_to = run.lost_to(asked) if run.run_id in after else 0
            reports.append(RunReport(
                run_id=run.run_id, supervisor=watch.supervisor, observation=run.observation, notices=notices,
                look_age_seconds=look_age_seconds(run.observation, self.machine.boot_id, self.machine.moment()),
                notices_lost_to=lost_to, retold=run.retold() if lost_to else (), spec=run.spec if asked == 0 else None, want=run.want,
            ))
        at = format_moment(self.machine.moment().now)
        self.machine.laws.measured(self.machine)
        answer({"ok": {"at": at, "available": self.machine.available_bytes(), "free": self._disk_free(),
                       "boottime_seconds": self.machine.boottime_seconds(), "runs": tuple(reports)}})

    def _sweep(self) -> None:
        if self.world.seconds - self._swept_seconds < SWEEP_SECONDS:
            return
        self._swept_seconds = self.world.seconds
        for run in self.machine.runs.values():
            watch = self._watch(run)
            if watch.supervisor == "alive" or (watch.is_settled and not run.spool.is_damaged):
                watch.free_since_seconds = None
                continue
            if watch.free_since_seconds is None:
                watch.free_since_seconds = self.world.seconds
            patience_seconds = SHIM_PATIENCE_SECONDS if self._has_living_shim(run) else 0.0
            if self.world.seconds - watch.free_since_seconds >= patience_seconds and self.world.seconds >= watch.next_start_seconds:
                self._start_for(watch)

    def _has_living_shim(self, run: VirtualRun) -> bool:
        record = run.shim_record
        return record is not None and classify(record.identity, self.machine.sight(record.identity.pid)).is_verified

    def _ensure_supervisor(self, run: VirtualRun) -> str:
        watch = self._watch(run)
        if watch.supervisor == "alive":
            return "alive"
        if watch.is_settled:
            return "settled"
        self._start_for(watch)
        return "started"

    def _start_for(self, watch: RunWatch) -> None:
        watch.starts += 1
        watch.next_start_seconds = self.world.seconds + min(SWEEP_WAIT_SECONDS_MAX, 2.0 ** min(watch.starts, 10))
        watch.free_since_seconds = None
        start_supervisor(watch.run)

    def leave(self) -> None:
        """The channel is closed."""
        self._poll = None
        for watch in self._watches.values():
            if self._heard in watch.run.listeners:
                watch.run.listeners.remove(self._heard)
