"""From host to host: what a receiving host runs to take a tree from its neighbour, and why it can't.

    coordinator ── argv, script, the neighbour's key ──► stager on spark-b ── ssh, with a key of spark-b's own ──► sh on spark-a
                                                              ◄──────── the files' bytes, one after the other ────────┘
The plan's `data_from` names the neighbour and how it is reached. The host key that is believed is the one which the neighbour has shown to the
coordinator; nobody's agent is forwarded. What arrives is hashed like anything else, so the neighbour is not trusted either.
"""

from __future__ import annotations

import base64
import secrets
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetd.campaign import DataFrom
from fleetd.coordinator.ssh_connection import ENTER_SHELL, Hop
from fleetd.coordinator.system_ssh import STRICT, signatures
from policies.facts import MIB

CONNECT_SECONDS = 10
ALIAS = "fleetd-neighbour"
GROUP_BYTES_MAX = 32 * 1024
"""So long may the names of one cat be: a program for each of many small files would take longer than they do."""
WORDS_BYTES_MAX = 6 * MIB
"""A list of files that is longer would not fit into one line of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A neighbour that has the tree, as the receiving host reaches it."""

    name: str
    address: str
    argv: tuple[str, ...]
    known_hosts: str
    folder: str

    @property
    def road(self) -> str:
        return f"from {self.name}"

    def request(self, files: list[list[Any]], offsets: dict[str, int], marks: Callable[[], str] = lambda: secrets.token_hex(8)) -> dict[str, Any]:
        """What the stager is told. The marker is in two halves, so that it is nowhere in what is sent."""
        halves = marks(), marks()
        return {
            "do": "pull", "from": offsets, "argv": list(self.argv), "known_hosts": self.known_hosts, "marker": "".join(halves),
            "script": script(self.folder, files, offsets, halves),
        }


class NoLink(Exception):
    """Why the neighbour can't be asked."""


def link_to(data_from: DataFrom, neighbour: Hop, folder: str) -> Link:
    """`neighbour`: who it is, by the coordinator's own connection; `folder`: where the tree lies there."""
    address = data_from.address or data_from.host
    options = (
        *STRICT, ("UserKnownHostsFile", '"{known_hosts}"'), ("HostKeyAlias", ALIAS), ("HostKeyAlgorithms", signatures(neighbour.key.kind)),
        ("IdentityAgent", "none"), ("ConnectTimeout", str(CONNECT_SECONDS)),
    )
    key = ("-i", data_from.identity_file, "-o", "IdentitiesOnly=yes") if data_from.identity_file else ()
    port = ("-p", str(data_from.port)) if data_from.port else ()
    argv = (
        "ssh", "-F", "none", *(word for name, value in options for word in ("-o", f"{name}={value}")), *key, *port,
        "-l", data_from.user or neighbour.target.user, "--", address, ENTER_SHELL,
    )
    known_hosts = f"{ALIAS} {neighbour.key.kind} {base64.b64encode(neighbour.key.blob).decode()}\n"
    return Link(name=data_from.host, address=address, argv=argv, known_hosts=known_hosts, folder=folder)


def script(folder: str, files: list[list[Any]], offsets: dict[str, int], halves: tuple[str, str]) -> str:
    """For a plain sh: the marker, then every missing byte in order. One compound command, read whole before any of it runs."""
    lines = [f"printf '%s%s\\n' {halves[0]} {halves[1]}", f"cd {shlex.quote(folder)} || exit 97"]
    whole: list[str] = []

    def end_of_group() -> None:
        if whole:
            lines.append(f"cat -- {' '.join(whole)} || exit 98")
            whole.clear()

    for path, size, _ in files:
        offset, word = offsets.get(path, 0), shlex.quote(path)
        if 0 < offset < size:
            end_of_group()
            lines.append(f"tail -c +{offset + 1} -- {word} || exit 98")
        elif offset < size:
            if sum(map(len, whole)) + len(word) > GROUP_BYTES_MAX:
                end_of_group()
            whole.append(word)
    end_of_group()
    text = "\n".join(["{", *lines, "exit 0", "}", ""])
    if len(text) > WORDS_BYTES_MAX:
        raise NoLink(f"the list of its {len(files)} files is too long")
    return text


def why_it_gave_nothing(what: str, receiver: str, link: Link) -> str:
    """Why a neighbour did not give a tree, and what a person can do about it."""
    user = link.argv[link.argv.index("-l") + 1]
    if "Permission denied" in what:
        return f"{receiver} has no key that {link.name} takes (on {receiver}: ssh-keygen, then ssh-copy-id {user}@{link.address})"
    if "Host key verification failed" in what:
        return f"at {link.address} another host answers than the {link.name} that the coordinator knows"
    return f"{link.name} did not give it: {what}"
