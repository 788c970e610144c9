"""The test hosts together: `with Hosts() as hosts: hosts["spark-a"].cut()`. Everything they were made of is gone afterwards.

    hosts["gx10"]           one host: power_cycle, cut, slow, pull_cable, heal, stop_sshd, run, path (host.py)
    hosts.ssh("gx10", …)    a command over OpenSSH      hosts.ssh_config, hosts.known_hosts, hosts.key   for any other client
    hosts.restore()         all on, all cables good, nothing running that a test left, /srv empty

Inside, every host reaches every other by name, as `root` and as `fleet`, with a key in its home and all host keys in /etc/ssh.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from fleet.cable import build_bridge, has_v6
from fleet.ground import BY_HAND, Claim, Ground, clear, clear_stale
from fleet.host import Host
from fleet.install import USER, Neighbours, host_key, install, make_key

NAMES = ("gx10", "spark-a", "spark-b")
PROJECT = Path(__file__).resolve().parents[3]
CONNECT_SECONDS_MAX = 5
"""For clients that come back. A command that a test types is given more: whether a machine stood still is not what it asks."""
SSH_SECONDS_MAX = 180.0
NEEDS = {
    "/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "ip": "iproute2", "unshare": "util-linux",
}


class Hosts:
    """`names` are hosts; `init` is what runs as pid 1 on them, `sshd` or `systemd`; `shared` are more folders of this machine to be read there."""

    def __init__(self, names: Sequence[str] = NAMES, *, init: str = "sshd", shared: Sequence[str | Path] = (), memory_bytes: int | None = None,
                 ground: Ground | None = None) -> None:
        if missing := missing_needs():
            raise RuntimeError(f"test hosts can't be made here: {missing}")
        self._claim = None if ground is not None else Claim()
        self.ground = ground if ground is not None else self._claim.ground  # type: ignore[union-attr]
        is_tied = self.ground.number != BY_HAND
        folders = visible_folders([*(str(each) for each in shared), *python_folders()])
        self._hosts = {
            name: Host(self.ground, place, name, init=init, shared=folders, is_tied=is_tied, memory_bytes=memory_bytes)
            for place, name in enumerate(names, start=1)
        }
        self.init = init

    def __enter__(self) -> Hosts:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts.values())

    def up(self) -> None:
        """Make them and switch them on, all at once; returns when each one's sshd listens."""
        clear_stale()
        clear(self.ground)
        self.ground.folder.mkdir(mode=0o755)
        build_bridge(self.ground, has_v6())
        make_key(self.key, "test hosts")
        for host in self:
            make_key(host_key(host.folder / "upper"), host.name)
        self._write_client_files()
        neighbours = Neighbours(hosts_file=self._hosts_file(), known_hosts=self.known_hosts.read_text(encoding="utf-8"), key=self.key)
        for host in self:
            install(host.folder / "upper", host.name, neighbours, self.init)
            host.power_on(wait=False)
        for host in self:
            host.wait_for_sshd()

    def down(self) -> None:
        """Everything off and away. Goes on to the next thing when one fails, and says at the end what did."""
        faults: list[Exception] = []
        for act in (*(host.throw_away for host in self), lambda: clear(self.ground)):
            try:
                act()
            except Exception as fault:
                faults.append(fault)
        if self._claim is not None:
            self._claim.leave()
        if faults:
            raise RuntimeError(f"test hosts could not be taken away whole: {faults}") from faults[0]

    def restore(self) -> None:
        """As after `up`, for the next test: what a host still runs goes by a power cycle, files stay but for those below /srv."""
        for host in self:
            host.heal()
            if host.is_on and self._runs_something(host):
                host.power_off()
            host.power_on(wait=False)
        for host in self:
            host.start_sshd()
            host.run("find", "/srv", "-mindepth", "1", "-delete")

    @property
    def key(self) -> Path:
        """Opens `root` and `fleet` on every host."""
        return self.ground.folder / "id_ed25519"

    @property
    def ssh_config(self) -> Path:
        return self.ground.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.ground.folder / "known_hosts"

    def ssh(self, name: str, *command: str, user: str = USER, check: bool = True, seconds: float = SSH_SECONDS_MAX,
            text_in: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command line on a host over OpenSSH, as a person would."""
        argv = ["ssh", "-F", str(self.ssh_config), "-o", f"ConnectTimeout={SSH_SECONDS_MAX:.0f}", "-l", user, name, *command]
        done = subprocess.run(argv, input=text_in, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0 or not check, f"ssh {name} {' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def _runs_something(self, host: Host) -> bool:
        """More than its init and the sshd that listens. What systemd runs is systemd's."""
        if host.init == "systemd":
            return bool(host.run("systemctl", "list-units", "--plain", "--no-legend", "run-*", "fleetd*", "session-*", check=False).stdout.strip())
        listener = host.path("/run/sshd.pid")
        return len(host.processes()) > (1 if listener.exists() else 0)

    def _hosts_file(self) -> str:
        lines = ["127.0.0.1 localhost", f"{self.ground.address(0)} controller"]
        for host in self:
            lines += [f"{host.address} {host.name}", *([f"{host.address_v6} {host.name}"] if has_v6() else [])]
        return "\n".join([*lines, ""])

    def _write_client_files(self) -> None:
        keys = []
        for host in self:
            kind, key, _ = Path(f"{host_key(host.folder / 'upper')}.pub").read_text(encoding="ascii").split()
            keys.append(f"{host.name},{host.address},{host.address_v6} {kind} {key}\n")
        self.known_hosts.write_text("".join(keys), encoding="ascii")
        lines = [f"Host {' '.join(self._hosts)}", f"  User {USER}", f"  IdentityFile {self.key}", "  IdentitiesOnly yes",
                 f"  UserKnownHostsFile {self.known_hosts}", "  GlobalKnownHostsFile /dev/null", "  StrictHostKeyChecking yes",
                 "  PasswordAuthentication no", f"  ConnectTimeout {CONNECT_SECONDS_MAX}", "  LogLevel ERROR"]
        for host in self:
            lines += [f"Host {host.name}", f"  HostName {host.address}"]
        self.ssh_config.write_text("\n".join([*lines, ""]), encoding="utf-8")


def python_folders() -> list[str]:
    """Where this interpreter and everything that it can import lie, and the project."""
    return [str(PROJECT), sys.prefix, sys.base_prefix, sysconfig.get_paths()["purelib"], *(each for each in sys.path if os.path.isdir(each))]


def visible_folders(folders: Sequence[str]) -> list[str]:
    """The folders that a host would not see by itself: those on other file systems than `/`, and those below /tmp and /run, which it has anew.
    A folder inside another one of them comes with that."""
    root = os.stat("/").st_dev
    kept: list[str] = []
    for folder in sorted({os.path.realpath(each) for each in folders}):
        is_hidden = folder.startswith(("/tmp/", "/run/")) or os.stat(folder).st_dev != root
        if is_hidden and not any(folder == each or folder.startswith(f"{each}/") for each in kept):
            kept.append(folder)
    return kept


def missing_needs() -> str:
    """What keeps hosts from being made here, in words; empty when nothing does."""
    if os.geteuid() != 0:
        return "root is needed for namespaces and bridges; loopback.py makes hosts without it"
    missing = sorted({package for program, package in NEEDS.items() if shutil.which(program) is None})
    return f"apt-get install {' '.join(missing)}" if missing else ""


def by_hand(init: str = "sshd", shared: Sequence[str] = ()) -> Hosts:
    return Hosts(init=init, shared=shared, ground=Ground(BY_HAND))
