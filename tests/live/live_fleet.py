"""A real fleet in a temporary directory: the real command line, coordinator, agent, supervisor, shim and trainer.

Every test gets its own state directory and host root. What it leaves running is ended by verified pid afterwards, and a process
or cgroup that outlives its campaign fails the test that left it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "manpages" / "data"
WAIT_SECONDS_MAX = 400.0
COMMAND_SECONDS_MAX = 660.0
"""More than the ten minutes that a test gives `fleetd wait`, which then says what it waited for."""
CLOSE_SECONDS_MAX = 60.0
STOP = {"grace_floor": "30s", "grace_ceiling": "60s"}
"""A shared machine may stand still for seconds: a trainer that would have answered must not be killed for it."""

TINY_MODEL = {
    "model_type": "llama", "vocab_size": 8000, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "initializer_range": 0.02, "hidden_act": "silu", "tie_word_embeddings": True,
}



class Fleet:
    """A temporary installation, driven through its command line as a person would."""

    def __init__(self, shards: Path) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="fleetd-"))
        self.host_root, self.state, self.shards = self.root / "host", self.root / "state", shards
        self.environment = {**os.environ, "FLEETD_STATE": str(self.state), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}

    def plan(self, name: str = "tiny", *, capacity: str = "6GiB", deadline: str = "20m", candidates: dict[str, Any] | None = None,
             cadence: int = 20, **changes: Any) -> Path:
        """Write a plan: two tiny candidates that save and validate every `cadence` steps. `changes` replace whole top-level keys."""
        training = {
            "model": {"config": TINY_MODEL}, "window": 32, "batch": 8, "steps": 60, "threads": 1, "device": "cpu", "seed": 1,
            "optimizer": {"lr": 0.003, "warmup": 5},
        }
        body: dict[str, Any] = {
            "name": name, "deadline": deadline, "reserve": {"minimum": "5s", "factor": 1.0, "margin": "1s"},
            "hosts": {"workstation": {"transport": "local", "root": str(self.host_root), "capacity": capacity, "floor": "256MiB"}},
            "data": {
                "train": {"shards": str(self.shards), "split": "train"},
                "validation": {"shards": str(self.shards), "split": "val", "tokens_per_document_max": 32},
                "test": {"shards": str(self.shards), "split": "test", "tokens_per_document_max": 32},
            },
            "defaults": {
                "memory_cap": "2GiB", "checkpoint": {"every_steps": cadence, "every": "15m", "keep": 2}, "validation": {"every_steps": cadence},
                "restarts": {"max": 5, "window": "1h", "first": "1s", "ceiling": "2s"}, "stop": STOP,
                "training": training,
            },
            "candidates": candidates or {"one": {}, "two": {"training": {"seed": 2, "optimizer": {"lr": 0.01}}}},
            "after_freeze": {"evaluate": ["test"], "report": True, "memory_cap": "2GiB"},
        }
        body.update(changes)
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(body, sort_keys=False), encoding="utf-8")
        return path

    def __call__(self, *arguments: str, expect: int | None = 0, seconds: float = COMMAND_SECONDS_MAX) -> subprocess.CompletedProcess[str]:
        """Run `fleetd ARGUMENTS` and check its exit code (None: any)."""
        done = subprocess.run([sys.executable, "-m", "fleetd.screens.cli", *arguments], env=self.environment, cwd=self.root,
                              capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL, check=False)
        said = f"fleetd {' '.join(arguments)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert expect is None or done.returncode == expect, f"{said}\n{self.logs()}"
        return done

    def launch(self, plan: Path) -> str:
        return str(json.loads(self("launch", str(plan), "--json").stdout)["campaign_id"])

    def status(self) -> dict[str, Any]:
        done = self("status", "--json", expect=None)
        assert done.returncode in (0, 8), done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def runs(self) -> dict[str, dict[str, Any]]:
        return {run["candidate"]: run for run in self.status()["runs"]}

    def campaign(self, campaign_id: str) -> dict[str, Any]:
        return next(each for each in self.status()["campaigns"] if each["campaign_id"] == campaign_id)

    def until(self, met: Callable[[dict[str, Any]], Any], what: str, seconds: float = WAIT_SECONDS_MAX) -> dict[str, Any]:
        """Poll `status` until `met`; the document in which it was met. The failure shows the last document and the logs."""
        end = time.monotonic() + seconds
        while True:
            document = self.status()
            if document["coordinator"] and met(document):  # nobody answers while one is being started
                return document
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self('status', expect=None).stdout}\n{self.logs()}"
            time.sleep(0.3)

    def coordinator_pid(self) -> int:
        return int(self.status()["coordinator"]["pid"])

    def run_dir(self, run: dict[str, Any]) -> Path:
        return self.host_root / "runs" / str(run["run_id"])

    def logs(self) -> str:
        """The tail of every log: what a failing test shows."""
        paths = [*self.state.glob("daemon.log"), *self.host_root.glob("runs/*/supervisor.log"), *self.host_root.glob("runs/*/attempts/*/stdout.log")]
        return "\n".join(f"--- {path}\n{path.read_text(encoding='utf-8', errors='replace')[-2500:]}" for path in paths)

    def processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this installation, by its argv or by its environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                    words = [*process.cmdline(), *(f"{k}={v}" for k, v in process.environ().items() if k.startswith("FLEETD_"))]
                    if any(str(self.root) in word for word in words):
                        found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def close(self) -> None:
        """End what this installation still runs: by its own commands first, then by pid, then the cgroups of what was killed."""
        if any("daemon" in words_of(process) for process in self.processes()):
            self("stop", "--all", "--now", expect=None)
            end = time.monotonic() + CLOSE_SECONDS_MAX
            while time.monotonic() < end and any("/fleetd/host/__main__.py shim" in words_of(process) for process in self.processes()):
                time.sleep(0.2)
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(self.processes(), timeout=CLOSE_SECONDS_MAX)
        ours = tuple(f"fleetd-{run.name}-" for run in self.host_root.glob("runs/*"))
        for folder, groups, _ in os.walk("/sys/fs/cgroup"):  # no `glob`: that fails when a group of somebody else goes meanwhile
            for group in groups:
                if group.startswith(ours):
                    remove_group(Path(folder, group))
        shutil.rmtree(self.root, ignore_errors=True)


def remove_group(group: Path) -> None:
    """A cgroup can be removed once the kernel has let go of its last process, a moment after it was reaped."""
    end = time.monotonic() + CLOSE_SECONDS_MAX
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            assert time.monotonic() < end, f"{group} is still in use"
            time.sleep(0.1)


def words_of(process: psutil.Process) -> str:
    """Its command line; nothing for a process that has gone meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def step_of(run: dict[str, Any]) -> int:
    return int(run["step"]["value"] or 0)


def trainer_pid(run: dict[str, Any]) -> int | None:
    value = run["pid"]["value"]
    return int(value) if value else None
