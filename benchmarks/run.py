"""Every benchmark of this folder, one after the other; each prints a table. Figures are of this machine, in this run, beside each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    failed = 0
    for path in sorted(HERE.glob("*.py")):
        if path.name != "run.py":
            print(f"\n## {path.stem}\n", flush=True)
            failed += subprocess.run([sys.executable, str(path)], check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
