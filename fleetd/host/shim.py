"""The tiny parent of one trainer: `python -m fleetd.host.shim RUN_DIR ATTEMPT`.

The supervisor makes attempts/NNNN (`rundir.create_attempt`) and starts this program as its direct child, in its own session,
with `launch.program_argv("shim", run_dir, attempt)` and `launch.program_environment(...)`. The shim takes trainer.lock, refuses
(exit 3) unless its attempt is the newest, unstarted and wanted, chooses what to resume from (`rundir.choose_resume`), writes
attempt.json, lets the trainer exec, waits, writes exit.json, and leaves when the tree is empty.
"""

from __future__ import annotations

import sys

EXIT_REFUSED = 3


def main(arguments: list[str]) -> int:
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
