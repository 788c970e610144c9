"""Large trees over the system's ssh: as strict as the control connection, taken up where a cut left them, and never twice."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sshd import CALL_SECONDS_MAX, Sshd

from fleetd.campaign import HostPlan
from fleetd.coordinator import tree_delivery
from fleetd.coordinator.couriers import TreeKind
from fleetd.coordinator.deliveries import Deliveries, Delivery
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.ssh_connection import SshConnection
from fleetd.coordinator.ssh_courier import SshCourier
from fleetd.coordinator.ssh_session import SshSession
from fleetd.coordinator.system_ssh import SshProcess
from fleetd.coordinator.tree_delivery import CONTROL, SSH
from fleetd.coordinator.trees import read_entry, tree_fault
from fleetd.files import files_below
from fleetd.model import Owner
from fleetd.wire import PROTOCOL
from policies.errors import DataDamaged, HostUnreachable, NoRoom, RequestRefused
from policies.facts import MIB
from policies.manifest import FileEntry, directory_digest

pytestmark = pytest.mark.live
OWNER = Owner(coordinator_id="c0ffee", generation=1)
BIG_BYTES = 18 * MIB


class Source:
    """A tree of one large and two small files, unlike every other one."""

    def __init__(self, folder: Path) -> None:
        (folder / "deep").mkdir(parents=True)
        (folder / "a-first").write_bytes(os.urandom(1000))
        (folder / "deep" / "big.bin").write_bytes(os.urandom(BIG_BYTES))
        (folder / "empty").touch()
        self.folder = folder
        self.entries: tuple[FileEntry, ...] = tuple(read_entry(folder, name) for name in files_below(folder))
        self.digest = directory_digest(self.entries)

    @property
    def big(self) -> Path:
        return self.folder / "deep" / "big.bin"

    def put(self, courier: SshCourier) -> bool:
        return courier.put_tree(TreeKind.DATASETS, self.digest, self.folder, self.entries)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


def nothing() -> None:
    pass


class Watched(Deliveries):
    """Deliveries that are remembered, and something that is done once so many bytes of one were sent."""

    def __init__(self) -> None:
        super().__init__()
        self.at_bytes, self.act, self.seen = -1, nothing, list[Delivery]()

    def when_sent(self, at_bytes: int, act: Callable[[], None]) -> None:
        self.at_bytes, self.act = at_bytes, act

    @contextlib.contextmanager
    def under_way(self, host: str, kind: str, digest: str, bytes_total: int) -> Iterator[Delivery]:
        with super().under_way(host, kind, digest, bytes_total) as delivery:
            self.seen.append(delivery)
            moved = delivery.moved_to

            def moved_to(count: int) -> None:
                moved(count)
                if 0 <= self.at_bytes <= count:
                    self.at_bytes = -1
                    self.act()

            delivery.moved_to = moved_to  # type: ignore[method-assign]
            yield delivery


@contextlib.contextmanager
def courier_of(host: Sshd, releases: Releases, deliveries: Deliveries) -> Iterator[SshCourier]:
    plan = HostPlan(name=host.name, transport="ssh", ssh_config=str(host.ssh_config), root=str(host.root))
    session = SshSession(plan, OWNER, stage=releases.stage, deliveries=deliveries)
    try:
        session.call("hello", {"protocol": PROTOCOL}, CALL_SECONDS_MAX)
        assert isinstance(session.courier, SshCourier)
        yield session.courier
    finally:
        session.close()


@pytest.fixture(scope="module")
def line(spark: Sshd, releases: Releases) -> Iterator[tuple[SshCourier, Watched]]:
    """One session for the tests that need none of their own."""
    watched = Watched()
    with courier_of(spark, releases, watched) as courier:
        yield courier, watched


@pytest.fixture
def courier(line: tuple[SshCourier, Watched]) -> SshCourier:
    return line[0]


@pytest.fixture
def watched(line: tuple[SshCourier, Watched]) -> Watched:
    line[1].seen.clear()
    line[1].when_sent(-1, nothing)
    return line[1]


def bulk_process(courier: SshCourier) -> SshProcess:
    return next(iter(courier._bulk))


def kill_carrier(courier: SshCourier) -> None:
    """And wait for its end, so that not a byte goes out after this."""
    held = os.pidfd_open(bulk_process(courier).pid)
    signal.pidfd_send_signal(held, signal.SIGKILL)
    assert select.select([held], [], [], CALL_SECONDS_MAX)[0]
    os.close(held)


def staged(host: Sshd) -> list[str]:
    return sorted(path.name for path in (host.root / "datasets").glob("*"))


def fault_of(host: Sshd, source: Source) -> object:
    return tree_fault(host.root / "datasets" / source.digest, source.digest)


def test_a_large_tree_goes_by_the_systems_ssh_and_arrives_whole_once(
    spark: Sshd, courier: SshCourier, watched: Watched, source: Source,
) -> None:
    assert source.put(courier) is True
    assert source.put(courier) is False, "it is there, every byte of it read"

    assert fault_of(spark, source) is None
    first, second = watched.seen
    assert (first.road, first.because) == (SSH, "it is large: 18 MiB")
    assert first.bytes_sent == first.bytes_total > BIG_BYTES and second.bytes_sent == 0


def test_a_cut_in_the_middle_costs_only_what_had_not_arrived(spark: Sshd, courier: SshCourier, watched: Watched, source: Source) -> None:
    """The process that carries the bytes is killed; the next try counts what it sends."""
    watched.when_sent(12 * MIB, lambda: kill_carrier(courier))
    with pytest.raises(HostUnreachable, match="files on their way"):
        source.put(courier)
    assert not courier.has_tree(TreeKind.DATASETS, source.digest), "half a tree has no name"
    assert put_when_free(source, courier) is True

    cut, resumed = watched.seen[0], watched.seen[-1]
    assert 12 * MIB <= cut.bytes_sent < BIG_BYTES
    assert resumed.bytes_there > 6 * MIB, "what was in flight is lost, the rest is not"
    assert resumed.bytes_there + resumed.bytes_sent == resumed.bytes_total
    assert fault_of(spark, source) is None


def test_what_lies_there_and_is_wrong_is_sent_again(spark: Sshd, courier: SshCourier, watched: Watched, source: Source) -> None:
    """One file is whole, one has a wrong beginning, one belongs to nobody."""
    half = spark.root / "datasets" / f".tmp-{source.digest}"
    (half / "deep").mkdir(parents=True)
    (half / "a-first").write_bytes((source.folder / "a-first").read_bytes())
    (half / "deep" / "big.bin").write_bytes(b"x" * MIB)
    (half / "stranger").touch()

    assert source.put(courier) is True

    assert watched.seen[0].bytes_there == 1000
    assert fault_of(spark, source) is None


@pytest.mark.parametrize("when", ["before", "while", "shorter"])
def test_a_source_that_changes_is_refused_and_leaves_nothing_there(
    spark: Sshd, courier: SshCourier, watched: Watched, source: Source, when: str,
) -> None:
    def change() -> None:
        with open(source.big, "r+b") as file:
            file.seek(17 * MIB)
            file.write(b"changed")

    before = staged(spark)
    if when == "before":
        change()
        os.utime(source.big, ns=(0, 0))  # nothing but the bytes tells
    else:
        watched.when_sent(4 * MIB, change if when == "while" else lambda: os.truncate(source.big, 5 * MIB + 1000))
    with pytest.raises(DataDamaged, match="can't stage datasets on host spark-a") as caught:
        source.put(courier)

    said = "it became shorter or unreadable while it was read" if when == "shorter" else "it changed"
    assert caught.value.where == str(source.big) and said in caught.value.what
    assert staged(spark) == before


def test_a_host_that_shows_the_systems_ssh_another_key_gets_its_bytes_on_the_proven_connection(
    spark: Sshd, courier: SshCourier, watched: Watched, source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Somebody else answers at the same place, and would let us in: nothing is said to it."""
    imposter = Sshd(tmp_path / "imposter", "spark-a")
    imposter.authorized.write_text(spark.user_key + "\n", encoding="utf-8")
    try:
        (hop,) = courier._road.current().hops
        elsewhere = replace(hop, target=replace(hop.target, port=imposter.port))
        monkeypatch.setattr(SshConnection, "hops", property(lambda connection: (elsewhere,)))
        assert source.put(courier) is True
        assert watched.seen[0].road == CONTROL and "Host key verification failed" in watched.seen[0].because
        assert "Accepted publickey" not in imposter.log()
    finally:
        imposter.stop()


