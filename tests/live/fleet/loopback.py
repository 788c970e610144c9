"""Test hosts without root: for each name one sshd of this user on a high port of 127.0.0.1, with a home of its own.

    with LoopbackHosts() as hosts: hosts.ssh("spark-a", "hostname"); hosts["spark-a"].power_cycle()

Where the kernel lets an ordinary user make namespaces, a host has its own processes, name and boot id, and a power-off ends all that runs
on it; elsewhere (`is_isolated` is False) a power-off ends its sshd alone. There is one network and one user: nothing can be cut here.
"""

from __future__ import annotations

import getpass
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from fleet.cable import TIED_TO_US
from fleet.install import make_key

NAMES = ("gx10", "spark-a", "spark-b")
SSHD_SECONDS_MAX = 60.0
SSH_SECONDS_MAX = 180.0
PORTS = range(10_000, 32_000)
"""Below those that the kernel hands out: nobody gets ours while its host is off."""
NAMESPACES = ("--pid", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc")

# Runs inside: the name, the boot id, then the server. Its own capabilities end with the exec of a session's shell.
_BE_A_HOST = 'hostname "$1" && mount --bind "$2" /proc/sys/kernel/random/boot_id && shift 2 && exec "$@"'
# The login shell starts in the home of passwd; a host has another one, and file transfer begins there too.
_ENTER = """#!/bin/sh
cd "$HOME" || exit 97
case "$SSH_ORIGINAL_COMMAND" in
    "") exec "$SHELL" -l ;;
    internal-sftp*|*/sftp-server*) exec {sftp} ;;
    *) exec "$SHELL" -c "$SSH_ORIGINAL_COMMAND" ;;
esac
"""
_CONFIG = """\
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {key}.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
MaxStartups 200
MaxSessions 100
SetEnv HOME={folder}/home FLEET_HOST={name}
ForceCommand {folder}/enter
Subsystem sftp internal-sftp
"""


class LoopbackHost:
    def __init__(self, folder: Path, name: str, key: Path, *, is_isolated: bool) -> None:
        self.name, self.folder, self.home = name, folder, folder / "home"
        self.port = free_port()
        self._is_isolated, self._key = is_isolated, key
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_on(self) -> bool:
        return self._process is not None

    @property
    def boot_id(self) -> str:
        """Its own where hosts are isolated."""
        path = self.folder / "boot_id" if self._is_isolated else Path("/proc/sys/kernel/random/boot_id")
        return path.read_text(encoding="ascii").strip()

    def install(self) -> None:
        self.home.mkdir(parents=True)
        make_key(self.folder / "host_key", self.name)
        sftp = next((each for each in ("/usr/lib/openssh/sftp-server", "/usr/libexec/openssh/sftp-server", "/usr/lib/ssh/sftp-server")
                     if os.path.exists(each)), "sftp-server")
        (self.folder / "enter").write_text(_ENTER.format(sftp=sftp), encoding="utf-8")
        (self.folder / "enter").chmod(0o755)
        config = _CONFIG.format(port=self.port, folder=self.folder, key=self._key, name=self.name)
        (self.folder / "sshd_config").write_text(config, encoding="utf-8")

    def power_on(self) -> None:
        if self._process is not None:
            return
        server = ["/usr/sbin/sshd", "-D", "-e", "-f", str(self.folder / "sshd_config")]
        if self._is_isolated:
            boot_id = self.folder / "boot_id"
            boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
            server = [*isolation(), "sh", "-c", _BE_A_HOST, "host", self.name, str(boot_id), *server]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen([*TIED_TO_US, *server], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + SSHD_SECONDS_MAX
        while not can_connect(self.port):
            said = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
            assert self._process.poll() is None and time.monotonic() < end, f"{self.name}: no sshd on port {self.port}\n{said}"
            time.sleep(0.01)

    def power_off(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._is_isolated:
            # unshare leaves once its child has: that is pid 1 of the host, and its end waits for everything else there.
            child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
            os.kill(int(child[0]) if child else process.pid, signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(SSHD_SECONDS_MAX)

    def power_cycle(self) -> None:
        self.power_off()
        self.power_on()


class LoopbackHosts:
    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fleetd-loopback-"))
        self.is_isolated = can_isolate(self.folder)
        self.key = self.folder / "id_ed25519"
        self._hosts = {name: LoopbackHost(self.folder / name, name, self.key, is_isolated=self.is_isolated) for name in names}

    def __enter__(self) -> LoopbackHosts:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def __getitem__(self, name: str) -> LoopbackHost:
        return self._hosts[name]

    def __iter__(self) -> Iterator[LoopbackHost]:
        return iter(self._hosts.values())

    def up(self) -> None:
        make_key(self.key, "test hosts")
        for host in self:
            host.install()
            host.power_on()
        self._write_client_files()

    def down(self) -> None:
        for host in self:
            host.power_off()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def ssh_config(self) -> Path:
        return self.folder / "ssh_config"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    def ssh(self, name: str, *command: str, check: bool = True, seconds: float = SSH_SECONDS_MAX) -> subprocess.CompletedProcess[str]:
        argv = ["ssh", "-F", str(self.ssh_config), name, *command]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False)
        assert done.returncode == 0 or not check, f"ssh {name} {shlex.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def _write_client_files(self) -> None:
        keys, lines = [], []
        for host in self:
            kind, key, _ = (host.folder / "host_key.pub").read_text(encoding="ascii").split()
            keys.append(f"[127.0.0.1]:{host.port} {kind} {key}\n")
            lines += [f"Host {host.name}", "  HostName 127.0.0.1", f"  Port {host.port}"]
        self.known_hosts.write_text("".join(keys), encoding="ascii")
        lines += ["Host *", f"  User {getpass.getuser()}", f"  IdentityFile {self.key}", "  IdentitiesOnly yes",
                  f"  UserKnownHostsFile {self.known_hosts}", "  GlobalKnownHostsFile /dev/null", "  StrictHostKeyChecking yes", "  LogLevel ERROR"]
        self.ssh_config.write_text("\n".join([*lines, ""]), encoding="utf-8")


def isolation() -> list[str]:
    """The command in front of a host's server. Root needs no user namespace; as root inside one, sshd would try to change users."""
    mine = () if os.geteuid() == 0 else ("--user", "--map-current-user", "--keep-caps")
    return ["unshare", *mine, *NAMESPACES, "--"]


def can_isolate(folder: Path) -> bool:
    sample = folder / "sample"
    sample.write_text("sample\n", encoding="ascii")
    argv = [*isolation(), "sh", "-c", _BE_A_HOST, "host", "sample", str(sample), "true"]
    return subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False).returncode == 0


def free_port() -> int:
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as any_socket:
            port = random.SystemRandom().choice(PORTS)
            try:
                any_socket.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True
