"""The configuration of the bulk connection, as OpenSSH itself reads it: what was resolved and proven, and nothing else."""

from __future__ import annotations

import base64
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fleetd.coordinator.host_keys import HostKey
from fleetd.coordinator.ssh_config import SshTarget, SshWords
from fleetd.coordinator.ssh_connection import Hop
from fleetd.coordinator.system_ssh import QUICK_CIPHERS, STRICT, alias, configuration, known_hosts_text, quick_first, why_not

CIPHERS = ("chacha20-poly1305@openssh.com", "aes128-ctr", "aes256-gcm@openssh.com")
KEY = HostKey(kind="ssh-ed25519", blob=b"\0\0\0\x0bssh-ed25519\0\0\0 " + b"k" * 32)
TARGET = SshTarget(
    words=SshWords(address="spark-a"), hostname="fe80::1%eth0", port=2222, user="trainer", known_as="[fe80::1%eth0]:2222",
    identity_files=(Path("/home/me/my keys/id_100%"), Path("/home/me/other")), identities_only=True, agent_socket="/run/agent sock", jumps=("jump",),
    known_hosts=(), revoked_keys=None, connect_seconds=7.0, family=socket.AF_INET6, ciphers=CIPHERS,
)
JUMP = replace(TARGET, words=SshWords(address="jump"), hostname="10.0.0.9", port=22, user="me", jumps=(), agent_socket=None, family=socket.AF_UNSPEC)
HOPS = (Hop(target=TARGET, key=KEY), Hop(target=JUMP, key=HostKey(kind="ssh-rsa", blob=b"rsa")))


def as_ssh_reads_it(folder: Path, host: str) -> dict[str, list[str]]:
    path = folder / "config"
    path.write_text(configuration(HOPS, str(folder / "known hosts"), has_aes=True), encoding="utf-8")
    done = subprocess.run(["ssh", "-G", "-F", str(path), "--", host], check=True, capture_output=True, text=True)
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def test_what_was_resolved_and_proven_is_what_ssh_will_do(tmp_path: Path) -> None:
    found = as_ssh_reads_it(tmp_path, alias(0))

    assert (found["hostname"], found["port"], found["user"], found["addressfamily"]) == (["fe80::1%eth0"], ["2222"], ["trainer"], ["inet6"])
    assert found["identityfile"] == ["/home/me/my keys/id_100%%", "/home/me/other"], "ssh expands %% when it opens the file"
    assert (found["identitiesonly"], found["identityagent"], found["proxyjump"]) == (["yes"], ["/run/agent sock"], [alias(1)])
    assert (found["hostkeyalias"], found["hostkeyalgorithms"], found["connecttimeout"]) == ([alias(0)], ["ssh-ed25519"], ["7"])
    assert found["ciphers"] == ["aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes128-ctr"]
    for host in (alias(0), alias(1)):
        found = as_ssh_reads_it(tmp_path, host)
        assert found["userknownhostsfile"] == [f"{tmp_path}/known hosts"] and found["globalknownhostsfile"] == ["none"]
        assert found["stricthostkeychecking"] == ["true"] and found["batchmode"] == ["yes"] and found["forwardagent"] == ["no"]
        assert found["permitlocalcommand"] == ["no"] and found["preferredauthentications"] == ["publickey"]
        assert found["clearallforwardings"] == ["yes"] and "controlpath" not in found and "proxycommand" not in found
    jump = as_ssh_reads_it(tmp_path, alias(1))
    assert (jump["hostname"], jump["user"], jump["identityagent"], "proxyjump" in jump) == (["10.0.0.9"], ["me"], ["none"], False)
    assert jump["hostkeyalgorithms"] == ["rsa-sha2-512,rsa-sha2-256"], "by no certificate, and not by SHA-1"


def test_only_the_keys_that_were_shown_are_believed_each_for_its_own_machine() -> None:
    first, second = known_hosts_text(HOPS).splitlines()

    assert first == f"{alias(0)} ssh-ed25519 {base64.b64encode(KEY.blob).decode()}"
    assert second == f"{alias(1)} ssh-rsa {base64.b64encode(b'rsa').decode()}"


def test_no_cipher_is_offered_that_the_configuration_does_not_allow() -> None:
    assert set(quick_first(CIPHERS)) == set(CIPHERS) and quick_first(CIPHERS)[0] in QUICK_CIPHERS
    assert quick_first(("aes128-ctr",)) == ("aes128-ctr",)
    assert len({key for key, _ in STRICT}) == len(STRICT)


@pytest.mark.parametrize("strange", ['/home/me/a"b', "/home/me/a\nProxyCommand x", "/home/${HOME}/id"])
def test_what_a_configuration_could_read_as_something_else_is_not_written_into_one(strange: str) -> None:
    hop = Hop(target=replace(TARGET, identity_files=(Path(strange),)), key=KEY)

    assert "can't be said" in (why_not((hop,)) or "")
    assert why_not(HOPS) is None
