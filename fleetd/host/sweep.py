"""The sweep without a coordinator: `python -m fleetd.host.sweep ROOT...`, run by a timer or by cron. Starts missing supervisors, nothing else.

It looks once and keeps nothing. A run whose shim lives is left to that shim, which starts a supervisor within seconds.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from fleetd import logs
from fleetd.host.reports import Reports
from fleetd.paths import HostPaths


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        print("usage: python -m fleetd.host.sweep ROOT...", file=sys.stderr)
        return 2
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logs.logger.handlers[:] = [handler]
    logs.logger.setLevel(logging.INFO)
    logs.logger.propagate = False
    for root in arguments:
        Reports(HostPaths(Path(root).absolute())).sweep()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
