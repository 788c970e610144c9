"""Output that never ends is held to its bound on disk: the writer notices nothing, both ends stay, and whoever follows goes on."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import WAIT_SECONDS, HostRun, spec_for, wait_for

from fleetd import bounded
from fleetd.bounded import BLOCK_BYTES, OUTPUT_BYTES_MAX, hold_path_within
from fleetd.coordinator.api import as_text, read_text
from fleetd.logs import STANDARD_ERROR_BYTES_MAX
from policies.facts import RunState, Want

LINES, LINE_BYTES, BOUND = 100_000, 80, 1024 * 1024
WRITER = f"""
import os
for number in range({LINES}):
    os.write(1, b"line %06d %s\\n" % (number, b"x" * {LINE_BYTES - 13}))
"""
TALKER = """
from fleetd import logs
logs.to_standard_error()
for number in range(15_000):
    logs.changed("said", number=number, text="x" * 1000)
"""


def on_disk(path: Path) -> int:
    return path.stat().st_blocks * 512


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A process that appends numbered lines to a file as fast as it can."""
    path = tmp_path / "stdout.log"
    with open(path, "ab") as file:
        process = subprocess.Popen([sys.executable, "-S", "-c", WRITER], stdout=file)
    yield path, process
    assert process.wait(200) == 0


def numbers_in(text: str) -> list[int]:
    return [int(line[5:11]) for line in text.splitlines() if line.startswith("line ") and len(line) == LINE_BYTES - 1]


def test_a_file_is_held_to_its_bound_while_its_writer_goes_on_and_both_ends_stay(writer: tuple[Path, subprocess.Popen[bytes]]) -> None:
    path, process = writer
    while process.poll() is None:
        hold_path_within(path, BOUND)
    hold_path_within(path, BOUND)

    assert path.stat().st_size == LINES * LINE_BYTES, "offsets stay what they were"
    assert on_disk(path) <= BOUND
    data = path.read_bytes()
    assert data.startswith(b"line 000000 ") and data.endswith(b"x\n")
    tail = numbers_in(data[-BOUND // 4:].decode())
    assert tail == list(range(tail[0], LINES)), "what was said last is whole"


def test_whoever_follows_a_held_file_reads_on_and_is_told_what_was_dropped(writer: tuple[Path, subprocess.Popen[bytes]]) -> None:
    path, process = writer
    offset, pages = 0, []
    while True:
        is_over = process.poll() is not None
        hold_path_within(path, BOUND)
        page = read_text(path, offset, 3 * BLOCK_BYTES + 7)  # slower than the writer
        pages.append(page["data"])
        assert page["next"] >= offset
        if is_over and page["next"] == offset:
            break
        offset = page["next"]

    text = "".join(pages)
    numbers = numbers_in(text)
    assert offset == LINES * LINE_BYTES
    assert numbers == sorted(set(numbers)) and numbers[0] == 0 and numbers[-1] == LINES - 1, "in order, none twice, from the first to the last"
    assert "\0" not in text
    assert (len(numbers) < LINES - 2) == ("bytes were dropped here" in text), "what is missing is said"


def test_a_tail_that_begins_in_the_hole_begins_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"".join(b"%07d\n" % number for number in range(1_000_000)))
    dropped = hold_path_within(path, BOUND)

    page = read_text(path, -(BOUND // 2 + 3 * BLOCK_BYTES), BOUND * 2)

    assert dropped > 6 * BOUND and on_disk(path) <= BOUND
    assert "bytes were dropped here" in page["data"] and page["data"].endswith("0999999\n") and "\0" not in page["data"]
    assert hold_path_within(path, BOUND) == 0, "it is seldom done"


def test_a_hole_that_came_over_a_wire_is_put_into_words() -> None:
    data = b"before\n" + b"\0" * 100_000 + b"after \0 and on\n"

    page = as_text(data, 50, 1_000_000)

    assert page["data"] == "before\n\n[100000 bytes were dropped here: this file has reached its bound]\nafter \0 and on\n"
    assert page["next"] == 50 + len(data)


def test_where_no_hole_can_be_punched_the_end_is_kept_aside_and_the_writer_and_the_follower_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "stdout.log"

    def refuse(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(bounded, "_punch", refuse)
    with open(path, "ab", buffering=0) as file:
        file.write(b"x" * 2 * BOUND + b"the end\n")
        followed = read_text(path, 0, 4 * BOUND)["next"]
        hold_path_within(path, BOUND)
        file.write(b"and on\n")

    assert path.read_bytes() == b"and on\n"
    assert path.with_name("stdout.log.1").read_bytes().endswith(b"xthe end\n")
    assert read_text(path, followed, BOUND) == {"data": "and on\n", "next": 7, "size": 7}


def test_a_supervisor_holds_what_its_trainer_prints(tmp_path: Path) -> None:
    bytes_printed = OUTPUT_BYTES_MAX + OUTPUT_BYTES_MAX // 8
    run = HostRun(tmp_path, spec_for(argv=("sh", "-c", f"yes | head -c {bytes_printed}; echo done; sleep 600"), contract=False)).create()
    run.supervise()
    try:
        run.wait_state(RunState.RUNNING)
        output = run.paths.attempt(1).stdout
        wait_for(lambda: output.stat().st_size > bytes_printed and on_disk(output) <= OUTPUT_BYTES_MAX, WAIT_SECONDS, run.log_text)

        assert read_text(output, -20, 20)["data"].endswith("y\ndone\n")
        run.order(2, Want.STOP)
        assert run.settle().attempt == 1
    finally:
        run.clean()


def test_what_an_agent_says_on_its_standard_error_is_held_within_one_session(tmp_path: Path) -> None:
    path = tmp_path / "agent.log"
    with open(path, "ab") as file:
        subprocess.run([sys.executable, "-c", TALKER], stderr=file, check=True)

    assert path.stat().st_size > 15_000_000 and on_disk(path) <= STANDARD_ERROR_BYTES_MAX + BLOCK_BYTES
    assert "number=14999" in read_text(path, -2000, 2000)["data"]
