"""`make deadlines`: real campaigns of our trainer run into their deadline while something is broken; the table goes to docs/deadlines.md.

    situation   what has befallen the whole campaign: no coordinator, no link, a clock an hour off, another time zone
    fault       what has befallen one of its runs: supervisor killed, shim killed, both killed, a validation that never ends

Each situation is one campaign in an installation of its own, each fault one of its candidates; all meet the same cutoff. A witness
that is none of fleetd's processes holds a pidfd of every trainer. The exit status is 1 when a checkpoint came late or a tree lived on.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from deadline_place import DEAF_STEP, SITUATIONS, Place, Situation, kill, name_of
from live_fleet import EXAMPLE, step_of, trainer_pid

from fleetd.host import rundir
from fleetd.paths import RunPaths
from policies.facts import parse_moment

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "deadlines.md"
DEADLINE_SECONDS = 75
"""From the launch; five seconds of it are reserved. Five trainers that import torch on two cores need the first thirty."""
FACTOR_MAX, STANDSTILLS_MAX = 4, 3
STANDSTILL_SECONDS = 0.5
"""A machine that stood still for so long around the cutoff has shown nothing when a run met it badly: the situation is played again."""
WITNESS_SECONDS = 5.0
"""After the cutoff the witness still looks for so long."""
KILLED_SECONDS = 1.0
"""By so much a trainer may outlive the cutoff where the shim alone is left to kill it, at the cutoff itself."""
STEPS_FIRST = 10
FAULTS = ("nothing", "supervisor killed", "shim killed", "both killed", "deaf validation")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """How one run met the cutoff. Seconds are before it; `faults` says in words what was not as it has to be."""

    situation: str
    fault: str
    step: int
    saved_seconds: float
    dead_seconds: float | None
    ended: str
    faults: tuple[str, ...]


class Witness:
    """Holds every trainer by a pidfd, and notes when it ended by the machine's true clock."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.ended_at: dict[str, float] = {}
        try:
            self._held = {os.pidfd_open(pid): fault for fault, pid in pids.items()}
        except ProcessLookupError as fault:
            raise TooSlow from fault
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> None:
        self._thread.join(max(0.0, seconds))

    def _watch(self) -> None:
        while self._held:
            for held in select.select(list(self._held), [], [])[0]:
                self.ended_at[self._held.pop(held)] = time.time()
                os.close(held)


class Pulse:
    """Feels whether the machine or its disk stands still: a thread that sleeps for a moment, and one that syncs a small file."""

    def __init__(self, folder: Path) -> None:
        self.gaps: list[tuple[float, float, str]] = []
        self._path, self._is_over = folder / "pulse", False
        felt = ("machine", 0.02, _nothing), ("disk", 0.2, self._sync)
        self._threads = [threading.Thread(target=self._feel, args=each, daemon=True) for each in felt]
        for thread in self._threads:
            thread.start()

    def stood_still(self, since: float, until: float) -> list[str]:
        """Standstills that touch this stretch of true time, in words."""
        self._is_over = True
        for thread in self._threads:
            thread.join()
        return [f"the {what} for {end - began:.1f} s, {until - began:.1f} s before the end" for began, end, what in self.gaps
                if end > since and began < until]

    def _feel(self, what: str, pause_seconds: float, act: Callable[[], None]) -> None:
        while not self._is_over:
            began = time.time()
            act()
            time.sleep(pause_seconds)
            if time.time() - began > pause_seconds + STANDSTILL_SECONDS:
                self.gaps.append((began, time.time(), what))

    def _sync(self) -> None:
        with open(self._path, "wb") as file:
            file.write(b"pulse")
            file.flush()
            os.fsync(file.fileno())


def _nothing() -> None:
    pass


class TooSlow(Exception):
    """The last safe moment came before the faults did: this machine needs a longer deadline."""


class StoodStill(Exception):
    """Runs met the cutoff badly while the machine stood still."""


def meet_deadline(shards: Path, name: str, faults: tuple[str, ...] = FAULTS, seconds: int = DEADLINE_SECONDS) -> list[Cell]:
    """One situation in an installation of its own; on a machine that is too slow for it once more, with twice the time, and on one that stood
    still just then once more as it was."""
    factor, standstills = 1, list[str]()
    while factor <= FACTOR_MAX and len(standstills) < STANDSTILLS_MAX:
        place = Place(shards)
        try:
            return play(place, name, faults, factor * seconds)
        except TooSlow:
            factor *= 2
        except StoodStill as fault:
            standstills.append(str(fault))
        finally:
            place.close()
    assert factor <= FACTOR_MAX, f"even {FACTOR_MAX * seconds} s are not enough here to get {len(faults)} trainings to work"
    raise AssertionError("\n".join(["this machine stands still whenever a cutoff comes:", *standstills]))


