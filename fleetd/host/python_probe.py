"""Run by an interpreter that a plan names, as a file and alone: `PYTHON -I python_probe.py READ_FILES MODULE...` prints what it is.

It imports nothing that it looks for, since torch alone takes seconds, and nothing of ours, since our packages are never on the path of
a trainer. Where files are read, each one is compared with the hash that its installer recorded (the RECORD of PEP 376 and 627).
"""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

READ_BYTES = 1024 * 1024
DAMAGED_NAMED_MAX = 8
READERS = 4
OWN_BOOKKEEPING = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json")
"""Written by the installer about this very installation: no two need to agree."""


def describe(modules: list[str], are_files_read: bool) -> dict[str, Any]:
    torch_version, cuda = _torch()
    packages: dict[str, Any] = {}
    with ThreadPoolExecutor(READERS) as readers:
        for distribution in importlib.metadata.distributions():
            name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()  # as PEP 503 compares names
            if name and name not in packages:  # the first on the path is the one that is imported
                packages[name] = _package(distribution, readers, are_files_read)
    return {
        "version": platform.python_version(), "implementation": sys.implementation.name, "architecture": platform.machine(),
        "missing": [name for name in modules if importlib.util.find_spec(name) is None], "torch": torch_version, "cuda": cuda,
        "packages": packages, "are_files_read": are_files_read,
    }


def _package(distribution: importlib.metadata.Distribution, readers: ThreadPoolExecutor, are_files_read: bool) -> dict[str, Any]:
    # What lies outside the packages' folder, a script or a page of a manual, is imported by nobody and carries this environment's path.
    inside = (file for file in distribution.files or [] if not str(file).startswith(".."))
    recorded = [file for file in inside if file.hash is not None and file.hash.mode == "sha256"]
    found: dict[str, Any] = {"version": distribution.version, "files": len(recorded), "files_sha256": "", "damaged": [], "damaged_count": 0}
    if not are_files_read:
        return found
    pairs = [(file, digest) for file, digest in zip(recorded, readers.map(lambda file: _sha256(str(file.locate())), recorded))]  # noqa: B905 - a Python that is too old has to get through here
    damaged = [
        str(file) for file, digest in pairs
        if digest is None or file.hash is None or base64.urlsafe_b64encode(digest).decode().rstrip("=") != file.hash.value
    ]
    same = hashlib.sha256()
    for name, digest in sorted((str(file), digest) for file, digest in pairs):
        if os.path.basename(name) not in OWN_BOOKKEEPING:
            same.update(f"{name} {digest.hex() if digest else 'missing'}\n".encode())
    found.update(files_sha256=same.hexdigest(), damaged=damaged[:DAMAGED_NAMED_MAX], damaged_count=len(damaged))
    return found


def _sha256(path: str) -> bytes | None:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
    except OSError:
        return None
    return digest.digest()


def _torch() -> tuple[str | None, str | None]:
    """torch's build string and its CUDA, read out of its version.py."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    try:
        with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError):
        return None, None
    values = {}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                values[target.id] = node.value.value
    version, cuda = values.get("__version__"), values.get("cuda")
    return (None if version is None else str(version)), (None if cuda is None else str(cuda))


if __name__ == "__main__":
    json.dump(describe(sys.argv[2:], sys.argv[1] == "read"), sys.stdout)
