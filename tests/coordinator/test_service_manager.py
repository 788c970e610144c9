"""What a service manager hears of a coordinator: a real daemon, and a real datagram socket in the manager's place."""

from __future__ import annotations

import http.server
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetd.coordinator.daemon import _ready_when_it_answers, answering_pid
from fleetd.coordinator.service_manager import ServiceManager
from fleetd.paths import StatePaths

HEAR_SECONDS_MAX = 90.0
SILENT_SECONDS = 3.0
"""Longer than the pause between two ticks."""


class Manager:
    """The other end of sd_notify(3)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))

    def hear(self, seconds: float = HEAR_SECONDS_MAX) -> dict[str, str]:
        """The next message; empty when none comes in time."""
        if not select.select([self.socket], [], [], seconds)[0]:
            return {}
        return dict(line.partition("=")[::2] for line in self.socket.recv(4096).decode().splitlines())

    def hear_of(self, name: str) -> dict[str, str]:
        end = time.monotonic() + HEAR_SECONDS_MAX
        while time.monotonic() < end:
            if name in (found := self.hear()):
                return found
        raise AssertionError(f"nothing was said of {name}")

    def drain(self) -> None:
        while self.hear(0.0):
            pass


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    found = Manager(tmp_path / "notify")
    yield found
    found.socket.close()


@pytest.fixture
def coordinator(tmp_path: Path, manager: Manager) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "FLEETD_STATE": str(tmp_path / "state"), "NOTIFY_SOCKET": str(manager.path), "WATCHDOG_USEC": "9000000"}
    process = subprocess.Popen([sys.executable, "-m", "fleetd.coordinator.daemon"], env=environment)
    yield process
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


def test_a_coordinator_is_ready_once_it_answers_is_alive_by_its_loop_and_says_when_it_leaves(
    manager: Manager, coordinator: subprocess.Popen[bytes], tmp_path: Path,
) -> None:
    paths = StatePaths(tmp_path / "state")
    assert manager.hear_of("READY")["MAINPID"] == str(coordinator.pid)
    assert answering_pid(paths) == coordinator.pid, "ready means that it answers"
    assert manager.hear_of("WATCHDOG")

    coordinator.send_signal(signal.SIGSTOP)
    while psutil.Process(coordinator.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    manager.drain()
    assert manager.hear(SILENT_SECONDS) == {}, "a loop that hangs feeds no watchdog"
    coordinator.send_signal(signal.SIGCONT)
    assert manager.hear_of("WATCHDOG")

    coordinator.send_signal(signal.SIGTERM)
    assert manager.hear_of("STOPPING") and coordinator.wait(HEAR_SECONDS_MAX) == 0


class Door(socketserver.ThreadingUnixStreamServer):
    """Something that takes connections where a coordinator's socket is, and answers as whoever it is told to be."""

    daemon_threads = True
    answers_as = 0


class DoorHandler(http.server.BaseHTTPRequestHandler):
    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        """Nothing to be said."""

    def do_GET(self) -> None:
        assert isinstance(self.server, Door)
        body = json.dumps({"coordinator": {"pid": self.server.answers_as}}).encode() if self.server.answers_as else b"not yet"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_socket_that_listens_and_does_not_answer_for_us_is_not_ready(manager: Manager, tmp_path: Path) -> None:
    paths = StatePaths(tmp_path)
    with Door(str(paths.socket), DoorHandler) as door:
        threading.Thread(target=door.serve_forever, daemon=True).start()
        threading.Thread(target=_ready_when_it_answers, args=(paths, ServiceManager(str(manager.path))), daemon=True).start()
        assert manager.hear(0.5) == {}, "it listens, and answers nonsense"
        door.answers_as = os.getppid()
        assert manager.hear(0.5) == {}, "it answers as somebody else"
        door.answers_as = os.getpid()
        assert manager.hear()["READY"] == "1"
        door.shutdown()


def test_nobody_else_may_speak_for_the_service(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    monkeypatch.setenv("WATCHDOG_USEC", "1")
    found = ServiceManager.from_environment()
    assert found.is_there and not {"NOTIFY_SOCKET", "WATCHDOG_USEC"} & set(os.environ)
    found.ticked("watches 1")
    found.ticked("watches 1")
    assert [manager.hear(), manager.hear()] == [{"STATUS": "watches 1", "WATCHDOG": "1"}, {"WATCHDOG": "1"}]


def test_an_abstract_address_is_understood_and_a_manager_that_is_gone_hurts_nobody() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(f"\0fleetd-test-{os.getpid()}")
        ServiceManager(f"@fleetd-test-{os.getpid()}").ready()
        assert listener.recv(100).startswith(b"READY=1")
    ServiceManager(f"@fleetd-test-{os.getpid()}").ready()
    ServiceManager(None).stopping()
