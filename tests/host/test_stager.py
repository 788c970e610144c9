"""What receives a tree on a host, spoken to over pipes: what it refuses, what it keeps, and what it forgets."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetd.host.stager import FORGET_SECONDS

DOOR = Path(__file__).resolve().parents[2] / "fleetd" / "host" / "__main__.py"
DIGEST = "ab" * 32


def listed(**files: bytes) -> list[list[Any]]:
    return [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in files.items()]


class Talk:
    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(DOOR), "stager", str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
        )

    def say(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def frame(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(len(data).to_bytes(8, "big") + data)

    def hear(self, *words: str) -> dict[str, Any]:
        """The next answer with one of these words, or a refusal."""
        assert self.process.stdout is not None
        while True:
            answer: dict[str, Any] = json.loads(self.process.stdout.readline())
            if answer["ok"] is not True or any(word in answer for word in words):
                return answer

    def begin(self, files: list[list[Any]], digest: str = DIGEST) -> dict[str, Any]:
        self.say(do="begin", kind="datasets", digest=digest, files=files)
        return self.hear("present")

    def leave(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(100.0)
        self.process.stdout.close()


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Callable[[], Talk]]:
    made: list[Talk] = []

    def begin() -> Talk:
        made.append(Talk(tmp_path))
        return made[-1]

    yield begin
    for each in made:
        each.leave()


def test_frames_become_the_tree_and_half_of_it_is_kept_when_nobody_speaks_any_more(talk: Callable[[], Talk], tmp_path: Path) -> None:
    files = listed(a=b"first", b=b"second")
    cut = talk()
    assert cut.begin(files)["have"] == {}
    cut.say(do="take", **{"from": {}})
    cut.frame(b"first")
    cut.frame(b"sec")
    cut.leave()
    assert sorted(path.name for path in (tmp_path / "datasets").iterdir()) == [f".lock-{DIGEST}", f".tmp-{DIGEST}"]

    again = talk()
    have = again.begin(files)["have"]
    assert have == {"a": [5, hashlib.sha256(b"first").hexdigest()], "b": [3, hashlib.sha256(b"sec").hexdigest()]}
    again.say(do="take", **{"from": {"a": 5, "b": 3}})
    again.frame(b"ond")
    assert again.hear("placed")["placed"] is True
    assert [path.name for path in (tmp_path / "datasets").iterdir()] == [DIGEST]
    assert (tmp_path / "datasets" / DIGEST / "b").read_bytes() == b"second"


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../up"])
def test_no_file_leads_out_of_the_tree(talk: Callable[[], Talk], tmp_path: Path, path: str) -> None:
    answer = talk().begin([[path, 1, hashlib.sha256(b"x").hexdigest()]])

    assert (answer["ok"], answer["kind"]) == (False, "order") and "leads out" in answer["what"]
    assert not (tmp_path / "up").exists()


def test_one_tree_is_brought_by_one_at_a_time_and_two_trees_side_by_side(talk: Callable[[], Talk]) -> None:
    first, second = talk(), talk()
    first.begin(listed(a=b"1"))

    assert second.begin(listed(a=b"1"))["kind"] == "busy"
    assert second.begin(listed(a=b"2"), digest="cd" * 32)["have"] == {}


def test_who_gives_up_leaves_nothing_and_more_than_was_announced_is_refused(talk: Callable[[], Talk], tmp_path: Path) -> None:
    for frames, answer in (([b"1", b""], {"ok": True, "dropped": True}), ([b"12345"], None)):
        one = talk()
        one.begin(listed(a=b"123"))
        one.say(do="take", **{"from": {}})
        for data in frames:
            one.frame(data)
        heard = one.hear("dropped", "placed")
        assert heard == answer if answer else heard["kind"] == "order"
        assert list((tmp_path / "datasets").iterdir()) == []


def test_a_half_tree_that_nobody_goes_on_with_is_forgotten_and_a_young_one_is_not(talk: Callable[[], Talk], tmp_path: Path) -> None:
    old, young, held = (tmp_path / "datasets" / f".tmp-{letter * 64}" for letter in "123")
    for folder in (old, young, held):
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(b"part")
    busy = talk()
    busy.begin(listed(part=b"partner"), digest="3" * 64)
    for path in (old / "part", old, held / "part", held):
        os.utime(path, (path.stat().st_mtime - FORGET_SECONDS - 60,) * 2)
    talk().begin(listed(a=b"1"))

    assert not old.exists() and young.exists() and held.exists()
