"""Sessions with real hosts over a real sshd: who is let in, who is believed, what is said when it can't be, and what a cut costs."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest
from sshd import CALL_SECONDS_MAX, Sshd, fingerprint, make_key

from fleetd.campaign import HostPlan
from fleetd.coordinator.couriers import TreeKind
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.ssh_config import words_of
from fleetd.coordinator.ssh_connection import SshConnection
from fleetd.coordinator.ssh_session import SshSession
from fleetd.coordinator.trees import read_entry
from fleetd.model import Owner
from fleetd.wire import PROTOCOL
from policies.errors import DataDamaged, ExplainedError, HostKeyRefused, HostUnreachable, LoginRefused, NoRoom, NotFound, RequestRefused
from policies.manifest import directory_digest

pytestmark = pytest.mark.live
OWNER = Owner(coordinator_id="c0ffee", generation=1)
HELLO = {"protocol": PROTOCOL}
NOTHING = {"after": {}, "wait_seconds": 0.0}


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    made: list[Sshd] = []

    def make(name: str = "spark-b", **options: object) -> Sshd:
        made.append(Sshd(tmp_path / name, name, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for host in made:
        host.stop()


def plan_of(host: Sshd, **changes: object) -> HostPlan:
    plan = HostPlan(name=host.name, transport="ssh", ssh_config=str(host.ssh_config), root=str(host.root))
    return replace(plan, **changes)  # type: ignore[arg-type]


@contextlib.contextmanager
def session_with(host: Sshd, releases: Releases, **changes: object) -> Iterator[SshSession]:
    session = SshSession(plan_of(host, **changes), OWNER, stage=releases.stage)
    try:
        yield session
    finally:
        session.close()


def connect(host: Sshd, **changes: object) -> None:
    SshConnection.open(words_of(plan_of(host, **changes)), time.monotonic() + CALL_SECONDS_MAX).close()


def hello(host: Sshd, releases: Releases, **changes: object) -> dict[str, object]:
    with session_with(host, releases, **changes) as session:
        facts: dict[str, object] = session.call("hello", HELLO, CALL_SECONDS_MAX)["facts"]
        return facts


@pytest.fixture
def restored(spark: Sshd) -> Iterator[Sshd]:
    """The shared host, its records put back afterwards."""
    before = spark.known_hosts.read_bytes(), spark.authorized.read_bytes()
    yield spark
    spark.known_hosts.write_bytes(before[0])
    spark.authorized.write_bytes(before[1])
    spark.configure()


def test_a_host_needs_nothing_but_a_python_of_its_own_and_keeps_everything_below_its_root(spark: Sshd, releases: Releases) -> None:
    before = {path.name for path in spark.home.iterdir()} | {"fleetd"}
    facts = hello(spark, releases)

    assert facts["root_writable"] is True
    assert {path.name for path in spark.home.iterdir()} == before
    staged = [path for path in (spark.root / "releases").iterdir() if not path.name.startswith(".")]
    assert len(staged) == 1 and (staged[0] / "libraries" / "psutil" / "_psutil_linux.abi3.so").is_file()
    assert list(staged[0].glob("fleetd/host/__pycache__/*.pyc")), "compiled once, by the Python that runs it"
    assert not [path for path in staged[0].rglob("*.py") if path.name.startswith("plan") or "coordinator" in path.parts]


def test_a_release_with_a_changed_byte_is_found_before_it_runs(make_host: Callable[..., Sshd], releases: Releases) -> None:
    host = make_host()
    hello(host, releases)
    path = next(host.root.glob("releases/*/fleetd/host/agent.py"))
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(ExplainedError, match="damaged") as caught:
        hello(host, releases)

    assert "agent.py" in caught.value.what and "rm -r" in caught.value.fix


def test_a_model_that_was_cut_short_on_its_host_or_is_a_pointer_there_is_named_and_not_written_over(
    spark: Sshd, releases: Releases, tmp_path: Path,
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(os.urandom(3000))
    entries = (read_entry(tmp_path / "model", "model.safetensors"),)
    digest = directory_digest(entries)
    with session_with(spark, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        assert session.courier.put_tree(TreeKind.MODELS, digest, tmp_path / "model", entries)
        there = spark.root / "models" / digest / "model.safetensors"
        pointer, cut = b"version https://git-lfs.github.com/spec/v1\n", there.read_bytes()[:2000]
        for damage, words in ((cut, "is cut short: 2000 of 3000 bytes"), (pointer, "Git LFS")):
            there.write_bytes(damage)
            with pytest.raises(DataDamaged, match="what lies staged on host spark-a is damaged") as caught:
                session.courier.put_tree(TreeKind.MODELS, digest, tmp_path / "model", entries)
            assert words in caught.value.what and "model.safetensors" in caught.value.what and f"rm -r {there.parent}" in caught.value.fix
            assert there.read_bytes() == damage


@pytest.mark.parametrize(("lines", "title"), [
    ([], "is not known"), (["{name} {other}"], "has changed"), (["{name} {own}", "@revoked * {own}"], "is revoked"),
    (["@cert-authority * {other}"], "only an authority vouches"),
])
def test_no_key_is_accepted_unseen(restored: Sshd, tmp_path: Path, lines: list[str], title: str) -> None:
    other = make_key(tmp_path / "other")
    restored.know(*(line.format(name=restored.known_as, own=restored.host_key, other=other) for line in lines))
    logins = restored.log().count("Accepted publickey")
    before = restored.known_hosts.read_bytes()
    with pytest.raises(HostKeyRefused, match=title) as caught:
        connect(restored)

    assert fingerprint(restored.folder / "hostkey") in caught.value.what
    assert restored.known_hosts.read_bytes() == before, "nothing was added"
    assert restored.log().count("Accepted publickey") == logins, "and nothing was said to it"


def test_a_host_with_keys_of_two_kinds_shows_the_one_on_record(make_host: Callable[..., Sshd], tmp_path: Path) -> None:
    """Whatever kind both sides would like best, the one that can be compared is asked for."""
    second = make_key(tmp_path / "rsa", "rsa")
    host = make_host(options=(f"HostKey {tmp_path / 'rsa'}",))
    host.know(f"{host.known_as} {second}")

    connect(host)

    assert host.log().count("Accepted publickey") == 1


def test_who_is_not_let_in_is_told_which_keys_were_tried(restored: Sshd, tmp_path: Path) -> None:
    restored.authorized.write_text(make_key(tmp_path / "another") + "\n", encoding="utf-8")
    with pytest.raises(LoginRefused) as caught:
        connect(restored)
    assert fingerprint(restored.folder / "id") in caught.value.what

    restored.authorized.write_text(restored.user_key + "\n", encoding="utf-8")
    with pytest.raises(LoginRefused, match="does not let nobody-of-that-name in"):
        connect(restored, user="nobody-of-that-name")


class HangsUp(paramiko.ServerInterface):
    """A host whose network ends just when a key is offered."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self.transport = transport

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.transport.close()
        return paramiko.AUTH_FAILED


