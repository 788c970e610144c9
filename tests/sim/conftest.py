"""The simulation is a package of its own below tests/: let it be found from wherever pytest was started."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = str(Path(__file__).absolute().parent.parent.parent)
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
