"""A real journal of two lives, the second killed in the middle, cut at every byte: what opens is a prefix, and all else says how to recover.

CI cuts at every eleventh byte and around each page and frame; CHAOS_STRIDE=1 cuts at every one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetd.journal import Journal, main
from policies.errors import JournalDamaged

STRIDE = int(os.environ.get("CHAOS_STRIDE", "11"))
PAGE_BYTES, FRAME_BYTES, LOG_HEADER_BYTES = 4096, 4096 + 24, 32
LIFE = """
import os, signal, sys
from pathlib import Path
from fleetd.journal import Journal
journal = Journal.open(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    journal.append([{"kind": "entry", "text": "x" * 300}], state={"number": number})
os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "killed" else journal.close()
"""


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory whose syncs cost nothing, where the machine has one: thousands of journals are opened in it."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="fleetd-test-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def two_lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    """The file and its write-ahead log, as the second life left them: nine entries in the file, four more in the log alone."""
    path = tmp_path_factory.mktemp("lives") / "journal.db"
    for count, end in ((9, "closed"), (4, "killed")):
        subprocess.run([sys.executable, "-c", LIFE, str(path), str(count), end], check=False)
    return path.read_bytes(), Path(f"{path}-wal").read_bytes()


def places(length: int, first: int, every: int) -> list[int]:
    """Where to cut: every STRIDE-th byte, and the bytes around each boundary."""
    near = {edge + shift for edge in range(first, length + 1, every) for shift in (-1, 0, 1)}
    return sorted({0, 1, 2, length, *range(0, length, STRIDE), *(place for place in near if 0 <= place <= length)})


def opens(folder: Path, data: bytes, log: bytes | None) -> str:
    """`whole`, `prefix` or `damaged`; anything else fails the test."""
    path = folder / "journal.db"
    for name, content in (("journal.db", data), ("journal.db-wal", log)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_bytes(content)
    (folder / "journal.db-shm").unlink(missing_ok=True)
    damage, numbers = "", []
    try:
        journal = Journal.open(path)
        numbers = [entry["sequence"] for entry in journal.entries()]
        journal.close()
    except JournalDamaged as fault:
        damage = fault.fix
    if damage:
        assert f"fleetd.journal salvage {path}" in damage
        assert path.read_bytes() == data and (log is None or Path(f"{path}-wal").read_bytes() == log), "the bytes are kept"
        return "damaged"
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 9, "a prefix, and never less than what the file holds"
    return "whole" if len(numbers) == 13 else "prefix"


def test_a_log_cut_anywhere_gives_a_prefix(two_lives: tuple[bytes, bytes], quick_path: Path) -> None:
    data, log = two_lives
    cuts = places(len(log), LOG_HEADER_BYTES, FRAME_BYTES)

    found = Counter(opens(quick_path, data, log[:length]) for length in cuts)

    assert found["damaged"] == 0 and found["whole"] == 1, "only the whole log holds the last entry"
    assert found["prefix"] == len(cuts) - 1


@pytest.mark.parametrize("with_log", [True, False])
def test_a_file_cut_anywhere_is_whole_again_from_its_log_or_says_how_to_recover(
    two_lives: tuple[bytes, bytes], quick_path: Path, with_log: bool
) -> None:
    data, log = two_lives
    cuts = places(len(data), PAGE_BYTES, PAGE_BYTES)

    found = {length: opens(quick_path, data[:length], log if with_log else None) for length in cuts}

    assert found[0] == found[1] == "damaged", "an empty file is a lost journal, and its log is kept"
    assert found[len(data)] == ("whole" if with_log else "prefix")
    between = {found[length] for length in cuts[2:-1]}
    assert between == ({"whole"} if with_log else {"damaged"})


def test_what_is_salvaged_is_a_prefix_and_goes_on(two_lives: tuple[bytes, bytes], quick_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, log = two_lives
    for number, length in enumerate(range(0, len(data), len(data) // 7)):
        folder = quick_path / str(number)
        folder.mkdir()
        (folder / "journal.db").write_bytes(data[:length])
        (folder / "journal.db-wal").write_bytes(log[:FRAME_BYTES])

        assert main(["salvage", str(folder / "journal.db")]) == 0

        journal = Journal.open(folder / "journal.db")
        kept = [entry["sequence"] for entry in journal.entries()]
        journal.append([{"kind": "next"}])
        assert [entry["sequence"] for entry in journal.entries()] == [*kept, journal.last]
        journal.close()
        assert (folder / "journal.db.damaged-1").read_bytes() == data[:length]
    assert "kept" in capsys.readouterr().out


def test_a_journal_whose_making_was_cut_short_is_made_again(tmp_path: Path) -> None:
    purse = tmp_path / "purse"
    purse.mkdir()
    (purse / "coin-0").touch()
    path = tmp_path / "journal.db"
    script = tmp_path / "maker.py"
    script.write_text(LIFE, encoding="utf-8")
    environment = {**os.environ, "FLEETD_FAULT": f"maker:journal made:kill:{purse}", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}

    died = subprocess.run([sys.executable, "-m", "maker", str(path), "1", "closed"], cwd=tmp_path, env=environment, check=False)

    assert died.returncode == -9 and not path.exists() and list(_temporaries(tmp_path))
    journal = Journal.open(path)
    journal.append([{"kind": "first"}])
    assert journal.last == 1 and journal.health == "ok"
    journal.close()


def _temporaries(folder: Path) -> Iterator[Path]:
    yield from folder.glob(".journal.db-*.tmp")
