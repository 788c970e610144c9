"""The journal against real files: numbers, trimming, readers beside a writer, damage, and a disk that fills up."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from fleetd.journal import QUEUE_ENTRIES_MAX, Journal, main, salvage
from policies.errors import ExplainedError, JournalDamaged

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")


def test_entries_are_numbered_from_one_and_come_back_in_order(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.append([{"kind": "a"}, {"kind": "b"}])
    journal.append([{"kind": "c", "sequence": 3}], state={"restarts": [1.5]})
    journal.close()

    again = Journal.open(tmp_path / "journal.db")
    assert [(entry["sequence"], entry["kind"]) for entry in again.entries()] == [(1, "a"), (2, "b"), (3, "c")]
    assert [entry["kind"] for entry in again.entries(after=1, limit=1)] == ["b"]
    assert again.state_get("restarts") == [1.5] and again.last == 3 and again.health == "ok" and again.is_durable
    again.close()


def test_an_entry_with_the_wrong_number_is_our_mistake_and_changes_nothing(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    with pytest.raises(AssertionError, match="where 1 is next"):
        journal.append([{"sequence": 2}])
    assert journal.entries() == [] and journal.last == 0
    journal.close()


def test_trimmed_numbers_are_never_given_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.append([{"kind": "a"}, {"kind": "b"}])
    journal.trim(99)
    journal.close()

    again = Journal.open(tmp_path / "journal.db")
    again.append([{"kind": "c"}])
    assert [entry["sequence"] for entry in again.entries()] == [3]
    again.start_after(10)
    again.append([{"kind": "d"}])
    assert [entry["sequence"] for entry in again.entries()] == [3, 11]
    again.close()


def test_a_reader_sees_what_a_living_writer_appends(tmp_path: Path) -> None:
    writer = Journal.open(tmp_path / "journal.db")
    writer.append([{"kind": "a"}])
    reader = Journal.open(tmp_path / "journal.db", read_only=True)
    assert len(reader.entries()) == 1
    writer.append([{"kind": "b"}])
    assert [entry["kind"] for entry in reader.entries(after=1)] == ["b"]
    reader.close()
    writer.close()


def test_what_a_killed_writer_appended_is_there(tmp_path: Path) -> None:
    script = "import os,sys; from pathlib import Path; from fleetd.journal import Journal\n" \
             "j = Journal.open(Path(sys.argv[1])); j.append([{'kind': 'a'}]); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "journal.db")], check=False).returncode == -9
    reader = Journal.open(tmp_path / "journal.db", read_only=True)
    assert [entry["kind"] for entry in reader.entries()] == ["a"]
    reader.close()


def test_damaged_bytes_are_named_with_the_command_that_salvages_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    journal.append([{"kind": "entry", "text": "x" * 500} for _ in range(200)])
    journal.close()
    data = bytearray(path.read_bytes())
    data[40_000:44_000] = b"\x13" * 4000
    path.write_bytes(data)

    with pytest.raises(JournalDamaged) as refusal:
        Journal.open(path)
    assert f"fleetd.journal salvage {path}" in refusal.value.fix and path.read_bytes() == bytes(data), "the bytes are kept"

    assert main(["salvage", str(path)]) == 0
    kept = Journal.open(path)
    numbers = [entry["sequence"] for entry in kept.entries()]
    assert numbers == list(range(1, len(numbers) + 1)) and 0 < len(numbers) < 200
    assert (tmp_path / "journal.db.damaged-1").read_bytes() == bytes(data)
    assert f"kept {len(numbers)} entries" in capsys.readouterr().out
    kept.close()


@pytest.mark.parametrize("flip", [0xFF, 0x01], ids=["no longer text", "still text"])
@pytest.mark.parametrize("where", [b"middle", b"wish"])
def test_a_byte_that_changed_inside_an_entry_or_a_value_is_damage_and_not_history(tmp_path: Path, where: bytes, flip: int) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    journal.append([{"text": "first"}, {"text": "middle"}, {"text": "last"}], state={"order": "wish", "owner": "me"})
    journal.close()
    data = bytearray(path.read_bytes())
    data[data.index(where)] ^= flip  # the shape of the pages stays right: SQLite's own check finds nothing
    path.write_bytes(data)

    with pytest.raises(JournalDamaged, match="damaged") as refusal:
        Journal.open(path).entries()
    assert "not what was written" in refusal.value.what
    assert main(["salvage", str(path)]) == 0
    kept = Journal.open(path)
    assert [entry["text"] for entry in kept.entries()] == (["first"] if where == b"middle" else ["first", "middle", "last"])
    assert (kept.state_get("order"), kept.state_get("owner")) == ("wish" if where == b"middle" else None, "me")
    kept.close()


def test_a_journal_from_before_there_were_checksums_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    Journal.open(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("INSERT INTO entries VALUES (1, ?)", ('{"kind":"a","sequence":1}',))
        connection.execute("INSERT INTO state VALUES ('owner', '\"me\"')")
    connection.close()
    journal = Journal.open(path)
    journal.append([{"kind": "b"}])
    assert [entry["kind"] for entry in journal.entries()] == ["a", "b"] and journal.state_get("owner") == "me"
    journal.close()


@pytest.mark.parametrize("damage", [b"", b"this is no database at all" * 100])
def test_a_file_that_is_no_journal_is_salvaged_to_an_empty_one(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(damage)
    if damage:
        with pytest.raises(JournalDamaged):
            Journal.open(path)
    assert salvage(path, tmp_path / "aside") == 0
    journal = Journal.open(path)
    journal.append([{"kind": "a"}])
    assert journal.last == 1
    journal.close()


def test_a_journal_cut_anywhere_opens_whole_or_says_that_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    for number in range(20):
        journal.append([{"kind": "entry", "number": number, "text": "x" * 400}])
    journal.close()
    data, damaged_count = path.read_bytes(), 0
    for length in range(0, len(data), 997):
        cut = tmp_path / f"cut-{length}.db"
        cut.write_bytes(data[:length])
        try:
            opened = Journal.open(cut)
        except JournalDamaged:
            damaged_count += 1
            continue
        assert length == 0 or [entry["number"] for entry in opened.entries()] == list(range(20))
        opened.close()
    assert damaged_count > 5


def test_a_newer_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    assert journal._connection is not None
    journal._connection.execute("PRAGMA user_version = 7")
    journal.close()
    with pytest.raises(ExplainedError, match="written by a newer fleetd"):
        Journal.open(path)


@pytest.fixture
def small_disk(tmp_path: Path):  # type: ignore[no-untyped-def]
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> Path:
    filler = folder / "filler"
    with open(filler, "wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    return filler


@needs_root
def test_on_a_full_disk_entries_wait_in_memory_and_are_written_when_space_returns(small_disk: Path) -> None:
    path = small_disk / "journal.db"
    journal = Journal.open(path)
    journal.append([{"kind": "before"}])
    filler = fill(small_disk)
    for number in range(60):
        journal.append([{"kind": "during", "number": number, "text": "x" * 2000}], state={"number": number})

    assert "full" in journal.health and "entries wait" in journal.health and not journal.is_durable
    assert journal.last == 61 and journal.state_get("number") == 59

    filler.unlink()
    journal.retry()
    assert journal.health == "ok" and journal.is_durable
    assert [entry["sequence"] for entry in journal.entries()] == list(range(1, 62))
    journal.close()


@needs_root
def test_a_patient_journal_opens_on_a_full_disk_and_an_impatient_one_says_why_not(small_disk: Path) -> None:
    filler = fill(small_disk)
    with pytest.raises(ExplainedError, match="can't be opened"):
        Journal.open(small_disk / "journal.db")
    journal = Journal.open(small_disk / "journal.db", patient=True)
    journal.append([{"kind": "a"}])
    assert not journal.is_known and journal.health.startswith("read-only")
    filler.unlink()
    journal.retry()
    assert journal.is_known and [entry["kind"] for entry in journal.entries()] == ["a"]
    journal.close()


def test_the_queue_is_bounded_and_what_it_loses_is_counted(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "nowhere" / "journal.db", patient=True)
    journal.append([{"kind": "a"}] * (QUEUE_ENTRIES_MAX + 3))
    assert "3 entries lost" in journal.health and journal.last == QUEUE_ENTRIES_MAX



def test_an_entry_that_its_owner_has_numbered_is_never_left_out(tmp_path: Path) -> None:
    """One tick may hold more events than there is room for; leaving one out would end the coordinator at the next number."""
    journal = Journal.open(tmp_path / "nowhere" / "journal.db", patient=True)
    journal.append([{"kind": "a", "sequence": number} for number in range(1, QUEUE_ENTRIES_MAX + 4)])
    journal.append([{"kind": "b", "sequence": QUEUE_ENTRIES_MAX + 4}])
    assert journal.is_crowded and journal.last == QUEUE_ENTRIES_MAX + 4 and "lost" not in journal.health


def test_behind_damage_counting_goes_on_where_no_lost_entry_was_numbered(tmp_path: Path) -> None:
    path, told = tmp_path / "journal.db", set[int]()
    journal = Journal.open(path)
    journal.append([{"kind": "entry", "text": "x" * 500} for _ in range(200)])
    journal.close()
    for losses in (1, 2):
        told |= {entry["sequence"] for entry in Journal.open(path, read_only=True).entries()}
        data = bytearray(path.read_bytes())
        data[40_000:44_000] = b"\x13" * 4000
        path.write_bytes(data)
        kept = salvage(path, tmp_path / f"aside-{losses}", start_after=losses * 1000)
        journal = Journal.open(path)
        assert 0 < kept < 200 and journal.last not in told, "what is told next is told under a number of its own"
        journal.append([{"kind": "entry", "text": "x" * 500} for _ in range(200)])
        assert not told & {entry["sequence"] for entry in journal.entries(after=kept)}
        journal.close()


def test_a_salvage_that_is_told_no_number_goes_on_right_behind_what_it_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    journal = Journal.open(path)
    journal.append([{"kind": "entry"} for _ in range(3)], state={"wish": "run"})
    journal.close()
    assert salvage(path, tmp_path / "aside") == 3
    again = Journal.open(path)
    again.append([{"kind": "entry"}])
    assert [entry["sequence"] for entry in again.entries()] == [1, 2, 3, 4] and again.state_get("wish") == "run"
    again.close()
