"""The home of a supervisor: names of units, and what a unit hands on. That systemd really does it is tried in tests/live/fleet."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fleetd.host import homes
from fleetd.paths import RunPaths


@pytest.mark.parametrize("path", ["/srv/fleetd/runs/20261130T095220Z-manpages-one", "/a-b/c.d e/.x", "/.hidden/ü", "/x//y/", "/"])
def test_a_run_directory_is_escaped_as_systemd_does_it(path: str) -> None:
    expected = subprocess.run(["systemd-escape", "--path", path], capture_output=True, text=True, check=True).stdout.strip()
    assert homes.escape(Path(path)) == expected


def test_only_what_is_true_beyond_a_login_is_handed_on_and_only_its_user_may_read_it(tmp_path: Path) -> None:
    path = RunPaths(tmp_path).supervisor_environment
    homes._write_environment(path, {
        "PATH": "/bin", "SSH_CONNECTION": "1", "XDG_SESSION_ID": "3", "NOTIFY_SOCKET": "x", "ODD": 'a "b" $c `d` \\e\nf', "BASH_FUNC_x%%": "()",
    })
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text(encoding="utf-8") == 'ODD="a \\"b\\" \\$c \\`d\\` \\\\e\nf"\nPATH="/bin"\n'


def test_without_systemd_a_supervisor_is_detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes.scopes, "SYSTEMD_RUNS", tmp_path / "absent")
    assert homes.home_of(tmp_path) == "systemd does not run here"
    assert homes.start_in_unit(tmp_path, ("python3",), {}) is None and not RunPaths(tmp_path).supervisor_environment.exists()
    assert homes.own_home() in ("detached", "unknown")


def test_without_its_template_a_supervisor_is_detached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes.scopes, "SYSTEMD_RUNS", tmp_path)
    monkeypatch.setattr(homes, "SYSTEM_UNITS", (tmp_path,))
    monkeypatch.setattr(homes, "USER_UNITS", (tmp_path,))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert "is not installed" in str(homes.home_of(tmp_path / "run"))
    (tmp_path / homes.TEMPLATE).touch()
    (tmp_path / "systemd/user").mkdir(parents=True)
    assert "characters" in str(homes.home_of(tmp_path / ("x" * 250)))
