"""What a memory cap does here: a hog of twice the cap at four growth speeds under a real supervisor. `python benchmarks/caps.py` prints
the table and writes its rows into docs/caps.md; rows of other environments stay as they were measured there. `--ways` lets it hide its memory
in each way that hog.py knows instead, at one speed, and writes the second table.

As root it also measures an ordinary user, who gets no cgroup and is watched by the sampler alone. Elsewhere (a virtual machine, a host
with systemd): `python benchmarks/caps.py --rows FILE` there, `python benchmarks/caps.py --take FILE` here. It needs nothing but Python.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))

from fleetd.host import cgroups, cradle, launch, meters, rundir, tree  # noqa: E402
from fleetd.journal import Journal  # noqa: E402
from fleetd.model import Caps, DeadlineTerms, Observation, Owner, RestartTerms, RunSpec, StallTerms, StopTerms, WantOrder  # noqa: E402
from fleetd.paths import RunPaths  # noqa: E402
from policies.facts import MIB, CapGrade, RunKind, RunState, Want  # noqa: E402

CAP_BYTES = 256 * MIB
SPEEDS = (("10 MB/s", 10_000_000), ("100 MB/s", 100_000_000), ("1 GB/s", 1_000_000_000), ("as fast as memory allows", 0))
ROUNDS = 5
SLOW_ROUNDS_MAX = 2
"""Of the slowest hog, which takes half a minute and always ends the same."""
WAIT_SECONDS = 300.0
ENDED = (RunState.FAILED, RunState.HELD, RunState.FINISHED, RunState.STOPPED, RunState.STUCK)
ORDINARY_UID = 65534
TABLE = PROJECT / "docs" / "caps.md"
START, END = "<!-- rows of benchmarks/caps.py{} -->", "<!-- end of rows{} -->"
HEAD = "| environment | cap by | {} | what became of the hog (rounds) | most above the cap |\n|---|---|---|---|---|\n"
WAYS = {
    "child": "in a grandchild that left its session", "children": "in 20 children, a twentieth each", "memfd": "in a memfd, written and not mapped",
    "shm": "in a file of /dev/shm, written, unlinked, kept open", "cache": "in page cache alone, by writing a file",
    "dirty": "in dirty pages of a mapped file",
    "deaf": "in its own memory, deaf to SIGTERM", "idle": "not at all: a stranger takes the host's memory to its floor",
}
WAY_SPEED = 100_000_000
PROCESSES_MAX = 21
FLOOR_ROOM_BYTES = 192 * MIB
"""Between what the host has free when the idle hog starts, and its floor."""
TAKING = """
import os, select, sys
held = []
while not select.select([0], [], [], 0.02)[0]:
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    if free > int(sys.argv[1]) - 64 * 2**20 and len(held) < 256:
        held.append(b"x" * (16 * 2**20))
