"""The host's part in moving work of others out of the way and bringing it back: one look, one step, and the answer, each time it is asked.

    look (workloads, units) ─► policies.displacement ─► record what comes next, durably ─► do it ─► Progress

Orders may come twice, from two agents, and after any of them died: a lock admits one at a time, the record says what was done, and a
started process carries a mark in its environment by which it is found although nobody lived to write its pid down.
"""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fleetd import clock, faults
from fleetd.files import append_line, read_record, write_record
from fleetd.host import devices, meters, units, workloads
from fleetd.host.launch import start_detached
from fleetd.host.processes import Grip, grip, look
from fleetd.host.rundir import try_lock
from fleetd.host.tree import all_pids
from fleetd.model import DisplaceOrder
from fleetd.paths import DisplacedPaths, HostPaths
from fleetd.wire import decode, encode
from policies.displacement import RestoreLook, Step, StopLook, Verdict, next_restore, next_stop
from policies.errors import RequestRefused
from policies.facts import ProcessIdentity, format_moment
from policies.workloads import DisplacedState, FoundProcess, Progress

LOCK_PATIENCE_SECONDS = 5.0
ENV_MARK = "FLEETD_DISPLACED"
"""In the environment of whatever is started again: which campaign had displaced which workload."""
BASE_VARIABLES = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG")
"""Kept beside those that the plan names: without them hardly anything starts."""
WORDS_BYTES = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """`NAME.json`. Seconds are of CLOCK_BOOTTIME in the boot named here; those of another boot mean nothing any more."""

    boot_id: str = ""
    asked_seconds: float | None = None
    is_asked: bool = False
    """Whether the asking was done; without it, it was only about to be."""
    before_bytes: int | None = None
    killed_seconds: float | None = None
    gone_seconds: float | None = None
    has_returned: bool = False
    """Whether the memory of what is gone was seen to be back."""
    asking: int = 0
    started_seconds: float | None = None
    started: tuple[ProcessIdentity, ...] = ()


def displace(paths: HostPaths, order: DisplaceOrder) -> dict[str, Any]:
    """One step on the way out. The answer's state is `displaced` once everything that was shown has ended and its memory is back."""
    with _held(paths, order) as (place, record):
        try:
            seen = _stop_look(order, record)
        except units.UnitFault as fault:
            return {"progress": encode(Progress(state=DisplacedState.HELD, text=f"it can't be looked at: {fault}"))}
        verdict = next_stop(order.workload, seen)
        if verdict.step is not Step.NONE:
            try:
                _carry_out(place, order, record, verdict)
            except (OSError, units.UnitFault) as fault:
                held = replace(verdict.progress, state=DisplacedState.HELD, text=f"it can't be ended: {fault}")
                verdict = replace(verdict, progress=held)
        elif not any(each.is_verified for each in seen.leaders) and not seen.members_left:
            gone_seconds = record.gone_seconds if record.gone_seconds is not None else clock.boottime_seconds()
            now = replace(record, gone_seconds=gone_seconds, has_returned=record.has_returned or verdict.progress.state is DisplacedState.DISPLACED)
            if now != record:
                _write(place, now)
        return {"progress": encode(verdict.progress)}


def restore(paths: HostPaths, order: DisplaceOrder) -> dict[str, Any]:
    """One step on the way back. With `asking` 0 only a look: `restored` where it runs, else `displaced`."""
    with _held(paths, order) as (place, record):
        if order.asking > record.asking:
            record = replace(record, asking=order.asking, started_seconds=None, started=())
        try:
            seen = _restore_look(place, order, record)
        except units.UnitFault as fault:
            state = DisplacedState.FAILED if order.asking else DisplacedState.DISPLACED
            return {"progress": encode(Progress(state=state, text=f"it can't be looked at: {fault}"))}
        if order.asking == 0:
            state = DisplacedState.RESTORED if len(seen.running) >= seen.wanted else DisplacedState.DISPLACED
            text = f"runs again without being asked: pid {', '.join(map(str, seen.running))}" if seen.running else "does not run"
            return {"progress": encode(Progress(state=state, text=text, pids=seen.running))}
        verdict = next_restore(order.workload, seen)
        if verdict.step is Step.START:
            try:
                _start(place, order, record, seen)
            except (OSError, units.UnitFault) as fault:
                failed = replace(verdict.progress, state=DisplacedState.FAILED, text=f"it can't be started: {fault}")
                verdict = replace(verdict, progress=failed)
        return {"progress": encode(verdict.progress)}


