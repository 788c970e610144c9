"""A trainer of one's own that keeps the trainer contract, with nothing but the standard library.

It "trains" one number, but does around it what a real one does: it logs each step, saves whole checkpoints with a manifest, resumes from
the one that fleetd names, saves and leaves when it is asked to, and says by its exit status what became of it.

Usage: train.py STEPS
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

FINISHED, STOPPED = 0, 10  # 20 try again, 30 never try again, 31 not finite, 32 a gate failed, 40 memory cap reached and saved
RUN_DIR = Path(os.environ.get("FLEETD_RUN_DIR", "."))
SAVE_EVERY_STEPS = 50

asked_to_stop = False


def ask(number: int, frame: object) -> None:
    """Only remember it: the step in hand is finished first. A second SIGTERM changes nothing."""
    global asked_to_stop
    asked_to_stop = True


def load() -> tuple[int, float]:
    """The step and the weight to go on from: the checkpoint that fleetd verified for us, or the beginning."""
    resume = os.environ.get("FLEETD_RESUME", "")
    if not resume:
        return 0, 9.0
    state = json.loads((Path(resume) / "state.json").read_text(encoding="utf-8"))
    return state["step"], state["weight"]


def save(step: int, weight: float) -> None:
    """A directory that appears whole under its name. Its manifest lists every file, so that fleetd can prove it before it is offered again."""
    final = RUN_DIR / "checkpoints" / f"step-{step:09d}"
    if final.exists():
        return
    temporary = final.with_name(f".tmp-{final.name}-{os.getpid()}")
    temporary.mkdir(parents=True)
    write(temporary / "state.json", json.dumps({"step": step, "weight": weight}).encode())
    files = {}
    for path in sorted(temporary.iterdir()):
        data = path.read_bytes()
        files[path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    lines = "".join(f"{entry['sha256']} {entry['bytes']} {name}\n" for name, entry in sorted(files.items()))
    digest = hashlib.sha256(lines.encode()).hexdigest()
    write(temporary / "manifest.json", json.dumps({"schema": 1, "digest": digest, "files": files}).encode())
    os.rename(temporary, final)


def write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def main() -> int:
    signal.signal(signal.SIGTERM, ask)
    step, weight = load()
    print(f"starting at step {step}", flush=True)
    with (RUN_DIR / "log.jsonl").open("a", encoding="utf-8", buffering=1) as log:
        while step < int(sys.argv[1]):
            step, weight = step + 1, weight * 0.99
            time.sleep(0.1)
            log.write(json.dumps({"step": step, "loss": weight}) + "\n")
            if asked_to_stop or step % SAVE_EVERY_STEPS == 0:
                save(step, weight)
            if asked_to_stop:
                print(f"asked to stop: saved step {step}", flush=True)
                return STOPPED
    save(step, weight)
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