"""


@dataclass(frozen=True)
class Round:
    """One hog: what became of it, and by how much it got beyond its cap."""

    outcome: str
    over_bytes: int
    means: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--name", help="what this environment is called in the table")
    parser.add_argument("--rows", metavar="FILE", help="write the rows there (- for standard output) instead of into docs/caps.md")
    parser.add_argument("--take", metavar="FILE", nargs="+", help="measure nothing: put rows that were measured elsewhere into docs/caps.md")
    parser.add_argument("--ways", action="store_true", help="each way to hide memory, instead of each speed")
    parser.add_argument("--speed", choices=[*WAYS.values(), *(name for name, _ in SPEEDS)], metavar="ROW", action="append", help="only these")
    options = parser.parse_args()
    if options.take:
        rows = [row for file in options.take for row in Path(file).read_text(encoding="utf-8").splitlines() if row.startswith("|")]
        write_rows(rows, options.ways)
        return 0
    rows = measure(options)
    if options.rows == "-":
        print("\n".join(rows))
    elif options.rows:
        Path(options.rows).write_text("\n".join(rows) + "\n", encoding="utf-8")
    else:
        if os.geteuid() == 0:
            rows += measure_as_ordinary_user(options)
        write_rows(rows, options.ways)
    return 0


def measure(options: argparse.Namespace) -> list[str]:
    folder = Path(tempfile.mkdtemp(prefix="fleetd-caps-"))
    rows = []
    try:
        asked = [(words, WAY_SPEED, way) for way, words in WAYS.items()] if options.ways else [(name, speed, "anonymous") for name, speed in SPEEDS]
        for name, speed, way in asked:
            if options.speed and name not in options.speed:
                continue
            rounds = [one_round(folder, f"{speed}-{way}-{number}", speed, way) for number in range(rounds_of(speed, options.rounds))]
            rows.append(row_of(options.name or environment(rounds[0].means), name, rounds))
            print(rows[-1], file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return rows


def rounds_of(speed: int, wished: int) -> int:
    return min(wished, SLOW_ROUNDS_MAX) if 0 < speed < 50_000_000 else wished


def measure_as_ordinary_user(options: argparse.Namespace) -> list[str]:
    """The same, run by a user without any right to cgroups. The Python that runs this may lie where only root may look."""
    argv = [str(Path(__file__).resolve()), "--rows", "-", "--rounds", str(options.rounds)]
    argv += ["--ways"] if options.ways else []
    argv += [word for name in options.speed or [] for word in ("--speed", name)]
    for python in (sys.executable, "/usr/bin/python3"):
        done = subprocess.run(
            ("setpriv", f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}", "--clear-groups", python, "-B", *argv),
            stdout=subprocess.PIPE, text=True, check=False, env={**os.environ, "TMPDIR": tempfile.gettempdir(), "HOME": "/nonexistent"},
        )
        if done.returncode == 0 and done.stdout:
            return done.stdout.splitlines()
    print("no rows of an ordinary user: there is no Python that one may execute", file=sys.stderr)
    return []


def environment(means: str) -> str:
    who = "root" if os.geteuid() == 0 else "ordinary user"
    v1, v2 = cgroups.hierarchies()
    kind = "cgroup v1" if v1 else "cgroup v2" if v2 else "no cgroups"
    manager = ", systemd" if os.path.isdir("/run/systemd/system") else ""
    return f"{who}, {kind}{manager} (Linux {platform.release().split('-')[0]})"


def row_of(where: str, speed: str, rounds: list[Round]) -> str:
    outcomes = "; ".join(f"{outcome} ({count}/{len(rounds)})" for outcome, count in Counter(each.outcome for each in rounds).most_common())
    over = max(each.over_bytes for each in rounds)
    shown = "nothing" if over == 0 else f"{over / MIB:.1f} MiB"
    return f"| {where} | {rounds[0].means} | {speed} | {outcomes} | {shown} |"


def one_round(root: Path, name: str, speed: int, way: str) -> Round:
    counter = root / f"counter-{name}"
    counter.write_bytes(bytes(8 * PROCESSES_MAX))
    floor_bytes = (meters.available_bytes() or 0) - FLOOR_ROOM_BYTES if way == "idle" else MIB
    spec = order(name, counter, speed, way, floor_bytes)
    paths = RunPaths(root / "runs" / spec.run_id)
    want = WantOrder(sequence=1, want=Want.RUN, actor="benchmark", at=spec.created_at)
    rundir.create_run(paths, spec, None, want)
    launch.start_supervisor(paths.root)
    try:
        with stranger(paths, floor_bytes) if way == "idle" else contextlib.nullcontext():
            seen = wait_until_ended(paths)
        data = counter.read_bytes()
        held = 0 if way in ("cache", "dirty") else sum(int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8))
        over = max(0, held - CAP_BYTES)
        peak = exit_of(paths)["evidence"].get("peak_bytes")  # of a group whose members fell one by one only the kernel knows the sum
        return Round(outcome=outcome_of(paths, seen), over_bytes=over if peak is None else min(over, max(0, peak - CAP_BYTES)), means=means_of(seen))
    finally:
        clear(paths)


@contextlib.contextmanager
def stranger(paths: RunPaths, floor_bytes: int) -> Iterator[None]:
    """A process that is none of ours takes memory once the trainer has begun, until less than the floor is free."""
    give_up_seconds = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up_seconds and not ((seen := rundir.read_observation(paths)) and seen.memory and seen.memory.host_bytes):
        time.sleep(0.05)
    taker = subprocess.Popen((sys.executable, "-S", "-c", TAKING, str(floor_bytes)), stdin=subprocess.PIPE)
    try:
        yield
    finally:
        taker.communicate(b"\n")


def order(name: str, counter: Path, speed: int, way: str, floor_bytes: int) -> RunSpec:
    at = datetime.now(timezone.utc)
    argv = (sys.executable, "-S", str(PROJECT / "benchmarks" / "hog.py"), str(counter), str(2 * CAP_BYTES), str(speed), way)
    return RunSpec(
        run_id=f"{at:%Y%m%dT%H%M%SZ}-caps-hog{name}", campaign_id="caps", candidate="hog", kind=RunKind.TRAIN, created_at=at, argv=argv,
        owner=Owner(coordinator_id="benchmark", generation=1), environment={}, release_digest="",
        caps=Caps(host_bytes=CAP_BYTES, accelerator_bytes=CAP_BYTES, floor_bytes=floor_bytes),
        deadline=DeadlineTerms(final_at=at + timedelta(hours=2), cutoff_at=at + timedelta(hours=1)),
        stop=StopTerms(grace_floor_seconds=1.0, grace_ceiling_seconds=5.0), restarts=RestartTerms(restarts_max=0), stall=StallTerms(),
    )


def wait_until_ended(paths: RunPaths) -> Observation:
    give_up_seconds = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < give_up_seconds:
        seen = rundir.read_observation(paths)
        if seen is not None and seen.state in ENDED:
            return seen
        time.sleep(0.05)
    raise SystemExit(f"the hog did not end within {WAIT_SECONDS:.0f} s; see {paths.supervisor_log}")


def means_of(seen: Observation) -> str:
    assert seen.memory is not None
    cgroup = seen.memory.parts["cgroup"]
    kernel = cgroup.means.split(" /", 1)[0] if cgroup.grade is CapGrade.ENFORCED else None
    return f"{kernel} (enforced) and sampler" if kernel else "sampler alone (sampled)"


def outcome_of(paths: RunPaths, seen: Observation) -> str:
    """In the words of the evidence: who asked, who killed, and whether a checkpoint of the last step lies there."""
    notices = notices_of(paths)
    ended = exit_of(paths)
    signals = [each["body"] for each in notices if each["kind"] == "signal" and each["body"].get("delivered")]
    was_asked = any(body["signal"] == 15 for body in signals)
    is_saved = seen.step is not None and (paths.checkpoints / f"step-{seen.step:09d}" / "manifest.json").exists()
    if ended["exit_code"] == 10 and is_saved:
        why = next(each["body"]["detail"] for each in notices if each["kind"] == "state_changed" and each["body"]["to"] == "stopping")
        after = "the kernel had killed a member" if "killed" in why else "for the host's floor" if "available" in why else "at the soft line"
        return f"saved and stopped {after}"
    if ended["signal"] == 9:
        by_kernel = bool(ended["evidence"].get("oom_kills"))
        killer = "the kernel at the limit" if by_kernel else "the supervisor at the hard line" if len(signals) else "somebody"
        return f"{'asked, then ' if was_asked else ''}killed by {killer}"
    return f"left alone (exit {ended['exit_code']})"


def exit_of(paths: RunPaths) -> dict[str, Any]:
    return next(each["body"]["exit"] for each in notices_of(paths) if each["kind"] == "attempt_ended")


def notices_of(paths: RunPaths) -> list[dict[str, Any]]:
    journal = Journal.open(paths.journal, read_only=True)
    try:
        return journal.entries(limit=10_000)
    finally:
        journal.close()


def clear(paths: RunPaths) -> None:
    """End the supervisor of a held run and whatever of its tree is left. A supervisor goes when it is told that nothing is wanted any more."""
    stop = WantOrder(sequence=2, want=Want.STOP, actor="benchmark", at=datetime.now(timezone.utc))
    rundir.apply_want(paths, stop)
    give_up_seconds = time.monotonic() + 30.0
    while rundir.is_locked(paths.lock) and time.monotonic() < give_up_seconds:
        time.sleep(0.05)
    record = rundir.read_attempt(paths, 1)
    if record is not None:
        tree.kill_tree(record.token, record.session, record.cgroup, record.identity)
        cgroups.remove(cgroups.decode_group(record.cgroup))


def write_rows(rows: list[str], is_ways: bool) -> None:
    """A row of the same environment, mechanism and hog is replaced, others are kept."""
    text = TABLE.read_text(encoding="utf-8")
    start, end = (mark.format(" --ways" if is_ways else "") for mark in (START, END))
    before, _, rest = text.partition(start)
    inside, _, after = rest.partition(end)
    fresh = {tuple(_cells(row)[:3]) for row in rows}
    kept = [row for row in inside.splitlines() if re.match(r"\| (?!environment)[^-]", row) and tuple(_cells(row)[:3]) not in fresh]
    order_of = list(WAYS.values()) if is_ways else [name for name, _ in SPEEDS]
    whole = sorted([*kept, *rows], key=lambda row: (*_cells(row)[:2], order_of.index(_cells(row)[2])))
    table = HEAD.format("where it grows" if is_ways else "growth") + "\n".join(whole)
    TABLE.write_text(f"{before}{start}\n\n{table}\n\n{end}{after}", encoding="utf-8")
    print(table)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


if __name__ == "__main__":
    assert cradle.SELF_TEST_LIMIT_BYTES < CAP_BYTES, "the self-test is smaller than what is measured"
    sys.exit(main())
