"""One log line per change, in key=value words that a person and grep both read.

The journal is history, the log is commentary: a failure to write a log never hurts a process, so every error here is swallowed.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from fleetd.bounded import hold_within

LOG_BYTES_MAX = 4 * 1024 * 1024
LOG_FILES_KEPT = 3
STANDARD_ERROR_BYTES_MAX = 2 * LOG_BYTES_MAX
"""More than a file that is turned in time, so that only what is not turned loses its middle."""

logger = logging.getLogger("fleetd")


def to_file(path: Path) -> None:
    """Send this process's log lines to `path`, rotated by size. Called once, at the start of a process."""
    logging.raiseExceptions = False
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, delay=True)
    handler.setFormatter(formatter)
    _use(handler)
    if _is_standard_error(path):
        logger.addHandler(_HeldStandardError())  # whoever started us sent our last words to the same file, which is turned under them


def to_standard_error() -> None:
    """Send this process's log lines to standard error, a file that whoever started us keeps for that and that is held to its bound."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _use(handler)
    logger.addHandler(_HeldStandardError())


class _HeldStandardError(logging.Handler):
    """With each line, look at what standard error takes on disk: tracebacks and warnings of libraries go there beside our own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            hold_within(2, STANDARD_ERROR_BYTES_MAX)


def _use(handler: logging.Handler) -> None:
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _is_standard_error(path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(2), os.stat(path))
    except OSError:
        return False


def changed(event: str, **fields: object) -> None:
    """Log that something changed: `event=run_placed run=b7 host=n2 because="most free memory"`."""
    logger.info("event=%s %s", event, _words(fields))


def failed(event: str, **fields: object) -> None:
    """Log something that went wrong and was handled."""
    logger.warning("event=%s %s", event, _words(fields))


def _words(fields: dict[str, object]) -> str:
    return " ".join(f"{name}={_word(value)}" for name, value in fields.items())


def _word(value: object) -> str:
    text = str(value).replace("\n", "\\n")
    return f'"{text}"' if " " in text or not text else text