def play(place: Place, name: str, faults: tuple[str, ...], seconds: int) -> list[Cell]:
    """One situation, with one run for each fault, until the cutoff is over."""
    situation = SITUATIONS[name]
    situation.before(place)
    campaign_id = place.launch(place.matrix_plan(faults, seconds))
    give_up_at = time.time() + 0.6 * seconds
    document = place.until(lambda document: time.time() > give_up_at or all_at_work(place, campaign_id, faults, document), "time passes", seconds)
    if not all_at_work(place, campaign_id, faults, document):
        raise TooSlow
    check_status(place, campaign_id, document)
    campaign = next(each for each in document["campaigns"] if each["campaign_id"] == campaign_id)
    cutoff = parse_moment(campaign["cutoff_at"]).timestamp()
    runs = {fault: run_of(document, campaign_id, fault) for fault in faults}
    witness = Witness({fault: trainer_pid(run) or 0 for fault, run in runs.items()})
    situation.at_work(place)
    for fault, run in runs.items():
        inflict(fault, RunPaths(place.run_dir(run)))
    stop_at = parse_moment(min(run["stop_at"] for run in runs.values())).timestamp()
    if time.time() > stop_at:
        raise TooSlow
    pulse = Pulse(place.root)
    witness.wait(cutoff - time.time() + WITNESS_SECONDS)
    stood_still = pulse.stood_still(stop_at, cutoff + WITNESS_SECONDS)
    if situation.has_coordinator:
        assert {host["reachable"] for host in place.status()["hosts"]} == {situation.has_link}
    cells = [judge(name, situation, fault, RunPaths(place.run_dir(run)), cutoff, witness.ended_at.get(fault)) for fault, run in runs.items()]
    if stood_still and any(cell.faults for cell in cells):
        raise StoodStill(f"{'; '.join(stood_still)}: {[(cell.fault, cell.faults) for cell in cells if cell.faults]}")
    return cells


def all_at_work(place: Place, campaign_id: str, faults: tuple[str, ...], document: dict[str, Any]) -> bool:
    runs = [run for run in document["runs"] if run["campaign_id"] == campaign_id]
    ready = len(runs) == len(faults) and all(run["state"] == "running" and step_of(run) >= STEPS_FIRST and trainer_pid(run) for run in runs)
    deaf = [run for run in runs if run["candidate"] == name_of("deaf validation")]
    return ready and all(records(RunPaths(place.run_dir(run)))[-1].get("phase") == "begin" and step_of(run) == DEAF_STEP for run in deaf)


def check_status(place: Place, campaign_id: str, document: dict[str, Any]) -> None:
    """Both deadlines and the last safe moment, for the campaign, for each run, and in words."""
    campaign = next(each for each in document["campaigns"] if each["campaign_id"] == campaign_id)
    moments = [parse_moment(campaign[key]) for key in ("last_safe_stop_at", "cutoff_at", "deadline_at")]
    assert moments == sorted(set(moments)), moments
    for run in document["runs"]:
        if run["campaign_id"] == campaign_id:
            moments = [parse_moment(run[key]) for key in ("stop_at", "cutoff_at", "final_at")]
            assert moments == sorted(set(moments)), moments
    words = place("status", expect=None).stdout
    if time.time() > parse_moment(campaign["last_safe_stop_at"]).timestamp():
        raise TooSlow
    assert "deadline in" in words and "last safe stop in" in words and "training cutoff" in words, words


def inflict(fault: str, paths: RunPaths) -> None:
    victims = {"supervisor killed": (paths.supervisor,), "shim killed": (paths.shim,), "both killed": (paths.supervisor, paths.shim)}
    for path in victims.get(fault, ()):
        record = rundir.read_program(path)
        assert record is not None
        kill(record.identity.pid)


