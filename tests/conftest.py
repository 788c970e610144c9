"""House rule of every test: where CI runs, nothing skips. What a test needs is installed by `.ci/run`, or the run fails and says what was missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

# The same examples wherever the suite runs, and no example may be too slow: what is green here is green on the next machine. New examples:
# `pytest --hypothesis-profile=default`.
settings.load_profile("ci")

# A shell ignores Ctrl-C for what it runs in the background, and what ignores a signal hands that on to its children: they would be tests of nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} skipped, and nothing skips in CI: {call.excinfo.value if call.excinfo else 'no reason given'}"
    return report
