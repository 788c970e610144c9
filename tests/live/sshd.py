"""A real sshd on a loopback port, with keys, login shell and configuration of its own in one directory. No root is needed.

Its logins are the user who runs the tests, put into a home of their own. `HostName` and the rest stand in `ssh_config`, which is what a
plan names as `ssh_config`; `known_hosts` holds what the test says it holds.
"""

from __future__ import annotations

import getpass
import os
import random
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

SSHD = "/usr/sbin/sshd"
START_SECONDS_MAX = 60.0
CALL_SECONDS_MAX = 120.0
"""What a test allows a host for an answer: only a host that never answers costs it."""
PORTS = range(10_000, 32_000)
"""Below those that the kernel hands out (ip_local_port_range): nobody gets ours between our look at it and the start of the server."""


def make_key(path: Path, kind: str = "ed25519") -> str:
    """A new key pair without a passphrase; the public line without its comment."""
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-C", path.name, "-f", str(path)], check=True, stdin=subprocess.DEVNULL)
    return " ".join(Path(f"{path}.pub").read_text(encoding="utf-8").split()[:2])


def fingerprint(path: Path) -> str:
    done = subprocess.run(["ssh-keygen", "-lf", f"{path}.pub"], check=True, capture_output=True, text=True)
    return done.stdout.split()[1]


class Sshd:
    """One machine called `name`. `shell` runs in place of the login shell; `address` is where it listens."""

    def __init__(self, folder: Path, name: str, *, address: str = "127.0.0.1", shell: str = "/bin/bash", options: tuple[str, ...] = ()) -> None:
        self.folder, self.name, self.address, self.shell, self.options = folder, name, address, shell, options
        folder.mkdir(parents=True, mode=0o700)
        self.host_key = make_key(folder / "hostkey")
        self.user_key = make_key(folder / "id")
        self.home = folder / "home"
        self.home.mkdir()
        self.root = self.home / "fleetd"
        self.port = _free_port(address)
        self.authorized = folder / "authorized_keys"
        self.authorized.write_text(self.user_key + "\n", encoding="utf-8")
        self.known_hosts, self.ssh_config = folder / "known_hosts", folder / "ssh_config"
        self.know(f"{self.known_as} {self.host_key}")
        self.configure()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def known_as(self) -> str:
        return f"[{self.address}]:{self.port}"

    def know(self, *lines: str) -> None:
        self.known_hosts.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def configure(self, **options: str) -> None:
        """Write the client's configuration for this host, with more options if given."""
        words = {
            "HostName": self.address, "Port": str(self.port), "User": getpass.getuser(), "IdentityFile": str(self.folder / "id"),
            "IdentitiesOnly": "yes", "IdentityAgent": "none", "UserKnownHostsFile": str(self.known_hosts), "GlobalKnownHostsFile": "none",
            **options,
        }
        text = f"Host {self.name}\n" + "".join(f"  {key} {value}\n" for key, value in words.items())
        self.ssh_config.write_text(text, encoding="utf-8")

    def start(self) -> None:
        enter = self.folder / "enter"
        enter.write_text(
            f'#!/bin/sh\ncd {shlex.quote(str(self.home))} || exit 97\n[ -z "$SSH_ORIGINAL_COMMAND" ] && exec {self.shell}\n'
            f'exec {self.shell} -c "$SSH_ORIGINAL_COMMAND"\n', encoding="utf-8",
        )
        enter.chmod(0o755)
        config = self.folder / "sshd_config"
        lines = (
            f"Port {self.port}", f"ListenAddress {self.address}", f"HostKey {self.folder / 'hostkey'}", "PidFile none",
            f"AuthorizedKeysFile {self.authorized}", "PasswordAuthentication no", "KbdInteractiveAuthentication no", "UsePAM no",
            "StrictModes no", "UseDNS no", "PrintMotd no", "MaxStartups 200", f"SetEnv HOME={self.home}", f"ForceCommand {enter}", *self.options,
        )
        config.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if os.geteuid() == 0:
            os.makedirs("/run/sshd", exist_ok=True)
        with open(self.folder / "sshd.log", "ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )
        give_up_seconds = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < give_up_seconds:
            try:
                socket.create_connection((self.address, self.port), 1.0).close()
            except OSError:
                assert self._process.poll() is None, (self.folder / "sshd.log").read_text(encoding="utf-8")
                time.sleep(0.02)
            else:
                return
        raise AssertionError("sshd did not start")

    def stop(self) -> None:
        """End the daemon; connections that it has accepted go on in processes of their own until `cut`."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None

    def sessions(self) -> list[int]:
        """The processes that serve accepted connections."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text(encoding="ascii")
        return [int(pid) for pid in children.split()]

    def cut(self) -> int:
        """End every connection as a crash of the network stack would: their servers are killed. How many there were."""
        pids = self.sessions()
        return sum(_send(pid, signal.SIGKILL) for pid in pids)

    def leave(self, stall_seconds: float = 0.0) -> int:
        """End every connection and refuse new ones until `start`; how many there were. `stall_seconds`: they stand still before that. The
        daemon stands still too while its connections are counted: one that it took in between would outlive all cuts that follow."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        pids = self.sessions()
        for pid in pids:
            _send(pid, signal.SIGSTOP)
        time.sleep(stall_seconds)
        for pid in pids:
            _send(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        self._process = None
        return len(pids)

    def freeze(self) -> None:
        """As if the host had lost its network: nothing is answered, nothing is refused."""
        for pid in self.sessions():
            _send(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        for pid in self.sessions():
            _send(pid, signal.SIGCONT)

    def log(self) -> str:
        return (self.folder / "sshd.log").read_text(encoding="utf-8", errors="replace")


def _send(pid: int, number: int) -> bool:
    """False for a connection that has ended by itself since it was counted."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            port = random.SystemRandom().choice(PORTS)
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
