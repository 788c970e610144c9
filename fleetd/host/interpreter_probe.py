"""Run by an interpreter of which an environment may be made, as a file and alone: `PYTHON -I interpreter_probe.py` prints what it is.

The words under `markers` are those of PEP 508, by which lines of a lock hold on one machine and not on another.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
import sysconfig
from typing import Any

NEEDED = ("venv", "zlib")
"""Of the standard library: to make the environment, and to unpack wheels into it."""


def describe() -> dict[str, Any]:
    version = sys.version_info
    full = ".".join(map(str, version[:3])) + ("" if version[3] == "final" else version[3][0] + str(version[4]))
    is_free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return {
        "version": platform.python_version(), "implementation": sys.implementation.name, "machine": platform.machine(),
        "abi": f"cp{version[0]}{version[1]}{'t' if is_free_threaded else ''}",
        "libc": _libc(), "lacks": [name for name in NEEDED if importlib.util.find_spec(name) is None],
        "markers": {
            "implementation_name": sys.implementation.name, "implementation_version": full, "os_name": os.name,
            "platform_machine": platform.machine(), "platform_release": platform.release(), "platform_system": platform.system(),
            "platform_version": platform.version(), "platform_python_implementation": platform.python_implementation(),
            "python_full_version": platform.python_version(), "python_version": ".".join(map(str, version[:2])), "sys_platform": sys.platform,
        },
    }


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        return ""


if __name__ == "__main__":
    json.dump(describe(), sys.stdout)
