"""What a host gets besides our code: from here for its own architecture, from a wheel for another one, and never unchecked."""

from __future__ import annotations

import base64
import hashlib
import platform
import zipfile
from pathlib import Path

import pytest

from fleetd.coordinator.libraries import library_files
from policies.errors import DataDamaged, RequestRefused

OTHER = "aarch64" if platform.machine() == "x86_64" else "x86_64"


def wheel(folder: Path, contents: dict[str, bytes], *, lies_about: str = "") -> Path:
    """A psutil wheel for the other architecture, with the list of hashes that every wheel carries."""
    def listed(path: str, data: bytes) -> str:
        digest = hashlib.sha256(b"" if path == lies_about else data).digest()
        return f"{path},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(data)}\n"

    folder.mkdir(exist_ok=True)
    path = folder / f"psutil-9.9.9-cp36-abi3-manylinux_2_17_{OTHER}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
        archive.writestr("psutil-9.9.9.dist-info/RECORD", "".join(listed(*each) for each in contents.items()))
    return path


CONTENTS = {
    "psutil/__init__.py": b"x = 1\n", "psutil/_psutil_linux.abi3.so": b"\x7fELF", "psutil/_pswindows.py": b"", "psutil/tests/test_a.py": b"",
    "psutil-9.9.9.dist-info/LICENSE": b"BSD",
}


def test_this_architecture_is_served_from_what_is_installed_here(tmp_path: Path) -> None:
    found = library_files(platform.machine(), tmp_path / "wheels")

    assert {"psutil/__init__.py", "pynvml.py"} <= found.keys() and any(path.endswith(".abi3.so") for path in found)
    assert not any("_pswindows" in path or "__pycache__" in path or path == "example.py" for path in found)
    assert not (tmp_path / "wheels").exists()


def test_another_architecture_is_served_from_a_wheel_in_the_folder(tmp_path: Path) -> None:
    wheel(tmp_path, CONTENTS)

    found = library_files(OTHER, tmp_path)

    assert found["psutil/_psutil_linux.abi3.so"] == b"\x7fELF" and "pynvml.py" in found
    assert not any("tests" in path or "_pswindows" in path for path in found)


def test_a_wheel_that_is_not_what_its_list_says_is_refused(tmp_path: Path) -> None:
    wheel(tmp_path, CONTENTS, lies_about="psutil/__init__.py")
    with pytest.raises(DataDamaged, match=r"psutil/__init__\.py"):
        library_files(OTHER, tmp_path)
    wheel(tmp_path, CONTENTS).write_bytes(b"no zip")
    with pytest.raises(DataDamaged, match="no wheel that can be read"):
        library_files(OTHER, tmp_path)


def test_a_wheel_that_cannot_be_had_is_named_with_the_command_that_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestRefused, match=f"psutil for {OTHER} is missing") as caught:
        library_files(OTHER, tmp_path / "wheels")

    assert f"manylinux2014_{OTHER}" in caught.value.fix and str(tmp_path / "wheels") in caught.value.fix
