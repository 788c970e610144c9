"""The run book's own commands, as they stand in FLEET_RUN.md, on a real installation: they work, with the exit codes it promises."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from live_fleet import Fleet, step_of

pytestmark = pytest.mark.live

RUN_BOOK = Path(__file__).resolve().parents[2] / "FLEET_RUN.md"
PLAN_IN_THE_BOOK = "examples/manpages/plan.yaml"


def first_block_after(mark: str) -> list[list[str]]:
    """The commands of the first `sh` block after `mark`, each as its words without `fleetd`."""
    text = RUN_BOOK.read_text(encoding="utf-8").split(mark, 1)[1]
    found = re.search(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    assert found
    commands = [shlex.split(line) for line in found.group(1).splitlines()]
    assert all(words[0] == "fleetd" for words in commands)
    return [words[1:] for words in commands]


def test_a_fleet_in_five_commands_ends_with_a_report(fleet: Fleet) -> None:
    place = fleet.root / PLAN_IN_THE_BOOK
    place.parent.mkdir(parents=True)
    fleet.plan("manpages", candidates={"slow": {"training": {"steps": 40}}}).rename(place)
    commands = first_block_after("tests/live/test_runbook_commands.py runs this block")
    assert [words[0] for words in commands] == ["check", "launch", "status", "wait", "report"]

    said = {words[0]: fleet(*words, expect=0).stdout for words in commands}

    assert said["check"].startswith(f"{PLAN_IN_THE_BOOK} is a valid plan: campaign manpages")
    assert said["status"].startswith("OK")
    assert "manpages is evaluated" in said["wait"]
    report = re.search(r"page +(\S+)", said["report"])
    assert report
    assert Path(report.group(1)).stat().st_size > 10_000


def test_the_stop_procedure_leaves_a_checkpoint_at_the_step_and_its_undo_goes_on_from_there(fleet: Fleet) -> None:
    fleet.launch(fleet.plan("long", candidates={"one": {"training": {"steps": 100_000}}}))
    fleet.until(lambda document: step_of(document["runs"][0]) > 25, "training")
    stop, wait = ([word.replace("TARGET", "long") for word in words] for words in first_block_after("### Stop"))

    fleet(*stop, expect=0)
    fleet(*wait, expect=6)

    def is_told(document: dict[str, Any]) -> bool:
        run = document["runs"][0]
        return bool(run["checkpoint_on_host"]["value"]["step"] == run["step"]["value"])

    run = fleet.until(is_told, "its last step is that of its checkpoint")["runs"][0]
    assert (run["state"], run["attempts_ended"][-1]["exit"]["exit_code"]) == ("stopped", 10), f"{run}\n{fleet.logs()}"
    fleet("resume", "long", expect=0)
    fleet.until(lambda document: document["runs"][0]["attempt"] == 2 and step_of(document["runs"][0]) > run["step"]["value"], "it goes on")
    log = (fleet.run_dir(run) / "log.jsonl").read_text(encoding="utf-8").splitlines()
    starts = [json.loads(line) for line in log if '"start"' in line]
    assert [start["step"] for start in starts] == [0, run["step"]["value"]]
