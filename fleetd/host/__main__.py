"""How a program of a release is started: `python3 -I <release>/fleetd/host/__main__.py agent ROOT`, or another of PROGRAMS.

Isolated (-I), no variable and no folder of the user decides what is imported: the release first, then the libraries that came with it.
Run from an installation, where no libraries lie beside, the interpreter's own are used.
"""

import sys
from importlib import import_module
from pathlib import Path

PYTHON_OLDEST = (3, 10)
PROGRAMS = ("agent", "supervisor", "shim", "survey", "sweep", "stager", "environment")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in PROGRAMS:
        sys.stderr.write(f"usage: python3 -I {__file__} {'|'.join(PROGRAMS)} ...\n")
        return 2
    if sys.version_info < PYTHON_OLDEST:  # said here: nothing that comes next could be read by it
        sys.stderr.write("%s is Python %d.%d, %d.%d or newer is needed\n" % (sys.executable, *sys.version_info[:2], *PYTHON_OLDEST))  # noqa: UP031
        return 3
    release = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(release), str(release / "libraries")]
    found: int = import_module(f"fleetd.host.{arguments[0]}").main(arguments[1:])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
