"""A host that is not there: `agent.py agent ROOT` answers a coordinator's orders as an agent does, and says that its runs train.

What it speaks is the real wire (docs/ARCHITECTURE.md, Orders); nothing is started, measured or written. Standard library alone and nothing of
this project, so that three hundred of them fit into one machine beside the coordinator that is measured. `survey` is answered from the
environment, with the question's own moment.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from datetime import datetime, timezone

STEPS_PER_SECOND = 20.0
STEPS_PLANNED = 10_000_000
MEMORY_BYTES = 128 * 1024**3
CAP = {"grade": "enforced", "means": "cgroup v2 /sys/fs/cgroup/fleetd.slice/fleetd-run-0001, limit read back 64.0 GiB"}
PARTS = {
    "allocator": {"grade": "absent", "means": "no device bytes can be read here (no NVML: NVML Shared Library Not Found)"}, "cgroup": CAP,
    "floor": {"grade": "sampled", "means": "MemAvailable each second, floor 1.0 GiB"},
    "sampler": {"grade": "sampled", "means": "anon + shmem of the cgroup four times a second, faster while it grows"},
}
SURVEY = "STAND_IN_SURVEY"


def moment() -> str:
    return datetime.now(timezone.utc).isoformat().replace("+00:00", "Z")


def boottime_seconds() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Host:
    """What it was ordered, and since when its runs have been training."""

    def __init__(self, root: str) -> None:
        self.root, self.boot_id = root, f"stand-in of {root}"
        self.runs: dict[str, dict] = {}

    def carry_out(self, order: str, body: dict) -> dict:
        if order == "hello":
            return {"protocol": 1, "facts": self.facts()}
        if order == "facts":
            return {"facts": self.facts()}
        if order == "start":
            return self.start(body)
        if order == "want":
            run = self.runs[body["run_id"]]
            run["want"] = body["want"]
            if body["want"]["want"] == "stop" and run["state"] == "running":
                run["state"] = "stopped"
                notice(run, "state_changed", {"from": "running", "to": "stopped", "reason": "user", "detail": "asked to stop"})
            return {"applied": True, "sequence": body["want"]["sequence"], "want": body["want"]}
        if order == "cutoff":
            return {"applied": True, "cutoff_at": body["cutoff"]["cutoff_at"]}
        return {"present": True, "ok": True, "what": "", "removed": [], "entries": []}

    def start(self, body: dict) -> dict:
        run_id = body["spec"]["run_id"]
        if run_id not in self.runs:
            run = {"spec": body["spec"], "want": body["want"], "state": "running", "since": time.monotonic(), "notices": []}
            self.runs[run_id] = run
            notice(run, "state_changed", {"from": "staging", "to": "starting", "reason": None, "detail": "first start"})
            notice(run, "attempt_started", {"attempt": 1, "pid": 4711, "start_ticks": 1, "resume_step": None, "resume_digest": None})
            notice(run, "state_changed", {"from": "starting", "to": "running", "reason": None, "detail": "attempt 1 makes progress"})
        return {"created": True, "supervisor": "started"}

    def has_news(self, after: dict) -> bool:
        return any(len(run["notices"]) > after[run_id] for run_id, run in self.runs.items() if run_id in after)

    def poll(self, after: dict) -> dict:
        runs = [self.report(run_id, run, after.get(run_id, 0)) for run_id, run in self.runs.items()]
        return {
            "at": moment(), "boottime_seconds": boottime_seconds(), "memory_available_bytes": MEMORY_BYTES // 2,
            "disk_free_bytes": 10**12, "runs": runs,
        }

    def report(self, run_id: str, run: dict, after: int) -> dict:
        return {
            "run_id": run_id, "supervisor": "alive", "observation": self.look(run_id, run), "notices": run["notices"][after:],
            "look_age_seconds": 0.3, "notices_lost_to": 0, "retold": [], "spec": run["spec"] if after == 0 else None, "want": run["want"],
        }

    def look(self, run_id: str, run: dict) -> dict:
        """As full as a supervisor's look at a training of ours is."""
        step, at, deadline = int((time.monotonic() - run["since"]) * STEPS_PER_SECOND), moment(), run["spec"]["deadline"]
        return {
            "run_id": run_id, "at": at, "state": run["state"], "reason": None, "detail": "", "attempt": 1, "pid": 4711, "identity": "verified",
            "step": step, "steps_planned": STEPS_PLANNED, "step_at": at, "steps_per_second": STEPS_PER_SECOND, "loss": 5.0 + 1.0 / (1 + step),
            "memory": {"host_bytes": 360_000_000 + step % 1000, "accelerator_bytes": None, "host_peak_bytes": 380_000_000,
                       "available_bytes": MEMORY_BYTES // 2, "parts": PARTS},
            "checkpoint": {"step": step // 100 * 100, "digest": "c" * 64, "at": at}, "best": {"step": step // 100 * 100, "value": 5.5, "at": at},
            "grace_seconds": 5.0, "stop_at": deadline["cutoff_at"], "cutoff_at": deadline["cutoff_at"], "final_at": deadline["final_at"],
            "restarts_used": 0, "restarts_max": 5, "next_attempt_at": None, "alarms": [], "supervisor_pid": 4700, "shim_pid": 4705,
            "boot_id": self.boot_id, "boottime_seconds": boottime_seconds(),
        }

    def facts(self) -> dict:
        return {
            "hostname": os.path.basename(self.root), "boot_id": self.boot_id, "kernel": "6.8.0", "python": "3.12.3",
            "architecture": os.uname().machine, "cpu_count": 20, "memory_total_bytes": MEMORY_BYTES,
            "memory_available_bytes": MEMORY_BYTES // 2, "disk_free_bytes": 10**12, "root_writable": True, "cap_means": PARTS,
            "accelerators": [],
        }


def notice(run: dict, kind: str, body: dict) -> None:
    run["notices"].append({"sequence": len(run["notices"]) + 1, "at": moment(), "kind": kind, "body": body})


def serve(host: Host) -> None:
    """Answer until standard input ends. A poll waits for its time, or for news, and everything else is answered at once."""
    buffer, waiting = b"", None
    while True:
        # Nothing happens here but what is asked for: a real agent looks at its files ten times a second, on a machine of its own.
        if select.select([0], [], [], max(0.0, waiting[2] - time.monotonic()) if waiting else None)[0]:
            data = os.read(0, 1 << 18)
            if not data:
                return
            buffer += data
        while b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            asked = json.loads(line)
            if asked["order"] == "poll":
                waiting = asked["id"], asked["body"]["after"], time.monotonic() + asked["body"]["wait_seconds"]
            else:
                tell({"id": asked["id"], "ok": True, "body": host.carry_out(asked["order"], asked["body"])})
        if waiting and (host.has_news(waiting[1]) or time.monotonic() >= waiting[2]):
            tell({"id": waiting[0], "ok": True, "body": host.poll(waiting[1])})
            waiting = None


def tell(answer: dict) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(1, data):]


def survey(root: str) -> None:
    """What the machine showed of itself, once, under this root's name."""
    with open(os.environ[SURVEY], encoding="utf-8") as file:
        answer = json.load(file)
    answer["host"] |= {"root": root, "machine": root, "boot_id": f"stand-in of {root}", "now": moment(), "memory_total_bytes": MEMORY_BYTES}
    print(json.dumps(answer))


if __name__ == "__main__":
    # The way it is called is a host's own: `… __main__.py agent ROOT`, `… __main__.py survey ROOT QUESTION`.
    if "survey" in sys.argv:
        survey(sys.argv[sys.argv.index("survey") + 1])
    else:
        serve(Host(sys.argv[-1]))