def judge(name: str, situation: Situation, fault: str, paths: RunPaths, cutoff: float, ended_at: float | None) -> Cell:
    told = records(paths)
    saves = [record for record in told if record.get("event") == "save" and record.get("phase") == "end"]
    newest, refused = rundir.choose_resume(paths)
    wrong = [f"refused: {each}" for each in refused]
    step = newest.step if newest is not None else -1
    saved_at = next((parse_moment(save["at"]) for save in saves if save["step"] == step), None)
    stops = [record for record in told if record.get("event") == "stop"]
    ended = f"{stops[-1]['because']} heard" if stops else "killed"
    if saved_at is None or saved_at.timestamp() >= cutoff:
        wrong.append("no complete checkpoint before the cutoff")
    is_alone = fault == "both killed" and not (situation.has_coordinator and situation.has_link)
    if ended_at is None or ended_at > cutoff + (WITNESS_SECONDS if is_alone else KILLED_SECONDS):
        wrong.append("it lived on after the cutoff")
    if fault == "deaf validation":
        wrong += deaf_faults(paths, step)
    elif not stops or stops[-1]["step"] != step:
        wrong.append("its last step was not saved")
    adopted = bool(said(paths, "event=adopted "))
    expects = fault in ("supervisor killed", "both killed") and not is_alone
    if adopted is not expects:
        wrong.append(f"{'' if adopted else 'not '}adopted by another supervisor")
    return Cell(
        situation=name, fault=fault, step=step, saved_seconds=cutoff - (saved_at.timestamp() if saved_at is not None else cutoff),
        dead_seconds=None if ended_at is None else cutoff - ended_at, ended=ended, faults=tuple(wrong),
    )


def deaf_faults(paths: RunPaths, step: int) -> list[str]:
    """What is offered is the last periodic checkpoint; the alarm came before the force."""
    wrong = [] if step == DEAF_STEP else [f"step {step} is offered, not {DEAF_STEP}"]
    alarms, kills = said(paths, "event=alarm ", "within its grace"), said(paths, "event=signal ", f" signal={signal.SIGKILL:d} ")
    if not alarms or not kills or alarms[0] > kills[0]:
        wrong.append(f"no alarm before the force: alarms {alarms}, kills {kills}")
    return wrong


def said(paths: RunPaths, *words: str) -> list[int]:
    """Numbers of the lines in which its supervisors said all this, in order. What a coordinator has acknowledged stands nowhere else on a host."""
    lines = paths.supervisor_log.read_text(encoding="utf-8").splitlines()
    return [number for number, line in enumerate(lines) if all(word in line for word in words)]


def records(paths: RunPaths) -> list[dict[str, Any]]:
    lines = paths.log.read_text(encoding="utf-8").splitlines() if paths.log.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")] or [{}]


def run_of(document: dict[str, Any], campaign_id: str, fault: str) -> dict[str, Any]:
    return next(run for run in document["runs"] if run["campaign_id"] == campaign_id and run["candidate"] == name_of(fault))


# The table.

START, END = "<!-- rows of tests/live/deadline_matrix.py -->", "<!-- end of rows -->"
HEAD = "| situation | fault | checkpoint complete before the cutoff | trainer gone before the cutoff | by | step |\n|---|---|---|---|---|---|\n"


def main(names: list[str]) -> int:
    """Play these situations, all without names, and write what came of them over their old rows."""
    unknown = [name for name in names if name not in SITUATIONS]
    if unknown:
        print(f"no such situation: {', '.join(unknown)}; there are: {', '.join(SITUATIONS)}", file=sys.stderr)
        return 2
    wrong = 0
    for name in names or SITUATIONS:
        cells = meet_deadline(EXAMPLE, name)
        for cell in cells:
            wrong += bool(cell.faults)
            print(row(cell), *cell.faults, sep="  !! ", flush=True)
        write_rows(name, [row(cell) for cell in cells])
    print(f"{wrong} of the runs above met the cutoff badly" if wrong else f"each checkpoint came in time: {TABLE.relative_to(ROOT)}")
    return 1 if wrong else 0


def row(cell: Cell) -> str:
    how = "; ".join((cell.ended, *cell.faults))
    return f"| {cell.situation} | {cell.fault} | {cell.saved_seconds:.1f} s | {_before(cell.dead_seconds)} | {how} | {cell.step} |"


def _before(seconds: float | None) -> str:
    if seconds is None:
        return "never"
    return f"{seconds:.1f} s" if seconds >= 0 else f"{-seconds:.1f} s after it"


def write_rows(name: str, rows: list[str]) -> None:
    text = TABLE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    inside, _, after = rest.partition(END)
    kept = {situation: [line for line in inside.splitlines() if line.startswith(f"| {situation} |")] for situation in SITUATIONS}
    kept[name] = rows
    lines = [line for situation in SITUATIONS for line in kept[situation]]
    stamp = f"Last measured {datetime.now(timezone.utc):%Y-%m-%d} on {machine()}."
    body = f"{START}\n\n{stamp}\n\n{HEAD}" + "\n".join(lines) + f"\n\n{END}"
    TABLE.write_text(before + body + after, encoding="utf-8")


def machine() -> str:
    return f"{os.cpu_count()} cores ({platform.machine()}), Linux {platform.release()}, Python {platform.python_version()}"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started for a situation is ended with it
    sys.exit(main(sys.argv[1:]))
