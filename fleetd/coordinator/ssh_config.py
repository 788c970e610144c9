"""How OpenSSH would reach a host: what `ssh -G` makes of the user's own configuration (Include, Match, ProxyJump, ports, identities).

Read again at each connection, so that a corrected file needs no restart. Nothing here connects to anything.
"""

from __future__ import annotations

import getpass
import os
import re
import shlex
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fleetd.campaign import HostPlan
from policies.errors import RequestRefused

RESOLVE_SECONDS_MAX = 10.0
CONNECT_SECONDS_DEFAULT = 10.0
SSH_PORT = 22
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_JUMP = re.compile(r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?P<host>\[[^\]]+\]|[^:\[\]]+)(?::(?P<port>[0-9]+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshWords:
    """What would stand on ssh's command line."""

    address: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    config: str | None = None

    def argv(self, *options: str) -> tuple[str, ...]:
        """`ssh OPTIONS ... ADDRESS` as a person would type it."""
        given = (("-F", self.config), ("-l", self.user), ("-p", self.port), ("-i", self.identity_file), ("-J", self.proxy_jump))
        return ("ssh", *options, *(word for flag, value in given if value is not None for word in (flag, str(value))), "--", self.address)

    def command(self, *options: str) -> str:
        """The same for a person to copy."""
        return shlex.join([word for word in self.argv(*options) if word != "--"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """One resolved machine. `name` is what was asked for; `known_as` the name under which its keys are recorded."""

    words: SshWords
    hostname: str
    port: int
    user: str
    known_as: str
    identity_files: tuple[Path, ...]
    identities_only: bool
    agent_socket: str | None
    jumps: tuple[str, ...]
    known_hosts: tuple[Path, ...]
    revoked_keys: Path | None
    connect_seconds: float
    family: int
    ciphers: tuple[str, ...] = ()
    """In the order in which they are offered."""

    @property
    def name(self) -> str:
        return self.words.address

    @property
    def where(self) -> str:
        """`user@host:port`, for a person."""
        return f"{self.user}@{bracketed(self.hostname, self.port)}"


def words_of(plan: HostPlan) -> SshWords:
    return SshWords(
        address=plan.address or plan.name, user=plan.user, port=plan.port, identity_file=plan.identity_file, proxy_jump=plan.proxy_jump,
        config=plan.ssh_config,
    )


def jump_words(jump: str, before: tuple[str, ...], target: SshTarget) -> SshWords:
    """One hop of `ProxyJump a,b`: reached through the hops before it, with the same configuration file."""
    match = _JUMP.fullmatch(jump)
    if match is None:
        fix = "write ProxyJump as user@host:port"
        raise RequestRefused(f"the way to {target.name} can't be read", where=f"ProxyJump of {target.name}", what=repr(jump), fix=fix)
    port = int(match["port"]) if match["port"] else None
    return SshWords(
        address=match["host"].strip("[]"), user=match["user"], port=port, proxy_jump=",".join(before) or None, config=target.words.config,
    )


def resolve(words: SshWords) -> SshTarget:
    """What OpenSSH would do with these words. RequestRefused when it can't say, or when it would do what fleetd can't."""
    found = _ask_ssh(words)
    command = (found.get("proxycommand") or ["none"])[-1]
    if command != "none":
        raise RequestRefused(
            f"the way to {words.address} can't be gone", where=f"ProxyCommand of {words.address}", what=f"a ProxyCommand is not run ({command})",
            fix="say the same with ProxyJump in the SSH configuration, or as proxy_jump of the host in the plan",
        )
    hostname, port, user = _last(found, "hostname", words.address), int(_last(found, "port", str(SSH_PORT))), _last(found, "user", getpass.getuser())
    alias = _last(found, "hostkeyalias", "none")
    tokens = _tokens(words, hostname, port, user, alias)
    jump = _last(found, "proxyjump", "none")
    connect = _last(found, "connecttimeout", "none")
    revoked = _last(found, "revokedhostkeys", "none")
    return SshTarget(
        words=words, hostname=hostname, port=port, user=user, known_as=bracketed(hostname, port) if alias == "none" else alias,
        identity_files=tuple(Path(_expand(text, tokens)) for text in found.get("identityfile", []) if text != "none"),
        identities_only=_last(found, "identitiesonly", "no") == "yes", agent_socket=_agent_socket(found, tokens),
        jumps=() if jump == "none" else tuple(jump.split(",")),
        known_hosts=tuple(
            Path(_expand(text, tokens)) for key in ("userknownhostsfile", "globalknownhostsfile") for text in _last(found, key, "none").split()
            if text != "none"
        ),
        revoked_keys=None if revoked == "none" else Path(_expand(revoked, tokens)),
        connect_seconds=float(connect) if connect.isdigit() and int(connect) else CONNECT_SECONDS_DEFAULT,
        ciphers=tuple(each for each in _last(found, "ciphers", "").split(",") if each),
        family={"inet": socket.AF_INET, "inet6": socket.AF_INET6}.get(_last(found, "addressfamily", "any"), socket.AF_UNSPEC),
    )


def bracketed(hostname: str, port: int) -> str:
    """The name of a machine in known_hosts: plain at the usual port, else `[host]:port`."""
    return hostname if port == SSH_PORT else f"[{hostname}]:{port}"


def _ask_ssh(words: SshWords) -> dict[str, list[str]]:
    where = f"ssh -G {words.address}"
    try:
        done = subprocess.run(words.argv("-G"), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RESOLVE_SECONDS_MAX, check=False)
    except FileNotFoundError as fault:
        what, fix = "there is no ssh on the coordinator's PATH", "sudo apt-get install openssh-client"
        raise RequestRefused("hosts can't be reached over ssh", where=where, what=what, fix=fix) from fault
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise RequestRefused("the SSH configuration can't be read", where=where, what=str(fault), fix=words.command("-G")) from fault
    if done.returncode != 0:
        what = done.stderr.strip()[-300:] or f"exit status {done.returncode}"
        raise RequestRefused("the SSH configuration can't be read", where=where, what=what, fix=f"mend it until this works: {words.command('-G')}")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key.lower(), []).append(value.strip())
    return found


def _last(found: dict[str, list[str]], key: str, default: str) -> str:
    return found.get(key, [default])[-1] or default


def _tokens(words: SshWords, hostname: str, port: int, user: str, alias: str) -> dict[str, str]:
    """The % of ssh_config(5) that may stand in paths."""
    here = socket.gethostname()
    return {
        "%%": "%", "%d": str(Path.home()), "%h": hostname, "%i": str(os.getuid()), "%k": hostname if alias == "none" else alias,
        "%L": here.split(".")[0], "%l": here, "%n": words.address, "%p": str(port), "%r": user, "%u": getpass.getuser(),
    }


def _expand(text: str, tokens: dict[str, str]) -> str:
    text = re.sub(r"%.", lambda match: tokens.get(match[0], match[0]), text)
    return os.path.expanduser(_VARIABLE.sub(lambda match: os.environ.get(match[1], ""), text))


def _agent_socket(found: dict[str, list[str]], tokens: dict[str, str]) -> str | None:
    named = _last(found, "identityagent", "SSH_AUTH_SOCK")
    if named == "none":
        return None
    if named == "SSH_AUTH_SOCK" or named.startswith("$"):
        return os.environ.get(named.strip("${}")) or None
    return _expand(named, tokens)
