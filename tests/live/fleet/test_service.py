"""The coordinator as a service, under real systemd: `fleetd service install`, and what happens to it and to its run after that."""

from __future__ import annotations

from pathlib import Path

from fleet.host import Host
from fleet.service_kit import (
    QUICK_WATCHDOG_SECONDS,
    SERVICE_LIMIT_BYTES,
    WATCHDOG_SECONDS,
    as_json,
    client_of,
    fleetd,
    launch_printer,
    lives,
    running,
    shown,
    systemctl,
    until,
    watch,
)

STATE = "/var/lib/fleetd"


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

        until(lambda: shown(host, "fleetd.service", "StatusText") == "runs at work: 1, on hosts: 1", "its next tick says so", host)
        found = as_json(fleetd(host, "service", "status", "--json").stdout)
        assert (found["unit"]["ActiveState"], found["unit"]["StatusText"]) == ("active", "runs at work: 1, on hosts: 1")
        assert found["memory_limit_bytes"] == SERVICE_LIMIT_BYTES, "read back from the cgroup"

        watch(host, QUICK_WATCHDOG_SECONDS)
        systemctl(host, "restart", "fleetd.service")
        # From here to the next start a machine that stands still may look like a hung loop, too: then it is only ended once more.
        host.run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", "fleetd.service", check=False)
        until(lambda: shown(host, "fleetd.service", "NRestarts") != "0", "it is ended and started again", host)
        watch(host, WATCHDOG_SECONDS)
        until(lambda: shown(host, "fleetd.service", "ActiveState") == "active", "it comes back", host)
        told = lambda: host.run("journalctl", "--unit=fleetd.service", "--no-pager", "--output=cat").stdout  # noqa: E731
        until(lambda: "Watchdog timeout" in told(), "the journal says why", host)
        second = until(lambda: client.status()["coordinator"], "it answers", host)
        assert second["generation"] >= first["generation"] + 2 and second["pid"] != first["pid"]
        again = until(lambda: running(client), "it is found again", host)
        assert (again["pid"]["value"], again["attempt"]) == (trainer, 1)

        systemctl(host, "stop", "fleetd.service")
        assert shown(host, "fleetd.service", "ActiveState") == "inactive" and not lives(host, second["pid"]) and lives(host, trainer)
        systemctl(host, "start", "fleetd.service")
        again = until(lambda: running(client), "it is found again", host)
        assert (again["pid"]["value"], again["attempt"]) == (trainer, 1)