@contextmanager
def _held(paths: HostPaths, order: DisplaceOrder) -> Iterator[tuple[DisplacedPaths, Record]]:
    """The workload's files, while no other agent works on it."""
    place = paths.displaced(order.campaign_id, order.workload.name)
    place.folder.mkdir(parents=True, mode=0o711, exist_ok=True)  # the variables of another user's process are that user's to read
    lock = try_lock(place.lock, LOCK_PATIENCE_SECONDS)
    if lock is None:
        fix = "nothing: the order is sent again"
        raise RequestRefused(f"{order.workload.name} is being worked on", where=str(place.lock), what="another agent holds the lock", fix=fix)
    try:
        yield place, _read(place)
    finally:
        os.close(lock)


def _read(place: DisplacedPaths) -> Record:
    """What was done in this boot. After another one the processes of that time are gone, and so is what was asked of them."""
    try:
        record = decode(Record, read_record(place.record), str(place.record))
    except FileNotFoundError:
        return Record(boot_id=clock.boot_id())
    if record.boot_id == clock.boot_id():
        return record
    return Record(boot_id=clock.boot_id(), asking=record.asking, is_asked=record.is_asked)


def _write(place: DisplacedPaths, record: Record) -> None:
    write_record(place.record, record)


def _since(seconds: float | None) -> float | None:
    return None if seconds is None else max(0.0, clock.boottime_seconds() - seconds)


def _stop_look(order: DisplaceOrder, record: Record) -> StopLook:
    found, shown = order.found.processes, {each.identity.pid for each in order.found.processes}
    # One that can't be verified counts: it may live on. Another process under its number doesn't.
    members = tuple(member.pid for each in found for member in each.members if not look(member).is_dead)
    leaders = tuple(look(each.identity) for each in found)
    everybody = {*shown, *(member.pid for each in found for member in each.members)}
    use = devices.look()
    listed = tuple(sorted(pid for pid in everybody if use.holds(pid))) if devices.sees_machine_pids() else ()
    return StopLook(
        leaders=leaders, pids=tuple(sorted(shown)), members_left=members, newcomers=_newcomers(order),
        asked_seconds=_since(record.asked_seconds) if record.is_asked else None, killed_seconds=_since(record.killed_seconds),
        gone_seconds=_since(record.gone_seconds), held_bytes=sum(each.host_bytes or 0 for each in found), before_bytes=record.before_bytes,
        available_bytes=meters.available_bytes(), device_pids=listed, has_returned=record.has_returned,
    )


def _newcomers(order: DisplaceOrder) -> tuple[str, ...]:
    """Processes that are the workload now, and that preflight did not show."""
    shown = {(each.identity.pid, each.identity.start_ticks) for each in order.found.processes}
    members = {(member.pid, member.start_ticks) for each in order.found.processes for member in each.members}
    return tuple(f"pid {each.pid}" for each in _living(order) if (each.pid, each.start_ticks) not in shown | members)


def _living(order: DisplaceOrder) -> tuple[ProcessIdentity, ...]:
    """What is the workload by its description now."""
    workload = order.workload
    if workload.unit is None:
        return workloads.matching(workload)
    seen = units.show(workload.unit, is_user=workload.is_user_unit)
    found = workloads.identity_or_none(seen.main_pid) if seen.is_up and seen.main_pid else None
    return (found,) if found is not None else ()


def _carry_out(place: DisplacedPaths, order: DisplaceOrder, record: Record, verdict: Verdict) -> None:
    """Write down what comes, do it, and write down that it is done. Who dies in between asks once more, which is harmless."""
    is_kill = verdict.step is Step.KILL
    now_seconds = clock.boottime_seconds()
    if is_kill:
        record = replace(record, killed_seconds=now_seconds)
    else:
        for number, each in enumerate(order.found.processes):
            _keep_variables(place, order, number, each)
        record = replace(record, asked_seconds=now_seconds, before_bytes=meters.available_bytes(), boot_id=clock.boot_id())
    _write(place, record)
    faults.after("displacement recorded")
    workload = order.workload
    if workload.unit is not None:
        _audit(place, "kill of a displaced unit" if is_kill else "stop of a displaced unit", order.found.processes[0].identity, workload.unit)
        (units.kill if is_kill else units.stop)(workload.unit, is_user=workload.is_user_unit)
    else:
        _signal_all(place, order, signal.SIGKILL if is_kill else signal.SIGTERM)
    faults.after("displacement asked")
    if not is_kill:
        _write(place, replace(record, is_asked=True))


def _signal_all(place: DisplacedPaths, order: DisplaceOrder, number: signal.Signals) -> None:
    """SIGTERM for the leaders, who end what is below them; SIGKILL for everybody that was shown. Only for whom every field still matches."""
    for each in order.found.processes:
        for identity in (each.identity, *each.members) if number is signal.SIGKILL else (each.identity,):
            held = grip(identity)
            if isinstance(held, Grip):
                with held:
                    _audit(place, f"{number.name} for a displaced process", identity, str(held.verdict.explanation))
                    held.send(number)
                    held.send(signal.SIGCONT)
    if number is signal.SIGTERM and not any(look(each.identity).is_verified for each in order.found.processes):
        # The leaders are gone and left some of theirs behind.
        for identity in (member for each in order.found.processes for member in each.members):
            held = grip(identity)
            if isinstance(held, Grip):
                with held:
                    _audit(place, "SIGTERM for what a displaced process left behind", identity, str(held.verdict.explanation))
                    held.send(number)


