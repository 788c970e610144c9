"""A trainer that only grows: `hog.py COUNTER TARGET_BYTES BYTES_PER_SECOND` (0: as fast as memory allows). Standard library alone.

It keeps the trainer contract: after SIGTERM it grows no more, saves, and exits 10. COUNTER is a file of 8 bytes, mapped into memory: what it
holds right now, to be read by whoever measures even if it is killed in between.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import signal
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

CHUNK_BYTES = 1 << 20
STEP_SECONDS = 0.05
HOLD_SECONDS = 20.0
SAVE_SECONDS = 0.1

RUN = Path(os.environ["FLEETD_RUN_DIR"])
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


def main() -> int:
    signal.signal(signal.SIGTERM, on_term)
    target, speed = int(sys.argv[2]), int(sys.argv[3])
    with open(sys.argv[1], "r+b") as file:
        counter = mmap.mmap(file.fileno(), 8)
    say(event="start", step=0, steps=10**6, resumed_from=None, pid=os.getpid())
    save(0)
    chunk, base, step = b"x" * CHUNK_BYTES, held_bytes(), 0
    held: list[bytearray] = []
    began, spoke, hold_until = time.monotonic(), time.monotonic(), None
    while not asked:
        now = time.monotonic()
        if now - spoke >= STEP_SECONDS:
            step, spoke = step + 1, now
            say(step=step, loss=1.0, seconds=STEP_SECONDS)
        if base + len(held) * CHUNK_BYTES >= target:
            hold_until = hold_until or now + HOLD_SECONDS
            if now >= hold_until:
                return 0
            time.sleep(0.01)
        elif speed and len(held) * CHUNK_BYTES >= speed * (now - began):
            time.sleep(0.005)
        else:
            held.append(bytearray(chunk))
            counter[:] = (base + len(held) * CHUNK_BYTES).to_bytes(8, "little")
    save(step)
    say(event="stop", step=step, because="SIGTERM", skipped=[])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second request must not turn a good exit into a death
    return 10


if __name__ == "__main__":
    sys.exit(main())
