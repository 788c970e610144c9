"""Work of others for tests: holds memory, writes its own command line down, and ends when it is asked, or does not.

    hog.py FOLDER NAME MIB [deaf] [child]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MIB = 1024**2


def main(folder: str, name: str, size: str, *more: str) -> None:
    held = bytearray(int(size) * MIB)
    for offset in range(0, len(held), 4096):
        held[offset] = 1
    if "deaf" in more:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "child" in more:
        subprocess.Popen([sys.executable, "-S", __file__, folder, f"{name}-child", "1", *(["deaf"] if "deaf child" in " ".join(more) else [])])
    told = {"pid": os.getpid(), "argv": sys.argv, "folder": os.getcwd(), "seen": os.environ.get("HOG_SAYS")}
    place = Path(folder, f"{name}.json")
    place.with_suffix(".tmp").write_text(json.dumps(told), encoding="utf-8")
    place.with_suffix(".tmp").replace(place)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
