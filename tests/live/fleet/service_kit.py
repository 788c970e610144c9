"""What the tests of the service share: the command line on a host with systemd, its API from outside, and a small campaign of a command."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from fleet.host import Host
from fleet.hosts import python_folders, visible_folders
from fleetd.paths import StatePaths
from fleetd.plan import load_plan
from fleetd.screens.client import Client
from fleetd.wire import encode
from policies.errors import ExplainedError

WAIT_SECONDS_MAX = 120.0
SERVICE_LIMIT_BYTES = 3 << 30
"""A limit that the tests ask for, so that there is one to be read back."""
WATCHDOG_SECONDS, QUICK_WATCHDOG_SECONDS = 60, 3
"""As installed: a machine that stands still for a while must not look like a hung loop. For a loop that hangs, nobody wants to wait a minute."""


def fleetd(host: Host, *arguments: str, user: str = "root", check: bool = True, environment: tuple[str, ...] = ()) -> Any:
    return host.run("env", *environment, sys.executable, "-m", "fleetd.screens.cli", *arguments, user=user, check=check)


def change(host: Host, unit: str, *lines: str) -> None:
    """A drop-in for a unit of the machine. A service has a /tmp of its own, and this interpreter may lie in the machine's."""
    hidden = [each for each in visible_folders(python_folders()) if each.startswith("/tmp/")]
    binds = [f"BindReadOnlyPaths={' '.join(hidden)}"] if hidden else []
    host.run("mkdir", "-p", f"/etc/systemd/system/{unit}.d")
    host.run("tee", f"/etc/systemd/system/{unit}.d/test.conf", text_in="\n".join(["[Service]", *binds, *lines, ""]))
    systemctl(host, "daemon-reload")


def watch(host: Host, seconds: int) -> None:
    """For so long the machine's service may be silent from its next start on. /proc/sys is shown to it only here: its agent runs inside
    the unit, as that of a service never does."""
    change(host, "fleetd.service", f"WatchdogSec={seconds}", "RestartSec=0.2", "ProcSubset=all", f"MemoryMax={SERVICE_LIMIT_BYTES}")


def take_away(host: Host) -> None:
    """Off, and nothing on its disk of what was installed, written or asked for."""
    host.power_off()
    for place in ("etc/systemd/system/*fleetd*", "etc/systemd/system/*.wants/fleetd*", "etc/sysusers.d/fleetd.conf", "var/lib/fleetd", "srv/*",
                  "home/fleet/.local", "home/fleet/.config", "var/lib/systemd/linger/*"):
        for path in (host.folder / "upper").glob(place):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def systemctl(host: Host, *arguments: str) -> str:
    return str(host.run("systemctl", *arguments).stdout).strip()


def shown(host: Host, unit: str, name: str) -> str:
    return systemctl(host, "show", "--value", f"--property={name}", unit)


def until(met: Callable[[], Any], what: str, host: Host) -> Any:
    """What `met` gives once it gives anything. A coordinator that is away meanwhile is none."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while True:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the HTTP library forgets the socket of a refused connection
            try:
                if found := met():
                    return found
            except (ExplainedError, OSError):
                pass
            gc.collect()
        if time.monotonic() > end:
            journal = host.run("journalctl", "--no-pager", "-o", "cat", "-n", "60", check=False).stdout
            raise AssertionError(f"not within {WAIT_SECONDS_MAX} s: {what}\n{journal}")
        time.sleep(0.1)


def client_of(host: Host, state: str) -> Client:
    """The API on the host's own socket, which this machine reaches through the host's root."""
    return Client(StatePaths(host.path(state)))


def launch_printer(client: Client, folder: Path, root: str, **host: str) -> str:
    """Launch the campaign below past the command line."""
    loaded = load_plan(write_printer(folder, root, **host))
    return str(client.launch(encode(loaded.plan), loaded.text, "test")["campaign_id"])


def write_printer(folder: Path, root: str, **host: str) -> Path:
    """The plan of one command that prints a line a second and says when it is asked to stop."""
    talk = "trap 'echo asked; exit 0' TERM; n=0; while :; do n=$((n+1)); echo line $n; sleep 1; done"
    plan = {
        "name": "printer", "deadline": "30m", "reserve": {"minimum": "10s", "margin": 0},
        "hosts": {"gx10": {"root": root, "capacity": "1GiB", "floor": "64MiB", **host}},
        "defaults": {"memory_cap": "128MiB", "restarts": {"max": 2, "window": "10m", "first": "1s", "ceiling": "2s"},
                     "stop": {"grace_floor": "30s", "grace_ceiling": "60s"}, "working_directory": "/"},
        "candidates": {"printer": {"command": ["sh", "-c", talk], "signal": "group"}},
    }
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(plan), encoding="utf-8")
    return path


def running(client: Client) -> dict[str, Any] | None:
    """The one run, once it runs and is verified now."""
    run: dict[str, Any] = client.status()["runs"][0]
    is_new = run["identity"]["age_seconds"] is not None and run["identity"]["age_seconds"] < 5
    return run if run["state"] == "running" and run["identity"]["value"] == "verified" and is_new else None


def lives(host: Host, pid: int) -> bool:
    return host.path(f"/proc/{pid}/cmdline").exists()


def as_json(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    return found
