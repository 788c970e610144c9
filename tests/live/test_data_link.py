"""From host to host: the second takes a tree from the first with a key of its own, and from the coordinator what that one can't give."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sshd import CALL_SECONDS_MAX, Sshd, fingerprint, make_key

from fleetd.campaign import DataFrom, HostPlan
from fleetd.coordinator.couriers import Courier, TreeKind
from fleetd.coordinator.deliveries import Deliveries, Delivery
from fleetd.coordinator.releases import Releases
from fleetd.coordinator.ssh_session import SshSession
from fleetd.coordinator.tree_delivery import SSH
from fleetd.coordinator.trees import read_entry, tree_fault
from fleetd.files import files_below
from fleetd.model import Owner
from fleetd.paths import StatePaths
from fleetd.wire import PROTOCOL
from policies.facts import MIB
from policies.manifest import FileEntry, directory_digest

pytestmark = pytest.mark.live
OWNER = Owner(coordinator_id="c0ffee", generation=1)


class Remembered(Deliveries):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Delivery] = []

    @contextlib.contextmanager
    def under_way(self, host: str, kind: str, digest: str, bytes_total: int) -> Iterator[Delivery]:
        with super().under_way(host, kind, digest, bytes_total) as delivery:
            self.seen.append(delivery)
            yield delivery


class Pair:
    """spark-a has a tree; spark-b names it in `data_from` and has a key that opens it."""

    def __init__(self, folder: Path) -> None:
        self.first, self.second = Sshd(folder / "spark-a", "spark-a"), Sshd(folder / "spark-b", "spark-b")
        self.own_key = self.second.folder / "own_key"
        make_key(self.own_key)
        self.let_in()
        self.deliveries = Remembered()
        releases = Releases(StatePaths(folder / "state"))
        data_from = DataFrom(host="spark-a", address="127.0.0.1", port=self.first.port, identity_file=str(self.own_key))
        plans = (
            HostPlan(name="spark-a", transport="ssh", ssh_config=str(self.first.ssh_config), root=str(self.first.root)),
            HostPlan(name="spark-b", transport="ssh", ssh_config=str(self.second.ssh_config), root=str(self.second.root), data_from=data_from),
        )
        self.sessions = {
            plan.name: SshSession(plan, OWNER, stage=releases.stage, deliveries=self.deliveries, neighbour=self.courier) for plan in plans
        }
        for session in self.sessions.values():
            session.call("hello", {"protocol": PROTOCOL}, CALL_SECONDS_MAX)

    def courier(self, name: str) -> Courier:
        return self.sessions[name].courier

    def let_in(self, own_key: bool = True) -> None:
        """Who may log in at spark-a: the coordinator, and spark-b unless it is left out."""
        own = Path(f"{self.own_key}.pub").read_text(encoding="ascii") if own_key else ""
        self.first.authorized.write_text(f"{self.first.user_key}\n{own}", encoding="utf-8")

    def staged(self, host: Sshd, digest: str) -> Path:
        return host.root / "datasets" / digest

    def close(self) -> None:
        for session in self.sessions.values():
            session.close()
        self.first.stop()
        self.second.stop()


@pytest.fixture(scope="module")
def pair_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    found = Pair(tmp_path_factory.mktemp("pair"))
    yield found
    found.close()


@pytest.fixture
def pair(pair_of_this_module: Pair) -> Iterator[Pair]:
    pair_of_this_module.deliveries.seen.clear()
    yield pair_of_this_module
    pair_of_this_module.let_in()


class Source:
    def __init__(self, folder: Path) -> None:
        (folder / "it's deep").mkdir(parents=True)
        (folder / "it's deep" / "$(big) one").write_bytes(os.urandom(17 * MIB))
        (folder / "-small").write_bytes(b"small")
        (folder / "empty").touch()
        self.folder = folder
        self.entries: tuple[FileEntry, ...] = tuple(read_entry(folder, name) for name in files_below(folder))
        self.digest = directory_digest(self.entries)

    def put(self, courier: Courier) -> bool:
        return courier.put_tree(TreeKind.DATASETS, self.digest, self.folder, self.entries)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


def logins(host: Sshd, key: Path) -> int:
    """How often this key has opened the host."""
    return sum(1 for line in host.log().splitlines() if "Accepted publickey" in line and fingerprint(key) in line)


def test_the_second_host_takes_the_tree_from_the_first_and_the_coordinator_sends_nothing(pair: Pair, source: Source) -> None:
    assert source.put(pair.courier("spark-a")) is True
    before = logins(pair.first, pair.own_key)
    (source.folder / "it's deep" / "$(big) one").unlink()  # so that the coordinator could not even if it would
    assert source.put(pair.courier("spark-b")) is True

    delivery = pair.deliveries.seen[-1]
    assert (delivery.host, delivery.road, delivery.because) == ("spark-b", "from spark-a", "over 127.0.0.1, as data_from of spark-b says")
    assert delivery.bytes_sent >= 16 * MIB
    assert logins(pair.first, pair.own_key) == before + 1
    assert tree_fault(pair.staged(pair.second, source.digest), source.digest) is None


def test_a_beginning_that_lies_there_is_not_taken_again(pair: Pair, source: Source) -> None:
    source.put(pair.courier("spark-a"))
    half = pair.second.root / "datasets" / f".tmp-{source.digest}" / "it's deep"
    half.mkdir(parents=True)
    (half / "$(big) one").write_bytes((source.folder / "it's deep" / "$(big) one").read_bytes()[: 15 * MIB])
    assert source.put(pair.courier("spark-b")) is True

    delivery = pair.deliveries.seen[-1]
    assert delivery.road == "from spark-a" and delivery.bytes_there == 15 * MIB
    assert tree_fault(pair.staged(pair.second, source.digest), source.digest) is None


@pytest.mark.parametrize(("trouble", "because"), [
    ("no key", "spark-b has no key that spark-a takes (on spark-b: ssh-keygen, then ssh-copy-id"),
    ("not there", "spark-a does not have it; it is large"),
    ("damaged", "spark-a did not give it: it arrived as SHA-256"),
    ("cut short", "spark-a did not give it: it ended with exit status"),
    ("another host", "at 127.0.0.1 another host answers than the spark-a that the coordinator knows"),
])
def test_what_the_neighbour_can_not_give_comes_from_the_coordinator_which_says_why(
    pair: Pair, source: Source, trouble: str, because: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    if trouble != "not there":
        source.put(pair.courier("spark-a"))
    big = pair.staged(pair.first, source.digest) / "it's deep" / "$(big) one"
    if trouble == "no key":
        pair.let_in(own_key=False)
    elif trouble == "damaged":
        with open(big, "r+b") as file:
            file.write(b"damaged")
    elif trouble == "cut short":
        os.truncate(big, 9 * MIB)
    elif trouble == "another host":
        road = pair.sessions["spark-b"]._road
        elsewhere = Sshd(tmp_path / "elsewhere", "spark-a")
        monkeypatch.setattr(road, "plan", replace_port(road.plan, elsewhere.port))
    try:
        assert source.put(pair.courier("spark-b")) is True
    finally:
        if trouble == "another host":
            elsewhere.stop()

    delivery = pair.deliveries.seen[-1]
    assert delivery.road == SSH and because in delivery.because
    assert tree_fault(pair.staged(pair.second, source.digest), source.digest) is None
    assert not list((pair.second.root / "datasets").glob(".*")), "neither the key nor half a tree is left"


def replace_port(plan: HostPlan, port: int) -> HostPlan:
    assert plan.data_from is not None
    return replace(plan, data_from=replace(plan.data_from, port=port))
