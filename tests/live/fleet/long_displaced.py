"""A unit of a real systemd makes room for a campaign over SSH, and comes back; after a power cycle it is up by itself and left alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_fleet import Fleet

from fleet.host import Host
from fleet.hosts import Hosts
from fleet.service_kit import lives, shown, systemctl

UNIT = "hog.service"
HOG = "import signal, time; held = bytearray(96 << 20); held[::4096] = b'1' * len(held[::4096]); time.sleep(1e6)"
LINES = ("[Unit]", "Description=hog", "[Service]", f"ExecStart={sys.executable} -S -c \"{HOG}\"", "Restart=always", "RestartSec=0.1",
         "[Install]", "WantedBy=multi-user.target", "")


@pytest.fixture
def busy(systemd_hosts: Hosts) -> Iterator[Host]:
    """gx10 with a unit that systemd starts again whenever it ends, also after a boot."""
    host = systemd_hosts["gx10"]
    host.power_on()
    host.run("tee", f"/etc/systemd/system/{UNIT}", text_in="\n".join(LINES))
    systemctl(host, "daemon-reload")
    systemctl(host, "enable", "--now", UNIT)
    yield host
    host.power_off()
    for place in ("etc/systemd/system/hog.service", "etc/systemd/system/multi-user.target.wants/hog.service"):
        (host.folder / "upper" / place).unlink(missing_ok=True)


def plan_of(fleet: Fleet, hosts: Hosts, program: Path) -> Path:
    host = {
        "transport": "ssh", "ssh_config": str(hosts.ssh_config), "user": "root", "root": "/srv/fleetd", "capacity": "4GiB", "floor": "64MiB",
        "agent_python": sys.executable, "displace": {"llm": {"unit": UNIT, "grace": "20s"}},
    }
    talk = f"while [ ! -e {program} ]; do echo step; sleep 0.2; done"
    return fleet.plan(hosts={"gx10": host}, candidates={"one": {"command": ["sh", "-c", talk], "memory_cap": "64MiB"}}, after_freeze={})


def displaced(fleet: Fleet) -> Any:
    return fleet.status()["campaigns"][0]["displaced"][0]


def test_a_unit_makes_room_is_told_of_until_it_is_back_and_a_boot_is_seen(fleet: Fleet, systemd_hosts: Hosts, busy: Host) -> None:
    before = int(shown(busy, UNIT, "MainPID"))
    assert lives(busy, before)
    done = fleet("launch", str(plan_of(fleet, systemd_hosts, Path("/srv/finish"))))
    assert "worth knowing: gx10: llm is displaced for this campaign: pid" in done.stdout and "TimeoutStopSec" in done.stdout
    campaign = fleet.status()["campaigns"][0]["campaign_id"]
    fleet.until(lambda document: document["runs"] and document["runs"][0]["state"] == "running", "the run has its room")
    assert displaced(fleet)["state"] == "displaced" and shown(busy, UNIT, "ActiveState") == "inactive" and not lives(busy, before)
    assert "runs still need the room" in fleet("restore", campaign, expect=3).stderr

    busy.power_cycle()
    fleet.until(lambda document: "llm on gx10 is back beside the runs of tiny" in document["verdict"]["text"], "the boot is seen")
    assert shown(busy, UNIT, "ActiveState") == "active", "it was not shown in preflight as what it is now: nobody touches it"
    systemctl(busy, "stop", UNIT)  # as a person would who needs the room
    fleet.until(lambda document: document["campaigns"][0]["displaced"][0]["state"] == "displaced", "a person has made room again")

    busy.run("touch", "/srv/finish")
    fleet.until(lambda document: "displaced work not yet restored on gx10: llm" in document["verdict"]["text"], "it is told")
    assert "llm on gx10: RESTORED" in fleet("restore", campaign, "--host", "gx10").stdout
    after = int(shown(busy, UNIT, "MainPID"))
    assert shown(busy, UNIT, "ActiveState") == "active" and after != before
    assert "llm on gx10: RESTORED" in fleet("restore", campaign).stdout
    assert int(shown(busy, UNIT, "MainPID")) == after, "nothing is started twice"
    assert "systemctl start hog.service" in (Path(fleet.status()["campaigns"][0]["directory"]) / "displaced.md").read_text(encoding="utf-8")
