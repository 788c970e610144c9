"""Loaded by the trainer of a chaos run before anything else (PYTHONPATH of its plan): one of its syncs or renames is its last.

The trainer knows nothing of fleetd and has no fault points of its own. CHAOS_TRAINER is `~40:/tmp/purse`, as in fleetd/faults.py.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

if os.environ.get("CHAOS_TRAINER") and "trainer" in sys.orig_argv:
    _number, _purse = os.environ["CHAOS_TRAINER"].removeprefix("~").split(":", 1)
    _left = random.SystemRandom().randint(1, int(_number))

    def _counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            global _left
            _left -= 1
            if _left == 0:
                for coin in sorted(os.listdir(_purse)):
                    if coin.startswith("coin-"):
                        _rename(f"{_purse}/{coin}", f"{_purse}/trainer-{os.getpid()}-{act.__name__}")
                        os.kill(os.getpid(), signal.SIGKILL)
            return act(*arguments, **named)

        return counted

    _rename = os.rename
    os.fsync, os.replace, os.rename = _counted(os.fsync), _counted(os.replace), _counted(os.rename)
