"""Where a trainer comes into the world: under the strongest limit that this place gives, and with a limit that was seen to bite.

    1  a cgroup made by hand       v1 as root, v2 where it is ours to hand out       (cgroups)
    2  a transient systemd scope   v2 elsewhere, where a service manager helps       (scopes)
    3  none                        then the sampler alone watches, and the cap says so
The first start under a mechanism on a host and boot lets a small hog die under it (`self_test`); what was found is kept in the host's
root. A limit that reads back well and does not bite is none.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fleetd import faults, logs
from fleetd.clock import boottime_seconds
from fleetd.files import read_record, write_record
from fleetd.host import cgroups, rundir, scopes
from fleetd.host.birth import Newborn, ScopeRefused, conceive
from fleetd.host.kills import KillCounter, wait_for_kills
from fleetd.host.processes import boot_id
from fleetd.model import CapPart
from fleetd.paths import HostPaths
from fleetd.wire import WireError, decode
from policies.facts import MIB, CapGrade

SELF_TEST_LIMIT_BYTES = 64 * MIB
SELF_TEST_HOG_MIB = 200
SELF_TEST_SECONDS_MAX = 30.0
LOCK_PATIENCE_SECONDS = 60.0
"""Another start on this host may be at its self-test."""
_HOG = """
import sys
held = []
for _ in range(int(sys.argv[1])):
    held.append(bytearray(b"x" * 2**20))
"""

Conceive = Callable[[cgroups.Group, "scopes.Scope | None"], Newborn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Born:
    """A child at its gate, the group in which it lives, and how strongly that holds."""

    newborn: Newborn
    group: cgroups.Group
    cap: CapPart


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTests:
    """caps.json in the host's root: what hogs have shown in this boot, by mechanism and user."""

    boot_id: str
    parts: dict[str, CapPart] = field(default_factory=dict)


def bear(name: str, limit_bytes: int, conceive_in: Conceive) -> Born:
    """A child under the strongest limit to be had here. OSError when no child is to be had at all; then no group is left."""
    group, cap = cgroups.create(name, limit_bytes)
    faults.after("cgroup made")
    try:
        if cap.grade is not CapGrade.ENFORCED:
            scope = _scope(name, limit_bytes)
            if isinstance(scope, scopes.Scope):
                return _bear_in_scope(scope, group, cap, conceive_in)
            cap = replace(cap, means=f"{cap.means}; {scope}")
        newborn = conceive_in(group, None)
    except BaseException:
        cgroups.remove(group)
        raise
    if newborn.join_errno is not None:
        cap = CapPart(grade=CapGrade.ABSENT, means=f"joining the cgroup was refused: {os.strerror(newborn.join_errno)}")
    return Born(newborn=newborn, group=group, cap=cap)


def proven(root: Path, cap: CapPart) -> CapPart:
    """The same cap when a hog has died under its mechanism in this boot (tried now if nobody has before), else ABSENT with what happened."""
    if cap.grade is not CapGrade.ENFORCED:
        return cap
    shown = _shown(root, _mechanism(cap))
    return cap if shown.grade is CapGrade.ENFORCED else CapPart(grade=CapGrade.ABSENT, means=f"{cap.means}; but {shown.means}")


def host_part(root: Path) -> CapPart:
    """What the kernel can do for a cap on this host, as a hog has shown; ABSENT with why."""
    group, cap = cgroups.create(f"{cgroups.PROBE_PREFIX}{os.getpid()}", SELF_TEST_LIMIT_BYTES)
    cgroups.remove(group)
    if cap.grade is CapGrade.ENFORCED:
        return _shown(root, _mechanism(cap))
    scope = _scope("probe", SELF_TEST_LIMIT_BYTES)
    if isinstance(scope, scopes.Scope):
        return _shown(root, scope.manager)
    return replace(cap, means=f"{cap.means}; {scope}")


def self_test() -> CapPart:
    """ENFORCED when a 200 MiB hog died under a 64 MiB limit and the kernel counted it, else ABSENT with what happened.

    OSError when it could not be tried, also where no limit is to be had. It takes part of a second; `proven` keeps the answer for this boot.
    """
    born = bear(f"{cgroups.PROBE_PREFIX}self-test-{os.getpid()}", SELF_TEST_LIMIT_BYTES, _conceive_hog)
    counter = KillCounter(born.group)
    try:
        if born.cap.grade is not CapGrade.ENFORCED:
            born.newborn.send_away()
            os.waitpid(born.newborn.pid, 0)
            raise OSError(born.cap.means)  # nothing was shown: perhaps a manager that is only busy
        return _verdict(born.cap, _outcome_of_hog(born.newborn, counter), counter.read())
    finally:
        counter.close()
        os.close(born.newborn.report)
        cgroups.kill_all(born.group)
        cgroups.remove(born.group)


