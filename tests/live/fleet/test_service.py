"""The coordinator as a service, under real systemd: `fleetd service install`, and what happens to it and to its run after that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.host import Host
from fleet.service_kit import (
    WATCHDOG_SECONDS,
    as_json,
    change,
    client_of,
    fleetd,
    launch_printer,
    lives,
    running,
    shown,
    systemctl,
    take_away,
    until,
)

STATE = "/var/lib/fleetd"
UNITS = Path("/etc/systemd/system")
LIMIT_BYTES = 3 << 30


@pytest.fixture
def installed(systemd_host: Host) -> Iterator[Host]:
    """The machine's service, installed by the command and not started yet. A limit is asked for so that one can be read back."""
    host = systemd_host
    host.power_on()
    host.run("sh", "-c", "echo secret > /etc/key && chmod 600 /etc/key")
    said = fleetd(host, "service", "install", "--no-start", "--credential", "ssh-key=/etc/key").stdout
    assert f"wrote     {UNITS}/fleetd.service" in said and "run       systemctl daemon-reload" in said
    # /proc/sys is shown to the unit only here: its agent runs inside the unit, as that of a service never does.
    change(host, "fleetd.service", f"WatchdogSec={WATCHDOG_SECONDS}", "RestartSec=0.2", "ProcSubset=all", f"MemoryMax={LIMIT_BYTES}")
    yield host
    take_away(host)


def test_the_service_is_ready_when_it_answers_survives_a_hang_and_leaves_its_trainers_alone(installed: Host, tmp_path: Path) -> None:
    host = installed
    systemctl(host, "start", "fleetd.service")
    with client_of(host, STATE) as client:
        first = client.status()["coordinator"]  # at once: ready means that it answers
        assert str(first["pid"]) == shown(host, "fleetd.service", "MainPID")
        assert host.path("/run/credentials/fleetd.service/ssh-key").read_text(encoding="utf-8") == "secret\n"

        launch_printer(client, tmp_path, f"{STATE}/host")
        run = until(lambda: running(client), "the run runs", host)
        trainer = run["pid"]["value"]
        group = host.path(f"/proc/{trainer}/cgroup").read_text(encoding="utf-8")
        assert "/fleetd.service" in group, "the worst case: it lives in the group of the unit"

        found = as_json(fleetd(host, "service", "status", "--json").stdout)
        assert (found["unit"]["ActiveState"], found["unit"]["StatusText"]) == ("active", "runs at work: 1, on hosts: 1")
        assert found["memory_limit_bytes"] == LIMIT_BYTES, "read back from the cgroup"

        systemctl(host, "kill", "--kill-whom=main", "--signal=STOP", "fleetd.service")
        until(lambda: [shown(host, "fleetd.service", name) for name in ("NRestarts", "ActiveState")] == ["1", "active"], "it comes back", host)
        assert "Watchdog timeout" in host.run("journalctl", "--unit=fleetd.service", "--no-pager", "--output=cat").stdout
        second = client.status()["coordinator"]
        assert second["generation"] == first["generation"] + 1 and second["pid"] != first["pid"]
        again = until(lambda: running(client), "it is found again", host)
        assert (again["pid"]["value"], again["attempt"]) == (trainer, 1)

        systemctl(host, "stop", "fleetd.service")
        assert shown(host, "fleetd.service", "ActiveState") == "inactive" and not lives(host, second["pid"]) and lives(host, trainer)
        systemctl(host, "start", "fleetd.service")
        again = until(lambda: running(client), "it is found again", host)
        assert (again["pid"]["value"], again["attempt"]) == (trainer, 1)


def test_who_may_talk_to_it_and_what_installing_and_uninstalling_touch(installed: Host) -> None:
    host = installed
    systemctl(host, "start", "fleetd.service")
    before = shown(host, "fleetd.service", "MainPID")
    refused = fleetd(host, "status", user="fleet", check=False)
    assert refused.returncode == 8 and "usermod --append --groups fleetd" in refused.stderr
    host.run("usermod", "--append", "--groups", "fleetd", "fleet")
    answered = fleetd(host, "status", user="fleet")
    assert "nothing was launched yet" in answered.stdout and f"this is the machine's coordinator, {STATE}" in answered.stderr

    said = fleetd(host, "service", "install", "--credential", "ssh-key=/etc/key").stdout
    assert f"unchanged {UNITS}/fleetd.service" in said and shown(host, "fleetd.service", "MainPID") == before
    host.run("sh", "-c", f"echo '# mine' >> '{UNITS}/fleetd-run@.service'")
    refused = fleetd(host, "service", "install", check=False)
    assert refused.returncode == 3 and "it is changed by hand" in refused.stderr and shown(host, "fleetd.service", "MainPID") == before

    said = fleetd(host, "service", "uninstall").stdout
    assert "(changed by hand)" in said and f"removed   {UNITS}/fleetd.service" in said
    assert not host.path(UNITS / "fleetd.service").exists() and host.path(UNITS / "fleetd-run@.service").exists()
    assert host.path(UNITS / "fleetd.service.d/test.conf").exists() and host.path(f"{STATE}/journal.db").exists()
    assert shown(host, "fleetd.service", "ActiveState") == "inactive" and not lives(host, int(before))
