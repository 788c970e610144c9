"""The two libraries that a host needs and that fleetd brings along: psutil for its architecture, and nvidia-ml-py.

From what is installed here where the architecture is the same, else from a wheel in `<state>/wheels`, which pip fetches when it is not
there. Either way each file is checked against the list of hashes that its package carries.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import platform
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from policies.errors import DataDamaged, RequestRefused

FETCH_SECONDS_MAX = 120.0
PACKAGES = {"psutil": ("psutil/",), "nvidia-ml-py": ("pynvml.py",)}
"""What of each package a host imports; its licence comes with it."""
PLATFORMS = {machine: tuple(f"{tag}_{machine}" for tag in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")) for machine in ("x86_64", "aarch64")}
_OTHER_SYSTEMS = ("_psaix", "_psbsd", "_psosx", "_pssunos", "_pswindows")


def library_files(machine: str, wheels: Path) -> dict[str, bytes]:
    """Every library file for hosts of this architecture, by its path. RequestRefused with the missing wheel's name and how to get it."""
    found = _installed("nvidia-ml-py") or _from_wheel("nvidia-ml-py", "any", wheels)
    own = _installed("psutil") if machine == platform.machine() else {}
    # Only the stable ABI serves every Python 3 that a host may have; a distribution's own build serves one.
    is_stable = any(".abi3." in path for path in own)
    return {**found, **(own if is_stable else _from_wheel("psutil", machine, wheels))}


def _installed(package: str) -> dict[str, bytes]:
    """The files of an installed package; nothing when it is not installed here as a whole."""
    try:
        listed = distribution(package).files or []
    except PackageNotFoundError:
        return {}
    hashes = {str(path): path.hash.value if path.hash is not None else "" for path in listed}
    return _chosen(package, hashes, lambda path: Path(str(distribution(package).locate_file(path))).read_bytes(), package)


def _from_wheel(package: str, machine: str, wheels: Path) -> dict[str, bytes]:
    wheel = _wheel(package, machine, wheels) or _fetch(package, machine, wheels)
    try:
        with zipfile.ZipFile(wheel) as archive:
            record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
            rows = csv.reader(io.StringIO(archive.read(record).decode()))
            hashes = {row[0]: row[1].partition("=")[2] for row in rows if len(row) > 1}
            return _chosen(package, hashes, archive.read, str(wheel))
    except (OSError, zipfile.BadZipFile, KeyError, StopIteration, UnicodeDecodeError) as fault:
        raise _damaged(str(wheel), f"it is no wheel that can be read: {fault}") from fault


def _chosen(package: str, hashes: dict[str, str], read: Callable[[str], bytes], where: str) -> dict[str, bytes]:
    found = {}
    for path, said in hashes.items():
        if not _is_wanted(path, PACKAGES[package]):
            continue
        data = read(path)
        if base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=") != said:
            raise _damaged(where, f"{path} is not what the package's list of hashes says")
        found[path] = data
    return found


def _is_wanted(path: str, wanted: Iterable[str]) -> bool:
    if "/__pycache__/" in path or ".." in path or any(other in path for other in _OTHER_SYSTEMS) or "/tests/" in path:
        return False
    return path.startswith(tuple(wanted)) or path.rsplit("/", 1)[-1].upper().startswith(("LICENSE", "LICENCE"))


def _wheel(package: str, machine: str, wheels: Path) -> Path | None:
    """The newest wheel in the folder that fits."""
    stem = package.replace("-", "_")
    fits = f"{stem}-*-abi3-*{machine}*.whl" if machine != "any" else f"{stem}-*-any.whl"
    return max(wheels.glob(fits), key=lambda path: path.stat().st_mtime, default=None)


def _fetch(package: str, machine: str, wheels: Path) -> Path:
    """Let pip bring the wheel, in the version that is installed here."""
    try:
        wanted = f"{package}=={distribution(package).version}"
    except PackageNotFoundError:
        wanted = package
    argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(wheels)]
    if machine != "any":
        argv += ["--implementation", "cp", "--abi", "abi3", "--python-version", "3.10"]
        argv += [word for each in PLATFORMS[machine] for word in ("--platform", each)]
    argv.append(wanted)
    wheels.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=FETCH_SECONDS_MAX, check=False)
        trouble = (done.stderr.strip() or f"exit status {done.returncode}") if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as fault:
        trouble = str(fault)
    wheel = _wheel(package, machine, wheels)
    if wheel is None:
        raise RequestRefused(
            f"{package} for {machine} is missing", where=str(wheels), what=f"there is no wheel of it, and pip brought none: {trouble[-300:]}",
            fix=f"where there is a network: {shlex.join(['python3', *argv[1:]])}; then copy the wheel into {wheels}",
        )
    return wheel


def _damaged(where: str, what: str) -> DataDamaged:
    return DataDamaged("a library for hosts is damaged", where=where, what=what, fix="install it again, or remove that wheel and launch again")
