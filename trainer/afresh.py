"""Becoming a fresh process: same pid, same argv, same start (exec), so whoever watches the trainer need not be told."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from policies.facts import ENV_RESUME


def begin_afresh(is_asked_to_stop: Callable[[], bool]) -> None:
    """Become a fresh process of the same command, which takes the newest checkpoint; returns only when a stop was asked for before.
    Signals wait until it listens."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    if is_asked_to_stop():
        return
    os.environ[ENV_RESUME] = ""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 (the very command that we are)