def _audit(place: DisplacedPaths, purpose: str, target: ProcessIdentity, verdict: str) -> None:
    """Before the signal, durably: no deadline of ours waits for this disk."""
    append_line(place.audit, {
        "at": format_moment(clock.read().now), "by": "agent", "by_pid": os.getpid(), "purpose": purpose, "pid": target.pid,
        "start_ticks": target.start_ticks, "uid": target.uid, "argv": list(target.argv), "verdict": verdict,
    })


def _keep_variables(place: DisplacedPaths, order: DisplaceOrder, number: int, found: FoundProcess) -> None:
    """The environment of its next start, taken from the process itself, in a file that only its user may read."""
    restart = order.workload.restart
    if restart is None:
        return
    has = workloads.variables_of(found.identity.pid) or {}
    kept = {name: has[name] for name in (*BASE_VARIABLES, *restart.environment) if name in has}
    kept[ENV_MARK] = _mark(order)
    path = place.variables(number)
    temporary = path.with_name(f".{path.name}-{os.getpid()}-x.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.writelines(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(kept.items()) if name.isidentifier())
        file.flush()
        os.fsync(file.fileno())
        if os.geteuid() == 0 and found.identity.uid != 0:
            os.fchown(file.fileno(), found.identity.uid, -1)
    os.replace(temporary, path)


def _variables_kept(place: DisplacedPaths, order: DisplaceOrder, number: int) -> dict[str, str]:
    try:
        text = place.variables(number).read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return {ENV_MARK: _mark(order)}
    words = (word for word in shlex.split(text) if word != "export")
    return {name: value for name, _, value in (word.partition("=") for word in words)}


def _mark(order: DisplaceOrder) -> str:
    return f"{order.campaign_id}/{order.workload.name}"


def _restore_look(place: DisplacedPaths, order: DisplaceOrder, record: Record) -> RestoreLook:
    found, workload = order.found.processes, order.workload
    wanted = max(1, len(found))
    asked = _since(record.asked_seconds)
    lives = any(look(each.identity).is_verified for each in found)
    is_ending = lives and record.is_asked and asked is not None and asked < workload.grace_seconds
    if workload.unit is not None:
        seen = units.show(workload.unit, is_user=workload.is_user_unit)
        running = (seen.main_pid,) if seen.state == "active" and seen.main_pid else ()
        return RestoreLook(
            running=running, wanted=1, is_ending=is_ending, unit_state=seen.state, started_seconds=_since(record.started_seconds),
            last_words=f"systemd calls it {seen.state}, {seen.result}",
        )
    recorded = (*record.started, *(process.identity for process in found))
    alive = {each.pid for each in (*workloads.matching(workload), *recorded) if look(each).is_verified} | _marked(order)
    return RestoreLook(
        running=workloads.topmost(alive), wanted=wanted, is_ending=is_ending, started_seconds=_since(record.started_seconds),
        last_words=_last_words(place, order),
    )


def _marked(order: DisplaceOrder) -> set[int]:
    """Processes that an asking has started, by their mark: found although whoever started them did not live to write it down."""
    return {pid for pid in all_pids() if (workloads.variables_of(pid) or {}).get(ENV_MARK) == _mark(order)}


def _start(place: DisplacedPaths, order: DisplaceOrder, record: Record, seen: RestoreLook) -> None:
    """Start what is missing. The asking is on record before, so that whoever dies in between is found by the mark, not started twice."""
    workload = order.workload
    _write(place, record)
    faults.after("restoration recorded")
    if workload.unit is not None:
        units.start(workload.unit, is_user=workload.is_user_unit)
        _write(place, replace(record, started_seconds=clock.boottime_seconds()))
        return
    restart, started = workload.restart, list(record.started)
    assert restart is not None, "a plan that names a process says how it is started"
    for number in range(len(seen.running), seen.wanted):
        was = order.found.processes[number]
        folder = restart.working_directory or was.working_directory or "/"
        output = place.output if restart.output is None else Path(restart.output)
        pid = start_detached(restart.command, _variables_kept(place, order, number), output, folder=folder, uid=was.identity.uid)
        faults.after("workload started")
        identity = workloads.identity_or_none(pid)
        started += [identity] if identity is not None else []
    _write(place, replace(record, started_seconds=clock.boottime_seconds(), started=tuple(started)))


def _last_words(place: DisplacedPaths, order: DisplaceOrder) -> str:
    restart = order.workload.restart
    if restart is None or restart.output is not None:
        return ""
    try:
        with open(place.output, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - WORDS_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""
