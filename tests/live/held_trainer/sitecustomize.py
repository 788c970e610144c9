"""Loaded by a trainer that a live test holds, before anything else (PYTHONPATH of its plan): once it has logged a step at which it is held,
or one after it, it waits there until it is let go or asked to stop. `holds.py` says where that is.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

if os.environ.get("HOLDS") and "trainer" in sys.orig_argv:
    import trainer.records
    import trainer.stopping

    _log, _hear, _is_asked = trainer.records.RunRecords.log, trainer.stopping.Stop._hear, False

    def _log_and_wait(records: Any, **record: Any) -> None:
        _log(records, **record)
        while "loss" in record and not _is_asked and any(int(held) <= record["step"] for held in os.listdir(os.environ["HOLDS"])):
            time.sleep(0.02)

    def _hear_and_go_on(stop: Any, *arguments: Any) -> None:
        global _is_asked
        _is_asked = True
        _hear(stop, *arguments)

    trainer.records.RunRecords.log = _log_and_wait  # type: ignore[method-assign]
    trainer.stopping.Stop._hear = _hear_and_go_on  # type: ignore[method-assign]
