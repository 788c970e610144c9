"""Whether the key that a host shows is the one on record: `known_hosts` as OpenSSH reads it, and never a key accepted unseen.

`ssh-keygen -F` finds the lines (hashed names, ports, wildcards and negations are its trade; paramiko's reader gives up at a marker);
`judge` compares, and each way of not matching has an error of its own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fleetd.coordinator.ssh_config import SSH_PORT, SshTarget, bracketed
from policies.errors import HostKeyRefused, RequestRefused
from policies.facts import Word

SEARCH_SECONDS_MAX = 10.0
FINGERPRINTS_SHOWN_MAX = 4
_KEY_FILES = (("ssh-ed25519", "ed25519"), ("ecdsa-", "ecdsa"), ("ssh-rsa", "rsa"))
REVOCATION_MAGIC = b"SSHKRL\n\0"
_FOUND = re.compile(r"# Host .* found: line (\d+)\s*(\w*)\s*")


class Marker(Word):
    """What a line of known_hosts says of its key."""

    KNOWN = ""
    REVOKED = "REVOKED"
    AUTHORITY = "CA"


class Standing(Word):
    ACCEPTED = "accepted"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"
    AUTHORITY_ONLY = "vouched for by an authority only"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostKey:
    """A public key as it stands in known_hosts: its kind (`ssh-ed25519`) and its bytes."""

    kind: str
    blob: bytes

    @property
    def fingerprint(self) -> str:
        """As ssh-keygen -l shows it."""
        return "SHA256:" + base64.b64encode(hashlib.sha256(self.blob).digest()).decode().rstrip("=")

    def __str__(self) -> str:
        return f"{self.kind} {self.fingerprint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKey:
    """One line of a known_hosts file that speaks of the host."""

    key: HostKey
    marker: Marker
    file: Path
    line: int

    def __str__(self) -> str:
        return f"{self.key} ({self.file} line {self.line})"


def judge(shown: HostKey, known: tuple[KnownKey, ...]) -> Standing:
    """A revocation outweighs everything; then a line with this very key; then what else is on record."""
    if any(each.marker is Marker.REVOKED and each.key.blob == shown.blob for each in known):
        return Standing.REVOKED
    plain = [each for each in known if each.marker is Marker.KNOWN]
    if any(each.key == shown for each in plain):
        return Standing.ACCEPTED
    if plain:
        return Standing.CHANGED
    return Standing.AUTHORITY_ONLY if any(each.marker is Marker.AUTHORITY for each in known) else Standing.UNKNOWN


def known_keys(target: SshTarget) -> tuple[KnownKey, ...]:
    """Every line that speaks of this host. As OpenSSH does it, a host at another port may be on record under its plain name."""
    found = tuple(known for file in target.known_hosts for known in _search(file, target.known_as))
    if any(each.marker is Marker.KNOWN for each in found) or target.known_as != bracketed(target.hostname, target.port) or target.port == SSH_PORT:
        return found
    return found + tuple(known for file in target.known_hosts for known in _search(file, target.hostname))


def check(target: SshTarget, shown: HostKey, known: tuple[KnownKey, ...]) -> None:
    """HostKeyRefused unless the key shown is on record for this host, and nowhere revoked."""
    standing = judge(shown, known)
    if standing is Standing.ACCEPTED and target.revoked_keys is not None and _is_in_revocations(target.revoked_keys, shown):
        standing = Standing.REVOKED
    if standing is not Standing.ACCEPTED:
        raise _refusal(standing, target, shown, known)


def _refusal(standing: Standing, target: SshTarget, shown: HostKey, known: tuple[KnownKey, ...]) -> HostKeyRefused:
    name, files = target.name, ", ".join(str(file) for file in target.known_hosts) or "no file"
    where = f"host {name}, {bracketed(target.hostname, target.port)}, known as {target.known_as}"
    file = next((name for start, name in _KEY_FILES if shown.kind.startswith(start)), "*")
    compare = f"ssh-keygen -lf /etc/ssh/ssh_host_{file}_key.pub on the host itself"
    learn = target.words.command("-o", "StrictHostKeyChecking=ask") + " true"
    if standing is Standing.UNKNOWN:
        return HostKeyRefused(
            f"the host key of {name} is not known", where=where, what=f"it shows {shown}, and no line of {files} names it",
            fix=f"compare that with {compare}; then record it: {learn}",
        )
    if standing is Standing.CHANGED:
        plain = [each for each in known if each.marker is Marker.KNOWN]
        more = f" and {len(plain) - FINGERPRINTS_SHOWN_MAX} more" if len(plain) > FINGERPRINTS_SHOWN_MAX else ""
        shown_known = ", ".join(str(each) for each in plain[:FINGERPRINTS_SHOWN_MAX]) + more
        forget = f"ssh-keygen -R {shlex.quote(target.known_as)} -f {shlex.quote(str(plain[0].file))}"
        return HostKeyRefused(
            f"the host key of {name} has changed", where=where, what=f"on record is {shown_known}; it shows {shown}",
            fix=f"somebody may answer in its place: only if you know why (compare {compare}): {forget} && {learn}",
        )
    if standing is Standing.REVOKED:
        line = next((f"{each.file} line {each.line}" for each in known if each.marker is Marker.REVOKED and each.key.blob == shown.blob), None)
        return HostKeyRefused(
            f"the host key of {name} is revoked", where=where, what=f"it shows {shown}, revoked in {line or target.revoked_keys}",
            fix="give the host new keys (there: rm the old ones in /etc/ssh, ssh-keygen -A, restart sshd), record them, then try again",
        )
    authority = next(each for each in known if each.marker is Marker.AUTHORITY)
    keyscan = f"ssh-keyscan -p {target.port} {shlex.quote(target.hostname)}"
    rename = "" if target.known_as == bracketed(target.hostname, target.port) else f" | sed 's/^[^ ]*/{target.known_as}/'"
    return HostKeyRefused(
        f"only an authority vouches for the key of {name}", where=where,
        what=f"it shows {shown}; on record is the authority {authority}, and certificates of hosts are not read",
        fix=f"compare that with {compare}; then record it: {keyscan}{rename} >> {shlex.quote(str(target.known_hosts[0]))}",
    )


def _search(file: Path, name: str) -> tuple[KnownKey, ...]:
    if not file.exists():
        return ()
    try:
        done = subprocess.run(
            ("ssh-keygen", "-F", name, "-f", str(file)), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=SEARCH_SECONDS_MAX, check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        what, fix = f"ssh-keygen could not look into it: {fault}", "sudo apt-get install openssh-client"
        raise RequestRefused("known host keys can't be read", where=str(file), what=what, fix=fix) from fault
    if done.returncode not in (0, 1):
        what, fix = done.stderr.strip()[-300:], f"ssh-keygen -F {shlex.quote(name)} -f {shlex.quote(str(file))}   (says what is wrong)"
        raise RequestRefused("known host keys can't be read", where=str(file), what=what, fix=fix)
    return parse_found(done.stdout, file)


def parse_found(text: str, file: Path) -> tuple[KnownKey, ...]:
    """The lines that `ssh-keygen -F` prints, each after a comment with its number and marker. Those with unreadable keys are left out."""
    found: list[KnownKey] = []
    heading = None
    for line in text.splitlines():
        if (match := _FOUND.fullmatch(line)) is not None:
            heading = match
            continue
        words = line.split()
        if heading is None or len(words) < 3:
            continue
        kind, encoded = words[2:4] if words[0].startswith("@") and len(words) > 3 else words[1:3]
        try:
            key = HostKey(kind=kind, blob=base64.b64decode(encoded, validate=True))
        except binascii.Error:
            continue
        found.append(KnownKey(key=key, marker=Marker(heading[2]), file=file, line=int(heading[1])))
    return tuple(found)


def _is_in_revocations(file: Path, shown: HostKey) -> bool:
    """Whether RevokedHostKeys (a list or a binary KRL) holds the key. As for OpenSSH, a file that can't be read refuses every key."""
    encoded = base64.b64encode(shown.blob).decode()
    try:
        data = file.read_bytes()
    except OSError:
        return True
    if not data.startswith(REVOCATION_MAGIC):
        return any(encoded in line.split() for line in data.decode(errors="replace").splitlines())
    with tempfile.NamedTemporaryFile("w", suffix=".pub") as public:
        public.write(f"{shown.kind} {encoded}\n")
        public.flush()
        done = subprocess.run(
            ("ssh-keygen", "-Q", "-f", str(file), public.name), stdin=subprocess.DEVNULL, capture_output=True, check=False,
            timeout=SEARCH_SECONDS_MAX,
        )
    return done.returncode != 0
