"""Fixtures with test hosts. They are made once for each pytest worker, on a number of their own, and every test gets them whole.

    hosts           gx10, spark-a, spark-b, reached over real ssh; restored after each test, so write what a test keeps below /srv
    systemd_host    gx10 alone, with real systemd as pid 1
    installed       the same, with the machine's service installed and not started yet
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.host import Host
from fleet.hosts import Hosts, missing_needs
from fleet.service_kit import WATCHDOG_SECONDS, fleetd, take_away, watch


@pytest.fixture(scope="session")
def fleet_of_this_worker() -> Iterator[Hosts]:
    if missing := missing_needs():
        pytest.skip(missing)
    with Hosts() as hosts:
        yield hosts


@pytest.fixture
def hosts(fleet_of_this_worker: Hosts) -> Iterator[Hosts]:
    yield fleet_of_this_worker
    fleet_of_this_worker.restore()


@pytest.fixture(scope="module")
def systemd_hosts() -> Iterator[Hosts]:
    if missing := missing_needs():
        pytest.skip(missing)
    with Hosts(["gx10"], init="systemd") as found:
        yield found


@pytest.fixture
def systemd_host(systemd_hosts: Hosts) -> Host:
    return systemd_hosts["gx10"]


@pytest.fixture
def installed(systemd_host: Host) -> Iterator[Host]:
    """The machine's service, installed by the command and not started yet. A limit is asked for so that one can be read back."""
    host = systemd_host
    host.power_on()
    host.run("sh", "-c", "echo secret > /etc/key && chmod 600 /etc/key")
    said = fleetd(host, "service", "install", "--no-start", "--credential", "ssh-key=/etc/key").stdout
    assert "wrote     /etc/systemd/system/fleetd.service" in said and "run       systemctl daemon-reload" in said
    watch(host, WATCHDOG_SECONDS)
    yield host
    take_away(host)
