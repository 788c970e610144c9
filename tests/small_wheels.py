"""Small wheels made by hand, as PEP 427 has them: no builder, no network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path


def small_wheel(
    folder: Path, name: str, version: str = "1.0", *, requires: tuple[str, ...] = (), tag: str = "py3-none-any", files: dict[str, str] | None = None,
    script: str = "",
) -> Path:
    """A wheel with one module of the package's name, which knows its version; `script` is the name of a command that prints it."""
    folder.mkdir(parents=True, exist_ok=True)
    info, module = f"{name}-{version}.dist-info", name.replace("-", "_")
    contents = {f"{module}/__init__.py": f"version = {version!r}\n\n\ndef main():\n    print({name!r}, version)\n", **(files or {})}
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
    contents[f"{info}/METADATA"] = "\n".join(lines) + "\n"
    contents[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: {str(tag.endswith('any')).lower()}\nTag: {tag}\n"
    if script:
        contents[f"{info}/entry_points.txt"] = f"[console_scripts]\n{script} = {module}:main\n"
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in contents.items()]
    contents[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in contents.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return wheel


def lock_of(path: Path, *wheels: Path, hashed: bool = False) -> Path:
    """A lock that pins exactly these wheels."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name}=={version}" + (f" --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}" if hashed else ""))
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
