"""A unit of a real systemd makes room for a campaign over SSH, and comes back; after a power cycle it is up by itself and left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_fleet import Fleet

from fleet.host import Host
from fleet.hosts import Hosts
from fleet.service_kit import lives, shown, systemctl, until

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
    host.run("rm", "-rf", "/srv/fleetd", "/srv/deaf", "/srv/finish")
    host.power_off()
    for place in ("etc/systemd/system/hog.service", "etc/systemd/system/multi-user.target.wants/hog.service"):
        (host.folder / "upper" / place).unlink(missing_ok=True)


def plan_of(fleet: Fleet, hosts: Hosts, finish: Path, *, user: str = "root", root: str = "/srv/fleetd", **displaced: Any) -> Path:
    host = {
        "transport": "ssh", "ssh_config": str(hosts.ssh_config), "user": user, "root": root, "capacity": "4GiB", "floor": "64MiB",
        "agent_python": sys.executable, "displace": {"llm": {"unit": UNIT, "grace": "20s", **displaced}},
    }
    talk = f"while [ ! -e {finish} ]; do echo step; sleep 0.2; done"
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
    systemctl(busy, "stop", UNIT)
    book = json.loads((Path(fleet.status()["campaigns"][0]["directory"]) / "displaced.json").read_text(encoding="utf-8"))
    subprocess.run(["sh", "-c", book["displaced"][0]["restore"][0]], check=True)  # as a person types it
    assert shown(busy, UNIT, "ActiveState") == "active"
    assert "systemctl start hog.service" in (Path(fleet.status()["campaigns"][0]["directory"]) / "displaced.md").read_text(encoding="utf-8")


def test_a_unit_that_will_not_end_holds_the_launch_and_is_killed_only_with_force(fleet: Fleet, systemd_hosts: Hosts, busy: Host) -> None:
    deaf = [f"ExecStart={sys.executable} -S -c \"import signal; signal.signal(15, signal.SIG_IGN); {HOG}\"" if line.startswith("ExecStart") else line
            for line in LINES]
    deaf.insert(deaf.index("[Service]") + 1, "TimeoutStopSec=infinity")
    busy.run("tee", f"/etc/systemd/system/{UNIT}", text_in="\n".join(deaf))
    systemctl(busy, "daemon-reload")
    systemctl(busy, "restart", "--no-block", UNIT)
    busy.run("systemctl", "kill", "--signal=SIGKILL", UNIT, check=False)
    until(lambda: "SIG_IGN" in busy.path(f"/proc/{shown(busy, UNIT, 'MainPID')}/cmdline").read_text(), "the deaf one runs", busy)
    main = int(shown(busy, UNIT, "MainPID"))
    fleet("launch", str(plan_of(fleet, systemd_hosts, Path("/srv/deaf/finish"), root="/srv/deaf", grace="2s")))
    fleet.until(lambda document: "llm on gx10 does not make room" in document["verdict"]["text"], "it is said")
    assert lives(busy, main) and fleet.status()["runs"][0]["state"] == "queued"
    fleet("stop", "--all", "--now")

    busy.run("systemctl", "kill", "--signal=SIGKILL", UNIT)
    until(lambda: shown(busy, UNIT, "ActiveState") in ("inactive", "failed"), "the stop that was asked for is over", busy)
    systemctl(busy, "start", UNIT)
    until(lambda: "SIG_IGN" in busy.path(f"/proc/{shown(busy, UNIT, 'MainPID')}/cmdline").read_text(), "the deaf one runs again", busy)
    plan = plan_of(fleet, systemd_hosts, Path("/srv/deaf/end"), root="/srv/deaf", grace="2s", force=True)
    plan.write_text(plan.read_text(encoding="utf-8").replace("name: tiny", "name: forced"), encoding="utf-8")
    fleet("launch", str(plan))
    fleet.until(lambda document: document["runs"][-1]["state"] == "running", "it has its room")
    assert shown(busy, UNIT, "MainPID") == "0"
    busy.run("touch", "/srv/deaf/end")


def test_a_unit_of_a_user_who_lingers_makes_room_and_comes_back(fleet: Fleet, systemd_hosts: Hosts) -> None:
    host = systemd_hosts["gx10"]
    host.power_on()
    host.run("loginctl", "enable-linger", "fleet")
    number = host.run("id", "-u", "fleet").stdout.strip()
    ask = ("env", f"XDG_RUNTIME_DIR=/run/user/{number}", "systemctl", "--user")
    until(lambda: host.path(f"/run/user/{number}/systemd/private").exists(), "the user's manager is up", host)
    folder = "/home/fleet/.config/systemd/user"
    host.run("mkdir", "-p", folder, user="fleet")
    host.run("tee", f"{folder}/{UNIT}", text_in="\n".join(LINES), user="fleet")
    host.run(*ask, "daemon-reload", user="fleet")
    host.run(*ask, "start", UNIT, user="fleet")
    try:
        fleet("launch", str(plan_of(fleet, systemd_hosts, Path("/home/fleet/finish"), user="fleet", root="/home/fleet/fleetd", user_unit=True)))
        campaign = fleet.status()["campaigns"][0]["campaign_id"]
        fleet.until(lambda document: document["runs"] and document["runs"][0]["state"] == "running", "the run has its room")
        assert host.run(*ask, "is-active", UNIT, user="fleet", check=False).stdout.strip() == "inactive"
        host.run("touch", "/home/fleet/finish")
        fleet.until(lambda document: "displaced work not yet restored" in document["verdict"]["text"], "it is told")
        assert "llm on gx10: RESTORED" in fleet("restore", campaign).stdout
        assert host.run(*ask, "is-active", UNIT, user="fleet").stdout.strip() == "active"
    finally:
        host.run(*ask, "stop", UNIT, user="fleet", check=False)
        host.run("rm", "-rf", f"{folder}/{UNIT}", "/home/fleet/fleetd", "/home/fleet/finish", user="fleet")
        host.run("loginctl", "disable-linger", "fleet")
        host.power_off()
