"""A trainer that only grows: `hog.py COUNTERS TARGET_BYTES BYTES_PER_SECOND [WAY]` (0: as fast as memory allows). Standard library alone.

    anonymous   its own memory (the default)           cache      files that it writes, nothing but page cache
    child       memory of a grandchild that left       dirty      a file that it maps and dirties
    children    memory of 20 children                  idle       it does not grow at all
    memfd, shm  files in memory, written, not mapped   deaf       its own memory, and SIGTERM changes nothing

It keeps the trainer contract: after SIGTERM it grows no more, saves, and exits 10. COUNTERS is a file of 8 bytes for each process that grows,
mapped into memory: what it holds right now, to be read by whoever measures even if it is killed in between.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

CHUNK = b"x" * (1 << 20)
STEP_SECONDS = 0.05
HOLD_SECONDS = 20.0
HOLD_HARMLESS_SECONDS = 3.0
SAVE_SECONDS = 0.1
CHILDREN = 20

RUN = Path(os.environ["FLEETD_RUN_DIR"])
SHARED_MEMORY = Path("/") / "dev" / "shm"
asked = False


def on_term(*_: object) -> None:
    global asked
    asked = True


def say(**record: object) -> None:
    with open(RUN / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({**record, "at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}) + "\n")


def save(step: int) -> None:
    say(event="save", phase="begin", step=step)
    temporary = RUN / "checkpoints" / f".tmp-{step}"
    temporary.mkdir()
    data = f"step {step}".encode()
    (temporary / "model.bin").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256(f"{sha256} {len(data)} model.bin\n".encode()).hexdigest()
    manifest = {"schema": 1, "digest": digest, "files": {"model.bin": {"bytes": len(data), "sha256": sha256}}}
    (temporary / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    time.sleep(SAVE_SECONDS)
    os.rename(temporary, RUN / "checkpoints" / f"step-{step:09d}")
    say(event="save", phase="end", step=step, digest=digest, bytes=len(data), seconds=SAVE_SECONDS)


def held_bytes() -> int:
    """Anonymous memory of this process before it grows."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:"))


def hoard_of(way: str, target: int) -> Callable[[], object]:
    """What adds one chunk to what is held."""
    if way in ("memfd", "shm", "cache"):
        places = {"shm": str(SHARED_MEMORY / f"fleetd-hog-{os.getpid()}"), "cache": str(RUN / "big.bin")}
        file = os.memfd_create("hog") if way == "memfd" else os.open(places[way], os.O_RDWR | os.O_CREAT)
        if way == "shm":
            os.unlink(places[way])
        return lambda: os.write(file, CHUNK)
    if way == "dirty":
        file = os.open(RUN / "big.bin", os.O_RDWR | os.O_CREAT)
        os.ftruncate(file, target)
        mapped, offsets = mmap.mmap(file, target), iter(range(0, target, len(CHUNK)))
        return lambda: mapped.__setitem__(slice(at := next(offsets), at + len(CHUNK)), CHUNK)
    held: list[bytearray] = []
    return lambda: held.append(bytearray(CHUNK))


class Growth:
    """One process that grows by chunks, at its speed, up to its target."""

    def __init__(self, counters: mmap.mmap, slot: int, way: str, target: int, speed: float) -> None:
        self.counters, self.slot, self.target, self.speed = counters, slot, target, speed
        # Of a child's memory before it grows nearly all is shared with its parent.
        self.base = held_bytes() if way in ("anonymous", "deaf") else 0
        self.add, self.chunks, self.began = hoard_of(way, target), 0, time.monotonic()

    def is_done(self) -> bool:
        return self.base + (self.chunks + 1) * len(CHUNK) > self.target

    def go_on(self) -> None:
        if self.is_done():
            time.sleep(0.01)
        elif self.speed and self.chunks * len(CHUNK) >= self.speed * (time.monotonic() - self.began):
            time.sleep(0.005)
        else:
            self.add()
            self.chunks += 1
            held = self.base + self.chunks * len(CHUNK)
            self.counters[8 * self.slot : 8 * self.slot + 8] = held.to_bytes(8, "little")


def grow_for_ever(growth: Callable[[], Growth], *, leaves: bool) -> int:
    """A child that grows; one that `leaves` is no child of ours any more, and has a session of its own."""
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        pid = os.fork() if leaves else 0
        if pid:
            os._exit(0)
        if leaves:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.write(writer, str(os.getpid()).encode())
        mine = growth()
        while True:
            mine.go_on()
    pid = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    if leaves:
        os.waitpid(first, 0)
    return pid


def begin(counters: mmap.mmap, way: str, target: int, speed: float) -> tuple[Growth | None, list[int]]:
    """Who grows: this process, or others by their pids."""
    if way == "idle":
        return None, []
    if way == "child":
        return None, [grow_for_ever(lambda: Growth(counters, 1, way, target, speed), leaves=True)]
    if way == "children":
        share, pace = target // CHILDREN, speed / CHILDREN
        return None, [grow_for_ever(lambda slot=slot: Growth(counters, slot, way, share, pace), leaves=False) for slot in range(1, CHILDREN + 1)]
    return Growth(counters, 0, way, target, speed), []


def main() -> int:
    target, speed, way = int(sys.argv[2]), float(sys.argv[3]), (sys.argv[4:] or ["anonymous"])[0]
    signal.signal(signal.SIGTERM, signal.SIG_IGN if way == "deaf" else on_term)
    with open(sys.argv[1], "r+b") as file:
        counters = mmap.mmap(file.fileno(), 8 * (CHILDREN + 1))
    say(event="start", step=0, steps=10**6, resumed_from=None, pid=os.getpid())
    save(0)
    mine, others = begin(counters, way, target, speed)
    step, began, spoke = 0, time.monotonic(), time.monotonic()
    growing_seconds = target / speed if speed else 1.0
    while not asked:
        now = time.monotonic()
        if now - spoke >= STEP_SECONDS:
            step, spoke = step + 1, now
            say(step=step, loss=1.0, seconds=STEP_SECONDS)
        if now - began >= growing_seconds + (HOLD_HARMLESS_SECONDS if way in ("cache", "dirty") else HOLD_SECONDS):
            return 0
        if mine is not None:
            mine.go_on()
        else:
            time.sleep(0.01)
    for pid in others:  # a trainer that is asked to stop ends its workers first
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    save(step)
    say(event="stop", step=step, because="SIGTERM", skipped=[])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second request must not turn a good exit into a death
    return 10


if __name__ == "__main__":
    sys.exit(main())