def test_bulk_goes_through_the_jump_host_too_and_believes_each_machine_its_own_key_only(
    spark: Sshd, releases: Releases, source: Source, tmp_path: Path,
) -> None:
    inner = Sshd(tmp_path / "inner", "inner")
    try:
        inner.configure(ProxyJump=spark.name)
        inner.ssh_config.write_text(inner.ssh_config.read_text(encoding="utf-8") + spark.ssh_config.read_text(encoding="utf-8"), encoding="utf-8")
        watched, before = Watched(), spark.log().count("Accepted publickey")
        with courier_of(inner, releases, watched) as courier:
            assert source.put(courier) is True
        assert watched.seen[0].road == SSH
        assert spark.log().count("Accepted publickey") == before + 2, "the control connection and the bulk went through it"
        assert fault_of(inner, source) is None
    finally:
        inner.stop()


def test_nothing_of_the_users_configuration_reaches_the_bulk_connection(spark: Sshd, releases: Releases, source: Source) -> None:
    """An agent to forward, a command to run here, a connection to share: all of it stays out, and the host gets no agent."""
    before, mark, door = spark.ssh_config.read_bytes(), spark.folder / "local-command-ran", spark.folder / "agent"
    spark.configure(
        ForwardAgent="yes", PermitLocalCommand="yes", LocalCommand=f"touch {mark}", ControlMaster="auto", ControlPath=str(spark.folder / "mux"),
        IdentityAgent=str(door), IdentitiesOnly="no",
    )
    watched, environments = Watched(), list[str]()
    watched.when_sent(MIB, lambda: environments.extend(stager_environments(spark)))
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(door)], stdout=subprocess.DEVNULL)
    try:
        while not door.exists():
            time.sleep(0.01)
        with courier_of(spark, releases, watched) as courier:
            assert source.put(courier) is True
    finally:
        spark.ssh_config.write_bytes(before)
        agent.terminate()
        agent.wait()

    assert watched.seen[0].road == SSH
    assert environments and not [each for each in environments if "SSH_AUTH_SOCK" in each]
    assert not mark.exists() and not (spark.folder / "mux").exists()


