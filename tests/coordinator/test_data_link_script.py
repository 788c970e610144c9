"""What a neighbour is asked to run, by a real sh on real files: the missing bytes in order, whatever the files are called."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetd.coordinator import data_link
from fleetd.coordinator.data_link import NoLink, script

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20).filter(lambda name: name not in (".", ".."))
FILES = st.lists(st.tuples(NAMES, st.binary(max_size=50), st.integers(0, 60)), max_size=8, unique_by=lambda each: each[0])


@settings(max_examples=25, deadline=None)
@given(files=FILES)
def test_the_missing_bytes_come_in_order_whatever_the_files_are_called(
    tmp_path_factory: pytest.TempPathFactory, files: list[tuple[str, bytes, int]],
) -> None:
    folder = tmp_path_factory.mktemp("tree") / "it's a $(tree)"
    folder.mkdir()
    for name, data, _ in files:
        (folder / name).write_bytes(data)
    listed = [[name, len(data), ""] for name, data, _ in files]
    offsets = {name: min(offset, len(data)) for name, data, offset in files if offset}
    text = script(str(folder), listed, offsets, ("one", "two"))
    done = subprocess.run(["sh"], input=text.encode(), capture_output=True, check=True)

    assert "onetwo" not in text, "what is sent must not look like the answer"
    assert done.stdout == b"onetwo\n" + b"".join(data[offsets.get(name, 0):] for name, data, _ in files)


def test_many_small_files_are_few_programs_and_a_list_without_end_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [[f"part-{number:06}", 1, ""] for number in range(20_000)]
    assert script("/tree", files, {}, ("a", "b")).count("cat --") < 20
    monkeypatch.setattr(data_link, "WORDS_BYTES_MAX", 1000)
    with pytest.raises(NoLink, match="20000 files is too long"):
        script("/tree", files, {}, ("a", "b"))
