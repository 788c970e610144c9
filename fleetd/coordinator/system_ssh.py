"""The system's own ssh for bulk bytes, held to what the control connection has proven.

    control connection ─ hops with their proven keys ─► a configuration of ours ─► ssh -F that, and nothing of the user's
                                                        known_hosts: those very keys, under names of ours

What a person's configuration says of a host has been resolved already (`ssh_config`); read twice it could mean two things. A key that is
not the one which the control connection has just seen is refused, whoever vouches for it.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from fleetd.coordinator.ssh_connection import Hop
from fleetd.coordinator.ssh_lines import ChannelLines

ALIVE_SECONDS = 15
ALIVE_MISSED_MAX = 4
PIPE_BYTES = 1024 * 1024
END_SECONDS_MAX = 2.0
CPU_FACTS = "/proc/cpuinfo"
QUICK_CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com")
"""Several times as quick as the usual first choice where the processor has AES instructions."""
STRICT = (
    ("BatchMode", "yes"), ("StrictHostKeyChecking", "yes"), ("GlobalKnownHostsFile", "none"), ("UpdateHostKeys", "no"), ("CheckHostIP", "no"),
    ("VerifyHostKeyDNS", "no"), ("PreferredAuthentications", "publickey"), ("PasswordAuthentication", "no"), ("ForwardAgent", "no"),
    ("ForwardX11", "no"), ("ClearAllForwardings", "yes"), ("PermitLocalCommand", "no"), ("ControlMaster", "no"), ("ControlPath", "none"),
    ("RequestTTY", "no"), ("EscapeChar", "none"), ("Compression", "no"), ("LogLevel", "ERROR"),
    ("ServerAliveInterval", str(ALIVE_SECONDS)), ("ServerAliveCountMax", str(ALIVE_MISSED_MAX)),
)
_FAMILIES: dict[int, str] = {socket.AF_INET: "inet", socket.AF_INET6: "inet6"}
_SIGNATURES = {"ssh-rsa": "rsa-sha2-512,rsa-sha2-256"}


class NoSystemSsh(Exception):
    """Why the system's ssh can't be used for this host."""


def why_not(hops: tuple[Hop, ...]) -> str | None:
    """What keeps the system's ssh from being used; None when nothing does."""
    if shutil.which("ssh") is None:
        return "there is no ssh on the coordinator's PATH"
    texts = [text for hop in hops for text in (hop.target.hostname, hop.target.user, *map(str, hop.target.identity_files))]
    strange = next((text for text in texts if any(sign in text for sign in '"\\\n\0') or "${" in text), None)
    return f"{strange!r} can't be said in a configuration of ssh" if strange is not None else None


def known_hosts_text(hops: tuple[Hop, ...]) -> str:
    """One line for each hop: the key that it has shown, under our own name for it."""
    return "".join(f"{alias(number)} {hop.key.kind} {base64.b64encode(hop.key.blob).decode()}\n" for number, hop in enumerate(hops))


def configuration(hops: tuple[Hop, ...], known_hosts: str, *, has_aes: bool) -> str:
    """What `ssh -F` reads: one section for each machine on the way, then what holds for all of them."""
    lines: list[str] = []
    for number, hop in enumerate(hops):
        target = hop.target
        lines += [f"Host {alias(number)}", *(f"  {key} {value}" for key, value in (
            ("HostName", _escaped(target.hostname)), ("Port", target.port), ("User", target.user), ("HostKeyAlias", alias(number)),
            ("HostKeyAlgorithms", signatures(hop.key.kind)), ("ConnectTimeout", max(1, int(target.connect_seconds))),
            ("AddressFamily", _FAMILIES.get(target.family, "any")),
            ("IdentitiesOnly", "yes" if target.identities_only else "no"), ("IdentityAgent", _path(target.agent_socket or "none")),
            *(("IdentityFile", _path(str(path))) for path in target.identity_files or (Path("none"),)),
            *((("Ciphers", ",".join(quick_first(target.ciphers))),) if has_aes and target.ciphers else ()),
            ("ProxyJump", alias(number + 1) if number + 1 < len(hops) else "none"),
        ))]
    lines += ["Host *", f"  UserKnownHostsFile {_path(known_hosts)}", *(f"  {key} {value}" for key, value in STRICT)]
    return "".join(f"{line}\n" for line in lines)


def alias(number: int) -> str:
    """Our own name for a machine on the way: nothing that a user's files could speak of."""
    return f"fleetd-hop-{number}"


def signatures(kind: str) -> str:
    """By which algorithms a key of this kind may sign: never a certificate's."""
    return _SIGNATURES.get(kind, kind)


def quick_first(ciphers: tuple[str, ...]) -> tuple[str, ...]:
    """The same ciphers, the quick ones first: none is added that the user's configuration does not allow."""
    return (*(each for each in ciphers if each in QUICK_CIPHERS), *(each for each in ciphers if each not in QUICK_CIPHERS))


