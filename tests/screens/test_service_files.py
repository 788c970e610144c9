"""The unit files as systemd itself reads them, and whose file is whose. No service manager runs for these."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetd.screens import commands_service, service_files
from fleetd.screens.service_files import COORDINATOR, RUN, SWEEP, TIMER, Service, Standing, marked, standing, word
from policies.errors import RequestRefused

EXPOSURE_MAX = 2.0


def service(**changes: Any) -> Service:
    whole: dict[str, Any] = {
        "is_system": True, "python": sys.executable, "state": Path("/var/lib/fleetd"), "user": "root", "socket_group": "fleetd",
        "credentials": ("ssh-key:/etc/fleetd/key",), "stops_runs": True, "roots": ("/srv/fleetd", "/srv/an other"), "roots_owner": "root",
    }
    return Service(**{**whole, **changes})


def verified(tmp_path: Path, units: dict[str, str]) -> str:
    """What `systemd-analyze verify` says of them. Its exit code is 0 on keys that it does not know, so nothing but silence will do."""
    for name, text in units.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    argv = ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return f"{done.returncode} {done.stdout}{done.stderr}".strip()


@pytest.mark.parametrize("is_system", [True, False])
@pytest.mark.parametrize("is_rich", [True, False])
def test_systemd_reads_every_unit_without_a_word(tmp_path: Path, is_system: bool, is_rich: bool) -> None:
    found = service(is_system=is_system, credentials=("ssh-key:/etc/fleetd/key",) if is_rich else (), stops_runs=is_rich)
    assert verified(tmp_path, {name: found.render(name) for name in (COORDINATOR, SWEEP, TIMER)}) == "0"
    instance = RUN.replace("@", r"@srv-fleetd-runs-one")
    assert verified(tmp_path, {instance: found.render(RUN)}) == "0"


def test_the_check_of_the_units_finds_a_key_that_systemd_does_not_know(tmp_path: Path) -> None:
    text = service().render(COORDINATOR).replace("WatchdogSec=60", "WatchdogSecs=60")
    assert "WatchdogSecs" in verified(tmp_path, {COORDINATOR: text})


def exposure(path: Path) -> float:
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", "--no-pager", str(path)], capture_output=True, text=True, check=True)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def test_the_machines_service_is_hardened(tmp_path: Path) -> None:
    path = tmp_path / COORDINATOR
    path.write_text(service(user="fleetd").render(COORDINATOR), encoding="utf-8")
    assert exposure(path) <= EXPOSURE_MAX
    path.write_text(service(is_system=False).render(COORDINATOR), encoding="utf-8")
    assert exposure(path) > EXPOSURE_MAX, "a user's own is not, and the check can tell"


def test_what_ends_a_coordinator_ends_no_run() -> None:
    for name in (COORDINATOR, RUN, SWEEP):
        lines = service().render(name).splitlines()
        assert {"KillMode=process", "OOMPolicy=continue"} <= set(lines)
    assert "MemoryMax=infinity" in service().render(RUN) and "MemoryMax" not in service().render(COORDINATOR)


def test_only_who_asked_for_it_stops_runs_with_the_service() -> None:
    assert "ExecStop=" not in service(stops_runs=False).render(COORDINATOR)
    assert f"service stop-runs --seconds {service_files.STOP_SECONDS}" in service(stops_runs=True).render(COORDINATOR)


def test_a_path_is_one_word_whatever_is_in_it(tmp_path: Path) -> None:
    odd = tmp_path / "a %h b"
    odd.mkdir()
    program = odd / "python"
    shutil.copy("/bin/true", program)
    text = service(python=str(program), stops_runs=False, credentials=()).render(COORDINATOR)
    assert verified(tmp_path, {COORDINATOR: text}) == "0"
    program.unlink()
    assert str(program) in verified(tmp_path, {COORDINATOR: text}), "systemd looked for exactly this file"
    with pytest.raises(RequestRefused, match="interpreter"):
        service(python="/srv/$HOME/python").render(COORDINATOR)


@pytest.mark.parametrize(("text", "expected"), [
    (None, Standing.ABSENT), ("[Service]\n", Standing.FOREIGN), (marked("[Service]\n"), Standing.OURS),
    (marked("[Service]\n") + "User=me\n", Standing.CHANGED),
])
def test_a_file_says_whose_it_is(tmp_path: Path, text: str | None, expected: Standing) -> None:
    path = tmp_path / COORDINATOR
    if text is not None:
        path.write_text(text, encoding="utf-8")
    assert standing(path) is expected
    if expected in (Standing.FOREIGN, Standing.CHANGED):
        with pytest.raises(RequestRefused, match="in the way"):
            service_files.refuse_foreign([path])
    else:
        service_files.refuse_foreign([path])
        assert service_files.write(path, marked("[Unit]\n")) == ("wrote" if text is None else "replaced")
        assert service_files.write(path, marked("[Unit]\n")) == "unchanged"


def test_words_of_units_are_quoted_only_where_they_must_be() -> None:
    assert word("/srv/fleetd") == "/srv/fleetd" and word("/a b") == '"/a b"' and word("50%$x") == "50%%$$x"


def test_without_systemd_nothing_is_installed_and_the_way_without_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(commands_service, "SYSTEMD_RUNS", tmp_path / "absent")
    with pytest.raises(RequestRefused, match="systemd does not run here"):
        commands_service.install(of_user=True)
    assert list(tmp_path.iterdir()) == []
