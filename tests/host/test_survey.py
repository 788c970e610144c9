"""A look at this very machine and at real interpreters: what is asked of them is what is there."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from small_python import site_of, small_python

from fleetd.host import survey
from fleetd.wire import decode
from policies.surveys import HostSurvey, PythonSurvey


def test_this_machine_is_described_by_its_own_words(tmp_path: Path) -> None:
    question = json.dumps({"pythons": {sys.executable: ["json", "no_such_module"]}, "read_files": False})
    done = subprocess.run([sys.executable, "-m", "fleetd.host.survey", str(tmp_path), question], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    host = decode(HostSurvey, answer["host"])
    python = decode(PythonSurvey, answer["pythons"][sys.executable])

    assert host.hostname == platform.node() and host.kernel == platform.release()
    assert host.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert host.root_fault is None and host.disk_free_bytes and list(tmp_path.glob(".fleetd-look-*")) == []
    machine_id = Path("/etc/machine-id").read_text().strip() if Path("/etc/machine-id").exists() else ""
    assert not machine_id or machine_id not in done.stdout, "machine-id(5): the id itself is not handed around"
    assert python.fault is None and python.missing == ("no_such_module",) and python.version == platform.python_version()


def test_an_untouched_environment_has_no_damage_and_equals_its_twin(tmp_path: Path) -> None:
    first = survey.look_at_python(str(small_python(tmp_path / "one")), [], True)
    second = survey.look_at_python(str(small_python(tmp_path / "elsewhere" / "two")), [], True)

    assert first.packages["small"].damaged_count == 0 and first.packages["small"].files == 2
    assert first.packages["small"] == second.packages["small"], "where an environment lies does not count"


def test_one_changed_byte_of_an_installed_file_is_named(tmp_path: Path) -> None:
    python = small_python(tmp_path / "env")
    before = survey.look_at_python(str(python), [], True).packages["small"]
    changed = site_of(tmp_path / "env") / "small" / "__init__.py"
    changed.write_text(changed.read_text().replace("1", "2"))

    after = survey.look_at_python(str(python), [], True).packages["small"]
    assert after.damaged == ("small/__init__.py",) and after.damaged_count == 1
    assert after.files_sha256 != before.files_sha256

    changed.unlink()
    assert survey.look_at_python(str(python), [], True).packages["small"].damaged == ("small/__init__.py",)


@pytest.mark.parametrize(("text", "words"), [
    (None, "No such file"), ("#!/bin/sh\necho broken >&2; exit 3\n", "broken"), ("#!/bin/sh\nexit 3\n", "exit status 3"),
    ("no program", "Exec format"),
])
def test_what_is_no_python_is_said_in_its_own_words(tmp_path: Path, text: str | None, words: str) -> None:
    program = tmp_path / "python"
    if text is not None:
        program.write_text(text)
        program.chmod(0o755)
    assert words in (survey.look_at_python(str(program), [], False).fault or "")


def test_a_root_that_can_not_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert survey.look(tmp_path / "file" / "root").root_fault == f"{tmp_path / 'file'} is a file"
    assert "Read-only" in (survey.look(Path("/sys/fleetd")).root_fault or "") or "denied" in (survey.look(Path("/sys/fleetd")).root_fault or "")