def stager_environments(host: Sshd) -> list[str]:
    """Of every process that receives a tree for this host."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"stager\0{host.root}\0" in (path / "cmdline").read_text(errors="replace"):
                found.append((path / "environ").read_text(errors="replace"))
    return found


def test_a_coordinator_that_leaves_takes_the_transfer_with_it(spark: Sshd, releases: Releases, source: Source) -> None:
    """The whole process group is gone, and so is the receiver on the host."""
    watched, carriers, failures = Watched(), list[int](), list[HostUnreachable]()
    is_half_way, may_go_on = threading.Event(), threading.Event()
    with courier_of(spark, releases, watched) as courier:
        def stand_still() -> None:
            assert not Path(bulk_process(courier)._folder).exists(), "a coordinator that is killed now leaves no file behind"
            carriers.append(bulk_process(courier).pid)
            is_half_way.set()
            assert may_go_on.wait(CALL_SECONDS_MAX)

        def bring() -> None:
            try:
                source.put(courier)
            except HostUnreachable as fault:
                failures.append(fault)

        watched.when_sent(4 * MIB, stand_still)
        sender = threading.Thread(target=bring)
        sender.start()
        assert is_half_way.wait(CALL_SECONDS_MAX)
        courier.close()
        may_go_on.set()
        sender.join(CALL_SECONDS_MAX)

    assert failures and not sender.is_alive()
    with pytest.raises(ProcessLookupError):
        os.killpg(carriers[0], 0)
    give_up_seconds = time.monotonic() + CALL_SECONDS_MAX
    while stager_environments(spark) and time.monotonic() < give_up_seconds:
        time.sleep(0.02)
    assert not stager_environments(spark)


def test_a_host_that_falls_silent_in_the_middle_costs_one_deadline_and_nothing_of_what_arrived(
    spark: Sshd, courier: SshCourier, watched: Watched, source: Source, monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is answered and nothing refused, as when its cable is pulled; once it speaks the rest is sent."""
    def fall_silent() -> None:
        monkeypatch.setattr(tree_delivery, "SILENCE_SECONDS_MAX", 1.0)  # only now: a machine that stands still before is not silent
        spark.freeze()

    watched.when_sent(8 * MIB, fall_silent)
    try:
        with pytest.raises(HostUnreachable, match="files on their way: no answer in time"):
            source.put(courier)
    finally:
        spark.thaw()
    monkeypatch.undo()
    assert put_when_free(source, courier) is True

    assert watched.seen[-1].bytes_there > 4 * MIB
    assert fault_of(spark, source) is None


def put_when_free(source: Source, courier: SshCourier) -> bool:
    """The receiver of the first try hears only now that its connection is gone, and holds the lock until then."""
    give_up_seconds = time.monotonic() + CALL_SECONDS_MAX
    while True:
        try:
            return source.put(courier)
        except HostUnreachable as fault:
            if "another connection is bringing the same tree" not in fault.what or time.monotonic() > give_up_seconds:
                raise
            time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_and_a_read_only_one_say_the_same_for_bulk_and_leave_nothing(
    courier: SshCourier, watched: Watched, spark: Sshd, source: Source,
) -> None:
    place = spark.root / "models"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "fleetd-test", str(place)], check=True)
    try:
        with pytest.raises(NoRoom, match="no room on host spark-a"):
            courier.put_tree(TreeKind.MODELS, source.digest, source.folder, source.entries)
        assert watched.seen[0].road == SSH and list(place.iterdir()) == []
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(RequestRefused, match="read-only"):
            courier.put_tree(TreeKind.MODELS, source.digest, source.folder, source.entries)
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)  # a failure must not leave it there because somebody still reads in it
