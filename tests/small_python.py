"""A real environment with one small installed distribution, recorded as installers record it."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from pathlib import Path


def small_python(root: Path, version: str = "1.0", modules: tuple[str, ...] = ("small",)) -> Path:
    """Make the environment `root` with the distribution `small`, which brings `modules`; its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    site = site_of(root)
    info = site / f"small-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: small\nVersion: {version}\n", encoding="utf-8")
    for module in modules:
        (site / module).mkdir()
        (site / module / "__init__.py").write_text(f"version = {version!r}\n", encoding="utf-8")
    lines = []
    for path in (*(site / module / "__init__.py" for module in modules), info / "METADATA"):
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        lines.append(f"{path.relative_to(site)},sha256={digest},{path.stat().st_size}")
    (info / "RECORD").write_text("\n".join([*lines, f"{info.name}/RECORD,,"]) + "\n", encoding="utf-8")
    return root / "bin" / "python"


def site_of(root: Path) -> Path:
    """The folder of installed packages."""
    return next(root.glob("lib/python*/site-packages"))
