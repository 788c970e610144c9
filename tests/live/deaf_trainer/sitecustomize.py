"""Loaded by a trainer of the deadline matrix before anything else (PYTHONPATH of its plan): one of its validations never ends.

It sleeps inside a batch, where nobody asks whether to stop: SIGTERM is heard and changes nothing, as in a library call that hangs.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

if os.environ.get("DEAF_FROM_VALIDATION") and "trainer" in sys.orig_argv:
    import trainer.scoring

    _score, _left = trainer.scoring.score_documents, int(os.environ["DEAF_FROM_VALIDATION"])

    def _score_or_hang(*arguments: Any, **named: Any) -> Any:
        global _left
        _left -= 1
        if _left == 0:
            time.sleep(3600)
        return _score(*arguments, **named)

    trainer.scoring.score_documents = _score_or_hang
