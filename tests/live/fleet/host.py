"""One test host: its power, its cable, its sshd, and commands that run on it without the network.

    on:   unshare ── boot.py, then init (sshd or systemd) as pid 1 of its own pid, mount, network, hostname, ipc and cgroup namespaces
    off:  SIGKILL to that pid 1; the kernel ends everything else on the host at once, its disk stays as it was
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fleet.cable import TIED_TO_US, Cable, Quality, Way, has_v6
from fleet.ground import END_SECONDS_MAX, Ground, end_recorded, recorded_pid, remember, remove_groups
from fleet.install import LOWER

BOOT = Path(__file__).with_name("boot.py")
SSHD_SECONDS_MAX = 90.0
RUN_SECONDS_MAX = 180.0
CONNECT_SECONDS_MAX = 60.0
PLAIN_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--net", "--cgroup")

# Enter the cgroups that are named before `--`, then become the rest. A cgroup namespace begins where its maker stands.
_ENTER_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 90; shift; done; shift; exec "$@"'


class Host:
    def __init__(self, ground: Ground, place: int, name: str, *, init: str, shared: Sequence[str], is_tied: bool, memory_bytes: int | None) -> None:
        self.name, self.init = name, init
        self.folder = ground.folder / name
        self.address, self.address_v6 = ground.address(place), ground.address_v6(place)
        self.cable = Cable(ground, place, self.folder, is_tied=is_tied)
        self._process: subprocess.Popen[bytes] | None = None
        self._ground, self._shared, self._is_tied, self._memory_bytes = ground, list(shared), is_tied, memory_bytes

    # Power.

    @property
    def pid(self) -> int | None:
        """Of its pid 1, as this machine sees it; None while it is off."""
        return recorded_pid(self._record)

    @property
    def is_on(self) -> bool:
        return self.pid is not None

    @property
    def boot_id(self) -> str:
        return (self.folder / "boot_id").read_text(encoding="ascii").strip()

    def power_on(self, *, wait: bool = True) -> None:
        """Start it; with `wait`, return once its sshd listens."""
        if not self.is_on:
            self.cable.throw_away()
            self._start()
        if wait:
            self.wait_for_sshd()

    def power_off(self) -> None:
        """Everything on it is gone at once, and no packet says so. Its disk stays."""
        self.cable.unplug()
        end_recorded(self._record)
        if self._process is not None:
            self._process.wait(END_SECONDS_MAX)
            self._process = None

    def power_cycle(self, *, wait: bool = True) -> None:
        self.power_off()
        self.power_on(wait=wait)

    # Cable.

    def cut(self, way: Way = "both") -> None:
        """A partition: nothing arrives any more and nobody is told."""
        self.cable.cut(way)

    def slow(self, delay_seconds: float = 0.0, *, jitter_seconds: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        """Delay and loss in each direction."""
        self.cable.spoil(Quality(delay_seconds=delay_seconds, jitter_seconds=jitter_seconds, loss=loss, seed=seed))

    def pull_cable(self) -> None:
        """The host sees that its link is down."""
        self.cable.pull(True)

    def heal(self) -> None:
        """A good cable, plugged in."""
        self.cable.heal()

    # Its ssh server.

    def stop_sshd(self) -> None:
        """New connections are refused; those that are open go on."""
        if self.init == "systemd":
            self.run("systemctl", "stop", "ssh.service")
        else:
            # Its end is awaited: it lets go of its socket a moment before.
            self.run("sh", "-c", "it=$(cat /run/sshd.pid); kill $it; while kill -0 $it 2> /dev/null; do sleep 0.02; done")
        self._wait_for_sshd(is_up=False)

    def start_sshd(self) -> None:
        if not self._listens():
            if self.init == "systemd":
                self.run("systemctl", "start", "ssh.service")
            else:
                self.run("/usr/sbin/sshd")
        self.wait_for_sshd()

    def wait_for_sshd(self) -> None:
        self._wait_for_sshd(is_up=True)

    # Commands and files, past the network.

    def run(self, *command: str, check: bool = True, text_in: str = "", seconds: float = RUN_SECONDS_MAX, user: str = "root",
            ) -> subprocess.CompletedProcess[str]:
        """Run a command on it as `user`, with a plain environment."""
        plain = ("env", "-i", PLAIN_PATH, f"HOME={'/root' if user == 'root' else f'/home/{user}'}", "LANG=C.UTF-8")
        become = () if user == "root" else ("setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups")
        argv = [*self.inside(), *become, *plain, *command]
        done = subprocess.run(argv, input=text_in, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0 or not check, f"{self.name}: {' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def path(self, inside: str | Path) -> Path:
        """Where this machine finds a file of the running host. Absolute symlinks in it lead out of the host."""
        assert self.pid is not None, f"{self.name} is off"
        return Path(f"/proc/{self.pid}/root") / str(inside).lstrip("/")

    def processes(self) -> list[int]:
        """Every process on it but pid 1, as this machine numbers them; those in namespaces of their own are not among them."""
        if self.pid is None:
            return []
        mine = os.readlink(f"/proc/{self.pid}/ns/pid")
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == mine and int(entry.name) != self.pid:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
        return sorted(found)

    def console(self) -> str:
        path = self.folder / "console.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def throw_away(self) -> None:
        """Off, with nothing left of it."""
        self.power_off()
        self.cable.throw_away()
        for group, _ in self._groups():
            if group.exists():
                remove_groups(group)
        if self.folder.exists():
            shutil.rmtree(self.folder)

    @property
    def _record(self) -> Path:
        return self.folder / "init.pid"

    def inside(self) -> list[str]:
        """What stands before a command that shall run on it."""
        assert self.pid is not None, f"{self.name} is off"
        return ["nsenter", "--target", str(self.pid), "--mount", "--uts", "--ipc", "--pid", "--net", "--cgroup", "--root", "--wd", "--"]

    def _start(self) -> None:
        groups = self._groups()
        for group, _ in groups:
            group.mkdir(exist_ok=True)
            limit = group / "memory.limit_in_bytes"
            if self._memory_bytes is not None and (limit.exists() or (group / "memory.max").exists()):
                (limit if limit.exists() else group / "memory.max").write_text(str(self._memory_bytes), encoding="ascii")
        self._write_settings([mounted for _, mounted in groups])
        before = TIED_TO_US if self._is_tied else ("setsid",)
        argv = ["sh", "-c", _ENTER_GROUPS, "enter", *(str(group) for group, _ in groups), "--", *before, "unshare", *NAMESPACES,
                "--fork", "--kill-child", "--propagation", "private", "--",
                os.path.realpath(sys.executable), "-I", "-S", str(BOOT), str(self.folder / "settings.json")]
        with open(self.folder / "console.log", "wb") as console:
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=console, cwd="/")
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        with process.stdout as said, process.stdin as told:
            line = said.readline()
            assert line, f"{self.name} did not start:\n{self.console()}"
            remember(self._record, int(line))
            self.cable.plug_in(int(line))
            told.write(b"+")

    def _write_settings(self, hierarchies: list[dict[str, str]]) -> None:
        for name in ("upper", "work", "root"):
            (self.folder / name).mkdir(exist_ok=True)
        settings = {
            "name": self.name, "folder": str(self.folder), "init": self.init, "address": self.address,
            "address_v6": self.address_v6 if has_v6() else "", "shared": self._shared, "hierarchies": hierarchies,
            "lowerdir": str(LOWER), "upperdir": str(self.folder / "upper"), "workdir": str(self.folder / "work"),
        }
        (self.folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")

    def _groups(self) -> list[tuple[Path, dict[str, str]]]:
        """The cgroups of this host, one below our own in each hierarchy, and how the host will mount its view of them."""
        ours = {}
        for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, place = line.split(":", 2)
            ours[controllers] = place
        found = []
        for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
            left, _, right = line.partition(" - ")
            (top, mounted), (kind, _, options) = left.split()[3:5], right.split()[:3]
            controllers = next((each for each in ours if kind == "cgroup" and each and set(each.split(",")) <= set(options.split(","))), None)
            if kind == "cgroup2":
                controllers = ""
            if controllers is None or controllers not in ours or "cpuset" in controllers:  # a cpuset takes nobody in before it was given CPUs
                continue
            group = Path(mounted) / os.path.relpath(ours[controllers], top) / self._ground.cgroup(self.name)
            place = os.path.relpath(mounted, "/sys/fs/cgroup").removeprefix(".")
            options = f"none,{controllers}" if controllers.startswith("name=") else controllers
            # Beside version 1, systemd mounts version 2 itself, and it must find our own group at the top of that too.
            is_left_to_init = kind == "cgroup2" and self.init == "systemd" and place != ""
            found.append((group, {"kind": "" if is_left_to_init else kind, "place": place, "options": options}))
        return found

    def _listens(self) -> bool:
        """Asked on the host itself: a cut cable says nothing about its sshd."""
        assert self.pid is not None, f"{self.name} is off:\n{self.console()}"
        tables = (f"/proc/{self.pid}/net/tcp", f"/proc/{self.pid}/net/tcp6")
        rows = [line.split() for table in tables if os.path.exists(table) for line in Path(table).read_text(encoding="ascii").splitlines()[1:]]
        return any(row[1].endswith(f":{22:04X}") and row[3] == "0A" for row in rows)

    def _wait_for_sshd(self, *, is_up: bool) -> None:
        end = time.monotonic() + SSHD_SECONDS_MAX
        while self._listens() != is_up:
            assert time.monotonic() < end, f"{self.name}: sshd is {'not up' if is_up else 'still up'}\n{self.console()}"
            time.sleep(0.01)


def can_connect(address: str, seconds: float = CONNECT_SECONDS_MAX) -> bool:
    """Whether a TCP connection to its ssh port succeeds."""
    try:
        socket.create_connection((address, 22), timeout=seconds).close()
    except OSError:
        return False
    return True
