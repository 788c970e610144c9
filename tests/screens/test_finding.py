"""Which coordinator a command talks to, with real sockets in both places."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fleetd.paths import StatePaths
from fleetd.screens.finding import find

Listen = Callable[[Path], None]


@pytest.fixture
def listen() -> Iterator[Listen]:
    opened: list[socket.socket] = []

    def at(root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.bind(str(StatePaths(root).socket))
        found.listen()
        opened.append(found)

    yield at
    for each in opened:
        each.close()


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("FLEETD_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "fleetd"


def test_ones_own_coordinator_comes_first_and_the_other_is_told_of(own: Path, tmp_path: Path, listen: Listen) -> None:
    system = tmp_path / "system"
    listen(own)
    assert (find(system).paths.root, find(system).note) == (own, "")
    listen(system)
    assert find(system).paths.root == own and str(system) in find(system).note


def test_the_machines_is_found_where_ones_own_does_not_answer_and_is_said_to_be_it(own: Path, tmp_path: Path, listen: Listen) -> None:
    system = tmp_path / "system"
    listen(system)
    found = find(system)
    assert (found.paths.root, found.is_system) == (system, True) and str(system) in found.note
    own.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(StatePaths(own).socket))
    assert find(system).is_system, "a socket that a killed coordinator left behind answers nobody"


def test_without_any_the_users_own_place_is_named(own: Path, tmp_path: Path) -> None:
    found = find(tmp_path / "system")
    assert (found.paths.root, found.is_system, found.note) == (own, False, "")


def test_a_state_directory_that_was_named_is_the_one(own: Path, tmp_path: Path, listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "system"
    listen(system)
    listen(own)
    monkeypatch.setenv("FLEETD_STATE", str(tmp_path / "named"))
    assert find(system).paths.root == tmp_path / "named"


def test_a_socket_on_a_path_longer_than_an_address_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    monkeypatch.delenv("FLEETD_STATE", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(deep))
    (deep / "fleetd").mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as found:
        monkeypatch.chdir(deep / "fleetd")
        found.bind("api.sock")
        found.listen()
        monkeypatch.chdir("/")
        system = tmp_path / "system"
        assert find(system).paths.root == deep / "fleetd" and find(system).note == ""
        assert not find(system).is_system