def _scope(name: str, limit_bytes: int) -> scopes.Scope | str:
    v1, v2 = cgroups.hierarchies()
    if v1 is not None or v2 is None:
        return "no systemd scope either: its limit would not be enforced, memory is counted by cgroup v1"
    return scopes.plan(name, limit_bytes)


def _bear_in_scope(scope: scopes.Scope, group: cgroups.Group, cap: CapPart, conceive_in: Conceive) -> Born:
    try:
        newborn = conceive_in(cgroups.Group(), scope)
    except ScopeRefused as refusal:
        logs.failed("scope_refused", unit=scope.unit, because=refusal)
        return Born(newborn=conceive_in(group, None), group=group, cap=replace(cap, means=f"{cap.means}; {scope.manager}: {refusal}"))
    cgroups.remove(group)
    found, part = scopes.found(scope, newborn.pid)
    return Born(newborn=newborn, group=found, cap=part)


def _mechanism(cap: CapPart) -> str:
    return cap.means.split(" /", 1)[0]


def _shown(root: Path, mechanism: str) -> CapPart:
    """From the host's root, else tried now and written there. Users and roots of one machine may differ in what they may do."""
    paths, key = HostPaths(root), f"{mechanism}, uid {os.geteuid()}"
    try:
        lock = rundir.try_lock(paths.caps_lock, LOCK_PATIENCE_SECONDS)
    except OSError:
        lock = None
    try:
        known = _read(paths)
        if key in known.parts:
            return known.parts[key]
        try:
            part = self_test()
        except OSError as fault:
            return CapPart(grade=CapGrade.ABSENT, means=f"the self-test could not run: {fault}")  # a passing trouble: tried again next time
        logs.changed("self_test", mechanism=mechanism, grade=part.grade, because=part.means)
        try:
            write_record(paths.caps, replace(known, parts={**known.parts, key: part}), durable=False)
        except OSError as fault:
            logs.failed("self_test_not_kept", because=fault)
        return part
    finally:
        if lock is not None:
            os.close(lock)


def _read(paths: HostPaths) -> SelfTests:
    """Nothing is known in another boot, or of a damaged record: the test is cheap."""
    try:
        known = decode(SelfTests, read_record(paths.caps), str(paths.caps))
    except (OSError, WireError):
        return SelfTests(boot_id=boot_id())
    return known if known.boot_id == boot_id() else SelfTests(boot_id=boot_id())


def _conceive_hog(group: cgroups.Group, scope: scopes.Scope | None) -> Newborn:
    argv = (sys.executable, "-I", "-S", "-c", _HOG, str(SELF_TEST_HOG_MIB))
    return conceive(argv, dict(os.environ), folder=Path("/"), output=Path(os.devnull), group=group, lock=None, scope=scope)


def _outcome_of_hog(hog: Newborn, counter: KillCounter) -> int | None:
    """Its raw wait status; None when it had to be ended by us."""
    descriptor = os.pidfd_open(hog.pid)
    try:
        hog.open_gate()
        give_up_seconds = boottime_seconds() + SELF_TEST_SECONDS_MAX
        while (left_seconds := give_up_seconds - boottime_seconds()) > 0:
            if wait_for_kills((descriptor,), counter, left_seconds):
                return os.waitpid(hog.pid, 0)[1]
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.waitpid(hog.pid, 0)
        return None
    finally:
        os.close(descriptor)


def _verdict(cap: CapPart, status: int | None, kills: int | None) -> CapPart:
    what = f"a {SELF_TEST_HOG_MIB} MiB hog under a {SELF_TEST_LIMIT_BYTES // MIB} MiB limit"
    if status is None:
        return CapPart(grade=CapGrade.ABSENT, means=f"{what} was neither refused nor ended within {SELF_TEST_SECONDS_MAX:.0f} s")
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL and kills:
        return CapPart(grade=CapGrade.ENFORCED, means=f"{_mechanism(cap)}: {what} died by the kernel's count")
    return CapPart(grade=CapGrade.ABSENT, means=f"{what} ended with {os.waitstatus_to_exitcode(status)}, {kills} kills counted")
