"""One look at a host before a campaign begins: `python -m fleetd.host.survey ROOT QUESTION` prints one JSON object.

Asked once by the coordinator's preflight. It changes nothing but a file in the root that it makes and removes; `policies.preflight` judges.

    QUESTION   {"host": true, "pythons": {"PROGRAM": ["torch", ...]}, "read_files": true, "displace": [Workload],
                "programs": [ProgramAsked], "locks": [digest]}
    answer     {"host": HostSurvey or null, "caps": {"cgroup": CapPart, ...}, "pythons": {"PROGRAM": PythonSurvey}, "displace": [WorkloadSight],
                "programs": [ProgramSurvey], "environments": [BuiltEnvironment]}
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import pwd
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetd import clock
from fleetd.host import cradle, devices, means, meters, workloads
from fleetd.host.environment_use import built
from fleetd.host.ownership import read_owner
from fleetd.host.processes import boot_id
from fleetd.host.trusted_time import is_synchronised
from fleetd.model import CapPart
from fleetd.paths import HostPaths
from fleetd.wire import decode, dumps
from policies.errors import ExplainedError
from policies.facts import ENV_RUN_DIR, CapGrade
from policies.surveys import AcceleratorUser, HostSurvey, ProgramAsked, ProgramSurvey, PythonSurvey, SessionTraps
from policies.workloads import Workload

PROBE = Path(__file__).with_name("python_probe.py")
PROBE_SECONDS_MAX = 180.0
"""An environment of torch with CUDA holds several gigabytes, and every file of it is read."""
SYSTEM_UID_MAX = 999
MACHINE_DIGEST_SALT = b"fleetd machine "


def look(root: Path) -> HostSurvey:
    """Everything that can be seen without asking anybody's permission."""
    moment = clock.read()
    accelerators, driver = devices.names(), devices.driver_version()
    cap, (owner, owner_fault) = cradle.host_part(root), _owner(root)
    return HostSurvey(
        machine=_machine(), hostname=platform.node(), boot_id=boot_id(), kernel=platform.release(), architecture=platform.machine(),
        now=moment.now, utc_offset_seconds=time.localtime().tm_gmtoff, clock_synchronised=is_synchronised(),
        memory_total_bytes=meters.total_bytes(), memory_available_bytes=meters.available_bytes(), root=str(root), root_fault=_root_fault(root),
        owner=owner, owner_fault=owner_fault,
        disk_free_bytes=meters.disk_free_bytes(_existing(root)),
        cleaner=_cleaner(root), cap_grade=cap.grade.value, cap_means=cap.means, accelerators=accelerators,
        driver=driver, accelerator_users=_accelerator_users(root), traps=_traps(), reboot_pending=_reboot_pending(),
        reboots_by_itself=_reboots_by_itself(),
    )


def look_at_python(program: str, modules: list[str], read_files: bool, seconds_max: float = PROBE_SECONDS_MAX) -> PythonSurvey:
    """What an interpreter of this host is. It runs alone, in isolated mode, without anything of ours on its path."""
    argv = [program, "-I", str(PROBE), "read" if read_files else "list", *modules]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds_max, check=False)
    except OSError as fault:
        return PythonSurvey(program=program, fault=fault.strerror or str(fault))
    except subprocess.TimeoutExpired:
        return PythonSurvey(program=program, fault=f"it gave no answer in {seconds_max:.0f} s")
    try:
        found = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.strip().splitlines()
        return PythonSurvey(program=program, fault=(words[-1][:300] if words else f"exit status {done.returncode} and no words"))
    return decode(PythonSurvey, {**found, "program": program, "fault": None}, "probe")


def _machine() -> str:
    """machine-id(5) asks that the id itself is not handed around, so only a digest of it is."""
    data = _text("/etc/machine-id").strip().encode()
    return hashlib.sha256(MACHINE_DIGEST_SALT + data).hexdigest()[:32] if data else ""


def _root_fault(root: Path) -> str | None:
    """Why nothing can be written under the root. A file is made, synced and removed: access(2) knows nothing of full or failing disks."""
    place = _existing(root)
    if not place.is_dir():
        return f"{place} is a file"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".fleetd-look-") as file:
            file.write(b"fleetd")
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        return f"{place}: {fault.strerror}"
    return None


def _owner(root: Path) -> tuple[str | None, str | None]:
    """Whose orders the root obeys, or why that can't be said."""
    try:
        owner = read_owner(HostPaths(root))
    except NotADirectoryError:
        return None, None  # told as what is wrong with the root
    except (ExplainedError, OSError) as fault:
        return None, fault.what if isinstance(fault, ExplainedError) else str(fault)
    return None if owner is None else owner.coordinator_id, None


def _existing(root: Path) -> Path:
    """The root itself, or the nearest place above it that is there."""
    return next(each for each in (root, *root.parents) if each.exists())


def _cleaner(root: Path) -> str | None:
    """The tmpfiles.d(5) line that ages files above the root: type d, D, q, Q, v or e with an age that is not `-`."""
    real = root.resolve()
    for path, line in _settings_lines("tmpfiles.d", "*.conf"):
        words = line.split()
        if len(words) >= 6 and words[0].rstrip("!-=~^$+")[:1] in set("dDqQve") and words[5] not in ("-", ""):
            place = Path(words[1])
            if place == real or place in real.parents:
                return f"{path}: {line.strip()}"
    return None