def has_aes_instructions() -> bool:
    try:
        with open(CPU_FACTS, encoding="utf-8", errors="replace") as file:
            return any("aes" in line.split() for line in file if line.startswith(("flags", "Features")))
    except OSError:
        return False


class SshProcess:
    """`ssh HOST COMMAND` as a channel, in a process group of its own. One thread at a time; `end` may be called from any."""

    def __init__(self, hops: tuple[Hop, ...], command: str) -> None:
        if (fault := why_not(hops)) is not None:
            raise NoSystemSsh(fault)
        self._folder = tempfile.mkdtemp(prefix="fleetd-ssh-")
        config, known = Path(self._folder) / "config", Path(self._folder) / "known_hosts"
        known.write_text(known_hosts_text(hops), encoding="utf-8")
        config.write_text(configuration(hops, str(known), has_aes=has_aes_instructions()), encoding="utf-8")
        try:
            self._process = subprocess.Popen(
                ("ssh", "-F", str(config), "--", alias(0), command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, bufsize=0,
            )
        except OSError as fault:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise NoSystemSsh(str(fault)) from fault
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        self._in, self._out, self._err = (pipe.fileno() for pipe in (self._process.stdin, self._process.stdout, self._process.stderr))
        os.set_blocking(self._in, False)
        _widen(self._in)
        self._timeout_seconds: float | None = None
        self._guard = threading.Lock()
        self._is_reaped = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def closed(self) -> bool:
        """Whether the process has ended. It is not reaped by the asking: until `close` its number is nobody else's."""
        return self._is_reaped or os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def settimeout(self, timeout: float | None) -> None:
        self._timeout_seconds = timeout

    def send(self, data: bytes) -> int:
        return self._when_there_is_room(lambda: os.write(self._in, data))

    def send_file(self, descriptor: int, offset: int, count: int) -> int:
        """Bytes of a file, on no way through this process. 0 at the end of the file."""
        return self._when_there_is_room(lambda: os.sendfile(self._in, descriptor, offset, count))

    def recv(self, nbytes: int) -> bytes:
        if not _is_ready(self._out, select.POLLIN, self._timeout_seconds):
            raise TimeoutError("no answer in time")
        return os.read(self._out, nbytes)

    def recv_ready(self) -> bool:
        return _is_ready(self._out, select.POLLIN, 0.0)

    def recv_stderr(self, nbytes: int) -> bytes:
        return os.read(self._err, nbytes)

    def recv_stderr_ready(self) -> bool:
        return _is_ready(self._err, select.POLLIN, 0.0)

    def exit_status_ready(self) -> bool:
        """ssh gives the other side's status as its own, a moment after its last word."""
        give_up_seconds = time.monotonic() + END_SECONDS_MAX
        while not self.closed and time.monotonic() < give_up_seconds:
            time.sleep(0.01)
        return self.closed

    def recv_exit_status(self) -> int:
        found = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return -1
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def forget_files(self) -> None:
        """Once the login is done ssh has read them, and remembers the key that it has believed: a crash of ours leaves nothing behind."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def end(self) -> None:
        """Kill everything in the group. Whoever uses the channel is told by its pipes, and closes it."""
        with self._guard:
            if not self._is_reaped:
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.end()
        with self._guard:
            if self._is_reaped:
                return
            self._process.wait()
            self._is_reaped = True
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()
        self._in = self._out = self._err = -1  # the numbers may be somebody else's from here on
        self.forget_files()

    def _when_there_is_room(self, send: Callable[[], int]) -> int:
        while True:
            if not _is_ready(self._in, select.POLLOUT, self._timeout_seconds):
                raise TimeoutError("it takes no bytes")
            try:
                return send()
            except BlockingIOError:
                continue  # less room than one page


class ProcessLines(ChannelLines):
    """Lines of such a process; parts of files are carried by the kernel."""

    def __init__(self, process: SshProcess) -> None:
        super().__init__(process)
        self._process = process

    def _write_part(self, descriptor: int, offset: int, count: int, until_seconds: float) -> int:
        self._process.settimeout(max(until_seconds - time.monotonic(), 0.0))
        try:
            return self._process.send_file(descriptor, offset, count)
        except OSError as fault:
            if fault.errno == errno.EPIPE:
                raise
            # else a file system that can't do it, or a file that can't be read: the plain way says which
        return super()._write_part(descriptor, offset, count, until_seconds)


def _is_ready(descriptor: int, event: int, seconds: float | None) -> bool:
    """Whether something can be done, the end included. `poll`, since a coordinator of many hosts has many descriptors."""
    poll = select.poll()
    poll.register(descriptor, event)
    return bool(poll.poll(None if seconds is None else seconds * 1000.0))


def _widen(pipe: int) -> None:
    """A larger pipe means fewer turns; an unprivileged user may have used up what is allowed."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError:
        pass


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _path(text: str) -> str:
    return f'"{_escaped(text)}"' if text != "none" else text
