"""Environments as a host builds them: real interpreters, real pip, small wheels made by hand; nothing comes from a network."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from small_wheels import small_wheel

from fleetd.environments import MARK, EnvironmentAnswer, EnvironmentOrder
from fleetd.files import files_below, write_record
from fleetd.host.environment import build, fault_of, interpreter
from fleetd.host.environment_use import prune
from fleetd.paths import HostPaths
from fleetd.wire import decode, dumps, encode
from policies.errors import DataDamaged, RequestRefused

ROOT = Path(__file__).resolve().parents[2]
LOCK = "ab" * 32
BUNDLED_PIP = next((Path(os.__file__).parent / "ensurepip" / "_bundled").glob("pip-*.whl"))


class Host:
    """A root with a staged wheelhouse, as the coordinator would have brought it."""

    def __init__(self, root: Path, *wheels: Path) -> None:
        self.paths = HostPaths(root)
        self.house = self.paths.wheelhouses / "d1"
        self.stage(*wheels)
        self.order = EnvironmentOrder(lock_sha256=LOCK, python=sys.executable, wheels="cd" * 32, wheelhouse="d1", seconds_max=250.0)

    def stage(self, *wheels: Path) -> None:
        (self.house / "wheels").mkdir(parents=True)
        shutil.copy(BUNDLED_PIP, self.house)
        lines = []
        for wheel in wheels:
            shutil.copy(wheel, self.house / "wheels")
            lines.append("{}=={} --hash=sha256:{}\n".format(*wheel.name.split("-")[:2], _sha256(wheel)))
        (self.house / "requirements.txt").write_text("".join(lines), encoding="utf-8")

    def start(self, **environment: str) -> subprocess.Popen[str]:
        """The program as the coordinator starts it."""
        argv = [sys.executable, "-I", str(ROOT / "fleetd" / "host" / "__main__.py"), "environment", str(self.paths.root)]
        request = dumps({"do": "build", "order": encode(self.order)})
        return subprocess.Popen([*argv, request], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})

    def place(self) -> Path:
        return next(path for path in self.paths.environments.glob("*/*") if path.is_dir())

    def log(self) -> str:
        return next(self.paths.environments.glob("*/*.log")).read_text(encoding="utf-8")

    def processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter(["cmdline"]) if any(str(self.paths.environments) in word for word in each.info["cmdline"] or ())]


def _sha256(path: Path) -> str:
    return subprocess.run(["sha256sum", str(path)], capture_output=True, text=True, check=True).stdout.split()[0]


def answer_of(process: subprocess.Popen[str]) -> EnvironmentAnswer:
    said, _ = process.communicate(timeout=250)
    return decode(EnvironmentAnswer, json.loads(said)["answer"])


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return small_wheel(folder, "alpha", script="alpha"), small_wheel(folder, "beta", "2.0", requires=("alpha>=1",))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, wheels: tuple[Path, Path]) -> tuple[Host, EnvironmentAnswer]:
    host = Host(tmp_path_factory.mktemp("host") / "root", *wheels)
    return host, build(host.paths, host.order)


@pytest.fixture
def host(tmp_path: Path, wheels: tuple[Path, Path]) -> Host:
    return Host(tmp_path / "root", *wheels)


def test_an_environment_holds_the_lock_and_nothing_else_and_its_wheels_are_gone(built: tuple[Host, EnvironmentAnswer]) -> None:
    host, answer = built
    assert answer.is_new and {name: version for name, (version, _) in answer.mark.packages.items()} == {"alpha": "1.0", "beta": "2.0"}
    assert answer.name.startswith(f"{LOCK}/cpython-") and answer.name.endswith("-cdcdcdcdcdcd")
    done = subprocess.run([host.paths.environments / answer.name / "bin" / "alpha"], capture_output=True, text=True, check=True)
    assert done.stdout == "alpha 1.0\n", "scripts begin with the whole path of their interpreter, and it holds"
    assert list(host.place().rglob("alpha/__pycache__/*.pyc")), "pip compiles, or every import would"
    assert not host.house.exists() and list(host.paths.environments.glob(".tmp-*")) == []


def test_a_second_order_builds_nothing_and_reads_every_file(built: tuple[Host, EnvironmentAnswer]) -> None:
    host, answer = built
    inode = (host.place() / MARK).stat().st_ino
    again = build(host.paths, host.order)
    assert not again.is_new and (again.name, again.mark) == (answer.name, answer.mark) and (host.place() / MARK).stat().st_ino == inode
    assert again.python.are_files_read


@pytest.mark.parametrize(("path", "text", "expected"), [
    ("alpha/__init__.py", "version = '1.1'\n", "alpha/__init__.py of alpha"),
    ("gamma-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: gamma\nVersion: 1.0\n", "not of the lock: gamma"),
])
def test_what_was_changed_or_installed_by_hand_is_named_and_left_as_it_is(
    built: tuple[Host, EnvironmentAnswer], path: str, text: str, expected: str,
) -> None:
    host, _ = built
    changed = next(host.place().glob("lib/*/site-packages")) / path
    before = changed.read_text(encoding="utf-8") if changed.exists() else None
    changed.parent.mkdir(exist_ok=True)
    changed.write_text(text, encoding="utf-8")
    try:
        with pytest.raises(DataDamaged) as caught:
            build(host.paths, host.order)
    finally:
        changed.unlink() if before is None else changed.write_text(before, encoding="utf-8")
        if before is None:
            changed.parent.rmdir()
    assert expected in caught.value.what and f"rm -r {host.place()}" in caught.value.fix


def test_of_three_who_ask_at_once_one_is_killed_half_way_one_begins_again_and_the_third_finds_it_done(host: Host, tmp_path: Path) -> None:
    purse = tmp_path / "purse"
    purse.mkdir()
    (purse / "coin-1").touch()
    first = host.start(FLEETD_FAULT=f"environment:environment filled:kill:{purse}")
    _until(lambda: any(path.is_dir() for path in host.paths.environments.glob("*/*")))
    home = tmp_path / "home"
    home.mkdir()
    others = [host.start(HOME=str(home)), host.start(HOME=str(home))]

    assert first.wait(250) == -signal.SIGKILL and not (purse / "coin-1").exists()
    answers = [answer_of(process) for process in others]
    assert sorted(answer.is_new for answer in answers) == [False, True] and answers[0].mark == answers[1].mark
    assert set(answers[0].mark.packages) == {"alpha", "beta"} and list(home.iterdir()) == [], "nothing is written outside the root"
    assert first.stdout is not None
    first.stdout.close()


def test_a_build_that_dies_while_pip_is_at_work_leaves_no_process_and_no_environment(host: Host, wheels: tuple[Path, Path]) -> None:
    strange = {"FLEETD_RUN_DIR": "/somebody/else", "PIP_INDEX_URL": "https://me:secret@host/simple", "PYTHONPATH": "/elsewhere"}
    process, pip = _caught_at_work(host, wheels, strange)
    words = pip.environ()
    assert not [name for name in words if name.startswith(("FLEETD_", "PYTHON", "PIP_")) and name != "PIP_CONFIG_FILE"], "it is nobody's trainer"
    assert words["TMPDIR"].startswith(str(host.paths.root)) and pip.nice() >= 10
    process.kill()
    process.communicate()

    _until(lambda: host.processes() == [])
    assert not list(host.paths.environments.glob(f"*/*/{MARK}")), "what is half-made has no mark, and nobody takes it for an environment"


def test_a_build_out_of_time_is_ended_with_what_it_started_and_says_where_its_log_is(host: Host) -> None:
    with pytest.raises(RequestRefused) as caught:
        build(host.paths, replace(host.order, seconds_max=0.6))
    assert caught.value.what == "it took longer than 1 s" and ".log" in caught.value.fix and "killed: out of time" in host.log()
    assert host.processes() == [] and [path.suffix for path in host.paths.environments.glob("*/*")] == [".log"]


def test_a_build_that_finds_another_one_at_work_for_all_of_its_time_says_so_and_begins_nothing(host: Host) -> None:
    host.paths.environments.mkdir(parents=True)
    with open(host.paths.environments / ".lock", "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RequestRefused, match="the build has not begun in time"):
            build(host.paths, replace(host.order, seconds_max=0.3))
    assert not list(host.paths.environments.glob("*/*/"))


def test_wheels_that_are_not_those_of_the_lock_install_nothing(host: Host, wheels: tuple[Path, Path]) -> None:
    small_wheel(host.house / "wheels", "alpha", files={"alpha/stranger.py": "\n"})
    with pytest.raises(DataDamaged) as caught:
        build(host.paths, host.order)
    assert "alpha==1.0" in caught.value.title and not list(host.paths.environments.glob("*/*/"))


def test_a_python_without_ensurepip_serves_and_one_without_venv_is_refused_with_the_package_that_has_it() -> None:
    found = interpreter(sys.executable)
    assert fault_of(found) is None and found.abi == f"cp{sys.version_info[0]}{sys.version_info[1]}" and found.markers["sys_platform"] == "linux"
    refused = fault_of(replace(found, version="3.12.3", lacks=("venv",)))
    assert refused is not None and "no venv" in refused.what and "apt-get install python3.12-venv" in refused.fix
    missing = fault_of(interpreter("/no/such/python"))
    assert missing is not None and "No such file" in missing.what and "environment.python" in missing.fix


def test_nothing_is_pruned_that_the_coordinator_a_run_or_a_process_needs(tmp_path: Path) -> None:
    paths = HostPaths(tmp_path)
    names = {word: f"{LOCK}/{word}" for word in ("kept", "named", "running", "spare")}
    for name in names.values():
        (paths.environments / name / "bin").mkdir(parents=True)
        (paths.environments / f"{name}.log").touch()
    (paths.environments / "ef" / "spare" / "bin").mkdir(parents=True)
    (paths.wheelhouses / "old").mkdir(parents=True)
    (paths.wheelhouses / "new").mkdir()
    paths.run("r1").root.mkdir(parents=True)
    write_record(paths.run("r1").order, {"digests": {"environment": names["named"]}})
    sleeper = subprocess.Popen([f"{paths.environments / names['running']}/bin/python", "60"], executable="/bin/sleep")
    _until(lambda: bool(psutil.Process(sleeper.pid).cmdline()))
    try:
        removed = prune(paths, frozenset({names["kept"]}), frozenset({"new"}))
    finally:
        sleeper.kill()
        sleeper.wait()

    assert set(removed) == {names["spare"], "ef/spare", "old"}
    assert sorted(path.name for path in (paths.environments / LOCK).iterdir()) == [
        "kept", "kept.log", "named", "named.log", "running", "running.log"]
    assert not (paths.environments / "ef").exists() and list(files_below(paths.wheelhouses)) == []


def _caught_at_work(host: Host, wheels: tuple[Path, Path], environment: dict[str, str]) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A build and its pip, made to stand still so that it is at work however long this test is. Where it was done before anybody looked: another."""
    for _ in range(10):
        process = host.start(**environment)
        while process.poll() is None:
            for each in host.processes():
                if "pip-" in " ".join(each.info["cmdline"]) and _stands_still(each):
                    return process, each
        process.communicate()
        shutil.rmtree(host.paths.environments)
        shutil.rmtree(host.house, ignore_errors=True)
        host.stage(*wheels)
    raise AssertionError("pip was never seen at work")


def _stands_still(process: psutil.Process) -> bool:
    try:
        process.suspend()
        _until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _until(met: object, seconds: float = 100.0) -> None:
    assert callable(met)
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)