def _traps() -> SessionTraps:
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    if not Path("/run/systemd/system").is_dir():
        return SessionTraps(user=user, is_system_user=uid <= SYSTEM_UID_MAX)
    settings = {"RemoveIPC": "yes", "KillUserProcesses": "no"}  # the defaults of logind.conf(5)
    for _, line in _settings_lines("systemd", "logind.conf", "logind.conf.d/*.conf"):
        key, separator, value = line.partition("=")
        if separator and key.strip() in settings:
            settings[key.strip()] = value.strip()
    on = {key: value.lower() in ("yes", "true", "on", "1") for key, value in settings.items()}
    return SessionTraps(
        user=user, is_system_user=uid <= SYSTEM_UID_MAX, is_lingering=Path("/var/lib/systemd/linger", user).exists(), removes_ipc=on["RemoveIPC"],
        kills_processes=on["KillUserProcesses"],
    )


def _reboot_pending() -> tuple[str, ...] | None:
    if not Path("/run/reboot-required").exists():
        return None
    return tuple(sorted(set(_text("/run/reboot-required.pkgs").split())))


def _reboots_by_itself() -> bool:
    """unattended-upgrades with Automatic-Reboot, and the timer that runs it switched on."""
    paths = sorted(Path("/etc/apt/apt.conf.d").glob("*"))
    lines = [line for path in paths for line in _text(path).splitlines() if not line.lstrip().startswith("//")]
    value, runs = "false", "0"
    for line in lines:
        if (found := re.search(r'Unattended-Upgrade::Automatic-Reboot\s+"?([^";]+)', line)) is not None:
            value = found.group(1)
        if (found := re.search(r'APT::Periodic::Unattended-Upgrade\s+"?([^";]+)', line)) is not None:
            runs = found.group(1)
    return value.strip().lower() in ("true", "yes", "1") and runs.strip() not in ("0", "")


def _accelerator_users(root: Path) -> tuple[AcceleratorUser, ...]:
    found, use = [], devices.look()
    for pid in sorted({*use.by_pid, *use.unsaid}):
        amount = None if pid in use.unsaid else use.by_pid[pid]
        name, user, ours = _process(pid, root)
        found.append(AcceleratorUser(pid=pid, name=name, user=user, bytes=amount, is_ours=ours))
    return tuple(found)


def _process(pid: int, root: Path) -> tuple[str, str, bool]:
    """(name, user, whether it belongs to a run below this root), as far as this user may see."""
    folder = Path("/proc", str(pid))
    try:
        name, uid = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip(), folder.stat().st_uid
    except OSError:
        return "unknown", "unknown", False
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    try:
        ours = f"{ENV_RUN_DIR}={root}/".encode() in (folder / "environ").read_bytes()
    except OSError:
        ours = False
    return name, user, ours


def _settings_lines(folder: str, *patterns: str) -> Iterator[tuple[Path, str]]:
    """Lines of settings in the order in which systemd reads them: /etc hides a file of the same name in /run and /usr/lib, by name order."""
    files: dict[str, Path] = {}
    for top in ("/usr/lib", "/run", "/etc"):
        for pattern in patterns:
            for path in Path(top, folder).glob(pattern):
                files[path.name if "/" in pattern or pattern.startswith("*") else ""] = path
    for path in (files[name] for name in sorted(files)):
        for line in _text(path).splitlines():
            if line.strip() and not line.lstrip().startswith(("#", ";", "[")):
                yield path, line


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def answer(root: Path, asked: dict[str, Any]) -> dict[str, Any]:
    read_files = asked.get("read_files") is True
    pythons = {program: look_at_python(program, [str(name) for name in modules], read_files) for program, modules in asked.get("pythons", {}).items()}
    found = [workloads.find(root, decode(Workload, each, "displace")) for each in asked.get("displace", ())]
    programs = [look_at_program(decode(ProgramAsked, each, "programs")) for each in asked.get("programs", ())]
    host = look(root) if asked.get("host", True) else None
    caps = {} if host is None else means.of_host(CapPart(grade=CapGrade(host.cap_grade), means=host.cap_means), host.accelerators)
    environments = [each for lock in asked.get("locks", ()) for each in built(HostPaths(root), str(lock))]
    return {"host": host, "caps": caps, "pythons": pythons, "displace": found, "programs": programs, "environments": environments}


def look_at_program(asked: ProgramAsked) -> ProgramSurvey:
    """Whether a command could be executed here, from where it would be."""
    folder, name = asked.working_directory, asked.program
    if folder is not None and not Path(folder).is_dir():
        return ProgramSurvey(candidate=asked.candidate, fault=f"{folder} is no directory", fix="correct working_directory")
    there = Path(folder or "/") / name
    if shutil.which(str(there) if "/" in name else name, path=asked.path) is not None:
        return ProgramSurvey(candidate=asked.candidate, fault=None)
    if "/" in name and there.is_file():
        fix = f"chmod +x {shlex.quote(str(there))}, or name the program that runs it first"
        return ProgramSurvey(candidate=asked.candidate, fault=f"{there} is not executable", fix=fix)
    return ProgramSurvey(candidate=asked.candidate, fault=f"{name!r} is not found", fix="install it, or write its whole path")


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("usage: python -m fleetd.host.survey ROOT QUESTION", file=sys.stderr)
        return 2
    print(dumps(answer(Path(arguments[0]).absolute(), json.loads(arguments[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
