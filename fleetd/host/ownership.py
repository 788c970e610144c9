"""Whose orders this host obeys: `owner.json`, first come, by generation. Every order is checked, not only the hello.

Another coordinator becomes the owner only by a takeover that a person has asked for; `owners.jsonl` tells of each.
"""

from __future__ import annotations

import errno
from os import close
from pathlib import Path

from fleetd import clock
from fleetd.files import append_line, read_record, write_record
from fleetd.host.rundir import try_lock
from fleetd.model import Owner
from fleetd.paths import HostPaths
from fleetd.wire import WireError, decode
from policies.errors import ExplainedError, GenerationStale, OwnerMismatch
from policies.facts import format_moment

LOCK_PATIENCE_SECONDS = 5.0


def claim(paths: HostPaths, owner: Owner) -> None:
    """Record the first owner of this root, and each later generation of it. OwnerMismatch or GenerationStale for anybody else."""
    found = read_owner(paths)
    if found == owner:
        return
    paths.root.mkdir(parents=True, exist_ok=True)
    lock = _lock(paths.root / "owner.lock")
    try:
        found = read_owner(paths)
        if found is not None:
            _refuse_strangers(paths, found, owner)
        if found != owner:
            write_record(paths.owner, owner)
    finally:
        close(lock)


def take_over(paths: HostPaths, expected: Owner | None, owner: Owner, actor: str) -> Owner | None:
    """Make `owner` the one whose orders this root obeys, if it still belongs to `expected`. Returns the owner before. Told in owners.jsonl,
    durably, before it counts. OwnerMismatch when somebody else came in between: a takeover is decided on what a person was shown."""
    paths.root.mkdir(parents=True, exist_ok=True)
    lock = _lock(paths.root / "owner.lock")
    try:
        found = read_owner(paths)
        if found == owner:
            return expected
        if found != expected:
            raise OwnerMismatch(
                "the owner of this host has changed meanwhile", where=str(paths.owner),
                what=f"it obeys {_name(found)}, you were shown {_name(expected)}",
                fix="look again, and take it over from that one if that is still what you want",
            )
        append_line(paths.owners, {"at": format_moment(clock.read().now), "from": found, "to": owner, "actor": actor})
        write_record(paths.owner, owner)
        return found
    finally:
        close(lock)


def _name(owner: Owner | None) -> str:
    return "nobody" if owner is None else f"{owner.coordinator_id}, generation {owner.generation}"


def read_owner(paths: HostPaths) -> Owner | None:
    try:
        return decode(Owner, read_record(paths.owner), str(paths.owner))
    except FileNotFoundError:
        return None
    except WireError as fault:
        fix = f"look at {paths.owner}; once you know that no other coordinator uses this root, remove it"
        raise ExplainedError("the record of this host's owner is damaged", where=str(paths.owner), what=str(fault), fix=fix) from fault


def _refuse_strangers(paths: HostPaths, found: Owner, owner: Owner) -> None:
    if found.coordinator_id != owner.coordinator_id:
        raise OwnerMismatch(
            "this host belongs to another coordinator", where=str(paths.owner),
            what=f"it obeys {found.coordinator_id}, the order comes from {owner.coordinator_id}",
            fix="fleetd takeover HOST --plan PLAN   (once you know that the other one is gone for good), or give the plan another root on that host",
        )
    if owner.generation < found.generation:
        raise GenerationStale(
            "a newer life of this coordinator has spoken to this host", where=str(paths.owner),
            what=f"generation {found.generation} is recorded, the order carries {owner.generation}",
            fix="end the older coordinator process: only the newest one gives orders. If this one was restored from an older copy and is the "
            "only one: fleetd takeover HOST",
        )
    if owner.generation == found.generation and owner.life != found.life:
        raise GenerationStale(
            "another life of this coordinator has spoken to this host", where=str(paths.owner),
            what=f"both are generation {found.generation}: one of the two was started from a copy of the other's state directory",
            fix="end the one that is not to give orders, for good; then, at the other: fleetd takeover HOST, and start it again",
        )


def _lock(path: Path) -> int:
    descriptor = try_lock(path, LOCK_PATIENCE_SECONDS)
    if descriptor is None:
        raise ExplainedError(
            "the owner of this host is being changed", where=str(path), what=f"another agent has held the lock for {LOCK_PATIENCE_SECONDS:.0f} s",
            fix="nothing: the order is sent again",
        )
    return descriptor


def explain_os_error(fault: OSError, where: str) -> ExplainedError:
    """What a full disk, a missing right or a damaged device means to the person who waits for the order."""
    what = f"{fault.strerror or fault}" + (f": {fault.filename}" if fault.filename else "")
    if fault.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = f"free space below {where}; what runs goes on, and the order is sent again"
        return ExplainedError("the host's disk is full", where=where, what=what, fix=fix)
    if fault.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ExplainedError("the host's root can't be written", where=where, what=what, fix=f"let the agent's user write below {where}")
    return ExplainedError("the host could not carry out the order", where=where, what=what, fix="see the agent's log; the order is sent again")
