"""Proving to a host who we are: keys from the SSH agent or from files, in the order of OpenSSH. No password, no forwarding, nothing stored."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import paramiko
from paramiko.agent import AgentKey, AgentSSH

from fleetd.coordinator.host_keys import HostKey
from fleetd.coordinator.ssh_config import SshTarget
from policies.errors import ExplainedError, HostUnreachable, LoginRefused

AGENT_SECONDS_MAX = 30.0
"""A hardware key may wait for a touch."""
KEYS_SHOWN_MAX = 6


@dataclass
class Offer:
    """What was tried, for whoever has to mend it."""

    tried: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.tried and not self.left_out:
            return "there is no key to offer, neither in an agent nor in a file"
        parts = [f"it refused {_listed(self.tried)}"] if self.tried else []
        return "; ".join(parts + ([f"not offered: {_listed(self.left_out)}"] if self.left_out else []))


def log_in(transport: paramiko.Transport, target: SshTarget) -> None:
    """Authenticate, or LoginRefused with every key that was tried. HostUnreachable when the connection ends on the way."""
    offer = Offer()
    with _agent(target, offer) as agent_keys:
        for name, key in _candidates(target, agent_keys, offer):
            try:
                more = transport.auth_publickey(target.user, key)
            except paramiko.BadAuthenticationType as fault:
                raise _refused(target, f"it takes no keys, only {', '.join(fault.allowed_types)}") from fault
            except paramiko.AuthenticationException as fault:
                if not transport.is_active():  # also what paramiko calls a connection that ended before the answer
                    raise _cut_off(target, offer, fault) from fault
                offer.tried.append(f"{name} {_fingerprint(key)}")
            except (paramiko.SSHException, EOFError, OSError) as fault:
                if not transport.is_active():
                    raise _cut_off(target, offer, fault) from fault
                offer.left_out.append(f"{name}: {fault}")
            else:
                if more:
                    raise _refused(target, f"it took {name} and wants {', '.join(more)} besides, which nobody is here to give")
                return
    raise _refused(target, str(offer))


def _candidates(target: SshTarget, agent_keys: tuple[AgentKey, ...], offer: Offer) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys of the agent that stand in the configuration, then its others (unless only identities are wanted), then files."""
    configured = {blob: path for path in target.identity_files if (blob := _public_blob(path)) is not None}
    held = {key.asbytes(): key for key in agent_keys}
    for blob, key in held.items():
        if blob in configured:
            yield f"{configured[blob]} (from the agent)", key
    if not target.identities_only:
        for blob, key in held.items():
            if blob not in configured:
                yield f"{key.comment or key.get_name()} (from the agent)", key
    for path in target.identity_files:
        if _public_blob(path) not in held and (loaded := _load(path, offer)) is not None:
            yield str(path), loaded


def _load(path: Path, offer: Offer) -> paramiko.PKey | None:
    if not path.exists():
        return None
    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):  # how the two readers behind it say that a key is encrypted
        offer.left_out.append(f"{path} (it needs its passphrase: ssh-add {path})")
    except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError, OSError) as fault:
        offer.left_out.append(f"{path} (it can't be read: {fault})")
    return None


def _public_blob(path: Path) -> bytes | None:
    """The public half that lies beside a private key, by which the agent's copy is known."""
    try:
        return paramiko.pkey.PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError, paramiko.SSHException):
        return None


@contextmanager
def _agent(target: SshTarget, offer: Offer) -> Iterator[tuple[AgentKey, ...]]:
    """The keys of the agent that OpenSSH would ask; none when there is no agent."""
    if target.agent_socket is None:
        yield ()
        return
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        agent = AgentSSH()
        try:
            connection.settimeout(AGENT_SECONDS_MAX)
            connection.connect(target.agent_socket)
            agent._connect(connection)  # type: ignore[attr-defined]  # the public class knows the environment's socket only
        except (OSError, paramiko.SSHException) as fault:
            offer.left_out.append(f"the agent at {target.agent_socket} ({fault})")
            yield ()
            return
        yield agent.get_keys()


def _fingerprint(key: paramiko.PKey) -> str:
    return HostKey(kind=key.get_name(), blob=key.asbytes()).fingerprint


def _listed(names: list[str]) -> str:
    return ", ".join(names[:KEYS_SHOWN_MAX]) + (f" and {len(names) - KEYS_SHOWN_MAX} more" if len(names) > KEYS_SHOWN_MAX else "")


def _refused(target: SshTarget, what: str) -> LoginRefused:
    return LoginRefused(
        f"{target.name} does not let {target.user} in", where=f"host {target.name}, {target.where}", what=what,
        fix=f"make this work without a question: {target.words.command()} true   (ssh-copy-id, ssh-add, or user and identity_file in the plan)",
    )


def _cut_off(target: SshTarget, offer: Offer, fault: Exception) -> ExplainedError:
    if offer.tried:  # sshd hangs up after MaxAuthTries
        return _refused(target, f"{offer}, and it hung up")
    what, fix = f"it hung up during the login: {str(fault) or type(fault).__name__}", f"{target.words.command('-v')} true"
    return HostUnreachable(f"{target.name} does not answer", where=f"host {target.name}, {target.where}", what=what, fix=fix)
