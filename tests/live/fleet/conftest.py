"""Fixtures with test hosts. They are made once for each pytest worker, on a number of their own, and every test gets them whole.

    hosts           gx10, spark-a, spark-b, reached over real ssh; restored after each test, so write what a test keeps below /srv
    systemd_host    gx10 alone, with real systemd as pid 1
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleet.host import Host
from fleet.hosts import Hosts, missing_needs


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
