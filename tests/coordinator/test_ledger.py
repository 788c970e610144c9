"""The ledger: a chain in which every edited byte shows, and which a crash or a full disk can't break."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from campaign_kit import ACT, flip_byte

from fleetd.coordinator.ledger import GENESIS, Ledger, LedgerEntry, enter, read_ledger
from policies.errors import FreezeRefused, LedgerDamaged, RequestRefused
from policies.freeze import TORN


@pytest.fixture
def ledger(quick_path: Path) -> Path:
    path = quick_path / "ledger.jsonl"
    for number in range(3):
        enter(path, "opened", {"split": "test", "number": number, "because": "weil: 日本語"}, ACT)
    return path


def test_entries_are_numbered_chained_and_say_who_when_and_with_which_code(ledger: Path) -> None:
    found = read_ledger(ledger)
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [entry.sequence for entry in found.entries] == [1, 2, 3]
    assert [line["prev"] for line in lines] == [GENESIS, lines[0]["hash"], lines[1]["hash"]]
    assert (lines[0]["at"], lines[0]["code"], lines[0]["event"]["actor"]) == ("2026-09-16T18:59:10.000000Z", "c0de", "user:tester")
    assert ledger.stat().st_mode & 0o077 == 0


def test_every_single_edited_byte_is_found(ledger: Path) -> None:
    whole = ledger.read_bytes()
    unseen = []
    for place in range(len(whole)):
        for bit in (1, 0x20):
            data = bytearray(whole)
            data[place] ^= bit
            ledger.write_bytes(data)
            try:
                read_ledger(ledger)
                unseen.append((place, bit))
            except LedgerDamaged:
                pass
    assert unseen == []


def test_a_removed_swapped_or_repeated_entry_is_found(ledger: Path) -> None:
    first, second, third = ledger.read_bytes().splitlines(keepends=True)
    for lines in ([second, third], [first, third], [second, first, third], [first, second, second, third], [first, b"\n", second, third]):
        ledger.write_bytes(b"".join(lines))
        with pytest.raises(LedgerDamaged):
            read_ledger(ledger)


def test_nothing_is_added_to_a_damaged_ledger(ledger: Path) -> None:
    flip_byte(ledger, 40)
    before = ledger.read_bytes()
    with pytest.raises(LedgerDamaged) as caught:
        enter(ledger, "opened", {}, ACT)
    assert ledger.read_bytes() == before
    assert "entry 1" in caught.value.where


def test_a_last_line_cut_short_at_any_byte_is_kept_aside_and_entered(ledger: Path) -> None:
    whole = ledger.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start + 1, len(whole) - 1, 7):
        ledger.write_bytes(whole[:cut])
        assert read_ledger(ledger).torn == whole[start:cut]
        entry = enter(ledger, "judged", {"split": "test"}, ACT)
        found = read_ledger(ledger)
        assert [each.kind for each in found.entries] == ["opened", "opened", TORN, "judged"]
        assert found.entries[-1] == entry
        aside = ledger.with_name(found.entries[2].body["kept_in"])
        assert aside.read_bytes() == whole[start:cut]
        aside.unlink()


def test_a_complete_last_entry_that_only_lost_its_line_end_is_kept(ledger: Path) -> None:
    whole = ledger.read_bytes()
    ledger.write_bytes(whole[:-1])
    assert len(read_ledger(ledger).entries) == 3
    enter(ledger, "judged", {}, ACT)
    assert ledger.read_bytes().startswith(whole)
    assert len(read_ledger(ledger).entries) == 4


def test_a_complete_last_entry_with_something_behind_it_is_damage_and_not_a_torn_line(ledger: Path) -> None:
    whole = ledger.read_bytes()
    for tail in (b"x", b" ", b"{", b"\0"):
        ledger.write_bytes(whole[:-1] + tail)
        with pytest.raises(LedgerDamaged):
            enter(ledger, "judged", {}, ACT)
        assert ledger.read_bytes() == whole[:-1] + tail


def test_what_stands_already_is_given_back_and_a_refusal_adds_nothing(ledger: Path) -> None:
    before = ledger.read_bytes()
    assert enter(ledger, "opened", {}, ACT, unless=lambda found: found.entries[1]).sequence == 2

    def refuse(found: object) -> LedgerEntry | None:
        raise FreezeRefused("no", where="w", what="w", fix="f")

    with pytest.raises(FreezeRefused):
        enter(ledger, "opened", {}, ACT, unless=refuse)
    assert ledger.read_bytes() == before


def test_many_writers_at_once_leave_one_chain_and_one_first_entry(quick_path: Path) -> None:
    path = quick_path / "ledger.jsonl"

    def slowly(found: Ledger) -> LedgerEntry | None:
        time.sleep(0.002)  # long enough for the others to come in between, if nothing kept them out
        return found.first("frozen")

    def write(number: int) -> None:
        for turn in range(5):
            enter(path, "opened", {"number": number, "turn": turn}, ACT)
        enter(path, "frozen", {"number": number}, ACT, unless=slowly)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kinds = [entry.kind for entry in read_ledger(path).entries]
    assert (kinds.count("opened"), kinds.count("frozen")) == (30, 1)


def test_a_full_disk_leaves_the_ledger_as_it_was(small_disk: Path) -> None:
    path = small_disk / "ledger.jsonl"
    enter(path, "registered", {}, ACT)
    before = path.read_bytes()
    with open(small_disk / "filler", "wb") as filler:
        try:
            while True:
                os.write(filler.fileno(), b"x" * 4096)
        except OSError:
            pass
    with pytest.raises(RequestRefused, match="ledger"):
        enter(path, "opened", {"because": "y" * 20000}, ACT)
    assert path.read_bytes() == before
    (small_disk / "filler").unlink()
    assert enter(path, "opened", {}, ACT).sequence == 2
