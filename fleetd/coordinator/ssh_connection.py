"""One SSH connection to one host: the way there (through jump hosts), the proof of its key, the login, and programs started on it.

Whatever is asked of it is bounded by a deadline of our own. paramiko calls a peer alive that lost its power an hour ago, and some of
its waits know no limit: `deadline` closes the whole transport when time is up, which ends every wait on it.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import paramiko

from fleetd.coordinator import host_keys
from fleetd.coordinator.host_keys import HostKey
from fleetd.coordinator.ssh_config import SshTarget, SshWords, jump_words, resolve
from fleetd.coordinator.ssh_login import log_in
from policies.errors import ExplainedError, HostUnreachable

JUMPS_MAX = 8
KEEPALIVE_SECONDS = 15
"""So that routers on the way do not forget the connection. That it died is noticed by calls that are not answered."""
HANDSHAKE_SECONDS_MAX = 15.0
ENTER_SHELL = "exec /bin/sh"
"""Read by the login shell, whichever it is: sh, csh, fish and zsh agree on this much."""
_SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""A key of one kind may sign by several algorithms, and known_hosts names the kind."""

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # what goes wrong is told once, by whoever asked for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One machine on the way to a host, and the key by which it is known now."""

    target: SshTarget
    key: HostKey


class SshConnection:
    """A live, verified, authenticated connection. `close` may be called from any thread and ends everything that uses it."""

    def __init__(self, target: SshTarget, transport: paramiko.Transport, key: HostKey, before: SshConnection | None) -> None:
        self.target, self._transport, self._key, self._before = target, transport, key, before

    @property
    def hops(self) -> tuple[Hop, ...]:
        """The machines on the way, this one first, each with the key that it has shown and that was found on record."""
        return (Hop(target=self.target, key=self._key), *(self._before.hops if self._before is not None else ()))

    @classmethod
    def open(cls, words: SshWords, until_seconds: float, depth: int = 0) -> SshConnection:
        """Connect by `until_seconds` of the monotonic clock. HostUnreachable, HostKeyRefused, LoginRefused, RequestRefused."""
        target = resolve(words)
        before, wire = None, None
        if target.jumps:
            if depth >= JUMPS_MAX:
                what, fix = f"ProxyJump leads through more than {JUMPS_MAX} hosts", "mend the circle in the SSH configuration"
                raise HostUnreachable(f"{target.name} does not answer", where=f"host {target.name}", what=what, fix=fix)
            before = cls.open(jump_words(target.jumps[-1], target.jumps[:-1], target), until_seconds, depth + 1)
        try:
            wire = before._tunnel(target, until_seconds) if before is not None else _dial(target, until_seconds)
            transport, key = _shake_hands(target, wire, until_seconds)
        except BaseException:
            if wire is not None:
                wire.close()
            if before is not None:
                before.close()
            raise
        connection = cls(target, transport, key, before)
        try:
            with connection.deadline(until_seconds - time.monotonic(), "login"):
                log_in(transport, target)
        except BaseException:
            connection.close()
            raise
        transport.set_keepalive(KEEPALIVE_SECONDS)
        return connection

    @property
    def is_open(self) -> bool:
        return self._transport.is_active()

    def close(self) -> None:
        """Drop it now, whether or not the other side still hears us."""
        self._transport.close()
        if self._before is not None:
            self._before.close()

    @contextmanager
    def deadline(self, seconds: float, doing: str) -> Iterator[None]:
        """Do something with this connection within `seconds`, or lose the connection and raise HostUnreachable."""
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            self.close()

        timer = threading.Timer(max(seconds, 0.0), end)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (paramiko.SSHException, EOFError, OSError) as fault:
            what = f"no answer in {max(seconds, 0.0):.0f} s" if is_late.is_set() else str(fault) or type(fault).__name__
            raise self.unreachable(doing, what) from fault
        finally:
            timer.cancel()
        if is_late.is_set():
            raise self.unreachable(doing, f"no answer in {seconds:.0f} s")

    def open_shell(self) -> paramiko.Channel:
        """A shell that reads its commands from us. Called within `deadline`."""
        channel = self._transport.open_session()
        channel.exec_command(ENTER_SHELL)
        return channel

    def unreachable(self, doing: str, what: str) -> HostUnreachable:
        return _unreachable(self.target, f"{doing}: {what}")

    def _tunnel(self, target: SshTarget, until_seconds: float) -> paramiko.Channel:
        """A channel that the jump host connects to the next one."""
        try:
            with self.deadline(min(target.connect_seconds, until_seconds - time.monotonic()), f"way through {self.target.name}"):
                return self._transport.open_channel("direct-tcpip", (target.hostname, target.port), ("127.0.0.1", 0))
        except HostUnreachable as fault:
            raise _unreachable(target, fault.what) from fault


