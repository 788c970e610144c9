"""Which key a host may show: known_hosts files as people have them, read by the real ssh-keygen, and the judgement of what it finds."""

from __future__ import annotations

import base64
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from fleetd.coordinator import host_keys
from fleetd.coordinator.host_keys import HostKey, KnownKey, Marker, Standing, judge, known_keys
from fleetd.coordinator.ssh_config import SshTarget, SshWords, resolve
from policies.errors import HostKeyRefused, RequestRefused


def public_key(folder: Path, name: str, kind: str = "ed25519") -> HostKey:
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)
    words = Path(f"{path}.pub").read_text(encoding="utf-8").split()
    return HostKey(kind=words[0], blob=base64.b64decode(words[1]))


def line_of(key: HostKey) -> str:
    return f"{key.kind} {base64.b64encode(key.blob).decode()}"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[HostKey]:
    folder = tmp_path_factory.mktemp("keys")
    return [public_key(folder, "a"), public_key(folder, "b"), public_key(folder, "c", "ecdsa")]


def target(tmp_path: Path, *lines: str, hostname: str = "spark.lan", port: int = 22, **options: str) -> SshTarget:
    """A host as `ssh -G` resolves it, with these lines in its known_hosts."""
    known, config = tmp_path / "known_hosts", tmp_path / "config"
    known.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    words = {"HostName": hostname, "Port": str(port), "UserKnownHostsFile": str(known), "GlobalKnownHostsFile": "none", **options}
    config.write_text("Host spark\n" + "".join(f"  {key} {value}\n" for key, value in words.items()), encoding="utf-8")
    return resolve(SshWords(address="spark", config=str(config)))


def standing(where: SshTarget, shown: HostKey) -> Standing:
    return judge(shown, known_keys(where))


def test_a_key_on_record_is_accepted_by_name_port_pattern_alias_and_hash(tmp_path: Path, keys: list[HostKey]) -> None:
    shown = keys[0]
    text = line_of(shown)

    assert standing(target(tmp_path, f"spark.lan {text}"), shown) is Standing.ACCEPTED
    assert standing(target(tmp_path, f"[spark.lan]:2222 {text}", port=2222), shown) is Standing.ACCEPTED
    assert standing(target(tmp_path, f"*.lan,!bad.lan {text}"), shown) is Standing.ACCEPTED
    assert standing(target(tmp_path, f"rack7 {text}", port=2222, HostKeyAlias="rack7"), shown) is Standing.ACCEPTED
    assert standing(target(tmp_path, f"spark.lan {text}", port=2222), shown) is Standing.ACCEPTED, "as OpenSSH: the plain name speaks for any port"
    where = target(tmp_path, f"spark.lan {text}")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(where.known_hosts[0])], check=True, capture_output=True)
    assert "spark" not in where.known_hosts[0].read_text(encoding="utf-8")
    assert standing(where, shown) is Standing.ACCEPTED


def test_a_key_that_is_on_record_for_somebody_else_is_not_known(tmp_path: Path, keys: list[HostKey]) -> None:
    text = line_of(keys[0])
    for line, port in (("other.lan", 22), ("[spark.lan]:2222", 22), ("[spark.lan]:2223", 2222), ("*.lan,!spark.lan", 22), ("rack7", 22)):
        assert standing(target(tmp_path, f"{line} {text}", port=port), keys[0]) is Standing.UNKNOWN
    assert standing(target(tmp_path), keys[0]) is Standing.UNKNOWN
    assert standing(target(tmp_path, f"spark.lan {text}", HostKeyAlias="rack7"), keys[0]) is Standing.UNKNOWN, "an alias replaces the name"


def test_another_key_is_a_changed_one_also_when_its_kind_is_new(tmp_path: Path, keys: list[HostKey]) -> None:
    where = target(tmp_path, f"spark.lan {line_of(keys[0])}")

    assert standing(where, keys[1]) is Standing.CHANGED
    assert standing(where, keys[2]) is Standing.CHANGED


