"""`make service`: the rest of what is claimed of the units, under real systemd. Longer than the suite has time for."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.host import Host
from fleet.hosts import Hosts
from fleet.service_kit import change, client_of, fleetd, launch_printer, lives, running, shown, systemctl, take_away, until, write_printer
from fleetd.host.homes import escape
from fleetd.paths import RunPaths

USER_ID = 1500
AS_USER = (f"XDG_RUNTIME_DIR=/run/user/{USER_ID}",)
OWN_STATE = "/home/fleet/.local/state/fleetd"
ROOT = "/srv/host"
STATE = "/var/lib/fleetd"
KEY_OF_SERVICE = "/run/credentials/fleetd.service/ssh-key"
UNITS = Path("/etc/systemd/system")


@pytest.fixture
def host(systemd_host: Host) -> Iterator[Host]:
    systemd_host.power_on()
    yield systemd_host
    take_away(systemd_host)


@pytest.fixture
def lingering(host: Host) -> Host:
    host.run("loginctl", "enable-linger", "fleet")
    until(lambda: host.path(f"/run/user/{USER_ID}/systemd/private").exists(), "the user's manager runs", host)
    return host


def user_shown(host: Host, unit: str, name: str) -> str:
    return str(host.run("env", *AS_USER, "systemctl", "--user", "show", "--value", f"--property={name}", unit, user="fleet").stdout).strip()


def run_paths(host: Host, run: dict[str, Any]) -> RunPaths:
    return RunPaths(host.path(f"{ROOT}/runs/{run['run_id']}"))


def supervisor_pid(paths: RunPaths) -> int:
    return int(json.loads(paths.supervisor.read_text(encoding="utf-8"))["identity"]["pid"])


def unit_of(run: dict[str, Any]) -> str:
    return f"fleetd-run@{escape(Path(ROOT, 'runs', run['run_id']))}.service"


def test_a_users_service_keeps_each_supervisor_in_a_unit_of_the_users_manager(lingering: Host, tmp_path: Path) -> None:
    host = lingering
    said = fleetd(host, "service", "install", "--user", user="fleet", environment=AS_USER).stdout
    assert "run       systemctl --user enable --now fleetd.service" in said and "enable-linger" not in said
    with client_of(host, OWN_STATE) as client:
        first = client.status()["coordinator"]
        launch_printer(client, tmp_path, ROOT)
        run = until(lambda: running(client), "the run runs", host)
        trainer, paths, unit = run["pid"]["value"], run_paths(host, run), unit_of(run)
        assert f'home="{unit} of the user manager"' in paths.supervisor_log.read_text(encoding="utf-8")
        assert user_shown(host, unit, "MainPID") == str(supervisor_pid(paths))
        part = run["memory"]["parts"]["cgroup"]
        is_delegated = host.path(f"/sys/fs/cgroup/user.slice/user-{USER_ID}.slice/user@{USER_ID}.service/memory.max").exists()
        assert (part["grade"] == "enforced") == is_delegated, f"without a memory controller nothing may pretend to be a cap: {part}"

        host.run("kill", "-9", str(supervisor_pid(paths)))
        until(lambda: user_shown(host, unit, "NRestarts") == "1", "systemd starts the supervisor again", host)
        again = until(lambda: running(client), "the run is watched again", host)
        assert (again["pid"]["value"], again["attempt"]) == (trainer, 1)

        host.run("kill", "-9", str(first["pid"]))
        until(lambda: client.status()["coordinator"]["generation"] == first["generation"] + 1, "the coordinator comes back", host)
        host.run("env", *AS_USER, "systemctl", "--user", "stop", "fleetd.service", user="fleet")
        assert lives(host, trainer) and user_shown(host, unit, "ActiveState") == "active"


def test_without_lingering_a_supervisor_is_detached_and_all_of_it_ends_with_the_last_login(host: Host, systemd_hosts: Hosts, tmp_path: Path) -> None:
    login = subprocess.Popen(["ssh", "-F", str(systemd_hosts.ssh_config), host.name, "cat"], stdin=subprocess.PIPE)
    try:
        until(lambda: host.path(f"/run/user/{USER_ID}/systemd/private").exists(), "the user's manager runs", host)
        fleetd(host, "service", "install", "--user", user="fleet", environment=AS_USER)
        assert "ends with your last login" in fleetd(host, "service", "status", "--user", user="fleet", environment=AS_USER).stdout
        with client_of(host, OWN_STATE) as client:
            launch_printer(client, tmp_path, ROOT)
            run = until(lambda: running(client), "the run runs", host)
            assert "home=detached" in run_paths(host, run).supervisor_log.read_text(encoding="utf-8")
    finally:
        login.communicate()
    until(lambda: not lives(host, run["pid"]["value"]), "what the status said of the last login is true", host)


def test_roots_supervisors_live_in_units_of_the_machine_without_a_limit_and_the_sweep_starts_them_after_a_reboot(host: Host, tmp_path: Path) -> None:
    host.run("mkdir", "-p", ROOT)
    fleetd(host, "service", "install", "--no-start", "--root", ROOT)
    start = ("setsid", "-f", "env", "FLEETD_STATE=/srv/state", sys.executable, "-m", "fleetd.screens.cli", "daemon")
    host.run("sh", "-c", 'exec "$@" < /dev/null > /dev/null 2>&1', "start", *start)
    with client_of(host, "/srv/state") as client:
        until(lambda: client.status(), "the coordinator answers", host)
        launch_printer(client, tmp_path, ROOT)
        run = until(lambda: running(client), "the run runs", host)
        paths, unit = run_paths(host, run), unit_of(run)
        assert shown(host, unit, "MainPID") == str(supervisor_pid(paths)) and shown(host, unit, "MemoryMax") == "infinity"
        assert limit_of(host, f"/system.slice/{shown(host, unit, 'ControlGroup').removeprefix('/system.slice/')}") is None
        record = json.loads(paths.attempt(1).record.read_text(encoding="utf-8"))
        group = record["cgroup"].partition(":")[0]
        limit = next(path for path in (host.path(f"{group}/memory.limit_in_bytes"), host.path(f"{group}/memory.max")) if path.exists())
        assert int(limit.read_text(encoding="ascii")) == 128 << 20, "the trainer's limit, read back from its cgroup"

    host.power_cycle()
    assert not run_paths(host, run).attempt(2).started.exists()
    systemctl(host, "start", "fleetd-sweep.service")
    until(lambda: run_paths(host, run).attempt(2).started.exists(), "the next attempt is started without any coordinator", host)
    assert shown(host, unit, "ActiveState") == "active"
    systemctl(host, "start", "fleetd-sweep.timer")
    assert shown(host, "fleetd-sweep.timer", "ActiveState") == "active"


def limit_of(host: Host, group: str) -> int | None:
    for path in (host.path(f"/sys/fs/cgroup/memory{group}/memory.limit_in_bytes"), host.path(f"/sys/fs/cgroup{group}/memory.max")):
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            return None if text == "max" or int(text) >= 1 << 60 else int(text)
    raise AssertionError(f"{group} has no memory controller")


@pytest.mark.parametrize("is_asked_for", [True, False])
def test_stopping_the_service_stops_runs_only_where_the_operator_asked_for_it(host: Host, tmp_path: Path, is_asked_for: bool) -> None:
    fleetd(host, "service", "install", "--no-start", *(["--stop-runs"] if is_asked_for else []))
    change(host, "fleetd.service", "ProcSubset=all")
    systemctl(host, "start", "fleetd.service")
    with client_of(host, "/var/lib/fleetd") as client:
        launch_printer(client, tmp_path, "/var/lib/fleetd/host")
        run = until(lambda: running(client), "the run runs", host)
        trainer = run["pid"]["value"]
        output = RunPaths(host.path(f"/var/lib/fleetd/host/runs/{run['run_id']}")).attempt(1).stdout
        host.run("systemctl", "kill", "--kill-whom=main", f"--signal={signal.SIGKILL.value}", "fleetd.service")
        until(lambda: client.status()["coordinator"]["generation"] == 2, "a crash stops nothing", host)
        assert lives(host, trainer)
        systemctl(host, "stop", "fleetd.service")
        assert lives(host, trainer) is not is_asked_for
        assert ("asked" in output.read_text(encoding="utf-8")) is is_asked_for


def test_a_plan_that_reaches_a_host_without_ssh_is_not_launched_with_the_machines_coordinator(installed: Host, tmp_path: Path) -> None:
    systemctl(installed, "start", "fleetd.service")
    plan = write_printer(tmp_path, f"{STATE}/host")
    installed.run("tee", "/srv/plan.yaml", text_in=plan.read_text(encoding="utf-8"))
    refused = fleetd(installed, "launch", "/srv/plan.yaml", check=False)
    assert refused.returncode == 3 and "reaches its own machine through SSH too" in refused.stderr


def test_who_may_talk_to_it_and_what_installing_and_uninstalling_touch(installed: Host) -> None:
    host = installed
    systemctl(host, "start", "fleetd.service")
    before = shown(host, "fleetd.service", "MainPID")
    refused = fleetd(host, "status", user="fleet", check=False)
    assert refused.returncode == 8 and "usermod --append --groups fleetd" in refused.stderr
    host.run("usermod", "--append", "--groups", "fleetd", "fleet")
    answered = fleetd(host, "status", user="fleet")
    assert "nothing was launched yet" in answered.stdout and f"this is the machine's coordinator, {STATE}" in answered.stderr

    assert "fleetd.service of the system's manager: active" in fleetd(host, "service", "status", user="fleet").stdout
    refused = fleetd(host, "service", "uninstall", "--system", user="fleet", check=False)
    assert refused.returncode == 3 and "root's to change" in refused.stderr

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


def test_the_machines_service_reaches_its_own_host_through_ssh_and_what_runs_there_is_outside_its_walls(host: Host, tmp_path: Path) -> None:
    fleetd(host, "service", "install", "--no-start", "--credential", "ssh-key=/root/.ssh/id_ed25519")
    change(host, "fleetd.service")
    systemctl(host, "start", "fleetd.service")
    login = {"transport": "ssh", "user": "root", "agent_python": "/usr/bin/python3", "identity_file": KEY_OF_SERVICE}
    with client_of(host, STATE) as client:
        launch_printer(client, tmp_path, ROOT, **login)
        run = until(lambda: running(client), "the run runs", host)
        trainer, unit = run["pid"]["value"], unit_of(run)
        assert f'home="{unit} of the system manager"' in run_paths(host, run).supervisor_log.read_text(encoding="utf-8")
        walls = "NoNewPrivs:\t1"
        assert walls in host.path(f"/proc/{shown(host, 'fleetd.service', 'MainPID')}/status").read_text(encoding="utf-8")
        assert walls not in host.path(f"/proc/{trainer}/status").read_text(encoding="utf-8")
        systemctl(host, "restart", "fleetd.service")
        again = until(lambda: running(client), "it is found again", host)
        assert (again["pid"]["value"], again["attempt"]) == (trainer, 1)