def test_a_connection_that_is_cut_during_the_login_is_no_refusal(restored: Sshd) -> None:
    """A refusal would end a launch; a cut is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        restored.know(f"[127.0.0.1]:{port} {restored.host_key}")

        def serve() -> None:
            transport = paramiko.Transport(door.accept()[0])
            transport.add_server_key(paramiko.PKey.from_path(restored.folder / "hostkey"))
            transport.start_server(event=threading.Event(), server=HangsUp(transport))

        server = threading.Thread(target=serve)
        server.start()
        with pytest.raises(HostUnreachable, match="hung up during the login"):
            connect(restored, port=port)
        server.join()


def test_a_key_behind_a_passphrase_is_named_and_works_through_an_agent(restored: Sshd, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", str(locked)], check=True)
    public = " ".join(Path(f"{locked}.pub").read_text(encoding="utf-8").split()[:2])
    restored.authorized.write_text(public + "\n", encoding="utf-8")
    restored.configure(IdentityFile=str(locked))
    with pytest.raises(LoginRefused, match="ssh-add"):
        connect(restored)

    opened = tmp_path / "opened"
    opened.write_bytes(locked.read_bytes())
    opened.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-p", "-P", "secret", "-N", "", "-f", str(opened)], check=True, capture_output=True)
    door = tmp_path / "agent"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(door)], stdout=subprocess.DEVNULL)
    try:
        while not door.exists():
            time.sleep(0.01)
        subprocess.run(["ssh-add", "-q", str(opened)], env={**os.environ, "SSH_AUTH_SOCK": str(door)}, check=True)
        restored.configure(IdentityFile=str(locked), IdentityAgent=str(door))
        connect(restored)
    finally:
        agent.terminate()
        agent.wait()


def test_no_agent_is_forwarded_whatever_the_configuration_says(restored: Sshd, releases: Releases) -> None:
    restored.configure(ForwardAgent="yes")
    with session_with(restored, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        said = session.courier.run_program(("sh", "-c", "echo ${SSH_AUTH_SOCK-none}"), CALL_SECONDS_MAX)

    assert said.stdout == "none\n"


def test_a_jump_host_is_gone_through_and_its_key_is_proven_as_well(restored: Sshd, make_host: Callable[..., Sshd], releases: Releases) -> None:
    inner = make_host("inner")
    jump = restored.ssh_config.read_text(encoding="utf-8")
    inner.configure(ProxyJump=restored.name)
    inner.ssh_config.write_text(inner.ssh_config.read_text(encoding="utf-8") + jump, encoding="utf-8")
    assert hello(inner, releases)["root_writable"] is True

    restored.know()
    with pytest.raises(HostKeyRefused, match="the host key of spark-a is not known"):
        hello(inner, releases)


def test_an_ipv6_host_is_reached_and_known_by_its_brackets(make_host: Callable[..., Sshd]) -> None:
    host = make_host(address="::1")
    assert host.known_as.startswith("[::1]:")

    connect(host)


def test_a_login_shell_may_talk_and_need_not_be_a_bourne_shell(make_host: Callable[..., Sshd], tmp_path: Path, releases: Releases) -> None:
    """What comes before the marker is dropped, however much it is; the shell only has to understand `exec /bin/sh`."""
    shell = tmp_path / "shell"
    shell.write_text(
        '#!/bin/sh\nhead -c 300000 /dev/zero | tr "\\0" x\necho; echo "{\\"python\\": null}"\n[ "$1" = -c ] && [ "$2" = "exec /bin/sh" ] || exit 9\n'
        "exec /bin/sh\n", encoding="utf-8",
    )
    shell.chmod(0o755)

    assert hello(make_host(shell=str(shell)), releases)["root_writable"] is True


def test_a_login_that_may_run_nothing_says_what_it_was_told(make_host: Callable[..., Sshd], tmp_path: Path, releases: Releases) -> None:
    shell = tmp_path / "nologin"
    shell.write_text("#!/bin/sh\necho This account is not available.\nexit 1\n", encoding="utf-8")
    shell.chmod(0o755)
    with pytest.raises(HostUnreachable, match="This account is not available"):
        hello(make_host(shell=str(shell)), releases)


def test_hosts_that_cannot_run_an_agent_each_say_why(make_host: Callable[..., Sshd], tmp_path: Path, releases: Releases) -> None:
    host = make_host()
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\necho \'{"python": [3, 9, 2], "program": "/usr/bin/python3.9"}\'\n', encoding="utf-8")
    old.chmod(0o755)
    with pytest.raises(RequestRefused, match=r"has no python3\.77"):
        hello(host, releases, agent_python="python3.77")
    with pytest.raises(RequestRefused, match="too old") as caught:
        hello(host, releases, agent_python=str(old))
    assert "3.9.2; 3.10 or newer is needed" in caught.value.what
    (host.home / "file").touch()
    with pytest.raises(RequestRefused, match="can't be used"):
        hello(host, releases, root=str(host.home / "file" / "root"))
    with pytest.raises(RequestRefused, match="has another architecture") as caught:
        hello(make_host("i686", shell="setarch i686 /bin/bash"), releases)
    assert "it is i686" in caught.value.what
    assert hello(host, releases)["root_writable"] is True, "and what was mended works"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_and_a_read_only_root_each_say_so_and_leave_nothing(make_host: Callable[..., Sshd], releases: Releases, tmp_path: Path) -> None:
    host, place = make_host(), tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "fleetd-test", str(place)], check=True)
    try:
        with pytest.raises(NoRoom, match="no room on host spark-b"):
            hello(host, releases, root=str(place / "root"))
        assert [path.name for path in (place / "root" / "releases").iterdir()] == []
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(RequestRefused, match="read-only"):
            hello(host, releases, root=str(place / "root"))
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # somebody who is just ending may still read in it


def test_nobody_there_is_told_at_once_and_a_name_that_nobody_knows_too(restored: Sshd) -> None:
    with pytest.raises(HostUnreachable, match="Connection refused"):
        connect(restored, port=1)
    restored.configure(HostName="no-such-host.invalid")
    with pytest.raises(HostUnreachable, match=r"no-such-host\.invalid: "):
        connect(restored)


def test_a_silent_host_costs_one_deadline_and_is_taken_up_again_when_it_speaks(spark: Sshd, releases: Releases) -> None:
    with session_with(spark, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        spark.freeze()
        try:
            with pytest.raises(HostUnreachable, match="no answer"):
                session.call("poll", NOTHING, 0.5)
            with pytest.raises(HostUnreachable, match="there is no connection"):
                session.courier.run_program(("true",), 5.0)
        finally:
            spark.thaw()

        assert session.call("hello", HELLO, CALL_SECONDS_MAX)["protocol"] == PROTOCOL
        assert session.courier.run_program(("true",), CALL_SECONDS_MAX).status == 0


def test_a_long_answer_of_a_program_comes_whole_and_one_without_end_is_refused(spark: Sshd, releases: Releases) -> None:
    with session_with(spark, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        said = session.courier.run_program(("seq", "200000"), CALL_SECONDS_MAX)
        assert said.stdout == "".join(f"{number}\n" for number in range(1, 200001))
        with pytest.raises(OSError, match="at most"):
            session.courier.run_program(("head", "-c", "9000000", "/dev/zero"), CALL_SECONDS_MAX)


def test_a_cut_connection_is_told_and_the_next_call_has_a_new_one(spark: Sshd, releases: Releases) -> None:
    with session_with(spark, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        assert spark.cut() > 0
        with pytest.raises(HostUnreachable):
            session.call("poll", NOTHING, CALL_SECONDS_MAX)

        assert session.call("poll", NOTHING, CALL_SECONDS_MAX)["runs"] == []


def test_trees_go_out_whole_and_files_of_a_run_come_back_verified(spark: Sshd, releases: Releases, tmp_path: Path) -> None:
    source = tmp_path / "data"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "big").write_bytes(os.urandom(5_000_000))
    (source / "empty").touch()
    entries = tuple(read_entry(source, name) for name in ("deep/big", "empty"))
    digest = directory_digest(entries)
    run = spark.root / "runs" / "r1"
    (run / "predictions").mkdir(parents=True)
    (run / "run.json").touch()
    (run / "predictions" / "rows").write_bytes((source / "deep" / "big").read_bytes())
    with session_with(spark, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        courier = session.courier
        assert not courier.has_tree(TreeKind.DATASETS, digest)
        assert courier.put_tree(TreeKind.DATASETS, digest, source, entries) is True
        assert courier.put_tree(TreeKind.DATASETS, digest, source, entries) is False
        assert courier.has_tree(TreeKind.DATASETS, digest) and courier.tree_fault(TreeKind.DATASETS, digest) is None
        (source / "empty").write_text("not any more", encoding="utf-8")
        other = tuple(replace(each, sha256="0" * 64) if each.path == "empty" else each for each in entries)
        with pytest.raises(ExplainedError, match="can't stage"):
            courier.put_tree(TreeKind.DATASETS, directory_digest(other), source, other)
        found = courier.look("r1", "predictions")
        courier.fetch_tree("r1", "predictions", tmp_path / "copy", found)
        assert (tmp_path / "copy" / "rows").read_bytes() == (source / "deep" / "big").read_bytes()
        assert courier.read_tail("r1", "predictions/rows", 4_999_990, 100) == (source / "deep" / "big").read_bytes()[-10:]
        assert courier.read_tail("r1", "nothing", 0, 100) == b"" and courier.look("r1", "nothing") == ()
        with pytest.raises(NotFound):
            courier.read_part("r1", "nothing", 0, 1)

    assert [path.name for path in (spark.root / "datasets").iterdir()] == [digest], "what was not completed is gone"


def test_releases_that_nobody_needs_are_removed(make_host: Callable[..., Sshd], releases: Releases) -> None:
    host = make_host()
    with session_with(host, releases) as session:
        session.call("hello", HELLO, CALL_SECONDS_MAX)
        running = next(path.name for path in (host.root / "releases").iterdir())
        for name in ("kept", "named", "spare"):
            (host.root / "releases" / name).mkdir()
        (host.root / "runs" / "r1").mkdir(parents=True)
        (host.root / "runs" / "r1" / "run.json").write_text('{"release_digest": "named"}', encoding="utf-8")

        assert session.courier.prune_releases(frozenset({"kept"})) == ("spare",)
        assert sorted(path.name for path in (host.root / "releases").iterdir()) == sorted(["kept", "named", running])


def test_the_loader_is_read_by_any_python_3() -> None:
    """It tells its version before anything newer has to be understood."""
    import ast

    from fleetd.coordinator.ssh_lines import _LOADER

    ast.parse(_LOADER.replace("OLDEST", "(3, 10)").replace("LENGTH", "1"), feature_version=(3, 4))
    assert sys.version_info >= (3, 10)