def test_a_revocation_outweighs_everything_and_other_markers_and_damaged_lines_do_no_harm(tmp_path: Path, keys: list[HostKey]) -> None:
    lines = ("garbage", "", "# a comment", "spark.lan ssh-ed25519 notbase64!", f"spark.lan {line_of(keys[0])}", f"spark.lan {line_of(keys[1])}")
    revoked = f"@revoked * {line_of(keys[1])}"

    assert standing(target(tmp_path, *lines, revoked), keys[0]) is Standing.ACCEPTED
    assert standing(target(tmp_path, revoked, *lines), keys[1]) is Standing.REVOKED
    assert standing(target(tmp_path, f"@cert-authority *.lan {line_of(keys[2])}"), keys[0]) is Standing.AUTHORITY_ONLY
    assert standing(target(tmp_path, f"@cert-authority *.lan {line_of(keys[2])}", *lines), keys[0]) is Standing.ACCEPTED
    assert standing(target(tmp_path, revoked), keys[0]) is Standing.UNKNOWN


def test_an_authority_never_vouches_as_a_plain_key(keys: list[HostKey]) -> None:
    """The authority's own key, shown by a host, proves nothing: its line is no line of a host key."""
    known = (KnownKey(key=keys[0], marker=Marker.AUTHORITY, file=Path("k"), line=1),)
    assert judge(keys[0], known) is Standing.AUTHORITY_ONLY
    assert judge(keys[0], (replace(known[0], marker=Marker.KNOWN),)) is Standing.ACCEPTED


@pytest.mark.parametrize(("lines", "shown", "title", "words"), [
    ((), 0, "is not known", ("no line of", "StrictHostKeyChecking=ask")),
    (("spark.lan 1",), 0, "has changed", ("on record is", "line 1", "ssh-keygen -R spark.lan")),
    (("spark.lan 0", "@revoked * 0"), 0, "is revoked", ("line 2", "ssh-keygen -A")),
    (("@cert-authority * 1",), 0, "only an authority", ("the authority", "ssh-keyscan -p 22 spark.lan")),
])
def test_each_refusal_shows_the_fingerprints_and_a_way_out(
    tmp_path: Path, keys: list[HostKey], lines: tuple[str, ...], shown: int, title: str, words: tuple[str, ...],
) -> None:
    written = [f"{line[:-1]}{line_of(keys[int(line[-1])])}" for line in lines]
    where = target(tmp_path, *written)
    with pytest.raises(HostKeyRefused) as caught:
        host_keys.check(where, keys[shown], known_keys(where))

    assert title in caught.value.title
    text = str(caught.value)
    assert len(text.splitlines()) == 4 and all(word in text for word in words)
    assert all(keys[int(line[-1])].fingerprint in text for line in lines) and keys[shown].fingerprint in text


def test_a_fingerprint_is_the_one_that_ssh_keygen_shows(tmp_path: Path) -> None:
    key = public_key(tmp_path, "k", "rsa")
    shown = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "k.pub")], capture_output=True, text=True, check=True).stdout

    assert key.fingerprint == shown.split()[1]


def test_a_key_in_revokedhostkeys_is_revoked_whether_list_or_binary(tmp_path: Path, keys: list[HostKey]) -> None:
    public = tmp_path / "bad.pub"
    public.write_text(line_of(keys[0]) + "\n", encoding="utf-8")
    subprocess.run(["ssh-keygen", "-q", "-k", "-f", str(tmp_path / "krl"), str(public)], check=True)
    for file in (public, tmp_path / "krl"):
        where = target(tmp_path, f"spark.lan {line_of(keys[0])}", f"spark.lan {line_of(keys[1])}", RevokedHostKeys=str(file))
        host_keys.check(where, keys[1], known_keys(where))
        with pytest.raises(HostKeyRefused, match="is revoked"):
            host_keys.check(where, keys[0], known_keys(where))


def test_what_ssh_resolves_is_taken_over_and_what_fleetd_cannot_do_is_refused(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("Host spark\n  User anna\n  IdentityFile ~/.ssh/%r_%h\n", encoding="utf-8")
    found = target(tmp_path, hostname="::1", port=2200, ProxyJump="ann@bastion:2201", ConnectTimeout="7", Include=str(tmp_path / "more"))

    assert (found.hostname, found.port, found.user, found.connect_seconds) == ("::1", 2200, "anna", 7.0)
    assert found.known_as == "[::1]:2200" and found.jumps == ("ann@bastion:2201",)
    assert found.identity_files == (Path.home() / ".ssh" / "anna_::1",)
    with pytest.raises(RequestRefused, match="ProxyCommand"):
        target(tmp_path, ProxyCommand="nc %h %p")
    with pytest.raises(RequestRefused, match="can't be read"):
        target(tmp_path, Bananas="yes")
