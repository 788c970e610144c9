"""A trainer that keeps the contract with the standard library alone, and misbehaves as told. Run by tests as a real process.

usage: fake_trainer.py STEPS SECONDS_PER_STEP [option=value ...]
    every=N            save each N steps                     crash_at=N     exit 1 at step N, once (a marker file remembers)
    crash_always=N     exit 1 at step N, each time           exit_at=N:CODE exit with CODE at step N
    ignore_term=1      SIGTERM changes nothing               eat_at=N:MIB   allocate MIB at step N
    save_seconds=S     a save takes S                        fork=N         N children that ignore SIGTERM
    hang_at=N          sleep for ever at step N              slow_exit=S    S seconds between SIGTERM and the exit
    own_cutoff=S       stops by itself S seconds before FLEETD_TRAIN_CUTOFF
    pause_at=N         waits after step N until the test says go (a file), however long the test takes to do what it has to do meanwhile
    device_most=MIB    use no more of the device than that, whatever the step
    device=MIB         use so much of the fake device (or N/A), device_step=MIB so much more with each step; device_kept=1: it is never given back
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

RUN = Path(os.environ["FLEETD_RUN_DIR"])
ASKED = False


def say(**record: object) -> None:
    line = json.dumps({**record, "at": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")})
    try:
        with open(RUN / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        pass  # a full disk is no reason to stop training


def save(step: int, seconds: float) -> None:
    target = RUN / "checkpoints" / f"step-{step:09d}"
    if target.exists():
        return
    say(event="save", phase="begin", step=step)
    time.sleep(seconds)
    temporary = target.with_name(f".tmp-{step}")
    temporary.mkdir()
    data = f"weights of step {step}".encode()
    (temporary / "model.bin").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    digest = hashlib.sha256(f"{sha256} {len(data)} model.bin\n".encode()).hexdigest()
    manifest = {"schema": 1, "digest": digest, "files": {"model.bin": {"bytes": len(data), "sha256": sha256}}}
    (temporary / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    os.rename(temporary, target)
    say(event="save", phase="end", step=step, digest=digest, bytes=len(data), seconds=seconds)


def use_device(options: dict[str, str], step: int) -> None:
    """What fake_nvml.c shows of us."""
    if "device" not in options:
        return
    mine = Path(os.environ["FAKE_NVML_FOLDER"]) / str(os.getpid())
    used = options["device"]
    if used != "N/A":
        used = str(min(int(used) + step * int(options.get("device_step", "0")), int(options.get("device_most", "1000000000"))) * 2**20)
    temporary = mine.with_name(f"new-{os.getpid()}")
    temporary.write_text(used)
    os.rename(temporary, mine)
    if "device_kept" in options:
        mine.with_name(f"{os.getpid()}.kept").touch()


def once(name: str) -> bool:
    marker = RUN / f"marker-{name}"
    if marker.exists():
        return False
    marker.touch()
    return True


def main() -> int:
    global ASKED
    steps, pace = int(sys.argv[1]), float(sys.argv[2])
    options = dict(word.split("=", 1) for word in sys.argv[3:])

    def term(*_: object) -> None:
        global ASKED
        ASKED = "ignore_term" not in options

    signal.signal(signal.SIGTERM, term)
    sleeper = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    for _ in range(int(options.get("fork", "0"))):
        subprocess.Popen([sys.executable, "-S", "-c", sleeper], start_new_session=True)
    resume = os.environ.get("FLEETD_RESUME", "")
    step = int(resume.rsplit("-", 1)[1]) if resume else 0
    say(event="start", step=step, steps=steps, resumed_from=resume or None, pid=os.getpid())
    cutoff = datetime.fromisoformat(os.environ["FLEETD_TRAIN_CUTOFF"].replace("Z", "+00:00")).timestamp()
    hoard = []
    use_device(options, 0)
    save(step, 0.0)
    while step < steps:
        time.sleep(pace)
        step += 1
        say(step=step, loss=1.0 / step, seconds=pace)
        use_device(options, step)
        while f"{step}" == options.get("pause_at") and not ASKED and not (RUN / "go").exists():
            time.sleep(0.02)
        if f"{step}" == options.get("crash_always") or (f"{step}" == options.get("crash_at") and once("crash")):
            return 1
        if options.get("exit_at", "").startswith(f"{step}:"):
            return int(options["exit_at"].split(":")[1])
        if options.get("eat_at", "").startswith(f"{step}:"):
            hoard.append(b"x" * (int(options["eat_at"].split(":")[1]) * 2**20))
        if f"{step}" == options.get("hang_at"):
            time.sleep(600)
        if step % int(options.get("every", "10")) == 0:
            save(step, float(options.get("save_seconds", "0")))
        if "own_cutoff" in options and time.time() > cutoff - float(options["own_cutoff"]):
            save(step, 0.0)
            say(event="stop", step=step, because="cutoff", skipped=[])
            return 10
        if ASKED:
            time.sleep(float(options.get("slow_exit", "0")))
            save(step, float(options.get("save_seconds", "0")))
            say(event="stop", step=step, because="SIGTERM", skipped=[])
            return 10
    save(step, 0.0)
    say(event="finish", step=step, because="steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
