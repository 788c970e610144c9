"""A little chaos for CI: ten strikes from outside and ten deaths at boundaries, against an undisturbed twin. `make chaos KILLS=300` does more."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import chaos

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]


def test_twenty_kills_anywhere_change_no_weight_and_leave_nothing_behind(capfd: pytest.CaptureFixture[str]) -> None:
    code = chaos.main(["--kills", "20", "--seed", "20", "--per-round", "10"])

    said = capfd.readouterr().out
    assert code == 0, said
    counted = json.loads(said[said.rindex("\n{") :])
    assert counted["kills_total"] >= 20, "one strike may hit several processes together"
    assert counted["faults"] == []
