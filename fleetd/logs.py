"""One log line per change, in key=value words that a person and grep both read.

The journal is history, the log is commentary: a failure to write a log never hurts a process, so every error here is swallowed.
"""

from __future__ import annotations

import logging
import logging.handlers
import time
from pathlib import Path

LOG_BYTES_MAX = 4 * 1024 * 1024
LOG_FILES_KEPT = 3

logger = logging.getLogger("fleetd")


def to_file(path: Path) -> None:
    """Send this process's log lines to `path`, rotated by size. Called once, at the start of a process."""
    logging.raiseExceptions = False
    formatter = logging.Formatter("%(asctime)sZ %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=LOG_FILES_KEPT, delay=True)
    handler.setFormatter(formatter)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


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