def _dial(target: SshTarget, until_seconds: float) -> socket.socket:
    """A TCP connection to the first address that takes one."""
    give_up_seconds = min(until_seconds, time.monotonic() + target.connect_seconds)
    try:
        addresses = socket.getaddrinfo(target.hostname, target.port, target.family, socket.SOCK_STREAM)
    except OSError as fault:
        raise _unreachable(target, f"{target.hostname}: {fault.strerror or fault}") from fault
    faults: list[str] = []
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        left_seconds = (give_up_seconds - time.monotonic()) / (len(addresses) - index)
        wire = socket.socket(family, kind, protocol)
        try:
            wire.settimeout(max(left_seconds, 0.1))
            wire.connect(address)
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # What was not delivered when we give up dies with the connection, and is not carried out an hour later.
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return wire
        except OSError as fault:
            wire.close()
            what = f"no connection in {max(left_seconds, 0.1):.0f} s" if isinstance(fault, TimeoutError) else str(fault.strerror or fault)
            faults.append(f"{' port '.join(str(part) for part in address[:2])}: {what}")
    raise _unreachable(target, "; ".join(dict.fromkeys(faults)))


def _shake_hands(target: SshTarget, wire: Any, until_seconds: float) -> tuple[paramiko.Transport, HostKey]:
    """Agree on keys, and see that the host's own is on record: that key. Nothing of ours has been said before."""
    known = host_keys.known_keys(target)
    transport = paramiko.Transport(wire)
    try:
        _prefer_known_kinds(transport, known)
        seconds = min(HANDSHAKE_SECONDS_MAX, until_seconds - time.monotonic())
        transport.banner_timeout = transport.handshake_timeout = transport.auth_timeout = seconds
        transport.start_client(timeout=seconds)
        if not transport.initial_kex_done:  # paramiko returns without a word when its time is up
            raise paramiko.SSHException(f"no handshake in {seconds:.0f} s")
        found = transport.get_remote_server_key()
        shown = HostKey(kind=found.get_name(), blob=found.asbytes())
        host_keys.check(target, shown, known)
    except (paramiko.SSHException, EOFError, OSError) as fault:
        transport.close()
        raise _unreachable(target, f"handshake: {str(fault) or type(fault).__name__}") from fault
    except ExplainedError:
        transport.close()
        raise
    return transport, shown


def _prefer_known_kinds(transport: paramiko.Transport, known: tuple[host_keys.KnownKey, ...]) -> None:
    """Ask for a key of a kind that is on record, so that a host with several keys shows one that can be compared."""
    options = transport.get_security_options()
    wanted = [
        each for line in known if line.marker is host_keys.Marker.KNOWN for each in _SIGNATURES.get(line.key.kind, (line.key.kind,))
        if each in options.key_types
    ]
    with suppress(ValueError):
        options.key_types = tuple(dict.fromkeys([*wanted, *(each for each in options.key_types if "-cert-" not in each)]))


def _unreachable(target: SshTarget, what: str) -> HostUnreachable:
    return HostUnreachable(
        f"{target.name} does not answer", where=f"host {target.name}, {target.where}", what=what,
        fix=f"see whether it answers at all: {target.words.command('-v')} true",
    )
